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
CASES += [(name, "float16") for name in ("nanochat", "moonlight", "muonh")]
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
# Their squares overflow in float32 and bfloat16, and the sums of them.
OVERFLOWING = {
    "all": lambda shape, info: draw(shape) * 1e20,
    "one row": lambda shape, info: np.where(
        np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) == 1, 1e38, 1e15
    ),
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_matrices_bear_finite_gradients_whose_squares_overflow(recipe, dtype):
    params = tree(lambda shape, info: draw(shape), "float32")
    tx = RECIPES[recipe](dtype=dtype, adamw=optax.sgd(1e-30))
    update, start = jax.jit(tx.update), tx.init(params)
    for name, values in OVERFLOWING.items():
        grads, state = tree(values, "float32"), start
        for sign in (1, 1, -1):
            signed = jax.tree.map(lambda g, sign=sign: sign * g, grads)
            updates, state = update(signed, state, params)
            assert is_finite(updates, state), name
            for q in (updates["0"]["q"], updates["1"]["q"]):
                assert jnp.linalg.norm(q) > 1e-4, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_polar_factors_do_not_depend_on_the_scale(dtype, norm, x64):
    polar = jm.NewtonSchulz(norm=norm, dtype=dtype, eps=1e-30)
    x = jnp.asarray(draw((3, 7, 10)), dtype)
    scale = 2.0 ** (600 if dtype == "float64" else 124)
    stack = jnp.stack([x, x * scale, x * (x > 0) * scale])
    assert_equal = np.testing.assert_array_equal
    assert_equal(polar(stack)[1], polar(x))
    assert_equal(polar(stack.mT)[1], polar(x.mT))
    assert is_finite(polar(stack))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_of_float64_may_be_too_large_for_the_iteration(dtype, x64):
    x = jnp.asarray(draw((3, 7, 10)), "float64")
    x = x.at[0].set(jnp.eye(7, 10))
    polar = jm.NewtonSchulz(dtype=dtype, eps=1e-30)
    for power in (133, 1000):  # 1e40, 1e301
        np.testing.assert_array_equal(polar(x * 2.0**power), polar(x))
    tx = jm.nanochat(dtype=dtype, matrices={"0/q": "muon"})
    updates, state = tx.update(
        {"0/q": x[1] * 1e40}, tx.init({"0/q": x[1]}), {"0/q": x[1]}
    )
    assert is_finite(updates, state)
    assert jnp.linalg.norm(updates["0/q"]) > 1e-4


def test_matrices_on_spheres_show_a_nan():
    """They would stay as they are for ever, since the momentum stays NaN."""
    params = {"w": jnp.asarray(draw((4, 6)), "float32")}
    tx = jm.muonh(matrices={"w": "muon"})
    _, state = tx.update({"w": jnp.full((4, 6), jnp.nan)}, tx.init(params), params)
    updates, _ = tx.update({"w": jnp.ones((4, 6))}, state, params)
    assert jnp.isnan(updates["w"]).all()
