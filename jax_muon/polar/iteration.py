"""The iteration: a quintic in X for each (a, b, c), which brings singular values to 1.

nanochat writes a step in three lines, for X (m, n) with m <= n, divided by its norm:

    A = X @ X.mT
    B = b * A + c * A @ A
    X = a * X + B @ X

The same polynomials are computed here. What differs, and what it is worth:

- The norm is read off the first A, which saves a pass over X, and makes the Schatten-4
  norm, the root of ||X X^T||_F, as cheap as Frobenius'. Where squares of X overflow, X
  is first multiplied by a power of two. Looking for its largest element moves 0.3 of
  16.6 GB in a step of GPT-2 124M with bfloat16 parameters, none with float32.
- The factors a wait until the end: what is held is X / s, where s is the product of the
  a so far. Each line then is a sum C + k X Y, one call of cuBLASLt: whatever else moves
  in a step of GPT-2 124M on an H100 shrinks from 20.0 to 6.5 GB (`products.py`).
- In bfloat16 the factors k are numbers that bfloat16 holds exactly (`exact_factors`).
- No A A where c = 0, as in cubics: two products a step instead of three.
- A CPU takes one matrix after another, and symmetric products by halves: 1.15 to 1.5
  times faster than a stack at once, and 0.87 of the time. A GPU takes whole stacks.
- In float32, long matrices (n > 1.5 m) are iterated as their Gram matrices,

    R = X X^T;  B = R + c/b R R;  P = I + b/a B;  Q <- P Q;  R <- P R P

  and X <- Q X at the end: five steps take 8 m^2 n + 28 m^3 FLOPs instead of
  20 m^2 n + 10 m^3. R squares the condition number, so X is refreshed after three
  steps; in bfloat16 this form is useless.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_muon.dtypes import unit_of, wide, wider
from jax_muon.polar.coefficients import Table
from jax_muon.polar.grouped import Group, SharedProducts
from jax_muon.polar.products import FusedProducts, Products, exact_factors, matmul

if TYPE_CHECKING:
    from jax_muon.polar.factors import NewtonSchulz

# Steps of the Gram form from one Gram matrix of X to the next. Without a refresh
# singular values reach 4 on inputs of condition 1e10, in float32; with one after step 3
# the error stays below 5e-5.
REFRESH = 3

# The Gram form from this n / m and this m up; smaller products do not save time.
_GRAM_ASPECT = 1.5
_GRAM_MIN_SIZE = 256

# s stays between 1 / this and this, so that its fourth power has a float32. It is 2^9
# after five steps of the Polar Express, and 2^13 after eight.
_MAX_SCALE = 2.0**20

_ON_CPU = Products()
_FUSED = FusedProducts()


def uses_gram(form: str, dtype: jnp.dtype, m: int, n: int) -> bool:
    """True if matrices (m, n), m <= n, take the Gram form."""
    if form == "auto":
        low_precision = jnp.finfo(dtype).bits < 32
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return form == "gram"


# Traced once for matrices of a shape, however many parameters and calls have it.
@functools.partial(jax.jit, static_argnames=("polar", "dtype", "group"))
def iterate(
    x: Array, polar: "NewtonSchulz", dtype: jnp.dtype, group: Group | None = None
) -> Array:
    """Run the quintics on a batch, in the order that suits the platform.

    Devices of a group each have columns of wide matrices, and take the standard form.
    """
    rows, cols = x.shape[-2:]
    m, n = sorted((rows, cols))
    if m == 1:
        # The only singular value of one row begins where the quintics are steepest: in
        # bfloat16 it ends 0.22 from where it should, whatever the row.
        dtype = wider(dtype, jnp.float32)
    turned = group is None and rows > cols
    by_gram = group is None and uses_gram(polar.form, dtype, m, n)
    form = _gram_form if by_gram else _standard_form
    table = cast(Table, polar.coefficients)  # of any settings, after `__post_init__`

    def factor(y: Array, products: Products) -> Array:
        """Polar factors of wide matrices, m <= n."""
        if group is not None:
            products = SharedProducts(products, group)
        y = y.astype(dtype)
        unit = unit_of(products.largest(y))
        y = y * unit
        y, gram = _normalize(y, products.outer(y, y), polar, wide(unit))
        return form(y, gram, table, products).astype(x.dtype)

    def at_once(x: Array, products: Products) -> Array:
        return factor(x.mT, products).mT if turned else factor(x, products)

    on_cpu = functools.partial(factor, products=_ON_CPU)
    branches = {
        "cpu": functools.partial(
            _one_after_another, on_cpu, turned=turned, squeeze=dtype != jnp.bfloat16
        ),
        "default": functools.partial(at_once, products=_FUSED),
    }
    if polar.symmetric == "kernel" and dtype == jnp.bfloat16:
        from jax_muon.polar.hopper import HopperProducts

        branches["cuda"] = functools.partial(at_once, products=HopperProducts())
    y = jax.lax.platform_dependent(x.reshape(-1, rows, cols), **branches)
    return y.reshape(x.shape)


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
    x: Array, gram: Array, polar: "NewtonSchulz", unit: Array
) -> tuple[Array, Array]:
    """X / (norm_factor * norm(X) + eps), for X in units of `unit`, and its Gram matrix.

    ||X||_F^2 is the trace of X X^T, and the Schatten-4 norm to the fourth is
    ||X X^T||_F^2.
    """
    squared = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    if polar.norm == "schatten4":
        # Fourth powers overflow, or vanish, where squares do not.
        part = gram / jnp.where(squared > 0, squared, 1)
        squared *= jnp.sqrt(jnp.sum(part * part, axis=(-2, -1), keepdims=True))
    scale = 1 / (polar.norm_factor * jnp.sqrt(squared) + polar.eps * unit)
    return (wide(x) * scale).astype(x.dtype), gram * scale * scale


def _standard_form(x: Array, gram: Array, table: Table, products: Products) -> Array:
    """The three lines, from X and its Gram matrix in at least float32, like the result.

    The order of factors and roundings is chosen: each product is one C + k X Y.
    """
    scale = 1.0  # x is X / scale, so that a step need not multiply it
    used: set[float] = set()
    for step, (a, b, c) in enumerate(table):
        first = a or b  # of the terms X, A X, A A X that a step has
        cubic, quintic = b / first * scale**2, c / first * scale**4
        g, p, q = exact_factors(cubic, quintic, x.dtype, used)
        used |= {g, p, q}
        gram = (g * gram).astype(x.dtype) if step == 0 else products.gram(x, g)
        polynomial = products.add_square(gram, q) if q else gram
        if a:
            x = products.add_product(x, p, polynomial)
        else:
            x = products.product(p, polynomial, x)
        scale *= first
        if not 1 / _MAX_SCALE <= abs(scale) <= _MAX_SCALE:
            x = (wide(x) * scale).astype(x.dtype)
            scale = 1.0
    return wide(x) * scale


def _gram_form(x: Array, gram: Array, table: Table, products: Products) -> Array:
    """The Gram form, from X and its Gram matrix. Q and R hold no factor a either."""
    # R, every polynomial of it and their products are symmetric and commute.
    eye = jnp.eye(x.shape[-2], dtype=x.dtype)
    gram, factor, scale = gram.astype(x.dtype), eye, 1.0  # factor is Q / scale
    for step, (a, b, c) in enumerate(table):
        if step and step % REFRESH == 0:
            x = scale * matmul(factor, x, x.dtype)
            gram, factor, scale = products.gram(x, 1.0), eye, 1.0
        square = products.add_square(gram, c / b * scale**2) if c else gram
        first = a or b
        polynomial = b / first * scale**2 * square
        polynomial = eye + polynomial if a else polynomial
        factor = polynomial if factor is eye else products.symmetric(factor, polynomial)
        if step + 1 < len(table) and (step + 1) % REFRESH:
            gram = products.symmetric(polynomial, gram)
            gram = products.symmetric(gram, polynomial)
        scale *= first
    return scale * matmul(factor, x)
