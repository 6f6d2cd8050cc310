"""Records about the arrays of a traced function, and about each use of a parameter.

A `Value` describes one array. Before parameters meet data, it records the leaves that
the array is made of, axis by axis; afterwards, the products with leaves that the array
comes from. A `Use` is one operation that applies a leaf to data.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

# The role of a leaf's axis in a use: batch, in or out. Before the use, the axis may
# have been contracted with another leaf (INNER) or a constant, or indexed (PART).
BATCH, IN, OUT = "batch", "in", "out"
INNER, CONSTANT, PART = "inner", "constant", "part"
Roles = dict[int, frozenset[str]]  # by axis of the leaf


class Factor(NamedTuple):
    """A part of an axis of a value: `size` elements, `stride` apart, of a leaf's axis.

    The axis is None if it is no leaf's; `whole` is false for one factor of several.
    """

    axis: int | None
    stride: int
    size: int
    whole: bool = True


# The factors of each axis of a value, the outermost first.
Factors = tuple[tuple[Factor, ...], ...]
Shape = Sequence[int]


def axes_in(
    factors: Sequence[Iterable[Factor]], places: Iterable[int] | None = None
) -> set[int]:
    """The leaf's axes in some axes of a value, or in all."""
    chosen = factors if places is None else [factors[place] for place in places]
    return {x.axis for of_axis in chosen for x in of_axis if x.axis is not None}


def free(size: int) -> tuple[Factor, ...]:
    """An axis of a value that is no leaf's."""
    return (Factor(None, 1, size),) if size > 1 else ()


def placed(factors: Factors, source: Mapping[int, int], shape: Shape) -> Factors:
    """Axes of a result: from `source` by place, or else no leaf's."""
    return tuple(
        factors[source[place]] if place in source else free(size)
        for place, size in enumerate(shape)
    )


