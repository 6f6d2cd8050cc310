"""From the uses of a parameter to its reading: label, role, axes, and why.

The first rule that knows an answer counts. What contradicts itself is in doubt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_muon.base import jaxprs, trees
from jax_muon.matrices import matrices as m
from jax_muon.matrices.matrices import ADAMW, MUON, MatrixAxes, Parameter
from jax_muon.reading import values as v
from jax_muon.reading.attention import Attention
from jax_muon.reading.trace import Trace
from jax_muon.reading.values import Use

# Kinds of uses that make a matrix, and the role of it.
_PRODUCTS = {"contracted": "kernel", "grouped": "grouped", "complex": "complex"}
_PRODUCTS |= dict.fromkeys(("convolved", "transposed"), "convolution")
_UNDECIDED = {
    "resized": "a constant multiplies it, as positions or the inputs of a kernel",
    "factor": "it multiplies another parameter, which is not followed",
}
# Label, role, reason and axes; a matrix without axes is undecided.
Answer = tuple[str, str, str, MatrixAxes | None]


def parameter(
    path: str, leaf: Any, trace: Trace, uses: Sequence[Use], is_split: bool = False
) -> Parameter:
    """How a leaf is read, by its uses; with a doubt, if they do not decide."""
    shape = tuple(leaf.shape)
    answer = _without_product(path, trace, uses)
    label, role, reason, axes = answer or _by_products(path, shape, trace, uses)
    is_vector = m.not_a_matrix(shape, leaf.dtype) or sum(n > 1 for n in shape) < 2
    if label == MUON and is_vector:
        label, role = ADAMW, "vector"
    elif label == MUON and axes and "router" in trees.words(path):
        role, axes = "unknown", None
        why = "its name says a router, but no top-k of its outputs shows it"
        reason = f"{why}; {reason}"
    axes = None if is_vector else axes
    doubt = reason if label == MUON and axes is None else None
    scans = {a: x for (p, a), x in trace.scans.items() if p == path}
    scans = {a: x for a, x in scans.items() if axes is None or a in axes.batch}
    heads: tuple[tuple[int, int, int], ...] = ()
    if label == MUON and axes and role == "kernel":
        found = Attention(trace.noted, uses)
        role, heads = found.role or role, found.in_heads(shape, axes.output)
        reason += "" if is_split else found.hint(path, shape, axes.output)
    by = path, shape, leaf.dtype, label, role, reason, axes, doubt
    scan = next(iter(scans.values()), "")
    return Parameter(*by, scanned=(*sorted(scans),), scan=scan, heads=heads)


def _at(uses: Sequence[Use], *kinds: str) -> str:
    """The lines of the user's code, for a message."""
    lines = [jaxprs.line_of(x.calls) for x in uses if x.kind in kinds]
    return f" at {', '.join([*dict.fromkeys(lines)][:3])}" if any(lines) else ""


def _without_product(path: str, trace: Trace, uses: Sequence[Use]) -> Answer | None:
    """Leaves that no product shows to be matrices, and leaves in doubt."""
    facts, kinds = trace.facts, {x.kind for x in uses}
    if path in facts.lost:
        return MUON, "unknown", facts.lost[path], None
    if path in trace.like_data:
        return ADAMW, "input", "used like data, by your rules", None
    if "picked" in kinds and not any(x.kind in _PRODUCTS and x.is_picked for x in uses):
        return ADAMW, "embedding", f"rows picked by integers{_at(uses, 'picked')}", None
    if facts.routers.keys() & {*uses}:
        reason = f"a top-k chooses among its outputs{_at(uses, *_PRODUCTS)}"
        return ADAMW, "router", reason, None
    if path in facts.doubts:
        return MUON, "unknown", facts.doubts[path], None
    if "input" in kinds:
        reason = f"used like data, with matrices of its own{_at(uses, 'input')}"
        return ADAMW, "input", reason, None
    if kinds & _PRODUCTS.keys():
        return None
    for kind, reason in _UNDECIDED.items():
        if kind in kinds:
            return MUON, "unknown", f"{reason}{_at(uses, kind)}", None
    if not kinds:
        return ADAMW, "unused", "the result does not depend on it", None
    return ADAMW, "elementwise", f"elementwise{_at(uses, 'elementwise')}", None


