"""What the programs share: sizes, a language model around one block, attention."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.programs import program

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


def conv(x, w, groups=1):
    """Convolution of images (batch, height, width, channels) by (h, w, in, out)."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def attend(q, k, v):
    """Attention to all positions (batch, time, heads, d), as (batch, time, width)."""
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", scores, v).reshape(*q.shape[:2], -1)


def attention(x, p, heads=4):
    """Causal self-attention with p["q"], p["k"], p["v"] and p["o"], each (in, out)."""
    q, k, v = ((rms(x) @ p[n]).reshape(*x.shape[:-1], heads, -1) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ p["o"]


def up_down(x, p):
    """A block of two matrices."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def model(run, **params):
    """A program: `run(x, p)` between the table and the head.

    The labels are those of as many tokens as `run` returns, or of one without an axis.
    """

    def loss(p, ids):
        logits = run(p["emb"][ids], p) @ p["head"]
        count = logits.shape[1] if logits.ndim == 3 else None
        return cross_entropy(logits, ids[:, 0] if count is None else ids[:, :count])

    return loss, {**EMBED_AND_HEAD, **params}, (TOKENS,)


def model_with_attention(block, **params):
    """A program: one layer of attention and `block(x, p)`, between table and head."""

    def run(x, p):
        x = x + attention(x, p["att"])
        return rms(x + block(rms(x), p))

    return model(run, att=ATTENTION, **params)


def between(answers, *, of=model, **params):
    """Register a function of x and the parameters, within a model, as a program."""

    def register(function):
        @functools.wraps(function)
        def build():
            return of(function, **params)

        return program(EMBED_AND_HEAD_ANSWERS | answers)(build)

    return register


def language_model(answers, **params):
    """The same behind a layer of attention."""
    return between(MODEL_ANSWERS | answers, of=model_with_attention, **params)
