"""What to write where nothing shows how parameters are read: the text of errors."""

import math
from collections.abc import Iterable, Sequence

from jax_muon import paths
from jax_muon.axes import ADAMW, MatrixAxes, Parameter, not_a_matrix


def about(parameter: Parameter) -> str:
    """The doubt about one parameter, and the rules that resolve it."""
    return f"parameter {_line([parameter], [parameter.path])}"


def listed(ambiguous: Sequence[Parameter], all_paths: Sequence[str]) -> str:
    """The doubts about all ambiguous parameters, a line for each kind.

    Parameters are of one kind if their paths differ by numbers alone, and their shapes
    and doubts not at all.
    """
    kinds: dict[object, list[Parameter]] = {}
    for parameter in ambiguous:
        doubt = paths.numberless(str(parameter.doubt))
        kind = paths.numberless(parameter.path), parameter.shape, doubt
        kinds.setdefault(kind, []).append(parameter)
    return "\n  ".join(_line(kind, all_paths) for kind in kinds.values())


def _line(kind: Sequence[Parameter], all_paths: Iterable[str]) -> str:
    """Path, shape and doubt of parameters of one kind, and rules for all of them."""
    first, same_kind = kind[0], [parameter.path for parameter in kind]
    where = first.path
    if len(kind) > 1:
        pattern = paths.numberless(where, "*")
        matched = [path for path in all_paths if paths.matches(pattern, path)]
        where = pattern if sorted(matched) == sorted(same_kind) else where
    others = f" and {len(kind) - 1} more of its kind" if len(kind) > 1 else ""
    offered = [*first.options, *(() if None in first.options else (None,))]
    if not_a_matrix(first.shape, first.dtype):
        offered = [None]
    (rule, meaning), *rest = (_written(axes, first.shape) for axes in offered)
    return (
        f"{first.path!r} of shape {first.shape}{others}: {first.doubt}; expected "
        f"rules={{{where!r}: {rule}}}{meaning}"
        + "".join(f", or {other}{meant}" for other, meant in rest)
    )


def _written(axes: MatrixAxes | None, shape: Sequence[int]) -> tuple[str, str]:
    """A rule as a user writes it, and the matrices that it means."""
    if axes is None:
        return repr(ADAMW), ""
    count = math.prod(shape[axis] for axis in axes.batch)
    sides = [x if len(x) > 1 else x[0] for x in (axes.reduction, axes.output)]
    numbers = f"MuonDimensionNumbers({sides[0]}, {sides[1]})"
    return numbers, f" for {count} x {axes.fan(shape)}"