def _by_products(
    path: str, shape: tuple[int, ...], trace: Trace, uses: Sequence[Use]
) -> Answer:
    """Leaves that data is multiplied by."""
    # First those that lead to products of other leaves.
    products, leading = [x for x in uses if x.kind in _PRODUCTS], {*trace.taken}
    for x in products[::-1]:
        leading |= x.by if x in leading else set()
    products.sort(key=lambda x: x not in leading)  # others may be of a norm
    role, at = _PRODUCTS[products[0].kind], _at(uses, *_PRODUCTS)
    # In this order: what is none, what contradicts itself, heads, stacks, kernels.
    if role in ("grouped", "complex"):
        return ADAMW, role, f"{role} product{at}", None
    readings = [_matrix_axes(x, shape, trace) for x in products]
    for why in [x for x in readings if isinstance(x, str)]:
        return MUON, "unknown", f"{why}{at}", None
    axes, *others = [x for x in readings if isinstance(x, MatrixAxes)]
    if all(1 in x.fan(shape) for x in (axes, *others)):
        return ADAMW, "vector", f"one row or column{at}", axes
    inner = {a for x in products for a in x.axes(v.INNER)}
    is_taken = any(x != path or not depth for x, depth in trace.takers[path])
    is_head = not is_taken and not inner & {*axes.output}
    why = _contradiction(axes, others)
    why = why or (_lost_head(path, trace) if is_head else _stack(axes, products, trace))
    if why:
        return MUON, "unknown", f"{why}{at}", None
    if is_head:
        return ADAMW, "head", f"last product before the result{at}", axes
    plural = "es" if len(axes.reduction) > 1 else "is"
    inside = ", ".join(map(str, axes.reduction))
    return MUON, role, f"{products[0].kind} over ax{plural} {inside}{at}", axes


def _contradiction(axes: MatrixAxes, others: Sequence[MatrixAxes]) -> str:
    """Why uses contradict each other, or ""; x @ w and x @ w.T do not."""
    swapped = MatrixAxes(axes.batch, axes.output, axes.reduction)
    for x in others:
        if x not in (axes, swapped):
            both = [m.numbers_text(y.reduction, y.output) for y in (axes, x)]
            return f"it is used as {' and '.join(both)}"
    return ""


def _lost_head(path: str, trace: Trace) -> str:
    """Why the last product may be none, or ""."""
    if path in trace.facts.weighed:
        return (
            "a vector or numbers multiply its outputs, in a last product or as a scale,"
        )
    if trace.takers[path]:
        return "only gradients have products that take its outputs"
    return "" if path in trace.reached else "its products do not reach the result"


def _stack(axes: MatrixAxes, products: Sequence[Use], trace: Trace) -> str:
    """What to say of (3, in, out) with one input: three matrices, or a wide one?"""
    for use in products:
        shape = trace.shapes[use.path]
        for axis in use.members & {*axes.batch} - use.axes(v.ROW):
            if not _is_batch(use, axis, shape[axis], trace):
                wide = sorted((axis, *axes.output))
                both = [m.numbers_text(axes.reduction, x) for x in (axes.output, wide)]
                return f"axis {axis} is a stack, {both[0]}, or outputs, {both[1]},"
    return ""


def _is_batch(use: Use, axis: int, size: int, trace: Trace) -> bool:
    """Whether outputs along an axis are of several matrices: of experts, or members.

    Or those that are cut one by one, as q, k and v of (24, 3, 40), but no heads.
    """
    if (use, axis) in trace.facts.batched:
        return True
    found = Attention(trace.noted, [use])
    singles = [x for x in found.slices.get(axis, ()) if x[1] - x[0] == 1]
    # Of keys and values (2, heads, in, head) with two roles, the heads are known.
    are_heads = any((x.axis, x.number) == (axis, size) for x in found.heads)
    if found.roles and (found.role != "fused" or are_heads):
        return axis in use.members
    return len(singles) >= size


