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
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    key,
    leaf,
    mlp,
    program,
    squared_error,
    widths,
)

# --- gradients inside the loss --------------------------------------------------------


@program(floats(BATCH, 2), **widths(2, WIDTH, HIDDEN, 3))
def physics_informed(p, points):
    """The residual of a differential equation: second derivatives of the network."""

    def residual(x):
        hessian = jax.hessian(lambda x: mlp(p, x, jnp.tanh)[0])(x)
        return hessian[0, 0] + hessian[1, 1] + mlp(p, x, jnp.tanh)[1]

    return jnp.mean(jax.vmap(residual)(points) ** 2)


CLASSES = floats(4, BATCH, 10), integers(4, BATCH)


@program(*CLASSES, *CLASSES, **widths(10, WIDTH, HIDDEN, 5))
def maml(p, xs, ys, queries, labels):
    """Three steps of gradient descent inside the loss, for each task."""

    def task(x, y, query, label):
        def inner(p, _):
            grads = jax.grad(lambda p: cross_entropy(mlp(p, x, jax.nn.relu), y))(p)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), None

        adapted, _ = lax.scan(inner, p, None, length=3)
        return cross_entropy(mlp(adapted, query, jax.nn.relu), label)

    return jax.vmap(task)(xs, ys, queries, labels).mean()


CRITIC = {
    "first": leaf("iiio or adamw", 3, 3, 3, 10),
    "second": leaf("iiio", 3, 3, 10, 14),
    "third": leaf("iiio", 4, 4, 14, 18),
    "head": leaf("head", 18, 7),
}


def critic(p, x):
    """Convolutions, a mean over all places, and a head of seven outputs."""
    x = jax.nn.leaky_relu(conv(x, p["first"]))
    x = jax.nn.leaky_relu(conv(x, p["second"]))
    x = jnp.tanh(conv(x, p["third"]))
    return x.mean((1, 2)) @ p["head"]


@program(floats(BATCH, 8, 8, 3), **CRITIC)
def r1_penalty(p, images):
    """The norm of the critic's gradient at real images."""
    scores = critic(p, images)
    grads = jax.grad(lambda x: critic(p, x).sum())(images)
    penalty = jnp.sum(grads**2, (1, 2, 3)).mean()
    return jnp.mean(jax.nn.softplus(-scores)) + 5 * penalty


IMAGES = floats(4, BATCH, 8, 8, 3), integers(4, BATCH)


@program(*IMAGES, *IMAGES, **CRITIC, bias=leaf("adamw", 7))
def maml_with_convolutions(p, xs, ys, queries, labels):
    """One inner step for each task of a vmapped batch of tasks, with a bias."""

    def error(p, x, y):
        return cross_entropy(critic(p, x) + p["bias"], y)

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


@program(
    floats(6, 3),
    integers(6),
    floats(6, 3),
    embed=leaf("embedding", 11, WIDTH),
    w1=leaf("io", 9, WIDTH),
    w2=leaf("io", WIDTH, HIDDEN),
    w3=leaf("head", HIDDEN, 3),
)
def forces_of_a_potential(p, positions, kinds, forces):
    """Atoms' energies by distances; only the forces are compared."""

    def energy(positions):
        apart = positions[:, None] - positions[None]
        distances = jnp.sqrt(jnp.sum(apart**2, -1) + 1e-6)
        radial = jnp.exp(-((distances[..., None] - jnp.linspace(0, 5, 9)) ** 2))
        pairs = radial @ p["w1"] * p["embed"][kinds][None]
        return jnp.sum(jax.nn.silu(jax.nn.silu(pairs.sum(1)) @ p["w2"]) @ p["w3"])

    return squared_error(-jax.grad(energy)(positions), forces)


@program(floats(BATCH, 3), floats(BATCH), **widths(3, WIDTH, HIDDEN, 3))
def divergence_of_a_field(p, points, weights):
    """Incompressible flow: the trace of a Jacobian by forward derivatives."""
    jacobians = jax.vmap(jax.jacfwd(lambda x: mlp(p, x, jnp.sin)))(points)
    return jnp.mean(jnp.trace(jacobians, axis1=1, axis2=2) ** 2 * weights)


# --- several networks -----------------------------------------------------------------


@program(
    floats(BATCH, 10),
    integers(BATCH),
    floats(BATCH),
    w1=leaf("io or adamw", 10, WIDTH),
    w2=leaf("io", WIDTH, WIDTH),
    policy=leaf("head", WIDTH, 4),
    value=leaf("adamw", WIDTH, 1),
)
def actor_critic(p, x, actions, returns):
    """Two heads on one trunk; one of them has a single output and is no matrix."""
    hidden = jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"])
    log_policy = jax.nn.log_softmax(hidden @ p["policy"])
    chosen = jnp.take_along_axis(log_policy, actions[:, None], 1)[:, 0]
    value = (hidden @ p["value"])[..., 0]
    advantage = lax.stop_gradient(returns - value)
    return squared_error(returns, value) - jnp.mean(chosen * advantage)


