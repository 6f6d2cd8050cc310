"""What multiplies data and is no matrix by convention, and what else is decided so."""

import jax
import jax.numpy as jnp

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    LENGTH,
    WIDTH,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    key,
    squared_error,
)


@program(
    {
        "image/stem": "iiio",
        "image/conv": "iiio",
        "text/emb": "embedding",
        "text/w": "io",
        "image/project text/project": "head",
        "temperature": "adamw",
    }
)
def contrastive_images_and_texts():
    """CLIP: the last products of two towers are compared with each other."""

    def loss(p, images, ids):
        x = jax.nn.relu(conv(images, p["image"]["stem"]))
        x = jax.nn.relu(conv(x, p["image"]["conv"])).mean((1, 2))
        x = x @ p["image"]["project"]
        y = jax.nn.gelu(p["text"]["emb"][ids].mean(1) @ p["text"]["w"])
        y = y @ p["text"]["project"]
        x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        logits = jnp.exp(p["temperature"]) * x @ y.T
        labels = jnp.arange(BATCH)
        return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)

    params = {
        "image": {
            "stem": floats(3, 3, 3, 10),
            "conv": floats(3, 3, 10, 14),
            "project": floats(14, 12),
        },
        "text": {
            "emb": floats(50, WIDTH),
            "w": floats(WIDTH, HIDDEN),
            "project": floats(HIDDEN, 12),
        },
        "temperature": floats(),
    }
    return loss, params, (floats(BATCH, 8, 8, 3), integers(BATCH, LENGTH))


@program({"0/mean": "io", "1/mean": "head", "0/rho 1/rho": "adamw"})
def bayes_by_backprop():
    """Each weight is drawn from a normal distribution of its own."""

    def loss(p, random_key, x, labels):
        for name, one in zip("01", jax.random.split(random_key), strict=True):
            mean, rho = p[name]["mean"], p[name]["rho"]
            noise = jax.random.normal(one, mean.shape)
            x = jax.nn.relu(x) @ (mean + jax.nn.softplus(rho) * noise)
        complexity = sum(jnp.sum(q["mean"] ** 2 - q["rho"]) for q in p.values())
        return cross_entropy(x, labels) + 1e-3 * complexity

    def layer(*shape):
        return {"mean": floats(*shape), "rho": floats(*shape)}

    params = {"0": layer(9, WIDTH), "1": layer(WIDTH, 5)}
    return loss, params, (key(), floats(BATCH, 9), integers(BATCH))


@program({"w": "io", "centers widths": "adamw", "out": "head"})
def radial_basis_functions():
    """Distances to learned centers, by a product and two norms."""

    def loss(p, x, y):
        x = jnp.tanh(x @ p["w"])
        norms = (x**2).sum(-1, keepdims=True), (p["centers"] ** 2).sum(-1)
        squares = norms[0] + norms[1] - 2 * x @ p["centers"].T
        return squared_error(jnp.exp(-squares * p["widths"]) @ p["out"], y)

    params = {
        "w": floats(7, WIDTH),
        "centers": floats(30, WIDTH),
        "widths": floats(30),
        "out": floats(30, 3),
    }
    return loss, params, (floats(BATCH, 7), floats(BATCH, 3))


@program({"w1 w2": "io", "inducing": "adamw", "mean": "head", "scale": "adamw"})
def deep_kernel_with_inducing_points():
    """A sparse Gaussian process on the features of a network."""

    def loss(p, x, y):
        features = jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"])

        def kernel(a, b):
            squares = (a**2).sum(-1)[:, None] - 2 * a @ b.T + (b**2).sum(-1)[None]
            return jnp.exp(-0.5 * squares * jnp.exp(p["scale"]))

        inner = kernel(p["inducing"], p["inducing"]) + 1e-4 * jnp.eye(15)
        root = jnp.linalg.cholesky(inner)
        cross = kernel(features, p["inducing"])
        whitened = jax.scipy.linalg.solve_triangular(root, cross.T, lower=True)
        return squared_error(whitened.T @ p["mean"], y)

    params = {
        "w1": floats(7, WIDTH),
        "w2": floats(WIDTH, 6),
        "inducing": floats(15, 6),
        "mean": floats(15, 3),
        "scale": floats(),
    }
    return loss, params, (floats(BATCH, 7), floats(BATCH, 3))


@between(
    {"up down": "io", "gains": "adamw", "shared": "io"},
    up=floats(WIDTH, HIDDEN),
    down=floats(HIDDEN, WIDTH),
    shared=floats(WIDTH, WIDTH),
    gains=floats(4, WIDTH),
)
def blocks_of_a_matrix_with_gains(x, p):
    """A scale for each block of rows, and multiplicative noise on a matrix."""
    shared = p["shared"].reshape(4, 6, WIDTH) * p["gains"][:, None]
    noise = jax.random.normal(jax.random.key(3), p["up"].shape)
    x = x + jax.nn.gelu(x @ (p["up"] * (1 + 0.1 * noise))) @ p["down"]
    return x @ shared.reshape(WIDTH, WIDTH)
