"""The two symmetric products of an iteration, one function for each."""

import math
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
    """The matrices k X X^T for a factor k, equal to their transposes bit by bit.

    They are summed in float32 and rounded once to `dtype`, bfloat16 or float32. X is
    bfloat16: tensor cores do not multiply float32 without rounding.
    """
    return _symmetric_product(x, dtype, (factor,), tiling)


def quadratic(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    *,
    tiling: kernel.Tiling = kernel.TILING,
) -> Float[Array, "*batch m m"]:
    """The matrices b A + c A A for symmetric A, summed and rounded as in `gram`.

    Symmetry is not checked: the lower triangle of A A^T decides.
    """
    if a.shape[-2] != a.shape[-1]:
        raise ValueError(f"a of shape {a.shape}; expected square matrices (..., m, m)")
    return _symmetric_product(a, a.dtype, (c, b), tiling)


class HopperProducts(FusedProducts):
    """Symmetric products of large matrices by the kernels."""

    def outer(self, x: Array, y: Array) -> Array:
        """X Y^T in float32."""
        large = y is x and x.shape[-2] >= MIN_ROWS
        return gram(x, jnp.float32) if large else outer(x, y)

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
    # Without a GPU it is compiled for another machine, interpreted, or not called.
    capability = getattr(jax.devices()[0], "compute_capability", "")
    nvidia = jax.default_backend() == "gpu" and capability[:1].isdigit()
    if nvidia and capability != "9.0":
        raise ValueError(
            f"a GPU of compute capability {capability}; expected 9.0 (H100, H200), or "
            "symmetric='plain'"
        )
