"""From the uses of a parameter to its reading: label, role, axes, and why."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax_muon import axes as matrix_axes
from jax_muon.axes import ADAMW, MUON, MatrixAxes, Parameter
from jax_muon.reading.computation.follow import Follower
from jax_muon.reading.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    PART,
    Roles,
    Use,
)

# Uses that make a leaf a kernel.
_PRODUCTS = ("contracted", "convolved", "grouped", "depthwise")
# Role and words for a leaf that is no matrix, by the kind of its products.
_NO_MATRIX = {
    "depthwise": ("depthwise", "a depthwise convolution"),
    "grouped": ("grouped", "a grouped convolution"),
}


def parameter(path: str, leaf: Any, follower: Follower, is_split: bool) -> Parameter:
    """How a leaf is read, by its uses; with a doubt, if they do not decide.

    A kernel with several products side by side is said to be one, unless `is_split`.
    """
    shape, uses = tuple(leaf.shape), follower.uses[path]
    label, role, reason, axes = _decide(shape, uses)
    doubt, options = None, ()
    if matrix_axes.not_a_matrix(shape, leaf.dtype):
        label, role, axes = ADAMW, "vector" if label == MUON else role, None
    elif label == MUON and axes is None:
        *batch, fan_in, fan_out = range(len(shape))
        doubt, options = reason, (MatrixAxes((*batch,), (fan_in,), (fan_out,)),)
    elif label == MUON and not is_split:
        reason += _side_by_side(path, shape, uses)
    scanned = tuple(sorted(follower.scanned[path]))
    return Parameter(
        path, shape, leaf.dtype, label, role, reason, axes, doubt, options, scanned
    )


def _side_by_side(path: str, shape: Sequence[int], uses: Iterable[Use]) -> str:
    """What to say of a kernel whose outputs are split, or ""."""
    slices = [x for use in uses for x in use.outputs.values() if x.axis is not None]
    for axis in {x.axis for x in slices}:
        roles = {(x.start, x.stop): x.role for x in slices if x.axis == axis}
        for x in slices:
            if x.axis == axis and x.role:
                roles[x.start, x.stop] = x.role
        parts = sorted(roles)
        starts, stops = zip(*parts, strict=True)
        is_whole = (*starts, shape[axis]) == (0, *stops)
        known = {*roles.values()} - {""}
        if is_whole and (len(known) > 1 or "gated" in known):
            names = [roles[part] for part in parts]
            if len({*names} - {"", "gated"}) < len(names):
                names = [f"part_{i}" for i in range(len(names))]
            widths = [stop - start for start, stop in parts]
            split: Any = tuple(names)
            if len({*widths}) > 1:
                split = dict(zip(names, widths, strict=True))
            last = "" if axis == len(shape) - 1 else f", axis={axis}"
            return (
                f"; its outputs are split into {len(parts)} parts: "
                f"splits={{{path!r}: Split({split}{last})}}"
            )
    return ""


def agreeing(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The same, but a head that is a kernel in other layers is one here, too.

    A function that ends before the model's head, such as an encoder, has its last
    kernels as its last products.
    """

    def kind(x: Parameter) -> Any:
        return re.sub(r"\d+", "0", x.path), x.shape

    kernels = {kind(x): x for x in parameters if x.label == MUON}
    return [
        dataclasses.replace(
            x,
            label=MUON,
            role=kernels[kind(x)].role,
            reason=f"{x.reason}, and like {kernels[kind(x)].path!r}",
        )
        if x.role == "head" and kind(x) in kernels
        else x
        for x in parameters
    ]


def _decide(
    shape: tuple[int, ...], uses: Sequence[Use]
) -> tuple[str, str, str, MatrixAxes | None]:
    """Label, role, reason and axes; a matrix without axes is undecided."""

    def at(*kinds: str) -> str:
        lines = dict.fromkeys(
            use.line for use in uses if use.kind in kinds and use.line
        )
        return f" at {', '.join([*lines][:3])}" if lines else ""

    def undecided(reason: str) -> Any:
        return MUON, "unknown", reason, None

    kinds = {use.kind for use in uses}
    if not uses:
        return ADAMW, "unused", "the result does not depend on it", None
    picked = "picked" in kinds
    if picked and not any(x.is_picked and x.kind == "contracted" for x in uses):
        return ADAMW, "embedding", f"rows picked by integers{at('picked')}", None
    products = [use for use in uses if use.kind in _PRODUCTS]
    if not products:
        if "like data" in kinds:
            return undecided(
                f"a product of parameters is used like data{at('like data')}"
            )
        if "opaque" in kinds:
            names = dict.fromkeys(use.primitive for use in uses if use.kind == "opaque")
            return undecided(f"it goes into {', '.join(names)}{at('opaque')}")
        return ADAMW, "elementwise", f"elementwise{at('elementwise')}", None
    where, first = at(*_PRODUCTS), products[0]
    if first.kind in _NO_MATRIX:
        role, words = _NO_MATRIX[first.kind]
        return ADAMW, role, f"{words}{where}", None
    if first.is_complex:
        return ADAMW, "complex", f"a product of complex numbers{where}", None
    readings = [_axes(shape, use) for use in products if not use.is_gradient]
    axes = next((x for x in readings if isinstance(x, MatrixAxes)), None)
    if axes is None:
        return undecided(f"{readings[0]}{where}")
    flipped = MatrixAxes(axes.batch, axes.output, axes.reduction)
    for other in readings:
        if isinstance(other, MatrixAxes) and other not in (axes, flipped):
            return undecided(
                f"it is used as {_text(axes)} and as {_text(other)}{where}"
            )
    verb = "convolved" if first.kind == "convolved" else "contracted"
    over = "axis" if len(axes.reduction) == 1 else "axes"
    reason = f"{verb} over {over} {', '.join(map(str, axes.reduction))}{where}"
    if 1 in axes.fan(shape):
        return ADAMW, "vector", f"one row or column, {reason}", axes
    if all(map(_is_looked_up, products)):
        reason = f"a table that queries are compared with{where}"
        return ADAMW, "embedding", reason, axes
    if any(use.chooses for use in products):
        return ADAMW, "router", f"a top-k chooses among its outputs{where}", axes
    if not any(use.feeds for use in products):
        return ADAMW, "head", f"last product before the result{where}", axes
    kernel = "convolution" if first.kind == "convolved" else "kernel"
    return MUON, _role(products) or kernel, reason, axes


