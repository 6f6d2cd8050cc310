"""Follow parameters where axes are moved, cut, indexed, joined and reduced."""

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn, Literal

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.reading import attention
from jax_muon.reading import values as v
from jax_muon.reading.trace import EITHER, Trace, rule
from jax_muon.reading.values import Parts, Shape, Value, View, axes_in


@rule("squeeze")
def _squeeze(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Without axes of one element: a device's matrix (24, 40) of (1, 24, 40)."""
    lost, count = eqn.params["dimensions"], len(shape_of(eqn.invars[0]))
    left = [a for a in range(count) if a not in lost]
    return values[0].moved(lambda parts: tuple(parts[a] for a in left), v.INDEX)


@rule("reshape", "expand_dims")
def _reshape(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    # Batching rules of `vmap` write a transposition into a `reshape`.
    is_turned = eqn.primitive.name == "reshape" and eqn.params["dimensions"]
    order = eqn.params["dimensions"] if is_turned else range(len(old))
    turned = [old[a] for a in order]
    return values[0].moved(lambda x: v.reshaped([x[a] for a in order], turned, new))


@rule("transpose", "broadcast_in_dim", "pad", "rev", "tile", "all_gather")
@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "all_to_all")
@rule("all_gather_invariant", "reduce_scatter", "ppermute")
def _move(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Rearrange axes, or change their sizes."""
    params, old, new = eqn.params, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    source = dict(enumerate(params.get("permutation", range(len(new)))))
    if "broadcast_dimensions" in params:
        to = enumerate(params["broadcast_dimensions"])
        source = {place: a for a, place in to if old[a] == new[place]}
    elif len(old) < len(new):  # from all devices: a shard (3, 20) as (4, 3, 20)
        at = params["all_gather_dimension"]
        source = {a: a - (a > at) for a in range(len(new)) if a != at}
    elif len(old) > len(new):
        source = {a: a + (a >= params["scatter_dimension"]) for a in range(len(new))}
    return values[0].moved(lambda parts: v.placed(parts, source, new))


@rule("copy", "name", "optimization_barrier", "reduce_precision")
def _same(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    return values


# --- parts ----------------------------------------------------------------------------


def cut(
    trace: Trace,
    eqn: JaxprEqn,
    value: Value,
    new: Shape,
    kind: str,
    starts: Sequence[int] = (),
) -> Value:
    """A part of each axis; an axis with one element left is gone in this way."""
    old = shape_of(eqn.invars[0])
    if starts:
        attention.note_slices(trace.facts.attention, value, old, new, starts)
    for leaf, view in value.leaves.items():
        changed = [of for of, m, n in zip(view.parts, old, new, strict=True) if m != n]
        is_loop = kind == v.LOOP and not axes_in(changed)  # over several leaves
        if not is_loop and any(axis == v.JOINED for of in changed for axis, _ in of):
            trace.lose([leaf], "it is cut out of an array with others", eqn)
    source = {a: a for a, n in enumerate(old) if new[a] > 1 or n == 1}
    return value.moved(lambda parts: v.placed(parts, source, new), kind)


@rule("slice", "split", "unstack")
def _slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Parts along axes; of an unstack, without the axis of one element."""
    axis, results = eqn.params.get("axis", 0), []
    starts = [*eqn.params.get("start_indices", [0] * len(shape_of(eqn.invars[0])))]
    for x in eqn.outvars:
        shape, is_row = [*shape_of(x)], eqn.primitive.name == "unstack"
        shape[axis:axis] = [1] * is_row
        part = cut(trace, eqn, values[0], shape, v.INDEX, starts)
        starts[axis] += shape[axis]
        if is_row:
            part = part.moved(lambda of: (*of[:axis], *of[axis + 1 :]))
        results.append(part)
    return results


@rule("dynamic_slice")
def _dynamic_slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    value, *indices = values
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    index = v.joined(indices)
    if index.data:
        return pick(trace, eqn, value, cut(trace, eqn, value, new, v.PICKED), index)
    places = [x for x, m, n in zip(eqn.invars[1:], old, new, strict=True) if m > n == 1]
    kind = v.INDEX if all(isinstance(x, Literal) for x in places) else v.LOOP
    starts = [x.val if isinstance(x, Literal) else 0 for x in eqn.invars[1:]]
    starts = [*map(int, starts)] if kind == v.INDEX else []
    return looped(trace, eqn, value, cut(trace, eqn, value, new, kind, starts))


def looped(trace: Trace, eqn: JaxprEqn, before: Value, value: Value) -> Value:
    """The element of a value that a turn of a loop takes, with its axes noted."""
    by_layers = jaxprs.is_in(jaxprs.SCAN_LAYERS, [*trace.calls, eqn])
    for leaf, axes in value.went(v.LOOP).items():
        for axis in axes - before.leaves[leaf].went(v.LOOP) - {v.JOINED}:
            trace.scans[leaf, axis] = "scan_layers" if by_layers else "lax.scan"
    return value


@rule("gather")
def _gather(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    (value, index), numbers = values[:2], eqn.params["dimension_numbers"]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    batch, indexed = numbers.operand_batching_dims, numbers.collapsed_slice_dims
    kept = [a for a in range(len(old)) if a not in (*batch, *indexed)]
    rows = [a for a in range(len(new)) if a not in numbers.offset_dims]
    # The axis of the operand of each axis of the result.
    pairs = zip(numbers.offset_dims, kept, strict=True)
    source = {a: of for a, of in pairs if new[a] > 1 or old[of] == 1}
    places = map(rows.__getitem__, numbers.start_indices_batching_dims)
    source |= dict(zip(places, batch, strict=True))
    if index.data:
        result = value.moved(lambda of: v.placed(of, source, new), v.PICKED)
        return pick(trace, eqn, value, result, index)
    wide = [a for a in rows if new[a] > 1 and a not in source]
    met = {x: [view.parts[a] for a in indexed] for x, view in value.leaves.items()}
    beside = [x for x, of in met.items() if v.JOINED in {a for y in of for a, _ in y}]
    trace.lose(beside, "constants pick elements of it and others", eqn)
    # Of w (8, 24, 40): w[3] is (24, 40), without axis 0; w[[1, 3]] is (2, 24, 40), with
    # it; and the first axis of w[[1, 3], [0, 2]] (2, 40) has both axes 0 and 1.
    if not wide:  # w[3], by a number that is not known here: other than all others
        starts = [hash(tuple(map(id, (*trace.calls, eqn))))] * len(old)
        cut(trace, eqn, value, eqn.params["slice_sizes"], v.INDEX, starts)

    def taken(parts: Parts) -> Parts:  # where several axes are mixed, all have all
        mixed = tuple((axis, 1) for axis in axes_in(parts, indexed))
        result = v.placed(parts, source, new)
        return tuple(mixed if a in wide else x for a, x in enumerate(result))

    return value.moved(taken, v.INDEX)


def pick(
    trace: Trace, eqn: JaxprEqn, before: Value, value: Value, index: Value
) -> Value:
    """Elements of a value at places that data says.

    emb[ids] is a table; ups[experts] may be matrices, if two axes or more are left.
    """
    views = value.leaves.values()
    rows = views and all(len(axes_in(x.parts)) < 2 for x in views)
    by = [(use, is_sure and not rows) for use, is_sure in index.chosen]
    index = replace(index, chosen=frozenset(by))  # rows of a decoder, or of experts
    trace.routes(eqn, [index, replace(before, chosen=frozenset())])
    if not value.leaves:
        chosen, is_data = value.chosen | index.chosen, before.data or index.data
        given = value.given and not index.data
        gate = v.HOT if before.gate == v.HOT and not before.data else ""
        return replace(value, data=is_data, gate=gate, given=given, chosen=chosen)
    if before.went(v.INNER):
        if sum(len(axes_in(of.parts)) for of in views) > 1:
            trace.lose(before.went(v.INNER), EITHER, eqn)
        value = trace.as_data(value, eqn)
    picked = {x: of for x, of in value.leaves.items() if of.went(v.PICKED)}
    uses = trace.use(picked, "picked", eqn)
    sources = {x: value.leaves[x.path].parts for x in uses}
    leaves = value.leaves.items()
    left = {x: of for x, of in leaves if len(axes_in(of.parts)) > 1}
    return Value(data=True, leaves=left, sources=sources)


@rule("random_bits", "rng_bit_generator", "random_wrap", "random_seed")
def _random(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    return Value(data=True)


# --- several arrays in one ------------------------------------------------------------


@rule("concatenate", "stack")
def _concatenate(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Arrays side by side; of several leaves none can be cut out again."""
    shape, params = shape_of(eqn.outvars[0]), eqn.params
    axis = params["axis"] if "axis" in params else params["dimension"]
    if eqn.primitive.name == "stack":
        values = [x.moved(lambda of: (*of[:axis], (), *of[axis:])) for x in values]
    source = {a: a for a in range(len(shape))}
    are_several = len({frozenset(x.leaves) for x in values if x.leaves}) > 1
    mark = ((v.JOINED, 1),) if are_several else ()

    def marked(parts: Parts) -> Parts:
        of = v.placed(parts, source, shape)
        return (*of[:axis], of[axis] + mark, *of[axis + 1 :])

    result = together(trace, eqn, [x.moved(marked) for x in values], axis)
    is_hot = v.joined(values).gate == v.HOT  # beside a column of ones, too
    return replace(result, gate=v.HOT) if is_hot else result


def together(
    trace: Trace, eqn: JaxprEqn, values: Sequence[Value], axis: int = -1
) -> Value:
    """Values in one array: leaves beside data stay leaves if all their axes are there.

    Class tokens (1, 24) before x (2, 16, 24) are repeated for each sample: they are
    like data. A new kernel (24, 8) beside a frozen one (24, 40) is one with it; beside
    one that was computed, it might as well be rows of data.
    """
    if any(x.data for x in values):
        others = [x for x in values if x.data and not x.leaves]
        are_given = axis < 0 or all(x.given for x in others)
        values = [*values]
        for i, value in enumerate(values):
            if value.leaves and not _covers(value, axis):
                values[i] = trace.as_data(value, eqn)
            elif not are_given:
                wide = [x for x in value.leaves if len(trace.wide(x)) > 1]
                why = "it lies beside what data makes, rows or a kernel"
                trace.doubt(wide, why, eqn)
    leaves: dict[str, View] = {}
    for leaf, view in [x for value in values for x in value.leaves.items()]:
        other = leaves.setdefault(leaf, view)
        activated = view.activated and other.activated
        leaves[leaf] = replace(other, activated=activated)
        are_rows = axis >= 0 and other is not view and view.went(v.INDEX, v.LOOP)
        if are_rows or other.gone != view.gone:
            trace.lose([leaf], "parts of it lie side by side", eqn)
    return replace(v.joined(values), leaves=leaves, gate="")


def _covers(value: Value, axis: int) -> bool:
    """Whether each axis but this one is some leaf's."""
    view = next(iter(value.leaves.values()))
    sizes = [max((n for _, n in of), default=1) for of in view.parts]
    return value.covers([1 if a == axis else n for a, n in enumerate(sizes)])


@rule("dynamic_update_slice", "scatter", "scatter-add", "scatter-sub")
@rule("scatter-mul", "scatter-min", "scatter-max")
def _replaced(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Updates in an array at some places; leaves that are written so are lost."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    array, updates = values[0], values[1 if is_slice else 2]
    index = v.joined([x for x in values if x is not array and x is not updates])
    trace.routes(eqn, [index, updates])
    wide = [x for x in updates.leaves if len(trace.wide(x)) > 1]
    trace.lose(wide, "it is written into an array", eqn)
    updates = trace.as_data(updates, eqn) if updates.leaves else updates
    if updates.data and array.is_learned:
        array = trace.as_data(array, eqn)
    shape = shape_of(eqn.outvars[0])
    source = {a: a for a in range(len(shape))}
    if not is_slice:
        numbers = eqn.params["dimension_numbers"]
        # zeros (16, 24).at[ids].add(x (32, 24)): axis 1 is that of the updates. With
        # zeros (16, 8).at[rows, ids].set(gates (16, 2)) no axis is.
        rows = *numbers.inserted_window_dims, *numbers.operand_batching_dims
        kept = [a for a in source if a not in rows]
        source = dict(zip(kept, numbers.update_window_dims, strict=True))
    before = updates
    updates = updates.moved(lambda parts: v.placed(parts, source, shape))
    note_sums(trace, eqn, before, updates)
    result = v.joined([array, index.bare(shape), updates])
    return replace(result, leaves=array.leaves, chosen=index.chosen | updates.chosen)


# --- reductions -----------------------------------------------------------------------


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
@rule("reduce_and", "reduce_or", "reduce_xor")
def _reduce(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """A sum over some axes; argmax chooses among products."""
    (value,), name, axes = values, eqn.primitive.name, eqn.params["axes"]
    kept = [a for a in range(len(shape_of(eqn.invars[0]))) if a not in axes]
    result = value.moved(lambda parts: tuple(parts[a] for a in kept))
    if name == "reduce_sum":
        note_sums(trace, eqn, value, result)
        return result
    if name in ("argmax", "argmin"):
        return _chosen(value, result, shape_of(eqn.outvars[0]), axes)
    leaves = {x: replace(of, activated=True) for x, of in result.leaves.items()}
    return replace(result, leaves=leaves, scaled={}, gate="")


def note_sums(trace: Trace, eqn: JaxprEqn, before: Value, after: Value) -> None:
    """Note sums of products of elements: x * vector, or x[:, :, None] * matrix."""
    for use, parts in before.sources.items():
        left = axes_in(after.sources.get(use, ()))
        outputs = left & use.axes(v.OUT)  # of experts (tokens, experts, out)
        for axis in (axes_in(parts) - left) & use.axes(v.OUT) if outputs else ():
            is_before = axis < min(outputs) or (use, axis) in trace.facts.gated
            if is_before and (use, axis) not in trace.facts.batched:
                trace.doubt([use.path], "a sum goes over some of its outputs", eqn)
    for leaf, view in before.leaves.items():  # beside data, or times constants
        left = axes_in(after.leaves[leaf].parts) if leaf in after.leaves else {0}
        is_wide = any(n > 1 for of in view.parts for a, n in of if a is None)
        if axes_in(view.parts) - left and left and (view.scaled or is_wide):
            trace.doubt([leaf], "it may be a matrix in a product and a sum", eqn)
    # In (x[:, :, None] * w).sum(1) with w (24, 40), x was repeated along 40 and summed
    # along 24: a product. In (x * vector).sum(-1) it was repeated along nothing.
    for (leaf, is_repeated), parts in before.scaled.items():
        inside = axes_in(before.scaled[leaf, False])
        inside -= axes_in(after.scaled[leaf, False])
        if inside and not is_repeated:
            trace.weigh(before, leaf)
        elif inside and axes_in(parts) - inside:
            trace.take(before, leaf)
            trace.doubt([leaf], "it may be a matrix in a product and a sum", eqn)


def _chosen(value: Value, result: Value, shape: Shape, along: Sequence[int]) -> Value:
    """Numbers of the largest outputs of some products.

    Of (tokens, experts) along the experts; along the tokens, experts may choose them.
    """
    chosen = set(result.chosen)
    for use, parts in value.sources.items():
        if axes_in(parts) & use.axes(v.OUT):
            is_sure = bool(axes_in(parts, along) & use.axes(v.OUT))
            chosen.add((use, is_sure))
    return replace(result.bare(shape), chosen=frozenset(chosen), gate="")


@rule("top_k", "approx_top_k", "sort")
def _top_k(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The largest elements and their numbers.

    Values of a top-k say what was chosen, as a threshold does; all sorted ones do not.
    """
    shape, name = shape_of(eqn.outvars[0]), eqn.primitive.name
    along = {"sort": "dimension", "top_k": "axis"}.get(name, "reduction_dimension")
    axis = eqn.params.get(along, -1) % len(shape)
    source = {a: a for a in range(len(shape)) if a != axis}
    first, *others = [x.moved(lambda of: v.placed(of, source, shape)) for x in values]
    first = replace(first, gate="", scaled={})
    if name == "sort" and not others:
        return [first]
    # Of logits (16, 8) of experts, values (16, 2) and numbers (16, 2): the router's use
    # is in `chosen` of both, and no axis of them has its outputs.
    numbers = _chosen(values[0], first, shape, [axis])
    trace.routes(eqn, [numbers, *others])
    sure = frozenset((use, True) for use, _ in numbers.chosen)
    results = [v.joined([x, numbers]) for x in others]
    results = results or [replace(numbers, chosen=sure)]
    is_top_k = name != "sort"
    return [replace(first, chosen=numbers.chosen) if is_top_k else first, *results]
