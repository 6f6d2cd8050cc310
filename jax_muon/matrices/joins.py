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

from jax_muon.base import checks, trees
from jax_muon.matrices.matrices import ADAMW, Join, Matrices, Parameter
from jax_muon.matrices.splits import projection, read_parts

# Path pattern to K >= 2, or K alone for all queries, keys and values.
Joins = Mapping[str, int] | int

# Maps batches of matrices (batch, in, out) to their polar factors.
Factors = Callable[[list[Array]], list[Array]]

_NUMBER = "{i}"


@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices of one or several leaves, joined K at a time.

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
    joins: Sequence[Join], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[Joined]:
    """Which matrices of these leaves (..., in, out) are one: each matrix once.

    A join with a leaf that is not here, or in a join before it, joins nothing. `shapes`
    may be of one device's shards.
    """
    counts = [shape[:-2] for shape in shapes]
    left = {name: leaf for leaf, name in enumerate(names)}
    found: list[Joined] = []
    for join in joins:
        if not left.keys() >= {*join.paths}:
            continue
        leaves = tuple(left.pop(path) for path in join.paths)
        count = math.prod(counts[leaves[0]])
        if len(leaves) > 1:
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
    factors: Factors, joined: Sequence[Joined], leaves: Sequence[Float[Array, "*b _ _"]]
) -> list[Float[Array, "*b _ _"]]:
    """Leaves after a function of all joined matrices, which cover every matrix."""
    stacks = [x.reshape(-1, *x.shape[-2:]) for x in leaves]
    results = factors([x.view(stacks) for x in joined])
    parts: list[list[Array]] = [[] for _ in leaves]  # of each leaf, along its batch
    for x, result in zip(joined, results, strict=True):
        for leaf, part in zip(x.leaves, x.undo(result), strict=True):
            parts[leaf].append(part)
    return [
        jnp.concatenate(pieces).reshape(x.shape).astype(x.dtype)
        for x, pieces in zip(leaves, parts, strict=True)
    ]


