"""Quintics of matrices: X <- a X + b (X X^T) X + c (X X^T)^2 X, step after step.

In two forms with m <= n:

  standard: A = X X^T;  X <- X + (b/a A + c/a A A) X, and all a together at the end
  gram:     R = X X^T;  Z = b R + c R R;  Q <- a Q + Q Z;  R <- (aI + Z) R (aI + Z),
            and X <- Q X at the end. Cheaper for n > 1.5 m, less accurate: R squares the
            condition number, so X is refreshed once in three steps.

Neither form computes A A, or R R, where c = 0. On a CPU matrices are taken one after
another, elsewhere a whole stack at once; what is computed is the same. Settings
arrive checked: `factors.py` does that.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_muon.polar.coefficients import Coefficients
from jax_muon.polar.kernels import matmul, wider
from jax_muon.polar.products import (
    FusedProducts,
    KernelProducts,
    Products,
    exact_factors,
    outer_on_cpu,
    wide,
)

# Steps of the Gram form between two refreshes of X. Without a refresh singular values
# reach 4 on inputs of condition 1e10, in float32; with one after step 3 the error stays
# below 5e-5.
GRAM_REFRESH = 3

# FLOPs of five steps are 20 m^2 n + 10 m^3 (standard) and 8 m^2 n + 28 m^3 (Gram).
_GRAM_ASPECT = 1.5

# Below this m, products are too small for the Gram form to save time.
_GRAM_MIN_SIZE = 256

# X is held as X / s, its Gram matrix A as A / s^2 and A A as A A / s^4: with more than
# this s, or less than its inverse, they would leave the range of float32 (2^126). s is
# the product of the a of all steps so far, 2^13 after eight of the Polar Express.
_MAX_SCALE = 2.0**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is known of an iteration while it is traced; see `factors.PolarExpress`."""

    coefficients: tuple[Coefficients, ...]
    norm: str
    dtype: jnp.dtype
    form: str
    symmetric: str
    axis_name: tuple[str, ...] | None = None


# Traced once for matrices of a shape, however many parameters and calls have it.
@functools.partial(jax.jit, static_argnames="settings")
def iterate(x: Array, norm_factor: Any, eps: Any, settings: Settings) -> Array:
    """Run the quintics on a batch, in the order that suits the platform."""
    dtype, axis_name = settings.dtype, settings.axis_name
    *batch, rows, cols = x.shape
    if axis_name is None:
        m, n = sorted((rows, cols))
    else:
        m, n = rows, cols * jax.lax.axis_size(axis_name)
    turned = axis_name is None and rows > cols
    if m == 1:
        # The only singular value of one row begins where the quintics are steepest:
        # in bfloat16 it ends 0.22 from where it should, whatever the row.
        dtype = wider(dtype, jnp.float32)
    low_precision = dtype == jnp.bfloat16
    body = _gram_form if uses_gram(settings.form, dtype, m, n) else _standard_form

    def factor(y: Array, products: Products) -> Array:
        """Polar factors of wide matrices, m <= n."""

        def summed(gram: Array) -> Array:
            return gram if axis_name is None else jax.lax.psum(gram, axis_name)

        def gram_of(y: Array, k: float) -> Array:
            if axis_name is None:
                return products.gram(y, k)
            return (k * summed(products.outer(y, y))).astype(y.dtype)

        y, unit = power_of_two_scaled(y, axis_name=axis_name)
        y = y.astype(dtype)
        gram = summed(products.outer(y, y))
        y, gram = _normalize(y, gram, unit, settings.norm, norm_factor, eps)
        y = body(y, gram, settings.coefficients, products, gram_of)
        return y.astype(x.dtype)

    def at_once(x: Array, products: Products) -> Array:
        return factor(x.mT, products).mT if turned else factor(x, products)

    on_cpu = functools.partial(factor, products=_ON_CPU)
    branches = {
        "cpu": functools.partial(
            _one_after_another, on_cpu, turned=turned, squeeze=not low_precision
        ),
        "default": functools.partial(at_once, products=_FUSED),
    }
    if settings.symmetric == "kernel" and low_precision:
        branches["cuda"] = functools.partial(at_once, products=_KERNELS)
    y = jax.lax.platform_dependent(x.reshape(-1, rows, cols), **branches)
    return y.reshape(*batch, rows, cols)


def uses_gram(form: str, dtype: jnp.dtype, m: int, n: int) -> bool:
    """Whether matrices (m, n), m <= n, take the Gram form."""
    if form == "auto":
        low_precision = jnp.finfo(dtype).bits < 32
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return form == "gram"


