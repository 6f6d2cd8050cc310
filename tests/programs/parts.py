"""What the programs share: shapes with answers, a language model, attention."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_muon.base.trees import leaves_with_paths
from tests.programs.sizes import (
    BATCH,
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    VOCAB,
    WIDTH,
)

# --- shapes and programs --------------------------------------------------------------


def floats(*shape):
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape):
    """The shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def key():
    """The shape of a random key."""
    return jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


class Leaf:
    """A float32 parameter: the right reading, and its shape."""

    def __init__(self, answer, *shape):
        self.answer, self.shape = answer, shape


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss with its parameters.

    Attributes:
      loss: a function of the parameters and `args`.
      params: a tree of `jax.ShapeDtypeStruct`.
      args: the other arguments, as shapes.
      answers: the right reading of each leaf by path.
    """

    loss: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    answers: Mapping[str, str]


PROGRAMS: dict[str, Program] = {}


def program(*args, **params):
    """Register a loss, of these parameters and then `args`, by its name."""

    def register(loss, name=None):
        name = name or loss.__name__
        assert name not in PROGRAMS, name
        shapes = jax.tree.map(lambda x: floats(*x.shape), params)
        answers = {path: x.answer for path, x in leaves_with_paths(params)}
        PROGRAMS[name] = Program(loss, shapes, args, answers)
        return loss

    return register


# --- functions and parameters of models -----------------------------------------------


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
    """Convolution of signals or images (batch, ..., channels) by (..., in, out)."""
    numbers = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC")
    ones = (1,) * (x.ndim - 2)
    return lax.conv_general_dilated(
        x, w, ones, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


SQUARE, GAIN = Leaf("io", WIDTH, WIDTH), Leaf("adamw", WIDTH)
UP_DOWN = {"up": Leaf("io", WIDTH, HIDDEN), "down": Leaf("io", HIDDEN, WIDTH)}
UP_DOWN_EXPERTS = {
    "up": Leaf("bio", EXPERTS, WIDTH, HIDDEN),
    "down": Leaf("bio", EXPERTS, HIDDEN, WIDTH),
}


def up_down(x, p):
    """A block of two matrices."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def widths(*sizes, first="io or adamw", last="head"):
    """The matrices of `mlp` with these widths.

    The first layer sees raw data; by convention either optimizer may take it.
    """
    answers = [first, *["io"] * (len(sizes) - 3), last]
    layers = zip(answers, itertools.pairwise(sizes), strict=True)
    return {f"w{i}": Leaf(answer, *pair) for i, (answer, pair) in enumerate(layers, 1)}


def mlp(p, x, activation):
    """Layers w1, w2, ... with an activation between them."""
    *hidden, last = sorted(p)
    for name in hidden:
        x = activation(x @ p[name])
    return x @ p[last]


# --- attention ------------------------------------------------------------------------

_ROLES = {"q": "query", "k": "key", "v": "value", "o": "kernel"}
ATTENTION = {n: Leaf(f"io, {role}", WIDTH, WIDTH) for n, role in _ROLES.items()}
# Queries, keys and values (in, heads, head), with all heads as the output, or each
# head a matrix of its own.
PER_HEAD = {
    name: Leaf(f"ioo or ibo, {_ROLES[name]}", WIDTH, HEADS, HEAD) for name in "qkv"
} | {"o": Leaf("iio", HEADS, HEAD, WIDTH)}


def attend(q, k, v, causal=False):
    """Attention to all positions, or earlier ones (batch, time, heads, head)."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    if causal:
        earlier = jnp.tril(jnp.ones(scores.shape[2:], bool))
        scores = jnp.where(earlier, scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def heads(x, count=HEADS):
    """The last axis (heads * head) as two."""
    return x.reshape(*x.shape[:-1], count, -1)


def split_heads(x, p):
    """Queries, keys and values (batch, time, heads, head) by matrices (in, out)."""
    return [heads(x @ p[n]) for n in "qkv"]


def per_head(x, p):
    """The same by arrays (in, heads, head)."""
    return [jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv"]


def out_of_heads(x, p):
    """The heads (batch, time, heads, head), back in the width, by `PER_HEAD`."""
    return jnp.einsum("bthk,hkd->btd", x, p["o"])


def attention(x, p):
    """Causal self-attention with p["q"], p["k"], p["v"] and p["o"], each (in, out)."""
    return attend(*split_heads(rms(x), p), causal=True).reshape(x.shape) @ p["o"]


# --- a language model around one block ------------------------------------------------

TOKENS = integers(BATCH, LENGTH)
EMBED_AND_HEAD = {
    "emb": Leaf("embedding", VOCAB, WIDTH),
    "head": Leaf("head", WIDTH, VOCAB),
}


def model(run):
    """The loss of `run(x, p)` between the table and the head.

    The labels are those of as many tokens as `run` returns, or of one without an axis.
    """

    def loss(p, ids):
        logits = run(p["emb"][ids], p) @ p["head"]
        count = logits.shape[1] if logits.ndim == 3 else None
        return cross_entropy(logits, ids[:, 0] if count is None else ids[:, :count])

    return loss


def with_attention(block):
    """The same of a layer of attention and `block(x, p)`."""

    def run(x, p):
        x = x + attention(x, p["att"])
        return rms(x + block(rms(x), p))

    return model(run)


MODEL = {**EMBED_AND_HEAD, "att": ATTENTION}  # parameters of `with_attention`


def between(**params):
    """Register `model` of a function as a program."""

    def register(run):
        add = program(TOKENS, **EMBED_AND_HEAD | params)
        return add(model(run), run.__name__)

    return register


def language_model(**params):
    """Register `with_attention` of a function as a program."""

    def register(block):
        add = program(TOKENS, **MODEL | params)
        return add(with_attention(block), block.__name__)

    return register
