"""Scanned layers that are gathered one at a time in plain jit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.jaxpr import collectives
from tests.mesh import losses
from tests.mesh.layouts import AUTO, EXPLICIT, mesh_of
from tests.mesh.sgd import (
    SPECS,
    assert_gradients,
    drawn,
    gradients,
    make,
    program_of,
)

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize(("kind", "keep"), [(AUTO, False), (EXPLICIT, True)])
def test_gradients_in_float64(kind, keep, x64):
    """On Auto axes by specs, on Explicit ones by types; "tp" stays where it is."""
    mesh = mesh_of(4, 2, names=("data", "tp"), kind=kind)
    params, batch = drawn()
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
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)
    for name, x in found["layers"].items():
        assert x.sharding.is_equivalent_to(placed["layers"][name].sharding, x.ndim)


def test_integers_under_one_spec():
    """They have no gradient, so they are gathered before the scan."""
    x, w = jnp.ones(8), jnp.linspace(0.5, 1.5, 24).reshape(3, 8)
    places = jnp.arange(24).reshape(3, 8) % 8

    def block(x, layer):
        return jnp.sin(x * layer["w"])[layer["places"]], None

    def loss(w, scan):
        return jnp.sum(scan(block, x, {"w": w, "places": places})[0])

    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=P(None, "data"))
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(w)
    expected = jax.grad(functools.partial(loss, scan=jax.lax.scan))(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_no_layers_at_all(x64):
    """A model of zero layers, which tests of other parts of a program have."""
    params, batch = drawn()
    params["layers"] = jax.tree.map(lambda w: w[:0], params["layers"])

    def loss(params, x, scan=jax.lax.scan):
        step = lambda y, w: (losses._layer(y, w), None)  # noqa: E731
        x, _ = scan(step, x * params["scale"], params["layers"])
        return jnp.mean(x @ params["head"])

    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=SPECS["layers"])
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(params, batch)
    expected = jax.grad(loss)(params, batch)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4, 8, 8), "layers at 'x' .* along the axis of layers"),
        ((), "layers at 'x' is a scalar; expected"),
    ],
)
def test_layers_that_cannot_be_scanned(shape, words):
    layers = {"w": jnp.ones((4, 8)), "x": jnp.ones(shape)}
    specs = {"w": P(), "x": P("data") if shape else P()}
    with pytest.raises(ValueError, match=words):
        jm.scan_layers(losses._layer, jnp.ones(8), layers, mesh_of(2), specs)


LAYERS = {"w": P(None, None, "data"), "b": P(None, "data")}
WHOLE = (losses.LAYERS, losses.WIDTH, losses.WIDTH)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", losses.STACKS)
@pytest.mark.parametrize("where", ["plain jit", "step", "microbatches", "weighted"])
def test_gradients_of_stacks(where, name, keep, x64):
    params, batch = drawn()
    expected = jax.jit(jax.grad(losses.STACKS[name]))(params, batch)
    mesh = mesh_of(4)
    how = {"mesh": mesh, "specs": (LAYERS, P()), "keep_gathered": keep}
    scan = functools.partial(jm.scan_layers, **how)
    loss = functools.partial(losses.STACKS[name], scan=scan)
    if where == "plain jit":
        places = {"layers": LAYERS, "head": P("data"), "scale": P()}
        put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        placed = jax.tree.map(put, places, params)
        found = jax.jit(jax.grad(loss))(placed, put(P("data"), batch))
        for path, x in found["layers"].items():
            sharding = NamedSharding(mesh, LAYERS[path])
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    else:
        given = {"microbatches": 2} if where == "microbatches" else {}
        fn = loss
        if where == "weighted":
            given = {"weighted": True}
            fn = lambda p, b: (loss(p, b), 3.0)  # noqa: E731
        step = make(fn, specs=SPECS | {"layers": LAYERS}, scanned=["layers"], **given)
        found, _ = gradients(step, params, batch)
        whole = [shape for shape, _ in program_of(step, batch)[0] if shape == WHOLE]
        if name != "of_effects":  # without a checkpoint it keeps sines of layers
            assert bool(whole) == keep
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)


def test_hsdp_in_a_step(x64):
    """Within a host first, and between hosts another layer later."""
    params, batch = drawn()
    specs = jax.tree.map(lambda s: P(*("fsdp" if n else None for n in s)), SPECS)
    scan = functools.partial(
        jm.scan_layers, mesh=mesh_of(2, 2), specs=(specs["layers"], P())
    )
    loss = functools.partial(losses.plain, scan=scan)
    step = make(loss, 2, 2, specs=specs, scanned=["layers"])
    assert_gradients(step, losses.plain, params, batch)


# --- each device's own part of the batch, in plain jit --------------------------------

PER_DEVICE = {
    "FSDP": ((4,), {}),
    "reversed": ((4,), {"reverse": True, "unroll": 3}),
    "kept": ((4,), {"keep_gathered": True}),
    "HSDP": ((2, 4), {"axis": ("data", "fsdp")}),
    "over two axes": ((2, 2), {}),
    "beside tp": ((2, 1, 2), {"axis": ("data", "fsdp")}),
    "Explicit": ((4,), {"kind": EXPLICIT}),
}


@pytest.mark.parametrize("form", PER_DEVICE)
def test_each_device_by_itself(form, x64):
    """Outputs, integers, keys, and what the block closes over; one scatter a layer."""
    shape, how = PER_DEVICE[form][0], dict(PER_DEVICE[form][1])
    mesh = mesh_of(*shape, kind=how.pop("kind", AUTO))
    over = {"HSDP": "fsdp", "over two axes": ("data", "fsdp")}.get(form, "data")
    places = {"layers": {"w": P(None, None, over), "b": P()}, "head": P(), "scale": P()}
    params, batch = drawn()

    def loss(params, x, scan=jax.lax.scan, **how):
        scale = 1.0 if form == "Explicit" else params["scale"]
        keys = jax.random.split(jax.random.key(0), losses.LAYERS)

        @jax.checkpoint
        def block(x, parts):
            layer, number, key = parts
            kept = jax.random.bernoulli(key, 0.9, x.shape[1:])
            x = losses._layer(x * scale * kept, layer)
            return x + number, jnp.mean(x**2, axis=1)

        layers = params["layers"], jnp.arange(losses.LAYERS), keys
        y, means = scan(block, x, layers, **how)
        return jnp.mean(jnp.sin(y) @ params["head"]) + jnp.mean(means**2)

    plain = {x: y for x, y in how.items() if x in ("reverse", "unroll")}
    expected = jax.jit(jax.grad(functools.partial(loss, **plain)))(params, batch)
    how |= {"mesh": mesh, "specs": (places["layers"], P(), P()), "local_batch": True}
    found = jax.grad(functools.partial(loss, scan=jm.scan_layers, **how))
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    args = (
        jax.tree.map(put, places, params),
        put(P(how.get("axis", mesh.axis_names)), batch),
    )
    with jax.set_mesh(mesh):
        gradients = jax.jit(found)(*args)
        sent = [c.kind for c in collectives(found, *args)]
    chex.assert_trees_all_close(gradients, expected, rtol=0, atol=1e-12)
    assert sent.count("reduce-scatter") == losses.LAYERS + 1  # and zeros, before


def test_in_a_shard_map_of_ones_own(x64):
    """JAX sums gradients over the devices that repeat a layer."""
    params, batch = drawn()
    mesh, places = mesh_of(2, 4), {"w": P(None, None, "fsdp"), "b": P(None, "fsdp")}
    scan = functools.partial(jm.scan_layers, mesh=mesh, specs=places)
    axes = P(mesh.axis_names)

    def loss(layers):
        on_device = lambda layers, x: run(layers, x, scan)  # noqa: E731
        given = {"mesh": mesh, "in_specs": (places, axes), "out_specs": axes}
        y = jax.shard_map(on_device, **given, check_vma=False)(layers, batch)
        return jnp.sum(y**2)

    found = jax.jit(jax.grad(loss))(params["layers"])
    alone = lambda layers: jnp.sum(run(layers, batch, jax.lax.scan) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(alone))(params["layers"])
    chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("carry", "output", "words"),
    [
        (
            jnp.ones((6, 8)),
            lambda x: None,
            r"carry has shape \(6, 8\); expected a first",
        ),
        ((jnp.ones(8), 0.0), lambda x: None, r"carry\[1\] has shape \(\); expected"),
        (jnp.ones((8, 8)), jnp.sum, r"the output of block has shape \(\); expected"),
    ],
)
def test_batches_that_devices_do_not_divide(carry, output, words):
    block = lambda x, w: (x, output(x))  # noqa: E731
    with pytest.raises(ValueError, match=f"local_batch=True: {words}"):
        jm.scan_layers(
            block, carry, jnp.ones((4, 8)), mesh_of(4), P(), local_batch=True
        )


# --- which parameters a step leaves to it ---------------------------------------------


def run(layers, x, scan):
    return scan(lambda x, layer: (losses._layer(x, layer), None), x, layers)[0]


def stack_of(layers, x, scan):
    return jnp.mean(run(layers, x, scan) ** 2)


def cast_in_jit(layers, x, scan):
    """A cast, a slice and a reshape on the way are not uses."""
    half = jax.jit(lambda w: w.astype(x.dtype)[1:])
    return stack_of(jax.tree.map(half, layers), x, scan)


def outer(layers, x, scan):
    """Blocks of two layers in a scan of its own."""
    block = lambda x, two: (run(two, x, scan), None)  # noqa: E731
    two = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), layers)
    return jnp.mean(jax.lax.scan(block, x, two)[0] ** 2)


def norm(layers):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(layers))


USES = {
    cast_in_jit: None,
    outer: None,
    lambda w, x, scan: stack_of(w, x, scan) + norm(w): "'layers/b', .* integer_pow;",
    lambda w, x, scan: (
        stack_of(w, x, scan) + jax.jit(norm)(w)
    ): "layers/b.* integer_pow",
    lambda w, x, scan: (
        stack_of(w, x, scan) + stack_of(w, x, scan)
    ): r"\), scan_layers over",
    lambda w, x, scan: jnp.mean(
        x
    ): "'layers/b', .* for nothing; expected one scan_layers",
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_scanned_parameters(use, x64):
    """Each device has a part of them: any use but by the scan would be wrong."""
    params, batch = drawn()
    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=LAYERS)

    def loss(params, x, scan=scan):
        return use(params["layers"], x, scan) + jnp.mean(x @ params["head"])

    step = make(loss, specs=SPECS | {"layers": LAYERS}, scanned="layers")
    if USES[use] is None:
        alone = functools.partial(loss, scan=jax.lax.scan)
        assert_gradients(step, alone, params, batch)
        return
    with pytest.raises(ValueError, match=f"scanned: loss_fn uses .*{USES[use]}"):
        gradients(step, params, batch)


@pytest.mark.parametrize(
    ("scanned", "specs", "words"),
    [
        ((), LAYERS, r"got whole parameters; expected make_train_step\(scanned="),
        ("layers", LAYERS | {"b": P()}, "scanned=.*'layers'.*: loss_fn sees"),
    ],
)
def test_steps_that_scan_otherwise_than_their_loss(scanned, specs, words):
    params, batch = drawn("float32")
    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=specs)
    loss = lambda params, x: stack_of(params["layers"], x, scan)  # noqa: E731
    step = make(loss, specs=SPECS | {"layers": LAYERS}, scanned=scanned)
    with pytest.raises((TypeError, ValueError), match=words):
        gradients(step, params, batch)


@pytest.mark.parametrize("local_batch", [False, True])
def test_layers_that_stay_sharded_over_explicit_axes(local_batch):
    mesh = jax.make_mesh((4, 2), ("a", "b"), 2 * (EXPLICIT,))
    words = r"axis='a' leaves layers sharded over b, .*; expected axis= to name"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
        jm.scan_layers(
            lambda x, w: (x @ w, None),
            jax.device_put(jnp.ones((8, 8)), P(("a", "b"))),
            jax.device_put(jnp.ones((3, 8, 8)), P(None, "a", "b")),
            mesh,
            axis="a",
            local_batch=local_batch,
        )


# --- specs that leave the axes of layers to a scan ------------------------------------


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize("how", [None, {}, {"local_batch": True}])
def test_the_reading_finds_layers_and_specs_avoid_them(how):
    """Eight layers, which eight devices would divide first."""
    params = {"layers": {"w": jnp.ones((8, 8, 16, 8))}, "head": jnp.ones((8, 24))}
    mesh = mesh_of(8)

    def loss(params, x):
        scan = jax.lax.scan
        if how is not None:
            scan = functools.partial(jm.scan_layers, mesh=mesh, specs=P(), **how)
        block = lambda x, w: (jnp.einsum("bi,ijk,bj->bk", x, w, x @ w[0].T), None)  # noqa: E731
        return jnp.mean(scan(block, x, params["layers"]["w"])[0] @ params["head"])

    matrices = jm.read(params, loss, jnp.ones((8, 8)), rules={"layers": "adamw"})
    assert matrices["layers/w"].scanned == (0,)
    specs = jm.divided_specs(params, mesh, matrices=matrices, min_size=1)
    assert specs["layers"]["w"] == P(None, "data", None, None)
    assert jm.divided_specs(params, mesh, min_size=1)["layers"]["w"][0] == "data"
    none_fits = jm.divided_specs(
        {"layers": {"w": jnp.ones((8, 3))}}, mesh, (), matrices
    )
    assert none_fits["layers"]["w"] == P(None, None)
    tx = jm.on_mesh(jm.muon(matrices=matrices), mesh, divide="data", min_size=1)
    state = jm.abstract_state(tx, params, mesh)
    specs = {x.sharding.spec for x in jax.tree.leaves(state) if x.ndim == 4}
    assert specs == {P(None, "data")}
