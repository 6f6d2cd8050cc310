"""Records about the arrays of a traced function, and about each use of a parameter.

A `Value` describes one array. Before parameters meet data, it records the leaves that
the array is made of, and the `AxisPart`s of each axis; afterwards, the products with
leaves that the array comes from. A `Use` is one operation that applies a leaf to data.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike


class AxisPart(NamedTuple):
    """A part of an axis of a value: `size` elements, `stride` apart, of a leaf's axis.

    The axis is None if it is no leaf's; `whole` is false for one factor of several.
    `at` is where the leaf's elements begin along an axis of a concatenation, and how
    many follow: of jnp.concatenate([a, b]), of sizes 24 and 40, b is at (24, 40).
    """

    axis: int | None
    stride: int
    size: int
    whole: bool = True
    at: tuple[int, int] | None = None


# Places of leaves whose order along an axis is unknown, as in v[order] of a flat vector
# v; and of those that may be in a slice of it.
SCATTERED, LOST = (-1, 0), (-2, 0)
# The parts of each axis of a value, the outermost first.
AxisParts = tuple[tuple[AxisPart, ...], ...]
Shape = Sequence[int]


def axes_in(
    parts: Sequence[Iterable[AxisPart]], places: Iterable[int] | None = None
) -> set[int]:
    """The leaf's axes in some axes of a value, or in all."""
    chosen = parts if places is None else [parts[place] for place in places]
    return {x.axis for of_axis in chosen for x in of_axis if x.axis is not None}


def _size(of_axis: Iterable[AxisPart]) -> int:
    return math.prod(x.size for x in of_axis)


def free(size: int) -> tuple[AxisPart, ...]:
    """An axis of a value that is no leaf's."""
    return (AxisPart(None, 1, size),) if size > 1 else ()


def placed(parts: AxisParts, source: Mapping[int, int], shape: Shape) -> AxisParts:
    """Axes of a result: from `source` by place, or else no leaf's."""
    return tuple(
        parts[source[place]] if place in source else free(size)
        for place, size in enumerate(shape)
    )


def fit(parts: AxisParts, shape: Shape) -> AxisParts:
    """The parts of axes that were cut or padded to this shape."""
    return tuple(map(fitted, parts, shape))


def between(
    of_axis: tuple[AxisPart, ...], start: int, size: int
) -> tuple[AxisPart, ...] | None:
    """The parts of an axis in [start, start + size), or None if they are elsewhere.

    Only a concatenation knows where its parts begin.
    """
    if not of_axis or of_axis[0].at is None:
        return of_axis
    if of_axis[0].at in (SCATTERED, LOST):
        return scattered((of_axis,), [0], LOST)[0]
    at, length = of_axis[0].at
    low, high = max(at, start), min(at + length, start + size)
    if low >= high:
        return None
    place = None if high - low == size else (low - start, high - low)
    first, *rest = fitted((of_axis[0]._replace(at=None), *of_axis[1:]), high - low)
    return (first._replace(at=place), *rest)


def joined_places(parts: AxisParts) -> list[int]:
    """The axes of a value along which it has the leaf beside others."""
    return [a for a, of_axis in enumerate(parts) if of_axis and of_axis[0].at]


def scattered(
    parts: AxisParts, places: Iterable[int], at: tuple[int, int] = SCATTERED
) -> AxisParts:
    """Parts whose order along some axes is unknown; what is lost stays so."""
    result = [*parts]
    for place in places:
        for first in result[place][:1]:
            now = LOST if first.at == LOST else at
            result[place] = (first._replace(at=now), *result[place][1:])
    return tuple(result)


