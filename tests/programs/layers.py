"""How layers follow each other: scans, loops, conditions, blocks, `vmap`, shard_map."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    EMBED_AND_HEAD,
    EMBED_AND_HEAD_ANSWERS,
    HIDDEN,
    MLP_ANSWERS,
    TOKENS,
    UP_DOWN,
    WIDTH,
    between,
    cross_entropy,
    floats,
    integers,
    model_with_attention,
    rms,
    squared_error,
    up_down,
)

LAYERS = 8
STACK = {
    "norm": floats(LAYERS, WIDTH),
    "up": floats(LAYERS, WIDTH, HIDDEN),
    "down": floats(LAYERS, HIDDEN, WIDTH),
}
STACK_ANSWERS = {"layers/norm": "adamw", "layers": "bio"}


def mlp(x, layer):
    """A residual MLP, as the body of a scan."""
    hidden = jax.nn.gelu(rms(x) * layer["norm"] @ layer["up"])
    return x + hidden @ layer["down"], None


@between(STACK_ANSWERS, layers=STACK)
def scan_checkpointed_and_reversed(x, p):
    """Backwards through the layers, each of them computed again in the gradient."""
    return rms(lax.scan(jax.checkpoint(mlp), x, p["layers"], reverse=True)[0])


@between(STACK_ANSWERS, layers=STACK)
def scan_over_blocks_of_layers(x, p):
    """Eight layers are cut into two blocks of four: only blocks are checkpointed."""
    blocks = jax.tree.map(lambda w: w.reshape(2, 4, *w.shape[1:]), p["layers"])
    block = jax.checkpoint(lambda x, layers: lax.scan(mlp, x, layers))
    return rms(lax.scan(block, x, blocks)[0])


@between(STACK_ANSWERS, layers=STACK)
def scan_over_numbers(x, p):
    """The scan counts, and its body picks the layer."""

    def body(x, number):
        return mlp(x, jax.tree.map(lambda w: w[number], p["layers"]))

    return rms(lax.scan(body, x, jnp.arange(LAYERS))[0])


SECOND_AXIS = {
    "up": floats(WIDTH, LAYERS, HIDDEN),
    "down": floats(HIDDEN, LAYERS, WIDTH),
}


@between({"up down": "ibo"}, **SECOND_AXIS)
def scan_along_the_second_axis(x, p):
    """As MaxText's `param_scan_axis=1`, by index."""

    def body(number, x):
        up, down = (
            lax.dynamic_index_in_dim(p[name], number, 1, False)
            for name in ("up", "down")
        )
        return x + jax.nn.gelu(x @ up) @ down

    return lax.fori_loop(0, LAYERS, body, x)


@program({**EMBED_AND_HEAD_ANSWERS, "0 1 2": "io"})
def loops_and_conditions():
    """A layer in each branch of a `cond`, and one that a `while` repeats."""

    def loss(p, ids, flag):
        x = lax.cond(
            flag[0] > 0,
            lambda x: x @ p["0"],
            lambda x: jnp.tanh(x @ p["1"]),
            p["emb"][ids],
        )

        def step(carry):
            count, x = carry
            return count + 1, rms(x + x @ p["2"])

        _, x = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))
        return cross_entropy(x @ p["head"], ids)

    layers = {name: floats(WIDTH, WIDTH) for name in "012"}
    return loss, {**EMBED_AND_HEAD, **layers}, (TOKENS, floats(1))


@between({"f": "io"}, f={"z": floats(WIDTH, WIDTH), "x": floats(WIDTH, WIDTH)})
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


@between(STACK_ANSWERS, layers=STACK)
def pipeline_of_vmapped_stages(x, p):
    """`vmap` runs all stages on different microbatches, which shift by one a step."""
    stage = jax.vmap(lambda layer, x: mlp(x, layer)[0])
    padding = jnp.zeros((LAYERS, *x[:1].shape), x.dtype)
    inputs = jnp.concatenate([x[:, None], padding])  # microbatches of one

    def step(held, new):
        held = stage(p["layers"], jnp.concatenate([new[None], held[:-1]]))
        return held, held[-1]

    _, outputs = lax.scan(step, jnp.zeros((LAYERS, *x[:1].shape)), inputs)
    return rms(outputs[LAYERS - 1 : LAYERS - 1 + BATCH, 0])


@program({"w1": "bio or adamw", "w2": "bio", "w3": "head"})
def ensemble():
    """`vmap` over members that all get the same input."""

    def predict(p, x):
        return jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w3"]

    def loss(p, x, y):
        return squared_error(jax.vmap(predict, (0, None))(p, x), y)

    params = {
        "w1": floats(5, 7, WIDTH),
        "w2": floats(5, WIDTH, HIDDEN),
        "w3": floats(5, HIDDEN, 3),
    }
    return loss, params, (floats(BATCH, 7), floats(BATCH, 3))


@program(MLP_ANSWERS)
def loss_in_shard_map():
    """Parameters are sharded over devices and gathered inside the loss (ZeRO-3)."""
    mesh = jax.sharding.AbstractMesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    inner, params, _ = model_with_attention(up_down, **UP_DOWN)

    def on_one_device(p, ids):
        p = jax.tree.map(lambda w: lax.all_gather(w, "x", axis=0, tiled=True), p)
        return lax.pmean(inner(p, ids), "x")

    loss = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P(),
        check_vma=False,
    )
    return loss, params, (integers(2 * BATCH, 16),)


@program(MLP_ANSWERS)
def auxiliary_outputs_and_penalties():
    """The loss returns metrics beside it and adds norms of the parameters to it."""
    inner, params, args = model_with_attention(up_down, **UP_DOWN)

    def loss(p, ids):
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        sparse = jnp.abs(p["up"]).sum()
        value = inner(p, ids) + 1e-4 * decay + 1e-4 * sparse
        norms = jax.tree.map(jnp.linalg.norm, p)
        return value, {"norms": norms, "loss": value}

    return loss, params, args
