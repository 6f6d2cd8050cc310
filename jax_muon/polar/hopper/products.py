"""The two symmetric products of an iteration, one function for each."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.polar.hopper import kernel
from jax_muon.polar.products import FusedProducts, outer

# Matrices with fewer rows take plain products. Published measurements of such kernels
# put the crossover between 1024 and 2048 rows.
MIN_ROWS = 1024


def gram(
    x: Float[Array, "*batch m n"],
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    factor: float | Float[Array, ""] = 1.0,
    tiling: kernel.Tiling = kernel.TILING,
) -> Float[Array, "*batch m m"]:
    """The matrices k X X^T, summed in float32 and rounded once.

    Args:
      x: matrices in the last two axes, bfloat16. float32 is refused: the tensor cores
        of a GPU do not multiply it without rounding.
      dtype: of the result, bfloat16 or float32.
      factor: k.
      tiling: sizes of the kernel.

    Returns:
      The matrices, equal to their transposes bit by bit.

    Raises:
      ValueError: x is not bfloat16, or the GPU or the version of JAX cannot run the
        kernel.

    Examples:
      >>> x = jnp.ones((3, 500, 2000), jnp.bfloat16)
      >>> jax.eval_shape(gram, x).shape
      (3, 500, 500)
    """
    return _symmetric_product(x, dtype, (factor,), tiling)


def quadratic(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    *,
    tiling: kernel.Tiling = kernel.TILING,
) -> Float[Array, "*batch m m"]:
    """The matrices b A + c A A for symmetric A, summed in float32 and rounded once.

    Args:
      a: symmetric matrices in the last two axes, bfloat16. Symmetry is not checked: the
        lower triangle of A A^T, which the kernel computes, decides.
      b: factor of A.
      c: factor of A A.
      tiling: sizes of the kernel.

    Returns:
      An array with the shape and dtype of a, equal to its transpose bit by bit.

    Raises:
      ValueError: as `gram`; a is not square.

    Examples:
      >>> a = jnp.ones((3, 500, 500), jnp.bfloat16)
      >>> jax.eval_shape(quadratic, a, 1.0, 2.0).shape
      (3, 500, 500)
    """
    if a.shape[-2] != a.shape[-1]:
        raise ValueError(f"a of shape {a.shape}; expected square matrices (..., m, m)")
    return _symmetric_product(a, a.dtype, (c, b), tiling)


class HopperProducts(FusedProducts):
    """Symmetric products of large matrices by the kernels."""

    def outer(self, x: Array, y: Array) -> Array:
        """X X^T in float32."""
        return gram(x, jnp.float32) if x.shape[-2] >= MIN_ROWS else outer(x, y)

    def gram(self, x: Array, k: float) -> Array:
        """The matrices k X X^T."""
        return gram(x, factor=k) if x.shape[-2] >= MIN_ROWS else super().gram(x, k)

    def add_square(self, a: Array, k: float) -> Array:
        """A + k A A, for symmetric A."""
        large = a.shape[-2] >= MIN_ROWS
        return quadratic(a, 1.0, k) if large else super().add_square(a, k)


def _symmetric_product(
    x: Array,
    dtype: jax.typing.DTypeLike,
    factors: tuple[Any, ...],
    tiling: kernel.Tiling,
) -> Array:
    """c X X^T with factors (c,), or c X X^T + b X with (c, b)."""
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x of dtype {x.dtype}; expected bfloat16")
    *batch, m, n = x.shape
    if x.size == 0:
        return jnp.zeros((*batch, m, m), dtype)
    _check_card()
    # Zeros up to whole squares.
    pads = [(0, 0), *((0, -size % kernel.SQUARE) for size in (m, n))]
    stack = jnp.pad(x.reshape(math.prod(batch), m, n), pads)
    result = jax.ShapeDtypeStruct((*stack.shape[:2], stack.shape[1]), dtype)
    # Factors are an operand, not constants of the kernel: all steps share one kernel.
    operand = jnp.stack([jnp.asarray(factor, jnp.float32) for factor in factors])
    product = kernel.symmetric_product(stack, operand, result, *tiling)
    return product[:, :m, :m].reshape(*batch, m, m)


def _check_card() -> None:
    """Refuse NVIDIA GPUs of other generations, which lack the kernels' instructions."""
    if jax.default_backend() != "gpu":
        return  # compiled for a GPU elsewhere, interpreted, or a branch not taken
    found = getattr(jax.devices()[0], "compute_capability", "")
    if re.fullmatch(r"\d+\.\d+", found) and found != "9.0":
        raise ValueError(
            f"a GPU of compute capability {found}; expected 9.0 (H100, H200), or "
            "symmetric='plain'"
        )
