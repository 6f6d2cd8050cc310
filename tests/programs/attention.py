"""Attention in its many forms, and parameters that take the place of tokens in it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    PER_HEAD,
    UP_DOWN,
    WIDTH,
    Leaf,
    attend,
    attention,
    between,
    cross_entropy,
    floats,
    integers,
    out_of_heads,
    per_head,
    program,
    rms,
    split_heads,
    up_down,
)


@between(**PER_HEAD, segments=Leaf("adamw", 2, HEADS, HEAD))
def a_table_that_queries_are_compared_with(x, p):
    """XLNet: whether two tokens are of one segment has a vector for each head."""
    q, k, v = per_head(x, p)
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    of_segments = jnp.einsum("bthk,ghk->bhtg", q, p["segments"])
    are_one = jnp.arange(LENGTH) // 2 == jnp.arange(LENGTH)[:, None] // 2
    scores += jnp.where(are_one, of_segments[..., 1:], of_segments[..., :1])
    o = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    return x + out_of_heads(o, p)


@between(**PER_HEAD)
def rotary_positions_and_normalized_queries(x, p):
    """Halves of a head are turned, put together again and squared."""

    def rotate(x):
        angle = jnp.arange(LENGTH)[:, None, None] * jnp.arange(1.0, 1 + HEAD // 2)
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return rms(jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1))

    q, k, v = per_head(x, p)
    return x + out_of_heads(attend(rotate(q), rotate(k), v), p)


@between(
    **PER_HEAD
    | {
        "k": Leaf("ioo or ibo, key", WIDTH, 2, HEAD),
        "v": Leaf("ioo or ibo, value", WIDTH, 2, HEAD),
    }
)
def grouped_queries(x, p):
    """JAX's own attention, with half as many heads of keys."""
    q, k, v = per_head(x, p)
    return x + out_of_heads(jax.nn.dot_product_attention(q, k, v, is_causal=True), p)


@between(
    qkv=Leaf("ioo or ibo or iob", WIDTH, 3, WIDTH),
    out=Leaf("io", WIDTH, WIDTH),
    gate_up=Leaf("io", WIDTH, 2 * HIDDEN),
    down=UP_DOWN["down"],
)
def fused_kernels(x, p):
    """One kernel (in, 3, out) for attention, and one for both halves of a gated MLP."""
    qkv = jnp.einsum("btd,dnh->btnh", rms(x), p["qkv"])
    q, k, v = (
        part.reshape(BATCH, LENGTH, HEADS, HEAD) for part in jnp.split(qkv, 3, 2)
    )
    x = x + attend(q, k, v).reshape(x.shape) @ p["out"]
    gate, up = jnp.split(rms(x) @ p["gate_up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


@between(
    **PER_HEAD,
    r=Leaf("ioo or ibo", WIDTH, HEADS, HEAD),
    bias=dict.fromkeys("uv", Leaf("adamw", HEADS, HEAD)),
)
def transformer_xl(x, p):
    """Relative positions: sinusoids times a kernel, and biases of the queries."""
    steps = jnp.arange(2 * LENGTH)[:, None]
    positions = jnp.sin(steps * jnp.exp(-jnp.arange(WIDTH) / 5))
    q, k, v = per_head(x, p)
    r = jnp.einsum("sd,dnh->snh", positions, p["r"])
    content = jnp.einsum("btnh,bsnh->bnts", q + p["bias"]["u"], k)
    position = jnp.einsum("btnh,snh->bnts", q + p["bias"]["v"], r)[..., :LENGTH]
    scores = jax.nn.softmax(content + position)
    return x + out_of_heads(jnp.einsum("bnts,bsnh->btnh", scores, v), p)


@program(
    floats(BATCH, 6, LENGTH, 3),
    integers(BATCH),
    patch=Leaf("iio or adamw", 6, 3, WIDTH),
    cls=Leaf("adamw", 1, 1, WIDTH),
    table=Leaf("adamw", 10, WIDTH),
    att=ATTENTION,
    head=Leaf("head", WIDTH, 10),
)
def vision_transformer(p, images, labels):
    """A class token is concatenated, and positions are resized, then added."""
    x = jnp.einsum("bijc,ico->bjo", images, p["patch"])
    cls = jnp.broadcast_to(p["cls"], (BATCH, 1, WIDTH))
    x = jnp.concatenate([cls, x], 1)
    x = x + jax.image.resize(p["table"], (LENGTH + 1, WIDTH), "bilinear")
    x = x + attention(x, p["att"])
    return cross_entropy(rms(x[:, 0]) @ p["head"], labels)


# --- parameters in the place of tokens ------------------------------------------------


@between(
    att=ATTENTION,
    prefix_k=Leaf("adamw", 5, HEADS, HEAD),
    prefix_v=Leaf("adamw", 5, HEADS, HEAD),
    sinks=Leaf("adamw", HEADS),
    registers=Leaf("adamw", 3, WIDTH),
    mlp=UP_DOWN,
)
def prefixes_sinks_and_registers(x, p):
    """Learned keys and values, a learned score for nothing, and learned tokens."""
    registers = jnp.broadcast_to(p["registers"], (BATCH, 3, WIDTH))
    x = jnp.concatenate([registers, x], 1)
    q, k, v = split_heads(x, p["att"])
    prefix = (BATCH, 5, HEADS, HEAD)
    k = jnp.concatenate([jnp.broadcast_to(p["prefix_k"], prefix), k], 1)
    v = jnp.concatenate([jnp.broadcast_to(p["prefix_v"], prefix), v], 1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*scores.shape[:-1], 1))
    scores = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
    o = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(BATCH, -1, WIDTH)
    x = x + o @ p["att"]["o"]
    return (x + up_down(x, p["mlp"]))[:, 3:]


@between(**PER_HEAD)
def attention_to_the_best_keys(x, p):
    """Each query keeps its three best keys: a top-k that routes nothing."""
    q, k, v = per_head(x, p)
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    least = lax.top_k(scores, 3)[0][..., -1:]
    scores = jax.nn.softmax(jnp.where(scores >= least, scores, -1e9))
    return x + out_of_heads(jnp.einsum("bhts,bshk->bthk", scores, v), p)
