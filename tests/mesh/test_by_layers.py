"""Scanned layers that are gathered one at a time: gradients, what is sent and kept."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from jax_muon import jaxprs
from jax_muon.mesh import prefetch, transfers
from jax_muon.notes import listening
from tests.mesh import losses
from tests.mesh.layouts import AUTO, EXPLICIT, mesh_of

pytestmark = pytest.mark.usefixtures("as_users_write")

SPECS = {
    "layers": {"w": P(None, None, "data"), "b": P(None, "data")},
    "head": P("data"),
    "scale": P(),
}


def make(loss, *shape, specs=SPECS, names=("data", "fsdp"), kind=AUTO, **given):
    """A step of plain SGD, which moves parameters by their gradients."""
    mesh = mesh_of(*(shape or (4,)), names=names, kind=kind)
    given = {"axis": mesh.axis_names, "min_size": 1, "donate": False} | given
    return jm.make_train_step(loss, optax.sgd(1.0), mesh, specs=specs, **given)


def gradients(step, params, batch):
    """Those that a step used, its metrics, and which leaves had to be whole."""
    with listening() as notes:
        after, _, metrics = step(*step.init(params), batch)
    assert step._jitted._cache_size() == 1
    whole = {path for path, how in notes["gathered"].items() if "whole" in how}
    moved = jax.tree.map(lambda p, q: np.array(p) - np.array(q), params, after)
    return moved, metrics, whole


def assert_close(found, expected, bound=5e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound),
        found,
        expected,
    )


def shapes_within(jaxpr):
    """Shapes and dtypes of all values of a program, and of those that are gathered."""
    found = [], []
    for eqn in jaxprs.operations(jaxpr):
        kinds = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars]
        found[0].extend(kinds)
        found[1].extend(kinds if eqn.primitive.name == "all_gather" else [])
    return found


def program_of(step, batch, dtype=jnp.float32):
    """The shapes of the part of a step that computes gradients."""
    args = *step.abstract(losses.draw(dtype)), batch
    jaxpr = jax.make_jaxpr(lambda *args: step._step(*args))(*args).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"][:1]
    return shapes_within(eqn.params["jaxpr"])


# Of all layers' weights, as a loss may have reshaped them.
WHOLE = {(4, 8, 8), (3, 8, 8), (2, 2, 8, 8), (2, 2, 8), (8, 4, 8)}


def whole_layers(step, batch):
    return [shape for shape, _ in program_of(step, batch)[0] if shape in WHOLE]


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients_in_float64(name, x64):
    """And no device has all layers: neither gathered at once, nor kept one by one."""
    loss, alone, others = losses.LOSSES[name]
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    value, expected = jax.jit(jax.value_and_grad(alone))(params, batch)
    step = make(loss)
    found, metrics, whole = gradients(step, params, batch)
    bound = 1e-7 if "casts" in name else 1e-12  # casts to float32
    assert_close(found, expected, bound)
    np.testing.assert_allclose(metrics["loss"], value, rtol=bound)
    assert whole - {"head"} == others
    assert bool(whole_layers(step, batch)) == bool(others)


@pytest.mark.parametrize("loss", [losses.in_reverse, losses.of_scans_of_others])
def test_gradients_that_many_devices_scatter_late(loss, x64, monkeypatch):
    """All of a layer's in one go, while the next layer runs."""
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    monkeypatch.setattr(transfers, "MANY_DEVICES", 3)
    found, _, _ = gradients(make(loss), params, batch)
    assert_close(found, jax.jit(jax.grad(loss))(params, batch), 1e-12)


@pytest.mark.parametrize(
    "loss", [losses.in_reverse, losses.of_casts_of_the_second_axis, losses.of_all_kinds]
)
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_gradients_in_two_levels(loss, keep_gathered, x64):
    """Within a host, "fsdp", and between hosts, "data"."""
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    how = jm.Transfers(gather="levels", keep_gathered=keep_gathered)
    given = {"axis": ("fsdp", "data"), "transfers": how}
    step = make(loss, 2, 2, specs=SPECS | LEVELS, **given)
    found, _, whole = gradients(step, params, batch)
    bound = 1e-7 if "casts" in loss.__name__ else 1e-12  # casts to float32
    assert_close(found, jax.jit(jax.grad(loss))(params, batch), bound)
    assert whole == {"head"}


