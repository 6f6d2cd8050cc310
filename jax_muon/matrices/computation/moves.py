"""Follow parameters where axes are moved, cut, indexed, joined and reduced."""

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.trace import Trace, rule
from jax_muon.matrices.computation.values import (
    CONSTANT,
    LOST,
    SCATTERED,
    SUMMED,
    AxisParts,
    Shape,
    Value,
    axes_in,
    fit,
    fitted,
    joined,
    joined_places,
    placed,
    reshaped,
    scattered,
)


@rule(
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pad", "tile"
)
@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
@rule("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "ppermute")
def _move(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Rearrange axes, or change their sizes."""
    name, params = eqn.primitive.name, eqn.params
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name in ("reshape", "squeeze", "expand_dims"):
        # Batching rules of `vmap` write a transposition into a `reshape`.
        order = (name == "reshape" and params["dimensions"]) or range(len(old))
        turned = [old[a] for a in order]
        return values[0].moved(
            lambda parts: reshaped(tuple(parts[a] for a in order), turned, new)
        )
    source = dict(enumerate(params.get("permutation", range(len(new)))))
    if name == "broadcast_in_dim":
        to = enumerate(params["broadcast_dimensions"])
        source = {place: a for a, place in to if old[a] == new[place]}
    elif len(old) < len(new):  # from all devices: a shard (3, 20) as (4, 3, 20)
        at = params["all_gather_dimension"]
        source = {a: a - (a > at) for a in range(len(new)) if a != at}
    elif len(old) > len(new):
        source = {a: a + (a >= params["scatter_dimension"]) for a in range(len(new))}
    result = values[0].moved(lambda parts: fit(placed(parts, source, new), new))
    if name == "pad" and not any(inner for *_, inner in params["padding_config"]):
        result.leaves |= values[0].leaves
        for a, (low, high, _) in enumerate(params["padding_config"]):
            for leaf in result.leaves if low or high else ():
                result.joined_at(leaf, a, int(low), old[a], new)  # beside zeros
    return result


@rule("copy", "name", "optimization_barrier", "reduce_precision")
def _same(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    return values


def cut(
    trace: Trace, value: Value, old: Shape, new: Shape, starts: Shape | None = None
) -> Value:
    """A part of each axis.

    `starts` is where the parts begin, if that is known: uses record their slices.
    """
    if starts is not None:
        _note_slices(trace, value, old, new, starts)
        value = value.between(old, starts, new)
    single = [a for a in range(len(old)) if new[a] == 1 < old[a]]

    def part(parts: AxisParts) -> AxisParts:
        each = zip(parts, old, new, strict=True)
        fits = tuple(x if m == n else fitted(x, n) for x, m, n in each)
        places = [a for a in joined_places(parts) if old[a] != new[a]]
        mixed = [a for a in places if parts[a][0].at == SCATTERED]
        return scattered(fits, mixed if starts is None else (), LOST)

    def rest(parts: AxisParts) -> AxisParts:
        return tuple(() if a in single else x for a, x in enumerate(part(parts)))

    leaves = {leaf: part(parts) for leaf, parts in value.leaves.items()}
    rows, constant = value.axes_in(single), frozenset({CONSTANT})
    sides = {  # one row of what a constant moved is a row
        leaf: {a: x for a, x in of.items() if a not in rows[leaf] or x != constant}
        for leaf, of in value.sides.items()
        if leaf in leaves
    }
    return replace(value.moved(rest), leaves=leaves, sides=sides)


def _note_slices(
    trace: Trace, value: Value, old: Shape, new: Shape, starts: Shape
) -> None:
    for use, parts in value.outputs.items():
        for place, of_axis in enumerate(parts):
            for axis in axes_in((of_axis,)) if old[place] != new[place] else ():
                unit, start = of_axis[-1].stride, starts[place]
                part = start * unit, (start + new[place]) * unit
                trace.note("sliced", use, [axis], about=part)


@rule("slice", "split", "unstack")
def _slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    (value,), old, params = values, shape_of(eqn.invars[0]), eqn.params
    if eqn.primitive.name == "slice":
        return [
            cut(trace, value, old, shape_of(eqn.outvars[0]), params["start_indices"])
        ]
    axis, parts = params["axis"], []
    sizes = [*map(int, params.get("sizes", [1] * len(eqn.outvars)))]
    for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
        new, starts = [*old], [0] * len(old)
        new[axis], starts[axis] = size, stop - size
        parts.append(cut(trace, value, old, new, starts))
    if eqn.primitive.name == "unstack":
        parts = [x.moved(lambda of: (*of[:axis], *of[axis + 1 :])) for x in parts]
    return parts


@rule("dynamic_slice")
def _dynamic_slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    value, *indices = values
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    index, at = joined(indices), eqn.invars[1:]
    value = _rows_as_data(trace, eqn, value, index)
    known = [int(x) for v in indices if (x := v.computed()) is not None]
    if len(known) == len(old):
        last = [n - m for n, m in zip(old, new, strict=True)]
        starts = [min(max(x, 0), n) for x, n in zip(known, last, strict=True)]
        return cut(trace, value, old, new, starts)
    single = [a for a, n in enumerate(new) if n == 1 < old[a]]
    part = cut(trace, value, old, new)
    if not index.data:  # a loop over layers
        over = [a for a in single if not isinstance(at[a], Literal)]
        for leaf, axes in value.axes_in(over).items():
            for scanned in axes:
                trace.scan(leaf, scanned, eqn)
    if len(index.turns) == 1 and not index.data:
        of = [(x, a) for x, axes in value.axes_in(single).items() for a in axes]
        part = replace(part, rows=value.rows | dict.fromkeys(of, min(index.turns)))
    return pick(trace, eqn, value, part, index)


@rule("gather")
def _gather(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    (value, index), numbers = values[:2], eqn.params["dimension_numbers"]
    value = _rows_as_data(trace, eqn, value, index)
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    gone = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    kept = [a for a in range(len(old)) if a not in gone]
    source = dict(zip(numbers.offset_dims, kept, strict=True))
    rows = [a for a in range(len(new)) if a not in source]
    if index.data or not (along := _rows(eqn, index, rows)):
        if not index.data and any(map(joined_places, value.leaves.values())):
            return value.moved(  # an order (6, 8) of a vector
                lambda of: reshaped(scattered(of, joined_places(of), LOST), old, new)
            )
        at = None if index.data else index.computed()
        starts = None
        if at is not None and at.size == len(numbers.start_index_map):  # as w[3]
            by_axis = dict(zip(numbers.start_index_map, at.reshape(-1), strict=True))
            starts = [int(by_axis.get(a, 0)) for a in range(len(old))]
        part = cut(trace, value, old, eqn.params["slice_sizes"], starts)
        part = part.moved(lambda x: placed(x, source, new))
        return pick(trace, eqn, value, part, index)

    def taken(parts: AxisParts) -> AxisParts:  # a constant index rearranges axes
        result = [*fit(placed(parts, source, new), new)]
        for a, of in along.items():
            each = [x for axis in of for x in parts[axis]]
            result[a] = fitted([x._replace(at=None) for x in each], new[a])
            if any(x.at for x in each):
                is_all = new[a] == math.prod(old[axis] for axis in of)
                result = [*scattered((*result,), [a], SCATTERED if is_all else LOST)]
        return tuple(result)

    return pick(trace, eqn, value, value.moved(taken), index)


def _rows(eqn: JaxprEqn, index: Value, rows: Sequence[int]) -> dict[int, list[int]]:
    """The axes of the operand that each axis of a constant index is along, if known.

    w[i, j] of w (24, 40), i (24, 1) and j (1, 40) takes axis 0 along the first axis of
    the index (24, 40, 2), and axis 1 along the second.
    """
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.outvars[0])
    pairs = zip(
        numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True
    )
    along = {rows[a]: [of] for a, of in pairs}
    wide = [a for a in rows if shape[a] > 1 and a not in along]
    gone = numbers.collapsed_slice_dims
    if len(wide) == 1:
        return along | {wide[0]: [*gone]}
    if gone and (table := index.computed()) is not None:
        for of in gone:
            column = table[..., numbers.start_index_map.index(of)]
            turns = [a for a in range(column.ndim) if np.ptp(column, axis=a).any()]
            if len(turns) != 1:
                return {}
            along.setdefault(rows[turns[0]], []).append(of)
    return along if {*along} >= {*wide} else {}


def _rows_as_data(trace: Trace, eqn: JaxprEqn, value: Value, index: Value) -> Value:
    """Rows that data picks of tanh(grid @ w), of a constant grid, are data."""
    is_function = value.activated and value.constant and not value.data
    return trace.given(value, eqn) if index.data and is_function else value


def pick(
    trace: Trace, eqn: JaxprEqn, before: Value, value: Value, index: Value
) -> Value:
    """Elements of a value at some places; data may say at which."""
    trace.routes(index, [value])
    if not value.leaves:
        result = replace(joined([value, index]), results=value.results)
        others = range(1, len(shape_of(eqn.invars[0])))
        if index.data and value.selects(others):  # eye(96)[ids]
            result.one_hot = True
        return result
    if not index.data:
        return replace(value, turns=value.turns | index.turns)
    # Not of layers or members, which were cut off before.
    tables = [
        leaf
        for leaf in value.leaves
        if {*trace.cut_off(value, leaf)} - {*trace.cut_off(before, leaf)}
    ]
    if len(tables) == 1:  # of a table times a matrix
        trace.note_input(value, eqn)
    trace.use(value, "picked", eqn)
    picked = value.picked | {*value.leaves}
    return replace(value, data=True, picked=picked, beside_given=False)


@rule("random_bits", "rng_bit_generator")
def _random(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    return Value(data=True, noise=True)


@rule("concatenate", "stack")
def _concatenate(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Arrays side by side; each leaf remembers where it begins.

    Of ravel_pytree's vector, a (24,) and b (40,), the slice [24:] contains b alone.
    """
    shape, sizes = shape_of(eqn.outvars[0]), [1] * len(values)
    if eqn.primitive.name == "stack":
        axis = eqn.params["axis"]
        values = [x.moved(lambda of: (*of[:axis], (), *of[axis:])) for x in values]
    else:
        axis = eqn.params["dimension"]
        sizes = [shape_of(v)[axis] for v in eqn.invars]
    counts = collections.Counter(leaf for x in values for leaf in x.leaves)
    # Parts of a leaf lie beside others; halves of a product have the same two leaves.
    beside_others = len({frozenset(x.leaves) for x in values if x.leaves}) > 1
    parts = []
    for value, size, stop in zip(
        values, sizes, itertools.accumulate(sizes), strict=True
    ):
        part = value.moved(lambda parts: fit(parts, shape))
        for leaf, of in value.leaves.items():
            if counts[leaf] == 1:
                part.leaves[leaf] = of
                part.joined_at(leaf, axis, stop - size, size, shape)
            elif beside_others:
                part.leaves[leaf] = scattered(of, [axis, *joined_places(of)])
        parts.append(part)
    result = _together(trace, eqn, parts, axis)
    for leaf in [leaf for leaf in result.leaves if counts[leaf] > 1]:
        for own, size in enumerate(trace.shapes[leaf]):  # its rows, stacked again
            is_all = size == shape[axis] == len({*map(id, eqn.invars)})
            if is_all and own not in result.sides.get(leaf, ()):
                result.joined_again(leaf, axis, own, size)
    return result


class Window(NamedTuple):
    """Where updates lie in an array, by its axes.

    zeros((8, 40)).at[i].set(row) has a window (1, 40), and axis 0 in `rows`.
    """

    sizes: dict[int, int]  # one element, if an axis is missing
    starts: dict[int, int]  # where that is known
    rows: list[int]  # axes along which indices take one element


@rule("dynamic_update_slice")
def _slice_replaced(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """A slice of an array replaced, as b (40,) from 24 on in zeros (64,)."""
    array, updates, *indices = values
    shape, sizes = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    at = [x.computed() for x in indices]
    starts = {a: int(x) for a, x in enumerate(at) if x is not None}
    rows = [a for a, n in enumerate(sizes) if n == 1 < shape[a] and indices[a].turns]
    window = Window(dict(enumerate(sizes)), starts, rows)
    return _replaced(trace, eqn, array, updates, joined(indices), window)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul")
@rule("scatter-min", "scatter-max")
def _scatter(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Updates (3, 40) in the rows i (3,) of an array (8, 40), or added to these."""
    (array, index, updates), shape = values, shape_of(eqn.outvars[0])
    numbers, sizes = eqn.params["dimension_numbers"], shape_of(eqn.invars[2])
    rows = [*numbers.inserted_window_dims, *numbers.operand_batching_dims]
    kept = [a for a in range(len(shape)) if a not in rows]
    # The axis of the updates of each axis of the array.
    source = dict(zip(kept, numbers.update_window_dims, strict=True))
    left = [a for a, n in enumerate(sizes) if n > 1 and a not in source.values()]
    if len(left) == len(rows):  # each index has an axis of its own
        pairs = zip(rows, left, strict=True)
        source |= {row: a for row, a in pairs if shape[row] >= sizes[a]}
    starts, table = {}, index.computed()
    over = numbers.scatter_dims_to_operand_dims
    if table is not None and table.size == len(over):  # one place
        starts = {a: int(x) for a, x in zip(over, table.reshape(-1), strict=True)}
    moved = updates.moved(lambda parts: placed(parts, source, shape))
    summed = [a for a in left if a not in source.values()]
    updates = reduced(trace, eqn, moved, updates, summed)
    window = Window({a: sizes[of] for a, of in source.items()}, starts, rows)
    return _replaced(trace, eqn, array, updates, index, window)


def _replaced(
    trace: Trace,
    eqn: JaxprEqn,
    array: Value,
    updates: Value,
    index: Value,
    window: Window,
) -> Value:
    """An array with updates in a window; leaves remember where they begin in it."""
    shape, rows = shape_of(eqn.outvars[0]), window.rows
    count = math.prod(window.sizes.values())
    for leaf, of in [*updates.leaves.items()]:
        is_whole = count == math.prod(trace.shapes[leaf])
        for a, n in enumerate(shape):
            size, is_joined = window.sizes.get(a, 1), bool(of[a] and of[a][0].at)
            if a in window.starts and size < n and (is_whole or is_joined):
                updates.joined_at(leaf, a, window.starts[a], size, shape)
            elif size < n and is_joined:
                updates.leaves[leaf] = scattered(updates.leaves[leaf], [a])
    for (leaf, axis), loop in updates.rows.items():
        if index.turns == {loop} and len(rows) == 1:  # a row in each turn
            updates.joined_again(leaf, rows[0], axis, shape[rows[0]])
    if index.data and not any(x.data or x.leaves for x in (array, updates)):
        counts = index.without_axes(len(shape))  # zeros.at[ids].set(1.0)
        return replace(counts, results={}, one_hot=True)
    return _together(trace, eqn, [array, updates])


def _together(
    trace: Trace, eqn: JaxprEqn, parts: Sequence[Value], axis: int | None = None
) -> Value:
    """An array of several parts; beside data, leaves are used elementwise.

    Of tokens x (16, 24) under a learned one (1, 24), the token is used. But frozen
    (24, 24) beside w (24, 40) along axis 1 may be one matrix: `beside_given` waits.
    """
    if any(x.leaves for x in parts):  # beside noise they are no data
        parts = [x for x in parts if x.leaves or not x.noise]
    result = replace(joined(parts), results={})
    are_picked = {bool(x.picked) for x in parts if x.leaves}  # rows are data as well
    beside_data = len(are_picked) > 1 or any(x.data and not x.leaves for x in parts)
    shape, made = shape_of(eqn.outvars[0]), [x for x in parts if x.leaves]
    places = [a for a in range(len(shape)) if a != axis]
    if beside_data and made:
        is_given = all(x.leaves or not x.data or x.given_floats for x in parts)
        result.beside_given = is_given and all(  # no token (1, 24), no rows of a table
            x.has_all(shape, places) and not x.data and len(axes_in(of)) > 1
            for x in made
            for of in x.leaves.values()
        )
        beside_data = result.data = not result.beside_given
    for part in parts:
        if beside_data:
            trace.use(part, "elementwise", eqn)
        else:
            result = result.with_leaves(part, len(shape))
        for x, of in part.results.items():  # one row of them has lost an axis
            if len(axes_in(of)) > len(axes_in(result.results.get(x, ()))):
                result.results[x] = of
    return result


@rule("top_k", "approx_top_k", "sort")
def _top_k(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    result = replace(joined(values), results={})
    # A sort of several operands ranks: it gives indices. Of one it is a quantile.
    chooses = eqn.primitive.name != "sort" or len(values) > 1
    for value in values:
        shapes, of = trace.shapes, value.outputs.items()
        whole = {u for u, x in of if u.path and u.is_whole(x, shapes[u.path])}
        result.choice |= whole if chooses else frozenset()
        result.extreme |= whole
        trace.use(value, "elementwise", eqn)
    return result


def note_sums(trace: Trace, eqn: JaxprEqn, value: Value, axes: Sequence[int]) -> None:
    """Note that outputs along some axes of a value are added up, of experts say.

    Of elements times a vector, (x @ w) * v, the sum is a product with the vector; but
    not of logits y = (x @ w) * v in softmax(y - y.mean()).
    """
    is_sum = not eqn.primitive.name.startswith(("reduce_m", "arg"))
    for use, parts in value.outputs.items() if not trace.is_transposed(eqn) else ():
        trace.note("summed", use, axes_in(parts, axes))
        if is_sum and use.kind == "elementwise" and axes_in(parts, axes):
            for x in value.sources:
                if not x.is_gradient and x.path != use.path:
                    trace.note("takes", x, other=use, about="sum")


def reduced(
    trace: Trace, eqn: JaxprEqn, result: Value, value: Value, axes: Sequence[int]
) -> Value:
    """A result in which elements along some axes of a value have become one."""
    note_sums(trace, eqn, value, axes)
    over, own = value.axes_in(axes), result.leaves
    gone = {leaf: over[leaf] - axes_in(own[leaf]) for leaf in over.keys() & own}
    return result.with_side(SUMMED, gone)


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
@rule("cumsum")
def _reduce(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """One element along some axes; of a running sum, it is the last one."""
    name, params, (value,) = eqn.primitive.name, eqn.params, values
    axes = params["axes"] if name != "cumsum" else [params["axis"]]
    along = {use: axes_in(parts, axes) for use, parts in value.outputs.items()}
    places = range(len(shape_of(eqn.invars[0])))
    left = [a for a in places if a not in axes or name == "cumsum"]
    result = value.moved(lambda parts: tuple(parts[a] for a in left))
    result = reduced(trace, eqn, result, value, axes)
    of = frozenset(use for use in along if along[use])
    if name.startswith("arg"):
        result.choice |= of
    if name in ("reduce_max", "reduce_min"):
        result.extreme = of
    # Sums of words in a bag: of one-hots (16, 3, 96), whose last axis has the classes.
    is_bag = name in ("reduce_sum", "cumsum") and len(places) - 1 not in axes
    return replace(result, one_hot=result.one_hot and is_bag)
