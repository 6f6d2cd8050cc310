"""Dtypes of computations: as wide as the operands, and at least float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def wider(dtype: Any, other: Any) -> jnp.dtype:
    """`jnp.promote_types`, also under `jax_numpy_dtype_promotion="strict"`."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def wide(x: Array) -> Array:
    """x in at least float32, for sums, means and small differences."""
    return x.astype(wider(x.dtype, jnp.float32))


def unit_of(largest: Array) -> Array:
    """The power of two by which a matrix is multiplied before it is squared.

    1, unless the largest element is so large that squares, or the sum of 2^31 of them,
    may overflow: above 3e14 in float32 and bfloat16, where it is 2^-80.
    """
    most, one = jnp.finfo(largest.dtype).maxexp, jnp.ones_like(largest)
    return jnp.where(largest > 2.0 ** (most * 3 // 8), small_unit(largest.dtype), one)


def small_unit(dtype: Any) -> float:
    """The power of two for such matrices: 2^-80 for float32 and bfloat16."""
    return 2.0 ** (-jnp.finfo(dtype).maxexp * 5 // 8)


def root(x: Array) -> Array:
    """The square root, with derivative 0 at 0 instead of infinity.

    Meta-learning differentiates norms of zero gradients: infinity times 0 is NaN.
    """
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def in_dtype_of(x: Array, rate: Any) -> Any:
    """A rate in the dtype of x, for `jax_numpy_dtype_promotion="strict"`."""
    return rate if isinstance(rate, float) else jnp.asarray(rate, x.dtype)


def sent_dtype(dtype: Any, asked: Any) -> Any:
    """The dtype in which arrays are sent: the one asked for, if they are real."""
    real = jnp.issubdtype(dtype, jnp.floating)
    return dtype if asked is None or not real else asked
