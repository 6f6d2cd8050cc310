"""Experts, members and stacks: several matrices in one array, gates, and choices."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    BATCH,
    EXPERTS,
    HIDDEN,
    LENGTH,
    UP_DOWN_EXPERTS,
    WIDTH,
    Leaf,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    language_model,
    mlp,
    program,
    squared_error,
    widths,
)

ROUTED = {"choose": Leaf("router", WIDTH, EXPERTS), **UP_DOWN_EXPERTS}


def top_two(x, p):
    """Weights and numbers (..., 2) of the experts that each token takes."""
    return lax.top_k(jax.nn.softmax(x @ p["choose"]), 2)


def gates(x, p):
    """The weight (..., experts) of each expert, zero but for two."""
    weights, chosen = top_two(x, p)
    return (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)


# --- routed experts -------------------------------------------------------------------


@language_model(**ROUTED)
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


@language_model(**ROUTED)
def moe_dense_summed_in_the_product(x, p):
    """The second product sums over the experts too."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    return jnp.einsum("btef,efd->btd", hidden * gates(x, p)[..., None], p["down"])


@between(**ROUTED)
def moe_gathered_weights_in_the_first_layer(x, p):
    """The router is an argmax of the embeddings, with nothing before it."""
    chosen = jnp.argmax(x @ p["choose"], -1)
    hidden = jnp.einsum("btd,btdf->btf", x, p["up"][chosen])
    return jnp.einsum("btf,btfd->btd", hidden, p["down"][chosen])


