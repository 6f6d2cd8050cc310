"""Matrices that become one array: joined along their inputs (TEON), or in a stack.

K matrices (in, out) side by side along `in` are one matrix (K in, out), for the polar
factor alone. A matrix that is joined to nothing is one of K = 1.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon import checks, trees
from jax_muon.matrices import ADAMW, Join, Matrices, Parameter
from jax_muon.splits import projection, read_parts

# Path pattern to K, or K alone for all queries, keys and values; see `read`.
Joins = Mapping[str, int] | int

# Maps batches of matrices (batch, in, out) to their polar factors.
Factors = Callable[[list[Array]], list[Array]]

_NUMBER = "{i}"


@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices of one or several leaves, K of which make one.

    Several leaves give one matrix each, all of their batch. One leaf gives the matrices
    from `start` to `stop` of its batch; the next matrix of the same join is `inner`
    places further: scanned layers (layers, heads, in, out) have inner = heads.
    """

    leaves: tuple[int, ...]
    size: int  # K
    start: int
    stop: int
    inner: int = 1

    @property
    def batch(self) -> int:
        """Number of matrices after joining."""
        return len(self.leaves) * (self.stop - self.start) // self.size

    def view(
        self, views: Sequence[Float[Array, "_ _ _"]]
    ) -> Float[Array, "batch joined_in out"]:
        """The joined matrices, from the views (batch, in, out) of all leaves."""
        if len(self.leaves) > 1:
            return jnp.concatenate([views[leaf] for leaf in self.leaves], axis=1)
        part = views[self.leaves[0]][self.start : self.stop]
        if self.size == 1:
            return part
        _, fan_in, fan_out = part.shape
        grid = part.reshape(-1, self.size, self.inner, fan_in, fan_out)
        return grid.swapaxes(1, 2).reshape(self.batch, -1, fan_out)

    def undo(
        self, joined: Float[Array, "batch joined_in out"]
    ) -> list[Float[Array, "_ _ _"]]:
        """The matrices (stop - start, in, out) of each leaf."""
        if self.size == 1:
            return [joined]
        if len(self.leaves) > 1:
            return jnp.split(joined, self.size, axis=1)
        _, width, fan_out = joined.shape
        grid = joined.reshape(-1, self.inner, self.size, width // self.size, fan_out)
        return [grid.swapaxes(1, 2).reshape(self.stop - self.start, -1, fan_out)]


def joined_matrices(
    matrices: Matrices, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[Joined]:
    """Which matrices of these parameters are orthogonalized as one: each matrix once.

    A join with a leaf that is not here, or in a join before it, joins nothing. `shapes`
    may be those of one device's shards.
    """
    counts = [
        [shape[axis] for axis in matrices.axes(name).batch]
        for name, shape in zip(names, shapes, strict=True)
    ]
    left = {name: leaf for leaf, name in enumerate(names)}
    found: list[Joined] = []
    for join in matrices.joins or ():
        if not left.keys() >= {*join.paths}:
            continue
        leaves = tuple(left.pop(path) for path in join.paths)
        count = math.prod(counts[leaves[0]])
        if len(leaves) == join.size:
            found.append(Joined(leaves, join.size, 0, count))
        else:  # along the batch
            layers, *rest = counts[leaves[0]]
            inner = math.prod(rest)
            stop = layers // join.size * join.size * inner
            found.append(Joined(leaves, join.size, 0, stop, inner))
            found.append(Joined(leaves, 1, stop, count))
    found += [Joined((leaf,), 1, 0, math.prod(counts[leaf])) for leaf in left.values()]
    return sorted((x for x in found if x.batch), key=lambda x: (x.leaves, x.start))


def map_joined(
    factors: Factors, joined: Sequence[Joined], views: Sequence[Float[Array, "_ _ _"]]
) -> list[Float[Array, "_ _ _"]]:
    """Views after a function of all joined matrices, which cover every matrix."""
    results = factors([x.view(views) for x in joined])
    parts: list[list[Array]] = [[] for _ in views]  # of each leaf, along its batch
    for x, result in zip(joined, results, strict=True):
        for leaf, part in zip(x.leaves, x.undo(result), strict=True):
            parts[leaf].append(part)
    return [jnp.concatenate(pieces) for pieces in parts]


def map_stacks(
    function: Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function of stacks (k, m, n), one matrix independent of another.

    Single matrices of one shape share a stack: few programs are compiled, and all cores
    of an accelerator have work. For a batch of several a copy costs more than it saves.
    """
    by_shape: dict[Any, list[int]] = {}
    for index, x in enumerate(batches):
        key = (x.shape, x.dtype) if len(x) == 1 else index
        by_shape.setdefault(key, []).append(index)
    results: dict[int, Array] = {}
    for indices in by_shape.values():
        stack = jnp.concatenate([batches[index] for index in indices])
        result = function(stack)
        shape = getattr(result, "shape", None)
        dtype: Any = getattr(result, "dtype", None)
        if shape != stack.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"polar={function!r} made {dtype} of shape {shape} out of "
                f"{stack.dtype} of shape {stack.shape}; expected a function whose "
                "result has the shape of its argument, in real floating point"
            )
        parts = jnp.split(result, len(indices)) if indices[1:] else [result]
        results |= zip(indices, parts, strict=True)
    return [results[index] for index in range(len(batches))]


# --- which matrices are joined --------------------------------------------------------


def check_joins(joins: Any) -> None:
    """Raise a ValueError unless joins are K or a mapping of path patterns to K."""
    if isinstance(joins, Mapping):
        expected = "a mapping of path patterns to K"
        checks.mapping("joins", joins, expected, checks.count)
    elif joins is not None:
        checks.count("joins", joins)


def with_joins(matrices: Matrices, joins: Joins | None) -> Matrices:
    """The same parameters with other joins; a ValueError for some that do not fit."""
    parts = read_parts(matrices, matrices.splits)
    members = {
        path: parameter
        for path, parameter in parts.items()
        if parameter.axes is not None and parameter.label != ADAMW
    }
    if joins is None or not members:
        return dataclasses.replace(matrices, joins=None if joins is None else ())
    if isinstance(joins, Mapping):
        found = []
        for pattern, size in joins.items():
            found += _joins_of_pattern(pattern, size, members)
    else:
        found = _joins_of_attention(joins, members)
    for join in found:
        group = [members[path] for path in join.paths]
        if len({(x.shape, x.axes, x.dtype) for x in group}) > 1:
            raise ValueError(
                "joins: these matrices have different shapes or dtypes: "
                + ", ".join(f"{x.path!r} {x.shape} {x.dtype}" for x in group)
                + "; expected matrices of one shape"
            )
    sizes = [joins] if isinstance(joins, int) else joins.values()
    if max(sizes, default=1) > 1 and not any(_joins(x, members) for x in found):
        raise ValueError(
            f"joins={joins!r} join nothing: the model has fewer layers; expected K of "
            "at most their number, or another recipe than teon"
        )
    return dataclasses.replace(matrices, joins=tuple(found))


def _joins(join: Join, members: Mapping[str, Parameter]) -> bool:
    """True if a join makes one matrix of several."""
    first = members[join.paths[0]]
    layers = first.shape[_batch(first)[0]] if _batch(first) else 1
    return 1 < join.size <= max(len(join.paths), layers)


def _batch(parameter: Parameter) -> tuple[int, ...]:
    assert parameter.axes is not None
    return parameter.axes.batch


def _joins_of_pattern(
    pattern: str, size: int, members: Mapping[str, Parameter]
) -> list[Join]:
    """Joins of paths that differ only in one number, or along each leaf's batch."""
    # `trees.matches`, with a number for {i}.
    expression = fnmatch.translate(f"*/{trees.slashed(pattern)}/*")
    expression = expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)", 1)
    groups: dict[str, list[tuple[int, str]]] = {}
    found: list[Join] = []
    for path, parameter in members.items():
        match = re.fullmatch(expression, f"/{trees.slashed(path)}/")
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
            + ", ".join(members)
        )
    for numbered in groups.values():
        found += _cut(size, numbered)
    return found


def _joins_of_attention(size: int, members: Mapping[str, Parameter]) -> list[Join]:
    """Queries, keys and values of one shape: over the innermost number that varies.

    The number of a module of attention, of which a layer may have two, is considered
    last, and not at all beside an axis of layers; a projection's own (`q2`) never is.
    """
    groups: dict[Any, list[tuple[int, str]]] = {}  # by shape, and path but one number
    layers: dict[str, list[Any]] = {}  # the groups of a path, the most likely one last
    for path, parameter in members.items():
        if parameter.role not in ("query", "key", "value"):
            continue
        numbers = [
            match
            for match in re.finditer(r"\d+", trees.slashed(path))
            if not projection(match.string[: match.end()].rpartition("/")[2])
            and not (_is_of_attention(match) and _batch(parameter))
        ]
        numbers.sort(key=lambda match: (not _is_of_attention(match), match.start()))
        layers[path] = [(_without(match), parameter.shape) for match in numbers]
        for match, group in zip(numbers, layers[path], strict=True):
            groups.setdefault(group, []).append((int(match[0]), path))
    if not groups and not any(_batch(members[path]) for path in layers):
        raise ValueError(
            f"joins={size}: no query, key or value of a numbered or scanned layer "
            "among " + ", ".join(members) + "; expected such layers, read by the "
            "loss, which shows them, or a mapping such as {'blocks/{i}/attn/q': 2}"
        )
    by_group: dict[Any, list[Join]] = {}
    for path, candidates in layers.items():
        varying = [group for group in candidates if len(groups[group]) > 1]
        if varying:
            by_group[varying[-1]] = _cut(size, groups[varying[-1]])
        elif _batch(members[path]):
            by_group[path] = [Join(size, (path,))]
    return [join for joins in by_group.values() for join in joins]


def _cut(size: int, numbered: list[tuple[int, str]]) -> list[Join]:
    """Join each `size` successive layers; the remaining ones stay single."""
    ordered = [path for _, path in sorted(numbered)]
    stop = len(ordered) // size * size
    joined = [Join(size, tuple(ordered[at : at + size])) for at in range(0, stop, size)]
    return joined + [Join(1, (path,)) for path in ordered[stop:]]


def _is_of_attention(number: re.Match[str]) -> bool:
    """True for the number of a module of attention, such as `SelfAttention_0`."""
    before = number.string[: number.start()].rpartition("/")[2]
    return trees.words(before)[-1:] in (["attention"], ["attn"])


def _without(match: re.Match[str], group: int | str = 0) -> str:
    """The text of a match with {i} in place of a number."""
    start, stop = match.span(group)
    return match.string[:start] + _NUMBER + match.string[stop:]
