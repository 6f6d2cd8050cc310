"""Inputs that no argument brings: drawn from a key, regular grids, learned codes."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.losses import mlp, widths
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    LENGTH,
    WIDTH,
    between,
    conv,
    floats,
    integers,
    key,
    rms,
    squared_error,
)


@program({"time in": "io", "out": "head"})
def diffusion_with_times_from_a_key():
    """Times are drawn inside; their sines and cosines go through two matrices."""

    def loss(p, random_key, x):
        a, b = jax.random.split(random_key)
        time = jax.random.uniform(a, (BATCH, 1))
        noise = jax.random.normal(b, x.shape)
        angles = 1000 * time * jnp.exp(-jnp.linspace(0, 9, 8))
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        embedded = jax.nn.silu(waves @ p["time"]["0"]) @ p["time"]["1"]
        hidden = jax.nn.silu((x * (1 - time) + noise * time) @ p["in"] + embedded)
        return squared_error(hidden @ p["out"], noise - x)

    params = {
        "time": {"0": floats(16, HIDDEN), "1": floats(HIDDEN, WIDTH)},
        "in": floats(7, WIDTH),
        "out": floats(WIDTH, 7),
    }
    return loss, params, (key(), floats(BATCH, 7))


@program({"g d/w1": "io", "d/w2": "head"})
def gan_with_latents_from_a_key():
    """The generator sees nothing but random numbers."""

    def loss(p, random_key, real):
        z = jax.random.normal(random_key, (real.shape[0], 6))
        fake = mlp(p["g"], z, jax.nn.relu)
        scores = [jax.nn.relu(x @ p["d"]["w1"]) @ p["d"]["w2"] for x in (real, fake)]
        one, two = (jax.nn.leaky_relu(score).sum(-1) for score in scores)
        return jnp.mean(jax.nn.softplus(-one) + jax.nn.softplus(two))

    d = {"w1": floats(9, HIDDEN), "w2": floats(HIDDEN, WIDTH)}
    answers = {"g": widths(6, WIDTH, HIDDEN, 9), "d": d}
    return loss, answers, (key(), floats(BATCH, 9))


@program({"w1 w2 quantiles": "io", "head": "head"})
def implicit_quantile_network():
    """Cosines of random fractions, embedded by a matrix, weigh the features."""

    def loss(p, seed, x, target):
        fractions = jax.random.uniform(jax.random.wrap_key_data(seed), (BATCH, 8))
        cosines = jnp.cos(jnp.pi * jnp.arange(16) * fractions[..., None])
        embedded = jax.nn.relu(jnp.einsum("bqi,id->bqd", cosines, p["quantiles"]))
        features = jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"])
        values = (features[:, None] * embedded) @ p["head"]
        error = target[:, None, None] - values
        weight = jnp.abs(fractions[..., None] - (error < 0))
        return jnp.mean(weight * error**2)

    params = {
        "w1": floats(7, HIDDEN),
        "w2": floats(HIDDEN, WIDTH),
        "quantiles": floats(16, WIDTH),
        "head": floats(WIDTH, 4),
    }
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return loss, params, (seed, floats(BATCH, 7), floats(BATCH))


@program({"w1 w2": "io", "w3": "head", "b1 b2": "adamw"})
def image_by_its_coordinates():
    """SIREN on the grid of all pixels; only the colors are data."""

    def loss(p, image):
        lines = jnp.linspace(-1, 1, 8)
        grid = jnp.stack(jnp.meshgrid(lines, lines, indexing="ij"), -1).reshape(-1, 2)
        x = jnp.sin(30 * (grid @ p["w1"] + p["b1"]))
        x = jnp.sin(x @ p["w2"] + p["b2"])
        return squared_error((x @ p["w3"]).reshape(image.shape), image)

    biases = {"b1": floats(WIDTH), "b2": floats(HIDDEN)}
    return loss, {**widths(2, WIDTH, HIDDEN, 3), **biases}, (floats(8, 8, 3),)


@program({"lift w1 w2": "io", "out": "head"})
def neural_field_at_whole_numbers():
    """Each place is a number of an `arange`, written in sines, under `vmap`."""

    def loss(p, signal):
        def at(place):
            waves = jnp.sin(place * 2.0 ** jnp.arange(10))
            x = jax.nn.gelu(waves @ p["lift"])
            x = x + jax.nn.gelu(rms(x) @ p["w1"]) @ p["w2"]
            return x @ p["out"]

        return squared_error(jax.vmap(at)(jnp.arange(64.0)), signal)

    params = {
        "lift": floats(10, WIDTH),
        "w1": floats(WIDTH, HIDDEN),
        "w2": floats(HIDDEN, WIDTH),
        "out": floats(WIDTH, 3),
    }
    return loss, params, (floats(64, 3),)


DECODER = {"w1": floats(6, WIDTH), "w2": floats(WIDTH, HIDDEN), "w3": floats(HIDDEN, 9)}
DECODER_ANSWERS = {"codes": "adamw", "w1 w2": "io", "w3": "head"}


@program(DECODER_ANSWERS)
def auto_decoder_of_all_codes():
    """A learned code for each sample; all samples are in the batch."""

    def loss(p, x):
        codes = p["codes"]
        hidden = jax.nn.relu(codes @ p["w1"])
        hidden = jax.nn.relu(hidden @ p["w2"])
        return squared_error(hidden @ p["w3"], x) + 1e-4 * jnp.sum(codes**2)

    return loss, {"codes": floats(50, 6), **DECODER}, (floats(50, 9),)


@program({**DECODER_ANSWERS, "b": "adamw"})
def auto_decoder_under_vmap_out_in():
    """The same with `vmap` over the codes, and `w @ x`."""

    def loss(p, x):
        def decode(code):
            hidden = jnp.tanh(p["w1"].T @ code + p["b"])
            return p["w3"].T @ jnp.tanh(p["w2"].T @ hidden)

        return squared_error(jax.vmap(decode)(p["codes"]), x)

    params = {"codes": floats(50, 6), **DECODER, "b": floats(WIDTH)}
    return loss, params, (floats(50, 9),)


@program({"codes": "adamw", "w1": "io", "w2": "io", "w3": "head"})
def shapes_by_codes_and_a_grid():
    """DeepSDF with all shapes at all points of a grid, and noise on the codes."""

    def loss(p, random_key, distances):
        grid = jnp.stack(jnp.mgrid[0:3, 0:3, 0:3], -1).reshape(27, 3) / 3
        codes = p["codes"] + 0.1 * jax.random.normal(random_key, p["codes"].shape)
        codes = jnp.broadcast_to(codes[:, None], (5, 27, 6))
        points = jnp.broadcast_to(grid[None], (5, 27, 3))
        x = jax.nn.relu(jnp.concatenate([codes, points], -1) @ p["w1"])
        x = jax.nn.relu(x @ p["w2"])
        return jnp.abs(x @ p["w3"] - distances).mean()

    params = {
        "codes": floats(5, 6),
        "w1": floats(9, WIDTH),
        "w2": floats(WIDTH, HIDDEN),
        "w3": floats(HIDDEN, 2),
    }
    return loss, params, (key(), floats(5, 27, 2))


@program({"seed": "io", "conv": "iiio", "out": "head"})
def deep_image_prior():
    """A fixed random vector becomes an image by a matrix and convolutions."""

    def loss(p, image):
        z = jax.random.normal(jax.random.key(0), (1, 6))
        x = jax.nn.relu(z @ p["seed"]).reshape(1, 8, 8, 5)
        return squared_error(conv(jax.nn.relu(conv(x, p["conv"])), p["out"]), image)

    params = {
        "seed": floats(6, 8 * 8 * 5),
        "conv": floats(3, 3, 5, WIDTH),
        "out": floats(3, 3, WIDTH, 3),
    }
    return loss, params, (floats(1, 8, 8, 3),)


@program({"film w1": "io", "codes": "adamw", "w2": "head"})
def codes_scale_features_of_a_grid():
    """Neither the codes nor the grid is data, and both go through matrices."""

    def loss(p, images):
        angles = jnp.linspace(0, jnp.pi, 64)[:, None] * 2.0 ** jnp.arange(6)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        scales = jax.nn.relu(p["codes"] @ p["film"]["0"]) @ p["film"]["1"]
        hidden = jax.nn.relu((waves @ p["w1"])[None] * (1 + scales[:, None]))
        return squared_error(hidden @ p["w2"], images)

    params = {
        "codes": floats(9, 6),
        "film": {"0": floats(6, 10), "1": floats(10, WIDTH)},
        "w1": floats(12, WIDTH),
        "w2": floats(WIDTH, 3),
    }
    return loss, params, (floats(9, 64, 3),)


@program({"in tokens channels": "io", "out": "head"})
def mixer_over_a_grid():
    """The first product, of a grid, has no activation behind it."""

    def loss(p, image):
        lines = jnp.arange(4.0)
        x = jnp.stack(jnp.meshgrid(lines, lines), -1).reshape(16, 2) @ p["in"]
        for name in ("tokens", "channels"):
            y = x.T if name == "tokens" else x
            y = jax.nn.gelu(y @ p[name]["up"]) @ p[name]["down"]
            x = x + (y.T if name == "tokens" else y)
        return squared_error(x @ p["out"], image)

    params = {
        "in": floats(2, WIDTH),
        "tokens": {"up": floats(16, 20), "down": floats(20, 16)},
        "channels": {"up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH)},
        "out": floats(WIDTH, 3),
    }
    return loss, params, (floats(16, 3),)


# --- what is made inside and is no input ----------------------------------------------


@between({"positions": "adamw", "up down": "io"}, positions=floats(4, 4, WIDTH))
def positions_resized(x, p):
    """A table of positions of another size, interpolated by products with constants."""
    table = jax.image.resize(p["positions"], (2, 8, WIDTH), "bilinear")
    return x + table.reshape(LENGTH, WIDTH)


@between(
    {"up": "io", "mean": "io"},
    mean=floats(WIDTH, HIDDEN),
    up=floats(HIDDEN, WIDTH),
)
def drop_connect(x, p):
    """A random mask of weights, and constant matrices around another one."""
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, p["mean"].shape)
    x = jax.nn.gelu(x @ (p["mean"] * mask))
    lines = jnp.arange(HIDDEN)
    basis = jnp.cos(jnp.pi / HIDDEN * (lines[:, None] + 0.5) * lines)
    return x @ (basis @ p["up"])


@between(
    {"bias q k v o": "io"},
    bias={"w1": floats(2, HIDDEN), "w2": floats(HIDDEN, 4)},
    **{name: floats(WIDTH, WIDTH) for name in "qkvo"},
)
def bias_of_attention_by_a_network_of_distances(x, p):
    """Swin V2: the distances are constants, and a small network gives the biases."""
    steps = jnp.arange(LENGTH)
    apart = (steps[:, None] - steps[None]).astype(jnp.float32)
    inputs = jnp.stack([apart, jnp.sign(apart) * jnp.log1p(jnp.abs(apart))], -1)
    bias = jax.nn.relu(inputs @ p["bias"]["w1"]) @ p["bias"]["w2"]
    heads = (BATCH, LENGTH, 4, -1)
    q, k, v = (jnp.reshape(x @ p[name], heads) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.moveaxis(bias, -1, 0)
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return x + y.reshape(x.shape) @ p["o"]


@program({"generate": "io", "layers": "adamw"})
def matrices_made_of_learned_codes():
    """A hypernetwork whose only input is a learned code for each layer."""

    def loss(p, x, y):
        generate = p["generate"]
        kernels = jnp.tanh(p["layers"] @ generate["w1"]) @ generate["w2"]
        for kernel in kernels.reshape(4, WIDTH, WIDTH):
            x = jnp.tanh(x @ kernel)
        return squared_error(x, y)

    params = {
        "layers": floats(4, 6),
        "generate": {"w1": floats(6, 10), "w2": floats(10, WIDTH * WIDTH)},
    }
    return loss, params, (floats(BATCH, WIDTH), floats(BATCH, WIDTH))


@program({"emb": "embedding", "w1 w2": "io", "out": "head"})
def masked_tokens_and_random_layers():
    """Tokens are hidden at random, and a layer is left out at random."""

    def loss(p, random_key, ids):
        a, b, c = jax.random.split(random_key, 3)
        hidden = jax.random.bernoulli(a, 0.2, ids.shape)
        x = p["emb"][jnp.where(hidden, 0, ids)]
        x = x * jax.random.bernoulli(b, 0.9, x.shape) / 0.9
        branch = lambda x: x + jax.nn.gelu(x @ p["w1"]) @ p["w2"]  # noqa: E731
        x = lax.cond(jax.random.uniform(c) < 0.1, lambda x: x, branch, x)
        return jnp.mean(jax.nn.log_softmax(x @ p["out"])[..., 0] * hidden)

    params = {
        "emb": floats(50, WIDTH),
        "w1": floats(WIDTH, HIDDEN),
        "w2": floats(HIDDEN, WIDTH),
        "out": floats(WIDTH, 50),
    }
    return loss, params, (key(), integers(BATCH, LENGTH))
