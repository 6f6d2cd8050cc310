"""Momentum in bfloat16 and int8: what is stored, without bias, and how it fails."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from jax_muon.transforms.momentum import random_bits

NARROW = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])


def mixed(x):
    """The hash of one word, in Python's integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def test_random_bits_are_the_hash_of_path_step_and_place():
    shape, path, step = (3, 4, 5), "blocks/0/q", 7
    bits = random_bits(jnp.zeros(shape), path, jnp.asarray(step))
    first = mixed(zlib.crc32(path.encode()) ^ step)
    second = mixed((first + 0x9E3779B9) % 2**32)
    expected = [mixed((mixed(i ^ first) + second) % 2**32) for i in range(60)]
    np.testing.assert_array_equal(bits, np.reshape(expected, shape))


def stored(state):
    """The momentum that a state stands for, in float64."""
    m = np.asarray(state.mu["w"].astype(jnp.float32), np.float64)
    return m * np.asarray(state.scale["w"], np.float64) if len(state) == 3 else m


def spacing(x, dtype):
    """The distance of the two neighbours of x in the dtype."""
    if dtype == "int8":
        return np.abs(x).max(-1, keepdims=True) / 127 * np.ones_like(x)
    return 2.0 ** (np.floor(np.log2(np.abs(x) + 1e-300)) - 7)


@NARROW
def test_what_is_stored_is_a_neighbour_and_right_on_average(rng, dtype):
    """With one gradient again and again, after one of another direction."""
    tx = jm.scale_by_momentum(0.9, mu_dtype=dtype)
    first, g = rng.standard_normal((2, 6, 50)) * np.logspace(-3, 3, 6)[:, None]
    params = {"w": jnp.asarray(g, jnp.float32)}
    update, errors = jax.jit(tx.update), []
    _, state = update({"w": jnp.asarray(10 * first)}, tx.init(params))
    g, m = np.asarray(params["w"], np.float64), stored(state)
    for _ in range(200):
        new = 0.9 * stored(state) + 0.1 * g
        updates, state = update(params, state)
        np.testing.assert_allclose(
            updates["w"], 0.9 * new + 0.1 * g, rtol=2e-5, atol=1e-6 * np.abs(g).max()
        )
        error = (stored(state) - new) / spacing(new, dtype)
        assert np.abs(error).max() < 1 + 1e-4
        m = 0.9 * m + 0.1 * g
        errors.append((stored(state) - m) / spacing(m, dtype))
    # No bias, where nearest would stay up to (1/2) / (1 - 0.9) = 5 steps away: of 300
    # entries the mean over 100 rounds, each with an error of 0.4 / (1 - 0.9^2)^0.5.
    settled = np.mean(errors[100:], axis=0)
    assert np.abs(settled).max() < 2.5
    assert np.abs(np.mean(settled)) < 0.1


@NARROW
def test_zeros_extremes_and_nan(dtype):
    """Zero rows stay zero, 1e30 and 1e-30 lie in one array, a nan shows.

    Also that of GPUs, whose last bits are ones.
    """
    tx = jm.scale_by_momentum(0.0, mu_dtype=dtype)
    ones = jax.lax.bitcast_convert_type(jnp.uint32(0x7FFFFFFF), jnp.float32)
    rows = jnp.array([[0.0, 0.0], [1e30, -3e29], [1e-30, 1e-31], [jnp.inf, jnp.nan]])
    params = {
        "w": rows.at[3, 1].set(ones),
        "scalar": jnp.asarray(3.0),
        "empty": jnp.ones((2, 0)),
    }
    _, state = jax.jit(tx.update)(params, tx.init(params))
    np.testing.assert_array_equal(stored(state)[0], 0)
    np.testing.assert_allclose(stored(state)[1:3], rows[1:3], rtol=0.06)
    assert not np.isfinite(stored(state)[3]).any()
    guarded = jm.skip_nonfinite(tx)
    _, after = guarded.update(params, guarded.init(params), params)
    assert after.skipped == 1
    assert not np.any(stored(after.inner_state))
