"""What to write where nothing shows how parameters are read: the text of errors.

Parameters are of one kind if their paths differ by numbers alone, as layers do.
"""

import math
import re
from collections.abc import Sequence

from jax_muon import trees
from jax_muon.axes import ADAMW, MUON, MatrixAxes, Parameter, not_a_matrix


def about(parameter: Parameter) -> str:
    """The doubt about one parameter, and the rules that resolve it."""
    return f"parameter {_line([parameter], [parameter])}"


def listed(doubtful: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """The doubts about some of the parameters, and what resolves them, a line a kind.

    Those of which nothing suggests a reading are in a mapping that the user fills in.
    """
    kinds: dict[object, list[Parameter]] = {}
    unread = []
    for x in doubtful:
        doubt = trees.numberless(str(x.doubt))
        if x.options or not_a_matrix(x.shape, x.dtype):
            kinds.setdefault((trees.numberless(x.path), x.shape, doubt), []).append(x)
        else:
            unread.append(x)
    text = []
    if kinds:
        lines = [_line(kind, parameters) for kind in kinds.values()]
        text = [
            f"{sum(map(len, kinds.values()))} of {len(parameters)} parameters cannot "
            "be read as matrices:",
            *(f"  {line}" for line in lines),
        ]
    if unread:
        text += [
            f"nothing says whether {len(unread)} of {len(parameters)} parameters are "
            "matrices; expected the loss, matrices=jax_muon.read(params, loss_fn, "
            f"batch), or a label for each, matrices={_choices(unread, parameters)}",
            f"{MUON!r} is a matrix (in, out), as in x @ w. MuonDimensionNumbers, from "
            "optax.contrib, names its axes: (-2, -1) in a stack of them, (-1, -2) if "
            "they are (out, in).",
        ]
    return "\n".join(text)


def _choices(unread: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """A mapping with a line for each kind of parameters, for the user to fill in.

    The first pattern that matches counts, so those that match the fewest come first.
    """
    kinds: dict[object, list[Parameter]] = {}
    for x in unread:
        kinds.setdefault((trees.numberless(x.path), x.shape), []).append(x)
    by_pattern: dict[str, list[Parameter]] = {}
    for kind in kinds.values():
        by_pattern.setdefault(_pattern(kind), []).extend(kind)
    named = {x.path for x in parameters}

    def matched(pattern: str) -> set[str]:
        if pattern in named:
            return {pattern}
        return {path for path in named if trees.matches(pattern, path)}

    matches = {pattern: matched(pattern) for pattern in by_pattern}
    patterns = sorted(by_pattern, key=lambda pattern: len(matches[pattern]))
    exact = {}  # what the pattern of another kind would take
    for x in unread:
        first = next(pattern for pattern in patterns if x.path in matches[pattern])
        if x not in by_pattern[first]:
            exact[x.path] = [x]
    lines = []
    for pattern in (*exact, *patterns):
        kind = exact.get(pattern) or by_pattern[pattern]
        is_stack = len(kind[0].shape) > 2
        matrix = "MuonDimensionNumbers(in, out)" if is_stack else MUON
        shapes = " and ".join(dict.fromkeys(str(x.shape) for x in kind))
        count = f", {len(kind)} of them" if len(kind) > 1 else ""
        lines.append(f"    {pattern!r}: '{ADAMW} or {matrix}',  # {shapes}{count}")
    return "\n".join(["{", *lines, "}"])


def _pattern(kind: Sequence[Parameter]) -> str:
    """The path that parameters of one kind share, with * for the numbers that vary."""
    pieces = zip(*(re.split(r"(\d+)", x.path) for x in kind), strict=True)
    return "".join(x[0] if len({*x}) == 1 else "*" for x in pieces)


def _line(kind: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """Path, shape and doubt of parameters of one kind, and rules for all of them."""
    first, pattern = kind[0], _pattern(kind)
    named = [x.path for x in kind]
    matched = {
        x.path
        for x in parameters
        if trees.matches(pattern, x.path) and not not_a_matrix(x.shape, x.dtype)
    }
    if matched <= {*named}:
        named = [pattern]
    offered = [*first.options, *(() if None in first.options else (None,))]
    if not_a_matrix(first.shape, first.dtype):
        offered = [None]
    rules = [
        "rules={" + ", ".join(f"{x!r}: {rule}" for x in named) + f"}}{meaning}"
        for rule, meaning in (_written(axes, first.shape) for axes in offered)
    ]
    others = f" and {len(kind) - 1} more of its kind" if len(kind) > 1 else ""
    return (
        f"{first.path!r} of shape {first.shape}{others}: {first.doubt}; expected "
        + ", or ".join(rules)
    )


def _written(axes: MatrixAxes | None, shape: Sequence[int]) -> tuple[str, str]:
    """A rule as a user writes it, and the matrices that it means."""
    if axes is None:
        return repr(ADAMW), ""
    count = math.prod(shape[axis] for axis in axes.batch)
    sides = [x if len(x) > 1 else x[0] for x in (axes.reduction, axes.output)]
    numbers = f"MuonDimensionNumbers({sides[0]}, {sides[1]})"
    return numbers, f" for {count} x {axes.fan(shape)}"