@pytest.mark.parametrize(
    ("given", "gathered", "summed"),
    [
        ({}, 1, 0),
        ({"transfers": jm.Transfers(keep_gathered=True)}, 1, 0),
        ({"microbatches": 2}, 2, 0),
        ({"transfers": jm.Transfers(gather="leaves")}, 0, 0),
        ({"transfers": jm.Transfers(gather="levels")}, 2, 2),
    ],
)
def test_plan_counts_what_layers_send(given, gathered, summed):
    """Between two hosts of two, but for the layers at an end, which are sent again."""
    given = {"axis": ("fsdp", "data"), "parameters": "divided"} | given
    step = make(losses.in_reverse, 2, 2, specs=None, **given)
    args = *step.abstract(losses.draw()), losses.samples()
    sent = collectives(step._step, *args)
    planned = jm.describe(step.tx, args[0], devices_per_host=2).bytes_between_hosts
    # Of a layer's (8, 8) and (8,): the ring over all four sends 3/4, through two cards.
    layer = 4 * (8 * 8 + 8) * (1 / 4 if summed else 3 / 8)
    for kind, what, again in (
        ("all-gather", "gathers", gathered),
        ("reduce-scatter", "gradients", summed),
    ):
        counted = sum(c.bytes_between_hosts(2) for c in sent if c.kind == kind)
        assert counted == planned[what] + again * layer > 0


@pytest.mark.parametrize("spec", [P("fsdp", "data"), P("data", "fsdp")])
def test_two_levels_of_two_dimensions(spec):
    """Between hosts a device exchanges its part alone, whichever axis is divided so."""
    wire = transfers.Wire(
        ("fsdp", "data"), transfers.Transfers(gather="levels"), sum_wide=False
    )

    def exchange(x):
        whole = wire.gather(x, spec)
        return wire.scatter(whole, spec, x.dtype, wire.axis)

    x = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    exchange = jax.jit(
        jax.shard_map(exchange, mesh=mesh_of(2, 2), in_specs=spec, out_specs=spec)
    )
    np.testing.assert_array_equal(exchange(x), 4 * x)
    sent = {c.kind: 0.0 for c in collectives(exchange, x)}
    for collective in collectives(exchange, x):
        sent[collective.kind] += collective.bytes_between_hosts(2)
    assert sent == {"all-gather": x.nbytes / 4, "reduce-scatter": x.nbytes / 4}


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_loops(x64, length, reverse, hops):
    """Gathers run ahead of the last layers there are, and scatters behind."""

    def run(consts, carry, layer, xs):
        h = jnp.tanh(carry[0] @ layer[0] + consts[0] * xs[0])
        return [h], [2 * h + xs[0]]

    def scanned(scan):
        def loss(consts, carry, layers, xs):
            (h,), (y,) = scan([consts], [carry], [layers], [xs])
            return jnp.sum(h**2) + jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1, 2, 3))

    def plain(consts, carry, layers, xs):
        step = functools.partial(run, consts)
        return jax.lax.scan(
            lambda carry, x: step(carry, *x), carry, (layers, xs), reverse=reverse
        )

    loop, same = prefetch.Loop(length, reverse, 1), [list] * hops
    ahead = prefetch.scan(run, same, same, loop, keep_gathered=False, late=hops == 2)
    draw = np.random.default_rng(0).standard_normal
    args = draw(3), draw(3), draw((length, 3, 3)), draw((length, 3))
    args = tuple(map(jnp.asarray, args))
    assert_close(scanned(ahead)(*args), scanned(plain)(*args), 1e-12)


