"""State: how it is sharded, and runs that go on in another layout."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.transforms.keep_residual import _whole
from tests.matrices import toy
from tests.mesh import case
from tests.mesh.case import AUTO, EXPLICIT, make_step, mesh_of, recipe
from tests.recipes import RECIPES


def test_state_of_gpt2_is_an_even_share():
    """GPT-2 124M with an odd vocabulary: within 1 % of the whole over the devices."""
    table = {"wte": jax.ShapeDtypeStruct((50257, 768), "float32")}
    params = table | case.gpt(layers=12, width=768)
    tx, mesh = RECIPES["nanochat"](matrices=toy), mesh_of(8)
    on = jm.on_mesh(tx, mesh, divide="data")
    held = jm.describe(on, params).held_bytes["state"]
    assert held < 1.01 * jm.describe(tx, params).held_bytes["state"] / 8
    assert held == sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(on.abstract_state(params))
    )


@pytest.mark.parametrize(
    ("shape", "axes", "traces", "spec"),
    [
        ((64, 64), "muon", 1, PartitionSpec("data")),
        ((8, 64, 64), MuonDimensionNumbers(1, 2), 2, PartitionSpec(None, "data")),
    ],
)
def test_one_trace_of_init_places_parameters_and_state(shape, axes, traces, spec):
    """And a second one, if eight devices would divide eight layers first."""
    seen = []

    def init(params):
        seen.append(jax.tree.map(jax.typeof, params))
        return optax.EmptyState()

    counting = optax.GradientTransformation(init, lambda g, state, p=None: (g, state))
    params = {"layers": jax.ShapeDtypeStruct(shape, "float32")}
    momentum = jm.as_matrices(jm.scale_by_momentum(0.9), {"layers": axes})
    tx = jm.on_mesh(optax.chain(counting, momentum), mesh_of(8), divide="data")
    for _ in range(2):
        mu = tx.abstract_state(params)[1].mu["layers"]
    assert len(seen) == traces
    assert mu.sharding.spec == spec


@pytest.mark.parametrize(
    ("where", "kind"),
    [("ZeRO-2 on 8", AUTO), ("HSDP", EXPLICIT), ("FSDP x TP", AUTO)],
)
def test_state_is_sharded_as_abstract_state_says(where, kind):
    """Jitted or not, in a chain, and after two steps, which share one program."""
    layout, (start, weights) = case.layout(where, kind), case.draw("mixed")
    params, tx = layout.place(start), layout.on(recipe())
    chain = optax.chain(optax.identity(), tx)

    def assert_placed(state, is_chain=False):
        expected = tx.abstract_state(params)
        expected = (optax.EmptyState(), expected) if is_chain else expected
        for x, want in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert x.sharding == want.sharding

    for init in (tx.init, jax.jit(tx.init), chain.init):
        assert_placed(init(params), init == chain.init)
    step = case.plain_step(tx, case.loss_of(weights))
    with jax.set_mesh(layout.mesh):  # Explicit axes of the loss ask for it
        state, data = jax.jit(tx.init)(params), case.batches(2)
        after, state, _ = case.run(step, layout.place(start), state, data)
    assert step._cache_size() == 1
    assert_placed(state)
    for path, x in after.items():
        assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim)


def test_on_mesh_is_a_transform_of_optax():
    """A key of jit's cache, a pair, and a copy of it knows as much."""
    tx = jm.on_mesh(optax.sgd(0.1, momentum=0.9), mesh_of(8), divide="data")
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert tx in {tx} and (tx.init, tx.update) == (*tx,)
    found = copy.copy(tx).abstract_state({"w": jnp.ones((64, 64))})
    assert {x.sharding.spec for x in jax.tree.leaves(found)} == {PartitionSpec("data")}


