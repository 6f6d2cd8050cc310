"""Losses with gradients inside, several networks, or inputs that no argument brings."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.programs.parts import (
    BATCH,
    HIDDEN,
    LENGTH,
    WIDTH,
    Leaf,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    mlp,
    program,
    squared_error,
    widths,
)

# --- gradients inside the loss --------------------------------------------------------

IMAGES = floats(4, BATCH, 8, 8, 3), integers(4, BATCH)


@program(
    *IMAGES,
    *IMAGES,
    first=Leaf("iiio or adamw", 3, 3, 3, 10),
    second=Leaf("iiio", 3, 3, 10, 14),
    third=Leaf("iiio", 4, 4, 14, 18),
    head=Leaf("head", 18, 7),
    bias=Leaf("adamw", 7),
)
def maml_with_convolutions(p, xs, ys, queries, labels):
    """One inner step for each task of a vmapped batch of tasks, with a bias."""

    def error(p, x, y):
        for name in ("first", "second"):
            x = jax.nn.leaky_relu(conv(x, p[name]))
        x = jnp.tanh(conv(x, p["third"])).mean((1, 2))
        return cross_entropy(x @ p["head"] + p["bias"], y)

    def task(x, y, query, label):
        grads = jax.grad(error)(p, x, y)
        adapted = optax.apply_updates(p, jax.tree.map(lambda g: -0.1 * g, grads))
        return error(adapted, query, label)

    return jax.vmap(task)(xs, ys, queries, labels).mean()


# --- nothing but derivatives ----------------------------------------------------------


@program(*[floats(BATCH, 2)] * 4, **widths(4, WIDTH, HIDDEN, 1, last="adamw"))
def hamiltonian_network(p, q, momentum, dq, dp):
    """The loss compares the gradients of a scalar with slopes of the data."""

    def hamiltonian(q, momentum):
        return mlp(p, jnp.concatenate([q, momentum]), jnp.tanh)[0]

    slopes = jax.vmap(jax.grad(hamiltonian, (0, 1)))(q, momentum)
    return squared_error(slopes[1], dq) + squared_error(-slopes[0], dp)


# --- several networks -----------------------------------------------------------------


@program(
    floats(BATCH, 7),
    floats(BATCH, 2),
    floats(BATCH, 2),
    floats(BATCH),
    actor=widths(7, WIDTH, HIDDEN, 4, last="head?"),
    critics={
        "w1": Leaf("bio or adamw", 2, 9, WIDTH),
        "w2": Leaf("bio", 2, WIDTH, HIDDEN),
        "w3": Leaf("adamw", 2, HIDDEN, 1),
    },
    log_alpha=Leaf("adamw"),
)
def soft_actor_critic(p, x, noise, actions, targets):
    """The actor's outputs go through the critics: its last layer is no last product."""
    mean, log_std = jnp.split(mlp(p["actor"], x, jax.nn.relu), 2, -1)
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)

    def q(w, actions):
        return mlp(w, jnp.concatenate([x, actions], -1), jax.nn.relu)

    entropy = jnp.sum(noise**2 / 2 + log_std, -1)
    alpha = lax.stop_gradient(jnp.exp(p["log_alpha"]))
    frozen, both = lax.stop_gradient(p["critics"]), jnp.stack([action, action])
    lowest = jax.vmap(q)(frozen, both).min(0)
    actor = jnp.mean(-alpha * entropy - lowest[:, 0])
    critics = jax.vmap(q, (0, None))(p["critics"], actions)
    critic = squared_error(critics[..., 0], targets)
    return actor + critic + p["log_alpha"] * lax.stop_gradient(entropy).mean()


# --- inputs that no argument brings ---------------------------------------------------


@program(
    floats(8, 8, 3),
    **widths(2, WIDTH, HIDDEN, 3, first="io"),
    b1=Leaf("adamw", WIDTH),
    b2=Leaf("adamw", HIDDEN),
)
def image_by_its_coordinates(p, image):
    """SIREN on the grid of all pixels; only the colors are data."""
    lines = jnp.linspace(-1, 1, 8)
    grid = jnp.stack(jnp.meshgrid(lines, lines, indexing="ij"), -1).reshape(-1, 2)
    x = jnp.sin(30 * (grid @ p["w1"] + p["b1"]))
    x = jnp.sin(x @ p["w2"] + p["b2"])
    return squared_error((x @ p["w3"]).reshape(image.shape), image)


@program(
    floats(9, 64, 3),
    codes=Leaf("adamw", 9, 6),
    film={"0": Leaf("io", 6, 10), "1": Leaf("io", 10, WIDTH)},
    w1=Leaf("io", 12, WIDTH),
    w2=Leaf("head", WIDTH, 3),
)
def codes_scale_features_of_a_grid(p, images):
    """Neither the codes nor the grid is data, and both go through matrices."""
    angles = jnp.linspace(0, jnp.pi, 64)[:, None] * 2.0 ** jnp.arange(6)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    scales = jax.nn.relu(p["codes"] @ p["film"]["0"]) @ p["film"]["1"]
    hidden = jax.nn.relu((waves @ p["w1"])[None] * (1 + scales[:, None]))
    return squared_error(hidden @ p["w2"], images)


@between(positions=Leaf("adamw", 4, 4, WIDTH))
def positions_resized(x, p):
    """A table of positions of another size, interpolated by products with constants."""
    table = jax.image.resize(p["positions"], (2, 8, WIDTH), "bilinear")
    return x + table.reshape(LENGTH, WIDTH)
