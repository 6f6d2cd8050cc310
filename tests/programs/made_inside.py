"""Inputs that no argument brings: drawn from a key, regular grids, learned codes."""

import jax
import jax.numpy as jnp

from tests.programs import program
from tests.programs.losses import widths
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    LENGTH,
    WIDTH,
    between,
    floats,
    key,
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


@between({"positions": "adamw"}, positions=floats(4, 4, WIDTH))
def positions_resized(x, p):
    """A table of positions of another size, interpolated by products with constants."""
    table = jax.image.resize(p["positions"], (2, 8, WIDTH), "bilinear")
    return x + table.reshape(LENGTH, WIDTH)
