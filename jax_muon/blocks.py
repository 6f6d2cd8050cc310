"""Which matrices are orthogonalized as one (TEON), and how they are stacked for it.

K matrices (in, out) side by side along `in` are one matrix (K in, out). A `Block` names
the leaves and their matrices, and stacks them for the polar factor alone. A matrix that
is joined to nothing is a block with K = 1.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.axes import Parameter

# Maps the joined matrices (batch, K in, out) of each block to their polar factors.
BlockFunction = Callable[[list[Array]], list[Array]]


@dataclasses.dataclass(frozen=True)
class Join:
    """K leaves that are joined, or one along its leading batch axis: scanned layers."""

    size: int  # K
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Matrices of one or several leaves; `joined` of them make one.

    Several leaves give one matrix each, all of their batch. One leaf gives the matrices
    from `start` to `stop` of its batch; the next matrix of the same join is `inner`
    places further: scanned layers (layers, heads, in, out) have inner = heads.
    """

    leaves: tuple[int, ...]
    joined: int
    start: int
    stop: int
    inner: int = 1

    @property
    def batch(self) -> int:
        """Number of joined matrices."""
        return len(self.leaves) * (self.stop - self.start) // self.joined

    def view(
        self, views: Sequence[Float[Array, "_ _ _"]]
    ) -> Float[Array, "batch joined_in out"]:
        """Its joined matrices, from the views (batch, in, out) of all leaves."""
        if len(self.leaves) > 1:
            return jnp.concatenate([views[leaf] for leaf in self.leaves], axis=1)
        part = views[self.leaves[0]][self.start : self.stop]
        if self.joined == 1:
            return part
        _, fan_in, fan_out = part.shape
        grid = part.reshape(-1, self.joined, self.inner, fan_in, fan_out)
        return grid.swapaxes(1, 2).reshape(self.batch, -1, fan_out)

    def undo(
        self, block: Float[Array, "batch joined_in out"]
    ) -> list[Float[Array, "_ _ _"]]:
        """The matrices (stop - start, in, out) of each of its leaves."""
        if self.joined == 1:
            return [block]
        if len(self.leaves) > 1:
            return jnp.split(block, self.joined, axis=1)
        _, width, fan_out = block.shape
        grid = block.reshape(-1, self.inner, self.joined, width // self.joined, fan_out)
        return [grid.swapaxes(1, 2).reshape(self.stop - self.start, -1, fan_out)]


def map_blocks(
    function: BlockFunction,
    blocks: Sequence[Block],
    views: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function to all blocks, in the order of `make_blocks`; returns views."""
    results = function([block.view(views) for block in blocks])
    parts: list[list[Array]] = [[] for _ in views]  # of each leaf, along its batch
    for block, result in zip(blocks, results, strict=True):
        for leaf, part in zip(block.leaves, block.undo(result), strict=True):
            parts[leaf].append(part)
    return [jnp.concatenate(pieces) for pieces in parts]


def make_blocks(
    parameters: Sequence[Parameter],
    shapes: Sequence[tuple[int, ...]],
    joins: Sequence[Join] = (),
) -> list[Block]:
    """Blocks that cover every matrix of these leaves once.

    Args:
      parameters: the leaves, in their order.
      shapes: of each leaf, or of one device's shard of it.
      joins: as `find_joins` returns them, of these leaves and of others. One with a
        leaf that is not here, or in a join before it, joins nothing.
    """
    counts = [
        [shape[axis] for axis in batch_of(parameter)]
        for parameter, shape in zip(parameters, shapes, strict=True)
    ]
    left = {parameter.path: leaf for leaf, parameter in enumerate(parameters)}
    blocks: list[Block] = []
    for join in joins:
        if not left.keys() >= {*join.paths}:
            continue
        leaves = tuple(left.pop(path) for path in join.paths)
        count = math.prod(counts[leaves[0]])
        if len(leaves) == join.size:
            blocks.append(Block(leaves, join.size, 0, count))
        else:  # along the batch
            layers, *rest = counts[leaves[0]]
            inner = math.prod(rest)
            stop = layers // join.size * join.size * inner
            blocks.append(Block(leaves, join.size, 0, stop, inner))
            blocks.append(Block(leaves, 1, stop, count))
    blocks += [Block((leaf,), 1, 0, math.prod(counts[leaf])) for leaf in left.values()]
    some = (block for block in blocks if block.batch)
    return sorted(some, key=lambda block: (block.leaves, block.start))


def batch_of(parameter: Parameter) -> tuple[int, ...]:
    """The batch axes of a parameter, () if it is not a matrix."""
    return parameter.axes.batch if parameter.axes else ()
