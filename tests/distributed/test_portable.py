"""One portable state: the same from every layout, and back on every other."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_muon as jm
from tests.distributed import problems
from tests.distributed.test_zero2 import RECIPES, mesh_of, recipe


def steps(tx, mesh, params, state, loss, data):
    """Continue training; without a mesh, on one device."""
    if mesh is None:
        step = jax.jit(lambda p, s, b: plain_step(tx, loss, p, s, b))
    else:
        step = jm.make_train_step(loss, tx, mesh, donate=False)
    for batch in data:
        params, state, _ = step(params, state, batch)
    return params, state


def plain_step(tx, loss, params, state, batch):
    updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state, {}


def start(tx, mesh, params):
    return tx.init(params) if mesh is None else jm.init_optimizer(tx, params, mesh)


def layout(devices, name="nanochat"):
    """Recipe and mesh; None is one device without ZeRO-2."""
    if devices is None:
        return recipe(name), None
    return recipe(name, zero2_axis="data"), mesh_of(devices)


@pytest.mark.parametrize(("name", "devices"), [(name, 4) for name in RECIPES])
def test_portable_state_is_that_of_one_device(name, devices):
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(3)
    plain, _ = layout(None, name)
    _, expected = steps(plain, None, params, plain.init(params), loss, data)
    tx, mesh = layout(devices, name)
    _, state = steps(tx, mesh, params, start(tx, mesh, params), loss, data)
    portable = jm.to_portable(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(portable, expected)
    chex.assert_trees_all_close(portable, expected, rtol=1e-4, atol=1e-5)
    again = jm.from_portable(tx, params, portable, mesh)
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
    abstract = jm.abstract_portable(tx, params, mesh)
    chex.assert_trees_all_equal_shapes_and_dtypes(portable, abstract)
    for have, want in zip(
        jax.tree.leaves(portable), jax.tree.leaves(abstract), strict=True
    ):
        assert have.sharding.is_equivalent_to(want.sharding, have.ndim)


@pytest.mark.parametrize(("before", "after"), [(8, 3), (4, None), (None, 8)])
def test_a_checkpoint_resumes_on_another_layout(tmp_path, before, after):
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(10, size=24)
    plain, _ = layout(None)
    expected, _ = steps(plain, None, params, plain.init(params), loss, data)

    tx, mesh = layout(before)
    middle, state = steps(tx, mesh, params, start(tx, mesh, params), loss, data[:5])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = {"params": middle, "opt_state": jm.to_portable(state)}
        checkpointer.save(tmp_path / "step5", saved)

    tx, mesh = layout(after)
    target = {
        "params": jax.tree.map(jnp.zeros_like, params),
        "opt_state": jm.abstract_portable(tx, params, mesh),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "step5", target)
    state = jm.from_portable(tx, params, restored["opt_state"], mesh)
    middle = restored["params"]
    if mesh is not None:
        middle = jax.device_put(middle, NamedSharding(mesh, PartitionSpec()))
    result, _ = steps(tx, mesh, middle, state, loss, data[5:])
    assert problems.distance(result, expected, params) < 5e-6


def places(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def test_from_zero2_to_fsdp_to_one_device(tmp_path):
    """Every number survives both moves, and the run ends where one device does."""
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(9)
    plain = recipe(steps=2)
    expected, _ = steps(plain, None, params, plain.init(params), loss, data)

    def move(name, params, state, target):
        before = {"params": params, "opt_state": jm.to_portable(state)}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, before)
        with ocp.StandardCheckpointer() as checkpointer:
            after = checkpointer.restore(tmp_path / name, target)
        chex.assert_trees_all_equal(jax.device_get(after), jax.device_get(before))
        assert jax.tree.all(
            jax.tree.map(lambda x, y: x == y, *map(places, (after, target)))
        )
        return after["params"], after["opt_state"]

    tx, mesh = recipe(steps=2, zero2_axis="data"), mesh_of(8)
    middle, state = steps(tx, mesh, params, start(tx, mesh, params), loss, data[:3])

    mesh = mesh_of(4)
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        params,
        problems.divided(params, mesh),
    )
    tx = recipe(steps=2, small=0, mesh=mesh, specs=places(shapes))
    target = {"params": shapes, "opt_state": jm.abstract_portable(tx, shapes, mesh)}
    middle, portable = move("zero2", middle, state, target)
    state = jm.from_portable(tx, middle, portable, mesh)
    assert state.inner_states["muon"].inner_state[0].mu["h_0/q"].sharding.spec == (
        PartitionSpec("data")
    )
    middle, state = steps(tx, None, middle, state, loss, data[3:6])

    target = {"params": params, "opt_state": jm.abstract_portable(plain, params)}
    middle, portable = move("fsdp", middle, state, target)
    state = jm.from_portable(plain, middle, portable)
    result, _ = steps(plain, None, middle, state, loss, data[6:])
    assert problems.distance(result, expected, params) < 5e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_of_divided_parameters_comes_where_init_lays_it(kind):
    mesh = mesh_of(8, kind=kind)
    params, _ = problems.draw("mixed")
    params = jax.device_put(params, problems.divided(params, mesh))
    given = {}
    if kind == AxisType.Auto:
        given = {"mesh": mesh, "specs": places(params)}
    tx = recipe(small=0, **given)
    explicit = kind == AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        state = jax.jit(tx.init)(params)
    assert jm.to_portable(state) is state
    whole = jax.device_get(state)  # as if another layout had left it
    again = jm.from_portable(tx, params, whole, mesh)
    abstract = jm.abstract_portable(tx, params, mesh)
    for one, two, three in zip(
        *map(jax.tree.leaves, (state, again, abstract)), strict=True
    ):
        assert one.sharding == two.sharding == three.sharding
    mu = again.inner_states["muon"].inner_state[0].mu["scan/mlp"]
    assert mu.addressable_shards[0].data.shape == (3, 3, 48)


def test_portable_arrays_are_spread_over_the_devices():
    params, _ = problems.draw("no adamw leaves")
    tx, mesh = layout(8)
    portable = jm.to_portable(jm.init_optimizer(tx, params, mesh))
    momentum = portable.inner_states["muon"].inner_state[0].mu["y"]
    assert momentum.shape == (8, 16)
    assert momentum.addressable_shards[0].data.shape == (1, 16)


def test_plain_state_is_portable_as_it_is():
    params, _ = problems.draw("mixed")
    tx = recipe()
    state = tx.init(params)
    assert jm.to_portable(state) is state
    again = jm.from_portable(tx, params, state)
    chex.assert_trees_all_equal(again, state)


def test_from_a_mesh_to_one_device_in_memory():
    params, _ = problems.draw("mixed")
    tx, mesh = layout(4)
    portable = jm.to_portable(jm.init_optimizer(tx, params, mesh))
    state = jm.from_portable(recipe(), params, portable)
    for leaf in jax.tree.leaves(state):
        assert len(leaf.devices()) == 1
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), portable)
    with pytest.raises(ValueError, match="dtype bfloat16; valid is"):
        jm.from_portable(recipe(), params, half)


def test_state_of_something_else():
    params, _ = problems.draw("mixed")
    tx, mesh = layout(4)
    other = recipe("muon").init(params)
    with pytest.raises(ValueError, match="not one of this optimizer"):
        jm.from_portable(tx, params, other, mesh)
    state = recipe().init({**params, "wte": jnp.zeros((3, 24))})
    with pytest.raises(ValueError, match=r"wte.*\(3, 24\).*valid is \(67, 24\)"):
        jm.from_portable(tx, params, state, mesh)
