"""Hostile numbers: finite gradients leave finite states, and others are skipped.

Above 1e19 squares overflow in float32 and bfloat16. Matrices bear that, AdamW does not:
its mean squares become infinite, and SGD is in its place here.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests import trees
from tests.recipes import RECIPES, SHAPES

CASES = [(name, dtype) for name in RECIPES for dtype in ("float32", "bfloat16")]
CASES += [("nanochat", "float16"), ("muonh", "float16")]


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def large(info):
    return min(float(info.max), 1e15)


def one_row(shape, first, others):
    """The first row of a matrix, or entry of a vector, beside all others."""
    x = np.full(shape, float(others))
    x[0] = first
    return x


def one_column(shape, second):
    """The second column beside zeros and ones."""
    columns = np.arange(shape[-1])
    return np.broadcast_to(np.where(columns == 1, second, columns % 2), shape)


# Each gives an array of a shape, with numbers of a dtype.
FINITE = {
    "zeros": lambda shape, info: np.zeros(shape),
    "subnormal": lambda shape, info: np.full(shape, info.smallest_subnormal),
    "root": lambda shape, info: draw(shape) * float(info.tiny) ** 0.5,
    "large": lambda shape, info: np.sign(draw(shape)) * large(info),
    "one row, zeros": lambda shape, info: one_row(shape, large(info), 0),
    "one row, smallest": lambda shape, info: one_row(shape, large(info), info.tiny),
}
# Their squares overflow in float32 and bfloat16, and the sums of them.
OVERFLOWING = {
    "all": lambda shape, info: draw(shape) * 1e20,
    "one row": lambda shape, info: one_row(shape, 1e38, 1e15),
    "one column": lambda shape, info: one_column(shape, 1e38),
}


def tree(values, dtype):
    """Gradients of these values."""
    info = jnp.finfo(dtype)
    return trees.filled(SHAPES, lambda shape: jnp.asarray(values(shape, info), dtype))


def is_finite(*trees):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(trees))


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_finite_gradients_leave_finite_states(recipe, dtype):
    """Two steps with each of the gradients and one against them."""
    params = tree(lambda shape, info: draw(shape), dtype)
    polar = "float32" if dtype == "float16" else dtype
    tx = jm.skip_nonfinite(RECIPES[recipe](dtype=polar, adamw=optax.sgd(1e-30)))
    update, start = jax.jit(tx.update), tx.init(params)
    overflowing = {} if dtype == "float16" else OVERFLOWING
    for name, values in (FINITE | overflowing).items():
        grads, state = tree(values, dtype), start
        for sign in (1, 1, -1):
            signed = jax.tree.map(lambda g, sign=sign: sign * g, grads)
            updates, state = update(signed, state, params)
            assert is_finite(updates, state), name
        assert state.skipped == 0, name
        for q in [updates[i]["q"] for i in "01"] if name in overflowing else []:
            assert jnp.linalg.norm(q.astype("float32")) > 1e-4, name


def test_matrices_on_spheres_show_a_nan():
    """They would stay as they are for ever, since the momentum stays NaN."""
    params, tx = trees.normal({"w": (4, 6)}), RECIPES["muonh"](matrices={"w": "muon"})
    _, state = tx.update({"w": params["w"] * jnp.nan}, tx.init(params), params)
    updates, _ = tx.update(params, state, params)
    assert jnp.isnan(updates["w"]).all()


# --- skipped steps: nothing moves; tests/mesh/test_fuzz.py has them on a mesh ---------


def test_skip_leaves_everything_as_it_was_and_counts():
    """The square of 2e19 makes AdamW's second moment infinite for good, in float32."""
    params = trees.normal({"wte": (4, 3), "w": (4, 6)})
    labels = {"wte": "adamw", "w": "muon"}
    tx = jm.skip_nonfinite(RECIPES["nanochat"](dtype="float32", matrices=labels))
    update = jax.jit(tx.update)
    _, state = update(params, tx.init(params), params)
    for leaf, value in (("w", jnp.nan), ("w", jnp.inf), ("wte", 2e19)):
        bad = params | {leaf: params[leaf].at[3, 2].set(value)}
        updates, new = update(bad, state, params)
        chex.assert_trees_all_equal(updates, optax.tree.zeros_like(params))
        chex.assert_trees_all_equal(new.inner_state, state.inner_state)
        assert new.skipped == state.skipped + 1
        state = new
    updates, state = update(params, state, params)
    chex.assert_tree_all_finite(updates)
    assert state.skipped == 3 and jnp.any(updates["w"] != 0)


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
