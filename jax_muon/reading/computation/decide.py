"""From the uses of a parameter to its reading: label, role, axes, and why."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax_muon import trees
from jax_muon.matrices import ADAMW, MUON, MatrixAxes, Parameter, not_a_matrix
from jax_muon.reading.computation.follow import SUMS, Follower
from jax_muon.reading.computation.roles import CONSTANT, INNER, matrix_axes
from jax_muon.reading.computation.values import Use

_PRODUCTS = ("contracted", "convolved", "grouped", "depthwise")  # kinds of uses


def parameter(path: str, leaf: Any, follower: Follower, is_split: bool) -> Parameter:
    """How a leaf is read, by its uses; with a doubt, if they do not decide.

    The reason says if a kernel holds several products side by side, unless `is_split`.
    """
    shape, uses = tuple(leaf.shape), follower.uses[path]
    label, role, reason, axes = _decide(shape, uses)
    if not_a_matrix(shape, leaf.dtype):
        label, role, axes = ADAMW, "vector" if label == MUON else role, None
    elif role == "kernel" and "router" in trees.words(path):
        label, role, reason = ADAMW, "router", f"a router, by its name; {reason}"
    elif label == MUON and not is_split:
        reason += _side_by_side(path, shape, uses) or _stacked(path, role, axes)
    scanned = {x for x in follower.scanned[path] if axes is None or x in axes.batch}
    by = path, shape, leaf.dtype, label, role, reason, axes
    read = Parameter(*by, scanned=tuple(sorted(scanned)))
    return _with_doubt(read, reason) if label == MUON and axes is None else read


def _with_doubt(x: Parameter, doubt: str) -> Parameter:
    *batch, fan_in, fan_out = range(len(x.shape))
    options = (MatrixAxes((*batch,), (fan_in,), (fan_out,)),)
    return replace(x, label=MUON, doubt=doubt, options=options)


def doubted(x: Parameter, follower: Follower) -> Parameter:
    """With a doubt, if constants or other parameters were multiplied by it."""
    roles = [x for use in follower.uses[x.path] for x in use.roles.values()]
    inside = {INNER, CONSTANT} & {role for of_axis in roles for role in of_axis}
    if x.role != "elementwise" or len(x.shape) < 2 or not inside:
        return x
    doubt = "nothing but parameters and constants is multiplied by it"
    return _with_doubt(replace(x, role="unknown"), doubt)


def with_agreeing_layers(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Make the head of one layer a kernel, if it is a kernel in other layers.

    A function that ends before the model's head, such as an encoder, has its last
    kernels as its last products.
    """

    def kind(x: Parameter) -> Any:
        return trees.numberless(x.path), x.shape

    def agree(x: Parameter) -> Parameter:
        other = kernels.get(kind(x))
        if x.role != "head" or other is None:
            return x
        reason = f"{x.reason}, and like {other.path!r}"
        return replace(x, label=MUON, role=other.role, reason=reason)

    kernels = {kind(x): x for x in parameters if x.label == MUON}
    return [agree(x) for x in parameters]


