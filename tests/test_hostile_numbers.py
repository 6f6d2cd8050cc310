"""Gradients at the ends of every range: the state stays finite, or the step is skipped.

A step is skipped only where AdamW's second moment, a square, cannot be held: above 1e19
in float32 and bfloat16. What is hostile to matrices alone never skips.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm

RECIPES = {
    "nanochat": functools.partial(
        jm.nanochat, row_equilibration=True, renormalize=True
    ),
    "muon": jm.muon,
    "moonlight": jm.moonlight,
    "normuon": jm.normuon,
    "teon": jm.teon,
    "muonh": jm.muonh,
    "normuonh": jm.normuonh,
}
CASES = [(name, "float32") for name in RECIPES]
CASES += [(name, "float16") for name in ("nanochat", "moonlight", "normuonh")]
CASES += [("moonlight", "bfloat16")]
SHAPES = {"wte": (5, 4), "0": {"q": (4, 6)}, "1": {"q": (4, 6)}, "bias": (6,)}


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def one_large(small):
    def values(shape, info):
        x = np.full(shape, small(info))
        x[0] = info.max
        return x

    return values


# Each gives an array of a shape, with numbers of a dtype.
FINITE = {
    "zeros": lambda shape, info: np.zeros(shape),
    "subnormal": lambda shape, info: np.full(shape, info.smallest_subnormal),
    "smallest": lambda shape, info: np.sign(draw(shape)) * info.tiny,
    "root": lambda shape, info: draw(shape) * float(info.tiny) ** 0.5,
    "square": lambda shape, info: np.sign(draw(shape)) * 2 * float(info.max) ** 0.5,
    "half": lambda shape, info: np.sign(draw(shape)) * float(info.max) * 0.6,
    "largest": lambda shape, info: np.sign(draw(shape)) * float(info.max),
    "one row, zeros": one_large(lambda info: 0.0),
    "one row, smallest": one_large(lambda info: float(info.tiny)),
    "one row, ones": one_large(lambda info: 1.0),
    "all scales": lambda shape, info: np.geomspace(
        float(info.tiny), float(info.max), np.prod(shape)
    ).reshape(shape),
}
NOT_FINITE = {
    "inf": lambda shape, info: np.full(shape, np.inf),
    "one NaN": lambda shape, info: np.where(np.arange(shape[-1]) == 1, np.nan, 1.0),
}


def tree(values, dtype, matrices_alone=False):
    """Gradients of these values, those of AdamW ordinary where matrices alone are."""
    info = jnp.finfo(dtype)

    def leaf(path, shape):
        is_matrix = path[0].key in ("0", "1")
        x = values(shape, info) if is_matrix or not matrices_alone else draw(shape)
        return jnp.broadcast_to(jnp.asarray(x, dtype), shape)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(leaf, SHAPES, is_leaf=is_shape)


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
        for alone in (True, False):
            grads = tree(values, dtype, alone)
            largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
            may_skip = largest > 1e19 and not alone
            state = start
            for sign in (1, 1, -1):  # sums that grow, then differences that do
                signed = jax.tree.map(lambda g, sign=sign: sign * g, grads)
                updates, state = update(signed, state, params)
                assert is_finite(updates, state), (name, alone)
            assert may_skip == bool(state.skipped), (name, alone, state.skipped)
    for name, values in NOT_FINITE.items():
        updates, state = update(tree(values, dtype), start, params)
        assert state.skipped == 1, name
        assert is_finite(updates, state), name


def test_rows_far_below_the_largest(x64):
    """Each has its own scale: in float32 as in float64, from 1e-40 of the largest."""
    scales = 10.0 ** np.array([30, 11, 0, -3, -10, 30])
    u = draw((4, 6)) * scales
    scale = jax.jit(lambda g: jm.equilibrate_rows().update(g, optax.EmptyState())[0])
    result = scale(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(result, scale(jnp.asarray(u)), rtol=1e-5)
    rows = np.linalg.norm(result.astype(np.float64), axis=0)
    np.testing.assert_allclose(rows[:4], rows[0], rtol=1e-5)  # above eps


@pytest.mark.parametrize("accumulation", ["sum", "ema"])
def test_momentum_at_the_end_of_the_range(accumulation):
    """Not infinite, not the other sign; an infinite gradient stays one."""
    largest = float(jnp.finfo("float32").max)
    tx = jm.nesterov(0.75, accumulation=accumulation)
    update = jax.jit(tx.update)
    g = jnp.array([0.9 * largest, -0.9 * largest, jnp.inf, 1.0])
    updates, state = update(g, tx.init(g))
    expected = [largest, -largest] if accumulation == "sum" else g[:2] * (1 - 0.75**2)
    np.testing.assert_allclose(updates[:2], expected, rtol=1e-6)
    assert not jnp.isfinite(updates[2])
    assert not jnp.isfinite(state.mu[2])
    for _ in range(9):
        _, state = update(g, state)
    _, state = update(-g, state)
    assert np.isfinite(state.mu[:2]).all()
    m = np.clip(0.9 * (1 - 0.75**10), 0, 1) if accumulation == "ema" else 1.0
    expected_m = m + 0.25 * (-0.9 - m) if accumulation == "ema" else 0.75 * m - 0.9
    np.testing.assert_allclose(state.mu[0] / largest, expected_m, rtol=1e-5)


INJECTED = {
    "nanochat": lambda: optax.inject_hyperparams(jm.nanochat, ("steps",))(steps=2),
    "hyperball": lambda: optax.inject_hyperparams(jm.hyperball)(0.1),
    "scale_by_normuon": lambda: optax.inject_hyperparams(jm.scale_by_normuon)(),
}


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_eps_is_more_than_zero(name):
    """`optax.inject_hyperparams` rounds 1e-10 to float16, which is 0."""
    params = {"w": jnp.zeros((2, 3), "float16")}
    tx = INJECTED[name]()
    state = jax.jit(tx.init)(params)  # which looks at no number
    updates, state = jax.jit(tx.update)(params, state, params)
    assert is_finite(updates, state)


@pytest.mark.parametrize("piece", [jm.normalize_frobenius, jm.scale_by_normuon])
def test_an_eps_that_its_dtype_cannot_hold_is_more_than_zero(piece):
    params = {"w": jnp.zeros((2, 3))}
    tx = piece(eps=1e-46)
    updates, state = tx.update(params, tx.init(params), params)
    assert is_finite(updates, state)


@pytest.mark.parametrize("max_norm", [float("inf"), 1.0])
def test_optax_clips_by_any_norm(max_norm):
    params = {"w": jnp.ones((4, 6)), "wte": jnp.ones((5, 4))}
    tx = optax.chain(optax.clip_by_global_norm(max_norm), jm.muon(dtype="float32"))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert is_finite(updates, state)
