"""Zeros, tiny and large gradients: the state stays finite, and no step is skipped.

Large means up to 1e15; above 1e19 squares overflow in float32 and bfloat16. Matrices
bear that, AdamW does not: its mean squares become infinite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests import trees
from tests.recipes import RECIPES

CASES = [(name, "float32") for name in RECIPES]
CASES += [("nanochat", "float16"), ("muonh", "float16"), ("moonlight", "bfloat16")]
SHAPES = {"wte": (5, 4), "0": {"q": (4, 6)}, "1": {"q": (4, 6)}, "bias": (6,)}


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


def there_and_back(update, state, params, grads):
    """Two steps with these gradients and one against them, all of them finite."""
    for sign in (1, 1, -1):
        signed = jax.tree.map(lambda g, sign=sign: sign * g, grads)
        updates, state = update(signed, state, params)
        assert is_finite(updates, state)
    return updates, state


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_finite_gradients_leave_finite_states(recipe, dtype):
    params = tree(lambda shape, info: draw(shape), dtype)
    # In float16 AdamW's squares are 0 or infinite: the user has to take another.
    other = {"adamw": optax.sgd(0.1)} if dtype == "float16" else {}
    tx = jm.skip_nonfinite(RECIPES[recipe](dtype="float32", **other))
    update, start = jax.jit(tx.update), tx.init(params)
    for name, values in FINITE.items():
        _, state = there_and_back(update, start, params, tree(values, dtype))
        assert state.skipped == 0, name
    for name, values in NOT_FINITE.items():
        updates, state = update(tree(values, dtype), start, params)
        assert state.skipped == 1, name
        assert is_finite(updates, state), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_matrices_bear_finite_gradients_whose_squares_overflow(recipe, dtype):
    params = tree(lambda shape, info: draw(shape), "float32")
    tx = RECIPES[recipe](dtype=dtype, adamw=optax.sgd(1e-30))
    update, start = jax.jit(tx.update), tx.init(params)
    for name, values in OVERFLOWING.items():
        grads = tree(values, "float32")
        updates, _ = there_and_back(update, start, params, grads)
        for q in (updates["0"]["q"], updates["1"]["q"]):
            assert jnp.linalg.norm(q) > 1e-4, name


def test_matrices_on_spheres_show_a_nan():
    """They would stay as they are for ever, since the momentum stays NaN."""
    params, tx = trees.normal({"w": (4, 6)}), jm.muonh(matrices={"w": "muon"})
    _, state = tx.update({"w": params["w"] * jnp.nan}, tx.init(params), params)
    updates, _ = tx.update(params, state, params)
    assert jnp.isnan(updates["w"]).all()
