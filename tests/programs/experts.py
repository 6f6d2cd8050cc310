"""Mixtures of experts: every common way to bring tokens and matrices together."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    EXPERTS,
    HIDDEN,
    LENGTH,
    MODEL_ANSWERS,
    WIDTH,
    between,
    floats,
    integers,
    language_model,
    model_with_attention,
    squared_error,
)

ANSWERS = {**MODEL_ANSWERS, "router": "router", "up down": "bio"}
UP_DOWN = {
    "up": floats(EXPERTS, WIDTH, HIDDEN),
    "down": floats(EXPERTS, HIDDEN, WIDTH),
}
ROUTED = {"router": floats(WIDTH, EXPERTS), **UP_DOWN}


def top_two(x, p):
    """Weights and numbers (..., 2) of the experts that each token takes."""
    return lax.top_k(jax.nn.softmax(x @ p["router"]), 2)


def gates(x, p):
    """The weight (..., experts) of each expert, zero but for two."""
    weights, chosen = top_two(x, p)
    return (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)


def sort_by_expert(chosen):
    """The order of (token, choice) pairs by expert, and how many each expert gets."""
    flat = chosen.reshape(-1)
    return jnp.argsort(flat), jnp.bincount(flat, length=EXPERTS)


def both_layers(x_e, p):
    """The MLP of each expert on its own tokens (experts, tokens, width)."""
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x_e, p["up"]))
    return jnp.einsum("ecf,efd->ecd", hidden, p["down"])


@language_model(ANSWERS, **ROUTED)
def moe_einsum_dispatch(x, p):
    """Tokens travel to slots of their experts by a product with a one-hot tensor."""
    weights, chosen = top_two(x, p)
    hot = jax.nn.one_hot(chosen, EXPERTS)
    place = jnp.cumsum(hot.reshape(BATCH, -1, EXPERTS), 1).reshape(hot.shape) * hot
    dispatch = jax.nn.one_hot(place.astype(int), 8) * hot[..., None]
    x_e = jnp.einsum("btkec,btd->becd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", x_e, p["up"]))
    y = jnp.einsum("becf,efd->becd", hidden, p["down"])
    return jnp.einsum("becd,btkec,btk->btd", y, dispatch, weights)


@language_model(ANSWERS, **ROUTED)
def moe_dense(x, p):
    """All experts see all tokens, and the sum is weighted afterwards."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    y = jnp.einsum("btef,efd->bted", hidden, p["down"])
    return jnp.einsum("bted,bte->btd", y, gates(x, p))


