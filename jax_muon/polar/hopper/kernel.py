"""X X^T, X^T X, and a I + b (R + q R R), as a kernel for Hopper GPUs.

It is written for Pallas's Mosaic GPU backend, which is imported here and nowhere else.

A program computes a tile of 128 x 128 of the lower triangle with three groups of four
warps. One group loads pieces of X, several ahead of those in use, through the tensor
memory accelerator (TMA). The other two multiply 64 rows each (`wgmma` of sm_90) and
store their results in squares of 64 x 64: a square below the diagonal twice, the second
time transposed, one on the diagonal with its lower half mirrored, one above it not at
all.

Tiles of 128 x 256 load less for a product, but the last ones leave most processors
idle: of 12 matrices with 768 rows 12 of 144, when 132 have run. On an H200 they take
0.96 to 1.6 of the time of square ones, and a step of GPT-2 124M 4.23 ms, not 3.65.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jax_muon.polar.products import Products, Quintic

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"jax {jax.__version__} without Pallas's Mosaic GPU backend, which the kernels "
        f"need ({error}); expected jax 0.10.2 to 0.12, or kernels=False"
    ) from error

# Rows that one instruction multiplies, and 16-bit elements in a row of swizzled memory.
SQUARE = 64
COMPUTING = 2  # groups of warps; group 2 loads
TILE = COMPUTING * SQUARE
# 64 Ki registers for 3 groups of 128 threads are 168 each. Loading needs few.
LOADING_REGISTERS, COMPUTING_REGISTERS = 40, 232


class HopperProducts(Products):
    """R and P equal to their transposes bit by bit, summed in float32, rounded once.

    Matrices are bfloat16: tensor cores do not multiply float32 without rounding.
    """

    def gram(self, x: Array) -> Float[Array, "*batch m m"]:
        """X X^T, or of tall X X^T X."""
        return _by_kernel(x, tall=self.tall)

    def polynomial(self, r: Array, quintic: Quintic) -> Float[Array, "*batch m m"]:
        """a I + b (R + q R R). Symmetry is not checked: the lower half decides.

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


