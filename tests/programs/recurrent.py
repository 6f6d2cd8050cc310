"""Recurrence: cells in a scan, state-space models, and filters in the spectrum."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    LENGTH,
    WIDTH,
    between,
    floats,
    rms,
    squared_error,
)


def linear_recurrence(decay, inputs):
    """h[t] = decay[t] * h[t - 1] + inputs[t], along axis 1, in parallel."""

    def combine(before, after):
        return before[0] * after[0], after[0] * before[1] + after[1]

    return lax.associative_scan(combine, (decay, inputs), axis=1)[1]


CELLS = {
    cell: {"x": floats(WIDTH, width), "h": floats(WIDTH, width)}
    for cell, width in (("rnn", WIDTH), ("lstm", 4 * WIDTH), ("gru", 3 * WIDTH))
}


@between({"rnn lstm gru": "io", "start": "adamw"}, **CELLS, start=floats(WIDTH))
def recurrent_cells(x, p):
    """An RNN, an LSTM and a GRU in one scan; the first state is learned."""

    def cell(carry, x):
        plain, (hidden, memory), gated = carry
        plain = jnp.tanh(x @ p["rnn"]["x"] + plain @ p["rnn"]["h"])
        gates = plain @ p["lstm"]["x"] + hidden @ p["lstm"]["h"]
        i, f, o, new = jnp.split(gates, 4, -1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
        r, z, n = jnp.split(hidden @ p["gru"]["x"], 3, -1)
        r_h, z_h, n_h = jnp.split(gated @ p["gru"]["h"], 3, -1)
        z = jax.nn.sigmoid(z + z_h)
        gated = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + r_h) * n_h) + z * gated
        return (plain, (hidden, memory), gated), gated

    start = jnp.broadcast_to(p["start"], (BATCH, WIDTH))
    zeros = jnp.zeros((BATCH, WIDTH))
    _, y = lax.scan(cell, (start, (zeros, zeros), zeros), jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1)


INNER, STATE, RANK = 48, 8, 4  # of Mamba


@between(
    {
        "in_proj x_proj dt_proj out_proj": "io",
        "conv a_log d dt_bias": "adamw",
    },
    in_proj=floats(WIDTH, 2 * INNER),
    conv=floats(4, 1, INNER),
    x_proj=floats(INNER, RANK + 2 * STATE),
    dt_proj=floats(RANK, INNER),
    dt_bias=floats(INNER),
    a_log=floats(INNER, STATE),
    d=floats(INNER),
    out_proj=floats(INNER, WIDTH),
)
def mamba(x, p):
    """Mamba: a depthwise convolution, and a state space whose A is (width, state)."""
    u, z = jnp.split(rms(x) @ p["in_proj"], 2, -1)
    u = lax.conv_general_dilated(
        u,
        p["conv"],
        (1,),
        [(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=INNER,
    )
    u = jax.nn.silu(u)
    parts = [RANK, RANK + STATE]
    step, b, c = jnp.split(u @ p["x_proj"], parts, -1)
    step = jax.nn.softplus(step @ p["dt_proj"] + p["dt_bias"])[..., None]
    decay = jnp.exp(step * -jnp.exp(p["a_log"]))
    h = linear_recurrence(decay, step * b[..., None, :] * u[..., None])
    y = jnp.einsum("btin,btn->bti", h, c) + p["d"] * u
    return x + (y * jax.nn.silu(z)) @ p["out_proj"]


@program(
    {
        "lift": "io or adamw",
        "0/real 0/imag 1/real 1/imag": "adamw",
        "0/w 1/w": "io",
        "out": "head",
    }
)
def fourier_neural_operator():
    """A complex matrix for each of the lowest frequencies."""

    def loss(p, x, y):
        h = x @ p["lift"]
        for number in "01":
            layer = p[number]
            spectrum = jnp.fft.rfft(h, axis=1)[:, :5]
            kernel = layer["real"] + 1j * layer["imag"]
            spectrum = jnp.einsum("bkc,kco->bko", spectrum, kernel)
            filtered = jnp.fft.irfft(spectrum, n=LENGTH, axis=1)
            h = jax.nn.gelu(filtered + h @ layer["w"])
        return squared_error(h @ p["out"], y)

    layer = {
        "real": floats(5, WIDTH, WIDTH),
        "imag": floats(5, WIDTH, WIDTH),
        "w": floats(WIDTH, WIDTH),
    }
    params = {
        "lift": floats(2, WIDTH),
        "0": layer,
        "1": layer,
        "out": floats(WIDTH, 3),
    }
    return loss, params, (floats(BATCH, LENGTH, 2), floats(BATCH, LENGTH, 3))
