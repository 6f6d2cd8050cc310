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


@program({"users items": "embedding"})
def matrix_factorization():
    """The product of two rows that integers pick."""

    def loss(p, user, item, rating):
        return squared_error((p["users"][user] * p["items"][item]).sum(-1), rating)

    params = {"users": floats(50, WIDTH), "items": floats(60, WIDTH)}
    return loss, params, (integers(BATCH), integers(BATCH), floats(BATCH))


@program({**EMBED_AND_HEAD_ANSWERS, "up down": "io"})
def one_hot_embedding():
    """The lookup is a product with a one-hot matrix."""

    def loss(p, ids):
        x = jax.nn.one_hot(ids, VOCAB) @ p["emb"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return cross_entropy(x @ p["head"], ids)

    params = {"up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH)}
    return loss, {**EMBED_AND_HEAD, **params}, (TOKENS,)


@program(
    {
        "stem": "iiio or adamw",
        "depthwise": "adamw",
        "pointwise": "iiio",
        "groups": "adamw?",
        "transposed": "ooio",
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


@language_model({"up": "io", "down": "io"}, **UP_DOWN)
def product_in_a_kernel(x, p):
    """A Pallas kernel takes a parameter, and its widths leave no choice."""

    def kernel(x, w, o):
        o[...] = x[...] @ w[...]

    def product(x, w):
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(kernel, out_shape=out)(x, w)

    hidden = product(x.reshape(-1, WIDTH), p["up"])
    return jax.nn.gelu(hidden).reshape(BATCH, LENGTH, HIDDEN) @ p["down"]
