"""Follow every parameter through a traced function, until operations apply it to data.

`Follower` runs a jaxpr on `Value`s. Rules are registered by the names of primitives:
those here rearrange axes; `products` has contractions, `loops` control flow. Without a
rule an operation is elementwise if its shapes fit, and otherwise opaque: what becomes
of a leaf in it is unknown.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jax_muon import jaxprs
from jax_muon.jaxprs import shape_of
from jax_muon.reading.computation.values import (
    BATCH,
    INNER,
    PART,
    Factors,
    Output,
    Results,
    Scores,
    Shape,
    Use,
    Value,
    axes_in,
    covers,
    fit,
    joined,
    merged,
    placed,
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
        self._by_place: dict[Any, Use] = {}
        self._calls: tuple[JaxprEqn, ...] = ()  # the operations around this one

    def run(self, jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a function."""
        known = dict.fromkeys(jaxpr.constvars, Value())
        known |= zip(jaxpr.invars, values, strict=True)

        def read(v: Any) -> Value:
            return Value() if isinstance(v, Literal) else known[v]

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
        if name not in RULES and (closed := jaxprs.called(eqn)) is not None:
            return self.call(eqn, closed.jaxpr, values)
        result = RULES.get(name, elementwise)(self, eqn, values)
        return result if isinstance(result, list) else [result] * len(eqn.outvars)

    def place(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """Where an operation is: a function may be called several times."""
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
        uses, place, calls = [], self.place(eqn), (*self._calls, eqn)
        is_transposed = kind == "contracted" and jaxprs.is_transposed(calls)
        for leaf, factors in value.leaves.items():
            key = leaf, kind, place
            if key not in self._by_place:
                line = jaxprs.line_of(calls)
                self._by_place[key] = Use(leaf, kind, line, eqn.primitive.name)
                self.uses[leaf].append(self._by_place[key])
            use = self._by_place[key]
            of_axes = {
                axis: frozenset({role})
                for of_axis, role in zip(factors, roles, strict=False)
                for axis in axes_in((of_axis,))
            }
            use.roles = merged(value.roles.get(leaf, {}), of_axes) | use.revised
            use.of_picked = leaf in value.picked
            use.is_complex = any(map(_is_complex, eqn.invars))
            use.is_gradient = use is not self.uses[leaf][0] and is_transposed
            uses.append(use)
        if by is not None:
            for use in uses:
                use.inputs = by.sources
            for before in by.sources:
                before.feeds |= not all(use.is_gradient for use in uses)
        return uses

    def result(
        self, uses: list[Use], factors: Sequence[Factors], role: str = ""
    ) -> Value:
        """The result of a product; for each use, what its axes are of the leaf's."""
        outputs = [use.output() for use in uses]
        for output in outputs:
            output.role = output.role or role
        results: Results = dict(zip(outputs, factors, strict=True))
        return Value(data=True, results=results, sources=frozenset(uses))


def _is_complex(v: Any) -> bool:
    return bool(jnp.issubdtype(getattr(v.aval, "dtype", int), jnp.complexfloating))


# --- elementwise ----------------------------------------------------------------------


def elementwise(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    """An operation on each element; or one without a rule."""
    name, result = eqn.primitive.name, joined(values)
    shape = shape_of(eqn.outvars[0]) if eqn.outvars else ()
    fits = all(_fits(shape_of(v), shape) for v in eqn.invars)
    fits = fits and name != "triangular_solve"  # of a square system, all shapes fit
    if not fits:
        result.results = {}
    match name:
        case "eq":
            result.one_hot = sum(value.data for value in values) == 1
        case "exp":
            for x in result.results:
                if isinstance(x, Scores):
                    x.soft = True
        case "mul":
            _find_gates(*values)
    operands = values[1:] if name == "select_n" else values
    made = [value for value in operands if value.leaves]
    active = [value for value in operands if value.data and not value.leaves]
    if made and (active or not fits):
        for value in made:
            follower.use(value, "elementwise" if fits else "opaque", eqn)
        given_floats = all(value.given_floats for value in active)
        made = [_staying(name, value, given_floats, shape) for value in made if fits]
    for value in made:
        result = result.with_leaves(value, len(shape))
    return result


def _fits(shape: Shape, other: Shape) -> bool:
    """True if an operand of this shape is a scalar, or broadcast by its axes of 1."""
    return not shape or (
        len(shape) == len(other)
        and all(n in (1, m) for n, m in zip(shape, other, strict=True))
    )


def _staying(name: str, value: Value, given_floats: bool, shape: Shape) -> Value:
    """The leaves that may still be matrices behind an elementwise operation with data.

    Behind a mask or a scale of their elements; and a product of leaves (LoRA) that is
    added to a frozen matrix.
    """
    scaled = name in ("mul", "div", "select_n") and sum(n > 1 for n in shape) > 1
    leaves = {}
    for leaf, factors in value.leaves.items():
        is_factor = INNER in value.known(leaf)
        whole = is_factor or covers(factors, shape) or leaf in value.picked
        if (scaled and whole) or (given_floats and is_factor):
            leaves[leaf] = factors
    return dataclasses.replace(value, leaves=leaves)


def _find_gates(left: Value, right: Value) -> None:
    """Two slices of one result that are multiplied are a gate and what it gates."""
    if {*left.outputs()} & {*right.outputs()}:  # such as a square
        return
    for a, b in itertools.product(left.outputs(), right.outputs()):
        if a.use is b.use and a.axis == b.axis is not None and not a.role:
            a.role = b.role = "gated"


# --- axes -----------------------------------------------------------------------------


@rule("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pad")
@rule("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "ppermute")
def _move(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Rearrange axes, or change their sizes."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    source = dict(enumerate(range(len(new))))
    match eqn.primitive.name:
        case "reshape" | "squeeze" | "expand_dims":
            return values[0].moved(lambda factors: reshaped(factors, old, new))
        case "transpose":
            source = dict(enumerate(eqn.params["permutation"]))
        case "broadcast_in_dim":
            to = enumerate(eqn.params["broadcast_dimensions"])
            source = {place: a for a, place in to if old[a] == new[place]}
        case "all_gather" | "all_gather_invariant" if len(new) > len(old):
            at = eqn.params["all_gather_dimension"]
            source = {a + (a >= at): a for a in range(len(old))}
    return values[0].moved(lambda factors: fit(placed(factors, source, new), new))


def cut(value: Value, old: Shape, new: Shape, starts: Shape | None = None) -> Value:
    """A part of each axis; where one element is left, the leaf's axis is a batch.

    `starts` is where the parts begin, if that is known. Then slices of outputs are told
    apart, and an output axis whose elements are all taken one by one is a batch.
    """
    single = [a for a in range(len(old)) if new[a] == 1 < old[a]]

    def rest(factors: Factors) -> Factors:
        fits = fit(factors, new)
        return tuple(() if a in single else x for a, x in enumerate(fits))

    result = dataclasses.replace(
        value,
        results={
            _slice_of(x, factors, old, new, starts): factors
            for x, factors in value.results.items()
        },
    ).moved(rest)
    for role, whole in ((BATCH, True), (PART, False)):
        axes = {
            leaf: axes_in([[x for a in single for x in factors[a] if x.whole is whole]])
            for leaf, factors in value.leaves.items()
        }
        result = result.with_role(role, axes)
    return result


def _slice_of(
    x: Output | Scores, factors: Factors, old: Shape, new: Shape, starts: Shape | None
) -> Output | Scores:
    """The output that a slice of an output is; otherwise the same."""
    if starts is None or not isinstance(x, Output) or x.axis is not None:
        return x
    for a, of_axis in enumerate(factors):
        axis = of_axis[0].axis if of_axis else None
        if old[a] == new[a] or axis is None or len(axes_in((of_axis,))) > 1:
            continue
        if new[a] == 1 and of_axis[0].whole:
            x.use.taken.setdefault(axis, set()).add(starts[a])
            if len(x.use.taken[axis]) == old[a]:
                x.use.separate(axis)
        unit = of_axis[-1].stride
        return x.use.output(axis, starts[a] * unit, (starts[a] + new[a]) * unit)
    return x


@rule("slice", "split", "unstack")
def _slice(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    old, shapes = (
        shape_of(eqn.invars[0]),
        [shape_of(v) for v in eqn.outvars],
    )
    if "start_indices" in eqn.params:
        return [cut(values[0], old, shapes[0], eqn.params["start_indices"])]
    axis, starts = eqn.params["axis"], [*range(len(shapes))]
    if eqn.primitive.name == "split":
        starts = [*itertools.accumulate(map(int, eqn.params["sizes"]), initial=0)]
    else:
        shapes = [(*old[:axis], 1, *old[axis + 1 :])] * len(shapes)
    parts = [
        cut(values[0], old, shape, [start * (a == axis) for a in range(len(old))])
        for shape, start in zip(shapes, starts, strict=False)
    ]
    if eqn.primitive.name == "unstack":
        parts = [x.moved(lambda s: (*s[:axis], *s[axis + 1 :])) for x in parts]
    return parts


@rule("dynamic_slice")
def _dynamic_slice(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    value = cut(values[0], old, new)
    if any(index.data for index in values[1:]):
        return pick(follower, eqn, value)
    for axis, index in enumerate(eqn.invars[1:]):
        if new[axis] == 1 and not isinstance(index, Literal):  # a loop over layers
            for leaf, axes in values[0].axes_in([axis]).items():
                follower.scanned[leaf] |= axes
    return value


@rule("gather")
def _gather(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (value, index), numbers = values[:2], eqn.params["dimension_numbers"]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    gone = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    sizes = [
        1 if a in numbers.operand_batching_dims else n
        for a, n in enumerate(eqn.params["slice_sizes"])
    ]
    kept = [a for a in range(len(old)) if a not in gone]
    source = dict(zip(numbers.offset_dims, kept, strict=True))
    result = cut(value, old, sizes).moved(lambda factors: placed(factors, source, new))
    if not value.leaves:
        return dataclasses.replace(joined([value, index]), results=result.results)
    return pick(follower, eqn, result) if index.data else result


def pick(follower: Follower, eqn: JaxprEqn, value: Value) -> Value:
    """Elements of leaves that data has picked."""
    follower.use(value, "picked", eqn)
    picked = value.picked | {*value.leaves}
    return dataclasses.replace(value, data=True, picked=picked)


@rule("concatenate", "dynamic_update_slice", "stack")
def _concatenate(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    shape = shape_of(eqn.outvars[0])
    if eqn.primitive.name == "stack":
        at = eqn.params["axis"]
        values = [x.moved(lambda s: (*s[:at], (), *s[at:])) for x in values]
    elif eqn.primitive.name == "dynamic_update_slice":
        values = values[:2]  # then there are indices
    result = dataclasses.replace(joined(values), results={})
    beside_data = any(value.data and not value.leaves for value in values)
    for value in values:
        part = value.fit(shape)
        if beside_data:
            follower.use(part, "elementwise", eqn)
        else:
            result = result.with_leaves(part, len(shape))
        result.results = {**part.results, **result.results}
    return result


@rule("top_k", "approx_top_k", "sort")
def _top_k(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    for value in values:
        # A sort of several operands ranks: it gives indices. Of one it is a quantile.
        if eqn.primitive.name != "sort" or len(values) > 1:
            for x in value.outputs():
                x.use.chooses |= bool(axes_in(value.results[x]))
        follower.use(value, "elementwise", eqn)
    return dataclasses.replace(joined(values), results={})


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
def _reduce(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    name, axes, (value,) = eqn.primitive.name, eqn.params["axes"], values
    for x, factors in value.results.items():
        along = axes_in(factors, axes)
        if isinstance(x, Output):
            x.use.chooses |= bool(along) and name.startswith("arg")
        elif name == "reduce_max" and not x.soft and len(along) == 1:
            x.keys |= along
    left = [a for a in range(len(shape_of(eqn.invars[0]))) if a not in axes]
    result = value.moved(lambda factors: tuple(factors[a] for a in left))
    return dataclasses.replace(result, one_hot=False)
