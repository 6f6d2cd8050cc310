"""The matrix products of an iteration, in the form C + k X Y.

A quintic a X + (b A + c A A) X with A = X X^T takes three of them,

  A <- g X X^T;  B <- A + q A A;  X <- X + p B X,

and its factor a, which waits until the end of all steps.
"""

import functools
import pathlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_muon.base.dtypes import wide, wider


def matmul(
    x: Float[Array, "*batch m k"],
    y: Float[Array, "*batch k n"],
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """X Y summed in at least float32, in a dtype; None: not rounded below that."""
    return jnp.matmul(x, y, **_accumulation(x.dtype, dtype))


def outer(
    x: Float[Array, "*batch m k"],
    y: Float[Array, "*batch n k"],
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """X Y^T, as `matmul`. With `y.mT` instead of y a CPU would copy the transpose."""
    return jnp.einsum("...mk,...nk->...mn", x, y, **_accumulation(x.dtype, dtype))


def _accumulation(
    operands: jnp.dtype, dtype: jax.typing.DTypeLike | None
) -> dict[str, Any]:
    wide_dtype = wider(operands, jnp.float32)
    return {
        # HIGHEST: on a GPU, float32 would otherwise run through TF32 with 10 bits.
        "precision": jax.lax.Precision.HIGHEST if operands == wide_dtype else None,
        "preferred_element_type": wide_dtype if dtype is None else dtype,
    }


# Symmetric products are computed by halves from this size up; below it the overhead of
# smaller products outweighs the saving.
_HALVES_FROM = 384

# Joining the halves takes 0.75 ns an element on a Xeon with AMX, whatever the number of
# columns k, and halves save k / 2 operations an element. At its 1025 GFLOP/s both are
# equal at k = 1540. Five steps take 3.69 ms instead of 2.92 for (384, 384), but 35.7
# instead of 39.6 for (768, 3072).
_HALVES_FROM_WITH_AMX = 2048


@functools.cache
def has_amx() -> bool:
    """True if the processor that traces multiplies bfloat16 in tiles (AMX)."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")  # of Linux
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text().split()


def outer_in_halves(
    x: Float[Array, "*batch m k"], y: Float[Array, "*batch m k"]
) -> Float[Array, "*batch m m"]:
    """`outer` where it is symmetric, by three quarters of the work, for a CPU.

    Of [[A, B^T], [B, C]] it computes A, B and C. Five steps of (768, 768) take 0.87 of
    the time in float32 on a Zen 4. Quarters would take seconds more to compile.
    """
    half = x.shape[-2] // 2
    (x0, x1), (y0, y1) = (jnp.split(z, [half], axis=-2) for z in (x, y))
    below = outer(x1, y0)
    top = jnp.concatenate([outer(x0, y0), below.mT], axis=-1)
    bottom = jnp.concatenate([below, outer(x1, y1)], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


class Products:
    """Sums written out in at least float32, then rounded once: for a CPU."""

    def outer(self, x: Array, y: Array) -> Array:
        """X Y^T where it is symmetric, by halves where that is faster."""
        m, k = x.shape[-2:]
        by_amx = x.dtype == jnp.bfloat16 and has_amx()
        least = _HALVES_FROM_WITH_AMX if by_amx else _HALVES_FROM
        halves = m >= _HALVES_FROM and k >= least
        return outer_in_halves(x, y) if halves else outer(x, y)

    def largest(self, x: Array) -> Float[Array, "*batch 1 1"]:
        """The largest absolute value in each matrix."""
        return jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)

    def gram(self, x: Array, k: float) -> Array:
        """The matrices k X X^T."""
        return (k * self.outer(x, x)).astype(x.dtype)

    def add_square(self, a: Array, k: float) -> Array:
        """A + k A A, for symmetric A."""
        return (wide(a) + k * self.outer(a, a)).astype(a.dtype)

    def add_product(self, x: Array, k: float, b: Array) -> Array:
        """X + k B X."""
        return (wide(x) + k * matmul(b, x)).astype(x.dtype)

    def symmetric(self, x: Array, y: Array) -> Array:
        """X Y, for symmetric matrices that commute."""
        return self.outer(x, y).astype(x.dtype)


class FusedProducts(Products):
    """Sums in the form that XLA hands to cuBLASLt whole, with k and C as operands.

    They are written as sums in the dtype of C; cuBLASLt rounds only the result. Where
    XLA does not call it every term is rounded, as in plain bfloat16 code: 0.04
    instead of 0.016 from the exact result on a Gaussian (64, 256). Sums written out in
    float32 would cost more than the products do (benchmarks/NOTES.md).
    """

    def outer(self, x: Array, y: Array) -> Array:
        """X Y^T in at least float32."""
        return outer(x, y)

    def gram(self, x: Array, k: float) -> Array:
        """The matrices k X X^T."""
        return k * outer(x, x, x.dtype)

    def add_square(self, a: Array, k: float) -> Array:
        """A + k A A, for symmetric A."""
        return a + k * matmul(a, a, a.dtype)

    def add_product(self, x: Array, k: float, b: Array) -> Array:
        """X + k B X."""
        return x + k * matmul(b, x, x.dtype)


def exact_factors(
    cubic: float, quintic: float, dtype: jnp.dtype, used: Collection[float] = ()
) -> tuple[float, float, float]:
    """The g, p, q for X + cubic A X + quintic A A X, all of them numbers of a dtype.

    With A' = g A this is X + p (A' + q A' A') X, where p g = cubic and
    p q g^2 = quintic. In float32 g is 1. In bfloat16 rounding p and q would change the
    polynomial by up to 2^-8 of each term; of the 128 values that g has in [1, 2), the
    best one leaves 2^-12.5 on average, less than the rounding of the matrices. Numbers
    `used` in other steps are avoided: XLA hands a factor to cuBLASLt only where no
    other sum has the same.
    """
    ratio = quintic / cubic
    if jnp.finfo(dtype).bits >= 32:
        return 1.0, cubic, ratio
    g = np.arange(1, 2, float(jnp.finfo(dtype).eps))
    p, q = ((value / g).astype(dtype).astype(float) for value in (cubic, ratio))
    error = np.maximum(abs(p * g / cubic - 1), abs(q * g - ratio) / abs(ratio or 1))
    taken = np.isin([g, p, q], [x for x in used if x]).any(axis=0)
    best = int(np.argmin(np.where(taken & ~taken.all(), np.inf, error)))
    return float(g[best]), float(p[best]), float(q[best])
