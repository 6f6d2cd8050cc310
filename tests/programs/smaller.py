"""Graphs, factorizations, convolutions, products written differently, and kernels."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tests.programs import program
from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EMBED_AND_HEAD,
    EMBED_AND_HEAD_ANSWERS,
    HIDDEN,
    LENGTH,
    TOKENS,
    UP_DOWN,
    VOCAB,
    WIDTH,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    language_model,
    rms,
    squared_error,
)


@program({"node_in edge_in": "io or adamw", "0 1": "io", "out": "head"})
def graph_network():
    """Messages along edges, summed at the nodes."""
    nodes, edges = 9, 20

    def loss(p, x, e, senders, receivers, y):
        x, e = jax.nn.relu(x @ p["node_in"]), jax.nn.relu(e @ p["edge_in"])
        for layer in "01":
            ends = jnp.concatenate([e, x[senders], x[receivers]], -1)
            messages = jax.nn.relu(ends @ p[layer]["edge"])
            total = jax.ops.segment_sum(messages, receivers, nodes)
            node = p[layer]["node"]
            x = x + jax.nn.relu(jnp.concatenate([x, total], -1) @ node)
            e = e + messages
        return squared_error(x.sum(0) @ p["out"], y)

    layer = {"edge": floats(3 * WIDTH, WIDTH), "node": floats(2 * WIDTH, WIDTH)}
    params = {
        "node_in": floats(5, WIDTH),
        "edge_in": floats(3, WIDTH),
        "0": layer,
        "1": layer,
        "out": floats(WIDTH, 2),
    }
    ends = integers(edges), integers(edges)
    return loss, params, (floats(nodes, 5), floats(edges, 3), *ends, floats(2))


@program({"users items": "embedding"})
def matrix_factorization():
    """The product of two rows that integers pick."""

    def loss(p, user, item, rating):
        return squared_error((p["users"][user] * p["items"][item]).sum(-1), rating)

    params = {"users": floats(50, WIDTH), "items": floats(60, WIDTH)}
    return loss, params, (integers(BATCH), integers(BATCH), floats(BATCH))


@program({"words contexts": "embedding"})
def word2vec():
    """Rows against rows, by a product of both."""

    def loss(p, word, contexts):
        scores = jnp.einsum("bd,bnd->bn", p["words"][word], p["contexts"][contexts])
        return -jnp.mean(jax.nn.log_sigmoid(scores))

    params = {"words": floats(50, WIDTH), "contexts": floats(60, WIDTH)}
    return loss, params, (integers(BATCH), integers(BATCH, 5))


@program({**EMBED_AND_HEAD_ANSWERS, "up down": "io"})
def one_hot_embedding():
    """The lookup is a product with a one-hot matrix."""

    def loss(p, ids):
        x = jax.nn.one_hot(ids, VOCAB) @ p["emb"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return cross_entropy(x @ p["head"], ids)

    params = {"up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH)}
    return loss, {**EMBED_AND_HEAD, **params}, (TOKENS,)


@program({"w1": "io or adamw", "generate": "io", "out": "head"})
def hypernetwork():
    """The data itself becomes a matrix."""

    def loss(p, z, x, y):
        generated = jnp.tanh(z @ p["w1"]) @ p["generate"]
        hidden = jnp.tanh(x @ generated.reshape(WIDTH, HIDDEN))
        return squared_error(hidden @ p["out"], y)

    params = {
        "w1": floats(4, 12),
        "generate": floats(12, WIDTH * HIDDEN),
        "out": floats(HIDDEN, 3),
    }
    return loss, params, (floats(4), floats(BATCH, WIDTH), floats(BATCH, 3))


@program({"w1": "io or adamw", "w2": "adamw", "out": "head"})
def product_by_broadcast_and_sum():
    """A matrix product without a `dot_general`: by convention it is elementwise."""

    def loss(p, x, y):
        hidden = jnp.tanh(x @ p["w1"])
        hidden = jnp.tanh((hidden[:, :, None] * p["w2"]).sum(1))
        return squared_error(hidden @ p["out"], y)

    params = {
        "w1": floats(7, WIDTH),
        "w2": floats(WIDTH, HIDDEN),
        "out": floats(HIDDEN, 3),
    }
    return loss, params, (floats(BATCH, 7), floats(BATCH, 3))


@program({"frequencies": "adamw", "w": "io", "out": "head"})
def fourier_features():
    """Learned frequencies of one coordinate: an outer product."""

    def loss(p, time, y):
        angles = time[:, None] * p["frequencies"][None]
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return squared_error(jax.nn.gelu(x @ p["w"]) @ p["out"], y)

    params = {
        "frequencies": floats(12),
        "w": floats(WIDTH, HIDDEN),
        "out": floats(HIDDEN, 3),
    }
    return loss, params, (floats(BATCH), floats(BATCH, 3))


@between(
    {"bilinear": "iio or bio or ibo", "left right": "io"},
    left=floats(WIDTH, 5),
    right=floats(WIDTH, 7),
    bilinear=floats(5, 7, WIDTH),
)
def bilinear_layer(x, p):
    """A tensor that meets two activations and gives a third."""
    left, right = x @ p["left"], x @ p["right"]
    return x + jnp.einsum("bti,ijo,btj->bto", left, p["bilinear"], right)


@between(
    {"diagonal": "bio", "grouped": "bio", "w": "io"},
    diagonal=floats(4, 6, 6),
    w=floats(WIDTH, WIDTH),
    grouped=floats(3, 8, 8),
)
def block_diagonal(x, p):
    """Groups of features, each with a matrix of its own: two ways to write it."""
    groups = x.reshape(BATCH, LENGTH, 4, 6)
    y = jnp.einsum("btgi,gio->btgo", groups, p["diagonal"]).reshape(x.shape)
    x = jax.nn.gelu(x + y) @ p["w"]
    parts = jnp.split(x, 3, -1)
    y = jnp.concatenate([q @ p["grouped"][n] for n, q in enumerate(parts)], -1)
    return x + y


@program({"patches": "io or adamw", "tokens channels": "io", "head": "head"})
def mlp_mixer():
    """A kernel along the tokens and one along the channels, one after the other."""

    def loss(p, images, labels):
        x = images.reshape(BATCH, LENGTH, 12) @ p["patches"]
        for kind, axes in (("tokens", (0, 2, 1)), ("channels", (0, 1, 2))):
            y = rms(x).transpose(axes)
            y = jax.nn.gelu(y @ p[kind]["up"]) @ p[kind]["down"]
            x = x + y.transpose(axes)
        return cross_entropy(x.mean(1) @ p["head"], labels)

    params = {
        "patches": floats(12, WIDTH),
        "tokens": {"up": floats(LENGTH, 20), "down": floats(20, LENGTH)},
        "channels": {"up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH)},
        "head": floats(WIDTH, 10),
    }
    return loss, params, (floats(BATCH, 8, 8, 3), integers(BATCH))


@program(
    {
        "stem": "iiio or adamw",
        "depthwise": "adamw",
        "pointwise": "iiio",
        "groups": "adamw?",
        "transposed": "ooio or iiio",
        "out": "head",
    }
)
def convolutions():
    """Plain, depthwise, pointwise, grouped, transposed without overlap, and a head."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(p, images):
        x = jax.nn.relu(conv(images, p["stem"]))
        x = jax.nn.relu(conv(x, p["depthwise"], WIDTH))
        x = jax.nn.relu(conv(x, p["pointwise"]))
        x = jax.nn.relu(conv(x, p["groups"], 4))
        x = lax.conv_transpose(
            x, p["transposed"], (2, 2), "VALID", dimension_numbers=numbers
        )
        return jnp.mean(conv(jax.nn.relu(x), p["out"]) ** 2)

    params = {
        "stem": floats(3, 3, 3, WIDTH),
        "depthwise": floats(3, 3, 1, WIDTH),
        "pointwise": floats(1, 1, WIDTH, WIDTH),
        "groups": floats(3, 3, WIDTH // 4, WIDTH),
        "transposed": floats(2, 2, WIDTH, 12),
        "out": floats(3, 3, 12, 3),
    }
    return loss, params, (floats(BATCH, 8, 8, 3),)


@program({"stem": "io or adamw", "conv": "iio", "head": "head"})
def convolution_by_patches():
    """Windows are gathered first, and a product follows."""

    def loss(p, signal, labels):
        x = jax.nn.relu(signal @ p["stem"])
        steps = jnp.arange(LENGTH - 2)[:, None] + jnp.arange(3)
        windows = x[:, steps]  # (batch, places, 3, width)
        x = jax.nn.relu(jnp.einsum("btwi,wio->bto", windows, p["conv"]))
        return cross_entropy(x.mean(1) @ p["head"], labels)

    params = {
        "stem": floats(2, WIDTH),
        "conv": floats(3, WIDTH, HIDDEN),
        "head": floats(HIDDEN, 10),
    }
    return loss, params, (floats(BATCH, LENGTH, 2), integers(BATCH))


# --- kernels that hide what they compute ----------------------------------------------


@between({"att up down": "io"}, att=ATTENTION, **UP_DOWN)
def attention_kernel_with_its_own_derivative(x, p):
    """A Pallas kernel between products, in a `custom_vjp`; it takes no parameter."""

    def kernel(q, k, v, o):
        o[...] = q[...] + k[...] + v[...]

    @jax.custom_vjp
    def flash(q, k, v):
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return pl.pallas_call(kernel, out_shape=out)(q, k, v)

    flash.defvjp(lambda q, k, v: (flash(q, k, v), None), lambda _, g: (g, g, g))

    att = p["att"]
    x = x + flash(x @ att["q"], x @ att["k"], x @ att["v"]) @ att["o"]
    return x + jax.nn.gelu(rms(x) @ p["up"]) @ p["down"]


@language_model({"up": "io?", "down": "io"}, **UP_DOWN)
def product_in_a_kernel(x, p):
    """A Pallas kernel takes a parameter: only a rule says what it does with it."""

    def kernel(x, w, o):
        o[...] = x[...] @ w[...]

    def product(x, w):
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(kernel, out_shape=out)(x, w)

    hidden = product(x.reshape(-1, WIDTH), p["up"])
    return jax.nn.gelu(hidden).reshape(BATCH, LENGTH, HIDDEN) @ p["down"]