def _text(axes: MatrixAxes) -> str:
    return f"in={axes.reduction}, out={axes.output}, batch={axes.batch}"


def _is_looked_up(use: Use) -> bool:
    """True for a table of keys: the product of attention's queries with a leaf."""
    roles = {role for x in use.inputs for role in _roles(x)}
    compared = bool(use.inputs) and roles and roles <= {"query", "key"}
    return bool(compared) and not _roles(use) and {CONSTANT} not in use.roles.values()


def _roles(use: Use) -> set[str]:
    return {one.role for one in use.outputs.values()} - {"", "attended"}


def _role(uses: Iterable[Use]) -> str:
    """What attention or a gate makes of all outputs; "fused" if of each another."""
    roles = {role for use in uses for role in _roles(use)}
    return roles.pop() if len(roles) == 1 else "fused" if roles else ""


def _axes(shape: tuple[int, ...], use: Use) -> MatrixAxes | str:
    """The axes of one use, or why they are unknown."""
    roles = {axis: set(use.roles.get(axis, ())) for axis in range(len(shape))}
    _resolve(roles)
    for axis, size in enumerate(shape):
        one = roles[axis]
        if INNER in one:
            known = set().union(*(use.roles.get(a, ()) for a in roles))
            one ^= {INNER, OUT if IN in known else IN}
            if size >= _elsewhere(shape, use.roles):
                return (
                    "of two parameters multiplied with each other either may be data,"
                )
        if not one and size == 1:
            one.add(BATCH)
        if not one:
            return f"axis {axis} is neither contracted nor kept"
        if len(one) > 1:
            return f"axis {axis} is both {' and '.join(sorted(one))}"
    return MatrixAxes(
        *(tuple(a for a in roles if roles[a] == {side}) for side in (BATCH, IN, OUT))
    )


def _resolve(roles: dict[int, set[str]]) -> None:
    """What constants and parts of axes are, which are known only at the end."""
    for one in roles.values():
        if PART in one:
            one.discard(PART)
            if not one:
                one.add(BATCH)
    inputs = [axis for axis, one in roles.items() if one == {CONSTANT}]
    for axis, one in roles.items():
        one.discard(CONSTANT)
        if axis in inputs:
            one.add(IN)
        elif inputs and one - {BATCH}:
            one.clear()
            one.add(OUT)
    if inputs and not any(OUT in one for one in roles.values()):
        for axis, one in roles.items():
            if axis not in inputs and one:
                one.clear()
                one.add(OUT)


def _elsewhere(shape: tuple[int, ...], roles: Roles) -> int:
    """Elements along the axes that are neither a batch nor contracted with a leaf."""
    return math.prod(
        size
        for axis, size in enumerate(shape)
        if INNER not in roles.get(axis, ()) and roles.get(axis) != {BATCH}
    )


def find_experts(follower: Follower) -> None:
    """Axes as long as a router's outputs, of products beside it or behind those.

    An axis of experts that all get one input is an output axis of the first product.
    """
    uses = [use for found in follower.uses.values() for use in found]
    routers = [use for use in uses if use.chooses]
    numbers = {follower.shapes[router.leaf][-1] for router in routers}
    experts = {*routers}
    for use in uses if routers else ():
        shape, roles = follower.shapes[use.leaf], use.roles
        axis = next((a for a in range(len(shape)) if roles.get(a) != {BATCH}), 0)
        if use.kind != "contracted" or use.chooses or len(shape) < 3:
            continue
        beside = any(
            use.inputs == x.inputs and shape[axis] == follower.shapes[x.leaf][-1]
            for x in routers
        )
        if beside or (use.inputs and use.inputs <= experts):
            experts.add(use)
            alike = any(roles[a] == roles.get(axis) for a in roles if a != axis)
            if alike and shape[axis] in numbers:
                use.revise({axis: frozenset({BATCH})})
