"""How layers follow each other: scans, loops, conditions, recurrence, shard_map."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.programs.parts import (
    BATCH,
    EMBED_AND_HEAD,
    HIDDEN,
    LENGTH,
    MODEL,
    TOKENS,
    UP_DOWN,
    WIDTH,
    between,
    cross_entropy,
    floats,
    integers,
    leaf,
    program,
    rms,
    squared_error,
    up_down,
    with_attention,
)

LAYERS = 8
STACK = {
    "norm": leaf("adamw", LAYERS, WIDTH),
    "up": leaf("bio", LAYERS, WIDTH, HIDDEN),
    "down": leaf("bio", LAYERS, HIDDEN, WIDTH),
}


def body(x, layer):
    """A residual MLP, as the body of a scan."""
    return x + up_down(rms(x) * layer["norm"], layer), None


@between(layers=STACK)
def scan_checkpointed_and_reversed(x, p):
    """Backwards through the layers, each of them computed again in the gradient."""
    return rms(lax.scan(jax.checkpoint(body), x, p["layers"], reverse=True)[0])


@between(layers=STACK)
def scan_over_blocks_of_layers(x, p):
    """Eight layers are cut into two blocks of four: only blocks are checkpointed."""
    blocks = jax.tree.map(lambda w: w.reshape(2, 4, *w.shape[1:]), p["layers"])
    block = jax.checkpoint(lambda x, layers: lax.scan(body, x, layers))
    return rms(lax.scan(block, x, blocks)[0])


@between(layers=STACK)
def scan_over_numbers(x, p):
    """The scan counts, and its body picks the layer."""

    def step(x, number):
        return body(x, jax.tree.map(lambda w: w[number], p["layers"]))

    return rms(lax.scan(step, x, jnp.arange(LAYERS))[0])


@between(
    up=leaf("ibo", WIDTH, LAYERS, HIDDEN),
    down=leaf("ibo", HIDDEN, LAYERS, WIDTH),
)
def scan_along_the_second_axis(x, p):
    """As MaxText's `param_scan_axis=1`, by index."""

    def step(number, x):
        layer = {
            name: lax.dynamic_index_in_dim(p[name], number, 1, False)
            for name in ("up", "down")
        }
        return x + up_down(x, layer)

    return lax.fori_loop(0, LAYERS, step, x)


@program(
    TOKENS,
    floats(1),
    **EMBED_AND_HEAD,
    **dict.fromkeys("abc", leaf("io", WIDTH, WIDTH)),
)
def loops_and_conditions(p, ids, flag):
    """A layer in each branch of a `cond`, and one that a `while` repeats."""
    x = lax.cond(
        flag[0] > 0,
        lambda x: x @ p["a"],
        lambda x: jnp.tanh(x @ p["b"]),
        p["emb"][ids],
    )

    def step(carry):
        count, x = carry
        return count + 1, rms(x + x @ p["c"])

    _, x = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))
    return cross_entropy(x @ p["head"], ids)


@between(f=dict.fromkeys("zx", leaf("io", WIDTH, WIDTH)))
def deep_equilibrium(x, p):
    """A fixed point whose gradient is found by a second loop."""

    def f(p, z, x):
        return jnp.tanh(z @ p["f"]["z"] + x @ p["f"]["x"])

    @jax.custom_vjp
    def solve(p, x):
        step = lambda carry: (carry[0] + 1, f(p, carry[1], x))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 20, step, (0, jnp.zeros_like(x)))[1]

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved, g):
        p, x, z = saved
        _, pull = jax.vjp(lambda z: f(p, z, x), z)
        u = lax.fori_loop(0, 20, lambda _, u: g + pull(u)[0], g)
        return jax.vjp(lambda p, x: f(p, z, x), p, x)[1](u)

    solve.defvjp(forward, backward)
    return solve(p, x)


@between(layers=STACK)
def pipeline_of_vmapped_stages(x, p):
    """`vmap` runs all stages on different microbatches, which shift by one a step."""
    stage = jax.vmap(lambda layer, x: body(x, layer)[0])
    padding = jnp.zeros((LAYERS, *x[:1].shape), x.dtype)
    inputs = jnp.concatenate([x[:, None], padding])  # microbatches of one

    def step(held, new):
        held = stage(p["layers"], jnp.concatenate([new[None], held[:-1]]))
        return held, held[-1]

    _, outputs = lax.scan(step, jnp.zeros((LAYERS, *x[:1].shape)), inputs)
    return rms(outputs[LAYERS - 1 : LAYERS - 1 + BATCH, 0])


