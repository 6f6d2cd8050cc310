"""Attention in its many forms, routing and recurrences of tokens."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EXPERTS,
    GAIN,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    PER_HEAD,
    TOKENS,
    UP_DOWN,
    UP_DOWN_EXPERTS,
    VOCAB,
    WIDTH,
    Leaf,
    attend,
    attention,
    between,
    cross_entropy,
    floats,
    heads,
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


# --- other attention, and routing of tokens -------------------------------------------


def rope_complex(x):
    """Pairs of elements of (batch, time, heads, head), turned by their position."""
    angle = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(x.shape[-1] // 2)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    z = lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angle)[None, :, None]
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


@program(
    TOKENS,
    tok=Leaf("embedding", VOCAB, WIDTH),
    layers={
        "n1": Leaf("adamw", 3, WIDTH),
        "n2": Leaf("adamw", 3, WIDTH),
        "wq": Leaf("bio", 3, WIDTH, WIDTH),
        "wk": Leaf("bio", 3, WIDTH, 2 * HEAD),
        "wv": Leaf("bio", 3, WIDTH, 2 * HEAD),
        "wo": Leaf("bio", 3, WIDTH, WIDTH),
        "w1": Leaf("bio", 3, WIDTH, HIDDEN),
        "w3": Leaf("bio", 3, WIDTH, HIDDEN),
        "w2": Leaf("bio", 3, HIDDEN, WIDTH),
    },
    norm=GAIN,
)
def tied_rotary_by_complex_numbers(p, ids):
    """Llama in a scan of checkpoints: rotary positions, grouped keys, a tied head."""

    def layer(x, w):
        h = rms(x) * w["n1"]
        q, k, v = heads(h @ w["wq"]), heads(h @ w["wk"], 2), heads(h @ w["wv"], 2)
        q, k = rope_complex(q), rope_complex(k)
        k, v = (jnp.repeat(z, max(1, HEADS // 2), 2)[:, :, :HEADS] for z in (k, v))
        x = x + attend(q, k, v, True).reshape(x.shape) @ w["wo"]
        h = rms(x) * w["n2"]
        return x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"], None

    policy = jax.checkpoint_policies.nothing_saveable
    x, _ = lax.scan(
        jax.checkpoint(layer, policy=policy),
        p["tok"][ids] * math.sqrt(WIDTH),
        p["layers"],
    )
    return cross_entropy((rms(x) * p["norm"]) @ p["tok"].T, ids)


@between(score=Leaf("router", WIDTH, EXPERTS), **UP_DOWN_EXPERTS)
def expert_choice(x, p):
    """Each expert takes its best tokens; results are added where they came from."""
    flat = rms(x).reshape(-1, WIDTH)
    n = len(flat)
    probs = jax.nn.softmax(flat @ p["score"])
    gates, tokens = lax.top_k(probs.T, min(4, n))
    rows = flat[tokens]
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", rows, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, p["down"]) * gates[..., None]
    out = jnp.zeros_like(flat).at[tokens.reshape(-1)].add(y.reshape(-1, WIDTH))
    return x + out.reshape(x.shape)


@between(
    score=Leaf("router", WIDTH, EXPERTS),
    balance=Leaf("adamw", EXPERTS),
    **UP_DOWN_EXPERTS,
    shared={
        "up": Leaf("io", WIDTH, HIDDEN),
        "gate": Leaf("io", WIDTH, HIDDEN),
        "down": Leaf("io", HIDDEN, WIDTH),
    },
)
def capacity_by_sorted_tokens(x, p):
    """DeepSeek: a bias chooses as well; slots for tokens, and an expert for all."""
    flat = rms(x).reshape(-1, WIDTH)
    n, k = len(flat), min(2, EXPERTS)
    scores = jax.nn.sigmoid(flat @ p["score"])
    _, chosen = lax.top_k(scores + lax.stop_gradient(p["balance"]), k)
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    at = expert[order]
    first = jnp.searchsorted(at, jnp.arange(EXPERTS))
    slot = jnp.arange(n * k) - first[at]
    buffer = jnp.zeros((EXPERTS, n, WIDTH))
    buffer = buffer.at[at, slot].set(flat[order // k], mode="drop")
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, p["down"])[at, slot]
    y = jnp.zeros((n * k, WIDTH)).at[order].set(y).reshape(n, k, WIDTH)
    s = p["shared"]
    shared = (jax.nn.silu(flat @ s["gate"]) * (flat @ s["up"])) @ s["down"]
    return x + ((y * weights[..., None]).sum(1) + shared).reshape(x.shape)


@between(weight=Leaf("adamw", WIDTH, 1), att=ATTENTION, **UP_DOWN)
def mixture_of_depths(x, p):
    """The best half of the tokens goes through a block, and back to its place."""
    score = (x @ p["weight"])[..., 0]
    k = max(1, x.shape[1] // 2)
    best, at = lax.top_k(score, k)
    rows = jnp.take_along_axis(x, at[..., None], 1)
    y = rows + jax.nn.gelu(rms(rows) @ p["up"]) @ p["down"]
    q, kk, v = (heads(rms(y) @ p["att"][n]) for n in "qkv")
    y = y + attend(q, kk, v).reshape(y.shape) @ p["att"]["o"]
    y = y * jax.nn.sigmoid(best)[..., None]
    return jax.vmap(lambda x, at, y: x.at[at].add(y))(x, at, y)
