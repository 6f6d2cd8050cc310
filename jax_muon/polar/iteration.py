"""The iteration: a quintic in X for each (a, b, c), which brings singular values to 1.

nanochat writes a step in three lines, for X (m, n) with m <= n, divided by its norm:

    A = X @ X.mT
    B = b * A + c * A @ A
    X = a * X + B @ X

Here it takes two,

    R = X X^T;  X <- P X  where  P = a I + b R + c R R,

and P is summed in at least float32 and rounded once. In float32 the term a X stays out
of the product, a X + (P - a I) X. Other differences, and what they gain:

- The norm is one sum, which XLA computes in the pass that makes X from momentum and
  gradient: a step of GPT-2 124M on an H100 then moves 4.7 GB outside of products. With
  two sums or a separate pass it moves 6 to 9.
- Tall X (n, m) stays tall, R = X^T X and X <- X P: nothing is transposed.
- No R R where c = 0, as in cubics: two products a step instead of three.
- A CPU takes one matrix after another, and symmetric products by halves: 1.15 to 1.5
  times faster than a stack at once, and 0.87 of the time. A GPU takes parts of stacks.
- In float32, long matrices (n > 1.5 m) are iterated as their Gram matrices,

    R = X X^T;  P = a I + b R + c R R;  Q <- P Q;  R <- P R P

  and X <- Q X at the end: five steps take 8 m^2 n + 28 m^3 FLOPs instead of
  20 m^2 n + 10 m^3. R squares the condition number, so X is refreshed after three
  steps; in bfloat16 this form is useless.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.base.dtypes import padded, small_unit, wide, wider
from jax_muon.polar.coefficients import factored
from jax_muon.polar.products import Products, Quintic, matrix_sum

# Steps of the Gram form from one Gram matrix of X to the next. Without a refresh
# singular values reach 4 on inputs of condition 1e10, in float32; with one after step 3
# the error stays below 5e-5.
REFRESH = 3

# The Gram form from this n / m and this m up; smaller products do not save time.
_GRAM_ASPECT = 1.5
_GRAM_MIN_SIZE = 256

# Most bytes of matrices, in the dtype of the iteration, that an accelerator takes at a
# time, unless one has more. Parts bound the temporaries, but each is read from its
# stack and written back. The stacks of GPT 1.3B, (24, 2048, 8192), have 0.8 GB: in
# parts of 256 MiB its step copies 3.2 GB more, and takes 84.8 ms, not 83.2, on an H200.
_PART_BYTES = 2**30


class Late(NamedTuple):
    """Numbers known at run time alone, as `optax.inject_hyperparams` makes them."""

    quintic: Array | None = None  # (a, b, c) of every step
    steps: Array | None = None  # how often the last quintic is taken, at least once
    eps: Array | None = None


def uses_gram(settings: Any, m: int, n: int) -> bool:
    """True if matrices (m, n), m <= n, take the Gram form by a `NewtonSchulz`."""
    if settings.form == "auto":
        low_precision = settings.dtype == "bfloat16"
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return settings.form == "gram"


# Traced once for matrices of a shape, however many parameters and calls have it.
@functools.partial(jax.jit, static_argnames=("settings", "kernels"))
def iterate(
    stacks: Sequence[Array], settings: Any, kernels: bool, late: Late | None = None
) -> Float[Array, "k rows cols"]:
    """The polar factors of several stacks, as one stack of all of them in order.

    Args:
      stacks: matrices (_, rows, cols) of one shape and dtype, such as 48 leaves
        (1, 768, 768). Norms are taken before they are joined: XLA computes the norm of
        a leaf in the pass that makes it from momentum, but not the norms of a stack.
      settings: a `NewtonSchulz`.
      kernels: whether NVIDIA GPUs take the kernels of `hopper`.
      late: numbers that are known at run time alone; `settings` has placeholders.
    """
    settings = types.SimpleNamespace(**vars(settings), more_steps=None)
    settings.dtype = settings.dtype or wider(stacks[0].dtype, jnp.bfloat16)
    rows, cols = stacks[0].shape[-2:]
    if 1 in (rows, cols) and settings.dtype == "bfloat16":
        # The only singular value of one row begins where the quintics are steepest: in
        # bfloat16 it ends 0.22 from where it should, whatever the row.
        settings.dtype = "float32"
    if late is not None:
        settings.more_steps = late.steps
        if late.eps is not None:
            settings.eps = late.eps
        if late.quintic is not None:
            abc = late.quintic.astype(_exact(stacks[0], settings))
            settings.coefficients = len(settings.coefficients) * [tuple(abc)]
    tall, branch = rows > cols, functools.partial
    branches = {
        "cpu": branch(_one_by_one, Products(on_cpu=True), settings, turned=tall),
        "default": branch(_at_once, Products(tall), settings),
    }
    if kernels:
        from jax_muon.polar.hopper.kernel import HopperProducts

        branches["cuda"] = branch(_at_once, HopperProducts(tall), settings)
    return jax.lax.platform_dependent(*stacks, **branches)


def _exact(x: Array, settings: Any) -> jnp.dtype:
    """The dtype of norms and coefficients."""
    return wider(wider(x.dtype, settings.dtype), jnp.float32)


def _at_once(products: Products, settings: Any, *stacks: Array) -> Array:
    """On an accelerator: many matrices at a time, in the dtype of the iteration."""
    scales = _scales(products, settings, stacks)
    given, dtype = stacks[0].dtype, jnp.dtype(settings.dtype)
    if jnp.finfo(given).maxexp <= jnp.finfo(dtype).maxexp:  # otherwise 1e40 is inf
        # A barrier for each leaf: without it XLA computes the leaf again to store it.
        rounded = [jax.lax.optimization_barrier(x.astype(dtype)) for x in stacks]
        stacks = tuple(rounded)
    most = _PART_BYTES // (stacks[0].nbytes // len(stacks[0]))
    iterated = functools.partial(_iterated, products, settings)
    x = _in_parts(iterated, jnp.concatenate(stacks), *scales, most=most)
    return x.astype(given)


def _one_by_one(
    products: Products, settings: Any, *stacks: Array, turned: bool
) -> Array:
    """On a CPU: one matrix (1, rows, cols) after another, or its transpose.

    There a whole stack at once falls out of the cache, and batched products in bfloat16
    run at half the rate of single ones. In float32 a matrix is (m, n) instead of
    (1, m, n): faster by a tenth to a fifth, and in bfloat16 slower by a third, where
    XLA multiplies (m, k) by (k, n) in float32 in places. It does the same with
    (1, n, m).mT, so a matrix is transposed before it gets its third axis, and a barrier
    keeps XLA from moving a transpose into products: in bfloat16 it cannot run X^T X
    ("Unsupported element type for DotThunk").
    """
    low_precision = settings.dtype == "bfloat16"

    def single(part: Array) -> Array:
        matrix = part[0].T if turned else part[0]
        # Flat: then rows are contiguous as on a mesh, and their sums have one order.
        y = jax.lax.optimization_barrier(matrix.reshape(-1))
        y = y.reshape((1,) * low_precision + matrix.shape)
        scales = _scales(products, settings, [y])
        y = _iterated(products, settings, y, *scales)
        y = y.reshape(matrix.shape)
        return (y.T if turned else y)[None]

    return _in_parts(single, jnp.concatenate(stacks), most=1)


def _in_parts(
    function: Callable[..., Array], stack: Array, *scales: Array, most: int
) -> Array:
    """Apply a function to at most `most` matrices at a time, written over the stack.

    All parts are equal: 24 matrices with most=7 are four parts of 6.
    """
    count = len(stack)
    size = max(k for k in range(1, count + 1) if count % k == 0 and k <= max(most, 1))
    if size == count:
        return function(stack, *scales)

    def body(index: Array, stack: Array) -> Array:
        arrays, at = (stack, *scales), index * size
        part = [jax.lax.dynamic_slice_in_dim(x, at, size) for x in arrays]
        return jax.lax.dynamic_update_slice_in_dim(stack, function(*part), at, 0)

    return jax.lax.fori_loop(0, count // size, body, stack)


def _scales(
    products: Products, settings: Any, stacks: Sequence[Array]
) -> tuple[Float[Array, "*batch 1 1"], Float[Array, "*batch 1 1"]]:
    """A power of two u, and 1 / (factor * norm(u X) + u eps), which scales u X.

    u is 1, unless elements above 3e14 (2^48) might overflow the sum of squares.
    """
    exact = _exact(stacks[0], settings)
    sums = jnp.concatenate([products.squares(x.astype(exact)) for x in stacks])
    plain, small_sums = jnp.split(sums, 2, axis=-1)
    large = ~(plain <= 2.0 ** (jnp.finfo(exact).maxexp * 3 // 4))
    unit = jnp.where(large, small_unit(exact), jnp.ones_like(plain))
    return unit, _inverse(settings, jnp.where(large, small_sums, plain), 1, unit)


def _inverse(settings: Any, power: Array, roots: int, unit: Array) -> Array:
    """1 / (factor * norm + eps), where the norm is a root of this power.

    It is 0 where the power is 0, and so is its derivative: a zero gradient gives a zero
    update, and one that can be differentiated.
    """
    is_zero = power == 0
    norm = jnp.where(is_zero, 1, power)
    for _ in range(roots):
        norm = jnp.sqrt(norm)
    inverse = 1 / padded(norm, settings.eps, unit, settings.norm_factor)
    return jnp.where(is_zero, 0, inverse)


def _iterated(
    products: Products, settings: Any, x: Array, unit: Array, inverse: Array
) -> Array:
    """The quintics of X, where unit * inverse * X has norm 1.

    A Gram matrix of X serves `refresh` steps, in the standard form one. In between, R,
    every polynomial of it and their products are symmetric and commute.
    """
    # One factor after the other: of 3e38 their product would be subnormal.
    y = (x.astype(unit.dtype) * unit * inverse).astype(settings.dtype)
    gram = products.gram(y)
    # b R + c R R as b (R + c/b R R): in float32 it would round b R and c R R, which
    # nearly cancel each other, to 2.6e-6 of the result on a Gaussian, not 2.1e-6.
    table: list[Quintic] = [factored(*abc) for abc in settings.coefficients]
    last = table[-1]
    if settings.norm == "schatten4":
        # k Y has Schatten-4 norm 1, where k is 1 to m^(1/4), and its first step is a
        # polynomial of the R of Y, too: a k I + b k^3 (R + c/b k^2 R R).
        fourth = matrix_sum(wide(gram) ** 2)
        k = _inverse(settings, fourth, 2, (unit * inverse).astype(fourth.dtype))
        (a, b, q), *others = table
        table = [(a * k, b * k**3, q and q * k**2), *others]
    refresh = REFRESH if uses_gram(settings, *sorted(y.shape[-2:])) else 1
    # Products of float32 are summed in float32, which rounds after every term. As one
    # of these terms a Y would double the error on matrices of low rank.
    apart = refresh == 1 and settings.dtype != "bfloat16"

    def stepped(y: Array, gram: Array, part: Sequence[Quintic]) -> Array:
        (a, b, q), *others = part
        factor = step = products.polynomial(gram, (0.0 if apart else a, b, q))
        for quintic in others:
            gram = products.symmetric(products.symmetric(step, gram), step)
            step = products.polynomial(gram, quintic)
            factor = products.symmetric(factor, step)
        product = products.product(factor, y)
        return a * y + product if apart else product

    y = stepped(y, gram, table[:refresh])
    for start in range(refresh, len(table), refresh):
        y = stepped(y, products.gram(y), table[start : start + refresh])
    if settings.more_steps is not None:

        def again(_: Array, y: Array) -> Array:
            return stepped(y, products.gram(y), [last])

        y = jax.lax.fori_loop(len(table), settings.more_steps, again, y)
    return y.astype(x.dtype)