def test_what_two_levels_cannot_do():
    """Hosts before devices in a spec, or one axis alone."""
    params, batch = losses.draw(), losses.samples()
    with pytest.raises(
        ValueError, match="expected with gather='levels' an axis within"
    ):
        make(losses.scan, transfers=jm.Transfers(gather="levels"))
    specs = SPECS | {"layers": {"w": P(None, ("data", "fsdp")), "b": P()}}
    given = {"axis": ("fsdp", "data"), "transfers": jm.Transfers(gather="levels")}
    step = make(losses.scan, 2, 2, specs=specs, **given)
    with pytest.raises(ValueError, match=r"'layers/w' has .* before 'fsdp'"):
        step(*step.init(params), batch)


# Over one axis of the batch gradients are scattered by layers, over the other after.
FSDP = {"layers": {"w": P(None, "fsdp"), "b": P(None, "fsdp")}, "head": P("fsdp")}
LEVELS = {
    "layers": {"w": P(None, None, ("fsdp", "data")), "b": P(None, "fsdp")},
    "head": P(("data", "fsdp")),
}
TP = {"layers": {"w": P(None, "data", "tp"), "b": P(None, "tp")}}
FORMS = {
    "microbatches": (losses.scan, (4,), {"microbatches": 2}),
    "microbatches of several scans": (losses.of_scans, (4,), {"microbatches": 2}),
    "kept": (losses.of_scans, (4,), {"transfers": jm.Transfers(keep_gathered=True)}),
    "Explicit": (losses.scan, (4,), {"kind": EXPLICIT}),
    "divided": (
        losses.of_scans,
        (4,),
        {"parameters": "divided", "specs": {**SPECS, "head": P()}},
    ),
    "leaves": (losses.scan, (4,), {"transfers": jm.Transfers(gather="leaves")}),
    "HSDP": (losses.scan, (2, 2), {"specs": SPECS | FSDP}),
    "HSDP, divided": (
        losses.scan,
        (2, 2),
        {"specs": SPECS | FSDP, "parameters": "divided"},
    ),
    "levels": (
        losses.of_scans,
        (2, 2),
        {
            "specs": SPECS | LEVELS,
            "axis": ("fsdp", "data"),
            "transfers": jm.Transfers(gather="levels"),
        },
    ),
    "levels, divided": (
        losses.scan,
        (2, 2),
        {
            "specs": SPECS | FSDP,
            "parameters": "divided",
            "axis": ("fsdp", "data"),
            "transfers": jm.Transfers(gather="levels"),
            "microbatches": 2,
        },
    ),
    "TP": (
        losses.with_keys,
        (2, 2),
        {"specs": SPECS | TP, "names": ("data", "tp"), "axis": "data"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    loss, shape, given = FORMS[form]
    params, batch = losses.draw(), losses.samples()
    found, _, whole = gradients(make(loss, *shape, **given), params, batch)
    assert_close(found, jax.jit(jax.grad(loss))(params, batch))
    assert ("head" in whole) == (form != "leaves")
    assert not whole & losses.LEAVES


def test_other_axes_stay_divided():
    """Along "data" a device exchanges nothing but its own half of what "tp" divides."""
    specs = SPECS | TP | {"head": P("tp", "data")}
    step = make(losses.scan, 4, 2, specs=specs, names=("data", "tp"), axis="data")
    args = *step.abstract(losses.draw()), losses.samples()
    program = Module.parse(step.lower(*args).compile().as_text())

    def most(kind, of_layers):
        """Elements of the largest whole array that is gathered, or scattered."""
        return max(
            t.input_bytes // 4 * (t.devices if kind == "all-gather" else 1)
            for t in program.transfers()
            if t.kind == kind and ("/while" in t.name) == of_layers and 2 in t.members
        )

    for kind in ("all-gather", "reduce-scatter"):
        assert most(kind, of_layers=True) == 8 * 8 // 2
        assert most(kind, of_layers=False) == 8 * 24 // 2


def test_one_dimension_over_both_kinds_of_axes(x64):
    """Layers of which "tp" divides the same axis as "data"."""
    layers = {"w": P(None, ("data", "tp")), "b": P(None, ("tp", "data"))}
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    names = {"names": ("data", "tp"), "axis": "data"}
    step = make(losses.scan, 4, 2, specs=SPECS | {"layers": layers}, **names)
    found, _, _ = gradients(step, params, batch)
    assert_close(found, jax.jit(jax.grad(losses.scan))(params, batch), 1e-12)


def test_weights_that_differ_between_devices():
    """The samples of one device do not count: the mean of none of them is NaN."""
    mask = jnp.ones(16).at[:4].set(0).at[9].set(0)
    params, samples = losses.draw(), losses.samples()

    def loss(params, batch):
        x, mask = batch
        count = jnp.sum(mask)
        y, _ = jax.lax.scan(
            lambda y, w: (losses._layer(y, w), None), x, params["layers"]
        )
        terms = jnp.mean(jnp.sin(y * params["scale"]) @ params["head"], axis=1)
        return jnp.sum(terms * mask) / count, count

    expected = jax.grad(lambda p: loss(p, (samples, mask))[0])(params)
    step = make(loss, weighted=True, microbatches=2)
    found, _, whole = gradients(step, params, (samples, mask))
    assert_close(found, expected)
    assert whole == {"head"}


def test_kept_layers_are_gathered_once():
    step = make(losses.scan, transfers=jm.Transfers(keep_gathered=True))
    batch = losses.samples()
    assert (4, 8, 8) in whole_layers(step, batch)
    sent, more = (program_of(x, batch)[1] for x in (step, make(losses.scan)))
    assert len(more) > len(sent)


@pytest.mark.parametrize(
    ("stored", "used"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_casts_are_sent_in_the_narrower_dtype(stored, used):
    """And the sum of gradients of float32 masters is in their own dtype."""

    def loss(params, x):
        layers = jax.tree.map(lambda w: w.astype(used), params["layers"])
        x, _ = jax.lax.scan(lambda y, w: (losses._layer(y, w), None), x, layers)
        return jnp.mean(x.astype(jnp.float32) * params["scale"])

    batch, step = losses.samples().astype(used), make(loss)
    _, sent = program_of(step, batch, stored)
    assert {dtype for shape, dtype in sent if shape in ((8, 8), (8,))} == {"bfloat16"}
    params = losses.draw(stored)
    found, _, _ = gradients(step, params, batch)
    bound = 1e-3 if stored == "float32" else 1e-2
    assert_close(found, jax.grad(loss)(params, batch), bound)


@pytest.mark.parametrize("wire", ["gather_dtype", "reduce_dtype"])
def test_dtypes_on_the_wire(wire):
    params, batch = losses.draw(), losses.samples()
    expected = jax.jit(jax.grad(losses.scan))(params, batch)
    how = jm.Transfers(**{wire: "bfloat16"})
    found, _, _ = gradients(make(losses.scan, transfers=how), params, batch)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected))
    assert 1e-5 < error / optax.tree.norm(expected) < 2e-2


def test_prints_happen_once_for_each_layer(capfd):
    def loss(params, x):
        def step(x, layer):
            jax.debug.print("a layer of {}", x.size)
            return losses._layer(x, layer), None

        return jnp.mean(jax.lax.scan(step, x, params["layers"])[0])

    step = make(loss)
    jax.block_until_ready(step(*step.init(losses.draw()), losses.samples()))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("a layer of 32") == 4 * losses.LAYERS  # on each of 4 devices


# --- frameworks -----------------------------------------------------------------------


class Block(nn.Module):
    """A layer for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(nn.tanh(nn.Dense(16)(x))), None


class Linen(nn.Module):
    """Rematerialized, scanned blocks."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        x, _ = layers(name="blocks")(x, None)
        return nn.Dense(4, name="head")(x)


class NnxBlock(nnx.Module):
    """Attention and MLP."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Nnx(nnx.Module):
    """Blocks that are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(NnxBlock)(rngs.split(4))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        forward = nnx.scan(
            nnx.remat(lambda x, block: block(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return self.head(forward(x, self.blocks))


def linen(x):
    model = Linen()
    return model.init(jax.random.key(0), x), model.apply


def of_nnx(x):
    graph, params, others = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)
    pairs = lambda x: jnp.stack([x, -x], axis=1)  # noqa: E731
    return params, lambda params, x: nnx.merge(graph, params, others)(pairs(x))


@pytest.mark.parametrize("framework", [linen, of_nnx])
def test_frameworks(framework):
    """Blocks, and no other parameters, are gathered a layer at a time."""
    batch = losses.samples()
    params, apply = framework(batch)
    loss = lambda params, x: jnp.mean(jnp.sin(apply(params, x)))  # noqa: E731
    step = make(loss, specs=None, parameters="divided")
    found, _, whole = gradients(step, params, batch)
    assert_close(found, jax.jit(jax.grad(loss))(params, batch))
    ways = step.gathers(params, batch)
    assert {path for path in ways if "blocks" not in path} == whole
    assert all("head" in path for path in whole)
    assert len(ways) > len(whole) > 0


# --- in plain jit ---------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "keep"), [(AUTO, False), (EXPLICIT, True)])
def test_scan_layers(kind, keep, x64):
    """On Auto axes by specs, on Explicit ones by types; "tp" stays where it is."""
    mesh = mesh_of(4, 2, names=("data", "tp"), kind=kind)
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    expected = jax.jit(jax.grad(losses.with_keys))(params, batch)
    specs = {"w": P(None, "data"), "b": P(None, "data")}
    if kind == AUTO:
        specs["w"] = P(None, "data", "tp")
    places = {"layers": specs, "head": P(), "scale": P()}
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(put, places, params)
    scan = functools.partial(jm.scan_layers, mesh=mesh, axis="data", keep_gathered=keep)
    if kind == AUTO:
        scan = functools.partial(scan, specs=(specs, P()))

    gradient = jax.jit(jax.grad(functools.partial(losses.with_keys, scan=scan)))
    with jax.set_mesh(mesh):
        found = gradient(placed, put(P("data"), batch))
    assert_close(found, expected, 1e-12)
    for name, x in found["layers"].items():
        assert x.sharding.is_equivalent_to(placed["layers"][name].sharding, x.ndim)


def test_scan_layers_within_a_train_step():
    """A plain scan, which the step looks into: the same model does for both."""
    mesh = mesh_of(4, names=("data",))
    scan = functools.partial(jm.scan_layers, mesh=mesh)
    params, batch = losses.draw(), losses.samples()
    expected = jax.jit(jax.grad(losses.with_keys))(params, batch)
    step = make(functools.partial(losses.with_keys, scan=scan))
    found, _, whole = gradients(step, params, batch)
    assert_close(found, expected)
    assert whole == {"head"}


def test_scan_layers_with_integers_under_one_spec():
    """They have no gradient, so they are gathered before the scan."""
    mesh = mesh_of(4, names=("data",))
    x, w = jnp.ones(8), jnp.linspace(0.5, 1.5, 24).reshape(3, 8)
    places = jnp.arange(24).reshape(3, 8) % 8

    def block(x, layer):
        return jnp.sin(x * layer["w"])[layer["places"]], None

    def loss(w, scan):
        return jnp.sum(scan(block, x, {"w": w, "places": places})[0])

    scan = functools.partial(jm.scan_layers, mesh=mesh, specs=P(None, "data"))
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(w)
    assert_close(found, jax.grad(functools.partial(loss, scan=jax.lax.scan))(w))


def test_no_layers_at_all():
    """A model of zero layers, which tests of other parts of a program have."""
    params, batch = losses.draw(), losses.samples()
    params["layers"] = jax.tree.map(lambda w: w[:0], params["layers"])

    def loss(params, x, scan=jax.lax.scan):
        step = lambda y, w: (losses._layer(y, w), None)  # noqa: E731
        x, _ = scan(step, x * params["scale"], params["layers"])
        return jnp.mean(x @ params["head"])

    expected = jax.grad(loss)(params, batch)
    assert_close(gradients(make(loss), params, batch)[0], expected)
    mesh, specs = mesh_of(4, names=("data",)), SPECS["layers"]
    scan = functools.partial(jm.scan_layers, mesh=mesh, specs=specs)
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(params, batch)
    assert_close(found, expected)


def test_layers_divided_along_their_own_axis():
    layers, mesh = {"w": jnp.ones((4, 8, 8))}, mesh_of(2, names=("data",))
    with pytest.raises(ValueError, match=r"layers at 'w' .* along the axis of layers"):
        jm.scan_layers(losses._layer, jnp.ones(8), layers, mesh, P("data"))


def test_a_scalar_has_no_axis_of_layers():
    layers, mesh = {"w": jnp.ones((4, 8)), "x": jnp.ones(())}, mesh_of(2, names=("d",))
    with pytest.raises(ValueError, match="layers at 'x' is a scalar; expected"):
        jm.scan_layers(lambda x, _: (x, None), jnp.ones(8), layers, mesh)


def test_what_one_operation_uses_is_gathered_in_order():
    """Each process traces for itself, and all have to gather in one order."""
    sizes = range(1, 13)
    params = {"layers": [jnp.ones((2, 4, n)) for n in sizes]}

    def loss(params, x):
        layer = [w[0] for w in params["layers"]]
        total = jax.lax.cond(
            x[0, 0] > 0, lambda *ws: sum(map(jnp.sum, ws)), lambda *ws: 0.0, *layer
        )
        return total * jnp.mean(x)

    step = make(loss, specs=P(None, "data"))
    program = jax.make_jaxpr(step._step)(*step.abstract(params), jnp.ones((4, 2)))
    gathered = shapes_within(program.jaxpr)[1]
    assert [shape[-1] for shape, _ in gathered] == [*sizes]


# --- what a step says -----------------------------------------------------------------


def test_how_parameters_are_gathered():
    params, batch = jax.eval_shape(losses.draw), losses.samples()
    layers = dict.fromkeys(losses.LEAVES, "a layer at a time")
    expected = layers | {"head": "whole, for dot_general"}
    for gather in ("auto", "layers"):
        step = make(losses.scan, transfers=jm.Transfers(gather=gather))
        assert step.gathers(params, batch) == expected
    step = make(losses.scan, transfers=jm.Transfers(gather="leaves"))
    assert step.gathers(params, batch) == {}
    step = make(losses.fori_loop, transfers=jm.Transfers(gather="layers"))
    with pytest.raises(ValueError, match=r"scan uses .* 'layers/w' with .* outside"):
        step.gathers(params, batch)


def _normalized(params, x, mean):
    """Outputs (samples, classes) after a norm over the samples of all devices."""
    y, _ = jax.lax.scan(lambda y, w: (losses._layer(y, w), None), x, params["layers"])
    y = y * params["scale"]
    center = mean(jnp.mean(y, axis=0))
    y = (y - center) / jnp.sqrt(mean(jnp.mean((y - center) ** 2, axis=0)) + 1e-3)
    return y @ params["head"]


def _balance(logits, mean):
    """Of a router: how many samples a class gets, times its mean probability."""
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.sum(
        mean(jnp.mean(chosen, axis=0)) * mean(jnp.mean(jax.nn.softmax(logits), axis=0))
    )


WEIGHTS = {
    "all devices": [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1],
    # The samples of the second device count in the norm and in the balance alone.
    "not the second": [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1],
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("gather", ["auto", "leaves"])
def test_collectives_in_a_weighted_loss(weights, dtype, gather, x64):
    """A loss whose last cast is to bfloat16 has weights that are not rounded to it."""
    params, x = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    batch = x, jnp.asarray(WEIGHTS[weights], float)

    def loss_fn(params, batch, mean=lambda x: jax.lax.pmean(x, "data")):
        logits = _normalized(params, batch[0], mean)
        count = jnp.sum(batch[1])
        own = jnp.sum(batch[1] * jnp.sum(jnp.sin(logits), axis=1))
        loss = own / jnp.maximum(count, 1) + 10 * _balance(logits, mean)
        return loss.astype(dtype), count

    alone = lambda p: loss_fn(p, batch, lambda x: x)[0].astype(float)  # noqa: E731
    expected = jax.jit(jax.grad(alone))(params)
    step = make(loss_fn, weighted=True, transfers=jm.Transfers(gather=gather))
    found, _, _ = gradients(step, params, batch)
    # In bfloat16 a device's cotangent has 8 bits where collectives take it to others.
    assert_close(found, expected, 1e-12 if dtype == "float64" else 2e-2)
