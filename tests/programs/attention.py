"""Attention in its many forms, and parameters that take the place of tokens in it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.parts import (
    ATTENTION,
    ATTENTION_ANSWERS,
    BATCH,
    EMBED_AND_HEAD,
    HIDDEN,
    LENGTH,
    MODEL_ANSWERS,
    TOKENS,
    UP_DOWN,
    WIDTH,
    attend,
    attention,
    between,
    cross_entropy,
    floats,
    integers,
    rms,
)

HEADS, HEAD = 4, 6  # of WIDTH
# Queries, keys and values (in, heads, head), with all heads as the output, or each
# head a matrix of its own.
PER_HEAD = {
    name: f"ioo or ibo, {role}"
    for name, role in zip("qkv", ("query", "key", "value"), strict=True)
}


@between(
    {"q": PER_HEAD["q"], "kv": "io", "o": "bio"},
    q=floats(WIDTH, HEADS, HEAD),
    kv=floats(WIDTH, HEAD),
    o=floats(2, 2 * HEAD, WIDTH // 2),
)
def one_projection_for_keys_and_values(x, p):
    """DeepSeek-V4: keys are values too, and groups of heads have their own outputs."""
    q = jnp.einsum("btd,dhk->bthk", x, p["q"])
    kv = x @ p["kv"]
    scores = jax.nn.softmax(jnp.einsum("bthk,bsk->bhts", q, kv))
    o = jnp.einsum("bhts,bsk->bthk", scores, kv)
    groups = o.reshape(BATCH, LENGTH, 2, 2 * HEAD)
    y = jnp.einsum("btgi,gio->btgo", groups, p["o"]).reshape(x.shape)
    return x + y


@between(
    {**PER_HEAD, "o": "iio, out", "segments": "adamw"},
    **dict.fromkeys("qkv", floats(WIDTH, HEADS, HEAD)),
    o=floats(HEADS, HEAD, WIDTH),
    segments=floats(2, HEADS, HEAD),
)
def a_table_that_queries_are_compared_with(x, p):
    """XLNet: whether two tokens are of one segment has a vector for each head."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    of_segments = jnp.einsum("bthk,ghk->bhtg", q, p["segments"])
    are_one = jnp.arange(LENGTH) // 2 == jnp.arange(LENGTH)[:, None] // 2
    scores += jnp.where(are_one, of_segments[..., 1:], of_segments[..., :1])
    o = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    return x + jnp.einsum("bthk,hkd->btd", o, p["o"])


@between(
    {**PER_HEAD, "o": "iio, out"},
    **dict.fromkeys("qkv", floats(WIDTH, HEADS, HEAD)),
    o=floats(HEADS, HEAD, WIDTH),
)
def rotary_positions_and_normalized_queries(x, p):
    """Halves of a head are turned, put together again and squared."""

    def rotate(x):
        angle = jnp.arange(LENGTH)[:, None, None] * jnp.arange(1.0, 1 + HEAD // 2)
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return rms(jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1))

    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", rotate(q), rotate(k)))
    o = jnp.einsum("bhts,bshk->bthk", scores, v)
    return x + jnp.einsum("bthk,hkd->btd", o, p["o"])


