"""skip_nonfinite: the same decision on all devices; a skipped step moves nothing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_muon as jm
from tests.mesh import case
from tests.mesh.case import ADAMW, mesh_of
from tests.recipes import RECIPES


def test_skip_leaves_everything_as_it_was_and_counts():
    """The square of 2e19 makes AdamW's second moment infinite for good, in float32."""
    params = {"wte": jnp.ones((4, 3)), "w": jnp.ones((4, 6))}
    labels = {"wte": "adamw", "w": "muon"}
    tx = jm.skip_nonfinite(jm.nanochat(dtype="float32", matrices=labels))
    update, good = jax.jit(tx.update), jax.tree.map(jnp.ones_like, params)
    _, state = update(good, tx.init(params), params)
    for leaf, value in (("w", jnp.nan), ("w", jnp.inf), ("wte", 2e19)):
        bad = good | {leaf: good[leaf].at[3, 2].set(value)}
        updates, new = update(bad, state, params)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
        chex.assert_trees_all_equal(new.inner_state, state.inner_state)
        assert new.skipped == state.skipped + 1
        state = new
    updates, state = update(good, state, params)
    chex.assert_tree_all_finite(updates)
    assert state.skipped == 3
    assert jnp.any(updates["w"] != 0)


def test_one_device_with_a_nan_makes_all_skip():
    params, weights = (
        {path: tree[path] for path in ("wte", "h_0/q")} for tree in case.draw("mixed")
    )
    plain = case.loss_of(weights)
    data = np.array(case.batches(3))
    data[1, 9, 5] = np.nan  # one sample, on the third of four devices
    plain_tx = RECIPES["nanochat"](dtype="float32", adamw=ADAMW)
    tx = jm.skip_nonfinite(plain_tx)
    step = jm.make_train_step(plain, tx, mesh_of(4), min_size=1, donate=False)
    first, state, _ = step(*step.init(params), data[0])
    second, skipped, _ = step(first, state, data[1])
    chex.assert_trees_all_equal(second, first)
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    assert skipped.skipped == 1
    third, _, _ = step(second, skipped, data[2])
    expected, _, _ = case.alone(plain_tx, plain, params, data[[0, 2]])
    assert case.distance(third, expected, params) < 5e-6


def test_a_gradient_that_moves_nothing_counts_too():
    """That of a frozen parameter, in a step whose updates and state are finite."""
    params, tx = {"w": jnp.ones((4, 6))}, jm.skip_nonfinite(optax.set_to_zero())
    _, state = tx.update({"w": params["w"] * jnp.nan}, tx.init(params), params)
    assert state.skipped == 1


def test_a_state_that_begins_infinite_does_not_skip():
    """A best loss is infinite until there is one, here after the second step."""
    params = {"w": jnp.ones((4, 6))}
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=2)
    tx = jm.skip_nonfinite(optax.chain(optax.sgd(1.0), plateau))
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(params, state, params, value=jnp.float32(2.0))
        chex.assert_trees_all_equal(updates, {"w": -params["w"]})
    assert state.skipped == 0
    assert optax.tree.get(state, "best_value") == 2
