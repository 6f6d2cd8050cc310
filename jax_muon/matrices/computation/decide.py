"""From the uses of a parameter to its reading: label, role, axes, and why."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax_muon.base import jaxprs, trees
from jax_muon.matrices.computation.trace import SUMS, Trace
from jax_muon.matrices.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    Use,
)
from jax_muon.matrices.matrices import (
    ADAMW,
    MUON,
    MatrixAxes,
    Parameter,
    not_a_matrix,
    numbers_text,
)

_PRODUCTS = ("contracted", "convolved", "grouped")  # kinds of uses


def parameter(path: str, leaf: Any, trace: Trace, is_split: bool) -> Parameter:
    """How a leaf is read, by its uses; with a doubt, if they do not decide.

    The reason says if a kernel holds several products side by side, unless `is_split`.
    """
    shape, uses = tuple(leaf.shape), trace.uses[path]
    label, role, reason, axes = _decide(shape, uses, trace)
    if path in trace.inputs:
        label, role, axes = ADAMW, "input", None
        reason = f"used like data, with matrices of its own at {trace.inputs[path]}"
    if not_a_matrix(shape, leaf.dtype):
        label, role, axes = ADAMW, "vector" if label == MUON else role, None
    elif role == "kernel" and "router" in trees.words(path):
        label, role, reason = ADAMW, "router", f"a router, by its name; {reason}"
    elif label == MUON and not is_split:
        reason += _split(path, role, shape, uses) or _stacked(path, role, axes)
    scanned = {x for x in trace.scanned[path] if axes is None or x in axes.batch}
    doubt = reason if label == MUON and axes is None else None
    by = path, shape, leaf.dtype, label, role, reason, axes, doubt
    heads = _heads(shape, axes, uses) if axes and label == MUON else ()
    scan = trace.scans.get(path, "") if scanned else ""
    return Parameter(*by, scanned=tuple(sorted(scanned)), scan=scan, heads=heads)


def doubted(x: Parameter, trace: Trace) -> Parameter:
    """With a doubt, if constants or other parameters were multiplied by it."""
    uses = trace.uses[x.path]
    sides = [x for use in uses for x in use.sides.values()]
    inside = any(INNER in x for x in sides) or any(use.constant for use in uses)
    if x.role != "elementwise" or len(x.shape) < 2 or not inside:
        return x
    doubt = "nothing but parameters and constants is multiplied by it"
    return replace(x, label=MUON, role="unknown", doubt=doubt)


def agreeing(one: Parameter, three: Parameter) -> Parameter:
    """A reading by one sample, with a doubt if three samples are read otherwise."""
    if (one.label, one.axes) == (three.label, three.axes):
        return one
    doubt = f"one sample ({one.role}) and three ({three.role}) are read differently"
    return replace(one, label=MUON, axes=None, role="unknown", doubt=doubt)


def with_agreeing_layers(
    parameters: Sequence[Parameter], trace: Trace
) -> list[Parameter]:
    """Make the head of one layer a kernel, if it is a kernel in other layers.

    A function that ends before the model's head, such as an encoder, has its last
    kernels as its last products.
    """
    both = [(_place(x, trace), x) for x in parameters]
    kernels = {kind: x for kind, x in both if x.label == MUON}
    agreed = []
    for kind, x in both:
        if x.role == "head" and (like := kernels.get(kind)):
            reason = f"{x.reason}, and like {like.path!r}"
            x = replace(x, label=MUON, role=like.role, reason=reason)
        agreed.append(x)
    return agreed


def _place(x: Parameter, trace: Trace) -> tuple[object, ...]:
    """What parameters of several layers have in common: a name, or else the code.

    `layers/0/down` and `layers/1/down` have a name. Of a list of matrices, 0, 1 and 2,
    those are layers that the same place of the code uses, turn by turn of a loop.
    """
    name: object = trees.numberless(x.path)
    if x.path.rpartition("/")[2].isdigit():
        name = tuple(jaxprs.places_of(use.calls) for use in trace.uses[x.path])
    return name, x.shape


def _depth(uses: Sequence[Use]) -> int:
    """How deep in gradients the uses are that count: those of the loss itself, if any.

    A sum of squares, as of weight decay, and a kernel that hides what it does show
    nothing.
    """
    shown = [use for use in uses if use.kind != "opaque" and use.left] or uses
    return min(use.depth for use in shown)


def _feeds(use: Use, least: int, trace: Trace) -> bool:
    """Whether a product takes its result, where either of them counts."""
    return any(
        x is None or use.depth == least or x.depth == _depth(trace.uses[x.path])
        for x in use.takers
    )


def _decide(
    shape: tuple[int, ...], uses: Sequence[Use], trace: Trace
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
    every, least = uses, _depth(uses)
    uses = [use for use in uses if use.depth == least]
    products = [use for use in uses if use.kind in _PRODUCTS]
    if measured := [use for use in products if not use.scales]:
        products = measured  # without a power iteration
        uses = [use for use in uses if not use.scales]
        every = [use for use in every if not use.scales]
    opaque = [use for use in uses if use.kind == "opaque"]
    if not products and opaque and opaque[0].primitive == "fft":
        return ADAMW, "complex", f"its spectrum is taken{at('opaque')}", None
    if not products and opaque:
        names = {use.primitive: None for use in opaque}
        return MUON, "unknown", f"it goes into {', '.join(names)}{at('opaque')}", None
    if not products:
        return ADAMW, "elementwise", f"elementwise{at('elementwise')}", None
    for use in products:
        for axis, slices in use.slices.items():
            if slices >= {(i, i + 1) for i in range(shape[axis])}:
                use.separate([axis])
    where, first = at(*_PRODUCTS), products[0]
    if first.kind == "grouped":
        return ADAMW, "grouped", f"a convolution in groups{where}", None
    if first.is_complex:
        return ADAMW, "complex", f"a product of complex numbers{where}", None
    feeding = sorted(products, key=lambda use: not use.takers)
    readings = [_matrix_axes(shape, use, trace) for use in feeding]
    known = [x for x in readings if isinstance(x, MatrixAxes)]
    if not known:
        return MUON, "unknown", f"{readings[0]}{where}", None
    axes = known[0]
    either = axes, MatrixAxes(axes.batch, axes.output, axes.reduction)
    if others := [x for x in known if x not in either]:
        texts = [numbers_text(x.reduction, x.output) for x in (axes, others[0])]
        reason = f"it is used as {' and '.join(texts)}{where}"
        return MUON, "contradictory", reason, None
    plural = "axis" if len(axes.reduction) == 1 else "axes"
    over = f" over {plural} {', '.join(map(str, axes.reduction))}"
    reason = f"{first.kind}{over * bool(axes.reduction)}{where}"
    if 1 in axes.fan(shape):
        return ADAMW, "vector", f"one row or column, {reason}", axes
    roles = {use.role for use in products}
    if roles == {"table"}:
        reason = f"a table that queries are compared with{where}"
        return ADAMW, "embedding", reason, axes
    # Sums over the inputs alone, such as the norms of its outputs.
    sums = [
        x
        for x in uses
        if x.primitive in SUMS and x.left - {*axes.batch} == {*axes.output}
    ]
    if any(not any(map(x.meets, axes.reduction)) for x in sums):
        return ADAMW, "centers", f"its rows' distances to data are taken{where}", axes
    if any(use.chooses for use in products):
        return ADAMW, "router", f"a top-k chooses among its outputs{where}", axes
    if not any(_feeds(use, least, trace) for use in every):
        return ADAMW, "head", f"last product before the result{where}", axes
    roles -= {""}
    kernel = "convolution" if first.kind == "convolved" else "kernel"
    is_glu = any(use.glu for use in products) and not roles
    if len(roles) > 1 or is_glu:
        return MUON, "fused", reason, axes
    return MUON, roles.pop() if roles else kernel, reason, axes


def _stacked(path: str, role: str, axes: MatrixAxes | None) -> str:
    """What to say of a kernel that may be a stack of matrices with one input, or ""."""
    if axes is None or role != "kernel" or len(axes.output) < 2:
        return ""
    if axes.output[0] > axes.reduction[0]:
        return ""
    first, *others = axes.output
    numbers = numbers_text(axes.reduction, others)
    return f"; if axis {first} is a stack: rules={{{path!r}: {numbers}}}"


def _split(path: str, role: str, shape: Sequence[int], uses: Iterable[Use]) -> str:
    """What to say of a kernel whose outputs are split, or ""."""
    sliced = [(use, axis) for use in uses for axis in use.slices]
    for use, axis in sliced if role == "fused" else ():
        if widths := _widths(use, axis, shape[axis]):
            split: Any = {f"part_{i}": width for i, width in enumerate(widths)}
            split = split if len({*widths}) > 1 else (*split,)
            last = "" if axis == len(shape) - 1 else f", axis={axis}"
            pattern = re.sub(r".*/\d+/", "", path)  # of all layers
            text = f"splits={{{pattern!r}: Split({split}{last})}}"
            return f"; its outputs are split: {text}"
    return ""


def _widths(use: Use, axis: int, size: int) -> list[int]:
    """The widths of slices that outputs are cut into, in their order, if they are."""
    slices = use.slices.get(axis, set())
    # Slices of a slice count from its start, so another one contains them.
    parts = [
        (start, stop)
        for start, stop in sorted(slices)
        if not any(a <= start and stop <= b for a, b in slices - {(start, stop)})
    ]
    starts, stops = zip(*parts, strict=True) if parts else ((), ())
    is_all = (*starts, size) == (0, *stops) and use.sides.get(axis) == {OUT}
    return [stop - start for start, stop in parts] if is_all else []


def _heads(
    shape: Sequence[int], axes: MatrixAxes, uses: Sequence[Use]
) -> tuple[tuple[int, int, int], ...]:
    """`Parameter.heads`: the heads of each slice of its outputs.

    A fused kernel (768, 1280) of 12, 4 and 4 heads of 64 has (1, 768, 12), (1, 256, 4)
    and (1, 256, 4): heads of one stride fill the whole width of a slice.
    """
    uses = [use for use in uses if use.role and use.role != "table"]
    heads = []
    for axis in axes.output if uses else ():
        every = [x for use in uses for x in use.heads if x.axis == axis]
        sliced = [_widths(use, axis, shape[axis]) for use in uses]
        for width in next(filter(None, sliced), [shape[axis]]):
            fitting = [x.number for x in every if x.number * x.stride == width]
            heads.append((axis, width, max(fitting, default=1)))
    return tuple(heads)


def _matrix_axes(shape: Sequence[int], use: Use, trace: Trace) -> MatrixAxes | str:
    """The axes of one use, or why they are unknown."""
    sides = {axis: {*use.sides.get(axis, ())} for axis in range(len(shape))}
    for axis, x in sides.items():
        if INNER in x and use.either:
            return "of two parameters multiplied with each other either may be data,"
        if INNER in x:
            sides[axis] = x = x - {INNER} | {_inner_side(use, axis, trace, {use.path})}
    _resolve_constants(sides)
    if len(alone := [axis for axis, x in sides.items() if x != {BATCH}]) == 1:
        sides[alone[0]] = {IN}  # a vector, whatever is done to it
    for axis, x in sides.items():
        if not x and shape[axis] == 1:
            x.add(BATCH)
        if len(x) != 1:
            both = f"both {' and '.join(sorted(x))}" if x else "neither in nor out"
            return f"axis {axis} is {both}"
    batch, fan_in, fan_out = (
        tuple(a for a in sides if sides[a] == {side}) for side in (BATCH, IN, OUT)
    )
    return MatrixAxes(batch, fan_in, fan_out)


def _inner_side(use: Use, axis: int, trace: Trace, seen: set[str]) -> str:
    """The side of an axis that was contracted with another leaf.

    In x @ (a @ b @ c), of (6, 5), (5, 4) and (4, 7), x makes axis 0 of a an input: axis
    1 is an output, so axis 0 of b, which meets it, is an input.
    """
    known = set().union(*use.sides.values())
    if IN in known or OUT in known:
        return OUT if IN in known else IN
    for path, at in sorted(trace.met[use.path, axis]):
        twins = [x for x in trace.uses[path] if x.calls is use.calls]
        for twin in twins if path not in seen else ():
            known = set().union(*twin.sides.values())
            if IN in known or OUT in known:
                return IN if IN in known else OUT
            for a, x in twin.sides.items():
                if a != at and INNER in x:
                    return _inner_side(twin, a, trace, {*seen, path})
    return IN


def _resolve_constants(sides: dict[int, set[str]]) -> None:
    """An axis that only constants meet is on the side that is missing."""
    constant = [axis for axis, x in sides.items() if x == {CONSTANT}]
    known = set().union(*(x for x in sides.values() if x != {CONSTANT}))
    missing = next((side for side in (IN, OUT) if side not in known), BATCH)
    for axis in constant:
        sides[axis] = {missing}
