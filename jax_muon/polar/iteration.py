"""Quintics of matrices: X <- a X + b (X X^T) X + c (X X^T)^2 X, step after step.

In two forms with m <= n:

  standard: A = X X^T;  X <- X + (b/a A + c/a A A) X, and all a together at the end
  gram:     R = X X^T;  B = R + c/b R R;  P = I + b/a B;  Q <- P Q;  R <- P R P, and
            X <- Q X at the end. Cheaper for n > 1.5 m, less accurate: R squares the
            condition number, so X is refreshed after some steps.

Both leave all a for later: what is held is X / s, A / s^2 and Q / s, where s is the
product of the a so far. Neither computes A A, or R R, where c = 0. On a CPU matrices
are taken one after another, elsewhere a whole stack at once; what is computed is the
same. Settings arrive checked: `factors.py` does that.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_muon.dtypes import positive, wide, wider
from jax_muon.polar.coefficients import Coefficients
from jax_muon.polar.kernels import matmul
from jax_muon.polar.products import (
    FusedProducts,
    KernelProducts,
    Products,
    exact_factors,
    outer_on_cpu,
)

# FLOPs of five steps are 20 m^2 n + 10 m^3 (standard) and 8 m^2 n + 28 m^3 (Gram).
_GRAM_ASPECT = 1.5

# Below this m, products are too small for the Gram form to save time.
_GRAM_MIN_SIZE = 256


class _Limits(NamedTuple):
    """What the digits and the range of a dtype ask for.

    X is held as X / s, its Gram matrix A as g A / s^2 and A A as its square. s is the
    product of the a of all steps so far, 2^9 after five of the Polar Express and 2^13
    after eight.
    """

    refresh: int  # steps of the Gram form from one Gram matrix to the next
    first: float  # s at the beginning, and where it would not be in the bounds below
    least: float
    most: float
    gram: float | None  # g / s^2, up to a factor of two; None: g is from 1 to 2

    def unit(self, scale: float, ratio: float) -> float:
        """The power of two near which g is chosen where s is `scale`.

        Less where A A outweighs A in A + ratio A A, the next factor of a product.
        """
        if self.gram is None:
            return 1.0
        return 2.0 ** math.floor(math.log2(self.gram / max(1, ratio) * scale**2))


# Without a refresh singular values reach 4 on inputs of condition 1e10, in float32;
# with one after step 3 the error stays below 5e-5. The range ends at 2^126.
_WIDE = _Limits(refresh=3, first=1.0, least=2.0**-20, most=2.0**20, gram=None)

# Two refreshes make the Gram form as accurate as the standard one. float16 goes from
# 2^-14, below which it loses digits, to 2^16. With these powers of two nothing leaves
# it above, also where a product is rounded before it meets its factor, for singular
# values up to 1.2 on their way. Below, elements of X begin at 1 / sqrt(m n) where they
# are alike, those of A beside its diagonal at 1 / (m sqrt(n)): both are held with all
# digits at the beginning up to m = n = 8192, and what is lost later is small beside
# what it is added to.
_HALF = _Limits(refresh=2, first=2.0**-7, least=2.0**-7, most=2.0**3, gram=2.0**5)


def _limits(dtype: jnp.dtype) -> _Limits:
    return _HALF if dtype == jnp.float16 else _WIDE


def dtype_of(dtype: jnp.dtype, m: int) -> jnp.dtype:
    """The dtype in which matrices of m rows, m <= n, are computed where one is asked.

    The only singular value of one row begins where the quintics are steepest: in
    bfloat16 it ends 0.22 from where it should, whatever the row.
    """
    return wider(dtype, jnp.float32) if m == 1 else dtype


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
    dtype = dtype_of(dtype, m)
    first = _limits(dtype).first
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
        y = (y / first).astype(dtype)
        gram = summed(products.outer(y, y))
        y, gram = _normalize(y, gram, unit, settings.norm, norm_factor, eps, first)
        y = body(y, gram, settings.coefficients, products, gram_of)
        return y.astype(x.dtype)

    def at_once(x: Array, products: Products) -> Array:
        return factor(x.mT, products).mT if turned else factor(x, products)

    on_cpu = functools.partial(factor, products=_ON_CPU)
    branches = {
        "cpu": functools.partial(
            _one_after_another, on_cpu, turned=turned, squeeze=dtype != jnp.bfloat16
        ),
        "default": functools.partial(at_once, products=_FUSED),
    }
    if settings.symmetric == "kernel" and jnp.finfo(dtype).bits == 16:
        branches["cuda"] = functools.partial(at_once, products=_KERNELS)
    y = jax.lax.platform_dependent(x.reshape(-1, rows, cols), **branches)
    return y.reshape(*batch, rows, cols)


def uses_gram(form: str, dtype: jnp.dtype, m: int, n: int) -> bool:
    """Whether matrices (m, n), m <= n, take the Gram form."""
    if form == "auto":
        low_precision = jnp.finfo(dtype).bits < 32
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return form == "gram"


def refreshes(coefficients: Sequence[Coefficients], dtype: jnp.dtype) -> list[int]:
    """The steps at which the Gram form computes X X^T, the first among them."""
    limits = _limits(dtype)
    steps, scale = [0], limits.first
    for step, (a, _, _) in enumerate(coefficients[:-1], start=1):
        scale *= a
        inside = limits.least <= abs(scale) <= limits.most
        if step == steps[-1] + limits.refresh or not inside:
            steps.append(step)
            scale = limits.first
    return steps


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
    x: Array,
    gram: Array,
    unit: Array,
    norm: str,
    norm_factor: float,
    eps: float,
    first: float,
) -> tuple[Array, Array]:
    """X / (norm_factor * first * norm(X) + eps unit), and its Gram matrix X X^T.

    Both norms are read off the Gram matrix of the first step, which is computed anyway:
    ||X||_F^2 is its trace, and the Schatten-4 norm to the fourth is ||X X^T||_F^2.
    """
    if norm == "frobenius":
        squared = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    else:
        squared = jnp.sqrt(jnp.sum(gram * gram, axis=(-2, -1), keepdims=True))
    floor = positive(eps, gram.dtype) * unit.astype(gram.dtype)
    scale = 1 / (norm_factor * first * jnp.sqrt(squared) + floor)
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
    limits = _limits(x.dtype)
    scale = limits.first  # x is X / scale, so that a step need not multiply it
    used: set[float] = set()
    for step, (a, b, c) in enumerate(coefficients):
        cubic, quintic = b / a * scale**2, c / a * scale**4
        unit = limits.unit(scale, abs(c / b))
        g, p, q = exact_factors(cubic, quintic, x.dtype, unit, used)
        used |= {g, p, q}
        gram = (g * gram).astype(x.dtype) if step == 0 else gram_of(x, g)
        polynomial = products.add_square(gram, q) if q else gram
        x = products.add_product(x, p, polynomial)
        scale *= a
        if not limits.least <= abs(scale) <= limits.most:
            x = (wide(x) * (scale / limits.first)).astype(x.dtype)
            scale = limits.first
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
    limits = _limits(x.dtype)
    first = scale = limits.first  # x is X / first
    factor = eye = jnp.eye(x.shape[-2], dtype=x.dtype)  # Q first / scale
    used: set[float] = set()
    ends = [*refreshes(coefficients, x.dtype), len(coefficients)]
    for begin, end in itertools.pairwise(ends):
        a, b, c = coefficients[begin]
        cubic, quintic = b / a * first**2, c / a * first**4
        unit = limits.unit(
            first, max(abs(c / b) for _, b, c in coefficients[begin:end])
        )
        g, p, q = exact_factors(cubic, quintic, x.dtype, unit, used)
        used |= {g, p, q}
        if begin == 0:
            gram = (g * gram).astype(x.dtype)
        else:
            x = (scale / first) * matmul(factor, x, x.dtype)
            gram = gram_of(x, g)
        factor, scale = eye, first
        for step in range(begin, end):
            a, b, c = coefficients[step]
            square = products.add_square(gram, c / b * scale**2 / g) if c else gram
            p = b / a * scale**2 / g
            polynomial = (wide(eye) + p * wide(square)).astype(x.dtype)
            if factor is eye:
                factor = polynomial
            else:
                factor = products.symmetric(factor, polynomial)
            if step + 1 < end:
                gram = products.symmetric(polynomial, gram)
                gram = products.symmetric(gram, polynomial)
            scale *= a
    return scale * matmul(factor, x)


_ON_CPU = Products(outer_on_cpu)
_FUSED = FusedProducts()
_KERNELS = KernelProducts()
