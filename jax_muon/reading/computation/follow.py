"""Follow every parameter through a traced function, until operations apply it to data.

`Follower` runs a jaxpr on `Value`s. An operation with no rule is taken for elementwise if
its shapes fit, and otherwise is opaque: what becomes of a leaf in it is unknown. Rules
are registered by the names of primitives: those of this file rearrange axes; `products`
has contractions, `loops` scans and other control flow.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jax_muon import jaxprs
from jax_muon.reading.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    PART,
    Output,
    Scores,
    Shape,
    Sides,
    Use,
    Value,
    axes_in,
    axes_of,
    covers,
    fit,
    fitted,
    free,
    joined,
    reshaped,
)

Rule = Callable[["Follower", JaxprEqn, list[Value]], Value | list[Value]]
RULES: dict[str, Rule] = {}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register what becomes of values in these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


class Follower:
    """Runs a jaxpr on values, and collects the uses of every leaf.

    Attributes:
      shapes: of the leaves, by path.
      uses: of each leaf, in the order of the program.
      scores: products of two activations that may be attention's.
      scanned: the axes of each leaf that a scan takes one element at a time.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.uses: dict[str, list[Use]] = collections.defaultdict(list)
        self.scores: dict[Any, Scores] = {}
        self.scanned: dict[str, set[int]] = collections.defaultdict(set)
        self._known: dict[Any, Use] = {}
        self._calls: tuple[JaxprEqn, ...] = ()  # the operations around this one

    def run(self, jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a function."""
        known = dict.fromkeys(jaxpr.constvars, Value())
        known |= zip(jaxpr.invars, values, strict=True)

        def read(v: Any) -> Value:
            return Value(uniform=True) if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            results = self._operation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def call(self, eqn: JaxprEqn, jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a function that an operation calls."""
        before, self._calls = self._calls, (*self._calls, eqn)
        results = self.run(jaxpr, values)
        self._calls = before
        return results

    def _operation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in jaxprs.RANDOM:
            return [Value() for _ in eqn.outvars]
        if name not in RULES and (closed := jaxprs.called(eqn)) is not None:
            return self.call(eqn, closed.jaxpr, values)
        result = RULES.get(name, elementwise)(self, eqn, values)
        results = result if isinstance(result, list) else [result] * len(eqn.outvars)
        if name in jaxprs.NO_GRADIENT:
            results = [
                _without_gradient(name, value, v)
                for value, v in zip(results, eqn.outvars, strict=True)
            ]
        return results

    def key(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """What tells this operation from others, and from itself in another call."""
        return tuple(map(id, (*self._calls, eqn)))

    def use(
        self,
        value: Value,
        kind: str,
        eqn: JaxprEqn,
        roles: Sequence[str] = (),
        by: Value | None = None,
    ) -> list[Use]:
        """Every leaf that a value is made of is used here.

        Args:
          value: the operand.
          kind: as in `Use`.
          eqn: the operation.
          roles: what each axis of the operand is in it.
          by: what the operand is multiplied by.
        """
        result = []
        for leaf, sides in value.leaves.items():
            key = leaf, kind, self.key(eqn)
            if key not in self._known:
                line = jaxprs.line_of((*self._calls, eqn))
                self._known[key] = Use(leaf, kind, line, eqn.primitive.name)
                self.uses[leaf].append(self._known[key])
            use = self._known[key]
            use.is_picked = leaf in value.picked
            use.is_complex = any(
                jnp.issubdtype(v.aval.dtype, jnp.complexfloating)
                for v in eqn.invars
                if hasattr(v.aval, "dtype")
            )
            axes = {
                axis: frozenset({role})
                for side, role in zip(sides, roles, strict=False)
                for axis in axes_of(side)
            }
            known = Value(roles={leaf: value.roles.get(leaf, {})})
            use.roles = known.with_roles({leaf: axes}).roles[leaf] | use.revised
            first = next(x for x in self.uses[leaf] if x.kind == kind)
            use.is_gradient = kind == "contracted" and _is_transpose(use, first)
            result.append(use)
        if by is not None:
            for use in result:
                use.inputs = by.behind
            for before in by.behind:
                before.feeds |= not all(use.is_gradient for use in result)
        return result

    def result(self, uses: list[Use], sides: Sequence[Sides], role: str = "") -> Value:
        """The result of a product; for each use, what its axes are of the leaf's."""
        outputs = [use.output() for use in uses]
        for output in outputs:
            output.role = output.role or role
        results = dict(zip(outputs, sides, strict=True))
        return Value(data=True, results=results, behind=frozenset(uses))


def _without_gradient(primitive: str, value: Value, v: Any) -> Value:
    """A result through which no gradient reaches the products before it."""
    if not jnp.issubdtype(v.aval.dtype, jnp.inexact):
        return dataclasses.replace(value, behind=frozenset(), results={})
    if primitive == "stop_gradient":
        return dataclasses.replace(value, behind=frozenset())
    return value  # a top-k's values


def _is_transpose(use: Use, first: Use) -> bool:
    """True for the use in a gradient, which swaps the sides of the first use."""
    swap = {IN: OUT, OUT: IN}
    swapped = {
        axis: frozenset(swap.get(role, role) for role in roles)
        for axis, roles in use.roles.items()
    }
    return use is not first and first.roles == swapped != use.roles


# --- elementwise ----------------------------------------------------------------------


def elementwise(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    """An operation on each element; or one without a rule."""
    name, shape = eqn.primitive.name, shape_of(eqn.outvars[0]) if eqn.outvars else ()
    result = joined(values)
    fits = all(_fits(shape_of(v), shape) for v in eqn.invars)
    if not fits:
        result.results = {}
    operands = values[1:] if name == "select_n" else values
    made = [value for value in operands if value.leaves]
    match name:
        case "eq":
            result.one_hot = sum(value.data for value in values) == 1
        case "exp":
            for one in result.results:
                if isinstance(one, Scores):
                    one.soft = True
        case "mul":
            _find_gates(values)
    if not made:
        return result
    if not fits:
        for value in values:
            follower.use(value, "opaque", eqn)
        return result
    active = [x for x in operands if x.data and not x.leaves and not x.uniform]
    if active:
        for value in made:
            for use in follower.use(value, "elementwise", eqn):
                if name == "mul" and len(values) == 2:
                    other = values.index(active[0])
                    _wait_for_sum(use, value, active[0], eqn.invars[other], result)
        is_frozen = all(x.frozen for x in active)
        made = [_staying(name, x, is_frozen, shape) for x in made]
    elif name not in jaxprs.LINEAR and any(map(_is_product, made)):
        # A function of a product of leaves, or of one with a constant, is an activation.
        for value in made:
            for leaf, sides in value.leaves.items():
                of_constants = CONSTANT in _known_roles(value, [leaf])
                kind = "contracted" if of_constants else "like data"
                one = dataclasses.replace(value, leaves={leaf: sides})
                uses = follower.use(one, kind, eqn, [OUT] * len(shape))
                result.behind |= frozenset(uses)
        result.data = True
        return result
    for value in made:
        result = result.with_leaves(value, shape)
    if name == "select_n" and values[0].data:
        result.data = True
    return result


def _fits(shape: Shape, other: Shape) -> bool:
    same = len(shape) == len(other)
    return not shape or (same and all(n in (1, m) for n, m in zip(shape, other)))


def _known_roles(value: Value, leaves: Any) -> set[str]:
    return {
        r
        for leaf in leaves
        for roles in value.roles.get(leaf, {}).values()
        for r in roles
    }


def _is_product(value: Value) -> bool:
    return bool({INNER, CONSTANT} & _known_roles(value, value.leaves))


def _staying(name: str, value: Value, is_frozen: bool, shape: Shape) -> Value:
    """The leaves that may still be matrices behind an elementwise operation with data.

    Behind a mask or a scale of their elements; and a product of leaves (LoRA) that is
    added to a frozen matrix.
    """
    scaled = name in ("mul", "div", "select_n") and sum(n > 1 for n in shape) > 1
    leaves = {}
    for leaf, sides in value.leaves.items():
        is_factor = INNER in _known_roles(value, [leaf])
        whole = covers(sides, shape) or leaf in value.picked
        if (scaled and (whole or is_factor)) or (is_frozen and is_factor):
            leaves[leaf] = sides
    return dataclasses.replace(value, leaves=leaves)


def _wait_for_sum(use: Use, value: Value, other: Value, v: Any, result: Value) -> None:
    """A product with data that was repeated along a leaf's axes: a sum may follow."""
    sides, shape = value.leaves[use.leaf], shape_of(v)
    repeated = {*other.repeated, *(a for a, n in enumerate(shape) if n == 1)}
    multiplied = axes_in(sides, set(range(len(sides))) - repeated)
    if multiplied and axes_in(sides, repeated & {*range(len(sides))}) - multiplied:
        use.waits, use.inputs = frozenset(multiplied), other.behind
        result.results[use.output()] = sides


def _find_gates(values: list[Value]) -> None:
    """Two slices of one result that are multiplied are a gate and what it gates."""
    if len(values) == 2:
        for a, b in itertools.product(values[0].outputs(), values[1].outputs()):
            same = a.use is b.use and a.axis == b.axis is not None
            if same and a is not b and not a.role:
                a.role = b.role = "gated"


# --- shapes ---------------------------------------------------------------------------


def shape_of(v: Any) -> tuple[int, ...]:
    """The shape of an operand; () for a token."""
    return tuple(getattr(v.aval, "shape", ()))


def shapes_of(eqn: JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the first operand and the first result."""
    return shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])


@rule("transpose")
def _transpose(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    order = eqn.params["permutation"]
    return values[0].moved(lambda sides: tuple(sides[a] for a in order))


@rule("reshape", "squeeze", "expand_dims")
def _reshape(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    old, new = shapes_of(eqn)
    return values[0].moved(lambda sides: reshaped(sides, old, new))


@rule("broadcast_in_dim")
def _broadcast(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (old, new), to = shapes_of(eqn), eqn.params["broadcast_dimensions"]
    source = {place: a for a, place in enumerate(to) if old[a] == new[place]}
    return values[0].moved(
        lambda sides: tuple(
            sides[source[place]] if place in source else free(size)
            for place, size in enumerate(new)
        ),
        uniform=values[0].uniform or math.prod(old) == 1,
        repeated=frozenset(range(len(new))) - {*source},
    )


@rule("pad", "fft", "all_to_all", "reduce_scatter", "psum_scatter", "ppermute")
def _resize(
    follower: Follower, eqn: JaxprEqn, values: list[Value]
) -> Value | list[Value]:
    shapes = [shape_of(v) for v in eqn.outvars]
    return [
        value.moved(lambda sides, new=new: fit(sides, new))
        for value, new in zip(values, shapes, strict=False)
    ]


@rule("rev", "copy", "copy_p")
def _same(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    return values[0]


@rule("all_gather", "all_gather_invariant")
def _all_gather(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (old, new), at = shapes_of(eqn), eqn.params["all_gather_dimension"]
    if len(new) > len(old):
        values = [_with_axis(values[0], at)]
    return values[0].moved(lambda sides: fit(sides, new))


def _with_axis(value: Value, at: int) -> Value:
    return value.moved(lambda sides: (*sides[:at], (), *sides[at:]))


def cut(value: Value, old: Shape, new: Shape, starts: Shape | None = None) -> Value:
    """A part of each axis; where one element is left, the leaf's axis is a batch.

    `starts` is where the parts begin, if that is known. Then slices of outputs are told
    apart, and an output axis whose elements are all taken one by one is a batch.
    """
    single = {a for a in range(len(old)) if new[a] == 1 < old[a]}
    taken = {
        leaf: {
            factor.axis: frozenset({BATCH if factor.whole else PART})
            for a in single
            for factor in sides[a]
            if factor.axis is not None
        }
        for leaf, sides in value.leaves.items()
    }
    results = {
        _slice_of(one, sides, old, new, starts): sides
        for one, sides in value.results.items()
    }
    return (
        dataclasses.replace(value, results=results)
        .moved(
            lambda sides: tuple(
                () if a in single else fitted(sides[a], new[a]) for a in range(len(old))
            )
        )
        .with_roles(taken)
    )


def _slice_of(one: Any, sides: Sides, old: Shape, new: Shape, starts: Any) -> Any:
    """The output that a slice of an output is."""
    if starts is None or not isinstance(one, Output) or one.axis is not None:
        return one
    for a, side in enumerate(sides):
        if old[a] == new[a] or not side or side[0].axis is None:
            continue
        outer = side[0]
        if new[a] == 1 and len(side) == 1 and outer.whole:
            taken = one.use.taken.setdefault(outer.axis, set())
            taken.add(starts[a])
            if len(taken) == old[a]:
                separate(one.use, outer.axis)
        if math.prod(factor.size for factor in side) == old[a]:
            unit = outer.stride * outer.size // old[a]
            if len({factor.axis for factor in side}) == 1:
                unit = side[-1].stride
            ends = starts[a] * unit, (starts[a] + new[a]) * unit
            return one.use.output(outer.axis, *ends)
    return one


def separate(use: Use, axis: int) -> None:
    """An output axis whose elements go different ways holds separate matrices."""
    others = [roles for a, roles in use.roles.items() if a != axis]
    if use.roles.get(axis) == {OUT} and {OUT} in others:
        use.revise({axis: frozenset({BATCH})})


@rule("slice")
def _slice(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    return cut(values[0], *shapes_of(eqn), eqn.params["start_indices"])


@rule("dynamic_slice")
def _dynamic_slice(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    value = cut(values[0], *shapes_of(eqn))
    by_data = any(index.data for index in values[1:])
    return _picked(follower, eqn, value) if by_data else value


@rule("split")
def _split(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    old, axis = shape_of(eqn.invars[0]), eqn.params["axis"]
    starts = itertools.accumulate((0, *eqn.params["sizes"]))
    return [
        cut(values[0], old, shape_of(v), [start * (a == axis) for a in range(len(old))])
        for v, start in zip(eqn.outvars, starts, strict=False)
    ]


@rule("unstack")
def _unstack(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    old, axis = shape_of(eqn.invars[0]), eqn.params["axis"]
    new = [1 if a == axis else n for a, n in enumerate(old)]
    return [
        cut(values[0], old, new, [i * (a == axis) for a in range(len(old))]).moved(
            lambda sides: (*sides[:axis], *sides[axis + 1 :])
        )
        for i in range(old[axis])
    ]


@rule("concatenate", "dynamic_update_slice", "stack")
def _concatenate(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    shape = shape_of(eqn.outvars[0])
    if eqn.primitive.name == "stack":
        values = [_with_axis(value, eqn.params["axis"]) for value in values]
    elif eqn.primitive.name == "dynamic_update_slice":
        values = values[:2]  # then there are indices
    result = joined(values, results={})
    beside_data = any(value.data and not value.leaves for value in values)
    for value in values:
        part = value.moved(lambda sides: fit(sides, shape))
        if beside_data:
            follower.use(part, "elementwise", eqn)
        else:
            result = result.with_leaves(part, shape)
        result.results = {**part.results, **result.results}
    return result


@rule("gather")
def _gather(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (value, index), numbers = values[:2], eqn.params["dimension_numbers"]
    old, new = shapes_of(eqn)
    batch = tuple(numbers.operand_batching_dims)
    kept = [
        a for a in range(len(old)) if a not in (*numbers.collapsed_slice_dims, *batch)
    ]
    sizes = [1 if a in batch else n for a, n in enumerate(eqn.params["slice_sizes"])]
    source = dict(zip(numbers.offset_dims, kept, strict=True))
    result = cut(value, old, sizes).moved(
        lambda sides: tuple(
            sides[source[place]] if place in source else free(size)
            for place, size in enumerate(new)
        )
    )
    if not value.leaves:
        return joined([value, index], results=result.results)
    return _picked(follower, eqn, result) if index.data else result


def _picked(follower: Follower, eqn: JaxprEqn, value: Value) -> Value:
    """Elements of leaves that data has picked."""
    follower.use(value, "picked", eqn)
    picked = value.picked | {*value.leaves}
    return dataclasses.replace(value, data=True, picked=picked)


@rule("top_k", "approx_top_k", "sort")
def _top_k(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    for value in values:
        # A sort of several operands ranks: it gives indices. Of one it is a quantile.
        if eqn.primitive.name != "sort" or len(values) > 1:
            for one, sides in value.results.items():
                if isinstance(one, Output) and any(map(axes_of, sides)):
                    one.use.chooses = True
        follower.use(value, "elementwise", eqn)
    return joined(values, results={})


@rule(
    *(f"reduce_{name}" for name in ["sum", "max", "min", "prod", "and", "or"]),
    "argmax",
    "argmin",
)
def _reduce(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    name, axes, (value,) = eqn.primitive.name, eqn.params["axes"], values
    left = [a for a in range(len(shape_of(eqn.invars[0]))) if a not in axes]

    def without(sides: Sides) -> Sides:
        return tuple(sides[a] for a in left)

    for one, sides in value.results.items():
        along = axes_in(sides, axes)
        if isinstance(one, Scores):
            if name == "reduce_max" and not one.soft:
                one.keys |= along
        elif along and name.startswith("arg"):
            one.use.chooses = True
        elif along and name == "reduce_sum" and along == one.use.waits:
            return _sum_of_products(one.use, along, axes_in(sides, left))
    return value.moved(without, one_hot=False)


def _sum_of_products(use: Use, summed: set[int], kept: set[int]) -> Value:
    """A product with data and its sum: the same as a contraction."""
    use.kind = "contracted"
    use.roles = dict.fromkeys(summed, frozenset({IN})) | dict.fromkeys(
        kept, frozenset({OUT})
    )
    for before in use.inputs:
        before.feeds = True
    return Value(data=True, behind=frozenset([use]))
