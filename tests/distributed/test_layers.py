"""Scanned layers that are gathered one at a time: gradients, what is sent and kept."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon.mesh import xla_options
from jax_muon.notes import listening
from tests.distributed import losses
from tests.distributed.layouts import AUTO, EXPLICIT, mesh_of

SPECS = {
    "layers": {"w": P(None, None, "data"), "b": P(None, "data")},
    "head": P("data"),
    "scale": P(),
}


def make(loss, *shape, specs=SPECS, names=("data", "fsdp"), **given):
    """A step of plain SGD, which moves parameters by their gradients."""
    kind = {"kind": given.pop("kind")} if "kind" in given else {}
    mesh = mesh_of(*(shape or (4,)), names=names, **kind)
    given = {"axis": mesh.axis_names, "min_size": 1, "donate": False} | given
    return jm.make_train_step(loss, optax.sgd(1.0), mesh, specs=specs, **given)


def gradients(step, params, batch):
    """Those that a step used, its metrics, and which leaves had to be whole."""
    with listening() as notes:
        after, _, metrics = step(*step.init(params), batch)
    whole = [path for path, how in notes["gathered"].items() if "whole" in how]
    moved = jax.tree.map(lambda p, q: np.array(p) - np.array(q), params, after)
    return moved, metrics, whole


def assert_close(found, expected, bound):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound),
        found,
        expected,
    )


@pytest.mark.parametrize("loss", losses.SCANS, ids=lambda loss: loss.__name__)
def test_gradients_in_float64(loss, x64):
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    value, expected = jax.value_and_grad(loss)(params, batch)
    found, metrics, whole = gradients(make(loss), params, batch)
    bound = 1e-7 if loss is losses.scan_of_casts else 1e-12  # it casts to float32
    assert_close(found, expected, bound)
    np.testing.assert_allclose(metrics["loss"], value, rtol=bound)
    assert set(whole) - {"head"} == set(losses.SCANS[loss])


LATE = [losses.scan, losses.scan_in_reverse, losses.scan_of_scans_of_others]


@pytest.mark.parametrize("loss", LATE)
def test_gradients_that_many_devices_scatter_late(loss, x64, monkeypatch):
    """All of a layer's in one go, while the next layer runs."""
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    monkeypatch.setattr(xla_options, "MANY_DEVICES", 3)
    found, _, _ = gradients(make(loss), params, batch)
    assert_close(found, jax.grad(loss)(params, batch), 1e-12)


FORMS = {
    "microbatches": {"microbatches": 2},
    "scattered": {"microbatches": 2, "accumulate": "scattered"},
    "kept": {"keep_gathered": True},
    "Explicit": {"kind": EXPLICIT},
    "divided": {"parameters": "divided", "specs": {**SPECS, "head": P()}},
    "leaves": {"gather": "leaves"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [losses.scan, losses.scan_of_scans])
def test_forms(loss, form):
    params, batch = losses.draw(), losses.samples()
    expected = jax.grad(loss)(params, batch)
    step = make(loss, **FORMS[form])
    with listening() as notes:
        after, _, _ = step(*step.init(params), batch)
    assert ("gathered" in notes) == (form != "leaves")
    moved = jax.tree.map(lambda p, q: np.array(p) - np.array(q), params, after)
    assert_close(moved, expected, 5e-6)
    assert step.cache_size() == 1


@pytest.mark.parametrize("parameters", ["as specs", "divided"])
def test_layers_that_some_axes_of_the_batch_divide(parameters):
    """HSDP: gradients are scattered over one axis by layers, over the other after."""
    specs = {**SPECS, "layers": {"w": P(None, "fsdp"), "b": P(None, "fsdp")}}
    specs["head"] = P("fsdp")
    params, batch = losses.draw(), losses.samples()
    expected = jax.grad(losses.scan)(params, batch)
    step = make(losses.scan, 2, 2, specs=specs, parameters=parameters)
    found, _, whole = gradients(step, params, batch)
    assert_close(found, expected, 5e-6)
    assert not {"layers/w", "layers/b"} & set(whole)


def test_layers_that_tensor_parallelism_divides_too():
    specs = {**SPECS, "layers": {"w": P(None, "data", "tp"), "b": P(None, "tp")}}
    params, batch = losses.draw(), losses.samples()
    expected = jax.grad(losses.scan_of_checkpoints)(params, batch)
    step = make(
        losses.scan_of_checkpoints, 2, 2, specs=specs, names=("data", "tp"), axis="data"
    )
    found, _, whole = gradients(step, params, batch)
    assert_close(found, expected, 5e-6)
    assert set(whole) == {"head"}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_differ_between_devices(microbatches):
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
    step = make(loss, weighted=True, microbatches=microbatches)
    found, _, whole = gradients(step, params, (samples, mask))
    assert_close(found, expected, 5e-6)
    assert set(whole) == {"head"}


def shapes_within(jaxpr, found=None):
    """Shapes and dtypes of all values of a program, and those that are gathered."""
    found = ([], []) if found is None else found
    for eqn in jaxpr.eqns:
        kinds = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars]
        found[0].extend(kinds)
        found[1].extend(kinds if eqn.primitive.name == "all_gather" else [])
        for inner in jaxprs_in_params(eqn.params):
            shapes_within(inner, found)
    return found