def test_zeros_without_the_sharding_of_parameters():
    """State keeps the sharding that `init` gave it, so that no step compiles again."""

    def update(updates, state, params=None):
        return updates, jax.tree.map(jnp.add, state, updates)

    zeros = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape), params)  # noqa: E731
    tx = optax.GradientTransformation(zeros, update)
    on = jm.on_mesh(tx, mesh_of(8), divide="data", min_size=1)
    state = on.init({"w": jnp.ones((16, 24))})
    _, after = jax.jit(on.update)(state, state)
    assert after["w"].sharding == state["w"].sharding
    assert jm.describe(on, {"w": jnp.ones((16, 24))}).unsharded_state == ("w",)


def by_type(params):
    """Means over either axis, and under another name what has a parameter's shape."""
    means = {
        f"{path}/{i}": jnp.mean(p, i) for path, p in params.items() for i in (0, 1)
    }
    return {"mu": params, "renamed": [*params.values()], "means": means}


def untyped(params):
    """JAX cannot say how one element of a sharded array is sharded."""
    return by_type(params) | {"corners": [p[3, 5] for p in params.values()]}


ROWS, COLUMNS = PartitionSpec("data", None), PartitionSpec(None, "data")
OF_MEANS = [PartitionSpec(None), PartitionSpec("data")]


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("init", [by_type, untyped])
def test_state_is_sharded_by_the_types_of_init(init, kind):
    """Where JAX cannot type it, by path; what might be of either is everywhere."""
    mesh, specs = mesh_of(8, kind=kind), {"v": ROWS, "w": COLUMNS}
    params = {path: jnp.ones((16, 24)) for path in specs}
    where = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    identity = optax.identity().update
    tx = jm.on_mesh(optax.GradientTransformation(init, identity), where)
    params = jax.device_put(params, where)
    state = tx.init(params)
    found = jax.tree.map(lambda x: full(x.sharding.spec, x.ndim), state)
    assert found["mu"] == specs
    if init is by_type:
        assert found["renamed"] == [ROWS, COLUMNS]
        assert [*found["means"].values()] == [*OF_MEANS, *OF_MEANS[::-1]]
    else:
        assert {*found["renamed"]} == {PartitionSpec(None, None)}
        assert {*found["means"].values()} == {PartitionSpec(None)}
    described = jm.describe(tx, params)
    unknown = [f"means/{x}/{i}" for x in "vw" for i in (0, 1)]
    unknown = (*unknown, "renamed/0", "renamed/1") if init is untyped else ()
    assert described.unsharded_state == unknown
    assert ("shows no sharding: means/v/0, " in str(described)) == bool(unknown)


def full(spec, rank):
    return PartitionSpec(*spec, *[None] * (rank - len(spec)))


def test_split_parts_that_devices_do_not_divide_are_divided_elsewhere():
    """(72, 64) in 64 + 4 + 4 rows over eight devices: by columns."""
    params = {"qkv": jnp.ones((72, 64))}
    splits = {"qkv": jm.Split({"q": 64, "k": 4, "v": 4}, axis=0)}
    matrices = jm.find_matrices(params, rules={"?*": "muon"}, splits=splits)
    tx = jm.on_mesh(RECIPES["nanochat"](matrices=matrices), mesh_of(8), divide="data")
    for leaf in jax.tree.leaves(tx.init(params)):
        assert leaf.ndim < 2 or any(leaf.sharding.spec) or 1 in leaf.shape
    assert jm.describe(tx, params).sent_bytes["gathers"] > 0


# With state also divided over the replicas, it moves from anywhere to anywhere.
JOURNEY = ["ZeRO-2 on 8", "HSDP", "FSDP", None, "ZeRO-2 on 4"]


