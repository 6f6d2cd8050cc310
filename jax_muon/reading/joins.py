"""Joins: matrices of several layers that are orthogonalized as one (TEON)."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from jax_muon import checks, trees
from jax_muon.axes import Parameter
from jax_muon.blocks import Join, batch_of
from jax_muon.reading.projections import projection

# Path pattern to K, or K alone for all queries, keys and values; see `read`.
Joins = Mapping[str, int] | int

_NUMBER = "{i}"


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
    """Find the matrices that are joined; the first of two joins of one leaf counts.

    Raises:
      ValueError: with paths, for a pattern that matches nothing, or has no number and
        matches a leaf without a batch axis; leaves of different shapes in one join;
        fewer layers than K, so that nothing is joined.
    """
    if joins is None or not parameters:
        return ()
    if isinstance(joins, Mapping):
        resolved = [
            join
            for pattern, size in joins.items()
            for join in _joins_of_pattern(pattern, size, parameters)
        ]
    else:
        resolved = _joins_of_attention(joins, parameters)
    for join in resolved:
        group = [parameters[path] for path in join.paths]
        if len({(member.shape, member.axes, member.dtype) for member in group}) > 1:
            raise ValueError(
                "joins: these matrices have different shapes or dtypes: "
                + ", ".join(f"{x.path!r} {x.shape} {x.dtype}" for x in group)
                + "; expected matrices of one shape"
            )
    sizes = [joins] if isinstance(joins, int) else joins.values()
    if max(sizes, default=1) > 1 and not any(_joins(x, parameters) for x in resolved):
        raise ValueError(
            f"joins={joins!r} join nothing: the model has fewer layers; expected K of "
            "at most their number, or another recipe than teon"
        )
    return tuple(resolved)


def _joins(join: Join, parameters: Mapping[str, Parameter]) -> bool:
    """True if a join makes one matrix of several."""
    first = parameters[join.paths[0]]
    layers = first.shape[batch_of(first)[0]] if batch_of(first) else 1
    return 1 < join.size <= max(len(join.paths), layers)


def _joins_of_pattern(
    pattern: str, size: int, parameters: Mapping[str, Parameter]
) -> list[Join]:
    """Joins of paths that differ only in one number, or along each leaf's batch."""
    # `trees.matches`, with a number for {i}.
    expression = fnmatch.translate(f"*/{trees.slashed(pattern)}/*")
    expression = expression.replace(re.escape(_NUMBER), r"(?P<i>\d+)", 1)
    groups: dict[str, list[tuple[int, str]]] = {}
    scanned: list[Join] = []
    for path, parameter in parameters.items():
        match = re.fullmatch(expression, f"/{trees.slashed(path)}/")
        if match and _NUMBER in pattern:
            groups.setdefault(_without(match, "i"), []).append((int(match["i"]), path))
        elif match and not batch_of(parameter):
            raise ValueError(
                f"joins: the pattern {pattern!r} has no layer number and matches "
                f"parameter {path!r}, which has no layer axis; expected a pattern such "
                "as 'blocks/{i}/attn/q', or scanned layers"
            )
        elif match:
            scanned.append(Join(size, (path,)))
    if not groups and not scanned:
        raise ValueError(
            f"joins: the pattern {pattern!r} matches no matrix; there are "
            + ", ".join(parameters)
        )
    return [
        *scanned,
        *(join for numbered in groups.values() for join in _cut(size, numbered)),
    ]


def _joins_of_attention(size: int, parameters: Mapping[str, Parameter]) -> list[Join]:
    """Queries, keys and values of one shape: over the innermost number that varies.

    A number in an attention module's name (`SelfAttention_0`) is considered last, and
    not at all beside an axis of layers, since one layer may contain two; a projection's
    own number (`q2`) never identifies a layer.
    """
    groups: dict[Any, list[tuple[int, str]]] = {}  # by shape, and path but one number
    layers: dict[str, list[Any]] = {}  # the groups of a path, the most likely one last
    for path, parameter in parameters.items():
        if parameter.role not in ("query", "key", "value"):
            continue
        numbers = [
            match
            for match in re.finditer(r"\d+", trees.slashed(path))
            if not projection(match.string[: match.end()].rpartition("/")[2])
            and not (_is_of_attention(match) and batch_of(parameter))
        ]
        numbers.sort(key=lambda match: (not _is_of_attention(match), match.start()))
        layers[path] = [(_without(match), parameter.shape) for match in numbers]
        for match, group in zip(numbers, layers[path], strict=True):
            groups.setdefault(group, []).append((int(match[0]), path))
    if not groups and not any(batch_of(parameters[path]) for path in layers):
        raise ValueError(
            f"joins={size}: no query, key or value of a numbered or scanned layer "
            "among " + ", ".join(parameters) + "; expected such layers, read by the "
            "loss, which shows them, or a mapping such as {'blocks/{i}/attn/q': 2}"
        )
    by_group: dict[Any, list[Join]] = {}
    for path, candidates in layers.items():
        varying = [group for group in candidates if len(groups[group]) > 1]
        if varying:
            by_group[varying[-1]] = _cut(size, groups[varying[-1]])
        elif batch_of(parameters[path]):
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