@language_model(**ROUTED)
def moe_ragged_dot(x, p):
    """Tokens are sorted by expert, and `ragged_dot` multiplies each group."""
    weights, chosen = top_two(x, p)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    rows = x.reshape(-1, WIDTH)[order // 2]
    hidden = jax.nn.gelu(lax.ragged_dot(rows, p["up"], sizes))
    y = lax.ragged_dot(hidden, p["down"], sizes)
    y = y[jnp.argsort(order)].reshape(BATCH, LENGTH, 2, WIDTH)
    return (y * weights[..., None]).sum(2)


@language_model(**ROUTED)
def moe_by_an_approximate_top_k(x, p):
    """`approx_max_k` chooses, and matrices are gathered."""
    weights, chosen = lax.approx_max_k(jax.nn.softmax(x @ p["choose"]), 2)
    up, down = p["up"][chosen], p["down"][chosen]
    hidden = jax.nn.gelu(jnp.einsum("btd,btkdf->btkf", x, up))
    return jnp.einsum("btkf,btkfd,btk->btd", hidden, down, weights)


@between(
    **ROUTED,
    q=Leaf("ioo, query", WIDTH, 4, 6),
    k=Leaf("io, key", WIDTH, 6),
    v=Leaf("io, value", WIDTH, WIDTH),
)
def attention_behind_experts(x, p):
    """What experts return is no gate of the next layer; all heads share one key."""
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    y = jnp.einsum("btef,efd->bted", hidden, p["down"])
    x = x + jnp.einsum("bted,bte->btd", y, gates(x, p))
    q, k, v = jnp.einsum("btd,dhk->bthk", x, p["q"]), x @ p["k"], x @ p["v"]
    scores = jax.nn.softmax(jnp.einsum("bthk,bsk->bhts", q, k))
    return x + jnp.einsum("bhts,bsd->btd", scores, v)


@program(
    floats(BATCH, 9),
    floats(BATCH, 3),
    gate=Leaf("router", 9, 3),
    experts=Leaf("bio", 3, 9, HIDDEN),
    out=Leaf("head", HIDDEN, 3),
)
def experts_in_a_python_loop(p, x, y):
    """A mask for each expert, from the number that an argmax gives."""
    number, total = jnp.argmax(x @ p["gate"], -1), 0
    for expert in range(3):
        output = jax.nn.relu(x @ p["experts"][expert])
        total = total + jnp.where((number == expert)[:, None], output, 0)
    return squared_error(total @ p["out"], y)


# --- gates ----------------------------------------------------------------------------


@language_model(router=Leaf("router", WIDTH, EXPERTS), **UP_DOWN_EXPERTS)
def smear(x, p):
    """Data mixes the matrices of all experts: a router by its name, without a top-k."""
    mixture = jax.nn.softmax(x.mean(1) @ p["router"])
    up, down = (jnp.einsum("be,eio->bio", mixture, p[n]) for n in ("up", "down"))
    hidden = jax.nn.gelu(jnp.einsum("btd,bdf->btf", x, up))
    return jnp.einsum("btf,bfd->btd", hidden, down)


@program(
    floats(BATCH, LENGTH, WIDTH),
    integers(BATCH),
    floats(BATCH, LENGTH, 3),
    **UP_DOWN_EXPERTS,
    out=Leaf("head", WIDTH, 3),
)
def matrices_of_a_task(p, x, task, y):
    """A one-hot, and no gather, picks the matrices of each sample."""
    task = jax.nn.one_hot(task, EXPERTS)
    up, down = (jnp.einsum("be,eio->bio", task, p[name]) for name in ("up", "down"))
    hidden = jax.nn.gelu(jnp.einsum("btd,bdf->btf", x, up))
    x = x + jnp.einsum("btf,bfd->btd", hidden, down)
    return squared_error(x @ p["out"], y)


@program(
    floats(BATCH, 9),
    floats(2, BATCH, 4),
    experts=Leaf("bio", EXPERTS, 9, 11),
    gates=Leaf("bio", 2, 9, EXPERTS),
    towers={"w1": Leaf("bio", 2, 11, WIDTH), "w2": Leaf("head", 2, WIDTH, 4)},
)
def multi_gate_experts_of_several_tasks(p, x, ys):
    """Each task has gates of its own; experts are a sum after a product of elements."""
    outputs = jax.nn.relu(jnp.einsum("bd,edh->ebh", x, p["experts"]))
    gates = jax.nn.softmax(jnp.einsum("bd,nde->nbe", x, p["gates"]), -1)
    mixed = (jnp.moveaxis(gates, -1, 1)[..., None] * outputs[None]).sum(1)
    towers = jax.vmap(lambda p, x: mlp(p, x, jax.nn.relu))
    return squared_error(towers(p["towers"], mixed), ys)


# --- a top-k that routes nothing ------------------------------------------------------


@program(floats(BATCH, 9), integers(BATCH), **widths(9, WIDTH, HIDDEN, 5))
def accuracy_beside_the_loss(p, x, labels):
    """Metrics choose among logits and among hidden activations."""
    hidden = jax.nn.relu(x @ p["w1"])
    hidden = jax.nn.relu(hidden @ p["w2"])
    logits = hidden @ p["w3"]
    winners = jax.nn.one_hot(jnp.argmax(hidden, -1), HIDDEN)
    metrics = {
        "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels),
        "top_3": jnp.mean(lax.top_k(logits, 3)[1] == labels[:, None]),
        "usage": jnp.einsum("bh,bi->hi", winners, x),
    }
    return cross_entropy(logits, labels), metrics


# --- kernels mixed by data ------------------------------------------------------------


@program(
    floats(BATCH, 8, 8, 3),
    integers(BATCH),
    stem=Leaf("iiio", 3, 3, 3, 10),
    route=Leaf("io", 10, 4),
    kernels=Leaf("biiio", 4, 3, 3, 10, 14),
    head=Leaf("head", 14, 7),
)
def conditional_convolutions(p, x, labels):
    """CondConv: each sample has a mixture of kernels, weighed by sigmoids."""
    x = jax.nn.relu(conv(x, p["stem"]))

    def one(x):
        weights = jax.nn.sigmoid(x.mean((0, 1)) @ p["route"])
        kernel = jnp.einsum("e,ehwio->hwio", weights, p["kernels"])
        return jax.nn.relu(conv(x[None], kernel)[0])

    return cross_entropy(jax.vmap(one)(x).mean((1, 2)) @ p["head"], labels)
