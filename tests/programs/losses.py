"""Losses with gradients inside, several networks, or something else than a label."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    WIDTH,
    cross_entropy,
    floats,
    integers,
    squared_error,
)


def mlp(p, x, activation):
    """Layers w1, w2, ... with an activation between them."""
    *hidden, last = sorted(p)
    for name in hidden:
        x = activation(x @ p[name])
    return x @ p[last]


def widths(*sizes):
    """The matrices (in, out) of an MLP with these widths."""
    pairs = enumerate(itertools.pairwise(sizes), 1)
    return {f"w{number}": floats(*shape) for number, shape in pairs}


# The first layer of an MLP sees raw data; by convention either optimizer may take it.
MLP_ANSWERS = {"w1": "io or adamw", "w2": "io", "w3": "head"}


@program(MLP_ANSWERS)
def physics_informed():
    """The residual of a differential equation: second derivatives of the network."""

    def loss(p, points):
        def residual(x):
            hessian = jax.hessian(lambda x: mlp(p, x, jnp.tanh)[0])(x)
            return hessian[0, 0] + hessian[1, 1] + mlp(p, x, jnp.tanh)[1]

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return loss, widths(2, WIDTH, HIDDEN, 3), (floats(BATCH, 2),)


@program(MLP_ANSWERS)
def maml():
    """Three steps of gradient descent inside the loss, for each task."""

    def loss(p, xs, ys, queries, labels):
        def task(x, y, query, label):
            def inner(p, _):
                grads = jax.grad(lambda p: cross_entropy(mlp(p, x, jax.nn.relu), y))(p)
                return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), None

            adapted, _ = lax.scan(inner, p, None, length=3)
            return cross_entropy(mlp(adapted, query, jax.nn.relu), label)

        return jax.vmap(task)(xs, ys, queries, labels).mean()

    data = floats(4, BATCH, 10), integers(4, BATCH)
    return loss, widths(10, WIDTH, HIDDEN, 5), (*data, *data)


@program({"w1": "io or adamw", "w2": "io", "policy": "head", "value": "adamw"})
def actor_critic():
    """Two heads on one trunk; one of them has a single output and is no matrix."""

    def loss(p, x, actions, returns):
        hidden = jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"])
        log_policy = jax.nn.log_softmax(hidden @ p["policy"])
        chosen = jnp.take_along_axis(log_policy, actions[:, None], 1)[:, 0]
        value = (hidden @ p["value"])[..., 0]
        advantage = lax.stop_gradient(returns - value)
        return squared_error(returns, value) - jnp.mean(chosen * advantage)

    params = {
        "w1": floats(10, WIDTH),
        "w2": floats(WIDTH, WIDTH),
        "policy": floats(WIDTH, 4),
        "value": floats(WIDTH, 1),
    }
    return loss, params, (floats(BATCH, 10), integers(BATCH), floats(BATCH))


@program(
    {
        "actor/w1": "io or adamw",
        "actor/w2": "io",
        "actor/w3": "head?",
        "critics/w1": "bio or adamw",
        "critics/w2": "bio",
        "critics/w3": "adamw",
        "log_alpha": "adamw",
    }
)
def soft_actor_critic():
    """The actor's outputs go through the critics: its last layer is no last product."""

    def loss(p, x, noise, actions, targets):
        mean, log_std = jnp.split(mlp(p["actor"], x, jax.nn.relu), 2, -1)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        q = jax.vmap(lambda w, a: mlp(w, jnp.concatenate([x, a], -1), jax.nn.relu))
        critics = jax.vmap(
            lambda w: mlp(w, jnp.concatenate([x, actions], -1), jax.nn.relu)
        )
        frozen = lax.stop_gradient(p["critics"])
        both = q(frozen, jnp.stack([action, action])).min(0)
        entropy = jnp.sum(noise**2 / 2 + log_std, -1)
        alpha = lax.stop_gradient(jnp.exp(p["log_alpha"]))
        actor = jnp.mean(-alpha * entropy - both[:, 0])
        critic = squared_error(critics(p["critics"])[..., 0], targets)
        return actor + critic + p["log_alpha"] * lax.stop_gradient(entropy).mean()

    params = {
        "actor": widths(7, WIDTH, HIDDEN, 4),
        "critics": {
            name: floats(2, *w.shape) for name, w in widths(9, WIDTH, HIDDEN, 1).items()
        },
        "log_alpha": floats(),
    }
    data = floats(BATCH, 7), floats(BATCH, 2), floats(BATCH, 2), floats(BATCH)
    return loss, params, data
