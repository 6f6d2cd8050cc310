"""What the programs share: sizes, a language model around one block, attention."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

# All different, so that no axis can be taken for another one by its size.
BATCH, LENGTH, WIDTH, HIDDEN, VOCAB, EXPERTS = 2, 16, 24, 40, 96, 6


def floats(*shape):
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape):
    """The shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def key():
    """The shape of a random key."""
    return jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


TOKENS = integers(BATCH, LENGTH)
EMBED_AND_HEAD = {"emb": floats(VOCAB, WIDTH), "head": floats(WIDTH, VOCAB)}
EMBED_AND_HEAD_ANSWERS = {"emb": "embedding", "head": "head"}
ATTENTION = {name: floats(WIDTH, WIDTH) for name in "qkvo"}
UP_DOWN = {"up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH)}

# What `language_model` brings along, and the two matrices of most blocks.
ATTENTION_ANSWERS = {
    "att/q": "io, query",
    "att/k": "io, key",
    "att/v": "io, value",
    "att/o": "io, out",
}
MODEL_ANSWERS = {**EMBED_AND_HEAD_ANSWERS, **ATTENTION_ANSWERS}
MLP_ANSWERS = {**MODEL_ANSWERS, "up down": "io"}


def cross_entropy(logits, labels):
    """Mean over all labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def squared_error(x, y):
    """Mean over all elements."""
    return jnp.mean((x - y) ** 2)


def rms(x):
    """RMSNorm without a scale."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(x, p, heads=4):
    """Causal self-attention with p["q"], p["k"], p["v"] and p["o"], each (in, out)."""
    q, k, v = ((rms(x) @ p[n]).reshape(*x.shape[:-1], heads, -1) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ p["o"]


def language_model(block, **params):
    """A program: one layer of attention and `block(x, p)`, between table and head."""

    def loss(p, ids):
        x = p["emb"][ids]
        x = x + attention(x, p["att"])
        x = x + block(rms(x), p)
        return cross_entropy(rms(x) @ p["head"], ids)

    return loss, {**EMBED_AND_HEAD, "att": ATTENTION, **params}, (TOKENS,)