def map_stacks(
    function: Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function of stacks (k, m, n), one matrix independent of another.

    Single matrices of one shape share a stack: few programs are compiled, and all cores
    of an accelerator have work. For a batch of several a copy costs more than it saves.
    Batches (1, 768, 768), (12, 768, 3072), (1, 768, 768) become the stacks
    (2, 768, 768) and (12, 768, 3072).
    """
    by_shape: dict[object, list[int]] = {}
    for index, x in enumerate(batches):
        key = (x.shape, x.dtype) if len(x) == 1 else index
        by_shape.setdefault(key, []).append(index)
    results: dict[int, Array] = {}
    for indices in by_shape.values():
        stacks = [batches[index] for index in indices]
        expected = sum(map(len, stacks)), *stacks[0].shape[1:]
        if hasattr(function, "from_stacks"):
            result = function.from_stacks(stacks)
        else:
            result = function(jnp.concatenate(stacks))
        shape = getattr(result, "shape", None)
        dtype: Any = getattr(result, "dtype", None)
        if shape != expected or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"polar={function!r} made {dtype} of shape {shape} out of "
                f"{stacks[0].dtype} of shape {expected}; expected a function whose "
                "result has the shape of its argument, in real floating point"
            )
        parts = jnp.split(result, len(indices)) if indices[1:] else [result]
        results |= zip(indices, parts, strict=True)
    return [results[index] for index in range(len(batches))]


# --- which matrices are joined --------------------------------------------------------


def with_joins(matrices: Matrices, joins: Joins | None) -> Matrices:
    """The same parameters with other joins; a ValueError for some that join nothing."""
    parts = read_parts(matrices.parameters, matrices.splits)  # which checks the splits
    if joins is None:
        return matrices
    patterns: Any = joins if isinstance(joins, Mapping) else {None: joins}
    left = {path: x for path, x in parts.items() if x.axes and x.label != ADAMW}
    found: list[Join] = []
    for size in patterns.values():
        checks.check_count(f"joins={joins!r}: K", size, least=2)
    for pattern, size in patterns.items() if left else ():
        numbers = {path: _layer_numbers(pattern, x) for path, x in left.items()}
        layers = {path: spans for path, spans in numbers.items() if spans is not None}
        in_batch = pattern is None or _NUMBER not in pattern
        made = _joins(size, layers, left, in_batch)
        if not made:
            by_role = "query, key or value that a loss shows"
            raise ValueError(
                f"joins={joins!r} join no "
                + (by_role if pattern is None else f"match of {pattern!r}")
                + f" among {', '.join(left)}; expected {size} layers or more of one "
                "shape and dtype: numbered, as in 'blocks/{i}/attn/q', or scanned; or "
                "another recipe than teon"
            )
        found += made
        left = {path: x for path, x in left.items() if path not in layers}
    return dataclasses.replace(matrices, joins=tuple(found))


def _joins(
    size: int,
    layers: Mapping[str, Sequence[tuple[int, int]]],
    members: Mapping[str, Parameter],
    in_batch: bool,
) -> list[Join]:
    """Join each `size` successive layers of one shape; the remaining ones stay single.

    Layers differ in the last of these numbers of their paths that varies. Without one,
    `in_batch`, they are the leading axis of a scanned parameter. With size 2, layers
    blocks/0/q to blocks/4/q make (0, 1) and (2, 3), and 4 stays single.
    """
    # By shape, and path but one number: ("/blocks/", "/q/", (768, 768), ...).
    groups: dict[object, list[tuple[int, str]]] = {}
    keys: dict[str, list[object]] = {}  # the groups of a path
    for path, spans in layers.items():
        text, x = _text(path), members[path]
        of = x.shape, x.axes, x.dtype
        keys[path] = [(text[:start], text[stop:], *of) for start, stop in spans]
        for (start, stop), key in zip(spans, keys[path], strict=True):
            groups.setdefault(key, []).append((int(text[start:stop]), path))
    found: dict[object, list[Join]] = {}
    for path, candidates in keys.items():
        varying = [key for key in candidates if len(groups[key]) > 1]
        axes = members[path].axes
        batch = axes.batch if axes else ()
        if varying:
            ordered = [path for _, path in sorted(groups[varying[-1]])]
            found[varying[-1]] = [
                Join(size, tuple(ordered[at : at + size]))
                for at in range(0, len(ordered) - size + 1, size)
            ]
        elif in_batch and batch and members[path].shape[batch[0]] >= size:
            found[path] = [Join(size, (path,))]
    return [join for joins in found.values() for join in joins]


def _text(path: str) -> str:
    return f"/{trees.slashed(path)}/"


def _layer_numbers(pattern: str | None, x: Parameter) -> list[tuple[int, int]] | None:
    """Where a path has numbers that may be its layer, or None if nothing matches.

    With a pattern it is the number at {i}. Without one, a query, key or value has its
    layer in the innermost number that varies: of blocks/11/attn/q that is 11, (8, 10).
    The number of a module of attention comes first, since a layer may have two of them,
    and does not count beside an axis of layers; that of a projection, `q2`, never does.
    """
    text = _text(x.path)
    if pattern is not None:
        # `trees.matches`, with a number for {i}.
        expression = fnmatch.translate(f"*{_text(pattern)}*")
        expression = expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)", 1)
        match = re.fullmatch(expression, text)
        return match and ([match.span("i")] if _NUMBER in pattern else [])
    if x.role not in ("query", "key", "value"):
        return None
    numbers = [
        match
        for match in re.finditer(r"\d+", text)
        if not projection(text[: match.end()].rpartition("/")[2])
        and not (_is_of_attention(match) and x.axes and x.axes.batch)
    ]
    numbers.sort(key=lambda match: (not _is_of_attention(match), match.start()))
    return [match.span() for match in numbers]


def _is_of_attention(number: re.Match[str]) -> bool:
    """True for the number of a module of attention, such as `SelfAttention_0`."""
    before = number.string[: number.start()].rpartition("/")[2]
    return trees.words(before)[-1:] in (["attention"], ["attn"])
