"""The two symmetric products of an orthogonalization step, plain and as GPU kernels.

  gram(x)             X X^T
  quadratic(a, b, c)  b A + c A A, for symmetric A

A matrix product computes both triangles of these results. The kernels compute the tiles
of the lower one and store each tile twice, the second time transposed: for s rows of
tiles s (s + 1) / 2 instead of s^2. They are written for Hopper (sm_90) in Triton, for
16-bit floats, whose products accumulate in float32 and are rounded once.

`PolarExpress(symmetric="kernel")` uses them on NVIDIA GPUs. It is not the default: they
are compiled and checked in Pallas's interpreter, but not yet run on a GPU
(docs/speed.md).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

_INPUTS = (jnp.bfloat16, jnp.float16)


class Tiling(NamedTuple):
    """How a kernel cuts its work; docs/speed.md has the reasons.

    Each program computes a tile of `tile` x `tile` elements with `warps` warps, `depth`
    columns at a time, while the next `stages` - 1 pieces of that depth are loaded.
    """

    tile: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4


HOPPER = Tiling()


def wider(dtype: Any, other: Any) -> Any:
    """`jnp.promote_types`, even where JAX promotes nothing by itself ("strict")."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


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
    """X Y^T, as `matmul`. With `y.mT` in place of y a CPU would copy the transpose."""
    return jnp.einsum("...mk,...nk->...mn", x, y, **_accumulation(x.dtype, dtype))


def _accumulation(
    operands: jnp.dtype, dtype: jax.typing.DTypeLike | None
) -> dict[str, Any]:
    wide = wider(operands, jnp.float32)
    return {
        # HIGHEST: on a GPU, float32 would otherwise run through TF32 with 10 bits.
        "precision": jax.lax.Precision.HIGHEST if operands == wide else None,
        "preferred_element_type": wide if dtype is None else dtype,
    }


def gram(
    x: Float[Array, "*batch m n"], dtype: jax.typing.DTypeLike | None = None
) -> Float[Array, "*batch m m"]:
    """X X^T, rounded once.

    Args:
      x: matrices in the last two axes, any floating dtype.
      dtype: of the result; None for the dtype of x.

    Returns:
      The symmetric matrices.
    """
    return outer(x, x).astype(x.dtype if dtype is None else dtype)


def quadratic(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
) -> Float[Array, "*batch m m"]:
    """b A + c A A, rounded once.

    Args:
      a: matrices in the last two axes, any floating dtype.
      b: factor of A.
      c: factor of A A.

    Returns:
      An array with the shape and dtype of a.
    """
    square = matmul(a, a)
    return (b * a.astype(square.dtype) + c * square).astype(a.dtype)


def gram_kernel(
    x: Float[Array, "*batch m n"],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    factor: float | Float[Array, ""] = 1.0,
    tiling: Tiling = HOPPER,
    interpret: bool = False,
) -> Float[Array, "*batch m m"]:
    """X X^T as `gram` computes it, by a GPU kernel that computes one triangle.

    Args:
      x: matrices in the last two axes, bfloat16 or float16. float32 is refused: the
        tensor cores of a GPU do not multiply it without rounding.
      dtype: of the result, a floating dtype of at most 32 bits; None for that of x.
      factor: of the product, before it is rounded.
      tiling: sizes of the kernel.
      interpret: run in Pallas's interpreter, on any platform; for tests.

    Returns:
      The matrices, equal to their transposes bit by bit.

    Raises:
      ValueError: x has fewer than two axes or another dtype, or a size of the kernel
        is not a power of two of at least 16.

    Examples:
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.bfloat16)
      >>> gram_kernel(x, jnp.float32, interpret=True).tolist()
      [[5.0, 11.0], [11.0, 25.0]]
    """
    _check_matrices("x", x)
    return _symmetric_product(x, dtype, (factor,), tiling, interpret)


def quadratic_kernel(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    *,
    tiling: Tiling = HOPPER,
    interpret: bool = False,
) -> Float[Array, "*batch m m"]:
    """b A + c A A as `quadratic` computes it, by a GPU kernel, for symmetric A.

    Args:
      a: symmetric matrices in the last two axes, bfloat16 or float16. Symmetry is not
        checked: of A A^T, which the kernel computes, the lower triangle decides.
      b: factor of A.
      c: factor of A A.
      tiling: sizes of the kernel.
      interpret: run in Pallas's interpreter, on any platform; for tests.

    Returns:
      An array with the shape and dtype of a, equal to its transpose bit by bit.

    Raises:
      ValueError: a has fewer than two axes or is not square, or another dtype, or
        a size of the kernel is not a power of two of at least 16.

    Examples:
      >>> a = jnp.array([[1.0, 2.0], [2.0, 0.0]], jnp.bfloat16)
      >>> quadratic_kernel(a, 1.0, 2.0, interpret=True).tolist()
      [[11.0, 6.0], [6.0, 8.0]]
    """
    _check_matrices("a", a)
    if a.shape[-2] != a.shape[-1]:
        raise ValueError(f"a of shape {a.shape}; expected square matrices (..., m, m)")
    return _symmetric_product(a, None, (c, b), tiling, interpret)


