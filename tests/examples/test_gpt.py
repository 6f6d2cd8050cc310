"""The example's model: it is causal, and `generate` looks at its context alone."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt import GPT, generate


def test_a_character_is_drawn_from_those_before_it():
    """Of the context alone; no logit sees a later character."""
    graph, params = nnx.split(GPT(11, 32, 1, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)  # no head and no projection of zeros
    params = jax.tree.map(lambda p: jnp.array(random.normal(size=p.shape)), params)
    model, logits = nnx.merge(graph, params), jax.jit(GPT.__call__)

    prompt, length, context = np.array([3, 1, 4]), 12, 8
    draw = jax.jit(generate, static_argnames=("length", "context", "temperature"))
    given = {"length": length, "context": context, "key": jax.random.key(0)}
    written = draw(model, prompt, temperature=1e-6, **given)  # takes the likeliest
    tokens = np.concatenate([prompt, written])
    ends = np.arange(context, tokens.size)
    windows = tokens[ends[:, None] - np.arange(context, 0, -1)]  # (7, 8)
    likeliest = logits(model, windows).argmax(axis=-1)
    np.testing.assert_array_equal(likeliest[:, -1], tokens[context:])
    # What stands behind a character changes nothing.
    np.testing.assert_array_equal(likeliest[0, 2:], tokens[3 : context + 1])
