"""Follow parameters through operations on each element: sums, scales, functions.

Leaves that meet each other here are followed on, as in `w * scale` or `a @ b + w`.
Where they meet data they are used: `x + bias`, `x * scale`. Behind a mask or a scale of
all their elements they stay matrices as well, as in `x @ (w * mask)`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn

from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.trace import ELEMENTWISE, SUMS, Trace, rule
from jax_muon.matrices.computation.values import (
    EXPONENTIAL,
    LOG,
    LOG_SOFTMAX,
    RECIPROCAL,
    SOFTMAX,
    AxisPart,
    AxisParts,
    Scores,
    Shape,
    Use,
    Value,
    axes_in,
    joined,
)

SCALES = ("mul", "div")
_ACTIVATIONS = {"tanh", "logistic", "max", "sin", "cos", "erf", "exp", "exp2"}
_ACTIVATIONS |= {"expm1", "log1p"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_HIDING = {"triangular_solve", "ffi_call"}  # not elementwise if all fits


@dataclass(slots=True)
class Operation:
    """An operation on each element of its operands.

    A parameter of shape (1, 40) that is repeated to (16, 40) has a leaf along axis 1
    alone.
    """

    trace: Trace
    eqn: JaxprEqn
    name: str  # JAX's; or "mul" for a product that contracts no axis
    values: Sequence[Value]  # without the axes along which their elements are repeated
    made: Sequence[Value]  # those made of leaves
    active: Sequence[Value]  # those that are activations
    shapes: Sequence[Shape]
    shape: Shape  # of the result
    fits: bool  # or else it mixes elements and has no rule, as an FFT

    @property
    def exponent(self) -> float | None:
        """The exponent of x ** -1, if it is one known number."""
        if self.name != "pow" or self.shapes[1]:
            return self.eqn.params.get("y")
        numbers = self.values[1].computed()
        return None if numbers is None or np.iscomplexobj(numbers) else float(numbers)

    @property
    def chooses_by_itself(self) -> bool:
        """Whether leaves choose, as in where(w > 0, w, 0.1 * w)."""
        return self.name == "select_n" and bool(self.values[0].leaves)

    @property
    def is_function(self) -> bool:
        """Whether it is an activation function of leaves, not a clip of one alone."""
        leaves = {leaf for x in self.made for leaf in x.leaves}
        is_raw = len(leaves) == 1 and not any(any(x.sides.values()) for x in self.made)
        is_clipped = is_raw and (self.name == "max" or self.chooses_by_itself)
        may_be = self.name in _ACTIVATIONS or self.chooses_by_itself
        return bool(self.made) and may_be and not is_clipped


@rule(ELEMENTWISE, "reduce")  # by a function of elements
def _elementwise(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """An operation on each element; or one without a rule.

    Of eigenvectors (2, 5, 5) and eigenvalues (2, 5) only the former keep the axes.
    """
    made = [shape_of(v) for v in eqn.outvars]
    shapes, shape = [shape_of(v) for v in eqn.invars], made[0] if made else ()
    first = elementwise(trace, eqn, eqn.primitive.name, values, shapes, shape)
    return [first if x == shape else first.without_axes(len(x)) for x in made]


def elementwise(
    trace: Trace,
    eqn: JaxprEqn,
    name: str,
    values: list[Value],
    shapes: Sequence[Shape],
    shape: Shape,
) -> Value:
    """The result of an operation on each element, such as "mul"."""
    if name in SUMS and any(x.leaves and x.has_all(shape) for x in values):
        values = [Value() if x.is_gradient else x for x in values]  # a step in the loss
    values = _with_grids_as_data(trace, eqn, values)
    made = [x for x in values if x.leaves]
    active = [x for x in values if x.data and not x.leaves and not x.noise]
    fits = all(_fits(x, shape) for x in shapes) and name not in _HIDING
    op = Operation(trace, eqn, name, values, made, active, shapes, shape, fits)
    result = _described(op, joined(values))
    if name == "mul":
        _note_gates(op, result)
    for value in [x for x in values if x.choice]:
        result.choice -= trace.routes(value, [x for x in values if x is not value])
    for value in _followed(op, result) if made else ():
        result = result.with_leaves(value, len(shape))
    if name == "select_n" and not (values[0].data or values[0].leaves):
        return result.moved(lambda parts: _diagonal(parts, shape))
    return result


def _with_grids_as_data(
    trace: Trace, eqn: JaxprEqn, values: list[Value]
) -> list[Value]:
    """Operands where sin(grid @ w), of a constant grid, is data beside tanh(h @ v).

    It is data beside other data, and beside a value of other leaves.
    """
    result = values
    for i, value in enumerate(values):
        if value.data or not value.activated or not value.constant:
            continue
        if any(
            (x.data and not x.noise) or (x.leaves and not {*x.leaves} & {*value.leaves})
            for x in values
            if x is not value
        ):
            result = [*result[:i], trace.given(value, eqn), *result[i + 1 :]]
    return result


def _followed(op: Operation, result: Value) -> Sequence[Value]:
    """Use and note leaves; the values whose leaves the result is made of as well."""
    for value in op.made:
        if not value.data and (op.is_function or _is_added(op, value)):
            op.trace.note_input(value, op.eqn)
    _note_scales_of_its_own_leaf(op)
    used = _used_up(op)
    for value in used:
        op.trace.use(value, "elementwise", op.eqn)
    left = [x for x in op.made if all(x is not y for y in used)]
    return _beside_data(op, left, result) if op.active or not op.fits else left


def _fits(shape: Shape, other: Shape) -> bool:
    """True if an operand of this shape is a scalar, or broadcast by its axes of 1."""
    ones = {n for n, m in zip(shape, other, strict=False) if n != m}
    return not shape or (len(shape) == len(other) and ones <= {1})


def _diagonal(parts: AxisParts, shape: Shape) -> AxisParts:
    """The axes of a vector that a mask repeats along an axis of the same size.

    Of where(eye(24), s[:, None], 0), with s (24,), both axes are the leaf's.
    """
    own = {n: x for x, n in zip(parts, shape, strict=True) if axes_in((x,))}
    return tuple(
        x if axes_in((x,)) else own.get(n, x) for x, n in zip(parts, shape, strict=True)
    )


# --- what the result is ---------------------------------------------------------------


def _described(op: Operation, result: Value) -> Value:
    """The result, without leaves, with the facts that follow from the operation."""
    name, made = op.name, op.made
    if not op.fits:
        result.results = {}
    if name != "convert_element_type":
        # A product x * w is one with w only if it is summed at once.
        for x, of in [*result.results.items()]:
            if isinstance(x, Use) and x.kind == "elementwise":
                if x.left <= axes_in(of):
                    op.trace.scaling.add(x)
                del result.results[x]
    if name in SUMS and result.noise and made:
        result.data = False  # noise added to leaves does not make them data
    result.noise &= name == "mul" or not made
    if name == "eq":  # ids[:, None] == arange(96)
        among = [x for x in op.values if x.data] or [x for x in op.values if x.turns]
        result.one_hot = len(among) == 1  # also of the number of a turn
    elif name in (*SCALES, "and", "select_n"):
        result.one_hot = joined(_beside_masks(op)).one_hot
    if name in _COMPARISONS:  # z == z.max() chooses like an argmax
        for a, b in itertools.permutations(op.values):
            result.choice |= a.extreme & b.outputs.keys()
    if name in SUMS:
        # tanh(a @ b) + tanh(c) is still a function of leaves, tanh(a @ b) + c is none;
        # but grid @ w + bias is: the grid's points are data then.
        result.activated = bool(made) and all(x.activated for x in made)
        moved = [x.constant for x in made]
        result.activated |= any(
            not x.has_all(op.shape, places) for x in made for places in moved
        )
    result.activated |= op.is_function
    if _is_exponential(op):
        result.exponential = frozenset(
            x for x in result.results if isinstance(x, Scores)
        )
    pairs = zip(op.values, op.shapes, strict=True)
    if name in SUMS and any(not (x.data or x.leaves or shape) for x, shape in pairs):
        result.exponential = frozenset()  # 1 + exp(-x), as in a logistic function
    result.softmax = _softmax(op)
    return result


def _beside_masks(op: Operation) -> list[Value]:
    """Operands without those that a one-hot (16, 96) stays one beside.

    They have one element for all classes, (16, 1), or choose between it and zeros.
    """
    if op.name == "select_n":
        cases = [x for x in op.values[1:] if x.data]
        return cases or [*op.values[:1]]
    pairs = zip(op.values, op.shapes, strict=True)
    return [x for x, shape in pairs if shape[-1:] != (1,) or op.shape[-1:] == (1,)]


def _is_exponential(op: Operation) -> bool:
    """Whether it is a power of a constant."""
    is_constant = not any(x.data or x.leaves for x in op.values[:1])
    return op.name in ("exp", "exp2") or (op.name == "pow" and is_constant)


def _softmax(op: Operation) -> str:
    """`Value.softmax` of the result; constants change nothing.

    exp(x) / sum(exp(x)), e * (1 / s) and exp(x - log s) are the same.
    """
    name, values = op.name, op.values[op.name == "select_n" :]
    of = [x.softmax for x in values if x.data]
    if _is_exponential(op):
        return SOFTMAX if of == [LOG_SOFTMAX] else EXPONENTIAL
    if name == "log" and of == [EXPONENTIAL]:
        return LOG
    if name in SUMS and LOG in of:  # with the maximum, or x - log s
        return LOG_SOFTMAX if name == "sub" and of[0] != LOG else LOG
    is_quotient = name == "div" and op.values[0].data
    is_inverse = (name == "div" and not is_quotient) or op.exponent == -1
    if is_inverse and of == [EXPONENTIAL]:
        return RECIPROCAL
    if is_quotient and of == [EXPONENTIAL] * 2:
        return SOFTMAX
    if name == "mul" and {*of} == {EXPONENTIAL, RECIPROCAL}:
        return SOFTMAX
    return of[0] if len({*of}) == 1 else ""


# --- leaves beside each other ---------------------------------------------------------


def _is_added(op: Operation, value: Value) -> bool:
    """Whether a value of leaves is added to activations, scales them or has a bias."""
    others = [x for x in op.values if not x.leaves and x.data]
    if any(not (x.noise or x.given_floats) for x in others):
        return op.name in SUMS or not value.has_all(op.shape)
    biases = [x for x in op.made if not {*x.leaves} & {*value.leaves}]
    return op.name in SUMS and not all(x.has_all(op.shape) for x in biases)


def _used_up(op: Operation) -> list[Value]:
    """Values of leaves that only scale others, noise, and what picked rows get.

    Of w (24, 40) * s (40,) only w can be a matrix afterwards.
    """
    whole = [x for x in op.made if x.has_all(op.shape)]
    if not all(x.activated for x in whole):  # a function of one scales the other
        whole = [x for x in whole if not x.activated]
    scales = [
        x
        for x in op.made
        if (op.name in SCALES and x not in whole) or (op.name in SUMS and x.noise)
    ]
    others = {leaf for x in op.made if x not in scales for leaf in x.leaves}
    # w / norm(w, axis=0) and w / (v @ w @ u) scale their own leaf.
    used = [
        x
        for x in scales
        if others and (not x.has_all(op.shape) or not others & {*x.leaves})
    ]
    left = [x for x in op.made if x not in used]
    # Rows are data: in e[ids] + positions, and in x.mean(-1) * w.sum(0) of such rows x.
    is_outer = len(scales) == len(op.made)
    if any(x.picked and x.data for x in left) and (op.name in SUMS or is_outer):
        used += [x for x in left if not x.data]
    return used


# --- leaves beside data ---------------------------------------------------------------


def _beside_data(op: Operation, made: Sequence[Value], result: Value) -> list[Value]:
    """Use the leaves of values beside data; return the values to follow all the same.

    Leaves stay matrices behind a mask or a scale of their elements, and a product of
    leaves (LoRA) where it is added to a frozen matrix.
    """
    # (tokens, in, out) picked matrices times (tokens, 1, 1) weights are still matrices.
    factors = zip(op.values, op.shapes, strict=True)
    by = [shape for x, shape in factors if x.data and not x.leaves]
    scaled_rows = [x for x in made if x.picked and op.fits and _is_of_rows(x, by)]
    chosen = []
    for value in [x for x in made if x not in scaled_rows]:
        is_input = value.activated or op.name not in SUMS
        is_whole = value.has_all(op.shape)
        if op.fits and not is_whole and any(x.one_hot for x in op.active):
            # (ids == 3)[:, None] * table[3] is a lookup.
            op.trace.use(value, "picked", op.eqn)
            chosen.append(replace(value, data=True, picked=frozenset(value.leaves)))
            continue
        if value.picked and op.name == "mul":
            for x in op.active:
                op.trace.feed(x)
        if op.name == "mul" and op.trace.is_transposed(op.eqn):
            # The gradient of tanh(x @ w) @ o, of a vector o, multiplies o by tanh'.
            uses = op.trace.use(value, "elementwise", op.eqn)
            before = {y for x in op.active for y in x.sources if not y.is_gradient}
            for use, y in itertools.product(uses, before):
                op.trace.note("takes", y, other=use)
        if op.fits and is_input and not is_whole:
            data = op.trace.given(value, op.eqn)
            result.sources |= data.sources
            result.results |= data.results
            # By a vector, this is a product if it is summed over.
            for use in op.trace.use(value, "elementwise", op.eqn):
                if op.name == "mul" and (parts := value.leaves[use.path]):
                    result.results[use] = parts
        else:
            kind = "elementwise" if op.fits else "opaque"
            op.trace.use(value, kind, op.eqn)
    is_scale = op.name in (*SCALES, "select_n") and sum(n > 1 for n in op.shape) > 1
    frozen = all(x.given_floats for x in op.active)

    def stays(x: Value) -> bool:
        return (is_scale and x.has_all(op.shape)) or (frozen and x.is_product)

    return chosen + [x for x in made if (op.fits and stays(x)) or x in scaled_rows]


def _is_of_rows(value: Value, by: Iterable[Shape]) -> bool:
    """Whether factors of these shapes are the same along all axes of its leaves."""
    own = {a for of in value.leaves.values() for a, x in enumerate(of) if axes_in([x])}
    return bool(own) and all(shape[a] == 1 for shape in by if shape for a in own)


def _note_scales_of_its_own_leaf(op: Operation) -> None:
    """Note a power iteration: w / (v @ w @ u), where v = w @ u, as a spectral norm.

    All that v and u come from are uses of w, which are no products of the model.
    """
    for value in op.active if op.name in SCALES and len(op.made) == 1 else ():
        # A norm has lost outputs; tanh'(x @ w), beside w in a Laplacian, has all.
        shapes = op.trace.shapes
        left = [x for x in value.outputs.items() if x[0].path and axes_in(x[1])]
        if any(use.is_whole(parts, shapes[use.path]) for use, parts in left):
            continue
        own: set[Use] = set()
        more = {*value.sources}
        while more and all(x.path in op.made[0].leaves for x in more):
            own |= more
            more = {y for x in more for y in op.trace.inputs_of[x]} - own
        for use in own if not more else ():
            op.trace.note("scales", use)


# --- gates ----------------------------------------------------------------------------


def _note_gates(op: Operation, result: Value) -> None:
    """Note gates: of experts, for all elements of each; or slices of one result.

    Gates (16, 5, 1) multiply (16, 5, 40), the outputs of five experts. A one-hot of
    data (16, 5, 1) makes five inputs of x (16, 1, 24): its classes are gates of the
    next product, with (5, 24, 40).
    """
    values, sizes = op.values, [*map(math.prod, op.shapes)]
    for i, j in ((0, 1), (1, 0)):
        if values[i].data and sizes[i] < sizes[j]:
            places = [a for a, n in enumerate(op.shapes[i]) if n > 1]
            kind = "gated" if values[i].are_gates else "scaled"
            for use, parts in values[j].outputs.items():
                op.trace.note(kind, use, axes_in(parts, places))
        both = [*zip(op.shapes[i], op.shapes[j], strict=False)]
        alone = [n > 1 == m for n, m in both]
        # No inputs are made of a mask (4, 1, 16, 16), by a softmax (4, 3, 16, 16).
        if values[i].are_gates and any(alone) and any(m > 1 == n for n, m in both):
            gates = Use(-id(op.eqn), "", "gates", "", (op.eqn,))
            op.trace.note("gates", gates, [0])
            pairs = zip(alone, op.shape, strict=True)
            parts = tuple((AxisPart(0, 1, n),) if of else () for of, n in pairs)
            result.results[gates] = parts
    for use in values[0].outputs.keys() & values[1].outputs.keys():
        op.trace.note("multiplied", use)
