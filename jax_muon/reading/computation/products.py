"""Follow parameters through products: contractions, convolutions, attention.

A product of a leaf with an activation is the use that makes it a matrix. One of two
leaves, or of a leaf and a constant, is followed on. One of two activations may be
attention, or mix matrices that another product has made.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jax_muon.reading.computation.follow import Follower, rule, separate, shape_of
from jax_muon.reading.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    Factor,
    Output,
    Scores,
    Sides,
    Value,
    axes_in,
    axes_of,
    joined,
)

Axes = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Product:
    """A contraction of two operands; each field has an entry for either.

    The axes of the result are those of the batch, the free ones of the first operand,
    and those of the second one.
    """

    eqn: JaxprEqn
    values: tuple[Value, Value]
    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    groups: tuple[Axes, Axes] = ((), ())  # of a ragged product

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the operands."""
        return shape_of(self.eqn.invars[0]), shape_of(self.eqn.invars[1])

    @functools.cached_property
    def free(self) -> list[list[int]]:
        """The other axes, which the result keeps."""
        return [
            [
                a
                for a in range(len(self.shapes[i]))
                if a not in (*self.contract[i], *self.batch[i], *self.groups[i])
            ]
            for i in (0, 1)
        ]

    def placed(self, i: int, sides: Sides) -> Sides:
        """The sides of the result, from those of one operand."""
        free = [[sides[a] if i == j else () for a in self.free[j]] for j in (0, 1)]
        return (*(sides[a] for a in self.batch[i]), *free[0], *free[1])

    def weight(self, follower: Follower) -> int | None:
        """Which operand is made of leaves that the other one is multiplied by."""
        leaves = [bool(value.leaves) for value in self.values]
        data = [value.data for value in self.values]
        if not all(leaves):
            i = leaves.index(True) if any(leaves) else None
            return None if i is None or (data[i] and not self._is_matrix(i)) else i
        if data[0] != data[1]:
            return data.index(False)
        if data[0]:
            fits = [self._is_matrix(i) for i in (0, 1)]
        else:  # one that is repeated along an axis, or a vector, is used like data
            fits = [
                self._is_own(i) and self._is_like_data(1 - i, follower) for i in (0, 1)
            ]
        return fits.index(True) if fits[0] != fits[1] else None

    def _is_matrix(self, i: int) -> bool:
        """True if both sides are leaves', where data has picked or added elements."""
        leaves = self.values[i].leaves.values()
        return all(
            any(axes_in(sides, places[i]) for sides in leaves)
            for places in (self.contract, self.free)
        )

    def _is_own(self, i: int) -> bool:
        """True if all free axes are the leaves', and none was repeated."""
        return all(
            self.shapes[i][a] == 1
            or any(axes_of(sides[a]) for sides in self.values[i].leaves.values())
            for a in self.free[i]
        )

    def _is_like_data(self, i: int, follower: Follower) -> bool:
        vectors = [
            all(sum(n > 1 for n in follower.shapes[leaf]) < 2 for leaf in value.leaves)
            for value in self.values
        ]
        return not self._is_own(i) or (vectors[i] and not vectors[1 - i])