def _matrix_axes(use: Use, shape: Sequence[int], trace: Trace) -> MatrixAxes | str:
    """The axes of one use, or why they are unknown."""
    sides = {a: {*use.sides.get(a, ())} for a in range(len(shape))}
    sides |= {a: {v.BATCH} for a, n in enumerate(shape) if n == 1 and not sides[a]}
    known = {v.IN, v.OUT}.intersection(*[set().union(*sides.values())])
    rows = use.axes(v.ROW)
    for axis, x in sides.items():
        if v.ROW in x:  # or some of them, in a loop over parts of the matrix
            x = x - {v.ROW} or {_side_of_rows(use, axis, trace)}
        elif x == {v.INNER} and len(known) == 1:
            x = {v.IN, v.OUT} - known
        if len(x) != 1 or not x <= {v.BATCH, v.IN, v.OUT}:
            return _sides_text(axis, x)
        sides[axis] = x
    for axis in sides:
        others = [a for a in sides if a != axis and sides[a] == sides[axis]]
        is_batch = axis in use.members or _is_batch(use, axis, shape[axis], trace)
        if others and is_batch:
            sides[axis] = {v.BATCH}
    batch, fan_in, fan_out = (
        tuple(a for a in sides if sides[a] == {side}) for side in (v.BATCH, v.IN, v.OUT)
    )
    is_row = rows and len(rows) >= len(shape) - 1 and 1 not in shape
    if is_row and not (fan_in and fan_out):
        return f"axis {min(rows)} is taken one by one, as of a matrix or of vectors"
    return MatrixAxes(batch, fan_in, fan_out)


def _sides_text(axis: int, sides: set[str]) -> str:
    if len(sides) > 1:
        return f"axis {axis} is both {' and '.join(sorted(sides))}"
    return f"axis {axis} is neither in nor out"


def _side_of_rows(use: Use, axis: int, trace: Trace) -> str:
    """The side of an axis whose rows are taken one by one: layers are a batch.

    Heads (24, 4, 6) of one input are outputs, as they are in one product.
    """
    found, inside = Attention(trace.noted, [use]), use.axes(v.IN)
    is_head = found.is_outside and inside and min(inside) < axis
    return v.OUT if is_head else v.BATCH


def agreeing(one: Parameter, three: Parameter) -> Parameter:
    """A reading by one sample, with a doubt if three samples are read otherwise."""
    if (one.label, one.axes) == (three.label, three.axes):
        return one
    doubt = f"one sample ({one.role}) and three ({three.role}) are read differently"
    return replace(one, label=MUON, axes=None, role="unknown", doubt=doubt)


def with_agreeing_layers(
    parameters: Sequence[Parameter], uses: Mapping[str, Sequence[Use]]
) -> list[Parameter]:
    """Make the head of one layer a kernel, if it is a kernel in other layers.

    A function that ends before the model's head, such as an encoder, has its last
    kernels as its last products. `layers/0/down` and `layers/1/down` are in two layers,
    and so are Dense_0 and Dense_1 in turns of one loop.
    """
    modules = [x.path.rpartition("/")[0] for x in parameters if len(x.shape) > 1]

    def keys(x: Parameter) -> list[object]:
        above = x.path.rpartition("/")[0]
        if modules.count(above) == 1:  # Dense_0, with one kernel, is no layer
            above = above.rpartition("/")[0]
        name = trees.numberless(above), x.path.removeprefix(above), x.shape
        places = tuple(jaxprs.places_of(use.calls) for use in uses[x.path])
        place = trees.numberless(x.path), x.shape, places
        return [name] + [place] * bool(re.search(r"\d", x.path))

    kernels = [x for x in parameters if x.label == MUON and x.axes]
    known = {key: x.path for x in kernels for key in keys(x)}
    agreed = []
    for x in parameters:
        like = [known[key] for key in keys(x) if key in known]
        if x.role == "head" and like:
            reason = f"{x.reason}, and like {like[0]!r}"
            x = replace(x, label=MUON, role="kernel", reason=reason)
        agreed.append(x)
    return agreed
