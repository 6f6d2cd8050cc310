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
from jax_muon.axes import MatrixAxes
from jax_muon.reading import tree
from jax_muon.reading.decide import Parameter

# Path pattern to K: see `find_joins`. K alone is for all queries, keys and values.
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
        matrices = len(self.leaves) * (self.stop - self.start)
        return matrices // self.joined

    def view(
        self, views: Sequence[Float[Array, "_ _ _"]]
    ) -> Float[Array, "batch joined_in out"]:
        """Its joined matrices, from the views (batch, in, out) of all leaves."""
        if len(self.leaves) > 1:
            return jnp.concatenate([views[leaf] for leaf in self.leaves], axis=1)
        view = views[self.leaves[0]]
        part = view if self.batch * self.joined == len(view) else view[self.slice]
        if self.joined == 1:
            return part
        fan_in, fan_out = part.shape[1:]
        grid = part.reshape(-1, self.joined, self.inner, fan_in, fan_out)
        return grid.swapaxes(1, 2).reshape(self.batch, -1, fan_out)

    def undo(
        self, block: Float[Array, "batch joined_in out"]
    ) -> dict[int, Float[Array, "_ _ _"]]:
        """By leaf, its part of the batch (stop - start, in, out)."""
        if len(self.leaves) > 1:
            parts = jnp.split(block, len(self.leaves), axis=1)
            return dict(zip(self.leaves, parts, strict=True))
        if self.joined == 1:
            return {self.leaves[0]: block}
        fan_in, fan_out = block.shape[1] // self.joined, block.shape[2]
        grid = block.reshape(-1, self.inner, self.joined, fan_in, fan_out)
        return {self.leaves[0]: grid.swapaxes(1, 2).reshape(-1, fan_in, fan_out)}

    @property
    def slice(self) -> slice:
        """Its part of the batch of each of its leaves."""
        return slice(self.start, self.stop)


