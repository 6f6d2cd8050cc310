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
    key,
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


@program({"w1": "io or adamw", "w2 w3": "io", "w4": "head"})
def score_matching():
    """The loss compares a gradient of the network with respect to its input."""

    def energy(p, x):
        return jnp.sum(mlp(p, x, jax.nn.softplus) ** 2)

    def loss(p, x):
        return squared_error(jax.grad(energy, 1)(p, x), x)

    return loss, widths(10, WIDTH, HIDDEN, WIDTH, 5), (floats(BATCH, 10),)


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


@program({"w1": "io or adamw", "mean variance d1": "io", "d2": "head"})
def variational_autoencoder():
    """Noise between encoder and decoder, and a penalty on what is between them."""

    def loss(p, x, noise_key):
        hidden = jax.nn.relu(x @ p["w1"])
        mean, log_variance = hidden @ p["mean"], hidden @ p["variance"]
        noise = jax.random.normal(noise_key, mean.shape)
        z = mean + jnp.exp(log_variance / 2) * noise
        y = jax.nn.relu(z @ p["d1"]) @ p["d2"]
        penalty = mean**2 + jnp.exp(log_variance) - log_variance
        return squared_error(y, x) + jnp.mean(penalty)

    params = {
        "w1": floats(30, WIDTH),
        "mean": floats(WIDTH, 8),
        "variance": floats(WIDTH, 8),
        "d1": floats(8, WIDTH),
        "d2": floats(WIDTH, 30),
    }
    return loss, params, (floats(BATCH, 30), key())


@program({"e1": "io or adamw", "e2 d1": "io", "codebook": "adamw", "d2": "head"})
def vector_quantizer():
    """The nearest entry of a codebook (width, entries), found by a product."""

    def loss(p, x):
        z = jax.nn.relu(x @ p["e1"]) @ p["e2"]
        codes = p["codebook"]
        distances = (z**2).sum(-1, keepdims=True) - 2 * z @ codes + (codes**2).sum(0)
        nearest = codes.T[jnp.argmin(distances, -1)]
        straight_through = z + lax.stop_gradient(nearest - z)
        y = jax.nn.relu(straight_through @ p["d1"]) @ p["d2"]
        return squared_error(y, x) + squared_error(lax.stop_gradient(z), nearest)

    params = {
        "e1": floats(30, WIDTH),
        "e2": floats(WIDTH, 8),
        "codebook": floats(8, 50),
        "d1": floats(8, WIDTH),
        "d2": floats(WIDTH, 30),
    }
    return loss, params, (floats(BATCH, 30),)


@program(
    {
        "branch/w1 trunk/w1": "io or adamw",
        "branch/w2 trunk/w2": "io",
        "branch/w3 trunk/w3": "head",
    }
)
def deep_operator_network():
    """The outputs of two networks are multiplied with each other."""

    def loss(p, functions, points, y):
        branch = mlp(p["branch"], functions, jnp.tanh)
        trunk = mlp(p["trunk"], points, jnp.tanh)
        return squared_error(jnp.einsum("bk,nk->bn", branch, trunk), y)

    params = {
        "branch": widths(50, WIDTH, WIDTH, 20),
        "trunk": widths(2, WIDTH, WIDTH, 20),
    }
    return loss, params, (floats(BATCH, 50), floats(7, 2), floats(BATCH, 7))


@program({"w1": "io or adamw", "w2 predict/w1": "io", "predict/w2": "head"})
def simsiam():
    """Two views of one image; the gradient of one side is stopped."""

    def loss(p, x, y):
        def encode(x):
            return jax.nn.relu(x @ p["w1"]) @ p["w2"]

        def cosine(a, b):
            a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
            b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
            return -jnp.mean(jnp.sum(a * lax.stop_gradient(b), -1))

        a, b = encode(x), encode(y)
        forward = cosine(mlp(p["predict"], a, jax.nn.relu), b)
        return forward + cosine(mlp(p["predict"], b, jax.nn.relu), a)

    params = {
        "w1": floats(30, WIDTH),
        "w2": floats(WIDTH, HIDDEN),
        "predict": widths(HIDDEN, 8, HIDDEN),
    }
    return loss, params, (floats(BATCH, 30), floats(BATCH, 30))


@program({"w1": "io or adamw", "w2": "io", "classes": "head"})
def cosine_classifier():
    """The columns of the head are normalized, and a factor sharpens the cosines."""

    def loss(p, x, labels):
        h = jax.nn.relu(x @ p["w1"]) @ p["w2"]
        h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
        classes = p["classes"]
        classes = classes / jnp.linalg.norm(classes, axis=0, keepdims=True)
        return cross_entropy(16 * h @ classes, labels)

    params = {
        "w1": floats(30, WIDTH),
        "w2": floats(WIDTH, HIDDEN),
        "classes": floats(HIDDEN, 10),
    }
    return loss, params, (floats(BATCH, 30), integers(BATCH))
