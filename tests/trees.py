"""Trees of arrays: from trees of shapes, how far apart two are, and steps on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def filled(shapes, make):
    """What `make` returns for each shape, a tuple, of a tree."""
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def normal(shapes, seed=0, dtype="float32", size=1.0):
    """Normal numbers of a size, leaf after leaf from one generator."""
    rng = np.random.default_rng(seed)
    return filled(
        shapes, lambda shape: jnp.asarray(size * rng.standard_normal(shape), dtype)
    )


def distance(tree, like):
    """The norm of the difference of two trees, as a part of the second's norm."""
    return float(optax.tree.norm(optax.tree.sub(tree, like)) / optax.tree.norm(like))


def run(tx, params, grads):
    """The updates of each step, the parameters and the state after the last one."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    state, seen = tx.init(params), []
    for each in grads:
        updates, params, state = step(params, state, each)
        seen.append(updates)
    return seen, params, state
