"""What is known of one array of a traced function, and of one use of a parameter.

An array is made of parameters ("leaves") by moving their elements, or it depends on
data. A `View` says which axis of the array has which axis of a leaf; a `Use` is one
operation that applies a leaf to data.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import JaxprEqn

# A part of an axis of an array: the axis of the leaf (None: of no leaf) and how many
# elements. (24, 40) as (4, 6, 40) has the parts ((0, 4),), ((0, 6),), ((1, 40),). A
# part with one element says that this axis, too, has something of the leaf's axis.
Part = tuple[int | None, int]
Parts = tuple[tuple[Part, ...], ...]
Shape = Sequence[int]
JOINED = -1  # in the place of an axis: where a leaf lies beside others

# What became of an axis of a leaf that an array has no longer.
LOOP, INDEX, PICKED = "loop", "index", "picked"  # one element: of a loop, w[3], w[ids]
INNER, SUMMED = "inner", "summed"  # contracted with a leaf, or summed
# The side of a matrix that an axis is on in a use; rows may be those of a matrix.
BATCH, ROW, IN, OUT = "batch", "row", "in", "out"
# Gates: ids == numbers; exponentials and sigmoids, perhaps normalized; other data times
# one of these; other data with ids == numbers, such as its elements there.
HOT, SOFT, MIXED, MASKED = "hot", "soft", "mixed", "masked"


def axes_in(
    parts: Sequence[Iterable[Part]], places: Iterable[int] | None = None
) -> set[int]:
    """The leaf's axes in some axes of an array, or in all."""
    chosen = parts if places is None else [parts[place] for place in places]
    axes = {axis for of_axis in chosen for axis, _ in of_axis if axis is not None}
    return axes - {JOINED}


def free(size: int) -> tuple[Part, ...]:
    """An axis that is no leaf's."""
    return ((None, size),) if size > 1 else ()


