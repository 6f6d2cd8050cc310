"""Dtypes of computations: as wide as the operands, and at least float32."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array


# A trace of an update of three leaves asks 102 times for a handful of answers.
@functools.lru_cache
def wider(dtype: DTypeLike, other: DTypeLike) -> jnp.dtype:
    """`jnp.promote_types`, also under `jax_numpy_dtype_promotion="strict"`.

    Of bfloat16 and float16 neither is wider: float32.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def is_key(dtype: DTypeLike) -> bool:
    """Whether arrays of this dtype are random keys, as of `jax.random.key`."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def wide(x: Array) -> Array:
    """x in at least float32, for sums, means and small differences."""
    return x.astype(wider(x.dtype, jnp.float32))


def unit_of(largest: Array) -> Array:
    """The power of two by which a matrix is multiplied before it is squared.

    1, unless the largest element is so large that squares, or the sum of 2^31 of them,
    may overflow: above 3e14 in float32 and bfloat16, where it is 2^-80.
    """
    # (3e14)^2 is 9e28, and 2^31 of those are 2e38, below float32's 3.4e38. A power of
    # two rounds nothing: 1e20 * 2^-80 is 8e-5.
    most, one = jnp.finfo(largest.dtype).maxexp, jnp.ones_like(largest)
    return jnp.where(largest > 2.0 ** (most * 3 // 8), small_unit(largest.dtype), one)


def small_unit(dtype: DTypeLike) -> float:
    """The power of two for such matrices: 2^-80 for float32 and bfloat16."""
    return 2.0 ** (-jnp.finfo(dtype).maxexp * 5 // 8)


def padded(
    norm: Array, eps: ArrayLike, unit: ArrayLike = 1.0, factor: float = 1.0
) -> Array:
    """The divisor of a matrix, factor * norm + eps, with less eps for small matrices.

    Below a norm of 2^-13 eps is in proportion to the norm, so that a small gradient
    takes the step of a large one, but it is at least 2^-20 of itself: near 2e-18
    squares of elements underflow and norms come out too small. Without an eps the
    quintics would diverge there.

    Args:
      norm: of the matrix times `unit`.
      eps: in units of the matrix.
      unit: a power of two, or 1 over another norm.
      factor: of the norm.
    """
    # Two sums: the usual one is rounded as if there were no other.
    usual = factor * norm + eps * unit
    small = norm * (factor + eps * 2.0**13) + eps * (2.0**-20 * unit)
    return jnp.where(norm < unit * 2.0**-13, small, usual)


# Traced once for all arrays of a shape: a step of 72 leaves has 144 roots.
@jax.jit
def root(x: Array) -> Array:
    """The square root, with derivative 0 at 0 instead of infinity.

    Meta-learning differentiates norms of zero gradients: infinity times 0 is NaN.
    """
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def in_dtype_of(x: Array, rate: ArrayLike) -> float | Array:
    """A rate in the dtype of x, for `jax_numpy_dtype_promotion="strict"`."""
    return rate if isinstance(rate, float) else jnp.asarray(rate, x.dtype)


def sent_dtype(dtype: DTypeLike, asked: DTypeLike | None) -> DTypeLike:
    """The dtype in which arrays are sent: the one asked for, if they are real.

    With bfloat16 asked for, float32 goes as bfloat16, and int32 and complex64 as they
    are.
    """
    real = jnp.issubdtype(dtype, jnp.floating)
    return dtype if asked is None or not real else asked
