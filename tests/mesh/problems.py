"""Training problems for tests on several devices: losses that rounding cannot amplify.

Gradients are almost independent of the parameters, and every sample has its own: what a
layout gets wrong shows, what float32 rounds differently does not grow.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

FEATURES = 24
PROBLEMS = {
    "mixed": {
        "wte": (67, 24),
        "big_bias": (1030,),
        "norm/scale": (24,),
        "h_0/q": (24, 24),
        "h_1/q": (24, 24),
        "h_2/q": (24, 24),
        "h_0/up": (24, 48),
        "h_0/down": (48, 24),
        "scan/mlp": (3, 24, 48),
        "Conv_0/kernel": (3, 3, 4, 6),
    },
    "five of one shape": {f"{i}/w": (12, 20) for i in range(5)},
    "eight of one shape": {f"{i}/w": (12, 20) for i in range(8)},
    "one matrix only": {"w": (9, 14)},
    "no matrices": {"wte": (130, 8), "bias": (7,), "scale": (5,)},
    "no adamw leaves": {"x": (8, 8), "y": (8, 16), "z": (16, 8)},
}


def draw(name, dtype=jnp.float32):
    """Parameters and the tensors that make each leaf's gradient from a sample."""
    rng = np.random.default_rng(1)
    tree = {}
    weights = {}
    for path, shape in PROBLEMS[name].items():
        tree[path] = jnp.asarray(rng.standard_normal(shape) * 0.1, dtype)
        size = (FEATURES, *shape)
        weights[path] = jnp.asarray(rng.standard_normal(size), dtype)
    return tree, weights


def batches(steps, size=16, dtype=jnp.float32):
    """One batch of samples (size, FEATURES) for each step."""
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((steps, size, FEATURES)), dtype)


def loss_of(weights):
    """Mean over samples x of the sum over leaves of <p, x . weights> + |p|^2 / 20."""

    def loss(params, batch):
        total = 0.0
        for path, p in params.items():
            slope = jnp.tensordot(batch, weights[path], axes=1)
            axes = tuple(range(1, slope.ndim))
            total += jnp.mean(jnp.sum(slope * p[None], axis=axes)) + jnp.sum(p * p) / 20
        return total

    return loss


def plain_step(tx, loss):
    """A jitted step of a user who knows nothing but optax."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def run(step, params, state, data):
    """Parameters, state and losses of a loop over batches."""
    losses = []
    for batch in data:
        params, state, value = step(params, state, batch)
        losses.append(float(value["loss"] if isinstance(value, dict) else value))
    return params, state, losses


def single_device(tx, loss, params, data):
    """The same for a plain step on one device, from the first state."""
    params = jax.tree.map(jnp.copy, params)  # the first step donates them
    return run(plain_step(tx, loss), params, tx.init(params), data)


def distance(a, b, start):
    """|a - b| relative to the distance travelled, |b - start|, over a whole tree."""
    norm = optax.tree.norm
    subtract = lambda x, y: jax.tree.map(  # noqa: E731
        lambda u, v: np.asarray(u, np.float64) - np.asarray(v, np.float64), x, y
    )
    return float(norm(subtract(a, b)) / norm(subtract(b, start)))


# Float32: rounding alone, which this problem does not amplify.
BOUND = 5e-6


def assert_same_losses(got, want):
    """To the same bound of the largest: near zero they are sums of large terms."""
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND * np.abs(want).max())