def map_blocks(
    function: Factors,
    blocks: Sequence[Block],
    views: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function to the joined matrices (batch, K in, out) of every block.

    Args:
      function: of a list of arrays (batch, K in, out), one for each block; gives the
        list of its results in the same shapes.
      blocks: which cover every view once.
      views: (batch, in, out) of each leaf.

    Returns:
      The results, in the order and shapes of `views`.
    """
    results = function([block.view(views) for block in blocks])
    parts: dict[int, list[Array]] = {}  # by leaf, in the order of its batch
    for block, result in zip(blocks, results, strict=True):
        for leaf, part in block.undo(result).items():
            parts.setdefault(leaf, []).append(part)
    return [
        jnp.concatenate(found) if len(found) > 1 else found[0]
        for _, found in sorted(parts.items())
    ]


@dataclasses.dataclass(frozen=True)
class Join:
    """Leaves whose matrices are joined `size` by `size`, in their order.

    A pattern without a number has one leaf, which is joined along its batch.
    """

    pattern: str
    size: int
    paths: tuple[str, ...]

    @property
    def along_batch(self) -> bool:
        """True if the matrices of one leaf are joined with each other."""
        return len(self.paths) == 1 and _NUMBER not in self.pattern


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
    """Which parameters are joined, by their paths.

    Args:
      joins: pattern of paths to K, or K alone; see `jax_muon.read`. `{i}` in a pattern
        stands for the number of a layer: leaves that differ in nothing else are taken
        K by K in the order of that number. A pattern without it takes the matrices of
        each leaf K by K along its leading batch axis, the axis of scanned layers. A
        remainder stays unjoined.
      parameters: those that are matrices, by path.

    Returns:
      One `Join` for all leaves that differ in the number of a layer alone.

    Raises:
      ValueError: with paths, for a pattern that matches nothing, or has no number and
        matches a leaf without a batch axis; a leaf that two patterns match; K below 1.
    """
    check(joins)
    if joins is None or not parameters:
        return ()
    if isinstance(joins, Mapping):
        found = _joins_by_pattern(joins, list(parameters))
    else:
        found = _joins_of_attention(joins, parameters)
    taken: dict[str, str] = {}
    for join in found:
        for path in join.paths:
            if path in taken:
                raise ValueError(
                    f"joins: parameter {path!r} matches {taken[path]!r} and "
                    f"{join.pattern!r}; expected one pattern for a parameter"
                )
            taken[path] = join.pattern
            if join.along_batch and not _axes(parameters[path]).batch:
                raise ValueError(
                    f"joins: the pattern {join.pattern!r} has no layer number and "
                    f"matches parameter {path!r}, which has no layer axis; expected a "
                    "pattern such as 'blocks/{i}/attn/q', or scanned layers"
                )
    return tuple(found)


def _joins_by_pattern(joins: Mapping[str, int], names: Sequence[str]) -> list[Join]:
    found = []
    for pattern, size in joins.items():
        expression = _expression(pattern)
        groups: dict[str, list[tuple[int, str]]] = {}
        for name in names:
            match = expression.fullmatch(f"/{name}/")
            if match and _NUMBER in pattern:
                start, stop = match.span("i")
                rest = match.string[:start] + _NUMBER + match.string[stop:]
                groups.setdefault(rest, []).append((int(match["i"]), name))
            elif match:
                groups[name] = [(0, name)]
        if not groups:
            raise ValueError(
                f"joins: the pattern {pattern!r} matches no matrix; there are "
                + ", ".join(names)
            )
        found += [Join(pattern, size, _ordered(group)) for group in groups.values()]
    return found


def _ordered(numbered: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(name for _, name in sorted(numbered))


def _expression(pattern: str) -> re.Pattern[str]:
    """`paths.matches` with {i} for a number: whole components, * for any text."""
    if pattern.count(_NUMBER) > 1:
        raise ValueError(
            f"joins: the pattern {pattern!r} has {_NUMBER} more than once; expected "
            "once, for the number of the layer"
        )
    expression = fnmatch.translate(f"*/{pattern}/*")
    return re.compile(expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)"))


def _joins_of_attention(size: int, parameters: Mapping[str, Parameter]) -> list[Join]:
    """Queries, keys and values: each kind over the innermost number that varies.

    The number of a module of attention comes last, and after an axis of layers: one
    layer may have two of them. A number by which shapes vary comes after all others,
    and the number of a projection such as `q2` is no layer.
    """
    groups: dict[str, list[tuple[int, str]]] = {}  # by the path without one number
    candidates: dict[str, list[str]] = {}  # the likeliest first
    for path, parameter in parameters.items():
        if parameter.role not in ("query", "key", "value"):
            continue
        layers = candidates.setdefault(path, [])
        numbers = reversed(list(re.finditer(r"\d+", path)))
        for match in sorted(numbers, key=_is_of_attention):
            own = tree.projection(path[: match.end()].rpartition("/")[2])
            if not own and not (_is_of_attention(match) and _axes(parameter).batch):
                rest = path[: match.start()] + _NUMBER + path[match.end() :]
                groups.setdefault(rest, []).append((int(match[0]), path))
                layers.append(rest)
    found: dict[str, tuple[str, ...]] = {}
    for path, layers in candidates.items():
        several = [rest for rest in layers if len(groups[rest]) > 1]
        several.sort(key=lambda x: len({parameters[p].shape for _, p in groups[x]}) > 1)
        if several:
            found[several[0]] = _ordered(groups[several[0]])
        elif _axes(parameters[path]).batch:
            found[path] = (path,)
        elif layers:  # the only layer
            found[layers[0]] = (path,)
    if not found:
        raise ValueError(
            f"joins={size}: no query, key or value of a numbered or scanned layer "
            "among " + ", ".join(parameters) + "; expected also a mapping, such as "
            "{'blocks/{i}/attn/q': 2}"
        )
    return [Join(rest, size, names) for rest, names in found.items()]


def _is_of_attention(number: re.Match[str]) -> bool:
    """True for the number of a module of attention, such as `SelfAttention_0`."""
    before = number.string[: number.start()].rpartition("/")[2]
    return paths.words(before)[-1:] in (["attention"], ["attn"])


def make_blocks(
    parameters: Sequence[Parameter],
    shapes: Sequence[tuple[int, ...]],
    joins: Sequence[Join] = (),
) -> list[Block]:
    """Which matrices are orthogonalized as one.

    Args:
      parameters: the leaves, in their order.
      shapes: of each leaf, or of one device's shard of it.
      joins: as `find_joins` returns them; leaves that are not among `parameters` are
        left out.

    Returns:
      Blocks that cover every matrix once.

    Raises:
      ValueError: with paths and shapes, for leaves of different shapes in one join.
    """
    counts = [
        [shape[axis] for axis in _axes(parameter).batch]
        for parameter, shape in zip(parameters, shapes, strict=True)
    ]
    index = {parameter.path: leaf for leaf, parameter in enumerate(parameters)}
    blocks: list[Block] = []
    for join in joins:
        members = [index.pop(path) for path in join.paths if path in index]
        if join.along_batch:
            for leaf in members:
                layers, *rest = counts[leaf]
                inner = math.prod(rest)
                stop, end = layers // join.size * join.size * inner, layers * inner
                blocks.append(Block((leaf,), join.size, 0, stop, inner))
                blocks.append(Block((leaf,), 1, stop, end))
            continue
        for first in range(0, len(members), join.size):
            group = members[first : first + join.size]
            count = math.prod(counts[group[0]])
            if len(group) == join.size:
                _check_alike(join.pattern, [parameters[leaf] for leaf in group])
                blocks.append(Block(tuple(group), join.size, 0, count))
            else:
                index |= {parameters[leaf].path: leaf for leaf in group}
    alone = [Block((leaf,), 1, 0, math.prod(counts[leaf])) for leaf in index.values()]
    blocks = [block for block in (*blocks, *alone) if block.batch]
    return sorted(blocks, key=lambda block: (block.leaves, block.start))


def _check_alike(pattern: str, group: Sequence[Parameter]) -> None:
    """Raise a ValueError for matrices that cannot be joined."""
    if len({(one.shape, one.axes, one.dtype) for one in group}) > 1:
        listed = ", ".join(f"{one.path!r} {one.shape} {one.dtype}" for one in group)
        raise ValueError(
            f"joins: the pattern {pattern!r} joins matrices of different "
            f"shapes or dtypes: {listed}; expected matrices of one shape"
        )


def _axes(parameter: Parameter) -> MatrixAxes:
    assert parameter.axes is not None
    return parameter.axes
