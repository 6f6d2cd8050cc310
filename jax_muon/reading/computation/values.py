"""Records about the arrays of a traced function, and about each use of a parameter.

A `Value` describes one array. Before parameters meet data, it records the leaves that
the array is made of, axis by axis; afterwards, the products with leaves that the array
comes from. A `Use` is one operation that applies a leaf to data.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax_muon.reading.computation.factors import Factors, Shape, axes_in, fit
from jax_muon.reading.computation.roles import BATCH, IN, OUT, Roles, merged


@dataclass(eq=False)
class Use:
    """One use of a leaf by one operation."""

    path: str  # of the leaf
    kind: str  # contracted, convolved, depthwise, grouped, picked, elementwise, opaque
    line: str  # of the user's code
    primitive: str  # JAX's name of the operation
    roles: Roles = field(default_factory=dict)
    revised: Roles = field(default_factory=dict)  # by what comes later
    left: set[int] = field(default_factory=set)  # axes not yet summed over
    feeds: bool = False  # another product takes its result, so that it is no head
    inputs: set["Use"] = field(default_factory=set)  # whose results it is multiplied by
    rows: int = 0  # how many inputs, which do not name an axis, it is multiplied by
    by_gates: bool = False  # they are gates
    gated: set[int] = field(default_factory=set)  # outputs times gates
    among: set[str] = field(default_factory=set)  # leaves of a top-k's input
    chooses: bool = False  # a top-k of its outputs says what else is computed
    of_picked: bool = False  # data indexed the leaf before
    is_complex: bool = False
    is_gradient: bool = False  # JAX made it by transposing another product
    taken: dict[int, set[int]] = field(default_factory=dict)  # one by one
    outputs: dict[tuple[int | None, int, int], "Output"] = field(default_factory=dict)

    def revise(self, roles: Mapping[int, str]) -> None:
        """Override the roles of these axes, also if the use is found again."""
        self.revised |= {axis: frozenset({role}) for axis, role in roles.items()}
        self.roles = {**self.roles, **self.revised}

    def separate(self, axes: Iterable[int], side: str = OUT) -> None:
        """Make axes a batch of matrices, where others of this side are left."""
        for axis in axes:
            others = [roles for a, roles in self.roles.items() if a != axis]
            if self.roles.get(axis) == {side} and {side} in others:
                self.revise({axis: BATCH})

    def mix(self, inside: set[int], outside: set[int]) -> None:
        """Data mixed the leaf into matrices, which have these axes in and out."""
        roles, both = self.roles, inside | outside
        of_output = all(roles.get(axis) == {OUT} for axis in both)
        if inside and outside and not inside & outside and of_output:
            sides = {a: BATCH if r & {IN, BATCH} else OUT for a, r in roles.items()}
            self.revise(sides | dict.fromkeys(inside, IN))

    def output(
        self, axis: int | None = None, start: int = 0, stop: int = 0
    ) -> "Output":
        """Its result, or a slice of it along one axis of the leaf."""
        key = axis, start, stop
        return self.outputs.setdefault(key, Output(self, *key))


@dataclass(eq=False)
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

    def is_whole(self, factors: Factors, shape: Shape) -> bool:
        """Whether all outputs for one input are along the axes with these factors."""
        out = [axis for axis, roles in self.use.roles.items() if roles == {OUT}]
        size = math.prod(x.size for of in factors for x in of if x.axis in out)
        return size == math.prod(shape[axis] for axis in out)


class Scores(NamedTuple):
    """The product of two activations; the factors of its axes name one of them."""

    operands: tuple[frozenset[Output], frozenset[Output]]


Results = dict[Output | Scores, Factors]


@dataclass
class Value:
    """A record about one array.

    A gate says how much of each of several things counts.
    """

    data: bool = False  # it is an activation, that is, depends on data
    noise: bool = False  # on nothing but random numbers; or a leaf times these
    given_floats: bool = False  # on arguments, a batch or frozen weights; who knows
    leaves: dict[str, Factors] = field(default_factory=dict)
    roles: dict[str, Roles] = field(default_factory=dict)  # of their axes
    picked: frozenset[str] = frozenset()  # leaves that data has indexed
    activated: bool = False  # it is a function, such as tanh, of the leaves
    results: Results = field(default_factory=dict)  # that it comes from
    sources: frozenset[Use] = frozenset()  # the same, with no product in between
    one_hot: bool = False  # it compares data with other numbers
    softmax: int = 0  # 1: an exponential; 2: divided by a sum of some
    is_exponential: bool = False  # of anything in it
    attended: bool = False  # attention has summed it
    choice: frozenset[Use] = frozenset()  # among whose outputs a top-k chose it

    @property
    def are_gates(self) -> bool:
        """Whether it is a softmax, a one-hot or a top-k."""
        return self.softmax == 2 or self.one_hot or bool(self.choice)

    def moved(self, change: Callable[[Factors], Factors]) -> "Value":
        """The same with its axes rearranged."""
        return replace(
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

    def has_all(self, shape: Shape, places: Iterable[int] | None = None) -> bool:
        """Whether each of some axes, or of all, is some leaf's: none was repeated."""
        of = [x for factors in self.leaves.values() for x in enumerate(factors)]
        own = {place for place, of_axis in of if axes_in((of_axis,))}
        chosen = range(len(shape)) if places is None else places
        return all(shape[place] == 1 or place in own for place in chosen)

    def known(self, leaf: str) -> set[str]:
        """The roles that some axis of a leaf has already."""
        return {role for roles in self.roles.get(leaf, {}).values() for role in roles}

    def with_role(self, role: str, axes: Mapping[str, Iterable[int]]) -> "Value":
        """The same, with a role for some axes of its leaves."""
        roles = {
            leaf: merged(self.roles.get(leaf, {}), dict.fromkeys(of, frozenset({role})))
            for leaf, of in axes.items()
        }
        return replace(self, roles=self.roles | roles)

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
        return replace(self, leaves=leaves, roles=roles, picked=picked)

    def outputs(self) -> list[Output]:
        """Its results that are outputs of uses."""
        return [x for x in self.results if isinstance(x, Output)]

    def chosen(self, outputs: Iterable[Output]) -> frozenset[Use]:
        """The choice of a top-k among some of its outputs."""
        for x in outputs:
            x.use.among |= {use.path for use in self.sources}
        return self.choice | {x.use for x in outputs}


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
        noise=bool(data) and all(value.noise for value in data),
        given_floats=any(x.given_floats for x in values)
        and all(x.given_floats for x in data),
        activated=any(value.activated for value in values),
        results=results,
        sources=sources,
        one_hot=bool(data) and all(value.one_hot for value in data),
        is_exponential=any(value.is_exponential for value in values),
        attended=any(value.attended for value in values),
        choice=frozenset(use for value in values for use in value.choice),
    )