@rule("dot_general")
def _dot_general(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    contract, batch = eqn.params["dimension_numbers"]
    return _product(follower, Product(eqn, (values[0], values[1]), contract, batch))


@rule("ragged_dot_general")
def _ragged_dot(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    groups = (), numbers.rhs_group_dimensions
    return _product(
        follower, Product(eqn, (values[0], values[1]), contract, batch, groups)
    )


def _product(follower: Follower, product: Product) -> Value:
    i = product.weight(follower)
    if i is None:
        if all(x.leaves and not x.data for x in product.values):
            return _of_leaves(product)
        return _of_activations(follower, product)
    weight, other = product.values[i], product.values[1 - i]
    if not other.data and not other.leaves:  # an input, or something to apply to a leaf
        return weight.moved(functools.partial(product.placed, i)).with_roles(
            {
                leaf: {
                    axis: frozenset({CONSTANT})
                    for axis in axes_in(sides, product.contract[i])
                }
                for leaf, sides in weight.leaves.items()
            }
        )
    follower.use(other, "elementwise", product.eqn)
    batch = *product.batch[i], *product.groups[i]
    roles = [
        IN if a in product.contract[i] else BATCH if a in batch else OUT
        for a in range(len(product.shapes[i]))
    ]
    kind = "picked" if other.one_hot and not other.leaves else "contracted"
    uses = follower.use(weight, kind, product.eqn, roles, by=other)
    for one in other.outputs():
        # Outputs that this product has as a batch: members that had one input.
        for axis in axes_in(other.results[one], product.batch[1 - i]):
            if all(one.use.roles.get(a) == {BATCH} for a in range(axis)):
                separate(one.use, axis)
    attended = any(one.role == "attended" for one in other.outputs())
    sides = [product.placed(i, weight.leaves[use.leaf]) for use in uses]
    return follower.result(uses, sides, "out" if attended else "")


def _of_leaves(product: Product) -> Value:
    """A product of two leaves is made of both."""
    result = joined(product.values, results={})
    for i, value in enumerate(product.values):
        part = value.moved(functools.partial(product.placed, i))
        shape = shape_of(product.eqn.outvars[0])
        inner = {
            leaf: {
                axis: frozenset({INNER}) for axis in axes_in(sides, product.contract[i])
            }
            for leaf, sides in value.leaves.items()
        }
        result = result.with_leaves(part, shape).with_roles(inner)
    return result


def _of_activations(follower: Follower, product: Product) -> Value:
    """A product of two activations, or of constants."""
    for value in product.values:
        follower.use(value, "elementwise", product.eqn)
    result = joined(product.values, one_hot=False, results={})
    for i, value in enumerate(product.values):
        other = product.values[1 - i]
        outputs = any(
            axes_in(value.results[one], product.contract[i]) for one in value.outputs()
        )
        if other.frozen and outputs and product.free[1 - i]:  # a kernel not in params
            for use in result.behind:
                use.feeds = True
        for one, sides in value.results.items():
            if isinstance(one, Scores):
                if one.soft and axes_in(sides, product.contract[i]) == one.keys:
                    result.results |= _attended(product, one, 1 - i)
                continue
            _find_mixture(product, i, one, sides)
            placed = product.placed(i, sides)
            if any(map(axes_of, placed)):
                result.results[one] = placed
    left, right = (value.outputs() for value in product.values)
    if left and right and all(value.data for value in product.values):
        key = follower.key(product.eqn)
        scores = follower.scores.setdefault(key, Scores((left, right)))
        scores.sides = left, right
        sides = [
            tuple(
                (Factor(i, 1, size),) if a in product.free[i] and size > 1 else ()
                for a, size in enumerate(shape)
            )
            for i, shape in enumerate(product.shapes)
        ]
        first, second = (product.placed(i, sides[i]) for i in (0, 1))
        result.results[scores] = tuple(
            a or b for a, b in zip(first, second, strict=True)
        )
    return result


def _attended(product: Product, scores: Scores, i: int) -> dict[Any, Sides]:
    """A sum that scores weigh: give the products around them their roles.

    Operand i holds the values. Returns outputs that mark the result as attention's.
    """
    (key,), result = scores.keys, {}
    for one in scores.sides[key]:
        one.role = "key"
    for one in scores.sides[1 - key]:
        one.role = "query"
    values = product.values[i]
    for one in values.outputs():
        one.role = one.role or "value"
        after = one.use.output(None, -1, -1)
        after.role = "attended"
        result[after] = product.placed(i, values.results[one])
    return result


def _find_mixture(product: Product, i: int, one: Output, sides: Sides) -> None:
    """Matrices that data has mixed: outputs of the mixture are their ins and outs."""
    inside = axes_in(sides, product.contract[i])
    outside = axes_in(sides, product.free[i])
    roles = one.use.roles
    is_matrix = inside and outside and not inside & outside and one.axis is None
    has_tokens = any(
        product.shapes[i][a] > 1 and not axes_of(sides[a]) for a in product.free[i]
    )
    if (
        is_matrix
        and not has_tokens
        and all(roles.get(a) == {OUT} for a in inside | outside)
    ):
        one.use.revise(
            {
                a: frozenset({BATCH if r & {IN, BATCH} else IN if a in inside else OUT})
                for a, r in roles.items()
            }
        )


@rule("conv_general_dilated")
def _convolution(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (data, kernel), params = values[:2], eqn.params
    numbers, shape = params["dimension_numbers"], shape_of(eqn.invars[1])
    out, fan_in, *window = numbers.rhs_spec
    follower.use(data, "elementwise", eqn)
    if not kernel.leaves:
        return joined(values, results={}, one_hot=False)
    roles = [OUT if a == out else IN for a in range(len(shape))]
    for a, step in zip(window, params["lhs_dilation"], strict=True):
        if step == shape[a] > 1:  # transposed, and its windows do not overlap
            roles[a] = OUT
    kind = "convolved"
    if params["feature_group_count"] > 1:
        kind = "depthwise" if shape[fan_in] == 1 else "grouped"
    uses = follower.use(kernel, kind, eqn, roles, by=data)
    place = numbers.out_spec[1]
    return follower.result(
        uses,
        [
            tuple(
                kernel.leaves[use.leaf][out] if a == place else ()
                for a in range(len(shape))
            )
            for use in uses
        ],
    )


@rule("pallas_call")
def _pallas_call(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    """A kernel: opaque to leaves; of activations alone, any function of them."""
    for value in values:
        follower.use(value, "opaque", eqn)
    inputs = [dataclasses.replace(value, leaves={}) for value in values]
    return joined(inputs, results={}, one_hot=False)