def program_of(step, batch):
    """The shapes of the part of a step that computes gradients."""
    params = losses.draw()
    jaxpr = jax.make_jaxpr(step._step)(*step.init(params), batch).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"][:1]
    return shapes_within(eqn.params["jaxpr"])


@pytest.mark.parametrize(
    "loss",
    [loss for loss in losses.SCANS if not losses.SCANS[loss]],
    ids=lambda loss: loss.__name__,
)
def test_no_device_has_all_layers(loss):
    """Neither gathered at once, nor kept for the backward pass one by one."""
    values, _ = program_of(make(loss), losses.samples())
    whole = {(4, 8, 8), (2, 2, 8, 8), (2, 2, 8), (8, 4, 8)}
    assert not [shape for shape, _ in values if shape in whole]
    values, _ = program_of(make(loss, gather="leaves"), losses.samples())
    assert [shape for shape, _ in values if shape in whole]


def test_kept_layers_are_gathered_once():
    values, sent = program_of(make(losses.scan, keep_gathered=True), losses.samples())
    assert ((4, 8, 8), "float32") in values
    _, more = program_of(make(losses.scan), losses.samples())
    assert len(more) > len(sent)


def test_masters_are_cast_before_they_are_gathered():
    """And the sum of their gradients is in their own dtype."""

    def loss(params, x):
        layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
        x, _ = jax.lax.scan(lambda y, w: (losses._layer(y, w), None), x, layers)
        return jnp.mean(x.astype(jnp.float32) * params["scale"])

    batch = losses.samples().astype(jnp.bfloat16)
    step = make(loss)
    _, sent = program_of(step, batch)
    assert {dtype for shape, dtype in sent if shape in ((8, 8), (8,))} == {"bfloat16"}
    params = losses.draw()
    found, _, _ = gradients(step, params, batch)
    assert_close(found, jax.grad(loss)(params, batch), 1e-3)


@pytest.mark.parametrize("wire", ["gather_dtype", "reduce_dtype"])
def test_dtypes_on_the_wire(wire):
    params, batch = losses.draw(), losses.samples()
    expected = jax.grad(losses.scan)(params, batch)
    found, _, _ = gradients(make(losses.scan, **{wire: "bfloat16"}), params, batch)
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
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(1)(x)


