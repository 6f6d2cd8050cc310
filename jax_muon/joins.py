"""Joins: matrices of several layers that are orthogonalized as one (TEON).

K matrices (in, out) side by side along `in` are one matrix (K in, out). A `Block` names
the leaves and their matrices, and stacks them for the polar factor alone. A matrix that
is joined to nothing is a block with K = 1.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon import checks, paths
from jax_muon.reading import tree
from jax_muon.reading.decide import Parameter

# Path pattern to K, or K alone for all queries, keys and values; see `jax_muon.read`.
Joins = Mapping[str, int] | int

# Joined matrices (batch, K in, out) of every block to their factors.
Factors = Callable[[list[Array]], list[Array]]

_NUMBER = "{i}"


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
    function: Factors,
    blocks: Sequence[Block],
    views: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function to all blocks, in the order of `make_blocks`; returns views."""
    results = function([block.view(views) for block in blocks])
    parts: list[list[Array]] = [[] for _ in views]  # of each leaf, along its batch
    for block, result in zip(blocks, results, strict=True):
        for leaf, part in zip(block.leaves, block.undo(result), strict=True):
            parts[leaf].append(part)
    return [jnp.concatenate(own) for own in parts]


@dataclasses.dataclass(frozen=True)
class Join:
    """K leaves that are joined, or one along its leading batch axis: scanned layers."""

    size: int  # K
    paths: tuple[str, ...]


def check(joins: Any) -> None:
    """Raise a ValueError unless joins are K or a mapping of path patterns to K."""
    if isinstance(joins, Mapping):
        expected = "a mapping of path patterns to K"
        checks.mapping("joins", joins, expected, checks.count)
    elif joins is not None:
        checks.count("joins", joins)


def find_joins(
    joins: Joins | None, parameters: Mapping[str, Parameter]
) -> tuple[Join, ...]:
    """Which of these matrices are joined; of two joins of one leaf the first counts.

    Raises:
      ValueError: with paths, for a pattern that matches nothing, or has no number and
        matches a leaf without a batch axis; leaves of different shapes in one join.
    """
    if joins is None or not parameters:
        return ()
    if isinstance(joins, Mapping):
        found = [
            join
            for pattern, size in joins.items()
            for join in _joins_of_pattern(pattern, size, parameters)
        ]
    else:
        found = _joins_of_attention(joins, parameters)
    for join in found:
        group = [parameters[path] for path in join.paths]
        if len({(one.shape, one.axes, one.dtype) for one in group}) > 1:
            raise ValueError(
                "joins: these matrices have different shapes or dtypes: "
                + ", ".join(f"{x.path!r} {x.shape} {x.dtype}" for x in group)
                + "; expected matrices of one shape"
            )
    return tuple(found)


def _joins_of_pattern(
    pattern: str, size: int, parameters: Mapping[str, Parameter]
) -> list[Join]:
    """Joins of paths that differ in the number alone, or along the batch of each."""
    # `paths.matches`, with a number for {i}.
    expression = fnmatch.translate(f"*/{pattern}/*")
    expression = expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)", 1)
    groups: dict[str, list[tuple[int, str]]] = {}
    found: list[Join] = []
    for path, parameter in parameters.items():
        match = re.fullmatch(expression, f"/{path}/")
        if match and _NUMBER in pattern:
            groups.setdefault(_without(match, "i"), []).append((int(match["i"]), path))
        elif match and not _batch(parameter):
            raise ValueError(
                f"joins: the pattern {pattern!r} has no layer number and matches "
                f"parameter {path!r}, which has no layer axis; expected a pattern such "
                "as 'blocks/{i}/attn/q', or scanned layers"
            )
        elif match:
            found.append(Join(size, (path,)))
    if not groups and not found:
        raise ValueError(
            f"joins: the pattern {pattern!r} matches no matrix; there are "
            + ", ".join(parameters)
        )
    return [*found, *(join for own in groups.values() for join in _cut(size, own))]


def _joins_of_attention(size: int, parameters: Mapping[str, Parameter]) -> list[Join]:
    """Queries, keys and values of one shape: over the innermost number that varies.

    The number of a module of attention comes last, and after an axis of layers: one
    layer may have two of them. The number of a projection such as `q2` is no layer.
    """
    groups: dict[Any, list[tuple[int, str]]] = {}  # by shape, and path but one number
    layers: dict[str, list[Any]] = {}  # the groups of a path, the most likely one last
    for path, parameter in parameters.items():
        if parameter.role not in ("query", "key", "value"):
            continue
        numbers = [
            match
            for match in re.finditer(r"\d+", path)
            if not tree.projection(path[: match.end()].rpartition("/")[2])
            and not (_is_of_attention(match) and _batch(parameter))
        ]
        numbers.sort(key=lambda match: (not _is_of_attention(match), match.start()))
        layers[path] = [(_without(match), parameter.shape) for match in numbers]
        for match, group in zip(numbers, layers[path], strict=True):
            groups.setdefault(group, []).append((int(match[0]), path))
    if not groups and not any(_batch(parameters[path]) for path in layers):
        raise ValueError(
            f"joins={size}: no query, key or value of a numbered or scanned layer "
            "among " + ", ".join(parameters) + "; expected such layers, or a mapping "
            "such as {'blocks/{i}/attn/q': 2}"
        )
    found: dict[Any, list[Join]] = {}
    for path, own in layers.items():
        varying = [group for group in own if len(groups[group]) > 1]
        if varying:
            found[varying[-1]] = _cut(size, groups[varying[-1]])
        elif _batch(parameters[path]):
            found[path] = [Join(size, (path,))]
    return [join for joins in found.values() for join in joins]


def _cut(size: int, numbered: list[tuple[int, str]]) -> list[Join]:
    """Joins of layers in their order; a remainder is joined with nothing."""
    own = [path for _, path in sorted(numbered)]
    stop = len(own) // size * size
    joined = [Join(size, tuple(own[at : at + size])) for at in range(0, stop, size)]
    return joined + [Join(1, (path,)) for path in own[stop:]]


def _is_of_attention(number: re.Match[str]) -> bool:
    """True for the number of a module of attention, such as `SelfAttention_0`."""
    before = number.string[: number.start()].rpartition("/")[2]
    return paths.words(before)[-1:] in (["attention"], ["attn"])


def _without(match: re.Match[str], group: int | str = 0) -> str:
    """The text of a match with {i} in place of a number."""
    start, stop = match.span(group)
    return match.string[:start] + _NUMBER + match.string[stop:]


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
        [shape[axis] for axis in _batch(parameter)]
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


def _batch(parameter: Parameter) -> tuple[int, ...]:
    return parameter.axes.batch if parameter.axes else ()
