"""The example's model: it is causal, and `generate` looks at its context alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpt import GPT, generate


@pytest.fixture
def model() -> GPT:
    """A model whose head and projections are not zero."""
    graph, params = nnx.split(GPT(11, 32, 1, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.array(random.normal(size=p.shape)), params)
    return nnx.merge(graph, params)


def test_a_character_does_not_see_later_ones(model):
    tokens = np.arange(20).reshape(2, 10) % 11
    tokens[1] = tokens[0]
    tokens[1, 6] = 10
    first, changed = jax.jit(GPT.__call__)(model, tokens)
    np.testing.assert_allclose(first[:6], changed[:6], atol=1e-5)
    assert (abs(first[6:] - changed[6:]).max(axis=-1) > 1e-3).all()


def test_generate_looks_at_the_last_characters_only(model):
    prompt, length, context = np.array([3, 1, 4]), 12, 8
    draw = jax.jit(generate, static_argnames=("length", "context", "temperature"))
    given = {"length": length, "context": context, "key": jax.random.key(0)}
    written = draw(model, prompt, temperature=1e-6, **given)  # takes the likeliest
    tokens = np.concatenate([prompt, written])
    ends = np.arange(context, tokens.size)
    windows = tokens[ends[:, None] - np.arange(context, 0, -1)]  # (7, 8)
    likeliest = jax.jit(GPT.__call__)(model, windows).argmax(axis=-1)
    np.testing.assert_array_equal(likeliest[:, -1], tokens[context:])
    np.testing.assert_array_equal(likeliest[0, 2:], tokens[3 : context + 1])
