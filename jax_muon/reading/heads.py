"""One matrix for each attention head: `find_matrices(..., heads="apart")`."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax_muon.base import trees
from jax_muon.matrices.matrices import ADAMW, MatrixAxes, Parameter
from jax_muon.matrices.splits import Split


def heads_apart(
    parameters: Mapping[str, Parameter], splits: Collection[str]
) -> tuple[dict[str, Parameter], dict[str, Split]]:
    """The parameters with an axis of heads in their batch, and splits into other heads.

    Those that the patterns of `splits` match stay as they are. A ValueError names a
    query whose heads the loss does not show.
    """
    apart, head_splits = dict(parameters), dict[str, Split]()
    if not any(x.heads for x in parameters.values()):
        raise ValueError(
            "heads='apart': the loss shows no attention; use a loss in which a "
            "softmax of queries and keys weighs values, or heads='joined'"
        )
    for path, x in parameters.items():
        is_split = any(trees.matches(pattern, path) for pattern in splits)
        if x.label == ADAMW or x.axes is None or is_split or not x.heads:
            continue
        numbers = [number for _, _, number in x.heads if number > 1]
        if not numbers:
            if x.role in ("key", "value"):  # one head that all queries share
                continue
            raise ValueError(
                f"heads='apart': the loss shows no heads of parameter {path!r} of "
                f"shape {x.shape}; use splits={{{path!r}: Split.heads(number)}}, "
                "or heads='joined'"
            )
        for axis in {axis: None for axis, _, _ in x.heads}:
            parts = [(width, n) for a, width, n in x.heads if a == axis]
            if parts == [(x.shape[axis], x.shape[axis])]:
                x = dataclasses.replace(x, axes=_with_batch(x.axes, axis))
            elif max(n for _, n in parts) > 1:
                head_splits |= _splits(path, axis, parts)
        text = f"{x.reason}; heads apart: {', '.join(map(str, numbers))}"
        apart[path] = dataclasses.replace(x, reason=text)
    for path in [path for path in parameters if path in head_splits]:
        if others := [y for y in parameters if y != path and trees.matches(path, y)]:
            raise ValueError(
                f"heads='apart': the path {path!r} is a part of {others[0]!r}, so no "
                "pattern means it alone; use splits= for both, or other names"
            )
    return apart, head_splits


def _with_batch(axes: MatrixAxes, axis: int) -> MatrixAxes:
    """A kernel (in, heads, head): each head is a matrix (in, head).

    By rules, heads may be on either side, or in the batch already.
    """
    fan_in, fan_out = (
        tuple(a for a in side if a != axis) for side in (axes.reduction, axes.output)
    )
    return MatrixAxes(tuple(sorted({*axes.batch, axis})), fan_in, fan_out)


def _splits(path: str, axis: int, parts: Sequence[tuple[int, int]]) -> dict[str, Split]:
    """Splits of one axis into parts of a width, and of those into heads.

    A fused kernel (768, 1280) of 12, 4 and 4 heads becomes three parts, of 768, 256 and
    256, and those (12, 768, 64), (4, 768, 64) and (4, 768, 64).
    """
    if len(parts) == 1:
        return {path: Split.heads(parts[0][1], axis)}
    widths = {f"part_{i}": width for i, (width, _) in enumerate(parts)}
    head_splits = {
        f"{path}/{name}": Split.heads(number, axis)
        for name, (_, number) in zip(widths, parts, strict=True)
        if number > 1
    }
    return {path: Split(widths, axis), **head_splits}