# One function in the program for all calls of a kind: tracing takes half a second.
@functools.partial(jax.jit, static_argnames=("tall", "stages"))
def symmetric_product(
    x: Array, factors: Array | None, *, tall: bool, stages: int = 6
) -> Float[Array, "k m m"]:
    """X X^T of (k, m, n), X^T X of tall (k, n, m), or a I + b (X + q X X^T).

    Args:
      x: bfloat16; m and n are multiples of 64.
      factors: float32 (k, 3), the (a, b, q) of each X; without them X X^T.
      tall: see above.
      stages: a program loads `stages` - 1 pieces, 64 elements deep, ahead of the one in
        use. 6 of (128 + 128) x 64 elements are 192 of the 227 KiB that it has; 32 more
        are for results.
    """
    count, m = len(x), x.shape[2 if tall else 1]
    kernel = plgpu.kernel(
        functools.partial(_kernel, stages=stages, tall=tall),
        out_type=jax.ShapeDtypeStruct((count, m, m), x.dtype),
        grid=(count * tiles_of(m),),
        grid_names=("program",),
        num_threads=COMPUTING + 1,  # a thread of Pallas is a group of four warps
        thread_name="group",
        kernel_name="gram" if factors is None else "polynomial",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    product = kernel(x) if factors is None else kernel(x, factors)
    # Pallas drops the mesh axes over which a value differs, inside shard_map.
    varying, kept = (jax.typeof(y).manual_axis_type.varying for y in (x, product))
    missing = tuple(sorted(varying - kept))
    return lax.pcast(product, missing, to="varying") if missing else product


def tiles_of(m: int) -> int:
    """Number of tiles of the lower triangle of (m, m)."""
    rows = pl.cdiv(m, TILE)
    return rows * (rows + 1) // 2


def corner(tile: Any, m: int) -> tuple[Any, Any]:
    """First row and column of a tile.

    Row i and row `rows - 1 - i` of a triangle have `rows + 1` tiles together, so that
    a division finds the pair; the result of a square root would need a correction. With
    3 rows, tiles 0 to 2 are row 2, tile 3 is row 0, and the last two are row 1.
    """
    rows = pl.cdiv(m, TILE)
    pair, index = _divmod(tile, rows + 1)
    long = rows - pair  # tiles in row `rows - 1 - pair`
    row = jnp.where(index < long, long - 1, pair)
    column = jnp.where(index < long, index, index - long)
    return row * TILE, column * TILE


def _divmod(x: Any, y: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative, in 32 bits."""
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _kernel(x: Any, *refs: Any, stages: int, tall: bool) -> None:
    """One tile, by one program of three groups of warps.

    (12, 768, 3072) are 12 matrices of 21 tiles, 252 programs. Each multiplies 48 pieces
    (128, 64) by (64, 128), and its two computing groups have 64 of the 128 rows each.
    """
    *factors, out = refs
    program, group = lax.axis_index("program"), lax.axis_index("group")
    matrix, tile = _divmod(program, tiles_of(out.shape[1]))
    top, left = corner(tile, out.shape[1])
    products = x.shape[1 if tall else 2] // SQUARE
    # The tile of X that is added comes the same way as the factors of the products.
    addends = TILE // SQUARE if factors else 0

    def run(rows: Any, others: Any, squares: Any, loaded: Any, free: Any) -> None:
        pieces = _Pieces(rows, others, loaded, free, tall)

        @pl.when(group == COMPUTING)
        def _() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
            _load(x, (matrix, top, left), pieces, products, addends)

        @pl.when(group < COMPUTING)
        def _() -> None:
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            total = _multiply(pieces, products, group)
            row = top + group * SQUARE
            for i in range(TILE // SQUARE):
                value = total[:, i * SQUARE : (i + 1) * SQUARE]
                column = left + i * SQUARE
                for abq in factors:
                    part = pieces.take(products + i, group).astype(jnp.float32)
                    unit = jnp.where(_row_less_column() == column - row, 1.0, 0.0)
                    value = abq[matrix, 1] * (part + abq[matrix, 2] * value)
                    value += abq[matrix, 0] * unit
                targets = (
                    out.at[matrix, pl.ds(row, SQUARE), pl.ds(column, SQUARE)],
                    out.at[matrix, pl.ds(column, SQUARE), pl.ds(row, SQUARE)],
                )
                inside = row < out.shape[1]
                value = value.astype(out.dtype)
                parts = squares.at[group, 0], squares.at[group, 1]
                pl.when(inside & (row > column))(
                    functools.partial(_store_twice, value, parts, targets)
                )
                pl.when(inside & (row == column))(
                    functools.partial(_store_mirrored, value, parts, targets[0])
                )
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        run,
        rows=_shared((stages, *_of_x(tall, TILE, SQUARE)), x.dtype),
        others=_shared((stages, *_of_x(tall, TILE, SQUARE)), x.dtype),
        squares=_shared((COMPUTING, 2, SQUARE, SQUARE), out.dtype),
        loaded=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTING),
        collective_axes="group",
    )


def _of_x(tall: bool, rows: Any, summed: Any) -> tuple[Any, Any]:
    """Sizes or ranges of the result's rows and of the summed axis, in X's order."""
    return (summed, rows) if tall else (rows, summed)


def _row_less_column() -> Array:
    """The row less the column of each element of a square, as products hold it."""
    row, column = (
        plgpu.broadcasted_iota(
            jnp.int32, (SQUARE, SQUARE), axis, layout=plgpu.Layout.WGMMA
        )
        for axis in range(2)
    )
    return row - column


def _shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory of matrices, swizzled as `wgmma` and TMA take it."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * shape[-1] * size)
    transforms = (
        plgpu.TilingTransform((8, swizzle // size)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class _Pieces(NamedTuple):
    """Shared memory of some pieces of X, which are loaded and used in turn."""

    rows: Any  # (stages, 128, 64), of tall X (stages, 64, 128)
    others: Any  # the same, of the rows that are the tile's columns
    loaded: Any  # a barrier for each stage: both are there
    free: Any  # and one: both computing groups have used them
    tall: bool

    def slot(self, step: Any) -> Any:
        """The slot of a step's pieces."""
        return lax.rem(jnp.int32(step), jnp.int32(self.rows.shape[0]))

    def take(self, step: Any, group: Any) -> Array:
        """A group's part of the rows' piece, which is free again."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.loaded.at[slot])
        part = self.rows[slot, pl.ds(group * SQUARE, SQUARE)]
        plgpu.commit_smem()  # read before TMA writes there again
        plgpu.barrier_arrive(self.free.at[slot])
        return part


def _load(x: Any, at: Any, pieces: _Pieces, products: int, addends: int) -> None:
    """Fetch the factors of all products, then the tile of X that is added."""
    (matrix, top, left), tall = at, pieces.tall
    steps, stages = products + addends, pieces.rows.shape[0]

    @pl.loop(0, steps)
    def _(step: Any) -> None:
        step = jnp.int32(step)  # of 64 bits where JAX has them
        slot = pieces.slot(step)

        def fetch(row: Any, column: Any, target: Any) -> None:
            size = target.shape[1 if tall else 0]
            part = _of_x(tall, pl.ds(row, size), pl.ds(column, SQUARE))
            plgpu.copy_gmem_to_smem(x.at[matrix, *part], target, pieces.loaded.at[slot])

        pl.when(step >= stages)(lambda: plgpu.barrier_wait(pieces.free.at[slot]))

        @pl.when(step < products)
        def _() -> None:
            fetch(top, step * SQUARE, pieces.rows.at[slot])
            fetch(left, step * SQUARE, pieces.others.at[slot])

        if addends:

            @pl.when(step >= products)
            def _() -> None:
                for i in range(COMPUTING):
                    rows = pieces.rows.at[slot, pl.ds(i * SQUARE, SQUARE)]
                    fetch(top + i * SQUARE, left + (step - products) * SQUARE, rows)

    @pl.loop(max(0, steps - stages), steps)
    def _(step: Any) -> None:  # the other groups are done with the last ones, too
        plgpu.barrier_wait(pieces.free.at[pieces.slot(step)])


def _multiply(pieces: _Pieces, products: int, group: Any) -> Array:
    """A group's 64 rows of the tile, in float32."""

    def run(total: Any) -> Array:
        def release(step: Any) -> None:
            plgpu.barrier_arrive(pieces.free.at[pieces.slot(step)])

        @pl.loop(0, products)
        def _(step: Any) -> None:
            slot = pieces.slot(step)
            plgpu.barrier_wait(pieces.loaded.at[slot])
            part = _of_x(pieces.tall, pl.ds(group * SQUARE, SQUARE), slice(None))
            own, others = pieces.rows.at[slot, *part], pieces.others.at[slot]
            # `wgmma` multiplies (64, 64) by (64, 128), and reads either of them
            # transposed from memory.
            if pieces.tall:
                plgpu.wgmma(total, own.transpose((1, 0)), others)
            else:
                plgpu.wgmma(total, own, others.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the one before, while this one runs
            pl.when(step > 0)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(jnp.int32(products - 1))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC((SQUARE, TILE), jnp.float32))


def _store_twice(
    value: Array, squares: tuple[Any, Any], targets: tuple[Any, Any]
) -> None:
    """A square below the diagonal, and its image above it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored last is read
    squares[0][...] = value
    _write_transposed(value, squares[1])
    plgpu.commit_smem()
    for square, target in zip(squares, targets, strict=True):
        plgpu.copy_smem_to_gmem(square, target)


def _store_mirrored(value: Array, squares: tuple[Any, Any], target: Any) -> None:
    """A square on the diagonal, whose lower half decides.

    The order in which tensor cores add is not documented: that the upper half is the
    same is not taken on trust.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _write_transposed(value, squares[1])
    squares[0][...] = jnp.where(_row_less_column() >= 0, value, squares[1][...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(squares[0], target)


def _write_transposed(value: Array, square: Any) -> None:
    """By pairs of elements: a warp exchanges neighbours and then stores columns."""
    turned = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    square.transpose((1, 0))[...] = turned