def fitted(of_axis: Sequence[AxisPart], size: int) -> tuple[AxisPart, ...]:
    """The parts of one axis that was cut or padded to this size."""
    is_placed = bool(of_axis) and of_axis[0].at is not None
    if not of_axis or is_placed or _size(of_axis) == size:
        return (*of_axis,)
    outer, *inner = of_axis
    rest = _size(inner)
    return (outer._replace(size=max(1, size // rest)), *inner)


def reshaped(parts: AxisParts, old: Shape, new: Shape) -> AxisParts:
    """The parts of the old axes, divided among the new ones."""
    if places := joined_places(parts):
        return _reshaped_beside_others(parts, places[0], old, new)
    shards, more = divmod(math.prod(map(_size, parts)), math.prod(old) or 1)
    if shards > 1 and new and axes_in(parts[:1]) & axes_in(parts[1:]):
        new = [shards * new[0], *new[1:]]  # w (12, 20) as rows (8, 30), on each device
    elif shards != 1 or more:
        pairs = zip(parts, old, strict=True)
        parts = tuple(fitted(of_axis, size) or free(size) for of_axis, size in pairs)
    left = [x for of_axis in parts for x in of_axis if x.size > 1][::-1]
    result, is_mixed = [], False
    for size in new:
        of_axis: list[AxisPart] = []
        while size > 1 and left:
            axis, stride, length, whole, _ = left.pop()
            taken = math.gcd(size, length)
            if taken == 1:  # they do not divide each other: both get this axis
                taken, size, is_mixed = length, size * length, True
            if rest := length // taken - 1:
                left.append(AxisPart(axis, stride, rest + 1, False))
                whole = False
            of_axis.append(AxisPart(axis, stride * (length // taken), taken, whole))
            size //= taken
        result.append(tuple(of_axis))
    return scattered(tuple(result), range(len(new)) if is_mixed else ())


def place_of_rows(parts: AxisParts) -> int:
    """The axis of rows that a leaf is on which begins within a row; -1 for others."""
    last = max((place for place, of_axis in enumerate(parts) if of_axis), default=-1)
    is_joined = last >= 0 and parts[last][0].at is not None
    return last if is_joined and last < len(parts) - 1 else -1


def _reshaped_beside_others(
    parts: AxisParts, place: int, old: Shape, new: Shape
) -> AxisParts:
    """The same for a leaf in a concatenation, which begins somewhere along an axis.

    Of a (24,) and b (40,) in a vector (64,), as rows (8, 8), b has rows 3 to 7. As rows
    (4, 16) it begins within one: then all its parts are on the axis of rows, and it
    begins at 24 of the vector.
    """
    is_in_rows, (first, *others) = place_of_rows(parts) == place, parts[place]
    assert first.at
    block, before = (first._replace(at=None), *others), math.prod(old[:place])
    starts = [a for a, n in enumerate(new) if n > 1 and math.prod(new[:a]) == before]
    if first.at == LOST:
        return (parts[place], *[()] * len(new))[: len(new)]
    if not starts or first.at == SCATTERED:  # or b in (2, 64) as (128,)
        result = reshaped((*parts[:place], block, *parts[place + 1 :]), old, new)
        axes = axes_in((block,))
        return scattered(
            result, [a for a, x in enumerate(result) if axes_in((x,)) & axes]
        )
    row = [1 if is_in_rows else n for n in old[place + 1 :]]  # (8,) of rows (8, 8)
    at, size = (n * math.prod(row) for n in first.at)
    (vector,) = reshaped((block, *parts[place + 1 :]), [first.at[1], *row], [size])
    row = [*new[starts[0] + 1 :]]
    unit = math.prod(row)
    own, *rest = reshaped((vector,), [size], [size // unit, *row])
    if at % unit or size % unit or _size(own) != size // unit:
        own, rest, unit = vector, [()] * len(row), 1
    first, *others = own or (AxisPart(None, 1, 1),)
    own = first._replace(at=(at // unit, size // unit)), *others
    return (*reshaped(parts[:place], old[:place], new[: starts[0]]), own, *rest)


# --- uses and values ------------------------------------------------------------------

# The side of a matrix that a leaf's axis is on in a use, or batch. Before the use, the
# axis may have been contracted with another leaf or with a constant, or summed over. It
# has no side if the value has one element of it, as axis 0 of w[3].
BATCH, IN, OUT = "batch", "in", "out"
INNER, CONSTANT, SUMMED = "inner", "constant", "summed"
Sides = dict[int, frozenset[str]]  # by axis of the leaf


def merged(a: Sides, b: Sides) -> Sides:
    """The sides in either."""
    return a | {axis: a.get(axis, frozenset()) | sides for axis, sides in b.items()}


class Heads(NamedTuple):
    """Attention heads along an axis of a leaf: `number`, `stride` elements apart."""

    axis: int
    number: int
    stride: int


@dataclass(frozen=True)
class Use:
    """One use of a leaf by one operation.

    An `Edge` says where its result goes. Each turn of a loop uses a leaf again, with
    the same number, and replaces the use of the turn before.
    """

    number: int
    path: str = field(compare=False)  # of the leaf
    kind: str = field(compare=False)  # contracted, convolved, grouped, picked, ...
    line: str = field(compare=False)  # of the user's code
    calls: Sequence[JaxprEqn] = field(compare=False)  # the operation is the last one
    sides: Sides = field(compare=False, default_factory=dict)
    left: frozenset[int] = field(compare=False, default=frozenset())  # axes not summed
    constant: frozenset[int] = field(compare=False, default=frozenset())  # met these
    depth: int = field(compare=False, default=0)  # how often JAX transposed it
    is_picked: bool = field(compare=False, default=False)  # data indexed the leaf

    @property
    def primitive(self) -> str:
        """JAX's name of the operation."""
        return str(self.calls[-1].primitive.name)

    @property
    def is_gradient(self) -> bool:
        """Whether it leads from results back to inputs."""
        return self.depth % 2 == 1

    def is_whole(self, parts: AxisParts, shape: Shape) -> bool:
        """Whether all outputs for one input are along the axes with these parts."""
        out = {axis for axis, sides in self.sides.items() if sides == {OUT}}
        out |= axes_in(parts)  # of columns one by one
        size = math.prod(x.size for of in parts for x in of if x.axis in out)
        return bool(out) and size == math.prod(shape[axis] for axis in out)


class Edge(NamedTuple):
    """How a use is connected with another, or with an operation on its result.

    `decide` has a function for each kind. `axes` are axes of the use's leaf.
    """

    kind: str
    use: Use
    axes: frozenset[int] = frozenset()
    other: Use | None = None
    others: frozenset[int] = (
        frozenset()
    )  # axes of the other use's leaf, or further ones
    about: str | tuple[int, ...] = ""  # a role; where a slice begins and ends; heads


# Values on the way to a softmax e / s of e = exp(x) with the sum s, in any spelling:
# e and s, 1 / s, log s, x - log s, and the softmax itself.
EXPONENTIAL, RECIPROCAL, LOG = "exponential", "reciprocal", "log"
LOG_SOFTMAX, SOFTMAX = "log-softmax", "softmax"


class Scores(NamedTuple):
    """The product of two activations; the parts of its axes name one of them."""

    eqn: int  # the id of the operation
    operands: tuple[frozenset[Use], frozenset[Use]]
    inputs: frozenset[str] = frozenset()  # leaves that are like data in an attention


Results = dict[Use | Scores, AxisParts]


@dataclass
class Value:
    """A record about one array.

    A gate says how much of each of several things counts.
    """

    data: bool = False  # it is an activation, that is, depends on data
    noise: bool = False  # it depends on random numbers alone, or is a leaf times these
    given_floats: bool = False  # it comes from arguments: a batch or frozen weights
    beside_given: bool = False  # leaves that lie beside such: data, or partly frozen
    leaves: dict[str, AxisParts] = field(default_factory=dict)
    sides: dict[str, Sides] = field(default_factory=dict)  # of their axes
    picked: frozenset[str] = frozenset()  # leaves that data has indexed
    activated: bool = False  # it is a function, such as tanh, of the leaves
    results: Results = field(default_factory=dict)  # that it comes from
    sources: frozenset[Use] = frozenset()  # the same, with no product in between
    one_hot: bool = False  # it compares data with other numbers
    softmax: str = ""  # how far it is on the way to one: see `trace.softmax`
    exponential: frozenset[Scores] = frozenset()  # it is a function of their exp
    choice: frozenset[Use] = frozenset()  # among whose outputs a top-k chose it
    extreme: frozenset[Use] = frozenset()  # of whose outputs it is a maximum, or sorted
    numbers: Callable[[], ArrayLike] | None = None  # the numbers of a constant
    is_gradient: bool = False  # it comes from a product that JAX transposed
    turns: frozenset[int] = frozenset()  # loops in whose turns it differs
    rows: dict[tuple[str, int], int] = field(default_factory=dict)  # loops over axes

    @property
    def are_gates(self) -> bool:
        """Whether it is a softmax, a one-hot or a top-k."""
        return self.softmax == SOFTMAX or self.one_hot or bool(self.choice)

    @property
    def outputs(self) -> dict[Use, AxisParts]:
        """Its results that are a use's."""
        return {x: of for x, of in self.results.items() if isinstance(x, Use)}

    def computed(self) -> np.ndarray | None:
        """The numbers of a constant; None if they are unknown."""
        if self.numbers is None:
            return None
        with contextlib.suppress(Exception):  # they may depend on a mesh, or a kernel
            return np.asarray(self.numbers())
        return None

    def selects(self, axes: Iterable[int]) -> bool:
        """Whether it is a constant with a single 1 along these axes, and else zeros.

        A product along them only selects, as with an identity or a permutation.
        """
        x = self.computed()
        if x is None or not np.all((x == 0) | (x == 1)):
            return False
        return bool(np.all(x.sum(tuple(axes)) == 1))

    def moved(self, change: Callable[[AxisParts], AxisParts]) -> "Value":
        """The same with its axes rearranged."""
        return replace(
            self,
            leaves={leaf: change(parts) for leaf, parts in self.leaves.items()},
            results={x: change(parts) for x, parts in self.results.items()},
        )

    def without_axes(self, ndim: int) -> "Value":
        """The same with `ndim` axes that are no leaf's and no use's."""
        return self.moved(lambda _: ((),) * ndim)

    def axes_in(self, places: Collection[int]) -> dict[str, set[int]]:
        """The axes of each leaf in some axes of the value."""
        return {leaf: axes_in(parts, places) for leaf, parts in self.leaves.items()}

    def between(self, old: Shape, starts: Shape, sizes: Shape) -> "Value":
        """The same with the leaves of this part alone."""
        place = max(map(place_of_rows, self.leaves.values()), default=-1)
        if place >= 0:  # all rows as one axis, if the part has whole rows
            if [*old[place + 1 :]] != [*sizes[place + 1 :]]:
                return self
            unit, shapes = math.prod(old[place + 1 :]), (old, starts, sizes)
            before, start, after = ([*x[:place], x[place] * unit] for x in shapes)
            vector = self.moved(lambda parts: reshaped(parts, old, before))
            part = vector.between(before, start, after)
            return part.moved(lambda parts: reshaped(parts, after, sizes))
        leaves = {}
        for leaf, parts in self.leaves.items():
            each = zip(parts, old, starts, sizes, strict=True)
            inside = [x if m == n else between(x, at, n) for x, m, at, n in each]
            there = tuple(x for x in inside if x is not None)
            if len(there) == len(inside):
                leaves[leaf] = there
        return replace(self, leaves=leaves, picked=self.picked & leaves.keys())

    def joined_at(
        self, leaf: str, place: int, start: int, size: int, shape: Shape
    ) -> None:
        """Note where a leaf begins along an axis of a concatenation of this shape."""
        parts = self.leaves[leaf]
        free_part = [AxisPart(None, 1, size)]
        first, *rest = parts[place] if axes_in([parts[place]]) else free_part
        if first.at == LOST or (first.at == SCATTERED and len(self.leaves) > 1):
            return
        at, length = first.at if first.at and first.at[0] >= 0 else (0, size)
        if place_of_rows(parts) == place:  # then it is at an element, in no row
            start *= math.prod(shape[place + 1 :])
        of_axis = (first._replace(at=(start + at, length)), *rest)
        self.leaves[leaf] = (*parts[:place], of_axis, *parts[place + 1 :])

    def has_all(self, shape: Shape, places: Iterable[int] | None = None) -> bool:
        """Whether each of some axes, or of all, is some leaf's: none was repeated."""
        of = [x for parts in self.leaves.values() for x in enumerate(parts)]
        own = {place for place, of_axis in of if axes_in((of_axis,))}
        chosen = range(len(shape)) if places is None else places
        return all(shape[place] == 1 or place in own for place in chosen)

    @property
    def constant(self) -> set[int]:
        """The axes that a constant was contracted with, or that took their place."""
        sides = self.sides
        return {
            place
            for leaf, parts in self.leaves.items()
            for place, of_axis in enumerate(parts)
            for axis in axes_in((of_axis,))
            if CONSTANT in sides.get(leaf, {}).get(axis, ())
        }

    def inner(self, leaf: str) -> set[int]:
        """The axes of a leaf that are contracted with another leaf."""
        return {axis for axis, x in self.sides.get(leaf, {}).items() if INNER in x}

    @property
    def is_product(self) -> bool:
        """Whether it has a product of two leaves."""
        return any(map(self.inner, self.leaves))

    def joined_again(self, leaf: str, place: int, axis: int, size: int) -> None:
        """Note that rows of a leaf are put together again, as jnp.stack([*w])."""
        one = axis, 1  # the part that one row has
        parts = [
            tuple(x for x in of if (x.axis, x.size) != one) for of in self.leaves[leaf]
        ]
        if size > 1 and axis not in axes_in(parts):
            parts[place] = (AxisPart(axis, 1, size),)
            self.leaves[leaf] = (*parts,)

    def with_side(self, side: str, axes: Mapping[str, Iterable[int]]) -> "Value":
        """The same, with a side for some axes of its leaves."""
        sides = {
            leaf: merged(self.sides.get(leaf, {}), dict.fromkeys(of, frozenset({side})))
            for leaf, of in axes.items()
        }
        return replace(self, sides=self.sides | sides)

    def with_leaves(self, other: "Value", ndim: int) -> "Value":
        """The same with `ndim` axes, made of another value's leaves as well."""
        leaves, sides, none = dict(self.leaves), dict(self.sides), ((),) * ndim
        for leaf, parts in other.leaves.items():
            after = parts if len(parts) == ndim else none
            pairs = zip(leaves.get(leaf, after), after, strict=True)
            leaves[leaf] = tuple(a if axes_in((a,)) else b for a, b in pairs)
        for leaf, of in other.sides.items():
            sides[leaf] = merged(sides.get(leaf, {}), of)
        picked = self.picked | other.picked
        rows = self.rows | other.rows
        return replace(self, leaves=leaves, sides=sides, picked=picked, rows=rows)


def joined(values: Sequence[Value]) -> Value:
    """The record of an elementwise function of these values, without their leaves."""
    results: Results = {}
    for value in values:
        for x, parts in value.results.items():
            if axes_in(parts):
                results.setdefault(x, parts)
    data = [value for value in values if value.data]
    states = {value.softmax for value in data}
    return Value(
        data=bool(data),
        noise=bool(data) and all(value.noise for value in data),
        given_floats=any(x.given_floats for x in values)
        and all(x.given_floats for x in data),
        beside_given=any(value.beside_given for value in values),
        activated=any(value.activated for value in values),
        results=results,
        sources=frozenset(use for value in values for use in value.sources),
        one_hot=any(x.one_hot for x in data or values)
        and all(x.one_hot or x.noise for x in data or values),
        softmax=states.pop() if len(states) == 1 else "",
        exponential=frozenset(x for value in values for x in value.exponential),
        choice=frozenset(use for value in values for use in value.choice),
        extreme=frozenset(use for value in values for use in value.extreme),
        is_gradient=any(value.is_gradient for value in values),
        turns=frozenset(loop for value in values for loop in value.turns),
    )