def test_a_run_travels():
    """Eight devices, 2 x 4, four, one and four: exact resume, as of a checkpoint."""
    start, _, _ = expected = case.one_device(steps=10)
    loss, data, values = case.loss_of(case.draw("mixed")[1]), case.batches(10), []
    params, state = start, recipe().init(start)
    for leg, where in enumerate(JOURNEY):
        tx, shardings = recipe(), jax.local_devices()[0]
        if where is not None:
            layout = case.layout(where)
            tx = layout.on(tx)
            like = layout.place(start), tx.abstract_state(start)
            shardings = jax.tree.map(lambda x: x.sharding, like)
        saved = jax.tree.map(np.array, (params, state))
        params, state = jax.device_put(saved, shardings)
        step, batches = case.plain_step(tx, loss), data[2 * leg : 2 * leg + 2]
        params, state, more = case.run(step, params, state, batches)
        values += more
    case.assert_same(params, values, expected)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_memory_kinds(kind):
    """Updates go where the parameters are, and state where it came from."""
    mesh = mesh_of(8, kind=kind)
    params = {"up": jnp.ones((16, 64)), "b": jnp.ones((16,))}
    spec = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    placed = jax.device_put(params, spec)
    tx = jm.on_mesh(optax.trace(0.9), spec)
    there = jax.tree.map(lambda x: x.sharding, tx.abstract_state(params))
    assert {x.memory_kind for x in jax.tree.leaves(there)} == {"device"}
    host = jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), there)
    with jax.set_mesh(mesh):
        for places, expected in ((there, "device"), (host, "pinned_host")):
            state = jax.device_put(tx.init(placed), places)
            for _ in range(2):
                updates, state = jax.jit(tx.update)(placed, state, placed)
            for x in jax.tree.leaves(updates):
                assert x.sharding.is_equivalent_to(spec, x.ndim)
                assert x.sharding.memory_kind == "pinned_host"
            found = {x.sharding.memory_kind for x in jax.tree.leaves(state)}
            assert found == {expected}
            np.testing.assert_allclose(updates["up"], 1.9, rtol=1e-6)


def test_memory_kinds_in_a_step():
    """Parameters between steps in the memory of the host."""
    mesh, params = mesh_of(8), {"w": jnp.ones((64, 16))}
    where = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    tx = jm.on_mesh(optax.sgd(1.0), where)
    step = jm.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx)
    placed, state = step.init(params)
    args = placed, state, jnp.ones((8, 64))
    program = str(step._jit(*args).trace(*args).jaxpr)
    assert program.count("device_put[") == 2  # to the devices, and back
    for _ in range(2):
        assert placed["w"].sharding.memory_kind == "pinned_host"
        placed, state, _ = step(placed, state, jnp.ones((8, 64)))
    np.testing.assert_allclose(placed["w"], 1 - 2 / 16, rtol=1e-6)
    assert step._jitted._cache_size() == 1


# --- keep_residual --------------------------------------------------------------------


def drift(rate):
    """The same small step for every element, whatever its gradient."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda p: jnp.full_like(p, rate), params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


@pytest.mark.parametrize(
    ("where", "dtype", "given"),
    [
        ("ZeRO-2 on 8", "bfloat16", {"kind": EXPLICIT}),
        ("HSDP", "bfloat16", {"divided": True, "microbatches": 2}),
        ("ZeRO-2 x FSDP x TP", "bfloat16", {"gather_dtype": "bfloat16"}),
        ("HSDP", "float16", {}),
    ],
)
def test_a_train_step_loses_no_small_step(where, dtype, given):
    """Where updates are gathered and applied in the same program."""
    rate, steps = 2.0**-14, 16  # two units of a bfloat16 between 1 and 2
    step = make_step(where, jm.keep_residual(drift(rate)), **given)
    start = jax.tree.map(
        lambda x: (jnp.sign(x) * (1 + jnp.abs(x))).astype(dtype), case.draw("mixed")[0]
    )
    params, state, _ = case.train_step_run(step, start, case.batches(steps))
    assert {x.dtype for x in state.residual.values()} == {jnp.dtype("int8")}
    assert not state.residual["h_0/up"].sharding.is_fully_replicated
    for path, p in start.items():
        got = np.asarray(jax.device_get(_whole(params[path], state.residual[path])))
        moved = got.astype(np.float64) - np.asarray(p, np.float64)
        # A tie between two float16 ends a unit beyond the range: 127 instead of 128.
        unit = 2.0**-18 if dtype == "float16" else 0
        np.testing.assert_allclose(moved, rate * steps, rtol=0, atol=unit)
        if dtype == "bfloat16":
            np.testing.assert_array_equal(p + jnp.asarray(rate, p.dtype), p)
