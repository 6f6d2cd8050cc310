"""Follow parameters where axes are moved, cut, indexed, joined and reduced."""

import itertools
from dataclasses import replace

from jax.extend.core import JaxprEqn, Literal

from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.trace import Trace, rule
from jax_muon.matrices.computation.values import (
    BATCH,
    PART,
    AxisParts,
    Shape,
    Value,
    axes_in,
    fit,
    joined,
    placed,
    reshaped,
)


@rule(
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pad", "tile"
)
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
        source = {place: a for a, place in to}
    return values[0].moved(lambda parts: fit(placed(parts, source, new), new))


def cut(value: Value, old: Shape, new: Shape, starts: Shape | None = None) -> Value:
    """A part of each axis; where one element is left, the leaf's axis is a batch.

    `starts` is where the parts begin, if that is known: uses record their slices.
    """
    if starts is not None:
        _note_slices(value, old, new, starts)
    single = [a for a in range(len(old)) if new[a] == 1 < old[a]]

    def rest(parts: AxisParts) -> AxisParts:
        fits = fit(parts, new)
        return tuple(() if a in single else x for a, x in enumerate(fits))

    result = value.moved(rest)
    for side, whole in ((BATCH, True), (PART, False)):
        axes = {
            leaf: axes_in([[x for a in single for x in parts[a] if x.whole is whole]])
            for leaf, parts in value.leaves.items()
        }
        result = result.with_side(side, axes)
    return result


def _note_slices(value: Value, old: Shape, new: Shape, starts: Shape) -> None:
    for use, parts in value.outputs.items():
        for place, of_axis in enumerate(parts):
            for axis in axes_in((of_axis,)) if old[place] != new[place] else ():
                unit, start = of_axis[-1].stride, starts[place]
                part = start * unit, (start + new[place]) * unit
                use.slices.setdefault(axis, set()).add(part)


@rule("slice", "split", "unstack")
def _slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    (value,), old = values, shape_of(eqn.invars[0])
    if "start_indices" in eqn.params:
        new = shape_of(eqn.outvars[0])
        return [cut(value, old, new, eqn.params["start_indices"])]
    axis, parts = eqn.params["axis"], []
    sizes = [*map(int, eqn.params.get("sizes", [1] * len(eqn.outvars)))]
    for size, start in zip(sizes, itertools.accumulate(sizes, initial=0), strict=False):
        starts = [start * (a == axis) for a in range(len(old))]
        part = cut(value, old, (*old[:axis], size, *old[axis + 1 :]), starts)
        if eqn.primitive.name == "unstack":
            part = part.moved(lambda x: (*x[:axis], *x[axis + 1 :]))
        parts.append(part)
    return parts


@rule("dynamic_slice")
def _dynamic_slice(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    value, *indices = values
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    index = joined(indices)
    for axis, at in enumerate(eqn.invars[1:]):
        if new[axis] == 1 and not (index.data or isinstance(at, Literal)):
            # A loop over layers.
            for leaf, axes in value.axes_in([axis]).items():
                trace.scanned[leaf] |= axes
    return pick(trace, eqn, cut(value, old, new), index)


@rule("gather")
def _gather(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    (value, index), numbers = values[:2], eqn.params["dimension_numbers"]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    gone = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    kept = [a for a in range(len(old)) if a not in gone]
    source = dict(zip(numbers.offset_dims, kept, strict=True))
    result = cut(value, old, eqn.params["slice_sizes"])
    result = result.moved(lambda parts: placed(parts, source, new))
    return pick(trace, eqn, result, index)


def pick(trace: Trace, eqn: JaxprEqn, value: Value, index: Value) -> Value:
    """Elements of a value at some places; data may say at which."""
    routed = trace.routes(index, [value])
    if not value.leaves:
        result = replace(joined([value, index]), results=value.results)
        result.choice -= routed
        return result
    if not index.data:
        return value
    tables = [leaf for leaf in value.leaves if BATCH in value.known(leaf)]
    if len(tables) == 1:  # of a table times a matrix
        trace.note_input(value, eqn)
    trace.use(value, "picked", eqn)
    picked = value.picked | {*value.leaves}
    return replace(value, data=True, picked=picked)


@rule("random_bits", "rng_bit_generator")
def _random(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    return Value(data=True, noise=True)


@rule("stack", "concatenate", "dynamic_update_slice", "scatter", "scatter-add")
def _concatenate(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    shape, name = shape_of(eqn.outvars[0]), eqn.primitive.name
    if name == "stack":
        kept = [a for a in range(len(shape)) if a != eqn.params["axis"]]
        source = {place: a for a, place in enumerate(kept)}
        values = [x.moved(lambda parts: placed(parts, source, shape)) for x in values]
    arrays = values
    if name == "dynamic_update_slice":
        arrays = values[:2]  # where it begins comes last
    elif name.startswith("scatter"):
        arrays = values[::2]  # indices between the operand and its updates
    result = replace(joined(values), results={})
    beside_data = any(value.data and not value.leaves for value in arrays)
    for value in arrays:
        part = value.moved(lambda parts: fit(parts, shape))
        if beside_data:
            trace.use(part, "elementwise", eqn)
        else:
            result = result.with_leaves(part, len(shape))
        result.results = {**part.results, **result.results}
    return result


@rule("top_k", "approx_top_k", "sort")
def _top_k(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    result = replace(joined(values), results={})
    for value in values:
        # A sort of several operands ranks: it gives indices. Of one it is a quantile.
        if eqn.primitive.name != "sort" or len(values) > 1:
            shapes, of = trace.shapes, value.outputs.items()
            whole = [use for use, x in of if use.is_whole(x, shapes[use.path])]
            result.choice |= frozenset(whole)
        trace.use(value, "elementwise", eqn)
    return result


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
def _reduce(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    name, axes, (value,) = eqn.primitive.name, eqn.params["axes"], values
    along = {use: axes_in(parts, axes) for use, parts in value.outputs.items()}
    for use in along if name == "reduce_sum" else ():
        use.separate(along[use] & use.gated)
        if use.kind == "elementwise" and along[use]:
            value.feed()
    left = [a for a in range(len(shape_of(eqn.invars[0]))) if a not in axes]
    result = value.moved(lambda parts: tuple(parts[a] for a in left))
    if name.startswith("arg"):
        result.choice |= {use for use in along if along[use]}
    if not any(map(axes_in, result.results.values())):  # a norm weighs no keys
        result.is_exponential = False
    return replace(result, one_hot=False)
