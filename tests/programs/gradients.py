"""Gradients of networks inside the loss: penalties, attacks, inner steps, forces."""

import jax
import jax.numpy as jnp
import optax

from tests.programs import program
from tests.programs.losses import MLP_ANSWERS, mlp, widths
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    WIDTH,
    conv,
    cross_entropy,
    floats,
    integers,
    squared_error,
)

IMAGES = floats(BATCH, 8, 8, 3)
CRITIC = {
    "first": floats(3, 3, 3, 10),
    "second": floats(3, 3, 10, 14),
    "third": floats(4, 4, 14, 18),
    "head": floats(18, 7),
}
CRITIC_ANSWERS = {"first": "iiio or adamw", "second third": "iiio", "head": "head"}
UNDER_D = {"d": "iiio", "d/first": "iiio or adamw", "d/head": "head"}


def critic(p, x):
    """Convolutions, a mean over all places, and a head of seven outputs."""
    x = jax.nn.leaky_relu(conv(x, p["first"]))
    x = jax.nn.leaky_relu(conv(x, p["second"]))
    x = jnp.tanh(conv(x, p["third"]))
    return x.mean((1, 2)) @ p["head"]


# --- through convolutions -------------------------------------------------------------


@program(UNDER_D)
def r1_penalty():
    """The norm of the critic's gradient at real images."""

    def loss(p, images):
        scores = critic(p["d"], images)
        grads = jax.grad(lambda x: critic(p["d"], x).sum())(images)
        penalty = jnp.sum(grads**2, (1, 2, 3)).mean()
        return jnp.mean(jax.nn.softplus(-scores)) + 5 * penalty

    return loss, {"d": CRITIC}, (IMAGES,)


@program({**CRITIC_ANSWERS, "bias": "adamw"})
def maml_with_convolutions():
    """One inner step for each task of a vmapped batch of tasks, with a bias."""

    def loss(p, xs, ys, queries, labels):
        def error(p, x, y):
            return cross_entropy(critic(p, x) + p["bias"], y)

        def task(x, y, query, label):
            grads = jax.grad(error)(p, x, y)
            adapted = optax.apply_updates(p, jax.tree.map(lambda g: -0.1 * g, grads))
            return error(adapted, query, label)

        return jax.vmap(task)(xs, ys, queries, labels).mean()

    data = floats(4, BATCH, 8, 8, 3), integers(4, BATCH)
    return loss, {**CRITIC, "bias": floats(7)}, (*data, *data)


# --- nothing but derivatives ----------------------------------------------------------


@program({"w1": "io or adamw", "w2": "io", "w3": "adamw"})
def hamiltonian_network():
    """The loss compares the gradients of a scalar with slopes of the data."""

    def loss(p, q, momentum, dq, dp):
        def hamiltonian(q, momentum):
            return mlp(p, jnp.concatenate([q, momentum]), jnp.tanh)[0]

        slopes = jax.vmap(jax.grad(hamiltonian, (0, 1)))(q, momentum)
        return squared_error(slopes[1], dq) + squared_error(-slopes[0], dp)

    return loss, widths(4, WIDTH, HIDDEN, 1), (floats(BATCH, 2),) * 4


@program({"w1 w2": "io", "embed": "embedding", "w3": "head"})
def forces_of_a_potential():
    """Atoms' energies by distances; only the forces are compared."""

    def loss(p, positions, kinds, forces):
        def energy(positions):
            apart = positions[:, None] - positions[None]
            distances = jnp.sqrt(jnp.sum(apart**2, -1) + 1e-6)
            radial = jnp.exp(-((distances[..., None] - jnp.linspace(0, 5, 9)) ** 2))
            pairs = radial @ p["w1"] * p["embed"][kinds][None]
            return jnp.sum(jax.nn.silu(jax.nn.silu(pairs.sum(1)) @ p["w2"]) @ p["w3"])

        return squared_error(-jax.grad(energy)(positions), forces)

    params = {
        "embed": floats(11, WIDTH),
        "w1": floats(9, WIDTH),
        "w2": floats(WIDTH, HIDDEN),
        "w3": floats(HIDDEN, 3),
    }
    return loss, params, (floats(6, 3), integers(6), floats(6, 3))


@program(MLP_ANSWERS)
def divergence_of_a_field():
    """Incompressible flow: the trace of a Jacobian by forward derivatives."""

    def loss(p, points, weights):
        def field(x):
            return mlp(p, x, jnp.sin)

        jacobians = jax.vmap(jax.jacfwd(field))(points)
        return jnp.mean(jnp.trace(jacobians, axis1=1, axis2=2) ** 2 * weights)

    return loss, widths(3, WIDTH, HIDDEN, 3), (floats(BATCH, 3), floats(BATCH))