def _one_after_another(
    function: Callable[[Array], Array], x: Array, *, turned: bool, squeeze: bool
) -> Array:
    """The function of each matrix in turn, or its transpose, written over its input.

    On a CPU a whole stack at once falls out of the cache, and batched products in
    bfloat16 run at half the rate of single ones. With `squeeze` a matrix is (m, n)
    instead of (1, m, n): faster in float32 by a tenth to a fifth. In bfloat16 it is the
    other way round, by a third: there XLA multiplies (m, k) by (k, n) in float32 in
    places. It does the same with (1, n, m).mT, so a matrix is transposed before it gets
    its third axis, and a barrier keeps XLA from moving the transpose into products. In
    bfloat16 a transpose further outside is kept out of them, too: XLA cannot run X^T X
    ("Unsupported element type for DotThunk").
    """
    barrier = turned or not squeeze

    def body(index: Array, x: Array) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        matrix = matrix.T if turned else matrix
        y = matrix if squeeze else matrix.reshape(1, *matrix.shape)
        y = function(jax.lax.optimization_barrier(y) if barrier else y)
        y = y.reshape(matrix.shape)
        return jax.lax.dynamic_update_index_in_dim(x, y.T if turned else y, index, 0)

    return jax.lax.fori_loop(0, len(x), body, x)


def _normalize(
    x: Array, gram: Array, unit: Array, norm: str, norm_factor: float, eps: float
) -> tuple[Array, Array]:
    """X / (norm_factor * norm(X) + eps unit), and its Gram matrix X X^T.

    Both norms are read off the Gram matrix of the first step, which is computed anyway:
    ||X||_F^2 is its trace, and the Schatten-4 norm to the fourth is ||X X^T||_F^2.
    """
    if norm == "frobenius":
        squared = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    else:
        squared = jnp.sqrt(jnp.sum(gram * gram, axis=(-2, -1), keepdims=True))
    scale = 1 / (norm_factor * jnp.sqrt(squared) + eps * unit.astype(gram.dtype))
    return (wide(x) * scale).astype(x.dtype), gram * scale * scale


def power_of_two_scaled(
    x: Array,
    axes: tuple[int, ...] = (-2, -1),
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """X with its largest element in [0.5, 1) by an exact factor, and that factor.

    Squares of elements near the ends of the exponent range (1e30, 1e-30 in float32)
    then neither overflow nor vanish. `axes` are those of one matrix, which is divided
    over the mesh axes of `axis_name`.
    """
    x = wide(x)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    _, exponent = jnp.frexp(largest)
    limit = jnp.finfo(x.dtype).maxexp - 2
    unit = jnp.ldexp(jnp.ones_like(largest), -jnp.clip(exponent, -limit, limit))
    return x * unit, unit


def _standard_form(
    x: Array,
    gram: Array,
    coefficients: Sequence[Coefficients],
    products: Products,
    gram_of: Callable[[Array, float], Array],
) -> Array:
    """The standard form, from X and its Gram matrix.

    The Gram matrix is in at least float32, and so is the result.
    """
    scale = 1.0  # x is X / scale, so that a step need not multiply it
    for step, (a, b, c) in enumerate(coefficients):
        g, p, q = exact_factors(b / a * scale**2, c / a * scale**4, x.dtype)
        first = step == 0
        gram = (g * gram).astype(x.dtype) if first else gram_of(x, g)
        polynomial = products.add_square(gram, q) if q else gram
        x = products.add_product(x, p, polynomial)
        scale *= a
        if not 1 / _MAX_SCALE <= abs(scale) <= _MAX_SCALE:
            x, scale = (wide(x) * scale).astype(x.dtype), 1.0
    return wide(x) * scale


def _gram_form(
    x: Array,
    gram: Array,
    coefficients: Sequence[Coefficients],
    products: Products,
    gram_of: Callable[[Array, float], Array],
) -> Array:
    """The Gram form, from X and its Gram matrix."""
    # R, every polynomial of it and their products are symmetric and commute.
    eye = jnp.eye(x.shape[-2], dtype=x.dtype)
    factor = eye  # Q, where X now is Q X
    for step, (a, b, c) in enumerate(coefficients):
        if step > 0 and step % GRAM_REFRESH == 0:
            x, factor = matmul(factor, x), eye
            gram = gram_of(x, 1.0)
        square = products.add_square(gram, c / b) if c else gram
        polynomial = a * eye + b * square
        factor = polynomial if factor is eye else products.outer(factor, polynomial)
        last = step == len(coefficients) - 1 or (step + 1) % GRAM_REFRESH == 0
        if not last:
            gram = products.outer(products.outer(polynomial, gram), polynomial)
    return matmul(factor, x)


_ON_CPU = Products(outer_on_cpu)
_FUSED = FusedProducts()
_KERNELS = KernelProducts()
