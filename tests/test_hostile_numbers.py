"""Zeros, tiny and large gradients: the state stays finite, and no step is skipped.

Above 1e19 squares overflow in float32 and bfloat16. Matrices bear that, AdamW does not:
its mean squares become infinite, and SGD is in its place here.
"""

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


# Each gives an array of a shape, with numbers of a dtype.
FINITE = {
    "zeros": lambda shape, info: np.zeros(shape),
    "subnormal": lambda shape, info: np.full(shape, info.smallest_subnormal),
    "root": lambda shape, info: draw(shape) * float(info.tiny) ** 0.5,
    "large": lambda shape, info: np.sign(draw(shape)) * large(info),
    "one row, zeros": lambda shape, info: one_row(shape, large(info), 0),
    "one row, smallest": lambda shape, info: one_row(shape, large(info), info.tiny),
    "all scales": lambda shape, info: np.geomspace(
        float(info.tiny), large(info), np.prod(shape)
    ).reshape(shape),
}
# Their squares overflow in float32 and bfloat16, and the sums of them.
OVERFLOWING = {
    "all": lambda shape, info: draw(shape) * 1e20,
    "one row": lambda shape, info: one_row(shape, 1e38, 1e15),
    "one column": lambda shape, info: np.where(
        np.arange(shape[-1]) == 1, 1e38, np.arange(shape[-1]) % 2
    ),
}
NOT_FINITE = {
    "inf": lambda shape, info: np.full(shape, np.inf),
    "one NaN": lambda shape, info: np.where(np.arange(shape[-1]) == 1, np.nan, 1.0),
}


def tree(values, dtype):
    """Gradients of these values."""
    info = jnp.finfo(dtype)
    return trees.filled(
        SHAPES,
        lambda shape: jnp.broadcast_to(jnp.asarray(values(shape, info), dtype), shape),
    )


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
    for name, values in NOT_FINITE.items():
        updates, state = update(tree(values, dtype), start, params)
        assert state.skipped == 1, name
        assert is_finite(updates, state), name


def test_matrices_on_spheres_show_a_nan():
    """They would stay as they are for ever, since the momentum stays NaN."""
    params, tx = trees.normal({"w": (4, 6)}), jm.muonh(matrices={"w": "muon"})
    _, state = tx.update({"w": params["w"] * jnp.nan}, tx.init(params), params)
    updates, _ = tx.update(params, state, params)
    assert jnp.isnan(updates["w"]).all()