def fitted(of_axis: tuple[Factor, ...], size: int) -> tuple[Factor, ...]:
    """The factors of an axis that was cut or padded to this size."""
    if not of_axis or math.prod(x.size for x in of_axis) == size:
        return of_axis
    outer, *inner = of_axis
    rest = math.prod(x.size for x in inner)
    if size % rest:  # the outer factor has no whole number of elements left
        return (outer._replace(size=size), *(x._replace(size=1) for x in inner))
    return (outer._replace(size=size // rest), *inner)


def fit(factors: Factors, shape: Shape) -> Factors:
    """`fitted` for each axis."""
    return tuple(map(fitted, factors, shape))


def covers(factors: Factors, shape: Shape) -> bool:
    """True if every axis of a value is one of the leaf's."""
    return len(factors) == len(shape) and all(
        n <= 1 or axes_in((of_axis,)) for of_axis, n in zip(factors, shape, strict=True)
    )


def reshaped(factors: Factors, old: Shape, new: Shape) -> Factors:
    """The factors of the old axes, divided among the new ones."""
    left: list[Factor] = []  # the innermost first
    for before, size in zip(reversed(factors), reversed(old), strict=True):
        left += reversed(fitted(before, size) or free(size))
    left = [x for x in left if x.size > 1]
    result = []
    for size in new:
        of_axis: list[Factor] = []
        while size > 1 and left:
            axis, stride, length, whole = left.pop()
            taken = math.gcd(size, length)
            if taken == 1:  # they do not divide each other: both get this axis
                taken, size = length, size * length
            if rest := length // taken - 1:
                left.append(Factor(axis, stride, rest + 1, False))
                whole = False
            of_axis.append(Factor(axis, stride * (length // taken), taken, whole))
            size //= taken
        result.append(tuple(of_axis))
    return tuple(result)


@dataclasses.dataclass(eq=False)
class Use:
    """One use of a leaf by one operation.

    Attributes:
      path: the leaf's.
      kind: contracted, convolved, depthwise, grouped, picked, elementwise or opaque.
      line: the line of the user's code.
      primitive: JAX's name of the operation.
      roles: the role of each axis of the leaf.
      revised: roles that later uses of the result show, which override the operands'.
      inputs: the uses that its input comes from, with no product in between.
      feeds: whether another product takes its result, so that it is no head.
      chooses: whether a top-k chooses among its outputs what else is computed.
      among: the leaves whose products a top-k chose among, beside its own.
      by_gates: whether gates were multiplied by it.
      gated: its output axes that were multiplied by gates.
      of_picked: whether data indexed the leaf before this use.
      is_complex: whether it is a product of complex numbers.
      left: the axes of the leaf that were not summed or contracted before.
      is_gradient: whether JAX made it by transposing an earlier product.
      rows: how many inputs it is multiplied by, which do not name an axis of the leaf.
      taken: for each output axis, the elements that were indexed one by one.
      outputs: the result (axis None) and slices of it, by (axis, start, stop).
    """

    path: str
    kind: str
    line: str
    primitive: str
    roles: Roles = dataclasses.field(default_factory=dict)
    revised: Roles = dataclasses.field(default_factory=dict)
    inputs: frozenset["Use"] = frozenset()
    feeds: bool = False
    chooses: bool = False
    among: set[str] = dataclasses.field(default_factory=set)
    by_gates: bool = False
    gated: set[int] = dataclasses.field(default_factory=set)
    of_picked: bool = False
    is_complex: bool = False
    left: set[int] = dataclasses.field(default_factory=set)
    is_gradient: bool = False
    rows: int = 0
    taken: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    outputs: dict[tuple[int | None, int, int], "Output"] = dataclasses.field(
        default_factory=dict
    )

    def revise(self, roles: Roles) -> None:
        """Override the roles of these axes."""
        self.revised |= roles
        self.roles = {**self.roles, **roles}

    def separate(self, axis: int, side: str = OUT) -> None:
        """Make an axis a batch of matrices, if others of this side are left."""
        others = [roles for a, roles in self.roles.items() if a != axis]
        if self.roles.get(axis) == {side} and {side} in others:
            self.revise({axis: frozenset({BATCH})})

    def is_whole(self, factors: Factors, shape: Shape) -> bool:
        """Whether all elements of its result are along the axes with these factors."""
        out = [axis for axis, roles in self.roles.items() if roles == {OUT}]
        size = math.prod(x.size for of in factors for x in of if x.axis in out)
        return size == math.prod(shape[axis] for axis in out)

    def output(
        self, axis: int | None = None, start: int = 0, stop: int = 0
    ) -> "Output":
        """Its result, or a slice of it along one axis of the leaf."""
        key = axis, start, stop
        return self.outputs.setdefault(key, Output(self, *key))


@dataclasses.dataclass(eq=False)
class Output:
    """The result of a use, or the slice from start to stop along an axis of the leaf.

    `role` is query, key, value, out or gated; "fused" for several of these; "" if it is
    unknown.
    """

    use: Use
    axis: int | None
    start: int
    stop: int
    role: str = ""

    def become(self, role: str) -> None:
        """Set its role, or "fused" if it has another one."""
        self.role = role if self.role in ("", role) else "fused"


@dataclasses.dataclass(eq=False)
class Scores:
    """The product of two activations, which attention weighs a third one by.

    The factors of its axes name operand 0 or 1. `keys` are the operands along which a
    maximum was taken; `soft` is whether an exponential followed.
    """

    operands: tuple[list[Output], list[Output]]
    keys: set[int] = dataclasses.field(default_factory=set)
    soft: bool = False


Results = dict[Output | Scores, Factors]


@dataclasses.dataclass
class Value:
    """A record about one array.

    Attributes:
      data: whether it is an activation, that is, depends on data.
      leaves: the leaves that it is made of, with the leaf's factors of each axis.
      roles: roles of these leaves' axes, as far as they are known.
      picked: the leaves that data has indexed.
      results: the outputs and scores that it comes from, with their factors of each
        axis.
      sources: the uses that it comes from, with no product in between.
      one_hot: whether it compares data with other numbers.
      noise: whether random numbers are the only data that it depends on. They may be
        inputs, but are none where they are added to a leaf.
      activated: whether it is a function, such as tanh, of the leaves.
      softmax: 1 for an exponential, 2 for one that was divided by a sum of some.
      choice: the uses among whose outputs a top-k chose, if it comes from that choice.
      given_floats: whether it is made of floating-point arrays that the function is
        given: a batch or weights that are not trained, which nothing tells apart.
    """

    data: bool = False
    leaves: dict[str, Factors] = dataclasses.field(default_factory=dict)
    roles: dict[str, Roles] = dataclasses.field(default_factory=dict)
    picked: frozenset[str] = frozenset()
    results: Results = dataclasses.field(default_factory=dict)
    sources: frozenset[Use] = frozenset()
    one_hot: bool = False
    noise: bool = False
    activated: bool = False
    softmax: int = 0
    choice: frozenset[Use] = frozenset()
    given_floats: bool = False

    def moved(self, change: Callable[[Factors], Factors]) -> "Value":
        """The same with its axes rearranged."""
        return dataclasses.replace(
            self,
            leaves={leaf: change(factors) for leaf, factors in self.leaves.items()},
            results={x: change(factors) for x, factors in self.results.items()},
        )

    def fit(self, shape: Shape) -> "Value":
        """The same, cut or padded to this shape."""
        return self.moved(lambda factors: fit(factors, shape))

    def axes_in(self, places: Iterable[int]) -> dict[str, set[int]]:
        """The axes of each leaf in some axes of the value."""
        places = [*places]
        return {leaf: axes_in(factors, places) for leaf, factors in self.leaves.items()}

    def known(self, leaf: str) -> set[str]:
        """The roles that some axis of a leaf has already."""
        return {role for roles in self.roles.get(leaf, {}).values() for role in roles}

    def with_role(self, role: str, axes: Mapping[str, Iterable[int]]) -> "Value":
        """The same, with a role for some axes of its leaves."""
        roles = {
            leaf: merged(self.roles.get(leaf, {}), dict.fromkeys(of, frozenset({role})))
            for leaf, of in axes.items()
        }
        return dataclasses.replace(self, roles=self.roles | roles)

    def with_leaves(self, other: "Value", ndim: int) -> "Value":
        """The same with `ndim` axes, made of another value's leaves as well."""
        leaves, roles, none = dict(self.leaves), dict(self.roles), ((),) * ndim
        for leaf, factors in other.leaves.items():
            after = factors if len(factors) == ndim else none
            pairs = zip(leaves.get(leaf, none), after, strict=True)
            leaves[leaf] = tuple(a if axes_in((a,)) else b for a, b in pairs)
        for leaf, of in other.roles.items():
            roles[leaf] = merged(roles.get(leaf, {}), of)
        picked = self.picked | other.picked
        return dataclasses.replace(self, leaves=leaves, roles=roles, picked=picked)

    @property
    def are_gates(self) -> bool:
        """Whether it says how much of each of several things counts."""
        return self.softmax == 2 or self.one_hot or bool(self.choice)

    def is_of(self, leaves: set[str]) -> bool:
        """Whether it is a function of products of some leaves, or no data at all."""
        sources = {use.path for use in self.sources}
        return not self.data or self.noise or set() < sources <= leaves

    def outputs(self) -> list[Output]:
        """Its results that are outputs of uses."""
        return [x for x in self.results if isinstance(x, Output)]


def merged(a: Roles, b: Roles) -> Roles:
    """The roles in either."""
    return a | {axis: a.get(axis, frozenset()) | roles for axis, roles in b.items()}


def joined(values: Sequence[Value]) -> Value:
    """The record of an elementwise function of these values, without their leaves."""
    results: Results = {}
    sources = frozenset(use for value in values for use in value.sources)
    for value in values:
        for x, factors in value.results.items():
            # The results of all layers meet in a residual stream. Those that another
            # product takes are no longer of interest.
            old = len(value.results) > 8 and isinstance(x, Output) and x.use.feeds
            if not old and axes_in(factors):
                results.setdefault(x, factors)
    if len(sources) > 8:
        sources = frozenset(use for use in sources if not use.feeds)
    data = [value for value in values if value.data]
    return Value(
        data=bool(data),
        results=results,
        sources=sources,
        one_hot=bool(data) and all(value.one_hot for value in data),
        noise=bool(data) and all(value.noise for value in data),
        activated=any(value.activated for value in values),
        choice=frozenset(use for value in values for use in value.choice),
        given_floats=any(x.given_floats for x in values)
        and all(x.given_floats for x in data),
    )
