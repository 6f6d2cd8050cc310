"""Follow every parameter through a traced function, until operations apply it to data.

A `Trace` runs a jaxpr on `Value`s. Rules are registered by the names of primitives.
Without a rule an operation is elementwise if its shapes fit, and otherwise opaque: what
becomes of a leaf in it is in doubt.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.reading import values as v
from jax_muon.reading.values import Use, Value, View, axes_in

Rule = Callable[["Trace", JaxprEqn, list[Value]], Value | list[Value]]
RULES: dict[str, Rule] = {}
ELEMENTWISE = "elementwise"  # the rule of all others
RAISES = False  # in tests a mistake in a rule is an error
# The side of an axis that is gone in this way.
_SIDES = {v.LOOP: v.ROW, v.INDEX: v.ROW, v.PICKED: v.BATCH}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register what becomes of values in these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


@dataclass
class Facts:
    """What is found of the leaves. Turns of a loop but the last are forgotten."""

    uses: dict[tuple[object, ...], Use] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # leaves not followed: why
    doubts: dict[str, str] = field(default_factory=dict)  # ambiguous leaves: why
    routers: dict[Use, None] = field(default_factory=dict)  # a top-k routes by them
    batched: dict[tuple[Use, int], None] = field(default_factory=dict)  # members
    gated: dict[tuple[Use, int], None] = field(default_factory=dict)  # axes of gates
    weighed: dict[str, None] = field(default_factory=dict)  # see `weigh`
    attention: dict[Any, None] = field(default_factory=dict)  # see attention.py

    def copy(self) -> "Facts":
        """A copy that later turns do not change."""
        return Facts(*({**x} for x in vars(self).values()))


class Trace:
    """Runs a jaxpr on values, and collects the uses of every leaf.

    Attributes:
      facts: what is found.
      takers: by leaf, leaves whose products take its results, and how often JAX
        transposed these; "" is a frozen one.
      taken: uses whose results the product of another leaf takes.
      reached: leaves whose products reach the result.
      scans: by leaf and axis, "scan_layers" or "lax.scan", whichever takes it.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], like_data: Collection[str]
    ) -> None:
        self.shapes, self.like_data, self.facts = shapes, like_data, Facts()
        self.takers: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.taken: set[Use] = set()
        self.reached: set[str] = set()
        self.scans: dict[tuple[str, int], str] = {}
        self.calls: tuple[JaxprEqn, ...] = ()  # the operations around this one

    def run(self, jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a function."""
        jaxpr = jaxprs.needed(jaxpr)
        known = dict(zip(jaxpr.invars, values, strict=True))
        known |= dict.fromkeys(jaxpr.constvars, Value(given=True))

        def read(x: jaxprs.Operand) -> Value:
            return Value() if isinstance(x, Literal) else known[x]

        for eqn in jaxpr.eqns:
            results = self._operation(eqn, [*map(read, eqn.invars)])
            known.update(zip(eqn.outvars, results, strict=True))
        return [*map(read, jaxpr.outvars)]

    def call(
        self, eqn: JaxprEqn, function: ClosedJaxpr, values: Sequence[Value]
    ) -> list[Value]:
        """The results of a function that an operation calls."""
        before, self.calls = self.calls, (*self.calls, eqn)
        try:
            return self.run(function.jaxpr, values)
        finally:  # a mistake in it goes to the operation that called it
            self.calls = before

    def _operation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name not in RULES and (closed := jaxprs.called(eqn)) is not None:
            pairs = zip(values, closed.jaxpr.invars, eqn.invars, strict=True)
            # The body of a shard_map has (12, 40) of an argument (24, 40).
            shards = [_shard(x, shape_of(a), shape_of(b)) for x, a, b in pairs]
            return self.call(eqn, closed, shards)
        try:
            result = RULES.get(name, RULES[ELEMENTWISE])(self, eqn, values)
        except Exception as error:
            if RAISES:
                raise
            why = f"a mistake of jax_muon, {error!r},"
            self.doubt([use.path for x in values for use in x.sources], why, eqn)
            result = self.opaque(eqn, values, why)
        results = result if isinstance(result, list) else [result] * len(eqn.outvars)
        return [self._without_taken(x, self.is_backward(eqn)) for x in results]

    def opaque(self, eqn: JaxprEqn, values: list[Value], why: str) -> list[Value]:
        """The results of an operation that hides what it does with its leaves."""
        for value in values:
            self.lose(value.leaves, why, eqn)
        is_data = any(x.data or x.leaves for x in values)
        result = replace(v.joined(values), gate="", data=is_data)
        # Integers of products: perhaps numbers of the largest ones, as of a top-k.
        perhaps = {(use, False) for use in result.sources}
        numbers = replace(result, chosen=result.chosen | perhaps)
        results = []
        for x in eqn.outvars:
            is_number = jnp.issubdtype(getattr(x.aval, "dtype", float), jnp.integer)
            results.append((numbers if is_number else result).bare(shape_of(x)))
        return results

    def _without_taken(self, value: Value, is_backward: bool) -> Value:
        """A value that forgets products whose results others take, if it has many.

        A residual stream after 48 layers comes from 96 products. A gradient comes from
        gradients alone.
        """
        left = value.sources
        if len(left) > 8:
            left = {x: of for x, of in left.items() if x not in self.taken}
        if is_backward:
            left = {x: of for x, of in left.items() if x.depth or x.kind == "picked"}
            value = replace(value, chosen=frozenset()) if value.chosen else value
        return replace(value, sources=left) if len(left) < len(value.sources) else value

    @functools.cached_property
    def noted(self) -> dict[Use, list[Any]]:
        """What is noted of attention, by use; after the run."""
        notes: dict[Use, list[Any]] = defaultdict(list)
        for note in self.facts.attention:
            notes[note[0]].append(note)
        return notes

    # --- uses -------------------------------------------------------------------------

    def is_backward(self, eqn: JaxprEqn) -> bool:
        """Whether an operation goes from results back to inputs, for a gradient."""
        return jaxprs.transpositions((*self.calls, eqn)) % 2 == 1

    def line(self, eqn: JaxprEqn) -> str:
        """` at model.py:57`, the user's line of an operation, or nothing."""
        line = jaxprs.line_of((*self.calls, eqn))
        return f" at {line}" if line else ""

    def use(
        self,
        leaves: Mapping[str, View],
        kind: str,
        eqn: JaxprEqn,
        sides: Sequence[str] = (),
        by: Value | None = None,
    ) -> list[Use]:
        """Record that an operation uses these leaves, and takes `by`.

        In x (16, 24) @ w[3], of layers w (8, 24, 40), `sides` are (IN, OUT) and `by` is
        x: axis 1 of the leaf is in, axis 2 out, and axis 0, cut off, a row.
        """
        uses, calls = [], (*self.calls, eqn)
        depth = jaxprs.transpositions(calls)
        made_by = frozenset(by.sources) if by else frozenset()
        for leaf, view in leaves.items():
            # Of w (8, 24, 40), w[3] has the parts ((1, 24),), ((2, 40),), and axis 0 is
            # gone as INDEX: sides (IN, OUT) make {0: {ROW}, 1: {IN}, 2: {OUT}}.
            of = {a: {_SIDES.get(way, way)} for a, way in view.gone.items()}
            for of_axis, side in zip(view.parts, sides, strict=False):
                for axis in axes_in((of_axis,)):
                    of.setdefault(axis, set()).add(side)
            frozen = {a: frozenset(x) for a, x in of.items() if a != v.JOINED}
            key, is_picked = (leaf, kind, *map(id, calls)), bool(view.went(v.PICKED))
            use = Use(key, leaf, kind, frozen, calls, depth, made_by, is_picked)
            self.facts.uses[key] = use
            uses.append(use)
            if by:
                self.take(by, leaf, depth)
        return uses

    def take(self, value: Value, path: str, depth: int = 0) -> None:
        """Note that the product of a leaf takes a value; "" is a frozen kernel.

        Backwards, what is later comes first.
        """
        for before in value.sources:
            if before.depth != depth and before.kind != "picked":
                continue
            if depth % 2:
                # A gradient may depend on rows that data picked (depth 0), as of a
                # bias, which take no outputs: then `decide` refuses.
                self.takers[path].add((before.path if before.depth else path, depth))
                continue
            self.takers[before.path].add((path, depth))
            if before.path != path:
                self.taken.add(before)

    def weigh(self, value: Value, path: str) -> None:
        """Note that a vector, or numbers of the loss, may take outputs of products."""
        for before in value.sources:
            if before.path != path:
                self.facts.weighed[before.path] = None

    def doubt(self, leaves: Collection[str], why: str, eqn: JaxprEqn) -> None:
        """Note why leaves are ambiguous; their first doubt counts."""
        for leaf in leaves:
            self.facts.doubts.setdefault(leaf, f"{why}{self.line(eqn)}")

    def lose(self, leaves: Collection[str], why: str, eqn: JaxprEqn) -> None:
        """Note why leaves are not followed further: whatever else shows is no proof."""
        for leaf in leaves:
            self.facts.lost.setdefault(leaf, f"{why}{self.line(eqn)}")

    def routes(self, eqn: JaxprEqn, values: Sequence[Value]) -> None:
        """Note that a top-k of some products chooses among other activations.

        A top-k of hidden units that picks its own units routes nothing, and the
        gradient of a sort puts elements back.
        """
        if self.is_backward(eqn):
            return
        # A top-k of x @ router picks ups (8, 24, 40): the numbers have the router's use
        # in `chosen`, the ups have not.
        for use, is_sure in [one for x in values for one in x.chosen]:
            others = [x for x in values if all(use is not y for y, _ in x.chosen)]
            paths = {s.path for x in others for s in x.sources} - {use.path}
            if not paths and not any(x.leaves or x.given for x in others):
                continue
            if is_sure:
                self.facts.routers[use] = None
            else:
                self.doubt([use.path], "its outputs may say what is computed,", eqn)

    # --- leaves that are used like data -----------------------------------------------

    def wide(self, leaf: str) -> list[int]:
        """The axes of a leaf that have more than one element."""
        return [a for a, n in enumerate(self.shapes[leaf]) if n > 1]

    def as_data(self, value: Value, eqn: JaxprEqn) -> Value:
        """A value as data, although it is made of leaves, which are used here.

        Of tanh(queries @ w) one is like data, and nothing says which.
        """
        # No axis is left of a norm, or of the loss of u @ v.
        are_left = any(axes_in(view.parts) for view in value.leaves.values())
        if value.went(v.INNER) and are_left and not self.is_backward(eqn):
            self.doubt(value.went(v.INNER), EITHER, eqn)
        for leaf, view in value.leaves.items():
            if not view.went(v.PICKED):
                kind = "factor" if view.went(v.INNER) else "elementwise"
                self.use({leaf: view}, kind, eqn)
        given = value.given or value.is_learned
        return replace(value, data=True, given=given, leaves={})


def _shard(value: Value, shape: v.Shape, whole: v.Shape) -> Value:
    """What a device has of a value: of (2, 24, 40) on two devices, one matrix."""
    axes = {a: a for a in range(len(shape))}
    return value if shape == whole else value.moved(lambda x: v.placed(x, axes, shape))


EITHER = "of parameters that multiply each other any may be data,"