@language_model(ANSWERS, **ROUTED)
def moe_dense_summed_in_the_product(x, p):
    """The second product sums over the experts too."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    return jnp.einsum("btef,efd->btd", hidden * gates(x, p)[..., None], p["down"])


@language_model(ANSWERS, **ROUTED)
def moe_gathered_weights(x, p):
    """Each token gathers the matrices of its experts."""
    weights, chosen = top_two(x, p)
    hidden = jax.nn.gelu(jnp.einsum("btd,btkdf->btkf", x, p["up"][chosen]))
    return jnp.einsum("btkf,btkfd,btk->btd", hidden, p["down"][chosen], weights)


@between(ANSWERS, **ROUTED)
def moe_gathered_weights_in_the_first_layer(x, p):
    """The router is an argmax of the embeddings, with nothing before it."""
    chosen = jnp.argmax(x @ p["router"], -1)
    hidden = jnp.einsum("btd,btdf->btf", x, p["up"][chosen])
    y = jnp.einsum("btf,btfd->btd", hidden, p["down"][chosen])
    return y


@language_model(ANSWERS, **ROUTED)
def moe_ragged_dot(x, p):
    """Tokens are sorted by expert, and `ragged_dot` multiplies each group."""
    weights, chosen = top_two(x, p)
    order, sizes = sort_by_expert(chosen)
    rows = x.reshape(-1, WIDTH)[order // 2]
    hidden = jax.nn.gelu(lax.ragged_dot(rows, p["up"], sizes))
    y = lax.ragged_dot(hidden, p["down"], sizes)
    y = y[jnp.argsort(order)].reshape(BATCH, LENGTH, 2, WIDTH)
    return (y * weights[..., None]).sum(2)


@language_model(ANSWERS, **ROUTED)
def moe_vmap_over_experts(x, p):
    """`vmap` over the matrices with the same tokens for all: no axis is a batch yet."""
    gate = jax.nn.softmax(x @ p["router"])
    gate = jnp.where(gate >= lax.top_k(gate, 2)[0][..., -1:], gate, 0)
    mlp = jax.vmap(lambda up, down: jax.nn.gelu(x @ up) @ down)
    return jnp.einsum("ebtd,bte->btd", mlp(p["up"], p["down"]), gate)


@language_model(ANSWERS, **ROUTED)
def moe_scan_over_experts(x, p):
    """A scan goes from expert to expert."""

    def add(total, expert):
        up, down, gate = expert
        return total + (jax.nn.gelu(x @ up) @ down) * gate[..., None], None

    gate = jnp.moveaxis(gates(x, p), -1, 0)
    return lax.scan(add, jnp.zeros_like(x), (p["up"], p["down"], gate))[0]


@program(ANSWERS)
def moe_all_to_all_in_shard_map():
    """Expert parallelism: tokens travel between devices, each with half the experts."""
    mesh = jax.sharding.AbstractMesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def on_one_device(x, router, up, down):
        hot = jax.nn.one_hot(jnp.argmax(x @ router, -1), EXPERTS)
        x_e = jnp.einsum("te,td->etd", hot, x)
        x_e = lax.all_to_all(x_e, "x", 0, 1, tiled=True)
        y = both_layers(x_e, {"up": up, "down": down})
        y = lax.all_to_all(y, "x", 1, 0, tiled=True)
        return jnp.einsum("etd,te->td", y, hot)

    def block(x, p):
        experts = jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(P("x"), P(), P("x"), P("x")),
            out_specs=P("x"),
            check_vma=False,
        )
        rows = experts(x.reshape(-1, WIDTH), p["router"], p["up"], p["down"])
        return rows.reshape(x.shape)

    return model_with_attention(block, **ROUTED)


@language_model(ANSWERS, **ROUTED)
def moe_expert_choice(x, p):
    """Experts choose tokens: the top-k goes along the tokens."""
    x = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(x @ p["router"], -1)
    weights, chosen = lax.top_k(scores.T, 8)
    y = both_layers(x[chosen], p) * weights[..., None]
    return jnp.zeros_like(x).at[chosen].add(y).reshape(BATCH, LENGTH, WIDTH)


@language_model({**ANSWERS, "bias": "adamw"}, **ROUTED, bias=floats(EXPERTS))
def moe_sigmoid_gate_with_groups(x, p):
    """DeepSeek-V3: a bias that only chooses, the best groups, then the best experts."""
    scores = jax.nn.sigmoid(x @ p["router"])
    biased = scores + lax.stop_gradient(p["bias"])
    groups = biased.reshape(*x.shape[:-1], 3, 2)
    best = lax.top_k(groups.sum(-1), 2)[0][..., -1:]
    kept = jnp.where(groups.sum(-1) >= best, 1.0, 0.0)[..., None]
    _, chosen = lax.top_k((groups * kept).reshape(biased.shape), 2)
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True)
    gate = (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, p["up"]))
    y = jnp.einsum("ebtf,efd->ebtd", hidden, p["down"])
    return jnp.einsum("ebtd,bte->btd", y, gate)


@language_model(
    {"phi": "router?", "up down": "bio"}, phi=floats(WIDTH, EXPERTS, 4), **UP_DOWN
)
def soft_moe(x, p):
    """Every slot takes a mixture of all tokens: nothing is chosen."""
    scores = jnp.einsum("btd,des->btes", x, p["phi"])
    dispatch = jax.nn.softmax(scores, 1)
    combine = jax.nn.softmax(scores.reshape(BATCH, LENGTH, -1), -1)
    x_e = jnp.einsum("btd,btes->besd", x, dispatch)
    hidden = jax.nn.gelu(jnp.einsum("besd,edf->besf", x_e, p["up"]))
    y = jnp.einsum("besf,efd->besd", hidden, p["down"])
    return jnp.einsum("besd,btes->btd", y, combine.reshape(scores.shape))


@language_model(
    {"mix": "router?", "up down": "bio"}, mix=floats(WIDTH, EXPERTS), **UP_DOWN
)
def smear(x, p):
    """The data mixes the matrices of all experts into one for each sequence."""
    mixture = jax.nn.softmax(x.mean(1) @ p["mix"])
    up, down = (jnp.einsum("be,eio->bio", mixture, p[n]) for n in ("up", "down"))
    return jnp.einsum(
        "btf,bfd->btd", jax.nn.gelu(jnp.einsum("btd,bdf->btf", x, up)), down
    )


@program({"up down": "bio", "out": "head"})
def matrices_of_a_task():
    """A one-hot, and no gather, picks the matrices of each sample."""

    def loss(p, x, task, y):
        task = jax.nn.one_hot(task, EXPERTS)
        up, down = (jnp.einsum("be,eio->bio", task, p[name]) for name in ("up", "down"))
        hidden = jax.nn.gelu(jnp.einsum("btd,bdf->btf", x, up))
        x = x + jnp.einsum("btf,bfd->btd", hidden, down)
        return squared_error(x @ p["out"], y)

    params = {**UP_DOWN, "out": floats(WIDTH, 3)}
    x = floats(BATCH, LENGTH, WIDTH)
    return loss, params, (x, integers(BATCH), floats(BATCH, LENGTH, 3))
