"""What is known of a value in a traced function, and of each use of a parameter.

A `Value` stands for an array. It says which leaves of the parameters the array is made
of, axis by axis, as long as they have not met data; and then which products with leaves
it comes from. A `Use` is one operation that applies a leaf to data.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

# What an axis of a leaf is in one use. BATCH, IN and OUT are what is asked for. An axis
# is INNER if it is contracted with another leaf's, CONSTANT if with a constant, and PART
# if one element of a part of it was taken.
BATCH, IN, OUT, INNER, CONSTANT, PART = [
    "batch",
    "in",
    "out",
    "inner",
    "constant",
    "part",
]
Roles = dict[int, frozenset[str]]  # by axis of the leaf


class Factor(NamedTuple):
    """A part of an axis of a value: `size` elements, `stride` apart, of a leaf's axis.

    Attributes:
      axis: the leaf's axis, or None for an axis that is no leaf's.
      stride: elements of the leaf's axis from one to the next.
      size: their number.
      whole: whether it is the leaf's whole axis, and not one factor of several.
    """

    axis: int | None
    stride: int
    size: int
    whole: bool = True


Side = tuple[Factor, ...]  # one axis of a value, outermost factor first
Sides = tuple[Side, ...]
Shape = Sequence[int]


def axes_of(side: Iterable[Factor]) -> list[int]:
    """The leaf's axes in one axis of a value."""
    return [factor.axis for factor in side if factor.axis is not None]


def axes_in(sides: Sides, places: Iterable[int]) -> set[int]:
    """The leaf's axes in some axes of a value."""
    return {axis for place in places for axis in axes_of(sides[place])}


def free(size: int) -> Side:
    """An axis of a value that is no leaf's."""
    return (Factor(None, 1, size),) if size > 1 else ()


def covers(sides: Sides, shape: Shape) -> bool:
    """True if every axis of a value is one of the leaf's."""
    same = len(sides) == len(shape)
    return same and all(axes_of(x) for x, n in zip(sides, shape, strict=True) if n > 1)


