"""c X X^T + b X for symmetric results, as one kernel for Hopper GPUs (sm_90).

It is written for Pallas's Mosaic GPU backend, which is imported here and nowhere else.

A program computes a tile of 128 rows of the lower triangle with three groups of four
warps. One group loads pieces of X, several ahead of those in use, through the tensor
memory accelerator (TMA). The other two multiply 64 rows each (`wgmma`) and store their
results in squares of 64 x 64: a square below the diagonal twice, the second time
transposed, one on the diagonal with its lower half mirrored, one above it not at all.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"jax {jax.__version__} without Pallas's Mosaic GPU backend, which the kernels "
        f"need ({error}); expected jax 0.10.2 to 0.12, or symmetric='plain'"
    ) from error

# Rows that one instruction multiplies, and 16-bit elements in a row of swizzled memory.
SQUARE = 64
COMPUTING = 2  # groups of warps; group 2 loads
ROWS = COMPUTING * SQUARE
SHARED_BYTES = 227 * 1024 - 1024  # of a program, less its barriers
# 64 Ki registers for 3 groups of 128 threads are 168 each. Loading needs few.
LOADING_REGISTERS, COMPUTING_REGISTERS = 40, 232


class Tiling(NamedTuple):
    """How the kernel cuts its work; benchmarks/NOTES.md has the reasons.

    Each program computes a tile of 128 x `columns` elements, 64 columns of the matrices
    at a time, while the next `stages` - 1 pieces of that depth are loaded.
    """

    columns: int = 256  # or 128
    stages: int = 4  # at least 2; fewer where they do not fit


TILING = Tiling()


# One function in the program for all calls of a kind: tracing takes half a second.
@functools.partial(jax.jit, static_argnames=("result", "columns", "stages"))
def symmetric_product(
    x: Float[Array, "k m n"],
    factors: Float[Array, " count"],
    result: jax.ShapeDtypeStruct,
    columns: int,
    stages: int,
) -> Float[Array, "k m m"]:
    """c X X^T for one factor (c,), or c X X^T + b X for (c, b).

    X is bfloat16, m and n multiples of 64; the factors are float32.
    """
    count, m, _ = x.shape
    with_x = factors.shape == (2,)
    # Pieces of a tile's rows and of its columns; two squares for each computing group.
    piece = (ROWS + columns) * SQUARE * x.dtype.itemsize
    squares = COMPUTING * 2 * SQUARE**2 * result.dtype.itemsize
    stages = min(stages, (SHARED_BYTES - squares) // piece)
    tiles = tiles_of(m, columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, columns=columns, stages=stages, tiles=tiles),
        out_type=result,
        grid=(count * tiles,),
        grid_names=("program",),
        num_threads=COMPUTING + 1,  # a thread of Pallas is a group of four warps
        thread_name="group",
        kernel_name="quadratic" if with_x else "gram",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    product = kernel(x, factors)
    # Pallas drops the mesh axes over which a value differs, inside shard_map.
    varying, kept = (jax.typeof(y).manual_axis_type.varying for y in (x, product))
    missing = tuple(sorted(varying - kept))
    return lax.pcast(product, missing, to="varying") if missing else product


def tiles_of(m: int, columns: int) -> int:
    """Number of tiles of the lower triangle of (m, m).

    Tiles that are wider than high come in pairs, one above the other.
    """
    rows = pl.cdiv(m, columns)
    return rows * (rows + 1) // 2 * (columns // ROWS)


def corner(tile: Any, m: int, columns: int) -> tuple[Any, Any]:
    """First row and column of a tile; a row beyond m where a pair has one too many.

    Row i and row `rows - 1 - i` of a triangle have `rows + 1` tiles together, so that
    a division finds the pair; a square root would have to be corrected. Of an odd
    number of rows the middle one is left, and the last tiles fill it.
    """
    rows, height = pl.cdiv(m, columns), columns // ROWS
    block, part = _divmod(tile, height)
    pair, index = _divmod(block, rows + 1)
    long = rows - pair  # tiles in row `rows - 1 - pair`
    row = jnp.where(index < long, long - 1, pair)
    column = jnp.where(index < long, index, index - long)
    return row * columns + part * ROWS, column * columns


def _divmod(x: Any, y: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative, in 32 bits."""
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _kernel(
    x: Any, factors: Any, out: Any, *, columns: int, stages: int, tiles: int
) -> None:
    """One tile, by one program of three groups of warps."""
    program, group = lax.axis_index("program"), lax.axis_index("group")
    matrix, tile = _divmod(program, tiles)
    top, left = corner(tile, out.shape[1], columns)
    products = x.shape[2] // SQUARE
    # The tile of X that is added comes the same way as the factors of the products.
    addends = columns // SQUARE if factors.shape == (2,) else 0

    def run(rows: Any, others: Any, squares: Any, loaded: Any, free: Any) -> None:
        pieces = _Pieces(rows, others, loaded, free)

        @pl.when((group == COMPUTING) & (top < out.shape[1]))
        def _() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
            _load(x, matrix, top, left, pieces, products, addends)

        @pl.when((group < COMPUTING) & (top < out.shape[1]))
        def _() -> None:
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            total = _multiply(pieces, products, group)
            row = top + group * SQUARE
            for i in range(columns // SQUARE):
                value = total[:, i * SQUARE : (i + 1) * SQUARE] * factors[0]
                if addends:
                    part = pieces.take(products + i, group)
                    value += factors[1] * part.astype(jnp.float32)
                column = left + i * SQUARE
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
        rows=_shared((stages, ROWS, SQUARE), x.dtype),
        others=_shared((stages, columns, SQUARE), x.dtype),
        squares=_shared((COMPUTING, 2, SQUARE, SQUARE), out.dtype),
        loaded=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTING),
        collective_axes="group",
    )


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

    rows: Any  # (stages, 128, 64)
    others: Any  # (stages, columns, 64), of the rows that are the tile's columns
    loaded: Any  # a barrier for each stage: both are there
    free: Any  # and one: both computing groups have used them

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


def _load(
    x: Any,
    matrix: Any,
    top: Any,
    left: Any,
    pieces: _Pieces,
    products: int,
    addends: int,
) -> None:
    """Fetch the factors of all products, then the tile of X that is added."""
    steps, stages = products + addends, pieces.rows.shape[0]

    @pl.loop(0, steps)
    def _(step: Any) -> None:
        step = jnp.int32(step)  # of 64 bits where JAX has them
        slot = pieces.slot(step)

        def fetch(row: Any, column: Any, target: Any) -> None:
            part = pl.ds(row, target.shape[0]), pl.ds(column, SQUARE)
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
            plgpu.wgmma(
                total,
                pieces.rows.at[slot, pl.ds(group * SQUARE, SQUARE)],
                pieces.others.at[slot].transpose((1, 0)),
            )
            plgpu.wgmma_wait(1)  # the one before, while this one runs
            pl.when(step > 0)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(jnp.int32(products - 1))
        return total[...]

    columns = pieces.others.shape[1]
    return pl.run_scoped(run, plgpu.ACC((SQUARE, columns), jnp.float32))


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
    i, j = (
        plgpu.broadcasted_iota(
            jnp.int32, (SQUARE, SQUARE), axis, layout=plgpu.Layout.WGMMA
        )
        for axis in range(2)
    )
    squares[0][...] = jnp.where(i >= j, value, squares[1][...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(squares[0], target)


def _write_transposed(value: Array, square: Any) -> None:
    """By pairs of elements: a warp exchanges neighbours and then stores columns."""
    turned = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    square.transpose((1, 0))[...] = turned
