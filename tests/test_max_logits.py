"""The largest logit of every head, in blocks: that of all logits, in little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm


def dense(q, k, scale, seen):
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    all_logits = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    return np.where(seen, all_logits, -np.inf).max(axis=(0, 2, 3))


@pytest.mark.parametrize(
    ("heads", "block_size"), [((4, 4), 1), ((6, 2), 4), ((3, 1), 64)]
)
def test_blocks_have_the_maximum_of_all_logits(rng, heads, block_size):
    q, k = (rng.normal(size=(2, 13, h, 4)).astype(np.float32) for h in heads)
    measure = jax.jit(
        jm.max_attention_logits, static_argnames=("scale", "causal", "block_size")
    )
    for options, scale, seen in (
        ({}, 0.5, np.tri(13, dtype=bool)),
        ({"causal": False, "scale": -2.0}, -2.0, np.array(True)),
    ):
        result = measure(q, k, block_size=block_size, **options)
        assert result.dtype == jnp.float32
        exact = dense(q.astype(float), k.astype(float), scale, seen)
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)
    # As many keys as one likes, where none is later than another.
    result = measure(q[:, :5], k, causal=False, block_size=block_size)
    np.testing.assert_allclose(
        result, dense(q[:, :5], k, 0.5, np.array(True)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_is_multiplied_in_float32(rng, causal):
    """Without promotion of dtypes and ranks."""
    q, k = (jnp.asarray(rng.normal(size=(1, 9, 2, 64)), jnp.bfloat16) for _ in "qk")
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        result = jm.max_attention_logits(q, k, causal=causal, block_size=4)
    assert result.dtype == jnp.float32
    wide = [np.asarray(x, np.float64) for x in (q, k)]
    exact = dense(*wide, 1 / 8, np.tri(9, dtype=bool) if causal else True)
    np.testing.assert_allclose(result, exact, rtol=1e-5)  # bfloat16 has 4e-3


def test_no_gradient_flows(rng):
    q, k = (jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.float32) for _ in "qk")
    grads = jax.grad(lambda q, k: jnp.sum(jm.max_attention_logits(q, k)), (0, 1))(q, k)
    assert not any(jnp.any(g) for g in grads)


def test_memory_is_that_of_a_block():
    batch, time, heads, d, block = 2, 2048, 4, 16, 128
    shape = jax.ShapeDtypeStruct((batch, time, heads, d), jnp.float32)
    measure = jax.jit(functools.partial(jm.max_attention_logits, block_size=block))
    used = measure.lower(shape, shape).compile().memory_analysis().temp_size_in_bytes
    all_logits = 4 * batch * heads * time**2  # 134 MB
    one_block = 4 * batch * heads * block**2  # 0.5 MB
    inputs = 2 * 4 * batch * time * heads * d  # 2 MB
    assert one_block <= used <= inputs + 4 * one_block < all_logits / 30


Q = (2, 5, 4, 8)


@pytest.mark.parametrize(
    ("q", "k", "options", "message"),
    [
        ((2, 5, 4), Q, {}, "expected .batch, time, heads, d."),
        (Q, (2, 5, 4, 6), {}, "expected .batch, time, heads, d."),
        (Q, (1, 5, 4, 8), {}, "expected .batch, time, heads, d."),
        (Q, (2, 5, 3, 8), {}, "key_heads that divide heads"),
        (Q, (2, 6, 4, 8), {}, "expected .*batch, the same time, key_heads"),
        (Q, Q, {"block_size": 0}, "block_size=0"),
    ],
)
def test_shapes_of_queries_and_keys(q, k, options, message):
    with pytest.raises(ValueError, match=message):
        jm.max_attention_logits(jnp.ones(q), jnp.ones(k), **options)