@between(
    {**PER_HEAD, "o": "iio, out"},
    q=floats(WIDTH, HEADS, HEAD),
    k=floats(WIDTH, 2, HEAD),
    v=floats(WIDTH, 2, HEAD),
    o=floats(HEADS, HEAD, WIDTH),
)
def grouped_queries(x, p):
    """JAX's own attention, with half as many heads of keys."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + jnp.einsum("bthk,hkd->btd", o, p["o"])


@between(
    {"qkv": "ioo or ibo or iob", "out gate_up down": "io"},
    qkv=floats(WIDTH, 3, WIDTH),
    out=floats(WIDTH, WIDTH),
    gate_up=floats(WIDTH, 2 * HIDDEN),
    down=floats(HIDDEN, WIDTH),
)
def fused_kernels(x, p):
    """One kernel (in, 3, out) for attention, and one for both halves of a gated MLP."""
    qkv = jnp.einsum("btd,dnh->btnh", rms(x), p["qkv"])
    q, k, v = (
        part.reshape(BATCH, LENGTH, HEADS, HEAD) for part in jnp.split(qkv, 3, 2)
    )
    x = x + attend(q, k, v) @ p["out"]
    gate, up = jnp.split(rms(x) @ p["gate_up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


@between(
    {
        **PER_HEAD,
        "r": "ioo or ibo",
        "o": "iio, out",
        "bias": "adamw",
    },
    **{name: floats(WIDTH, HEADS, HEAD) for name in "qkvr"},
    o=floats(HEADS, HEAD, WIDTH),
    bias={name: floats(HEADS, HEAD) for name in "uv"},
)
def transformer_xl(x, p):
    """Relative positions: sinusoids times a kernel, and biases of the queries."""
    steps = jnp.arange(2 * LENGTH)[:, None]
    positions = jnp.sin(steps * jnp.exp(-jnp.arange(WIDTH) / 5))
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]) for n in "qkv")
    r = jnp.einsum("sd,dnh->snh", positions, p["r"])
    content = jnp.einsum("btnh,bsnh->bnts", q + p["bias"]["u"], k)
    position = jnp.einsum("btnh,snh->bnts", q + p["bias"]["v"], r)[..., :LENGTH]
    scores = jax.nn.softmax(content + position)
    o = jnp.einsum("bnts,bsnh->btnh", scores, v)
    return x + jnp.einsum("btnh,nhd->btd", o, p["o"])


@between(
    {
        **MODEL_ANSWERS,
        "bias_table": "adamw",
        "position_in": "io or adamw",
        "position_out": "io",
    },
    att=ATTENTION,
    bias_table=floats(2 * LENGTH, HEADS),
    position_in=floats(2, 32),
    position_out=floats(32, HEADS),
)
def relative_position_biases(x, p):
    """T5's table of biases, and Swin v2's MLP of coordinates."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    coordinates = jnp.stack([distance, -distance], -1).astype(jnp.float32)
    hidden = jax.nn.relu(coordinates @ p["position_in"])
    bias = p["bias_table"][distance + LENGTH] + hidden @ p["position_out"]
    q, k, v = ((x @ p["att"][n]).reshape(BATCH, LENGTH, HEADS, HEAD) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.moveaxis(bias, -1, 0)
    o = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
    return x + o @ p["att"]["o"]


@program(
    {
        **ATTENTION_ANSWERS,
        "cls table": "adamw",
        "patch": "iio or adamw",
        "head": "head",
    }
)
def vision_transformer():
    """A class token is concatenated, and positions are resized, then added."""

    def loss(p, images, labels):
        x = jnp.einsum("bijc,ico->bjo", images, p["patch"])
        cls = jnp.broadcast_to(p["cls"], (BATCH, 1, WIDTH))
        x = jnp.concatenate([cls, x], 1)
        x = x + jax.image.resize(p["table"], (LENGTH + 1, WIDTH), "bilinear")
        x = x + attention(x, p["att"])
        return cross_entropy(rms(x[:, 0]) @ p["head"], labels)

    params = {
        "patch": floats(6, 3, WIDTH),
        "cls": floats(1, 1, WIDTH),
        "table": floats(10, WIDTH),
        "att": ATTENTION,
        "head": floats(WIDTH, 10),
    }
    return loss, params, (floats(BATCH, 6, LENGTH, 3), integers(BATCH))


# --- parameters in the place of tokens ------------------------------------------------

# Where the loss cannot tell which side of attention is which.
NO_ROLES = {"att/q att/k att/v att/o": "io"}
LATENTS = {"att": ATTENTION, "latents": floats(8, WIDTH)}


@between({**ATTENTION_ANSWERS, "latents": "adamw"}, **LATENTS)
def latents(x, p):
    """Perceiver: learned tokens, repeated for each sequence, look at the data."""
    att = p["att"]
    z = jnp.broadcast_to(p["latents"], (BATCH, 8, WIDTH))
    q, k, v = rms(z) @ att["q"], x @ att["k"], x @ att["v"]
    z = z + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ att["o"]
    return z.mean(1)


@between({**NO_ROLES, "latents": "adamw"}, **LATENTS)
def latents_not_repeated(x, p):
    """The same without the repetition: two parameters are multiplied."""
    att = p["att"]
    q, k, v = p["latents"] @ att["q"], x @ att["k"], x @ att["v"]
    z = jax.nn.softmax(jnp.einsum("nd,btd->bnt", q, k)) @ v @ att["o"]
    return z.mean(1)


THREE = {name: floats(WIDTH, WIDTH) for name in "qkv"}


@between(
    {"queries": "adamw", "0 1": "io"},
    queries=floats(8, WIDTH),
    **{layer: {"itself": THREE, "data": THREE} for layer in "01"},
)
def object_queries(x, p):
    """DETR: learned queries attend to each other before they see any data."""

    def attend(x, y, p):
        scores = jax.nn.softmax((x @ p["q"]) @ (y @ p["k"]).swapaxes(1, 2))
        return scores @ (y @ p["v"])

    z = jnp.tile(p["queries"][None], (BATCH, 1, 1))
    for layer in "01":
        z = z + attend(z, z, p[layer]["itself"])
        z = z + attend(z, x, p[layer]["data"])
    return z


@between(
    {**MODEL_ANSWERS, "prefix_k prefix_v sinks registers": "adamw", "up": "io"},
    att=ATTENTION,
    prefix_k=floats(5, HEADS, HEAD),
    prefix_v=floats(5, HEADS, HEAD),
    sinks=floats(HEADS),
    registers=floats(3, WIDTH),
    up={"in": UP_DOWN["up"], "out": UP_DOWN["down"]},
)
def prefixes_sinks_and_registers(x, p):
    """Learned keys and values, a learned score for nothing, and learned tokens."""
    att = p["att"]
    registers = jnp.broadcast_to(p["registers"], (BATCH, 3, WIDTH))
    x = jnp.concatenate([registers, x], 1)
    heads = (BATCH, -1, HEADS, HEAD)
    q, k, v = ((x @ att[n]).reshape(heads) for n in "qkv")
    prefix = (BATCH, 5, HEADS, HEAD)
    k = jnp.concatenate([jnp.broadcast_to(p["prefix_k"], prefix), k], 1)
    v = jnp.concatenate([jnp.broadcast_to(p["prefix_v"], prefix), v], 1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*scores.shape[:-1], 1))
    scores = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
    o = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(BATCH, -1, WIDTH)
    x = x + o @ att["o"]
    x = x + jax.nn.gelu(x @ p["up"]["in"]) @ p["up"]["out"]
    return x[:, 3:]


@between(
    {"query": "io", "keys": "adamw?", "values": "adamw"},
    query=floats(WIDTH, 16),
    keys=floats(2, 10, 8),
    values=floats(100, WIDTH),
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


@program(MODEL_ANSWERS)
def largest_logits_beside_the_loss():
    """What QK-clip asks for: the maximum of each head, over batch and positions."""
    heads = (BATCH, LENGTH, 4, -1)

    def loss(p, ids):
        x = p["emb"][ids]
        q, k, v = ((rms(x) @ p["att"][n]).reshape(heads) for n in "qkv")
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        largest = logits.max((0, 2, 3))
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)
        x = x + y.reshape(x.shape) @ p["att"]["o"]
        return cross_entropy(x @ p["head"], ids), {"max_logits": largest}

    return loss, {**EMBED_AND_HEAD, "att": ATTENTION}, (TOKENS,)
