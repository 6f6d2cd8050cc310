"""Zeros, tiny and large gradients: the state stays finite, and no step is skipped.

Large means up to 1e15. Where a square overflows, above 1e19 in float32 and bfloat16,
nothing is promised but that `skip_nonfinite` skips the step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.recipes import RECIPES

CASES = [(name, "float32") for name in RECIPES]
CASES += [(name, "float16") for name in ("nanochat", "moonlight", "normuonh")]
CASES += [("moonlight", "bfloat16")]
SHAPES = {"wte": (5, 4), "0": {"q": (4, 6)}, "1": {"q": (4, 6)}, "bias": (6,)}


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def one_large(small):
    def values(shape, info):
        x = np.full(shape, small(info))
        x[0] = large(info)
        return x

    return values


def large(info):
    return min(float(info.max), 1e15)


# Each gives an array of a shape, with numbers of a dtype.
FINITE = {
    "zeros": lambda shape, info: np.zeros(shape),
    "subnormal": lambda shape, info: np.full(shape, info.smallest_subnormal),
    "smallest": lambda shape, info: np.sign(draw(shape)) * info.tiny,
    "root": lambda shape, info: draw(shape) * float(info.tiny) ** 0.5,
    "large": lambda shape, info: np.sign(draw(shape)) * large(info),
    "one row, zeros": one_large(lambda info: 0.0),
    "one row, smallest": one_large(lambda info: float(info.tiny)),
    "one row, ones": one_large(lambda info: 1.0),
    "all scales": lambda shape, info: np.geomspace(
        float(info.tiny), large(info), np.prod(shape)
    ).reshape(shape),
}
NOT_FINITE = {
    "inf": lambda shape, info: np.full(shape, np.inf),
    "one NaN": lambda shape, info: np.where(np.arange(shape[-1]) == 1, np.nan, 1.0),
}


def tree(values, dtype):
    """Gradients of these values."""
    info = jnp.finfo(dtype)
    return jax.tree.map(
        lambda shape: jnp.broadcast_to(jnp.asarray(values(shape, info), dtype), shape),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def is_finite(*trees):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(trees))


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_finite_gradients_leave_finite_states(recipe, dtype):
    params = tree(lambda shape, info: draw(shape), dtype)
    # In float16 AdamW's squares are 0 or infinite: the user has to take another.
    other = {"adamw": optax.sgd(0.1)} if dtype == "float16" else {}
    tx = jm.skip_nonfinite(RECIPES[recipe](dtype="float32", **other))
    update = jax.jit(tx.update)
    start = tx.init(params)
    for name, values in FINITE.items():
        grads, state = tree(values, dtype), start
        for sign in (1, 1, -1):
            signed = jax.tree.map(lambda g, sign=sign: sign * g, grads)
            updates, state = update(signed, state, params)
            assert is_finite(updates, state), name
        assert state.skipped == 0, name
    for name, values in NOT_FINITE.items():
        updates, state = update(tree(values, dtype), start, params)
        assert state.skipped == 1, name
        assert is_finite(updates, state), name
