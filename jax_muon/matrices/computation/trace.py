"""Follow every parameter through a traced function, until operations apply it to data.

A `Trace` runs a jaxpr on `Value`s. Rules are registered by the names of primitives:
`moves` rearranges axes, `contractions` has products, `loops` control flow. Without a
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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike
from jaxtyping import Array

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    LOST,
    OUT,
    SUMMED,
    Edge,
    Sides,
    Use,
    Value,
    axes_in,
    merged,
)

Rule = Callable[["Trace", JaxprEqn, list[Value]], Value | list[Value]]
RULES: dict[str, Rule] = {}
ELEMENTWISE = "elementwise"  # the rule of all others
SUMS = ("add", "sub")
Axis = tuple[str, int]  # of a leaf
# Uses by leaf and number, edges, and leaves that are like data.
Seen = tuple[dict[str, dict[int, Use]], dict[Edge, None], dict[str, str]]


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
      edges: how uses follow from each other, in the order of the program.
      scanned: the axes of each leaf that a scan takes one element at a time.
      scans: by leaf, "scan_layers" or "lax.scan", whichever takes it.
      taken: uses whose results another product takes.
      met: the axes of other leaves that an axis of a leaf was contracted with.
      scaling: uses that multiply data by a leaf, where not only sums take the result.
      inputs: leaves that are used like data, such as learned queries: where.
      unless_met: leaves that constants used like that: where; `settle` decides.
      closed_over: the value of an array that a function inside `jit` closes over.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        inputs: dict[str, str],
        closed_over: Callable[[Array], Value],
    ) -> None:
        self.shapes = shapes
        self.inputs = inputs
        self.closed_over = closed_over
        self.unless_met: dict[str, str] = {}
        self.uses: dict[str, dict[int, Use]] = {path: {} for path in shapes}
        self.edges: dict[Edge, None] = {}
        self.inputs_of: dict[Use, set[Use]] = collections.defaultdict(set)
        self.met: dict[Axis, set[Axis]] = collections.defaultdict(set)
        self.scanned: dict[str, set[int]] = collections.defaultdict(set)
        self.scans: dict[str, str] = {}
        self.taken: set[Use] = set()
        self.scaling: set[Use] = set()
        self._numbers: dict[tuple[object, ...], tuple[int, str]] = {}
        self._calls: tuple[JaxprEqn, ...] = ()  # the operations around this one

    def run(
        self, jaxpr: Jaxpr, values: Sequence[Value], arrays: Sequence[Array] = ()
    ) -> list[Value]:
        """The results of a function, which closes over `arrays`."""
        jaxpr = jaxprs.needed(jaxpr)
        known = dict(zip(jaxpr.invars, values, strict=True))
        known |= zip(jaxpr.constvars, map(self.closed_over, arrays), strict=True)

        def read(v: jaxprs.Operand) -> Value:
            if isinstance(v, Literal):
                return Value(
                    numbers=lambda: np.asarray(v.val, getattr(v.aval, "dtype", None))
                )
            return known[v]

        for eqn in jaxpr.eqns:
            results = self._operation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def call(
        self, eqn: JaxprEqn, function: ClosedJaxpr, values: Sequence[Value]
    ) -> list[Value]:
        """The results of a function that an operation calls."""
        before, self._calls = self._calls, (*self._calls, eqn)
        results = self.run(function.jaxpr, values, function.consts)
        self._calls = before
        return results

    def _operation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name not in _JOINING:
            values = [*map(self._settled, values)]
        if name not in RULES and (closed := jaxprs.called(eqn)) is not None:
            return self.call(eqn, closed, values)
        if any(x.beside_given for x in values) and not _may_be_frozen(name, values):
            mixed = [x for x in values if x.beside_given and name in _PRODUCTS]
            for leaf in [leaf for x in mixed for leaf in x.leaves]:
                self.inputs.setdefault(leaf, jaxprs.line_of((*self._calls, eqn)))
            values = [self.given(x, eqn) if x.beside_given else x for x in values]
        result = RULES.get(name, RULES[ELEMENTWISE])(self, eqn, values)
        results = result if isinstance(result, list) else [result] * len(eqn.outvars)
        results = [*map(self._without_taken, results)]
        # Constants of constants, such as eye(24)[order], are known by their numbers.
        are_known = all(x.numbers for x in values) and not any(x.data for x in results)
        if are_known:
            are_known = all(math.prod(shape_of(v)) <= _MOST for v in eqn.outvars)
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
        """A value that forgets the products whose results others take, if it has many.

        A residual stream after 48 layers comes from 96 products; each layer has taken
        all before it, so a list of them would grow with the square of the layers.
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
        """Learned queries and the like as data; unless the value has other leaves."""
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
        """Record that an operation uses each leaf of a value.

        In x (16, 24) @ w[3], of layers w (8, 24, 40), `sides` are (IN, OUT) and `by` is
        x: axis 1 of the leaf is in, axis 2 out, and axis 0, cut off, the batch.
        """
        uses, calls = [], (*self._calls, eqn)
        depth = jaxprs.transpositions(calls)
        sources = by.sources if by else frozenset()
        for leaf, parts in value.leaves.items():
            key = leaf, kind, *map(id, calls)  # a function may be called several times
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers), jaxprs.line_of(calls)
            known = value.sides.get(leaf, {}).items()
            is_matrix = kind != "elementwise" and leaf not in value.picked
            is_lost = is_matrix and any(x and x[0].at == LOST for x in parts)
            use = Use(
                self._numbers[key][0],
                leaf,
                "lost" if is_lost else kind,
                self._numbers[key][1],
                calls,
                sides=self._sides(value, leaf, sides),
                left=frozenset(axes_in(parts)),
                constant=frozenset(a for a, x in known if CONSTANT in x),
                depth=depth,
                is_picked=leaf in value.picked,
            )
            self.uses[leaf][use.number] = use
            self.inputs_of[use] |= sources
            uses.append(use)
        for use, before in itertools.product(uses, sources):
            if use.depth == before.depth:  # backwards, what is later comes first
                first, then = (use, before) if use.is_gradient else (before, use)
                self.note("takes", first, other=then)
        return uses

    def _sides(self, value: Value, leaf: str, sides: Sequence[str]) -> Sides:
        """The sides of a leaf's axes in a use, where a value's axes have `sides`."""
        parts, known = value.leaves[leaf], value.sides.get(leaf, {})
        now = {
            axis: frozenset({side})
            for of_axis, side in zip(parts, sides, strict=False)
            for axis in axes_in((of_axis,))
        }
        known = {a: x - {SUMMED} for a, x in merged(known, now).items()}
        known = {a: x - {CONSTANT} or x for a, x in known.items() if x}
        return dict.fromkeys(self.cut_off(value, leaf), frozenset({BATCH})) | known

    def note(
        self, kind: str, use: Use, axes: Iterable[int] | None = None, **more: Any
    ) -> None:
        """Record an edge; none where it would be about no axes."""
        of = frozenset(axes or ())
        if of or axes is None:
            self.edges[Edge(kind, use, of, **more)] = None
        if kind == "takes" and more.get("about") != "sum":  # which may be none
            self.taken.add(use)

    def feed(self, value: Value) -> None:
        """Note that another leaf, or a frozen kernel, takes a value."""
        for use in value.sources:
            if not use.is_gradient:
                self.note("takes", use)

    def seen(self) -> Seen:
        """The uses, edges and inputs so far."""
        uses = {leaf: {**uses} for leaf, uses in self.uses.items()}
        return uses, {**self.edges}, {**self.inputs}

    def forget(self, seen: Seen) -> None:
        """Go back to these, so that the next turn of a loop finds its own.

        Edges of results that products take stay. A value with many sources forgets
        them (`_without_taken`), so a later turn may not find them again.
        """
        takes = {edge: None for edge in self.edges if edge.kind == "takes"}
        self.uses = {leaf: {**uses} for leaf, uses in seen[0].items()}
        self.edges = seen[1] | takes
        for leaf in self.inputs.keys() - seen[2].keys():
            del self.inputs[leaf]  # c @ q of the first state c = zeros

    def cut_off(self, value: Value, leaf: str) -> list[int]:
        """The axes of a leaf that a value has one element of, as axis 0 for w[3]."""
        known = {*value.sides.get(leaf, {})} | axes_in(value.leaves[leaf])
        return [a for a, n in enumerate(self.shapes[leaf]) if n > 1 and a not in known]

    def note_input(
        self,
        value: Value,
        eqn: JaxprEqn,
        features: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        """Note that one leaf of a product is like data, since its result is activated.

        Of tanh(queries @ w), (9, 24) @ (24, 40), the learned queries are like data, and
        w, which has the features of the result, is a matrix. Data is contracted along
        its last axis. If both leaves are, or neither, features are along the last axis
        of the value.
        """
        if self.is_transposed(eqn):
            return
        if features is None:
            last = {leaf: len(self.shapes[leaf]) - 1 for leaf in value.leaves}
            rows = [leaf for leaf, axis in last.items() if value.inner(leaf) == {axis}]
            if len(rows) != 1 or len(value.leaves) == 1:
                features = {x: axes_in(of[-1:]) for x, of in value.leaves.items()}
            else:
                features = {x: axes_in(of) for x, of in value.leaves.items()}
                features |= {rows[0]: set()}
        for leaf in features if any(features.values()) else ():
            if len(value.inner(leaf)) == 1 and not features[leaf]:
                line = jaxprs.line_of((*self._calls, eqn))
                sides = value.sides[leaf].values()
                self.note_like_data(leaf, line, any(CONSTANT in x for x in sides))

    def note_like_data(self, leaf: str, line: str, by_constant: bool) -> None:
        """Note that a leaf is like data; one that a constant met, unless data does.

        t1 of waves(jnp.ones(5)) @ t1 @ t2 is none beside waves(times) @ t1 @ t2.
        """
        (self.unless_met if by_constant else self.inputs).setdefault(leaf, line)

    def settle(self) -> None:
        """At the end, leaves are like data that only constants met."""
        for leaf, line in self.unless_met.items():
            by_data = [x for x in self.uses[leaf].values() if not x.constant]
            if all(x.kind == "elementwise" for x in by_data):
                self.inputs.setdefault(leaf, line)

    def given(self, value: Value, eqn: JaxprEqn) -> Value:
        """A value as data, although it may be made of leaves, which are used here.

        In tanh(grid @ w) @ h, of a constant grid (64, 2) and w (2, 40), w is a matrix:
        axis 0, which the constant moved, is in. Elsewhere the use is elementwise.
        """
        sources, results = value.sources, dict(value.results)
        for leaf, parts in value.leaves.items():
            one = replace(value, leaves={leaf: parts})
            known = value.sides.get(leaf, {}).items()
            inside = {axis for axis, x in known if x - {SUMMED} == {CONSTANT}}
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
        value = replace(value, data=True, beside_given=False, leaves={}, sides={})
        return replace(value, sources=sources, results=results)

    def routes(self, chosen: Value, others: Sequence[Value]) -> frozenset[Use]:
        """Note that a top-k chose among other values, unless these are its own inputs.

        Returns the uses that chose: the chosen values are no gates any more.
        """
        among = {use.path for use in chosen.sources}
        others = [x for x in others if not set() < {u.path for u in x.sources} <= among]
        # Backwards, chosen values meet gradients, as in z.T @ g of a one-hot z @ w; and
        # the gradient of a maximum goes where the maximum is.
        others = [x for x in others if not (x.is_gradient or chosen.is_gradient)]
        is_routing = any(x.leaves or (x.data and not x.noise) for x in others)
        for use in chosen.choice if is_routing else ():
            self.note("chooses", use)
        return chosen.choice if is_routing else frozenset()


def _may_be_frozen(name: str, values: Sequence[Value]) -> bool:
    """Whether leaves may still lie beside frozen weights, and not beside data.

    x @ concatenate([frozen, w], 1) is a product with w. In concatenate([tokens, x]) @ w
    another leaf meets the first one, and under a function it is an activation.
    """
    if name in _PRODUCTS:
        return any(x.data for x in values)
    return name in RULES or name == "convert_element_type"


_PRODUCTS = ("dot_general", "conv_general_dilated")
_MOST = 1 << 24  # elements of a constant whose numbers are computed: 64 MiB


def _numbers(eqn: JaxprEqn, values: Sequence[Value], i: int) -> Callable[[], ArrayLike]:
    """The numbers of an operation's result i, which are computed if they are asked."""

    @functools.cache
    def numbers() -> ArrayLike:
        operands = [x.numbers() for x in values if x.numbers]
        with jax.ensure_compile_time_eval():
            result = eqn.primitive.bind(*operands, **eqn.params)
        return result[i] if eqn.primitive.multiple_results else result

    return numbers


# Ways of parameters into one vector and out of it, as in `ravel_pytree`.
_JOINING = {"concatenate", "convert_element_type", "reshape", "slice", "split"}