def _decide(
    shape: tuple[int, ...], uses: Sequence[Use]
) -> tuple[str, str, str, MatrixAxes | None]:
    """Label, role, reason and axes.

    A matrix without axes is undecided: its role is "unknown", or "contradictory".
    """

    def at(*kinds: str) -> str:
        lines = [use.line for use in uses if use.kind in kinds and use.line]
        return f" at {', '.join([*dict.fromkeys(lines)][:3])}" if lines else ""

    kinds = {use.kind for use in uses}
    if not uses:
        return ADAMW, "unused", "the result does not depend on it", None
    is_expert = any(use.of_picked and use.kind == "contracted" for use in uses)
    if "picked" in kinds and not is_expert:
        return ADAMW, "embedding", f"rows picked by integers{at('picked')}", None
    products = [use for use in uses if use.kind in _PRODUCTS]
    products = [use for use in products if not use.is_gradient] or products
    products.sort(key=lambda use: use.rows == 1)  # last, as in a power iteration
    if not products and "opaque" in kinds:
        names = {use.primitive: None for use in uses if use.kind == "opaque"}
        return MUON, "unknown", f"it goes into {', '.join(names)}{at('opaque')}", None
    if not products:
        return ADAMW, "elementwise", f"elementwise{at('elementwise')}", None
    where, first = at(*_PRODUCTS), products[0]
    if first.kind in ("grouped", "depthwise"):
        return ADAMW, first.kind, f"a {first.kind} convolution{where}", None
    if first.is_complex:
        return ADAMW, "complex", f"a product of complex numbers{where}", None
    readings = [matrix_axes(shape, use.roles) for use in products]
    known = [x for x in readings if isinstance(x, MatrixAxes)]
    if not known:
        return MUON, "unknown", f"{readings[0]}{where}", None
    axes = known[0]
    either = axes, MatrixAxes(axes.batch, axes.output, axes.reduction)
    if others := [x for x in known if x not in either]:
        both = f"{_text(axes)} and as {_text(others[0])}"
        return MUON, "contradictory", f"it is used as {both}{where}", None
    plural = "axis" if len(axes.reduction) == 1 else "axes"
    over = f" over {plural} {', '.join(map(str, axes.reduction))}"
    reason = f"{first.kind}{over * bool(axes.reduction)}{where}"
    if 1 in axes.fan(shape):
        return ADAMW, "vector", f"one row or column, {reason}", axes
    if all(map(_is_table_of_keys, products)):
        reason = f"a table that queries are compared with{where}"
        return ADAMW, "embedding", reason, axes
    if any(_is_norm(use, axes) for use in uses if use.primitive in SUMS):
        return ADAMW, "centers", f"its rows' distances to data are taken{where}", axes
    if any(use.chooses for use in products):
        return ADAMW, "router", f"a top-k chooses among its outputs{where}", axes
    if not any(use.feeds for use in uses):
        return ADAMW, "head", f"last product before the result{where}", axes
    roles = {x.role for use in products for x in use.outputs.values()} - {""}
    kernel = "convolution" if first.kind == "convolved" else "kernel"
    if len(roles) > 1 or roles == {"gated"}:
        return MUON, "fused", reason, axes
    return MUON, roles.pop() if roles else kernel, reason, axes


def _is_table_of_keys(use: Use) -> bool:
    """True for the product of attention's queries with a leaf."""
    outputs = [x for before in use.inputs for x in before.outputs.values()]
    roles = {x.role for x in outputs} - {""}
    has_roles = any(x.role for x in use.outputs.values())
    of_constants = {CONSTANT} in use.roles.values()
    return roles in ({"query"}, {"key"}) and not has_roles and not of_constants


def _is_norm(use: Use, axes: MatrixAxes) -> bool:
    """True for a sum over the inputs of a matrix, such as the norms of its outputs."""
    summed = not any(use.roles.get(axis) for axis in axes.reduction)
    return summed and use.left == {*axes.output}


def _text(axes: MatrixAxes) -> str:
    return f"in={axes.reduction}, out={axes.output}, batch={axes.batch}"


def _stacked(path: str, role: str, axes: MatrixAxes | None) -> str:
    """What to say of a kernel that may be a stack of matrices with one input, or ""."""
    if axes is None or role != "kernel" or len(axes.output) < 2:
        return ""
    if axes.output[0] > axes.reduction[0]:
        return ""
    first, *others = axes.output
    sides = [x[0] if len(x) == 1 else (*x,) for x in (axes.reduction, others)]
    numbers = f"MuonDimensionNumbers({sides[0]}, {sides[1]})"
    return f"; if axis {first} is a stack: rules={{{path!r}: {numbers}}}"


def _side_by_side(path: str, shape: Sequence[int], uses: Iterable[Use]) -> str:
    """What to say of a kernel whose outputs are split, or ""."""
    roles: dict[int, dict[tuple[int, int], str]] = {}
    for x in (x for use in uses for x in use.outputs.values()):
        if x.axis is not None:
            parts = roles.setdefault(x.axis, {})
            parts[x.start, x.stop] = x.role or parts.get((x.start, x.stop), "")
    for axis, parts in sorted(roles.items()):
        starts, stops = zip(*sorted(parts), strict=True)
        names = [parts[part] for part in sorted(parts)]
        widths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        told_apart = len({*names}) > 1 or names[0] == "gated"
        if (*starts, shape[axis]) == (0, *stops) and told_apart:
            split: Any = len(names)  # equal parts
            if "" not in names and len({*names}) == len(names):
                split = dict(zip(names, widths, strict=True))
            elif len({*widths}) > 1:
                split = {f"part_{i}": width for i, width in enumerate(widths)}
            last = "" if axis == len(shape) - 1 else f", axis={axis}"
            pattern = re.sub(r".*/\d+/", "", path)  # of all layers
            return (
                f"; its outputs are split into {len(names)} parts: "
                f"splits={{{pattern!r}: Split({split}{last})}}"
            )
    return ""
