"""Follow parameters through products: contractions and convolutions.

A product of a leaf with an activation is the use that makes it a matrix. One of two
leaves, or of a leaf and a vector of constants, is followed on.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.reading import attention
from jax_muon.reading import values as v
from jax_muon.reading.elementwise import elementwise
from jax_muon.reading.moves import note_sums, pick
from jax_muon.reading.trace import EITHER, ELEMENTWISE, RULES, Trace, rule
from jax_muon.reading.values import Parts, Use, Value, View, axes_in

Axes = Sequence[int]


class Product:
    """A contraction of two operands; each field has an entry for either.

    The result has the batch axes first, then the free axes of the first operand, and
    the free axes of the second last.
    """

    def __init__(self, eqn: JaxprEqn, contract: Sequence[Axes], batch: Sequence[Axes]):
        self.eqn, self.contract, self.batch = eqn, contract, batch
        self.shapes = one, two = [shape_of(x) for x in eqn.invars[:2]]
        used = [{*contract[i], *batch[i]} for i in (0, 1)]
        self.free = [
            [a for a in range(len(shape)) if a not in of]
            for shape, of in zip(self.shapes, used, strict=True)
        ]
        first = [one[a] for a in (*batch[0], *self.free[0])]
        self.shape = (*first, *(two[a] for a in self.free[1]))

    def placed(self, i: int, parts: Parts) -> Parts:
        """Axes of the result, from the axes of operand i."""
        count = len(self.batch[0])
        batch = zip(range(count), self.batch[i], strict=False)
        free = enumerate(self.free[i], count + i * len(self.free[0]))
        return v.placed(parts, dict([*batch, *free]), self.shape)

    def moved(self, i: int, value: Value, kind: str) -> Value:
        """Operand i as the result; contracted axes of leaves went this way."""
        return value.moved(lambda parts: self.placed(i, parts), kind)


@rule("dot_general", "ragged_dot_general")
def _product(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    if eqn.primitive.name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
    else:
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        contract, (left, right) = ragged.dot_dimension_numbers
        batch = left, (*right, *ragged.rhs_group_dimensions)
    product, pair = Product(eqn, contract, batch), values[:2]
    if values[2:] or not any(x.is_learned for x in pair):
        trace.routes(eqn, values)
    is_backward = trace.is_backward(eqn)
    is_outer = is_backward and all(product.free)  # the gradient of y @ vector
    # Four cases: of elements; of two leaves; of no leaf; and, last, of a leaf and what
    # is none, which makes it a matrix if that is data.
    if not any(contract) and not is_outer:  # of elements: einsum("io,o->io", w, scale)
        both = [product.moved(i, x, v.SUMMED) for i, x in enumerate(pair)]
        result = elementwise(trace, eqn, "mul", both, product.shape)
        is_mixed = {bool(x.gate) for x in both if x.data} == {False, True}
        is_outer = all(x.data for x in both) and all(product.free)
        return replace(result, gate=v.MIXED) if is_mixed or is_outer else result
    if all(x.is_learned for x in pair):
        like = _like_data(trace, product, pair)
        if not like:
            return _of_leaves(product, pair)
        pair = [trace.as_data(x, eqn) if i in like else x for i, x in enumerate(pair)]
    plain = [i for i in (0, 1) if pair[i].is_learned]
    i = plain[0] if plain else _updated_weight(trace, product, pair)
    if i is None:
        return _of_data(trace, product, pair)
    weight, other = pair[i], pair[1 - i]
    is_constant = not other.data and not is_backward
    if is_constant:
        if not product.free[1 - i]:
            return product.moved(i, weight, v.SUMMED)  # a weighted sum of its rows
        if weight.data:  # numbers @ (x + positions)
            return _of_data(trace, product, pair)
    elif not is_backward:
        _note_added(trace, eqn, other, weight)
    other = trace.as_data(other, eqn)
    if other.gate == v.HOT and not is_backward and not is_constant:
        return pick(trace, eqn, weight, product.moved(i, weight, v.PICKED), other)
    result = _of_weight(trace, product, weight, i, other, not is_constant)
    is_given = is_constant or values[1 - i].is_learned
    return replace(result, given=is_given and not is_backward)


def _note_added(trace: Trace, eqn: JaxprEqn, data: Value, weight: Value) -> None:
    """Note leaves that were added to data: tokens beside x, or positions, are like it.

    Under a mask, times data or beside noise, one may be a matrix that makes data.
    """
    for leaf, view in data.leaves.items():
        if view.went(v.PICKED, v.INNER) or len(axes_in(view.parts)) < 2:
            continue
        if view.scaled:
            trace.doubt([leaf], "data multiplies its elements, or masks a matrix", eqn)
        elif data.given or data.sources:
            trace.use({leaf: view}, "input", eqn)
        else:  # as noise alone is
            why = "what is added to it shows neither data nor a matrix"
            trace.doubt([leaf, *weight.leaves], why, eqn)


def _like_data(trace: Trace, product: Product, pair: Sequence[Value]) -> list[int]:
    """Which of two values of leaves is like data; neither in a @ b of LoRA."""
    shared = pair[0].leaves.keys() & pair[1].leaves.keys()
    if shared & pair[0].went(v.INNER).keys() & pair[1].went(v.INNER).keys():
        return [0, 1]  # learned queries attend to each other
    like = []
    for i, value in enumerate(pair):
        # Free axes that no leaf has were repeated: queries (5, 24) as (2, 5, 24) @ w.
        shape = enumerate(product.shapes[i])
        sizes = [n if a in product.free[i] else 1 for a, n in shape]
        views = value.leaves.values()
        are_functions = any(x.activated and x.went(v.INNER) for x in views)
        are_vectors = all(len(trace.wide(x)) < 2 for x in value.leaves)
        if are_vectors or are_functions:
            like.append(i)
        elif not (shared or value.covers(sizes)) and product.free[i]:  # repeated
            trace.use(value.leaves, "input", product.eqn)
            like.append(i)
    if len(like) == 1 and not product.free[like[0]]:  # numbers (3,) times (3, 24, 40)
        many = [x for x in pair[1 - like[0]].leaves if len(trace.wide(x)) > 2]
        trace.doubt(many, "learned numbers mix its parts", product.eqn)
    return like


def _of_leaves(product: Product, pair: Sequence[Value]) -> Value:
    """The value of a product of two leaves: made of both."""
    leaves: dict[str, View] = {}
    for i, value in enumerate(pair):
        for leaf, view in value.leaves.items():
            is_own = leaf in pair[1 - i].leaves  # w.T @ w, einsum("ni,ni->n", w, w)
            parts, kind = product.placed(i, view.parts), v.SUMMED if is_own else v.INNER
            view = replace(view.moved(parts, kind), activated=is_own)
            leaves.setdefault(leaf, view)
    return Value(leaves=leaves)


def _updated_weight(
    trace: Trace, product: Product, pair: Sequence[Value]
) -> int | None:
    """The operand that is a leaf plus data of its shape, or picked by data, if any.

    x @ (frozen + a @ b) and x @ ups[expert]: the leaf has axes on both sides.
    """
    found = {}
    for i, leaf, view in [(n, *x) for n in (0, 1) for x in pair[n].leaves.items()]:
        # a (24, 4) @ b (4, 40), added to data: a has axis 0 inside and axis 1 gone, b
        # axis 0 gone and axis 1 outside. A bias (40,) has none inside.
        gone = view.went(v.INNER, v.LOOP, v.INDEX)  # on either side
        inside = axes_in(view.parts, product.contract[i]) or gone
        outside = axes_in(view.parts, product.free[i]) or gone
        if inside and outside and inside != outside:
            found[leaf] = i
            if view.activated:
                why = "data multiplies a function of it and of data"
                trace.doubt([leaf], why, product.eqn)
    if len({*found.values()}) > 1:
        trace.doubt(found, "parameters that met data multiply each other", product.eqn)
        return None
    return next(iter(found.values()), None)


def _of_weight(
    trace: Trace, product: Product, weight: Value, i: int, other: Value, is_data: bool
) -> Value:
    """A product of leaves, operand i, and an activation: the use that makes matrices.

    Or one with constants, after which the leaves are used and no matrices yet.

    x (2, 16, 24) @ w (24, 40): axis 0 of w is in, axis 1 out. Experts w (5, 24, 40)
    have a batch, axis 0. Backwards, g (2, 16, 40) @ w.T contracts the outputs.
    """
    eqn, (contract, met) = product.eqn, (product.contract[i], product.contract[1 - i])
    inside, outside = (v.OUT, v.IN) if trace.is_backward(eqn) else (v.IN, v.OUT)
    side = dict.fromkeys(contract, inside) | dict.fromkeys(product.batch[i], v.BATCH)
    sides = [side.get(a, outside) for a in range(len(product.shapes[i]))]
    if not product.free[1 - i]:
        own = {x: of for x, of in other.sources.items() if x.path not in weight.leaves}
        other = replace(other, sources=own)  # a power iteration, of one vector
    dtype = getattr(eqn.outvars[0].aval, "dtype", int)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    # grid (64, 2) @ w (2, 40); or a table (2, 40) that the grid resizes
    kind = "complex" if is_complex else "contracted" if is_data else "resized"
    uses = trace.use(weight.leaves, kind, eqn, sides, other)
    _doubt_factors(trace, product, weight, i, other)
    for before, parts in other.sources.items():
        for axis in axes_in(parts, product.batch[1 - i][: len(product.batch[0])]):
            trace.facts.batched[before, axis] = None
        for place, at in zip(met, contract, strict=True):
            summed = axes_in(parts, [place])
            _doubt_order(trace, eqn, before, summed)
            # Experts (tokens, experts, 40), of (experts, in, 40) or with gates.
            gated = {a for a in summed if (before, a) in trace.facts.gated}
            if gated or summed & before.members:
                of = weight.leaves.items()
                met_by = [x for x, view in of if axes_in(view.parts, [at])]
                why = "a product may sum over several matrices of it"
                trace.doubt([before.path, *met_by], why, eqn)
    made = {x: product.placed(i, weight.leaves[x.path].parts) for x in uses}
    return Value(data=True, sources=made)


def _doubt_order(trace: Trace, eqn: JaxprEqn, use: Use, summed: set[int]) -> None:
    """Doubt axes that the order of products in one einsum decides.

    In einsum("hlm,mhe,hed->ld", weights, x, w) the sum over h comes with that over e,
    and h is in, or after it, and h is a batch; sizes decide which is cheaper.
    """
    is_one = jaxprs.are_in_one_einsum(use.calls[-1], eqn)
    if is_one and summed & use.axes(v.BATCH):
        why = "an einsum sums over several matrices of it, or over inputs of one,"
        trace.doubt([use.path], why, eqn)


def _doubt_factors(
    trace: Trace, product: Product, weight: Value, i: int, other: Value
) -> None:
    """Note where one of two parameters that multiply each other may be like data.

    x @ (a @ b) are two matrices, as is anything that was added to another matrix. But
    x @ (b @ a).T may compare x with learned rows b, and a softmax may weigh rows a.
    """
    inner, contract = weight.went(v.INNER), product.contract[i]
    if inner and not weight.data and inner.keys() == weight.leaves.keys():
        met = {x: axes_in(weight.leaves[x].parts, contract) for x in inner}
        if other.gate or any(axes == {trace.wide(x)[-1]} for x, axes in met.items()):
            trace.doubt(inner, EITHER, product.eqn)
    if other.gate == v.MASKED:
        why = "it has rows that a one-hot picks, or a matrix under a mask"
        trace.doubt(weight.leaves, why, product.eqn)
    at = {v.SOFT: product.free[i], v.MIXED: contract}.get(other.gate, ())
    mixed = [x for x, of in weight.leaves.items() if len(axes_in(of.parts, at)) > 1]
    trace.doubt(mixed, "weights of data mix its parts", product.eqn)


def _of_data(trace: Trace, product: Product, pair: Sequence[Value]) -> Value:
    """A product of two activations, or of constants: no use of a leaf."""
    eqn, is_forward = product.eqn, not trace.is_backward(product.eqn)
    for i, value in enumerate(pair):
        other, contract = pair[1 - i], product.contract[i]
        if is_forward:
            _take_outputs(trace, product, i, value, other)
            _doubt_scaled(trace, eqn, value, contract, product.free[i])
        for use, parts in value.sources.items() if is_forward else ():
            inside, left = axes_in(parts, contract), axes_in(parts, product.free[i])
            _doubt_order(trace, eqn, use, inside)
            if left and other.gate and not other.scores:
                trace.facts.gated |= dict.fromkeys((use, a) for a in inside)
        note_sums(trace, eqn, value, product.moved(i, value, v.SUMMED))
        if is_forward and value.gate == v.SOFT:
            of = value.sources.items()
            rows = [(x.path, p) for x, p in of if axes_in(p, product.free[i])]
            uses = [x for x, p in rows if not axes_in(p, contract)]
            why = "a softmax of its products weighs data, as for learned queries,"
            trace.doubt(uses, why, eqn)
    pair = [trace.as_data(x, eqn) if x.leaves else x for x in pair]
    scores = {}
    if is_forward:
        attention.note_attention(trace.facts.attention, product, pair, trace.calls)
        scores = attention.scores_of(trace.facts.attention, product, pair)
    result = replace(v.joined(pair).bare(product.shape), scores=scores, given=False)
    for i, value in enumerate(pair):
        if not pair[1 - i].data:
            made = {x: _mixed(product, i, of) for x, of in value.sources.items()}
            result = replace(result, sources={**result.sources, **made})
    if all(x.data for x in pair):
        chosen = pair[0].chosen & pair[1].chosen  # of a one-hot and a top-k's values
        result = replace(result, gate="", chosen=chosen)
    return result


def _take_outputs(
    trace: Trace, product: Product, i: int, value: Value, other: Value
) -> None:
    """Note that data or a constant takes the outputs in operand i, or weighs them."""
    free, batch = product.free[1 - i], product.batch[i]
    of = value.sources.items()
    # Constants (4, 6, 8) for each of 4 heads (2, 4, 6), but none for each sample.
    heads = {a for _, parts in of for a in batch if axes_in(parts, [a])}
    is_matrix = free and heads == {*batch}
    # A graph (5, 5) takes rows, and no outputs.
    met = {x: p for x, p in of if axes_in(p, product.contract[i]) or not axes_in(p)}
    value = replace(value, sources=met)
    if (other.given and is_matrix) or other.leaves or _are_rows(other):
        trace.take(value, "")
    elif (is_matrix and not other.data) or (other.given and not free and not batch):
        trace.weigh(value, "")  # by numbers of the loss, or a vector of the arguments


def _doubt_scaled(
    trace: Trace, eqn: JaxprEqn, value: Value, inside: Axes, outside: Axes
) -> None:
    """Doubt matrices that data scaled for each sample, as the styles of a StyleGAN.

    w (3, 24, 40) * styles (2, 1, 24, 1) is a kernel for each of two images. Queries
    (2, 16, 4, 8) * gains (4, 8) are none: 16 is no axis of the gains.
    """
    for (leaf, _), parts in value.scaled.items():
        are_own = all(axes_in([parts[a]]) or not parts[a] for a in outside)
        if are_own and _is_kernel(parts, inside, outside):
            trace.doubt([leaf], "data scales its elements for each sample", eqn)


def _is_kernel(parts: Parts, inside: Axes, outside: Axes) -> bool:
    """Whether axes of a leaf are on both sides: (24, 40) has 24 inside, 40 outside."""
    fan_in, fan_out = axes_in(parts, inside), axes_in(parts, outside)
    return bool(fan_in - fan_out and fan_out - fan_in)


def _mixed(product: Product, i: int, parts: Parts) -> Parts:
    """Axes of operand i in its product with a constant, which mixes what it sums over.

    z (2, 16, 4) @ identity (4, 4) has something of the outputs (4,) along the last.
    """
    placed, count = product.placed(i, parts), len(product.batch[0])
    mixed = tuple((a, 1) for a in axes_in(parts, product.contract[i]))
    start = count + (1 - i) * len(product.free[0])
    new = range(start, start + len(product.free[1 - i]))
    return tuple(mixed if a in new else x for a, x in enumerate(placed))


def _are_rows(value: Value) -> bool:
    """Whether it has rows of tables that data picked, and nothing else."""
    return {x.kind for x in value.sources} == {"picked"}


@rule("conv_general_dilated")
def _convolution(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    (data, kernel), params = values, eqn.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape, is_backward = shape_of(eqn.invars[1]), trace.is_backward(eqn)
    (out, fan_in, *window), new = numbers.rhs_spec, shape_of(eqn.outvars[0])
    if data.is_learned and kernel.leaves:
        if data.covers(shape_of(eqn.invars[0])):  # it is no x, repeated for each sample
            trace.doubt({**data.leaves, **kernel.leaves}, EITHER, eqn)
        else:
            trace.use(data.leaves, "input", eqn)
    data = trace.as_data(data, eqn)
    if data.gate == v.HOT:
        trace.doubt(kernel.leaves, "a one-hot may pick its rows", eqn)
    if not kernel.leaves:
        if not is_backward and (kernel.given or _are_rows(kernel)):
            trace.take(data, "")
        if not is_backward:
            both, of_uses = ([fan_in, *window], [out]), kernel.sources.items()
            made = [x.path for x, parts in of_uses if _is_kernel(parts, *both)]
            trace.doubt(made, "its outputs are kernels for data", eqn)
            _doubt_scaled(trace, eqn, kernel, *both)
        return Value(data=True, sources=v.joined([data, kernel]).bare(new).sources)
    # A kernel (3, 3, 24, 40) has windows and 24 channels in, and 40 channels out; in a
    # gradient, back to the inputs, 24 channels are the outputs.
    last, kind = fan_in if is_backward else out, "convolved"
    sides = [v.OUT if a == last else v.IN for a in range(len(shape))]
    for a, step in zip(window, params["lhs_dilation"], strict=True):
        if step == shape[a] > 1 and not is_backward:  # its windows do not overlap
            sides[a], kind = v.OUT, "transposed"
    sources: dict[Use, Parts] = {}
    for leaf, view in kernel.leaves.items():
        # Of 5 members (5, 3, 3, 24, 40) vmap makes 5 groups of (3, 3, 24, 200), and
        # nothing tells these from groups of a kernel for all.
        if groups > 1 and len(view.parts[out]) > 1:
            trace.doubt([leaf], "its groups may be members of vmap", eqn)
        kind = "grouped" if groups > 1 else kind
        for use in trace.use({leaf: view}, kind, eqn, sides, data):
            sources[use] = v.placed(view.parts, {numbers.out_spec[1]: out}, new)
    given = values[0].is_learned and not is_backward
    return Value(data=True, given=given, sources=sources)


@rule("pallas_call")
def _kernel(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value | list[Value]:
    """A product of a leaf and an activation, if their widths leave no choice."""
    shapes = [shape_of(x) for x in eqn.invars]
    weights = [i for i, x in enumerate(values) if x.is_learned]
    data = [i for i, x in enumerate(values) if x.sources and len(shapes[i]) > 1]
    if len(weights) == len(data) == len(eqn.outvars) == 1:
        shape, (*_, before) = shapes[weights[0]], shapes[data[0]]
        *_, after = new = shape_of(eqn.outvars[0])
        if before != after and shape.count(before) == shape.count(after) == 1:
            sides = [{before: v.IN, after: v.OUT}.get(n, v.BATCH) for n in shape]
            leaves, other = values[weights[0]].leaves, values[data[0]]
            uses = trace.use(leaves, "contracted", eqn, sides, other)
            return Value(data=True, sources=dict.fromkeys(uses, ((),) * len(new)))
    return RULES[ELEMENTWISE](trace, eqn, values)