@program(
    floats(BATCH, 7),
    floats(BATCH, 2),
    floats(BATCH, 2),
    floats(BATCH),
    actor=widths(7, WIDTH, HIDDEN, 4, last="head?"),
    critics={
        "w1": leaf("bio or adamw", 2, 9, WIDTH),
        "w2": leaf("bio", 2, WIDTH, HIDDEN),
        "w3": leaf("adamw", 2, HIDDEN, 1),
    },
    log_alpha=leaf("adamw"),
)
def soft_actor_critic(p, x, noise, actions, targets):
    """The actor's outputs go through the critics: its last layer is no last product."""
    mean, log_std = jnp.split(mlp(p["actor"], x, jax.nn.relu), 2, -1)
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)

    def q(critics, actions):
        inputs = jnp.concatenate([x, actions], -1)
        return jax.vmap(lambda w: mlp(w, inputs, jax.nn.relu))(critics)

    entropy = jnp.sum(noise**2 / 2 + log_std, -1)
    alpha = lax.stop_gradient(jnp.exp(p["log_alpha"]))
    lowest = q(lax.stop_gradient(p["critics"]), action).min(0)
    actor = jnp.mean(-alpha * entropy - lowest[:, 0])
    critic = squared_error(q(p["critics"], actions)[..., 0], targets)
    return actor + critic + p["log_alpha"] * lax.stop_gradient(entropy).mean()


# --- inputs that no argument brings ---------------------------------------------------


@program(
    key(),
    floats(BATCH, 7),
    time={"0": leaf("io", 16, HIDDEN), "1": leaf("io", HIDDEN, WIDTH)},
    into=leaf("io", 7, WIDTH),
    out=leaf("head", WIDTH, 7),
)
def diffusion_with_times_from_a_key(p, random_key, x):
    """Times are drawn inside; their sines and cosines go through two matrices."""
    a, b = jax.random.split(random_key)
    time = jax.random.uniform(a, (BATCH, 1))
    noise = jax.random.normal(b, x.shape)
    angles = 1000 * time * jnp.exp(-jnp.linspace(0, 9, 8))
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    embedded = jax.nn.silu(waves @ p["time"]["0"]) @ p["time"]["1"]
    hidden = jax.nn.silu((x * (1 - time) + noise * time) @ p["into"] + embedded)
    return squared_error(hidden @ p["out"], noise - x)


@program(
    floats(8, 8, 3),
    **widths(2, WIDTH, HIDDEN, 3, first="io"),
    b1=leaf("adamw", WIDTH),
    b2=leaf("adamw", HIDDEN),
)
def image_by_its_coordinates(p, image):
    """SIREN on the grid of all pixels; only the colors are data."""
    lines = jnp.linspace(-1, 1, 8)
    grid = jnp.stack(jnp.meshgrid(lines, lines, indexing="ij"), -1).reshape(-1, 2)
    x = jnp.sin(30 * (grid @ p["w1"] + p["b1"]))
    x = jnp.sin(x @ p["w2"] + p["b2"])
    return squared_error((x @ p["w3"]).reshape(image.shape), image)


@program(
    floats(50, 9),
    codes=leaf("adamw", 50, 6),
    decoder=widths(6, WIDTH, HIDDEN, 9, first="io"),
)
def auto_decoder_of_all_codes(p, x):
    """A learned code for each sample; all samples are in the batch."""
    decoded = mlp(p["decoder"], p["codes"], jax.nn.relu)
    return squared_error(decoded, x) + 1e-4 * jnp.sum(p["codes"] ** 2)


@program(
    floats(9, 64, 3),
    codes=leaf("adamw", 9, 6),
    film={"0": leaf("io", 6, 10), "1": leaf("io", 10, WIDTH)},
    w1=leaf("io", 12, WIDTH),
    w2=leaf("head", WIDTH, 3),
)
def codes_scale_features_of_a_grid(p, images):
    """Neither the codes nor the grid is data, and both go through matrices."""
    angles = jnp.linspace(0, jnp.pi, 64)[:, None] * 2.0 ** jnp.arange(6)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    scales = jax.nn.relu(p["codes"] @ p["film"]["0"]) @ p["film"]["1"]
    hidden = jax.nn.relu((waves @ p["w1"])[None] * (1 + scales[:, None]))
    return squared_error(hidden @ p["w2"], images)


@between(positions=leaf("adamw", 4, 4, WIDTH))
def positions_resized(x, p):
    """A table of positions of another size, interpolated by products with constants."""
    table = jax.image.resize(p["positions"], (2, 8, WIDTH), "bilinear")
    return x + table.reshape(LENGTH, WIDTH)
