"""Follow every parameter through a traced function, until operations apply it to data.

A `Trace` runs a jaxpr on `Value`s. Rules are registered by the names of primitives:
`moves` rearranges axes, `products` has contractions, `loops` control flow. Without a
rule an operation is elementwise if its shapes fit, and otherwise opaque: what becomes
of a leaf in it is unknown.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.values import (
    BATCH,
    CONSTANT,
    EXPONENTIAL,
    IN,
    LOG,
    LOG_SOFTMAX,
    OUT,
    RECIPROCAL,
    SOFTMAX,
    SUMMED,
    AxisParts,
    Edge,
    Shape,
    Use,
    Value,
    axes_in,
    joined,
    merged,
    placed,
)

Rule = Callable[["Trace", JaxprEqn, list[Value]], Value | list[Value]]
RULES: dict[str, Rule] = {}
Axis = tuple[str, int]  # of a leaf


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register what becomes of values in these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


class Trace:
    """Runs a jaxpr on values, and collects the uses of every leaf.

    Attributes:
      shapes: of the leaves, by path.
      uses: of each leaf, in the order of the program, by number.
      edges: what lies between uses, in this order.
      scanned: the axes of each leaf that a scan takes one element at a time.
      scans: by leaf, "scan_layers" or "lax.scan", whichever takes it.
      taken: uses whose results another product takes.
      met: the axes of other leaves that an axis of a leaf was contracted with.
      inputs: leaves that are used like data, such as learned queries: where.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], inputs: dict[str, str]
    ) -> None:
        self.shapes = shapes
        self.inputs = inputs
        self.uses: dict[str, dict[int, Use]] = {path: {} for path in shapes}
        self.edges: dict[Edge, None] = {}
        self.inputs_of: dict[Use, set[Use]] = collections.defaultdict(set)
        self.met: dict[Axis, set[Axis]] = collections.defaultdict(set)
        self.scanned: dict[str, set[int]] = collections.defaultdict(set)
        self.scans: dict[str, str] = {}
        self.taken: set[Use] = set()
        self._numbers: dict[Any, tuple[int, str]] = {}
        self._calls: tuple[JaxprEqn, ...] = ()  # the operations around this one

    def run(self, jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a function."""
        jaxpr = jaxprs.needed(jaxpr)
        known = dict.fromkeys(jaxpr.constvars, Value())
        known |= zip(jaxpr.invars, values, strict=True)

        def read(v: Any) -> Value:
            if isinstance(v, Literal):
                return Value(
                    numbers=lambda: np.asarray(v.val, getattr(v.aval, "dtype", None))
                )
            return known[v]

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
        if name not in _JOINING:
            values = [*map(self._settled, values)]
        if name not in RULES and (closed := jaxprs.called(eqn)) is not None:
            return self.call(eqn, closed.jaxpr, values)
        result = RULES.get(name, elementwise)(self, eqn, values)
        results = result if isinstance(result, list) else [result] * len(eqn.outvars)
        results = [*map(self._without_taken, results)]
        # Constants of constants, such as eye(24)[order], are known by their numbers.
        are_known = all(x.numbers for x in values) and not any(x.data for x in results)
        results = [
            replace(x, numbers=_numbers(eqn, values, i) if are_known else None)
            if are_known or x.numbers
            else x
            for i, x in enumerate(results)
        ]
        if not self.is_transposed(eqn):
            return results
        return [x if x.leaves else replace(x, is_gradient=True) for x in results]

    def _without_taken(self, value: Value) -> Value:
        """A value without what another product takes, if it comes from many.

        The results of all layers meet in a residual stream.
        """
        results, sources = value.results, value.sources
        if len(results) <= 8 and len(sources) <= 8:
            return value
        if len(results) > 8:
            results = {x: of for x, of in results.items() if x not in self.taken}
        if len(sources) > 8:
            sources -= self.taken
        return replace(value, results=results, sources=sources)

    def _settled(self, value: Value) -> Value:
        """Leaves that are like data as data, unless other leaves lie beside them."""
        if not value.leaves or not value.leaves.keys() <= self.inputs.keys():
            return value
        return Value(data=True, turns=value.turns)

    def is_transposed(self, eqn: JaxprEqn) -> bool:
        """Whether an operation goes from results back to inputs, for a gradient."""
        return jaxprs.transpositions((*self._calls, eqn)) % 2 == 1

    def scan(self, leaf: str, axis: int, eqn: JaxprEqn) -> None:
        """A loop takes one element of this axis of a leaf at a time."""
        self.scanned[leaf].add(axis)
        by_layers = jaxprs.is_in(jaxprs.SCAN_LAYERS, (*self._calls, eqn))
        self.scans[leaf] = "scan_layers" if by_layers else "lax.scan"

    def use(
        self,
        value: Value,
        kind: str,
        eqn: JaxprEqn,
        sides: Sequence[str] = (),
        by: Value | None = None,
    ) -> list[Use]:
        """Every leaf that a value is made of is used here, with `sides` of its axes.

        `by` is what it is multiplied by.
        """
        uses, calls = [], (*self._calls, eqn)
        depth = jaxprs.transpositions(calls)
        sources = by.sources if by else frozenset()
        for leaf, parts in value.leaves.items():
            key = leaf, kind, *map(id, calls)  # a function may be called several times
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers), jaxprs.line_of(calls)
            number, line = self._numbers[key]
            known = value.sides.get(leaf, {})
            constant = {a for a, x in known.items() if CONSTANT in x}
            places = [axis for of_axis in parts for axis in axes_in((of_axis,))]
            of_axes = {
                axis: frozenset({side})
                for of_axis, side in zip(parts, sides, strict=False)
                for axis in axes_in((of_axis,))
                if axis not in constant or places.count(axis) == 1
            }
            # Of w[3], w (8, 24, 40), a use sees one element of axis 0: that is a batch.
            cut = dict.fromkeys(self.cut_off(value, leaf), frozenset({BATCH}))
            known = {a: x - {SUMMED} for a, x in merged(known, of_axes).items()}
            known = {a: x - {CONSTANT} or x for a, x in known.items() if x}
            use = Use(
                number,
                leaf,
                kind,
                line,
                calls,
                sides=cut | known,
                left=frozenset(places),
                constant=frozenset(constant),
                depth=depth,
                of_picked=leaf in value.picked,
            )
            self.uses[leaf][number] = use
            self.inputs_of[use] |= sources
            uses.append(use)
        for use, before in itertools.product(uses, sources):
            if use.depth == before.depth:  # backwards, what is later comes first
                first, then = (use, before) if use.is_gradient else (before, use)
                self.note("takes", first, other=then)
        return uses

    def note(
        self, kind: str, use: Use, axes: Iterable[int] | None = None, **more: Any
    ) -> None:
        """Record what lies between uses; nothing, where it is of no axes."""
        of = frozenset(axes or ())
        if of or axes is None:
            self.edges[Edge(kind, use, of, **more)] = None
        if kind == "takes":
            self.taken.add(use)

    def feed(self, value: Value) -> None:
        """Note that a frozen kernel takes a value, as a parameter would."""
        for use in value.sources:
            if not use.is_gradient:
                self.note("takes", use)

    def seen(self) -> tuple[dict[str, dict[int, Use]], dict[Edge, None]]:
        """The uses and edges so far."""
        return {leaf: {**uses} for leaf, uses in self.uses.items()}, {**self.edges}

    def forget(self, seen: tuple[dict[str, dict[int, Use]], dict[Edge, None]]) -> None:
        """Keep these alone, until others are found again.

        And what products take: values of which many lie together lose what is taken, so
        that a later turn of a loop may not see it any more.
        """
        takes = {edge: None for edge in self.edges if edge.kind == "takes"}
        self.uses = {leaf: {**uses} for leaf, uses in seen[0].items()}
        self.edges = seen[1] | takes

    def cut_off(self, value: Value, leaf: str) -> list[int]:
        """The axes of a leaf of which a value has one element, or one at a time."""
        known = {*value.sides.get(leaf, {})} | axes_in(value.leaves[leaf])
        return [a for a, n in enumerate(self.shapes[leaf]) if n > 1 and a not in known]

    def note_input(
        self,
        value: Value,
        eqn: JaxprEqn,
        features: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        """Note that an operation makes a product of two leaves an activation.

        Then one leaf is like data, and the other, which has the features, a matrix. In
        (n, d) @ (d, features) the first is contracted along its last axis. Where that
        does not tell, features are along the last axis of the value.
        """
        if self.is_transposed(eqn):
            return
        if features is None:
            rows = [leaf for leaf in value.leaves if self._has_rows(value, leaf)]
            if len(rows) != 1 or len(value.leaves) == 1:
                features = {x: axes_in(of[-1:]) for x, of in value.leaves.items()}
            else:
                features = {x: axes_in(of) for x, of in value.leaves.items()}
                features |= {rows[0]: set()}
        for leaf in features if any(features.values()) else ():
            is_whole = {SUMMED} not in value.sides.get(leaf, {}).values()
            if len(value.inner(leaf)) == 1 and is_whole and not features[leaf]:
                line = jaxprs.line_of((*self._calls, eqn))
                self.inputs.setdefault(leaf, line)

    def _has_rows(self, value: Value, leaf: str) -> bool:
        """Whether another leaf met the last axis of a leaf."""
        wide = [axis for axis, n in enumerate(self.shapes[leaf]) if n > 1]
        return value.inner(leaf) == {*wide[-1:]}

    def given(self, value: Value, eqn: JaxprEqn) -> Value:
        """A value that an operation takes as data, although it may be made of leaves.

        A leaf was a matrix if a constant, such as a grid, was multiplied by it.
        """
        sources, results = value.sources, dict(value.results)
        for leaf, parts in value.leaves.items():
            one = replace(value, leaves={leaf: parts})
            known = value.sides.get(leaf, {}).items()
            inside = {axis for axis, x in known if x == {CONSTANT}}
            if inside >= axes_in(parts):  # by constants on both sides
                inside -= axes_in(parts[-1:])
            if inside and not value.data:
                sides = [IN if axes_in([x]) & inside else OUT for x in parts]
                one = one.with_side(IN, {leaf: inside - axes_in(parts)})
                made = self.use(one, "contracted", eqn, sides)
                sources |= {*made}
                results |= dict.fromkeys(made, parts)
            else:
                self.use(one, "elementwise", eqn)
        return replace(value, data=True, leaves={}, sources=sources, results=results)

    def routes(self, chosen: Value, others: Sequence[Value]) -> frozenset[Use]:
        """Note that a top-k chose among other values, unless these are its own inputs.

        Returns the choice, if it is one of others: what it chose is no gate any more.
        """
        among = {use.path for use in chosen.sources}
        others = [x for x in others if not set() < {u.path for u in x.sources} <= among]
        is_routing = any(x.leaves or (x.data and not x.noise) for x in others)
        for use in chosen.choice if is_routing else ():
            self.note("chooses", use)
        return chosen.choice if is_routing else frozenset()


def _numbers(eqn: JaxprEqn, values: Sequence[Value], i: int) -> Callable[[], Any]:
    """The numbers of an operation's result i, which are computed if they are asked."""

    @functools.cache
    def numbers() -> Any:
        operands = [x.numbers() for x in values if x.numbers]
        with jax.ensure_compile_time_eval():
            result = eqn.primitive.bind(*operands, **eqn.params)
        return result[i] if eqn.primitive.multiple_results else result

    return numbers


# Ways of parameters into one vector and out of it, as in `ravel_pytree`.
_JOINING = {"concatenate", "convert_element_type", "reshape", "slice", "split"}
_ACTIVATIONS = {"tanh", "logistic", "max", "sin", "cos", "erf", "exp", "exp2"}
_ACTIVATIONS |= {"expm1", "log1p"}
SUMS = ("add", "sub")
_HIDING = {"triangular_solve", "ffi_call"}  # not elementwise if all fits


def elementwise(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> Value:
    """An operation on each element; or one without a rule."""
    name, shape = eqn.primitive.name, shape_of(eqn.outvars[0]) if eqn.outvars else ()
    if name in SUMS and any(x.leaves and x.has_all(shape) for x in values):
        values = [Value() if x.is_gradient else x for x in values]  # a step in the loss
    result = joined(values)
    cases = values[1:] if name == "select_n" else []
    if any(x.leaves for x in cases) and all(x == cases[0] for x in cases):
        return cases[0]  # whatever chooses, as `vmap` does for the branches of a cond
    shapes = [shape_of(v) for v in eqn.invars]
    pairs = [*zip(values, shapes, strict=True)]
    values = [_repeated(*x, shape) for x in zip(values, shapes, strict=True)]
    fits = all(_fits(x, shape) for x in shapes) and name not in _HIDING
    if not fits:
        result.results = {}
    if len(values) > 1 or name != "convert_element_type":
        for use in [x for x in result.outputs if x.kind == "elementwise"]:
            del result.results[use]
    made = [x for x in values if x.leaves]
    active = [x for x in values if x.data and not x.leaves and not x.noise]
    result.noise &= name == "mul" or not made
    if name == "eq":
        result.one_hot = sum(x.data for x in values) == 1
    by_itself = name == "select_n" and bool(values[0].leaves)  # as in leaky_relu
    raw = {y for x in made for y in x.leaves}
    is_raw = len(raw) == 1 and all(x.is_raw for x in made)
    is_clipped = is_raw and (name == "max" or by_itself)
    is_function = bool(made) and (name in _ACTIVATIONS or by_itself) and not is_clipped
    if name in SUMS:  # a sum with leaves that no function was applied to is no function
        result.activated = bool(made) and all(x.activated for x in made)
        constant = [x.constant for x in made]  # with a bias, constants are data
        result.activated |= any(
            not x.has_all(shape, places) for x in made for places in constant
        )
    result.activated |= is_function
    for value in made:
        if not value.data and (is_function or _is_added(name, value, values, shape)):
            trace.note_input(value, eqn)
    result.is_exponential |= _is_exponential(name, values)
    if name in SUMS and any(not (x.data or x.leaves or s) for x, s in pairs):
        result.is_exponential = False  # 1 + exp(-x), as in a logistic function
    result.softmax = _softmax(eqn, values)
    if name == "mul":
        _multiply(trace, values, shapes)
    for value, size in zip(values, map(math.prod, shapes), strict=True):
        others = [x for x, s in zip(values, shapes, strict=True) if math.prod(s) > size]
        if name == "select_n" and value is values[0]:
            others = [x for x in values if x.sources]
        result.choice -= trace.routes(value, others)
    for value in _scales(name, made, shape):
        trace.use(value, "elementwise", eqn)
        made = [x for x in made if x is not value]
    if name in SUMS and any(x.picked and x.data for x in made):  # rows are data
        for value in [x for x in made if not x.data]:
            trace.use(value, "elementwise", eqn)
            made = [x for x in made if x is not value]
    for value in active if name in ("mul", "div") and len(made) == 1 else ():
        # w / (v @ w @ u), where v = w @ u: all that v and u come from are uses of w.
        own, more = set(), {*value.sources}
        while more and all(x.path in made[0].leaves for x in more):
            own |= more
            more = {y for x in more for y in trace.inputs_of[x]} - own
        for use in own if not more else ():
            trace.note("scales", use)
    # (tokens, in, out) picked matrices times (tokens, 1, 1) weights are still matrices.
    by = [s for x, s in zip(values, shapes, strict=True) if x.data and not x.leaves]
    of_rows = [x for x in made if x.picked and fits and _is_of_rows(x, by)]
    if active or not fits:
        for value in [x for x in made if x not in of_rows]:
            is_input = value.activated or name not in SUMS
            if value.picked and name == "mul":
                for x in active:
                    trace.feed(x)
            if fits and is_input and not value.has_all(shape):
                data = trace.given(value, eqn)
                result.sources |= data.sources
                result.results |= data.results
                # By a vector, this is a product if it is summed over.
                for use in trace.use(value, "elementwise", eqn):
                    if name == "mul" and (parts := value.leaves[use.path]):
                        result.results[use] = parts
            else:
                trace.use(value, "elementwise" if fits else "opaque", eqn)
        # Leaves stay matrices behind a mask or a scale of their elements; and a product
        # of leaves (LoRA) where it is added to a frozen matrix.
        masked = name in ("mul", "div", "select_n") and sum(n > 1 for n in shape) > 1
        frozen = all(x.given_floats for x in active)
        made = [
            x
            for x in made
            if (fits and ((masked and x.has_all(shape)) or (frozen and x.of_two)))
            or x in of_rows
        ]
    for value in made:
        result = result.with_leaves(value, len(shape))
    if name == "select_n" and not (values[0].data or values[0].leaves):
        return result.moved(lambda parts: _diagonal(parts, shape))
    return result


def _is_of_rows(value: Value, by: Sequence[Shape]) -> bool:
    """Whether factors of these shapes are the same along all axes of its leaves."""
    own = {a for of in value.leaves.values() for a, x in enumerate(of) if axes_in([x])}
    return all(shape[a] == 1 for shape in by if shape for a in own)


def _repeated(value: Value, old: Shape, new: Shape) -> Value:
    """A value without the axes along which its one element is repeated."""
    if len(old) != len(new) or not value.leaves:
        return value
    places = [a for a, n in enumerate(old) if n == new[a]]
    return value.moved(lambda parts: placed(parts, {a: a for a in places}, new))


def _is_added(name: str, value: Value, values: Sequence[Value], shape: Shape) -> bool:
    """Whether a value of leaves is added to activations, scales them or has a bias."""
    others = [x for x in values if not x.leaves and x.data]
    if any(not (x.noise or x.given_floats) for x in others):
        return name in SUMS or not value.has_all(shape)
    biases = [x for x in values if x.leaves and not {*x.leaves} & {*value.leaves}]
    return name in SUMS and not all(x.has_all(shape) for x in biases)


def _diagonal(parts: AxisParts, shape: Shape) -> AxisParts:
    """The axes of a vector that a mask repeats along an axis of the same size."""
    own = {n: x for x, n in zip(parts, shape, strict=True) if axes_in((x,))}
    return tuple(
        x if axes_in((x,)) else own.get(n, x) for x, n in zip(parts, shape, strict=True)
    )


def _fits(shape: Shape, other: Shape) -> bool:
    """True if an operand of this shape is a scalar, or broadcast by its axes of 1."""
    ones = {n for n, m in zip(shape, other, strict=False) if n != m}
    return not shape or (len(shape) == len(other) and ones <= {1})


def _scales(name: str, made: Sequence[Value], shape: Shape) -> list[Value]:
    """Values made of leaves that only scale others, or noise that others get."""
    whole = [x for x in made if x.has_all(shape)]
    if not all(x.activated for x in whole):  # a function of one scales the other
        whole = [x for x in whole if not x.activated]
    scales = [
        x
        for x in made
        if (name in ("mul", "div") and x not in whole) or (name in SUMS and x.noise)
    ]
    others = {leaf for x in made if x not in scales for leaf in x.leaves}
    # w / norm(w, axis=0) and w / (v @ w @ u) scale their own leaf.
    return [
        x
        for x in scales
        if others and (not x.has_all(shape) or not others & {*x.leaves})
    ]


def _is_exponential(name: str, values: Sequence[Value]) -> bool:
    """Whether it is a power of a constant, to data or leaves."""
    is_power = name == "pow" and not (values[0].data or values[0].leaves)
    return name in ("exp", "exp2") or is_power


def _softmax(eqn: JaxprEqn, values: Sequence[Value]) -> str:
    """`Value.softmax` of an elementwise operation; constants change nothing."""
    name, of = eqn.primitive.name, [x.softmax for x in values if x.data]
    if _is_exponential(name, values):
        return SOFTMAX if of == [LOG_SOFTMAX] else EXPONENTIAL
    if name == "log" and of == [EXPONENTIAL]:
        return LOG
    if name in SUMS and LOG in of:  # with the maximum, or x - log s
        return LOG_SOFTMAX if name == "sub" and of[0] != LOG else LOG
    is_inverse = (name == "div" and not values[0].data) or eqn.params.get("y") == -1
    if is_inverse and of == [EXPONENTIAL]:
        return RECIPROCAL
    if name == "div" and of == [EXPONENTIAL] * 2:
        return SOFTMAX
    if name == "mul" and {*of} == {EXPONENTIAL, RECIPROCAL}:
        return SOFTMAX
    if {*of} == {EXPONENTIAL, SOFTMAX}:
        return EXPONENTIAL
    return of[0] if len({*of}) == 1 else ""


def _multiply(trace: Trace, values: Sequence[Value], shapes: Sequence[Shape]) -> None:
    """Find gates: of experts, for all elements of each; or slices of one result."""
    for i, j in ((0, 1), (1, 0)):
        if values[i].are_gates and math.prod(shapes[i]) < math.prod(shapes[j]):
            places = [a for a, n in enumerate(shapes[i]) if n > 1]
            for use, parts in values[j].outputs.items():
                trace.note("gated", use, axes_in(parts, places))
            for use, parts in values[i].outputs.items():
                trace.note("gates", use, axes_in(parts))
    for use in values[0].outputs.keys() & values[1].outputs.keys():
        trace.note("multiplied", use)
