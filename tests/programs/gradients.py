"""Gradients of networks inside the loss: penalties, attacks, inner steps, forces."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

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
    key,
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


@program(
    {
        "g/in": "io or adamw",
        "g/up": "iiio",
        "g/out": "iiio",
        **UNDER_D,
    }
)
def wgan_gp():
    """A critic between real and generated images, one sample at a time."""

    def generate(p, z):
        x = jax.nn.relu(z @ p["in"]).reshape(-1, 4, 4, 12)
        x = lax.conv_transpose(
            x, p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(conv(jax.nn.relu(x), p["out"]))

    def loss(p, z, real, mix):
        fake = generate(p["g"], z)
        between = mix * real + (1 - mix) * fake

        def norm(x):
            _, pull = jax.vjp(lambda x: critic(p["d"], x[None])[0, 0], x)
            return jnp.sqrt(jnp.sum(pull(1.0)[0] ** 2) + 1e-8)

        penalty = (jax.vmap(norm)(between) - 1) ** 2
        scores = critic(p["d"], fake).mean() - critic(p["d"], real).mean()
        return scores + 10 * penalty.mean()

    g = {
        "in": floats(6, 4 * 4 * 12),
        "up": floats(4, 4, 12, 11),
        "out": floats(3, 3, 11, 3),
    }
    data = floats(BATCH, 6), IMAGES, floats(BATCH, 1, 1, 1)
    return loss, {"g": g, "d": CRITIC}, data


@program(CRITIC_ANSWERS)
def projected_gradient_attack():
    """A scan of signed gradient steps makes the images that the loss is of."""

    def loss(p, images, labels):
        def attack(x, _):
            grads = jax.grad(lambda x: cross_entropy(critic(p, x), labels))(x)
            return jnp.clip(x + 0.01 * jnp.sign(grads), 0, 1), None

        x, _ = lax.scan(attack, images, length=3)
        return cross_entropy(critic(p, lax.stop_gradient(x)), labels)

    return loss, CRITIC, (IMAGES, integers(BATCH))


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


@program({"first": "iiio or adamw", "second third": "iiio", "head": "adamw"})
def energy_model_with_langevin_steps():
    """Samples are drawn by descending the energy, with remat and noise."""

    def energy(p, x):
        return jnp.sum(critic(p, x))

    def loss(p, random_key, images):
        slope = jax.checkpoint(jax.grad(energy, 1))

        def step(number, x):
            noise = jax.random.normal(jax.random.fold_in(random_key, number), x.shape)
            return x - 0.1 * slope(p, x) + 0.01 * noise

        start = jax.random.uniform(random_key, images.shape)
        samples = lax.stop_gradient(lax.fori_loop(0, 4, step, start))
        return energy(p, images) - energy(p, samples)

    params = {**CRITIC, "head": floats(18, 1)}
    return loss, params, (key(), IMAGES)


@program(CRITIC_ANSWERS)
def jacobian_penalty_by_random_vectors():
    """A forward derivative along a random direction, and a reverse one against it."""

    def loss(p, random_key, images, labels):
        one, two = jax.random.split(random_key)
        v = jax.random.normal(one, images.shape)
        logits, along = jax.jvp(lambda x: critic(p, x), (images,), (v,))
        _, pull = jax.vjp(lambda x: critic(p, x), images)
        (against,) = pull(jax.random.rademacher(two, logits.shape, jnp.float32))
        return (
            cross_entropy(logits, labels)
            + squared_error(along, 0 * along)
            + (jnp.mean(against**2))
        )

    return loss, CRITIC, (key(), IMAGES, integers(BATCH))


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


@program({"w1": "io or adamw", "w2 w3": "io", "w4": "adamw"})
def lagrangian_network():
    """A solve with the Hessian of the network by its velocities."""

    def loss(p, q, velocity, acceleration):
        def lagrangian(q, v):
            return jnp.squeeze(mlp(p, jnp.concatenate([q, v], -1), jax.nn.softplus))

        def predicted(q, v):
            mass = jax.hessian(lagrangian, 1)(q, v)
            mixed = jax.jacfwd(jax.grad(lagrangian, 1), 0)(q, v)
            force = jax.grad(lagrangian, 0)(q, v) - mixed @ v
            return jnp.linalg.solve(mass + 1e-3 * jnp.eye(2), force)

        return squared_error(jax.vmap(predicted)(q, velocity), acceleration)

    return loss, widths(4, WIDTH, HIDDEN, WIDTH + 1, 1), (floats(BATCH, 2),) * 3


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


@program({"x0": "io or adamw", "x1 z1": "io", "x2 z2": "head", "b": "adamw"})
def input_convex_gradient_map():
    """Optimal transport by the gradient of a convex potential (ICNN)."""

    def potential(p, x):
        z = jax.nn.softplus(x @ p["x0"] + p["b"])
        z = jax.nn.softplus(z @ jax.nn.softplus(p["z1"]) + x @ p["x1"])
        z = jax.nn.softplus(z @ jnp.abs(p["z2"]) + x @ p["x2"])
        return z.sum() + 0.5 * (x**2).sum()

    def loss(p, x, y):
        moved = jax.vmap(jax.grad(functools.partial(potential, p)))(x)
        return squared_error(moved, y)

    params = {
        "x0": floats(5, WIDTH),
        "x1": floats(5, HIDDEN),
        "x2": floats(5, 9),
        "z1": floats(WIDTH, HIDDEN),
        "z2": floats(HIDDEN, 9),
        "b": floats(WIDTH),
    }
    return loss, params, (floats(BATCH, 5), floats(BATCH, 5))


@program(MLP_ANSWERS)
def divergence_of_a_field():
    """Incompressible flow: the trace of a Jacobian by forward derivatives."""

    def loss(p, points, weights):
        def field(x):
            return mlp(p, x, jnp.sin)

        jacobians = jax.vmap(jax.jacfwd(field))(points)
        return jnp.mean(jnp.trace(jacobians, axis1=1, axis2=2) ** 2 * weights)

    return loss, widths(3, WIDTH, HIDDEN, 3), (floats(BATCH, 3), floats(BATCH))


@program({"w1": "io or adamw", "w2": "io", "w3": "adamw"})
def poisson_equation():
    """The Laplacian by gradients of gradients, at random and at regular points."""

    def loss(p, random_key, source):
        def u(x):
            return mlp(p, x, jnp.tanh)[0]

        def laplacian(x):
            basis = jnp.eye(2)
            slope = jax.grad(u)
            return sum(jax.jvp(slope, (x,), (e,))[1] @ e for e in basis)

        points = jax.random.uniform(random_key, (BATCH, 2))
        edge = jnp.stack([jnp.linspace(0, 1, 9), jnp.zeros(9)], -1)
        inside = jax.vmap(laplacian)(points) - source
        return jnp.mean(inside**2) + jnp.mean(jax.vmap(u)(edge) ** 2)

    return loss, widths(2, WIDTH, HIDDEN, 1), (key(), floats(BATCH))