def fitted(of_axis: tuple[Part, ...], size: int) -> tuple[Part, ...]:
    """The parts of one axis that was cut or padded to this size."""
    if math.prod(n for _, n in of_axis) == size or not of_axis:
        return of_axis or free(size)
    (outer, _), *others = of_axis
    rest = math.prod(n for _, n in others)
    if size % rest == 0:
        return ((outer, size // rest), *others)
    return ((outer, size), *((axis, 1) for axis, _ in others))


def placed(parts: Parts, source: Mapping[int, int], shape: Shape) -> Parts:
    """Axes of a result: from `source` by place, or else no leaf's."""
    return tuple(
        fitted(parts[source[place]], size) if place in source else free(size)
        for place, size in enumerate(shape)
    )


def reshaped(parts: Sequence[tuple[Part, ...]], old: Shape, new: Shape) -> Parts:
    """The parts of the old axes, divided among the new ones.

    Where sizes do not divide each other, (24, 5) as (8, 15), all axes have all.
    """
    # (24, 40) as (4, 6, 40): of the part (0, 24) the first axis takes (0, 4) and leaves
    # (0, 6) to the second, and so on; and (4, 6, 40) as (24, 40) goes back.
    left = [x for of, n in zip(parts, old, strict=True) for x in fitted(of, n)][::-1]
    result: list[tuple[Part, ...]] = []
    for size in new:
        of_axis: list[Part] = []
        while left and (size > 1 or left[-1][1] == 1):
            axis, length = left.pop()
            taken = math.gcd(size, length)
            if taken == 1 < length:
                mixed = tuple((a, 1) for a in {axis, *(a for a, _ in left)})
                after = [mixed] * (len(new) - len(result) - 1)
                return (*result, (*of_axis, *mixed), *after)
            if taken < length:
                left.append((axis, length // taken))
            of_axis.append((axis, taken))
            size //= taken
        result.append(tuple(of_axis))
    return tuple(result)


@dataclass(frozen=True)
class View:
    """How an array is made of one leaf."""

    parts: Parts
    gone: Mapping[int, str] = field(default_factory=dict)  # axes it has no more, why
    activated: bool = False  # a function of the leaf, such as its exp
    scaled: bool = False  # data multiplied its elements, perhaps as a mask

    def went(self, *kinds: str) -> set[int]:
        """The axes that are gone in these ways."""
        return {axis for axis, kind in self.gone.items() if kind in kinds}

    def moved(self, parts: Parts, kind: str) -> "View":
        """The view with these parts; axes that are in none of them went this way."""
        was, now = ({a for of in x for a, _ in of} for x in (self.parts, parts))
        gone = dict(self.gone) | {a: kind for a in was - now if a is not None}
        return replace(self, parts=parts, gone=gone)


@dataclass(frozen=True)
class Use:
    """One use of a leaf by one operation; each turn of a loop replaces the last."""

    key: tuple[Any, ...]  # the leaf, the kind, the operations around it and itself
    path: str = field(compare=False)
    kind: str = field(compare=False)  # contracted, convolved, grouped, picked, ...
    sides: Mapping[int, frozenset[str]] = field(compare=False)  # by axis of the leaf
    calls: Sequence[JaxprEqn] = field(compare=False)  # the operation is the last one
    depth: int = field(compare=False)  # how often JAX transposed it
    by: frozenset["Use"] = field(compare=False)  # what made its input
    is_picked: bool = field(compare=False)  # data indexed the leaf

    def axes(self, side: str) -> set[int]:
        """The axes of the leaf on this side."""
        return {axis for axis, sides in self.sides.items() if side in sides}

    @property
    def members(self) -> set[int]:
        """The axes that may be several matrices with one input: (experts, in, out)."""
        inside, outside = self.axes(IN), self.axes(OUT) - self.axes(IN)
        if self.kind == "transposed" or not inside or not outside:
            return set()
        return {axis for axis in outside if axis < min(inside) < max(outside)}


@dataclass(frozen=True)
class Scores:
    """A product of two activations, and the uses whose outputs it contracts."""

    key: tuple[Any, ...]
    operands: tuple[frozenset[Use], frozenset[Use]] = field(compare=False)


@dataclass(frozen=True)
class Value:
    """What is known of one array."""

    data: bool = False  # it depends on data
    # Floats of an argument or a constant, data or a frozen kernel; or made of leaves.
    given: bool = False
    leaves: Mapping[str, View] = field(default_factory=dict)  # beside data: perhaps
    sources: Mapping[Use, Parts] = field(default_factory=dict)  # products it comes from
    gate: str = ""  # HOT, SOFT, MIXED or MASKED
    # Uses among whose outputs it was chosen: by a top-k, or perhaps (False).
    chosen: frozenset[tuple[Use, bool]] = frozenset()
    # Leaves that multiplied it, with True for the axes along which it was repeated.
    scaled: Mapping[tuple[str, bool], Parts] = field(default_factory=dict)
    # Products of two activations, and which axes have rows of operand 0 or 1.
    scores: Mapping[Scores, Parts] = field(default_factory=dict)

    @property
    def is_learned(self) -> bool:
        """Whether it is made of leaves alone, perhaps with constants."""
        return bool(self.leaves) and not self.data

    def moved(self, change: Callable[[Parts], Parts], kind: str = SUMMED) -> "Value":
        """The same with axes rearranged; leaves' axes that are lost went this way."""
        return replace(
            self,
            leaves={x: v.moved(change(v.parts), kind) for x, v in self.leaves.items()},
            sources={x: change(parts) for x, parts in self.sources.items()},
            scaled={x: change(parts) for x, parts in self.scaled.items()},
            scores={x: change(parts) for x, parts in self.scores.items()},
        )

    def bare(self, shape: Shape) -> "Value":
        """The same without leaves, and with axes that are no product's outputs."""
        none = dict.fromkeys(self.sources, ((),) * len(shape))
        return replace(self, leaves={}, sources=none, scaled={}, scores={})

    def went(self, *kinds: str) -> dict[str, set[int]]:
        """By leaf, the axes that are gone in these ways."""
        return {x: axes for x, v in self.leaves.items() if (axes := v.went(*kinds))}

    def covers(self, shape: Shape) -> bool:
        """Whether it has leaves, and each axis is some leaf's; what data picked is."""
        views = self.leaves.values()
        own = {
            place
            for view in views
            for place, of_axis in enumerate(view.parts)
            if view.went(PICKED) or any(axis is not None for axis, _ in of_axis)
        }
        are_wide = all(n == 1 or a in own for a, n in enumerate(shape))
        return are_wide and any(axes_in(view.parts) for view in views)


def _merged(several: Iterable[Mapping[Any, Parts]]) -> dict[Any, Parts]:
    """Axes by what has them: where one of x - mean(x) has none, those of the other."""
    merged: dict[Any, Parts] = {}
    for of_one in several:
        for x, parts in of_one.items():
            # x (2, 16, 40) has outputs along its last axis, its mean (2, 16, 1) none.
            pairs = zip(parts, merged.get(x, parts), strict=False)
            merged[x] = tuple(a if axes_in([a]) else b for a, b in pairs)
    return merged


def joined(values: Sequence[Value]) -> Value:
    """An elementwise function of these values, without their leaves."""
    data = [x for x in values if x.data]
    gates = {x.gate for x in data or values}
    return Value(
        data=bool(data),
        given=all(x.given for x in data) and any(x.given for x in values),
        sources=_merged(x.sources for x in values),
        gate=next((x for x in ("", MIXED, SOFT, HOT) if x in gates), ""),
        chosen=frozenset().union(*(x.chosen for x in values)),
        scaled={leaf: of for x in values for leaf, of in x.scaled.items()},
        scores=_merged(x.scores for x in values),
    )
