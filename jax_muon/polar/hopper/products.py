"""The products of an iteration with both symmetric ones by the kernels."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.polar.hopper.kernel import SQUARE, symmetric_product
from jax_muon.polar.products import Products, Quintic


class HopperProducts(Products):
    """R and P equal to their transposes bit by bit, summed in float32, rounded once.

    Matrices are bfloat16: tensor cores do not multiply float32 without rounding.
    """

    def gram(self, x: Array) -> Float[Array, "*batch m m"]:
        """X X^T, or of tall X X^T X."""
        return _by_kernel(x, tall=self.tall)

    def polynomial(self, r: Array, quintic: Quintic) -> Float[Array, "*batch m m"]:
        """a I + b R + c R R. Symmetry is not checked: the lower half of R R^T decides.

        The coefficients are an operand of the kernel, so that all steps share one.
        """
        each = (jnp.asarray(x, jnp.float32) for x in quintic)
        full = [jnp.broadcast_to(x, (*r.shape[:-2], 1, 1)).reshape(-1) for x in each]
        return _by_kernel(r, factors=jnp.stack(full, axis=-1))


def _by_kernel(
    x: Array, factors: Array | None = None, tall: bool = False
) -> Float[Array, "*batch m m"]:
    """The kernel's product, of a stack with zeros up to whole squares."""
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x of dtype {x.dtype}; expected bfloat16")
    *batch, rows, cols = x.shape
    m = cols if tall else rows
    if x.size == 0:
        return jnp.zeros((*batch, m, m), x.dtype)
    pads = [(0, 0), *((0, -size % SQUARE) for size in (rows, cols))]
    stack = jnp.pad(x.reshape(math.prod(batch), rows, cols), pads)
    product = symmetric_product(stack, factors, tall=tall)
    return product[:, :m, :m].reshape(*batch, m, m)