def tile_of(program: Any, rows: int) -> tuple[Any, Any]:
    """The tile (row, column) of the lower triangle that a program computes.

    Row i and row `rows - 1 - i` of the triangle have `rows + 1` tiles together, so that
    a division tells the pair: no square root, which would have to be corrected. Of an
    odd number of rows the middle one is left, which the last programs fill.

    Args:
      program: 0 to `rows * (rows + 1) / 2 - 1`.
      rows: number of rows of tiles.
    """
    width = jnp.int32(rows + 1)
    pair, place = jax.lax.div(program, width), jax.lax.rem(program, width)
    long = rows - pair  # tiles in row `rows - 1 - pair`
    return (
        jnp.where(place < long, long - 1, pair),
        jnp.where(place < long, place, place - long),
    )


def _symmetric_product(
    x: Array,
    dtype: jax.typing.DTypeLike | None,
    factors: tuple[Any, ...],
    tiling: Tiling,
    interpret: bool,
) -> Array:
    """c X X^T with factors (c,), or c X X^T + b X with (c, b)."""
    _check_tiling(tiling)
    *batch, m, n = x.shape
    stack = x.reshape(math.prod(batch), m, n)
    # The plain function's type, with the mesh axes over which the result varies.
    result = jax.eval_shape(functools.partial(gram, dtype=dtype), stack)
    if result.dtype not in (*_INPUTS, jnp.float32):
        raise ValueError(f"dtype={result.dtype}; expected bfloat16, float16 or float32")
    if x.size == 0:
        return gram(x, dtype)
    rows = pl.cdiv(m, tiling.tile)

    def matrix(columns: int) -> pl.BlockSpec:
        """The whole matrix that a program works on: grid axis 1 is the batch."""
        return pl.BlockSpec((None, m, columns), lambda _, item: (item, 0, 0))

    product = pl.pallas_call(
        functools.partial(_kernel, tiling=tiling, rows=rows),
        grid=(rows * (rows + 1) // 2, len(stack)),
        in_specs=[matrix(n), pl.BlockSpec((len(factors),), lambda *_: (0,))],
        out_specs=matrix(m),
        out_shape=result,
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.warps, num_stages=tiling.stages
        ),
        interpret=interpret,
        name="gram" if len(factors) == 1 else "quadratic",
    )
    # Factors are an operand, not constants of the kernel: all steps share one kernel.
    operand = jnp.stack([jnp.asarray(factor, jnp.float32) for factor in factors])
    return product(stack, operand).reshape(*batch, m, m)


def _kernel(
    x_ref: Any,
    factors_ref: Any,
    out_ref: Any,
    *,
    tiling: Tiling,
    rows: int,
) -> None:
    """One tile and its mirror image."""
    tile, depth = tiling.tile, tiling.depth
    row, column = tile_of(pl.program_id(0), rows)
    top, left = row * tile, column * tile

    def piece(ref: Any, first_row: Any, first: Any, columns: int) -> tuple[Any, Any]:
        """Part of a matrix, and which of its elements exist (None: all)."""
        axes = ((first_row, tile), (first, columns))
        masks = [
            start + jax.lax.broadcasted_iota(jnp.int32, (tile, columns), axis) < limit
            for axis, ((start, size), limit) in enumerate(
                zip(axes, ref.shape, strict=True)
            )
            if limit % size
        ]
        part = ref.at[tuple(pl.ds(start, size) for start, size in axes)]
        return part, functools.reduce(jnp.logical_and, masks) if masks else None

    def load(first_row: Any, first: Any, columns: int) -> Array:
        part, mask = piece(x_ref, first_row, first, columns)
        return plgpu.load(part, mask=mask, other=None if mask is None else 0)

    def store(first_row: Any, first: Any, value: Array) -> None:
        part, mask = piece(out_ref, first_row, first, tile)
        plgpu.store(part, value, mask=mask)

    def accumulate(step: Any, total: Array) -> Array:
        start = step * depth
        return total + jax.lax.dot_general(
            load(top, start, depth),
            load(left, start, depth),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    total = jnp.zeros((tile, tile), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(x_ref.shape[1], depth), accumulate, total)
    # Also where that is 1: if the sums are rounded right after the last product, ptxas
    # 13.5 would make every product wait for the one before (its remark C7514).
    total *= factors_ref[0]
    if factors_ref.shape == (2,):
        total += factors_ref[1] * load(top, left, tile).astype(jnp.float32)
    result = total.astype(out_ref.dtype)

    @pl.when(row > column)
    def _() -> None:
        store(top, left, result)
        store(left, top, result.T)

    # The order in which tensor cores add is not documented: the upper half of a
    # diagonal tile is not taken on trust but mirrored too.
    @pl.when(row == column)
    def _() -> None:
        i = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 0)
        j = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 1)
        # Zeros above the diagonal are transposed, and not `result` itself: that
        # transpose Triton would move up before the branches, into every tile's way.
        lower = jnp.where(i >= j, result, 0)
        store(top, left, jnp.where(i >= j, result, lower.T))


def _check_matrices(name: str, x: Array) -> None:
    if x.ndim < 2:
        raise ValueError(f"{name} of shape {x.shape}; expected an array (..., m, n)")
    if x.dtype not in _INPUTS:
        raise ValueError(f"{name} of dtype {x.dtype}; expected bfloat16 or float16")


def _check_tiling(tiling: Tiling) -> None:
    for field in ("tile", "depth"):
        size = getattr(tiling, field)
        if size < 16 or size & (size - 1):
            raise ValueError(
                f"tiling.{field}={size}; expected a power of two, at least 16"
            )
