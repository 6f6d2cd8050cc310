"""One portable state: the same from every layout, and back on every other."""

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

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


@pytest.mark.parametrize(
    ("name", "devices"), [("nanochat", 1), *((name, 4) for name in RECIPES)]
)
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


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, None), (None, 8), (2, 3)])
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
