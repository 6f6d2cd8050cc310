"""Gates and choices: experts in one product, and a top-k that routes nothing."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.losses import MLP_ANSWERS, widths
from tests.programs.parts import (
    BATCH,
    EXPERTS,
    HIDDEN,
    MODEL_ANSWERS,
    WIDTH,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    language_model,
    squared_error,
)

# --- gates ----------------------------------------------------------------------------


@program({"gate": "io", "experts": "bio", "out": "head"})
def soft_experts_weighed_in_one_product():
    """Jacobs' mixture: all experts see the input, and a softmax weighs them."""

    def loss(p, x, y):
        gates = jax.nn.softmax(x @ p["gate"])
        outputs = jax.nn.relu(jnp.einsum("bd,edh->beh", x, p["experts"]))
        return squared_error(jnp.einsum("be,beh->bh", gates, outputs) @ p["out"], y)

    params = {
        "gate": floats(9, EXPERTS),
        "experts": floats(EXPERTS, 9, HIDDEN),
        "out": floats(HIDDEN, 3),
    }
    return loss, params, (floats(BATCH, 9), floats(BATCH, 3))


@program(
    {
        "experts gates": "bio",
        "towers/w1": "bio",
        "towers/w2": "head",
    }
)
def multi_gate_experts_of_several_tasks():
    """Each task has gates of its own; experts are a sum after a product of elements."""

    def loss(p, x, ys):
        outputs = jax.nn.relu(jnp.einsum("bd,edh->ebh", x, p["experts"]))
        gates = jax.nn.softmax(jnp.einsum("bd,nde->nbe", x, p["gates"]), -1)
        mixed = (jnp.moveaxis(gates, -1, 1)[..., None] * outputs[None]).sum(1)

        def tower(w1, w2, x):
            return jax.nn.relu(x @ w1) @ w2

        y = jax.vmap(tower)(p["towers"]["w1"], p["towers"]["w2"], mixed)
        return squared_error(y, ys)

    params = {
        "experts": floats(EXPERTS, 9, 11),
        "gates": floats(2, 9, EXPERTS),
        "towers": {"w1": floats(2, 11, WIDTH), "w2": floats(2, WIDTH, 4)},
    }
    return loss, params, (floats(BATCH, 9), floats(2, BATCH, 4))


@language_model(
    {**MODEL_ANSWERS, "gate": "io", "up down": "bio"},
    gate=floats(WIDTH, EXPERTS),
    up=floats(EXPERTS, WIDTH, HIDDEN),
    down=floats(EXPERTS, HIDDEN, WIDTH),
)
def soft_experts_summed_by_the_last_product(x, p):
    """Hidden activations are weighed, and the second product sums over experts."""
    scores = x @ p["gate"]
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    return jnp.einsum("btef,efd->btd", hidden * weights[..., None], p["down"])


@between(
    {"gate": "io", "value": "ioo", "w": "io"},
    gate=floats(WIDTH, 4),
    value=floats(WIDTH, 4, 6),
    w=floats(6, WIDTH),
)
def values_summed_over_gated_heads(x, p):
    """Sigmoid gates say how much of each head is summed."""
    gates = jax.nn.sigmoid(x @ p["gate"])
    values = jnp.einsum("btd,dhk->bthk", x, p["value"])
    return x + jnp.einsum("bth,bthk->btk", gates, values) @ p["w"]


@program({"gate": "router", "experts": "bio", "out": "head"})
def experts_in_a_python_loop():
    """A mask for each expert, from the number that an argmax gives."""

    def loss(p, x, y):
        number, total = jnp.argmax(x @ p["gate"], -1), 0
        for expert in range(3):
            output = jax.nn.relu(x @ p["experts"][expert])
            total = total + jnp.where((number == expert)[:, None], output, 0)
        return squared_error(total @ p["out"], y)

    params = {
        "gate": floats(9, 3),
        "experts": floats(3, 9, HIDDEN),
        "out": floats(HIDDEN, 3),
    }
    return loss, params, (floats(BATCH, 9), floats(BATCH, 3))


