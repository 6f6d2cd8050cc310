"""Scanned layers that are gathered one at a time: gradients, and what is sent."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from tests.mesh import case, losses
from tests.mesh.case import AUTO, EXPLICIT, mesh_of

pytestmark = pytest.mark.usefixtures("as_users_write")


def placed_on(mesh, params, specs):
    """Parameters on a mesh; specs also have some of random keys."""
    of_layers = {name: specs["layers"][name] for name in params["layers"]}
    return case.put(params, specs | {"layers": of_layers}, mesh)


def in_jit(loss, args, mesh, specs=case.SPECS, batch=None):
    """Gradients in plain jit, sharded like the parameters."""
    placed = placed_on(mesh, args[0], specs)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss))
        found = gradient(placed, case.put(args[1], batch or P("data"), mesh))
    for name, x in found["layers"].items():  # or finer, as the state is
        whole = placed["layers"][name].sharding.shard_shape(x.shape)
        assert math.prod(x.sharding.shard_shape(x.shape)) <= math.prod(whole)
    return found


def has_whole_layers(step, batch):
    """True if a device ever has all layers whole while it computes gradients."""
    args = *step.abstract(losses.draw()), batch
    jaxpr = jax.make_jaxpr(lambda *args: step._step(*args))(*args).jaxpr
    mapped = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    whole = losses.LAYERS, losses.WIDTH, losses.WIDTH
    return "f32[{},{},{}]".format(*whole) in str(mapped.params["jaxpr"])


@pytest.mark.parametrize(
    ("alone", "where"),
    [
        *((loss, where) for loss in losses.STACKS for where in ("plain jit", "step")),
        (losses.with_keys, "microbatches"),
        (losses.plain, "weighted"),
        (losses.plain, "HSDP"),
        (losses.plain, "a replicated leaf"),
    ],
)
def test_gradients_of_stacks(alone, where, x64):
    args, over, sizes, given = case.drawn(), "data", (4,), {}
    if where == "HSDP":
        over, sizes = "fsdp", (2, 2)
    axes = lambda spec: P(*(name and over for name in spec))  # noqa: E731
    specs, mesh = jax.tree.map(axes, case.SPECS), mesh_of(*sizes)
    if where == "a replicated leaf":  # the step sums its gradient, as of any other
        specs["layers"]["b"] = P()
    # In a step the arguments of `scan_layers` do not count.
    shardings = specs["layers"] if where == "plain jit" else None
    loss = fn = case.scanning(alone, mesh, shardings)
    if where == "plain jit":
        found = in_jit(loss, args, mesh)
    else:
        if where == "microbatches":
            given = {"microbatches": 2}
        if where == "weighted":
            given, fn = {"weighted": True}, lambda p, b: (loss(p, b), 3.0)
        step = case.sgd_step(fn, *sizes, specs=specs, **given)
        found = case.gradients(step, *args)
        assert not has_whole_layers(step, args[1])
        whole = case.sgd_step(alone, *sizes, specs=specs)
        assert has_whole_layers(whole, args[1])
    case.assert_gradients(found, alone, args)


def test_a_step_ignores_shardings_of_whole_layers(x64):
    args, specs = case.drawn(), jax.tree.map(lambda _: P(), case.SPECS)
    loss = case.scanning(losses.plain, mesh_of(4), specs["layers"])
    step = case.sgd_step(loss, 4, specs=specs)
    case.assert_gradients(case.gradients(step, *args), losses.plain, args)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_beside_tensor_parallelism(kind, x64):
    """Over "tp", layers stay sharded on Auto axes; on Explicit ones they are whole."""
    mesh = mesh_of(4, 2, names=("data", "tp"), kind=kind)
    args, layers = case.drawn(), {"w": P(None, "data"), "b": P(None, "data")}
    if kind == AUTO:
        layers["w"] = P(None, "data", "tp")
    else:  # a block must not use other arrays
        del args[0]["scale"]
    specs = {"layers": layers, "head": P(), "scale": P()}
    specs = {name: specs[name] for name in args[0]}
    loss = case.scanning(losses.with_keys, mesh, layers | {"keys": P()}, axis="data")
    found = in_jit(loss, args, mesh, specs)
    case.assert_gradients(found, losses.with_keys, args)


def test_no_layers_at_all(x64):
    """A model of zero layers, which tests of other parts of a program have."""
    params, x = case.drawn()
    params["layers"] = jax.tree.map(lambda w: w[:0], params["layers"])
    found = jax.jit(jax.grad(case.scanning(losses.plain)))(params, x)
    case.assert_gradients(found, losses.plain, (params, x))


# Mesh, mesh axes over which a layer is divided, and how it is scanned.
PER_DEVICE = {
    "FSDP": ((4,), "data", {}),
    "HSDP": ((2, 4), "fsdp", {"axis": ("data", "fsdp")}),
    "over two axes": ((2, 2), ("data", "fsdp"), {}),
    "beside tp": ((2, 1, 2), "data", {"axis": ("data", "fsdp")}),
    "Explicit": ((4,), "data", {}),
}


@pytest.mark.parametrize("form", PER_DEVICE)
def test_each_device_by_itself(form, x64):
    """One scatter a layer; "w" is large enough to be divided further, as in HSDP."""
    shape, over, how = PER_DEVICE[form]
    mesh = mesh_of(*shape, kind=EXPLICIT if form == "Explicit" else AUTO)
    layers = {"w": P(None, None, over), "b": P(), "keys": P()}
    specs = {"layers": layers, "head": P(), "scale": P()}
    params, x = case.drawn()
    if form == "Explicit":  # a block must not use other arrays
        del params["scale"], specs["scale"]
    divided = case.scanning(losses.with_keys, mesh, layers, **how)
    if form == "Explicit":  # types show how layers are sharded
        scan = functools.partial(jm.scan_layers, shardings=mesh)
        divided = functools.partial(losses.with_keys, scan=scan)
    batch = P(how.get("axis", mesh.axis_names))
    found = in_jit(divided, (params, x), mesh, specs, batch)
    case.assert_gradients(found, losses.with_keys, (params, x))
    placed = placed_on(mesh, params, specs), case.put(x, batch, mesh)
    with jax.set_mesh(mesh):
        sent = [c.kind for c in collectives(jax.grad(divided), *placed)]
    # Zeros go before; in HSDP a layer is summed over the other axis a layer later.
    count = losses.LAYERS + 1
    count += count + 1 if form == "HSDP" else 0
    assert sent.count("reduce-scatter") == count


@pytest.mark.parametrize("spec", [P(), P(None, "data")])
def test_in_a_shard_map_of_ones_own(spec):
    """A plain scan; with shardings, which are of whole layers, an error."""
    mesh, args = mesh_of(8), (jnp.ones((8, 64)), jnp.ones((3, 64, 64)))
    block = lambda x, layer: (x + jnp.sum(layer), None)  # noqa: E731

    def run(shardings):
        def scan(x, layers):
            return jm.scan_layers(block, x, layers, shardings=shardings)[0]

        in_specs, out_specs = (P("data"), spec), P("data")
        mapped = jax.shard_map(
            scan, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.eval_shape(mapped, *args)

    assert run(None).shape == (8, 64)
    with pytest.raises(ValueError, match="mesh"):
        run(case.at(mesh, spec))


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize("how", [None, {}, {"shardings": case.at(mesh_of(8), P())}])
def test_the_reading_finds_layers_and_shardings_avoid_them(how):
    """Eight layers, which eight devices would divide first."""
    params = {"layers": {"w": jnp.ones((8, 8, 16, 8))}, "head": jnp.ones((128, 24))}
    mesh = mesh_of(8)

    def loss(params, x):
        scan = jax.lax.scan
        if how is not None:
            scan = functools.partial(jm.scan_layers, **how)
        block = lambda x, w: (jnp.einsum("bi,ijk,bj->bk", x, w, x @ w[0].T), None)  # noqa: E731
        y = scan(block, x, params["layers"]["w"])[0]
        return jnp.mean(jnp.tile(y, 16) @ params["head"])

    matrices = jm.find_matrices(
        params, loss, jnp.ones((8, 8)), rules={"layers": "adamw"}
    )
    assert matrices["layers/w"].scanned == (0,)
    assert matrices["layers/w"].scan == ("lax.scan" if how is None else "scan_layers")
    rules = {"layers": MuonDimensionNumbers(-2, -1), "head": "adamw"}
    for reading, spec in ((matrices, P(None, "data")), (rules, P(None, None, "data"))):
        assert jm.fsdp(params, mesh, reading)["layers"]["w"].spec == spec
    few = {"layers": {"w": jnp.ones((8, 3000))}}
    assert jm.fsdp(few, mesh, matrices, axes=())["layers"]["w"].spec == P()


def optimizers(matrices, params):
    """A recipe, pieces in `optax.multi_transform`, and a bare chain."""
    muon = optax.chain(
        jm.scale_by_momentum(0.9),
        jm.as_matrices(jm.orthogonalize(jm.ExactPolar()), matrices),
    )
    labels = matrices.labels(params)
    of_muon = jax.tree.map(lambda label: label == "muon", labels)
    return {
        "recipe": jm.muon(
            0.02, adamw=optax.adamw(1e-3), matrices=matrices, polar=jm.ExactPolar()
        ),
        "multi_transform": optax.multi_transform(
            {"muon": muon, "adamw": optax.adamw(1e-3)}, labels
        ),
        "bare chain": optax.chain(optax.masked(muon, of_muon), optax.adamw(1e-3)),
    }


def test_one_layout_for_recipes_multi_transform_and_chains():
    """State of eight layers is not divided along these, AdamW's neither."""
    params = {
        "layers": {"up": jnp.ones((8, 64, 64)), "bias": jnp.ones((8, 256))},
        "head": jnp.ones((64, 24)),
    }

    def loss(params, x):
        block = lambda x, w: (jnp.tanh(x @ w["up"] + w["bias"][:64]), None)  # noqa: E731
        return jnp.mean(jm.scan_layers(block, x, params["layers"])[0] @ params["head"])

    matrices = jm.find_matrices(params, loss, jnp.ones((8, 64)))
    for name, tx in optimizers(matrices, params).items():
        on = jm.on_mesh(tx, mesh_of(8), divide="data")
        state = jax.tree.leaves(on.abstract_state(params))
        found = {(x.shape, x.sharding.spec) for x in state if x.size > 1}
        assert found == {
            ((8, 64, 64), P(None, "data")),
            ((8, 256), P(None, "data")),
            ((64, 24), P("data")),
        }, name
        described = jm.describe(on, params)
        assert "32768 of them in matrices" in str(described), name
        case.assert_verified(on, params)


