"""The three products of a quintic: R = X X^T, P = a I + b R + c R R, and P X.

Of tall X they are R = X^T X and X P: nothing is transposed, and R is small.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.base.dtypes import small_unit, wide, wider

# The (a, b, q) of a I + b (R + q R R), where q = c / b: numbers, or arrays of one for
# each matrix (*batch, 1, 1).
Quintic = tuple[float | Array, float | Array, float | Array]


def matmul(x: Array, y: Array, dtype: Any = None) -> Float[Array, "*batch m n"]:
    """X Y summed in at least float32, in a dtype; None: not rounded below that."""
    return jnp.matmul(x, y, **_accumulation(x.dtype, dtype))


def outer(x: Array, y: Array, dtype: Any = None) -> Float[Array, "*batch m n"]:
    """X Y^T, as `matmul`. With `y.mT` instead of y a CPU would copy the transpose."""
    return jnp.einsum("...mk,...nk->...mn", x, y, **_accumulation(x.dtype, dtype))


def _accumulation(operands: jnp.dtype, dtype: Any) -> dict[str, Any]:
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


def outer_in_halves(x: Array, y: Array) -> Float[Array, "*batch m m"]:
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


def matrix_sum(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """Along rows, then of these: in one order, whatever the layout of X in memory.

    The barrier keeps XLA from making one sum of both. On a mesh and on one device every
    element would then be off by another factor near 1.
    """
    rows = jax.lax.optimization_barrier(jnp.sum(x, axis=-1, keepdims=True))
    return jnp.sum(rows, axis=-2, keepdims=True)


# Traced once for all leaves of a shape: 48 leaves (1, 768, 768) have their norms apart.
@functools.partial(jax.jit, static_argnums=1)
def squares(x: Float[Array, "*batch m n"], on_cpu: bool) -> Float[Array, "*batch 1 2"]:
    """The sums of squares of each X and of 2^-80 X.

    For a GPU it is one sum, of complex numbers: XLA computes that in the pass that
    makes X, but neither of two sums: 14 bytes an element instead of 22.
    """
    # Without the barrier XLA writes (x u)^2 of one element as x^2 u^2, infinity times
    # 0, and every derivative 2 (x u) u as x (2 u^2), which is 0.
    unit = jax.lax.optimization_barrier(jnp.asarray(small_unit(x.dtype), x.dtype))
    small = x * unit
    if on_cpu:
        both = matrix_sum(x * x), matrix_sum(small * small)
    else:
        total = jax.lax.complex(x * x, small * small)
        sums = jnp.sum(total, axis=(-2, -1), keepdims=True)
        both = sums.real, sums.imag
    return jnp.concatenate(both, axis=-1)


class Products:
    """The products as XLA computes them: sums in at least float32, rounded once.

    On a CPU, where rounding is a pass of its own, symmetric ones are computed by halves
    where that is faster. A GPU rounds within a product, so that only P takes a pass
    over memory.
    """

    def __init__(self, tall: bool = False, on_cpu: bool = False):
        """`tall` means that X is (n, m) with m <= n, else it is (m, n)."""
        self.tall, self.on_cpu = tall, on_cpu

    def squares(self, x: Float[Array, "*batch _ _"]) -> Float[Array, "*batch 1 2"]:
        """The sums of squares of each X and of 2^-80 X, for elements of up to 3e38."""
        return squares(x, self.on_cpu)

    def gram(self, x: Float[Array, "*batch _ _"]) -> Float[Array, "*batch m m"]:
        """X X^T, or X^T X: (768, 768) of (768, 3072), and of tall (3072, 768)."""
        y = x.mT if self.tall else x
        return self.symmetric(y, y)

    def polynomial(self, r: Array, quintic: Quintic) -> Float[Array, "*batch m m"]:
        """a I + b (R + q R R), for symmetric R: rounded once, to R's dtype."""
        a, b, q = quintic
        # Without R R in cubics, two products a step instead of three.
        is_cubic = isinstance(q, float) and q == 0
        square = wide(r) if is_cubic else self._outer(r, r)
        if not self.on_cpu:
            # Otherwise XLA writes R in float32, for cuBLAS to add: 12 bytes an element
            # of R outside of the product instead of 8.
            square = jax.lax.optimization_barrier(square)
        total = b * (wide(r) + q * square)
        # XLA would keep an array of a I for each step in memory.
        diagonal = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=bool), r.shape)
        return jnp.where(diagonal, total + a, total).astype(r.dtype)

    def product(self, p: Array, x: Array) -> Float[Array, "*batch _ _"]:
        """P X, or X P."""
        factors = (x, p) if self.tall else (p, x)
        dtype = None if self.on_cpu else x.dtype
        return matmul(*factors, dtype).astype(x.dtype)

    def symmetric(self, x: Array, y: Array) -> Float[Array, "*batch m m"]:
        """X Y^T where it is symmetric."""
        return self._outer(x, y, x.dtype).astype(x.dtype)

    def _outer(self, x: Array, y: Array, dtype: Any = None) -> Array:
        """`outer`, but not rounded on a CPU."""
        if not self.on_cpu:
            return outer(x, y, dtype)
        m, k = x.shape[-2:]
        by_amx = x.dtype == jnp.bfloat16 and has_amx()
        least = _HALVES_FROM_WITH_AMX if by_amx else _HALVES_FROM
        halves = m >= _HALVES_FROM and k >= least
        return outer_in_halves(x, y) if halves else outer(x, y)