# --- a top-k that routes nothing ------------------------------------------------------


@program({"encode": "io", "decode": "head", "b1 b2": "adamw"})
def top_k_autoencoder():
    """A sparse autoencoder keeps the largest activations, by their smallest value."""

    def loss(p, x):
        z = jax.nn.relu((x - p["b2"]) @ p["encode"] + p["b1"])
        least = lax.top_k(z, 8)[0][..., -1:]
        z = jnp.where(z >= least, z, 0)
        return squared_error(z @ p["decode"] + p["b2"], x)

    params = {
        "encode": floats(WIDTH, 96),
        "decode": floats(96, WIDTH),
        "b1": floats(96),
        "b2": floats(WIDTH),
    }
    return loss, params, (floats(BATCH, WIDTH),)


@program({"w1 w2": "io", "w3": "head"})
def maxout_by_argmax():
    """The largest of four pieces, taken by its number."""

    def loss(p, x, labels):
        for name in ("w1", "w2"):
            pieces = (x @ p[name]).reshape(BATCH, -1, 4)
            best = jnp.argmax(pieces, -1)
            x = jnp.take_along_axis(pieces, best[..., None], -1)[..., 0]
        return cross_entropy(x @ p["w3"], labels)

    params = {"w1": floats(9, 80), "w2": floats(20, 120), "w3": floats(30, 5)}
    return loss, params, (floats(BATCH, 9), integers(BATCH))


@program(MLP_ANSWERS)
def accuracy_beside_the_loss():
    """Metrics choose among logits and among hidden activations."""

    def loss(p, x, labels):
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

    return loss, widths(9, WIDTH, HIDDEN, 5), (floats(BATCH, 9), integers(BATCH))


