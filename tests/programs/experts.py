"""Mixtures of experts: every common way to bring tokens and matrices together."""

import jax
import jax.numpy as jnp
from jax import lax

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
    squared_error,
)

ROUTED_ANSWERS = {"choose": "router", "up down": "bio"}
ANSWERS = {**MODEL_ANSWERS, **ROUTED_ANSWERS}
UP_DOWN = {
    "up": floats(EXPERTS, WIDTH, HIDDEN),
    "down": floats(EXPERTS, HIDDEN, WIDTH),
}
ROUTED = {"choose": floats(WIDTH, EXPERTS), **UP_DOWN}


def top_two(x, p):
    """Weights and numbers (..., 2) of the experts that each token takes."""
    return lax.top_k(jax.nn.softmax(x @ p["choose"]), 2)


def gates(x, p):
    """The weight (..., experts) of each expert, zero but for two."""
    weights, chosen = top_two(x, p)
    return (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)


def sort_by_expert(chosen):
    """The order of (token, choice) pairs by expert, and how many each expert gets."""
    flat = chosen.reshape(-1)
    return jnp.argsort(flat), jnp.bincount(flat, length=EXPERTS)


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
def moe_dense_summed_in_the_product(x, p):
    """The second product sums over the experts too."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    return jnp.einsum("btef,efd->btd", hidden * gates(x, p)[..., None], p["down"])


@between(ANSWERS, **ROUTED)
def moe_gathered_weights_in_the_first_layer(x, p):
    """The router is an argmax of the embeddings, with nothing before it."""
    chosen = jnp.argmax(x @ p["choose"], -1)
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


@language_model(
    {"router": "router", "up down": "bio"}, router=floats(WIDTH, EXPERTS), **UP_DOWN
)
def smear(x, p):
    """Data mixes the matrices of all experts: a router by its name, without a top-k."""
    mixture = jax.nn.softmax(x.mean(1) @ p["router"])
    up, down = (jnp.einsum("be,eio->bio", mixture, p[n]) for n in ("up", "down"))
    return jnp.einsum(
        "btf,bfd->btd", jax.nn.gelu(jnp.einsum("btd,bdf->btf", x, up)), down
    )


@between(
    {**ROUTED_ANSWERS, "q": "ioo, query", "k": "io, key", "v": "io, value"},
    **ROUTED,
    q=floats(WIDTH, 4, 6),
    k=floats(WIDTH, 6),
    v=floats(WIDTH, WIDTH),
)
def attention_behind_experts(x, p):
    """What experts return is no gate of the next layer; all heads share one key."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    y = jnp.einsum("btef,efd->bted", hidden, p["down"])
    x = x + jnp.einsum("bted,bte->btd", y, gates(x, p))
    q, k, v = jnp.einsum("btd,dhk->bthk", x, p["q"]), x @ p["k"], x @ p["v"]
    scores = jax.nn.softmax(jnp.einsum("bthk,bsk->bhts", q, k))
    return x + jnp.einsum("bhts,bsd->btd", scores, v)


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
