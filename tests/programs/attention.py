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
    MODEL,
    NO_ROLES,
    PER_HEAD,
    TOKENS,
    UP_DOWN,
    WIDTH,
    attend,
    attention,
    between,
    cross_entropy,
    floats,
    integers,
    leaf,
    out_of_heads,
    per_head,
    program,
    rms,
    split_heads,
    up_down,
)


@between(
    q=PER_HEAD["q"],
    kv=leaf("io", WIDTH, HEAD),
    o=leaf("bio", 2, 2 * HEAD, WIDTH // 2),
)
def one_projection_for_keys_and_values(x, p):
    """DeepSeek-V4: keys are values too, and groups of heads have their own outputs."""
    q = jnp.einsum("btd,dhk->bthk", x, p["q"])
    kv = x @ p["kv"]
    scores = jax.nn.softmax(jnp.einsum("bthk,bsk->bhts", q, kv))
    o = jnp.einsum("bhts,bsk->bthk", scores, kv)
    groups = o.reshape(BATCH, LENGTH, 2, 2 * HEAD)
    return x + jnp.einsum("btgi,gio->btgo", groups, p["o"]).reshape(x.shape)


@between(**PER_HEAD, segments=leaf("adamw", 2, HEADS, HEAD))
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
        "k": leaf("ioo or ibo, key", WIDTH, 2, HEAD),
        "v": leaf("ioo or ibo, value", WIDTH, 2, HEAD),
    }
)
def grouped_queries(x, p):
    """JAX's own attention, with half as many heads of keys."""
    q, k, v = per_head(x, p)
    return x + out_of_heads(jax.nn.dot_product_attention(q, k, v, is_causal=True), p)


@between(
    qkv=leaf("ioo or ibo or iob", WIDTH, 3, WIDTH),
    out=leaf("io", WIDTH, WIDTH),
    gate_up=leaf("io", WIDTH, 2 * HIDDEN),
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
    r=leaf("ioo or ibo", WIDTH, HEADS, HEAD),
    bias=dict.fromkeys("uv", leaf("adamw", HEADS, HEAD)),
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


@between(
    att=ATTENTION,
    bias_table=leaf("adamw", 2 * LENGTH, HEADS),
    position_in=leaf("io or adamw", 2, 32),
    position_out=leaf("io", 32, HEADS),
)
def relative_position_biases(x, p):
    """T5's table of biases, and Swin v2's MLP of coordinates."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    coordinates = jnp.stack([distance, -distance], -1).astype(jnp.float32)
    hidden = jax.nn.relu(coordinates @ p["position_in"])
    bias = p["bias_table"][distance + LENGTH] + hidden @ p["position_out"]
    q, k, v = split_heads(x, p["att"])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.moveaxis(bias, -1, 0)
    o = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
    return x + o @ p["att"]["o"]


@program(
    floats(BATCH, 6, LENGTH, 3),
    integers(BATCH),
    patch=leaf("iio or adamw", 6, 3, WIDTH),
    cls=leaf("adamw", 1, 1, WIDTH),
    table=leaf("adamw", 10, WIDTH),
    att=ATTENTION,
    head=leaf("head", WIDTH, 10),
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


@between(att=ATTENTION, latents=leaf("adamw", 8, WIDTH))
def latents(x, p):
    """Perceiver: learned tokens, repeated for each sequence, look at the data."""
    att = p["att"]
    z = jnp.broadcast_to(p["latents"], (BATCH, 8, WIDTH))
    q, k, v = rms(z) @ att["q"], x @ att["k"], x @ att["v"]
    z = z + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ att["o"]
    return z.mean(1)


@between(
    att=NO_ROLES | {"q": leaf("refused", WIDTH, WIDTH)},
    latents=leaf("refused", 8, WIDTH),
)
def latents_not_repeated(x, p):
    """The same without the repetition: two parameters are multiplied."""
    att = p["att"]
    q, k, v = p["latents"] @ att["q"], x @ att["k"], x @ att["v"]
    z = jax.nn.softmax(jnp.einsum("nd,btd->bnt", q, k)) @ v @ att["o"]
    return z.mean(1)


@between(
    queries=leaf("adamw", 8, WIDTH),
    layers=[{"itself": NO_ROLES, "data": NO_ROLES}] * 2,
)
def object_queries(x, p):
    """DETR: learned queries attend to each other before they see any data."""

    def attend(x, y, p):
        scores = jax.nn.softmax((x @ p["q"]) @ (y @ p["k"]).swapaxes(1, 2))
        return scores @ (y @ p["v"]) @ p["o"]

    z = jnp.tile(p["queries"][None], (BATCH, 1, 1))
    for layer in p["layers"]:
        z = z + attend(z, z, layer["itself"])
        z = z + attend(z, x, layer["data"])
    return z


@between(
    att=ATTENTION,
    prefix_k=leaf("adamw", 5, HEADS, HEAD),
    prefix_v=leaf("adamw", 5, HEADS, HEAD),
    sinks=leaf("adamw", HEADS),
    registers=leaf("adamw", 3, WIDTH),
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


@between(
    query=leaf("io", WIDTH, 16),
    keys=leaf("adamw?", 2, 10, 8),
    values=leaf("adamw", 100, WIDTH),
)
def product_key_memory(x, p):
    """Keys that are compared with queries, and a table of the values of the best."""
    q = (x @ p["query"]).reshape(BATCH, LENGTH, 2, 8)
    scores = jnp.einsum("btnd,nkd->btnk", q, p["keys"])
    best, chosen = lax.top_k(scores, 3)
    both = best[:, :, 0, :, None] + best[:, :, 1, None, :]
    numbers = chosen[:, :, 0, :, None] * 10 + chosen[:, :, 1, None, :]
    weights = jax.nn.softmax(both.reshape(BATCH, LENGTH, 9))
    values = p["values"][numbers.reshape(BATCH, LENGTH, 9)]
    return x + jnp.einsum("btk,btkd->btd", weights, values)


@between(**PER_HEAD)
def attention_to_the_best_keys(x, p):
    """Each query keeps its three best keys: a top-k that routes nothing."""
    q, k, v = per_head(x, p)
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    least = lax.top_k(scores, 3)[0][..., -1:]
    scores = jax.nn.softmax(jnp.where(scores >= least, scores, -1e9))
    return x + out_of_heads(jnp.einsum("bhts,bshk->bthk", scores, v), p)


@program(TOKENS, **MODEL)
def largest_logits_beside_the_loss(p, ids):
    """What QK-clip asks for: the maximum of each head, over batch and positions."""
    x = p["emb"][ids]
    q, k, v = split_heads(rms(x), p["att"])
    logits = jnp.einsum("bthd,bshd->bhts", q, k)
    largest = logits.max((0, 2, 3))
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)
    x = x + y.reshape(x.shape) @ p["att"]["o"]
    return cross_entropy(x @ p["head"], ids), {"max_logits": largest}
