"""The iteration: a quintic in X for each (a, b, c), which brings singular values to 1.

nanochat writes a step in three lines, for X (m, n) with m <= n, divided by its norm:

    A = X @ X.mT
    B = b * A + c * A @ A
    X = a * X + B @ X

The same polynomials are computed here. What differs, and what it is worth:

- The norm is read off the first A, which saves a pass over X, and makes the Schatten-4
  norm, the root of ||X X^T||_F, as cheap as Frobenius'. Where X or its squares would
  overflow, X is first multiplied by a power of two.
- The factors a wait until the end: what is held is X / s, where s is the product of the
  a so far. Each line then is a sum C + k X Y, one call of cuBLASLt: whatever else moves
  in a step of GPT-2 124M on an H100 shrinks from 20.0 to 6.5 GB (`products.py`).
- In bfloat16 the factors k are numbers that bfloat16 holds exactly (`exact_factors`).
- No A A where c = 0, as in cubics: two products a step instead of three.
- A CPU takes one matrix after another, and symmetric products by halves: 1.15 to 1.5
  times faster than a stack at once, and 0.87 of the time. A GPU takes parts of stacks.
- In float32, long matrices (n > 1.5 m) are iterated as their Gram matrices,

    R = X X^T;  B = R + c/b R R;  P = I + b/a B;  Q <- P Q;  R <- P R P

  and X <- Q X at the end: five steps take 8 m^2 n + 28 m^3 FLOPs instead of
  20 m^2 n + 10 m^3. R squares the condition number, so X is refreshed after three
  steps; in bfloat16 this form is useless.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_muon.base.dtypes import unit_of, wide, wider
from jax_muon.polar.coefficients import Table
from jax_muon.polar.products import FusedProducts, Products, exact_factors, matmul
from jax_muon.polar.teams import SharedProducts, Team

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

# Most bytes of matrices that an accelerator takes at a time, unless one has more. The
# parts of a stack are written over it, so that a whole step with bfloat16 parameters
# needs 7 bytes a parameter instead of 10. 8 bfloat16 matrices of 1024 x 4096 are 1,024
# tiles of 128 x 256, eight for each core of an H100.
_PART_BYTES = 2**26

_ON_CPU = Products()
_FUSED = FusedProducts()


def uses_gram(form: str, dtype: jnp.dtype, m: int, n: int) -> bool:
    """True if matrices (m, n), m <= n, take the Gram form."""
    if form == "auto":
        low_precision = jnp.finfo(dtype).bits < 32
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return form == "gram"


# Traced once for matrices of a shape, however many parameters and calls have it.
@functools.partial(jax.jit, static_argnames=("settings", "team"))
def iterate(x: Array, settings: Any, team: Team | None = None) -> Array:
    """Run the quintics: on a CPU one matrix at a time, elsewhere on parts of the stack.

    `settings` are a `NewtonSchulz`. A team takes the standard form.
    """
    rows, cols = x.shape[-2:]
    dtype, (m, n) = jnp.dtype(settings.dtype), sorted((rows, cols))
    by_gram = team is None and uses_gram(settings.form, dtype, m, n)
    form = _gram_form if by_gram else _standard_form
    if m == 1:
        # The only singular value of one row begins where the quintics are steepest: in
        # bfloat16 it ends 0.22 from where it should, whatever the row.
        dtype = wider(dtype, jnp.float32)
    turned = team is None and rows > cols

    def factor(y: Array, products: Products) -> Array:
        """Polar factors of wide matrices, m <= n."""
        if team is not None:
            products = SharedProducts(products, team)
        y, unit = _in_range(y, dtype, products)
        y, gram = _normalize(y, products.outer(y, y), settings, unit)
        return form(y, gram, settings.coefficients, products).astype(x.dtype)

    stack = x.reshape(-1, rows, cols)
    size = len(stack) if team else _part_size(stack)

    def in_parts(products: Products) -> Callable[[Array], Array]:
        def at_once(x: Array) -> Array:
            return factor(x.mT, products).mT if turned else factor(x, products)

        return functools.partial(_in_parts, at_once, size=size)

    on_cpu = functools.partial(factor, products=_ON_CPU)
    single = functools.partial(
        _single, on_cpu, turned=turned, squeeze=dtype != jnp.bfloat16
    )
    branches: dict[str, Callable[[Array], Array]] = {
        "cpu": functools.partial(_in_parts, single, size=1),
        "default": in_parts(_FUSED),
    }
    if settings.symmetric == "kernel" and dtype == jnp.bfloat16:
        from jax_muon.polar.hopper import HopperProducts

        branches["cuda"] = in_parts(HopperProducts())
    return jax.lax.platform_dependent(stack, **branches).reshape(x.shape)


def _part_size(stack: Array) -> int:
    """Number of matrices that an accelerator takes at a time: it divides the stack."""
    most = max(1, _PART_BYTES * len(stack) // stack.nbytes)
    sizes = range(1, min(most, len(stack)) + 1)
    return max(size for size in sizes if len(stack) % size == 0)


def _in_parts(function: Callable[[Array], Array], stack: Array, *, size: int) -> Array:
    """The function of `size` matrices at a time, written over its input."""
    if size == len(stack):
        return function(stack)

    def body(index: Array, stack: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(stack, index * size, size)
        part = function(part)
        return jax.lax.dynamic_update_slice_in_dim(stack, part, index * size, 0)

    return jax.lax.fori_loop(0, len(stack) // size, body, stack)


def _single(
    function: Callable[[Array], Array], part: Array, *, turned: bool, squeeze: bool
) -> Array:
    """The function of one matrix (1, rows, cols), or of its transpose, on a CPU.

    There a whole stack at once falls out of the cache, and batched products in bfloat16
    run at half the rate of single ones. With `squeeze` a matrix is (m, n) instead of
    (1, m, n): faster in float32 by a tenth to a fifth, and slower in bfloat16 by a
    third, where XLA multiplies (m, k) by (k, n) in float32 in places. It does the same
    with (1, n, m).mT, so a matrix is transposed before it gets its third axis, and a
    barrier keeps XLA from moving a transpose into products: in bfloat16 it cannot run
    X^T X ("Unsupported element type for DotThunk").
    """
    matrix = part[0].T if turned else part[0]
    y = matrix if squeeze else matrix[None]
    y = function(jax.lax.optimization_barrier(y) if turned or not squeeze else y)
    y = y.reshape(matrix.shape)
    return (y.T if turned else y)[None]


def _in_range(x: Array, dtype: jnp.dtype, products: Products) -> tuple[Array, Array]:
    """X in this dtype, times a power of two that keeps squares finite; that power."""
    most = jnp.finfo(dtype).maxexp
    if jnp.finfo(x.dtype).maxexp <= most:
        x = x.astype(dtype)
        unit = unit_of(products.largest(x))
        return x * unit, wide(unit)
    # 1e40 has a float64 and no float32.
    largest = products.largest(x)
    power = jnp.ldexp(jnp.ones_like(largest), -jnp.frexp(largest)[1])
    unit = jnp.where(largest > 2.0 ** (most * 3 // 8), power, jnp.ones_like(largest))
    return (x * unit).astype(dtype), unit.astype(wider(dtype, jnp.float32))


def _normalize(
    x: Array, gram: Array, settings: Any, unit: Array
) -> tuple[Array, Array]:
    """X / (factor * norm(X) + eps), for X in units of `unit`, and its Gram matrix."""
    squared = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    if settings.norm == "schatten4":
        # Fourth powers overflow, or vanish, where squares do not.
        part = gram / jnp.where(squared > 0, squared, 1)
        squared *= jnp.sqrt(jnp.sum(part * part, axis=(-2, -1), keepdims=True))
    scale = 1 / (settings.norm_factor * jnp.sqrt(squared) + settings.eps * unit)
    return (wide(x) * scale).astype(x.dtype), gram * scale * scale


def _standard_form(x: Array, gram: Array, table: Table, products: Products) -> Array:
    """The three lines, from X and its Gram matrix, which is wide, like the result."""
    scale = 1.0  # x is X / scale, so that a step need not multiply it
    used: set[float] = set()
    for step, (a, b, c) in enumerate(table):
        cubic, quintic = b / a * scale**2, c / a * scale**4
        g, p, q = exact_factors(cubic, quintic, x.dtype, used)
        used |= {g, p, q}
        gram = (g * gram).astype(x.dtype) if step == 0 else products.gram(x, g)
        polynomial = products.add_square(gram, q) if q else gram
        x = products.add_product(x, p, polynomial)
        scale *= a
        if not 1 / _MAX_SCALE <= abs(scale) <= _MAX_SCALE:
            x = (wide(x) * scale).astype(x.dtype)
            scale = 1.0
    return wide(x) * scale


def _gram_form(x: Array, gram: Array, table: Table, products: Products) -> Array:
    """The Gram form, from X and its Gram matrix. Q and R hold no factor a either."""
    # R, every polynomial of it and their products are symmetric and commute.
    eye = jnp.broadcast_to(jnp.eye(x.shape[-2], dtype=x.dtype), gram.shape)
    gram, factor, scale = gram.astype(x.dtype), eye, 1.0  # factor is Q / scale
    for step, (a, b, c) in enumerate(table):
        if step and step % REFRESH == 0:
            x = scale * matmul(factor, x, x.dtype)
            gram, factor, scale = products.gram(x, 1.0), eye, 1.0
        square = products.add_square(gram, c / b * scale**2) if c else gram
        polynomial = eye + b / a * scale**2 * square
        factor = polynomial if factor is eye else products.symmetric(factor, polynomial)
        if step + 1 < len(table) and (step + 1) % REFRESH:
            gram = products.symmetric(polynomial, gram)
            gram = products.symmetric(gram, polynomial)
        scale *= a
    return scale * matmul(factor, x)