def fitted(side: Side, size: int) -> Side:
    """The factors of an axis that was cut or padded to this size."""
    if not side or math.prod(factor.size for factor in side) == size:
        return side
    outer, *inner = side
    rest = math.prod(factor.size for factor in inner)
    if size % rest:  # the outer factor has no whole number of elements left
        return (outer._replace(size=size), *(f._replace(size=1) for f in inner))
    return (outer._replace(size=size // rest), *inner)


def fit(sides: Sides, shape: Shape) -> Sides:
    """`fitted` for each axis."""
    return tuple(map(fitted, sides, shape))


def reshaped(sides: Sides, old: Shape, new: Shape) -> Sides:
    """The factors of the old axes, divided among the new ones."""
    left: list[Factor] = []  # the innermost first
    for side, size in zip(reversed(sides), reversed(old), strict=True):
        left += reversed(fitted(side, size) or free(size))
    left = [factor for factor in left if factor.size > 1]
    result = []
    for size in new:
        side = []
        while size > 1 and left:
            factor = left.pop()
            taken = math.gcd(size, factor.size)
            if taken == 1:  # they do not divide each other: both get this axis
                taken, size = factor.size, size * factor.size
            rest = factor.size // taken
            if rest > 1:
                left.append(factor._replace(size=rest, whole=False))
            whole = factor.whole and rest == 1
            side.append(Factor(factor.axis, factor.stride * rest, taken, whole))
            size //= taken
        result.append(tuple(side))
    return tuple(result)


@dataclasses.dataclass(eq=False)
class Use:
    """One use of a leaf by one operation.

    Attributes:
      leaf: the leaf's path.
      kind: contracted, convolved, depthwise, grouped, picked, elementwise, like data (a
        product of leaves, used like data), or opaque.
      line: the line of the user's code.
      primitive: JAX's name of the operation.
      roles: what each axis of the leaf is here.
      revised: roles that the result has shown, whatever the operands say.
      inputs: the uses that its input comes from, with no product in between.
      feeds: whether another product takes its result, so that it is no head.
      chooses: whether a top-k chooses among its outputs.
      is_picked: whether data has picked elements of the leaf before.
      is_complex: whether it is a product of complex numbers.
      is_gradient: whether it is the transpose of an earlier use of the leaf.
      waits: the leaf's axes whose sum would make of this product a contraction.
      taken: the elements that have been taken from each output axis, one by one.
      outputs: its outputs, and slices of them.
    """

    leaf: str
    kind: str
    line: str
    primitive: str
    roles: Roles = dataclasses.field(default_factory=dict)
    revised: Roles = dataclasses.field(default_factory=dict)
    inputs: frozenset["Use"] = frozenset()
    feeds: bool = False
    chooses: bool = False
    is_picked: bool = False
    is_complex: bool = False
    is_gradient: bool = False
    waits: frozenset[int] = frozenset()
    taken: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    outputs: dict[Any, "Output"] = dataclasses.field(default_factory=dict)

    def revise(self, roles: Roles) -> None:
        """Set what the result shows of these axes."""
        self.revised |= roles
        self.roles = {**self.roles, **roles}

    def output(
        self, axis: int | None = None, start: int = 0, stop: int = 0
    ) -> "Output":
        """Its result, or a slice of it along one axis of the leaf."""
        key = axis, start, stop
        return self.outputs.setdefault(key, Output(self, *key))


@dataclasses.dataclass(eq=False)
class Output:
    """The result of a use, or the slice from start to stop along an axis of the leaf.

    `role` is what becomes of it: query, key, value, out, gate, or "".
    """

    use: Use
    axis: int | None
    start: int
    stop: int
    role: str = ""


@dataclasses.dataclass(eq=False)
class Scores:
    """The product of two activations, until it weighs a sum of a third.

    Its axes are those of its first operand (0) and of its second one (1). `keys` are the
    sides along which a maximum was taken, and `soft` tells if an exponential followed.
    """

    sides: tuple[list[Output], list[Output]]
    keys: set[int] = dataclasses.field(default_factory=set)
    soft: bool = False


@dataclasses.dataclass
class Value:
    """What is known of an array.

    Attributes:
      data: whether it is an activation, that is, depends on data.
      leaves: the leaves that it is made of, and what each of its axes is of theirs.
      roles: what is known already of axes of these leaves.
      picked: those of which data has picked elements.
      results: the outputs and scores that it comes from, and what its axes are of them.
      behind: the uses before it, with no product in between.
      one_hot: whether integers of the data were compared with a range.
      uniform: whether it is one number, broadcast.
      frozen: whether it is a floating-point array that the function is given, and not
        computed from.
      repeated: the axes along which it was just repeated.
    """

    data: bool = False
    leaves: dict[str, Sides] = dataclasses.field(default_factory=dict)
    roles: dict[str, Roles] = dataclasses.field(default_factory=dict)
    picked: frozenset[str] = frozenset()
    results: dict[Any, Sides] = dataclasses.field(default_factory=dict)
    behind: frozenset[Use] = frozenset()
    one_hot: bool = False
    uniform: bool = False
    frozen: bool = False
    repeated: frozenset[int] = frozenset()

    def moved(self, sides_of: Callable[[Sides], Sides], **changes: Any) -> "Value":
        """The same with its axes rearranged."""
        return dataclasses.replace(
            self,
            leaves={leaf: sides_of(sides) for leaf, sides in self.leaves.items()},
            results={one: sides_of(sides) for one, sides in self.results.items()},
            **{"repeated": frozenset(), **changes},
        )

    def with_roles(self, more: dict[str, Roles]) -> "Value":
        """The same, with more known of the axes of its leaves."""
        roles = dict(self.roles)
        for leaf, axes in more.items():
            known = roles.get(leaf, {})
            roles[leaf] = known | {
                a: known.get(a, frozenset()) | r for a, r in axes.items()
            }
        return dataclasses.replace(self, roles=roles)

    def with_leaves(self, other: "Value", shape: Shape) -> "Value":
        """The same, made of another value's leaves as well."""
        leaves, none = dict(self.leaves), ((),) * len(shape)
        for leaf, sides in other.leaves.items():
            sides = sides if len(sides) == len(shape) else none
            before = leaves.get(leaf, none)
            leaves[leaf] = tuple(
                a if axes_of(a) else b for a, b in zip(before, sides, strict=True)
            )
        picked = self.picked | other.picked
        return dataclasses.replace(self, leaves=leaves, picked=picked).with_roles(
            other.roles
        )

    def outputs(self) -> list[Output]:
        """Its results that are outputs of uses."""
        return [one for one in self.results if isinstance(one, Output)]


def joined(values: Sequence[Value], **changes: Any) -> Value:
    """What holds of every elementwise function of these values, but for their leaves."""
    results: dict[Any, Sides] = {}
    behind = frozenset(use for value in values for use in value.behind)
    for value in values:
        for one, sides in value.results.items():
            # In a residual stream results of all layers meet: what a product has taken
            # already tells nothing more.
            old = len(value.results) > 8 and isinstance(one, Output) and one.use.feeds
            if not old and any(map(axes_of, sides)):
                results.setdefault(one, sides)
    if len(behind) > 8:
        behind = frozenset(use for use in behind if not use.feeds)
    data = [value for value in values if value.data]
    result = Value(
        data=bool(data),
        results=results,
        behind=behind,
        one_hot=bool(data) and all(value.one_hot for value in data),
        uniform=all(value.uniform for value in values),
        frozen=all(value.frozen or value.uniform for value in values)
        and any(value.frozen for value in values),
    )
    return dataclasses.replace(result, **changes)
