"""Follow parameters through products: contractions, convolutions, attention.

A product of a leaf with an activation is the use that makes it a matrix. One of two
leaves, or of a leaf and a constant, is followed on. One of two activations may be
attention, or mix matrices that another product has made.
"""

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.elementwise import elementwise
from jax_muon.matrices.computation.moves import note_sums, pick
from jax_muon.matrices.computation.trace import Trace, rule
from jax_muon.matrices.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    SOFTMAX,
    SUMMED,
    AxisPart,
    AxisParts,
    Heads,
    Results,
    Scores,
    Sides,
    Use,
    Value,
    axes_in,
    fitted,
    free,
    joined,
    placed,
)

Axes = Sequence[int]
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Product:
    """A contraction of two operands; each field has an entry for either.

    The result has the batch axes first, then the free axes of the first operand, and
    the free axes of the second last.
    """

    eqn: JaxprEqn  # or a convolution with a window of one element
    values: tuple[Value, Value]
    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]  # with the groups of a ragged product

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operands."""
        return [shape_of(v) for v in self.eqn.invars[:2]]

    @functools.cached_property
    def is_constant(self) -> list[bool]:
        """Whether an operand depends on neither parameters nor data."""
        return [not x.data and not x.leaves for x in self.values]

    @functools.cached_property
    def free(self) -> list[list[int]]:
        """The axes that the result keeps, beside the batch."""
        used = [(*self.contract[i], *self.batch[i]) for i in (0, 1)]
        return [
            [a for a in range(len(self.shapes[i])) if a not in used[i]] for i in (0, 1)
        ]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        axes = (self.batch[0], *self.free)
        return tuple(self.shapes[max(0, i - 1)][a] for i in (0, 1, 2) for a in axes[i])

    def source(self, i: int) -> dict[int, int]:
        """The axis of operand i of each axis of the result that it has."""
        count = len(self.batch[0])
        start = count + i * len(self.free[0])
        batch = enumerate(self.batch[i][:count])
        return dict([*batch, *enumerate(self.free[i], start)])

    def placed(self, i: int, parts: AxisParts) -> AxisParts:
        """Axes of the result, from the axes of operand i."""
        return placed(parts, self.source(i), self.shape)

    def multiplied(self, trace: Trace) -> Value:
        """A product that contracts nothing: of elements, as (24, 1) * (1, 40)."""
        values, shapes = [], []
        for i, value in enumerate(self.values):
            source = self.source(i)
            values.append(value.moved(functools.partial(self.placed, i)))
            shapes.append([n if a in source else 1 for a, n in enumerate(self.shape)])
        return elementwise(trace, self.eqn, "mul", values, shapes, self.shape)

    def turned(self, i: int, parts: AxisParts) -> AxisParts:
        """The same, where the other operand is constant: its axes take over."""
        of = [x for a in self.contract[i] for x in parts[a]]
        start = len(self.batch[0]) + (1 - i) * len(self.free[0])
        stop = start + len(self.free[1 - i])
        return tuple(
            fitted(of, self.shape[a]) if of and start <= a < stop else x
            for a, x in enumerate(self.placed(i, parts))
        )

    def weight(self) -> int | None:
        """The operand (0 or 1) that is the parameter in this product, or None."""
        may_be = [self._may_be_weight(i) for i in (0, 1)]
        if may_be == [True, True]:  # (x * r) @ w, of x (6,), r (4, 6) and w (6, 8)
            by_data = [x.data and not (x.noise or x.picked) for x in self.values]
            may_be = [not x for x in by_data] if any(by_data) else may_be
        if may_be == [True, True]:
            # A parameter that is repeated along an axis is like data, and so is a
            # function of a product of two.
            may_be = [
                x.has_all(self.shapes[i], self.free[i]) and not x.activated
                for i, x in enumerate(self.values)
            ]
        return may_be.index(True) if may_be[0] != may_be[1] else None

    def _may_be_weight(self, i: int) -> bool:
        """True for leaves; of those that data picked from, other axes on both sides."""
        value = self.values[i]
        inside, outside = (
            _pairs(value.axes_in(places[i])) for places in (self.contract, self.free)
        )
        picked = inside and outside and inside != outside
        return bool(value.leaves and (picked or not value.picked))


@rule("dot_general", "ragged_dot_general")
def _product(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    if eqn.primitive.name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
    else:
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        contract, (left, right) = ragged.dot_dimension_numbers
        batch = left, (*right, *ragged.rhs_group_dimensions)
    product = Product(eqn, (values[0], values[1]), contract, batch)
    result, shape = _multiplied(trace, product), shape_of(eqn.outvars[0])
    if len(shape) > len(product.shape):  # one for each group of rows, in a gradient
        return result.moved(lambda parts: (free(shape[0]), *parts))
    return result


def _multiplied(trace: Trace, product: Product) -> Value:
    if not any(product.contract):  # einsum("io,o->io", w, scale)
        return product.multiplied(trace)
    weight = product.weight()
    if weight is not None:
        other = product.values[1 - weight]
        is_moved = not other.leaves and (other.one_hot or not other.data)
        if is_moved and not trace.is_transposed(product.eqn):
            return _moved(trace, product, weight)
        return _of_weight(trace, product, weight)
    # a (24, 6) @ b (6, 40), LoRA: two leaves. q (2, 16, 24) . k (2, 16, 24): none.
    if all(x.leaves and not x.data for x in product.values):
        return _of_leaves(trace, product)
    return _of_activations(trace, product)


def _moved(trace: Trace, product: Product, i: int) -> Value:
    """Leaves times one-hot rows, which pick, or times a constant, which moves an axis.

    One-hot rows (16, 96) @ w (96, 24) are a lookup. A constant q (24, 24) @ w (24, 40)
    moves w: axis 0 is q's now, and marked unless q only permutes.
    """
    weight, other = product.values[i], product.values[1 - i]
    change = product.placed if other.one_hot else product.turned
    result = weight.moved(functools.partial(change, i))
    if not other.one_hot and not other.selects(product.contract[1 - i]):
        # w (24, 40) times ones (40,) is a sum over axis 1. A row of a grid in each
        # turn of a loop is none: together they are a matrix.
        is_sum = not product.free[1 - i] and not other.turns
        side = SUMMED if is_sum else CONSTANT
        result = result.with_side(side, weight.axes_in(product.contract[i]))
    return pick(trace, product.eqn, weight, result, other)


def _of_weight(trace: Trace, product: Product, i: int) -> Value:
    """A product of leaves, operand i, and an activation: the use that makes matrices.

    x (2, 16, 24) @ w (24, 40): axis 0 of w is in, axis 1 out. Experts w (5, 24, 40)
    have a batch, axis 0. Backwards, g (2, 16, 40) @ w.T contracts the outputs.
    """
    eqn, is_transposed = product.eqn, trace.is_transposed(product.eqn)
    weight, weight_axes = product.values[i], product.contract[i]
    other = trace.given(product.values[1 - i], eqn)
    inside, outside = (OUT, IN) if is_transposed else (IN, OUT)
    side = dict.fromkeys(weight_axes, inside) | dict.fromkeys(product.batch[i], BATCH)
    sides = [side.get(a, outside) for a in range(len(product.shapes[i]))]
    kind = "convolved" if "padding" in eqn.params else "contracted"
    uses = trace.use(weight, kind, eqn, sides, by=other)
    trace.feed(weight)  # what made s, in x @ (w * s)
    for use in uses if not is_transposed else ():
        # lax.map(lambda row: x @ row, w.T): x does not turn with the rows, so they are
        # outputs. With x[i] @ w[i] it does, and they are a batch, as are layers, of
        # which an outer loop takes one at a time.
        rows = [(x, a) for (x, a), n in weight.rows.items() if n not in other.turns]
        own = [a for x, a in rows if x == use.path]
        trace.note("in turns", use, own[-1:])
    _note_factor(trace, product, i, other, uses)
    results: Results = {u: product.placed(i, weight.leaves[u.path]) for u in uses}
    if _may_be_data(weight, weight_axes, trace.shapes) and not is_transposed:
        results |= _as_scores(trace, product, i, other, uses)
    turns = weight.turns | other.turns
    return Value(data=True, results=results, sources=frozenset(uses), turns=turns)


def _note_factor(
    trace: Trace, product: Product, i: int, other: Value, uses: Sequence[Use]
) -> None:
    """Note where results in the operand beside leaves, operand i, go."""
    for use in uses if other.are_gates else ():
        trace.note("by gates", use)
    weight, other_axes = product.values[i], product.contract[1 - i]
    for before, parts in other.outputs.items():
        for place, a in zip(other_axes, product.contract[i], strict=True):
            for use in uses:
                met = frozenset(axes_in(weight.leaves[use.path], [a]))
                axes = axes_in(parts, [place])
                trace.note("contracts", before, axes, other=use, others=met)
        trace.note("batched", before, axes_in(parts, product.batch[1 - i]))
    _note_attention(trace, product.eqn, other, other_axes, uses)


def _as_scores(
    trace: Trace, product: Product, i: int, other: Value, uses: Sequence[Use]
) -> Results:
    """The scores that a product with leaves may be, if these are like data.

    q (2, 16, 24) @ rows.T, of learned rows (9, 24), is a score if a softmax follows,
    and an ordinary product otherwise.
    """
    weight = product.values[i]
    wide = any(_is_wide(trace.shapes[x.path], x.sides) for x in uses)
    is_last = _is_last(weight, product.contract[i], trace.shapes)
    for use in uses if wide and is_last else ():
        trace.note("either", use)

    def may_be_input(use: Use) -> bool:
        return not (weight.is_product and {IN} in use.sides.values())

    inputs = frozenset(use.path for use in uses if may_be_input(use))
    operands = frozenset(uses), frozenset(other.outputs)
    return _scores(product, operands if i == 0 else operands[::-1], inputs)


def _may_be_data(weight: Value, contract: Axes, shapes: Shapes) -> bool:
    """Whether data could be compared with the rows of a leaf, or of a product of two.

    Rows of a leaf (n, features) are contracted along its last axis. Of a product of two
    leaves, the scores show later which axis has the rows.
    """
    are_two = {bool(weight.inner(leaf)) for leaf in weight.leaves}
    return are_two == {True} or (
        are_two == {False} and _is_last(weight, contract, shapes)
    )


def _is_last(weight: Value, contract: Axes, shapes: Shapes) -> bool:
    """Whether it is contracted along the last axis of a leaf, as (n, features) are."""
    axes = _pairs(weight.axes_in(contract))
    wide = {x: [a for a, n in enumerate(shapes[x]) if n > 1] for x, _ in axes}
    return len(axes) == 1 and all(wide[x][1:] and a == wide[x][-1] for x, a in axes)


def _is_wide(shape: Axes, sides: Sides) -> bool:
    """Whether a factor is no smaller between two leaves than at the other side."""
    inner = [n for a, n in enumerate(shape) if INNER in sides.get(a, ())]
    batch = [n for a, n in enumerate(shape) if sides.get(a) == {BATCH}]
    return math.prod(inner) ** 2 * math.prod(batch) >= math.prod(shape)


def _of_leaves(trace: Trace, product: Product) -> Value:
    """The value of a product of two leaves: made of both."""
    result = replace(joined(product.values), results={})
    first, second = product.values
    inner = [
        x.axes_in(axes)
        for x, axes in zip(product.values, product.contract, strict=True)
    ]
    if any(first.inner(leaf) and second.inner(leaf) for leaf in first.leaves):
        for value, axes in zip(product.values, inner, strict=True):
            trace.note_input(value, product.eqn, axes)  # learned queries attend
    for i, value in enumerate(product.values):
        part = value.moved(functools.partial(product.placed, i))
        result = result.with_leaves(part, len(product.shape))
        result = result.with_side(INNER, inner[i])
    for place, other in zip(*product.contract, strict=True):
        pairs = *_pairs(first.axes_in([place])), *_pairs(second.axes_in([other]))
        if len(pairs) == 2 and pairs[0][0] != pairs[1][0]:
            for one, two in itertools.permutations(pairs):
                trace.met[one].add(two)
    return result


def _pairs(axes: Mapping[str, Iterable[int]]) -> list[tuple[str, int]]:
    """Leaves with each of their axes."""
    return [(leaf, axis) for leaf, of in axes.items() for axis in of]


def _of_activations(trace: Trace, product: Product) -> Value:
    """A product of two activations, or of constants: no use of a leaf.

    It may be attention, mix matrices by gates, or be one with a frozen kernel.
    """
    values, eqn = product.values, product.eqn
    result = _mixed(values)
    if any(product.is_constant):  # an identity changes nothing
        result.one_hot = any(
            x.one_hot and y.selects(of)
            for x, y, of in zip(values, values[::-1], product.free[::-1], strict=True)
        )
        result.softmax = next((x.softmax for x in values if x.data), "")
    for i, value in enumerate(values):
        result.choice -= trace.routes(values[1 - i], [value])
        trace.use(value, "elementwise", eqn)
        if not trace.is_transposed(eqn) and _is_by_kernel(product, i):
            trace.feed(value)
        place = product.turned if product.is_constant[1 - i] else product.placed
        if product.is_constant[1 - i]:  # a weighted sum
            note_sums(trace, eqn, value, product.contract[i])
        elif values[1 - i].softmax != SOFTMAX:  # which would mix three (16, 3, 96)
            others = values[1 - i].outputs
            _note_attention(trace, eqn, value, product.contract[i], others)
        for x, parts in value.results.items():
            if isinstance(x, Use):
                _note_result(trace, product, i, x, parts)
            if isinstance(x, Use) or product.is_constant[1 - i]:
                result.results[x] = place(i, parts)
    left, right = (frozenset(value.outputs) for value in values)
    if left and right:  # q (2, 16, 24) . k (2, 16, 24)
        result.results |= _scores(product, (left, right))
    return result


def _mixed(values: Sequence[Value]) -> Value:
    """The record of an operation that mixes elements: no softmax or one-hot is left."""
    return replace(joined(values), results={}, one_hot=False, softmax="")


def _is_by_kernel(product: Product, i: int) -> bool:
    """Whether a frozen kernel, or rows that data picked, take results of operand i.

    A frozen kernel comes from the arguments, and has outputs, as (24, 40) does.
    """
    value, other = product.values[i], product.values[1 - i]
    is_matrix = bool(product.free[1 - i] or other.turns - value.turns)
    is_kernel = other.given_floats and is_matrix and not product.batch[0]
    inside = [axes_in(parts, product.contract[i]) for parts in value.outputs.values()]
    return (is_kernel or bool(other.picked)) and any(inside)


def _note_result(
    trace: Trace, product: Product, i: int, use: Use, parts: AxisParts
) -> None:
    """Note where the result of a use goes, which is in operand i."""
    other = product.values[1 - i]
    inside, outside, along = (
        axes_in(parts, axes[i])
        for axes in (product.contract, product.free, product.batch)
    )
    is_transposed = trace.is_transposed(product.eqn)
    if not other.outputs:
        trace.note("batched", use, along)
    elif not is_transposed:
        for heads in _heads(use, parts, product, i):
            trace.note("heads", use, about=heads)
    # Backwards a softmax is part of a gradient, (softmax - one-hot).T @ h for the head.
    if other.are_gates and not is_transposed:
        trace.note("weighed", use, inside)
    elif other.data and not (is_transposed or product.free[1 - i]):
        trace.note("batched", use, inside)  # by weights of each sample and member
    trace.note("mixed", use, inside, others=frozenset(outside))


def _note_attention(
    trace: Trace, eqn: JaxprEqn, weights: Value, along: Axes, values: Collection[Use]
) -> None:
    """Note an attention, if `weights` are exponentials of scores, summed along keys.

    exp(q k^T - max) (2, 4, 16, 16) meets values (2, 16, 4, 6) along the keys.
    """
    for scores, parts in (
        weights.results.items() if not trace.is_transposed(eqn) else ()
    ):
        keys = axes_in(parts, along)
        if scores in weights.exponential and len(keys) == 1:
            _attend(trace, scores, min(keys), weights, along, values)


def _heads(use: Use, parts: AxisParts, product: Product, i: int) -> set[Heads]:
    """The heads of a use's outputs, if this product is one of an attention.

    Scores are q (batch, time, 12, 64) by k, over 64: the other outputs are heads, also
    in groups that share a key, (batch, time, 4, 3, 64). Weights by v (batch, time, 12,
    64) are over time: heads are the batch.
    """
    is_out = {axis for axis, sides in use.sides.items() if sides == {OUT}}
    is_scores = bool(axes_in(parts, product.contract[i]) & is_out)
    places = [*product.batch[i], *(product.free[i] if is_scores else ())]
    of_axis: dict[int, list[AxisPart]] = {}
    for x in [x for place in places for x in parts[place]]:
        if x.axis in is_out:
            of_axis.setdefault(x.axis, []).append(x)
    return {
        Heads(axis, math.prod(x.size for x in of), min(x.stride for x in of))
        for axis, of in of_axis.items()
    }


def _scores(
    product: Product,
    operands: tuple[frozenset[Use], frozenset[Use]],
    inputs: frozenset[str] = frozenset(),
) -> Results:
    """The result of a product whose free axes name the operand that they are of."""
    scores = Scores(id(product.eqn), operands, inputs)
    first, second = _free(product, 0, 0), _free(product, 1, 1)
    return {scores: tuple(map(operator.add, first, second))}


def _free(product: Product, i: int, axis: int) -> AxisParts:
    """The axes of the result that operand i alone has, as parts of this axis."""
    start = len(product.batch[0]) + i * len(product.free[0])
    stop = start + len(product.free[i])
    return tuple(
        (AxisPart(axis, 1, size),) if start <= a < stop and size > 1 else ()
        for a, size in enumerate(product.shape)
    )


def _attend(
    trace: Trace,
    scores: Scores,
    key: int,
    weights: Value,
    along: Axes,
    values: Collection[Use],
) -> None:
    """Give the query, key and value of an attention their roles.

    `along` are the axes of the weights that the keys are on. Another leaf that queries
    or keys are compared with is a table, as for relative positions.
    """
    for role, operand in (("key", key), ("query", 1 - key)):
        for use in scores.operands[operand]:
            is_factor = any(INNER in x for x in use.sides.values())
            if use.path not in scores.inputs:
                trace.note("attends", use, about=role)
            elif is_factor or role == "query" or use in values:
                trace.note_like_data(use.path, use.line, bool(use.constant))
    for use in values:
        trace.note("attends", use, about="value")
    paths = {use.path for uses in scores.operands for use in uses}
    for use in [x for x in weights.sources if x.path not in paths]:
        inputs = trace.inputs_of[use]
        if len([x for x in scores.operands if x & inputs]) == 1:
            parts = weights.results.get(use)
            axes = axes_in(parts, along) if parts else set()
            trace.note("compared", use, axes or None)


@rule("conv_general_dilated")
def _convolution(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    (data, kernel), params = values, eqn.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape, is_transposed = shape_of(eqn.invars[1]), trace.is_transposed(eqn)
    out, fan_in, *window = numbers.rhs_spec
    if _is_product(eqn, [shape[a] for a in window]):
        samples, features, *space = numbers.lhs_spec
        product = Product(eqn, (data, kernel), ([features], [fan_in]), ((), ()))
        first, second = product.free
        made = [first.index(samples), len(first) + second.index(out)]
        made += [first.index(a) for a in space]
        order = dict(zip(numbers.out_spec, made, strict=True))
        return _multiplied(trace, product).moved(
            lambda parts: tuple(parts[order[a]] for a in range(len(shape)))
        )
    data = trace.given(data, eqn)
    for use, parts in data.outputs.items():
        members = _members(parts[numbers.lhs_spec[1]], groups)[0]
        trace.note("grouped", use, members)
    if not kernel.leaves:
        result = _mixed(values)
        if kernel.given_floats and not is_transposed:
            trace.feed(result)
        for use, parts in kernel.outputs.items() if not is_transposed else ():
            outputs = frozenset(axes_in(parts, [out]))
            trace.note("kernel", use, axes_in(parts, [fan_in, *window]), others=outputs)
        return result
    last = fan_in if is_transposed else out
    sides = [OUT if a == last else IN for a in range(len(shape))]
    for a, step in zip(window, params["lhs_dilation"], strict=True):
        if step == shape[a] > 1 and not is_transposed:  # its windows do not overlap
            sides[a] = OUT
    by_leaf = {x: _members(of[out], groups) for x, of in kernel.leaves.items()}
    is_grouped = any(left > 1 for _, left in by_leaf.values())
    kind = "grouped" if is_grouped else "convolved"
    uses = trace.use(kernel, kind, eqn, sides, by=data)
    for use in uses:
        trace.note("grouped", use, by_leaf[use.path][0])
    source, new = {numbers.out_spec[1]: out}, shape_of(eqn.outvars[0])
    results: Results = {u: placed(kernel.leaves[u.path], source, new) for u in uses}
    turns = kernel.turns | data.turns
    return Value(data=True, results=results, sources=frozenset(uses), turns=turns)


def _is_product(eqn: JaxprEqn, window: Axes) -> bool:
    """True for a convolution whose window is one element: a product of features."""
    params = eqn.params
    steps = *params["window_strides"], *params["lhs_dilation"]
    groups = params["feature_group_count"], params["batch_group_count"]
    return {*steps, *groups, *window} == {1} and not any(map(any, params["padding"]))


def _members(parts: Sequence[AxisPart], groups: int) -> tuple[list[int], int]:
    """The axes of a leaf that `vmap` made groups of, and the groups that are left."""
    members = []
    for axis, _, size, whole, _ in parts[:-1]:
        if axis is None or not whole:
            break
        members.append(axis)
        groups //= size
    return members, groups


@rule("pallas_call")
def _pallas_call(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """A product of a leaf and an activation, if their widths leave no choice.

    Otherwise it is opaque to leaves; of activations alone, any function of them.
    """
    result = _mixed(values)
    shapes = [shape_of(v) for v in eqn.invars]
    weights = [i for i, x in enumerate(values) if x.leaves and not x.data]
    data = [i for i, x in enumerate(values) if x.sources and len(shapes[i]) > 1]
    if len(weights) == len(data) == len(eqn.outvars) == 1:
        shape, (*_, before) = shapes[weights[0]], shapes[data[0]]
        *_, after = shape_of(eqn.outvars[0])
        if before != after and shape.count(before) == shape.count(after) == 1:
            sides = [{before: IN, after: OUT}.get(n, BATCH) for n in shape]
            weight, by = values[weights[0]], values[data[0]]
            uses = trace.use(weight, "contracted", eqn, sides, by)
            return replace(result, sources=frozenset(uses))
    for value in values:
        trace.use(value, "opaque", eqn)
    return result
