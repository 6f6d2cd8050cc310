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
    """Leaves whose matrices are joined `size` by `size`, in their order.

    Leaves with numbers of layers are joined with each other. A pattern without a number
    has one leaf, which is joined along its leading batch axis, of scanned layers. A
    remainder stays unjoined.
    """

    pattern: str
    size: int
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
    """Which of these matrices are joined: one `Join` for leaves of one kind.

    Raises:
      ValueError: with paths, for a pattern that matches nothing, or has no number and
        matches a leaf without a batch axis; a leaf that two patterns match.
    """
    if joins is None or not parameters:
        return ()
    if isinstance(joins, Mapping):
        found = [
            Join(pattern, size, own)
            for pattern, size in joins.items()
            for own in _leaves_of_pattern(pattern, parameters)
        ]
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
    return tuple(found)


def _leaves_of_pattern(
    pattern: str, parameters: Mapping[str, Parameter]
) -> list[tuple[str, ...]]:
    """Paths that a pattern matches, together if they differ in the number alone."""
    # `paths.matches`, with a number for {i}.
    expression = fnmatch.translate(f"*/{pattern}/*")
    expression = expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)", 1)
    groups: dict[str, list[tuple[int, str]]] = {}
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
            groups[path] = [(0, path)]
    if not groups:
        raise ValueError(
            f"joins: the pattern {pattern!r} matches no matrix; there are "
            + ", ".join(parameters)
        )
    return [_ordered(group) for group in groups.values()]


def _joins_of_attention(size: int, parameters: Mapping[str, Parameter]) -> list[Join]:
    """Queries, keys and values: each kind over the innermost number that varies.

    The number of a module of attention comes last, and after an axis of layers: one
    layer may have two of them. A number by which shapes vary comes after all others,
    and the number of a projection such as `q2` is no layer.
    """
    groups: dict[str, list[tuple[int, str]]] = {}  # by the path without one number
    numbers: dict[str, list[re.Match[str]]] = {}  # which may be that of the layer
    for path, parameter in parameters.items():
        if parameter.role not in ("query", "key", "value"):
            continue
        numbers[path] = []
        for match in re.finditer(r"\d+", path):
            own = tree.projection(path[: match.end()].rpartition("/")[2])
            if not own and not (_is_of_attention(match) and _batch(parameter)):
                groups.setdefault(_without(match), []).append((int(match[0]), path))
                numbers[path].append(match)

    def likelihood(match: re.Match[str]) -> tuple[bool, bool, bool, int]:
        shapes = [parameters[path].shape for _, path in groups[_without(match)]]
        alike = len(set(shapes)) == 1
        return len(shapes) > 1, alike, not _is_of_attention(match), match.start()

    found: dict[str, tuple[str, ...]] = {}
    for path, matches in numbers.items():
        layer = _without(max(matches, key=likelihood)) if matches else None
        if layer and (len(groups[layer]) > 1 or not _batch(parameters[path])):
            found[layer] = _ordered(groups[layer])
        elif _batch(parameters[path]):
            found[path] = (path,)
    if not found:
        raise ValueError(
            f"joins={size}: no query, key or value of a numbered or scanned layer "
            "among " + ", ".join(parameters) + "; expected such layers, or a mapping "
            "such as {'blocks/{i}/attn/q': 2}"
        )
    return [Join(pattern, size, own) for pattern, own in found.items()]


def _is_of_attention(number: re.Match[str]) -> bool:
    """True for the number of a module of attention, such as `SelfAttention_0`."""
    before = number.string[: number.start()].rpartition("/")[2]
    return paths.words(before)[-1:] in (["attention"], ["attn"])


def _without(match: re.Match[str], group: int | str = 0) -> str:
    """The text of a match with {i} in place of a number."""
    start, stop = match.span(group)
    return match.string[:start] + _NUMBER + match.string[stop:]


def _ordered(numbered: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(path for _, path in sorted(numbered))


def make_blocks(
    parameters: Sequence[Parameter],
    shapes: Sequence[tuple[int, ...]],
    joins: Sequence[Join] = (),
) -> list[Block]:
    """Blocks that cover every matrix of these leaves once.

    Args:
      parameters: the leaves, in their order.
      shapes: of each leaf, or of one device's shard of it.
      joins: as `find_joins` returns them, of these leaves and of others.

    Raises:
      ValueError: with paths and shapes, for leaves of different shapes in one join.
    """
    counts = [
        [shape[axis] for axis in _batch(parameter)]
        for parameter, shape in zip(parameters, shapes, strict=True)
    ]
    left = {parameter.path: leaf for leaf, parameter in enumerate(parameters)}
    blocks: list[Block] = []
    for join in joins:
        own = [path for path in join.paths if path in left]
        if _NUMBER not in join.pattern:  # along the batch of one leaf
            for leaf in map(left.pop, own):
                layers, *rest = counts[leaf]
                inner = math.prod(rest)
                stop, end = layers // join.size * join.size * inner, layers * inner
                blocks.append(Block((leaf,), join.size, 0, stop, inner))
                blocks.append(Block((leaf,), 1, stop, end))
            continue
        for first in range(0, len(own) - join.size + 1, join.size):
            leaves = [left.pop(path) for path in own[first : first + join.size]]
            group = [parameters[leaf] for leaf in leaves]
            if len({(one.shape, one.axes, one.dtype) for one in group}) > 1:
                raise ValueError(
                    f"joins: the pattern {join.pattern!r} joins matrices of different "
                    "shapes or dtypes: "
                    + ", ".join(f"{x.path!r} {x.shape} {x.dtype}" for x in group)
                    + "; expected matrices of one shape"
                )
            count = math.prod(counts[leaves[0]])
            blocks.append(Block(tuple(leaves), join.size, 0, count))
    blocks += [Block((leaf,), 1, 0, math.prod(counts[leaf])) for leaf in left.values()]
    some = (block for block in blocks if block.batch)
    return sorted(some, key=lambda block: (block.leaves, block.start))


def _batch(parameter: Parameter) -> tuple[int, ...]:
    return parameter.axes.batch if parameter.axes else ()
