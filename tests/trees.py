"""Trees of arrays from trees of shapes."""

import jax
import jax.numpy as jnp
import numpy as np


def filled(shapes, make):
    """What `make` returns for each shape, a tuple, of a tree."""
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def normal(shapes, seed=0, dtype="float32", size=1.0):
    """Normal numbers of a size, leaf after leaf from one generator."""
    rng = np.random.default_rng(seed)
    return filled(
        shapes, lambda shape: jnp.asarray(size * rng.standard_normal(shape), dtype)
    )