@between(
    {"q k v": "ioo", "o": "iio"},
    **{name: floats(WIDTH, 4, 6) for name in "qkv"},
    o=floats(4, 6, WIDTH),
)
def attention_to_the_best_keys(x, p):
    """Each query keeps its three best keys; heads have an axis of their own."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    least = lax.top_k(scores, 3)[0][..., -1:]
    scores = jax.nn.softmax(jnp.where(scores >= least, scores, -1e9))
    y = jnp.einsum("bhts,bshk->bthk", scores, v)
    return x + jnp.einsum("bthk,hkd->btd", y, p["o"])


# --- members and stacks ---------------------------------------------------------------


@program({"c1 c2": "biiio", "w": "bio", "head": "head"})
def ensemble_of_convolutions():
    """`vmap` over members that all get the same images."""

    def predict(p, x):
        x = jax.nn.relu(conv(x, p["c1"]))
        x = jax.nn.relu(conv(x, p["c2"])).mean((1, 2))
        return jnp.tanh(x @ p["w"]) @ p["head"]

    def loss(p, x, labels):
        logits = jax.vmap(predict, (0, None))(p, x)
        return jax.vmap(cross_entropy, (0, None))(logits, labels).mean()

    params = {
        "c1": floats(5, 3, 3, 3, 10),
        "c2": floats(5, 3, 3, 10, 14),
        "w": floats(5, 14, WIDTH),
        "head": floats(5, WIDTH, 7),
    }
    return loss, params, (floats(BATCH, 8, 8, 3), integers(BATCH))


@program({"c1 c2 c3": "boiii", "head": "adamw"})
def critics_of_several_scales():
    """Channels first; each member has an image of its own, and a gradient penalty."""

    def critic(p, x):
        for name in ("c1", "c2", "c3"):
            x = lax.conv_general_dilated(
                x,
                p[name],
                (2, 2),
                "SAME",
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )
            x = jax.nn.leaky_relu(x)
        return (x.mean((2, 3)) @ p["head"])[:, 0]

    def loss(p, images):
        def one(p, x):
            slope = jax.grad(lambda x: critic(p, x).sum())(x)
            return critic(p, x).mean() + jnp.mean(slope**2)

        return jax.vmap(one)(p, images).mean()

    params = {
        "c1": floats(3, 10, 4, 4, 4),
        "c2": floats(3, 14, 10, 4, 4),
        "c3": floats(3, 18, 14, 4, 4),
        "head": floats(3, 18, 1),
    }
    return loss, params, (floats(3, BATCH, 4, 16, 16),)


@program({"c1": "iio", "c2": "adamw", "c3": "biio", "out": "head"})
def members_with_groups_of_their_own():
    """A stem for all, a grouped convolution and a plain one for each member."""

    def run(x, w, groups=1):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def loss(p, x, y):
        x = jax.nn.relu(run(x, p["c1"]))

        def member(c2, c3, out):
            z = jax.nn.relu(run(x, c2, 2))
            return jax.nn.relu(run(z, c3)).mean(1) @ out

        return squared_error(jax.vmap(member)(p["c2"], p["c3"], p["out"]), y)

    params = {
        "c1": floats(3, 5, 8),
        "c2": floats(4, 3, 4, 12),
        "c3": floats(4, 3, 12, 10),
        "out": floats(4, 10, 3),
    }
    return loss, params, (floats(BATCH, 16, 5), floats(4, BATCH, 3))


@language_model(
    {**MODEL_ANSWERS, "medusa": "bio or oio", "after": "bio"},
    medusa=floats(3, WIDTH, WIDTH),
    after=floats(3, WIDTH, WIDTH),
)
def stacks_by_einsum(x, p):
    """A stack of matrices with one input, and one with an input for each."""
    x = x + jax.nn.silu(jnp.einsum("btd,kde->kbte", x, p["medusa"])).mean(0)
    rows = jnp.stack([x, x[:, ::-1], -x])
    return jnp.einsum("kbtd,kde->kbte", rows, p["after"]).mean(0)


# --- kernels mixed by data ------------------------------------------------------------


@program({"stem": "iiio", "route": "io", "kernels": "biiio", "head": "head"})
def conditional_convolutions():
    """CondConv: each sample has a mixture of kernels, weighed by sigmoids."""

    def loss(p, x, labels):
        x = jax.nn.relu(conv(x, p["stem"]))

        def one(x):
            weights = jax.nn.sigmoid(x.mean((0, 1)) @ p["route"])
            kernel = jnp.einsum("e,ehwio->hwio", weights, p["kernels"])
            return jax.nn.relu(conv(x[None], kernel)[0])

        return cross_entropy(jax.vmap(one)(x).mean((1, 2)) @ p["head"], labels)

    params = {
        "stem": floats(3, 3, 3, 10),
        "route": floats(10, 4),
        "kernels": floats(4, 3, 3, 10, 14),
        "head": floats(14, 7),
    }
    return loss, params, (floats(BATCH, 8, 8, 3), integers(BATCH))


@program({"route": "io", "kernels": "biio", "w": "io", "head": "head"})
def dynamic_convolution_of_a_batch():
    """One mixture of kernels for the whole batch, by softmax and `tensordot`."""

    def loss(p, x, labels):
        gates = jax.nn.softmax(x.mean((0, 1)) @ p["route"] / 30)
        kernel = jnp.tensordot(gates, p["kernels"], 1)
        x = lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        x = jax.nn.relu(jax.nn.relu(x).mean(1) @ p["w"])
        return cross_entropy(x @ p["head"], labels)

    params = {
        "route": floats(5, 4),
        "kernels": floats(4, 3, 5, 14),
        "w": floats(14, WIDTH),
        "head": floats(WIDTH, 7),
    }
    return loss, params, (floats(BATCH, 16, 5), integers(BATCH))