def test_a_step_takes_parameters_that_are_sharded_otherwise():
    """On Explicit axes types say it: layers that were held may come in whole."""

    def loss(params, x):
        block = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jm.scan_layers(block, x, params)[0] ** 2)

    mesh = mesh_of(4, kind=EXPLICIT)
    params, x = jax.random.normal(jax.random.key(0), (3, 16, 16)), jnp.ones((8, 16))
    tx = jm.on_mesh(optax.sgd(0.1), mesh)
    step = jm.make_train_step(loss, tx, donate=False)
    expected = params - 0.1 * jax.grad(loss)(params, x)
    for spec, held in ((P(None, "data"), True), (P(), False), (P(None, "data"), True)):
        placed = jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))
        new, _, _ = step(placed, tx.init(placed), x)
        assert jnp.allclose(jax.device_get(new), expected, atol=1e-6)
        assert bool(step.gathers(placed, x).layer_specs) == held


def test_a_layer_is_not_gathered_over_the_axes_of_tensor_parallelism():
    """XLA would gather it over "tp" first: 12 times the bytes for llama-7b on 256."""
    mesh = mesh_of(4, 2, names=("data", "tp"))
    specs = {"up": P(None, "data", "tp"), "down": P(None, "tp", "data")}
    shapes = {"up": (3, 64, 256), "down": (3, 256, 64)}
    how = {"axis": "data"}
    how["shardings"] = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}

    def loss(layers, x):
        block = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.sum(jm.scan_layers(block, x, layers, **how)[0])

    layers = {
        k: jax.ShapeDtypeStruct(shape, "float32", sharding=how["shardings"][k])
        for k, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct(
        (4, 64), "float32", sharding=NamedSharding(mesh, P("data"))
    )
    text = jax.jit(jax.grad(loss)).lower(layers, x).compile().as_text()
    gathers = [t for t in Module.parse(text).transfers() if t.kind == "all-gather"]
    shards = 2 * 64 * 256 * 4 / 8  # bytes of one layer on a device
    assert gathers
    assert all(t.devices == 4 and t.input_bytes <= shards for t in gathers)


def test_small_gradients_of_layers_are_divided_before_they_are_rounded():
    """A quarter of 3 units of float16 is no multiple of one: four would be 4 units."""
    unit = 2.0**-24

    def loss(params, x):
        y, _ = jm.scan_layers(lambda x, w: (x + w, None), x, params)
        return jnp.mean(jnp.sum(3 * unit * y.astype(jnp.float32), axis=1))

    step = case.sgd_step(loss, specs=P(None, "data"), reduce_dtype="float32")
    params, x = jnp.zeros((2, 8), jnp.float16), jnp.zeros((4, 8), jnp.float16)
    found = case.gradients(step, params, x)
    assert step.gathers(params, x).layer_specs
    assert (found.astype(float) == 3 * unit).all(), found