class NnxBlock(nnx.Module):
    """Attention and MLP."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.RMSNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Gpt(nnx.Module):
    """A GPT whose blocks are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = nnx.vmap(NnxBlock)(rngs.split(4))
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 64, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        forward = nnx.scan(
            nnx.remat(lambda x, block: block(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return self.head(self.norm(forward(self.embed(tokens), self.blocks)))


def linen():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    return params, lambda params, x: jnp.mean(jnp.sin(model.apply(params, x)))


def test_scans_of_linen():
    params, loss = linen()
    batch = losses.samples()
    expected = jax.grad(loss)(params, batch)
    stacked = jax.tree.map(lambda x: x.ndim > 1 and x.shape[0] == 4, params)
    specs = jax.tree.map(lambda scan: P(None, "data") if scan else P(), stacked)
    step = make(loss, specs=specs)
    found, _, whole = gradients(step, params, batch)
    assert_close(found, expected, 5e-6)
    assert not whole


def test_a_gpt_of_nnx():
    """Its blocks, and no other parameters, are gathered a layer at a time."""
    graph, params, others = nnx.split(Gpt(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, tokens):
        logits = nnx.merge(graph, params, others)(tokens[:, :-1])
        terms = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return terms.mean()

    tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 64)
    expected = jax.grad(loss)(params, tokens)
    step = make(loss, 8, specs=None, parameters="divided")
    found, _, whole = gradients(step, params, tokens)
    assert_close(found, expected, 5e-6)
    assert {path.partition("/")[0] for path in whole} == {"embed", "norm", "head"}
    ways = step.gathers(params, tokens)
    blocks = {path: how for path, how in ways.items() if path.startswith("blocks/")}
    assert len(blocks) == 14
    assert set(blocks.values()) == {"a layer at a time"}


# --- in plain jit ---------------------------------------------------------------------


def plain_loss(params, x, scan):
    """Outputs, a closure with a gradient, a key for each layer, an integer carry."""
    scale, keys = params["scale"], jax.random.split(jax.random.key(0), losses.LAYERS)

    @jax.checkpoint
    def block(carry, layer):
        y, count = carry
        layer, key = layer
        y = losses._layer(y * scale, layer) * jax.random.bernoulli(key, 0.9, (8,))
        return (y, count + 1), jnp.mean(y**2)

    carry, means = scan(block, (x, jnp.zeros((), int)), (params["layers"], keys))
    return jnp.mean(jnp.sin(carry[0]) @ params["head"]) + 0.1 * jnp.sum(means)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_scan_layers(kind, keep, x64):
    """On Auto axes by specs, on Explicit ones by types; "tp" stays where it is."""
    mesh = mesh_of(4, 2, names=("data", "tp"), kind=kind)
    params, batch = losses.draw(jnp.float64), losses.samples(dtype=jnp.float64)
    expected = jax.grad(plain_loss)(params, batch, jax.lax.scan)
    specs = {"w": P(None, "data"), "b": P(None, "data")}
    if kind == AUTO:
        specs["w"] = P(None, "data", "tp")
    places = {"layers": specs, "head": P(), "scale": P()}
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, places, params)
    scan = functools.partial(jm.scan_layers, mesh=mesh, axis="data", keep_gathered=keep)
    if kind == AUTO:
        scan = functools.partial(scan, specs=lambda path: specs.get(path[-1], P()))

    def gradient(params, x):
        grads = jax.grad(plain_loss)(params, x, scan)
        if kind == AUTO:
            shardings = jax.tree.map(lambda x: x.sharding, placed)
            grads = jax.lax.with_sharding_constraint(grads, shardings)
        return grads

    placed = params
    with jax.set_mesh(mesh):
        found = jax.jit(gradient)(params, put(P("data"), batch))
    assert_close(found, expected, 1e-12)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_scan_layers_within_a_train_step():
    """A plain scan, which the step looks into: the same model does for both."""
    mesh = mesh_of(4, names=("data",))
    scan = functools.partial(jm.scan_layers, mesh=mesh)
    params, batch = losses.draw(), losses.samples()
    expected = jax.grad(plain_loss)(params, batch, jax.lax.scan)
    step = make(lambda params, x: plain_loss(params, x, scan))
    found, _, whole = gradients(step, params, batch)
    assert_close(found, expected, 5e-6)
    assert set(whole) == {"head"}


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
    assert_close(found, jax.grad(functools.partial(loss, scan=jax.lax.scan))(w), 5e-6)


def test_no_layers_at_all():
    """A model of zero layers, which tests of other parts of a program have."""
    params, batch = losses.draw(), losses.samples()
    params["layers"] = jax.tree.map(lambda w: w[:0], params["layers"])

    def loss(params, x, scan=jax.lax.scan):
        step = lambda y, w: (losses._layer(y, w), None)  # noqa: E731
        x, _ = scan(step, x * params["scale"], params["layers"])
        return jnp.mean(x @ params["head"])

    expected = jax.grad(loss)(params, batch)
    assert_close(gradients(make(loss), params, batch)[0], expected, 5e-6)
    mesh, specs = mesh_of(4, names=("data",)), SPECS["layers"]
    scan = functools.partial(jm.scan_layers, mesh=mesh, specs=specs)
    assert_close(
        jax.jit(jax.grad(loss), static_argnums=2)(params, batch, scan), expected, 5e-6
    )


def test_layers_divided_along_their_own_axis():
    layers, mesh = {"w": jnp.ones((4, 8, 8))}, mesh_of(2, names=("data",))
    with pytest.raises(ValueError, match=r"layers at 'w' .* along the axis of layers"):
        jm.scan_layers(losses._layer, jnp.ones(8), layers, mesh, P("data"))


# --- errors ---------------------------------------------------------------------------


def test_layers_that_no_scan_takes():
    params, batch = losses.draw(), losses.samples()
    step = make(losses.fori_loop, gather="layers")
    with pytest.raises(
        ValueError, match=r"scan uses the parameter 'layers/w'.* outside"
    ):
        step(*step.init(params), batch)
    step = make(losses.scan, gather="layers")
    step(*step.init(params), batch)


def test_how_parameters_are_gathered():
    params = jax.eval_shape(losses.draw)
    batch = jax.ShapeDtypeStruct((16, 8), "float32")
    assert make(losses.scan).gathers(params, batch) == {
        "layers/w": "a layer at a time",
        "layers/b": "a layer at a time",
        "head": "whole, for dot_general",
    }
    assert make(losses.scan, gather="leaves").gathers(params, batch) == {}


def test_arguments():
    with pytest.raises(ValueError, match="gather='always'; expected one of 'auto'"):
        make(losses.scan, gather="always")