@program(integers(2 * BATCH, LENGTH), **MODEL, **UP_DOWN)
def loss_in_shard_map(p, ids):
    """Parameters are sharded over devices and gathered inside the loss (ZeRO-3)."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=auto)

    def on_one_device(p, ids):
        p = jax.tree.map(lambda w: lax.all_gather(w, "x", axis=0, tiled=True), p)
        return lax.pmean(with_attention(up_down)(p, ids), "x")

    specs = {"mesh": mesh, "in_specs": (P("x"), P("x")), "out_specs": P()}
    return jax.shard_map(on_one_device, **specs, check_vma=False)(p, ids)


@program(TOKENS, **MODEL, **UP_DOWN)
def auxiliary_outputs_and_penalties(p, ids):
    """The loss returns metrics beside it and adds norms of the parameters to it."""
    decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
    sparse = jnp.abs(p["up"]).sum()
    value = with_attention(up_down)(p, ids) + 1e-4 * decay + 1e-4 * sparse
    norms = jax.tree.map(jnp.linalg.norm, p)
    return value, {"norms": norms, "loss": value}


# --- recurrence -----------------------------------------------------------------------


def cell(width):
    """Matrices of the input and of the state."""
    return dict.fromkeys("xh", leaf("io", WIDTH, width))


@between(
    rnn=cell(WIDTH),
    lstm=cell(4 * WIDTH),
    gru=cell(3 * WIDTH),
    start=leaf("adamw", WIDTH),
)
def recurrent_cells(x, p):
    """An RNN, an LSTM and a GRU in one scan; the first state is learned."""

    def step(carry, x):
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
    _, y = lax.scan(step, (start, (zeros, zeros), zeros), jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1)


INNER, STATE, RANK = 48, 8, 4  # of Mamba


@between(
    in_proj=leaf("io", WIDTH, 2 * INNER),
    conv=leaf("adamw", 4, 1, INNER),
    x_proj=leaf("io", INNER, RANK + 2 * STATE),
    dt_proj=leaf("io", RANK, INNER),
    dt_bias=leaf("adamw", INNER),
    a_log=leaf("adamw", INNER, STATE),
    d=leaf("adamw", INNER),
    out_proj=leaf("io", INNER, WIDTH),
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
    step, b, c = jnp.split(u @ p["x_proj"], [RANK, RANK + STATE], -1)
    step = jax.nn.softplus(step @ p["dt_proj"] + p["dt_bias"])[..., None]
    decay = jnp.exp(step * -jnp.exp(p["a_log"]))

    def combine(before, after):
        return before[0] * after[0], after[0] * before[1] + after[1]

    inputs = step * b[..., None, :] * u[..., None]
    _, h = lax.associative_scan(combine, (decay, inputs), axis=1)
    y = jnp.einsum("btin,btn->bti", h, c) + p["d"] * u
    return x + (y * jax.nn.silu(z)) @ p["out_proj"]


@program(
    floats(BATCH, LENGTH, 2),
    floats(BATCH, LENGTH, 3),
    lift=leaf("io or adamw", 2, WIDTH),
    layers=[
        {
            "real": leaf("adamw", 5, WIDTH, WIDTH),
            "imag": leaf("adamw", 5, WIDTH, WIDTH),
            "w": leaf("io", WIDTH, WIDTH),
        }
    ]
    * 2,
    out=leaf("head", WIDTH, 3),
)
def fourier_neural_operator(p, x, y):
    """A complex matrix for each of the lowest frequencies."""
    h = x @ p["lift"]
    for layer in p["layers"]:
        spectrum = jnp.fft.rfft(h, axis=1)[:, :5]
        kernel = layer["real"] + 1j * layer["imag"]
        spectrum = jnp.einsum("bkc,kco->bko", spectrum, kernel)
        filtered = jnp.fft.irfft(spectrum, n=LENGTH, axis=1)
        h = jax.nn.gelu(filtered + h @ layer["w"])
    return squared_error(h @ p["out"], y)
