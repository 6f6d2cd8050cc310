"""Follow parameters through products: contractions, convolutions, attention.

A product of a leaf with an activation is the use that makes it a matrix. One of two
leaves, or of a leaf and a constant, is followed on. One of two activations may be
attention, or mix matrices that another product has made.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jax_muon.jaxprs import shape_of
from jax_muon.reading.computation.follow import Follower, pick, rule
from jax_muon.reading.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    Factor,
    Factors,
    Output,
    Results,
    Scores,
    Value,
    axes_in,
    joined,
    placed,
)

Axes = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Product:
    """A contraction of two operands; each field has an entry for either.

    The result has the batch axes first, then the free axes of the first operand, then
    those of the second.
    """

    eqn: JaxprEqn
    values: tuple[Value, Value]
    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    groups: tuple[Axes, Axes]  # of a ragged product

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operands."""
        return [shape_of(v) for v in self.eqn.invars[:2]]

    @functools.cached_property
    def free(self) -> list[list[int]]:
        """The axes that the result keeps, beside the batch."""
        used = [
            sum(map(tuple, of), ())
            for of in zip(self.contract, self.batch, self.groups, strict=True)
        ]
        return [
            [a for a in range(len(self.shapes[i])) if a not in used[i]] for i in (0, 1)
        ]

    def placed(self, i: int, factors: Factors) -> Factors:
        """Axes of the result, from the axes of operand i."""
        others = len(self.free[0]) if i else 0
        source = dict(enumerate(self.batch[i]))
        source |= {len(source) + others + at: a for at, a in enumerate(self.free[i])}
        return placed(factors, source, shape_of(self.eqn.outvars[0]))

    def weight(self) -> int | None:
        """The operand (0 or 1) that is the parameter in this product, or None."""
        leaves = [bool(value.leaves) for value in self.values]
        data = [value.data for value in self.values]
        if not any(leaves):
            return None
        if not all(leaves):
            i = leaves.index(True)
            return None if (data[i] and not self._is_matrix(i)) else i
        if data[0] != data[1]:
            return data.index(False)
        if data[0]:
            fits = [self._is_matrix(i) for i in (0, 1)]
        else:
            # A parameter that is repeated along an axis is like data, and so is a
            # function of a product of two.
            like_data = [
                not self._is_own(i) or x.activated for i, x in enumerate(self.values)
            ]
            fits = [not like_data[i] and like_data[1 - i] for i in (0, 1)]
        return fits.index(True) if fits[0] != fits[1] else None

    def _is_matrix(self, i: int) -> bool:
        """True if some contracted and some free axes are a leaf's."""
        return all(
            any(self.values[i].axes_in(places[i]).values())
            for places in (self.contract, self.free)
        )

    def _is_own(self, i: int) -> bool:
        """True if each free axis is some leaf's: operand i was not repeated."""
        return all(
            self.shapes[i][a] == 1 or any(self.values[i].axes_in([a]).values())
            for a in self.free[i]
        )


@rule("dot_general", "ragged_dot_general")
def _product(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    groups: Sequence[int] = ()
    if (numbers := eqn.params.get("dimension_numbers")) is None:
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    contract, batch = numbers
    product = Product(eqn, (values[0], values[1]), contract, batch, ((), groups))
    i = product.weight()
    if i is None:
        if all(x.leaves and not x.data for x in product.values):
            return _of_leaves(product)
        return _of_activations(follower, product)
    weight, other = product.values[i], product.values[1 - i]
    is_transposed = follower.is_transposed(eqn)
    follower.routes(values[-1], [other] if len(values) > 2 else [])
    if not is_transposed and not other.leaves and (other.one_hot or not other.data):
        result = weight.moved(functools.partial(product.placed, i))
        axes = weight.axes_in(product.contract[i])
        if other.one_hot:
            follower.routes(other, [weight])
            return pick(follower, eqn, result.with_role(BATCH, axes))
        return result.with_role(CONSTANT, axes)
    other = follower.given(other, eqn, product.contract[1 - i])
    contracted, kept = (OUT, IN) if is_transposed else (IN, OUT)
    roles = [kept] * len(product.shapes[i])
    for a in product.contract[i]:
        roles[a] = contracted
    for a in (*product.batch[i], *product.groups[i]):
        roles[a] = BATCH
    uses = follower.use(weight, "contracted", eqn, roles, by=other)
    for use in uses:
        use.by_gates = other.are_gates
        use.rows = math.prod(product.shapes[1 - i][a] for a in product.free[1 - i])
    for x in other.outputs():
        for place, a in zip(product.contract[1 - i], product.contract[i], strict=True):
            # Sums over experts whose results gates were multiplied by.
            for axis in axes_in(other.results[x], [place]) & x.use.gated:
                x.use.separate(axis)
                for use in uses:
                    for a_ in axes_in(weight.leaves[use.path], [a]):
                        use.separate(a_, IN)
        # A batch of this product that was an output: members with one input.
        for axis in axes_in(other.results[x], product.batch[1 - i]):
            if all(x.use.roles.get(a) == {BATCH} for a in range(axis)):
                x.use.separate(axis)
    attended = any(x.role == "attended" for x in other.outputs())
    factors = [product.placed(i, weight.leaves[use.path]) for use in uses]
    return follower.result(uses, factors, "out" if attended else "")


def _of_leaves(product: Product) -> Value:
    """The value of a product of two leaves: made of both."""
    result = dataclasses.replace(joined(product.values), results={})
    for i, value in enumerate(product.values):
        part = value.moved(functools.partial(product.placed, i))
        result = result.with_leaves(part, len(shape_of(product.eqn.outvars[0])))
        result = result.with_role(INNER, value.axes_in(product.contract[i]))
    return result


def _of_activations(follower: Follower, product: Product) -> Value:
    """A product of two activations, or of constants."""
    values, contract = product.values, product.contract
    result = dataclasses.replace(joined(values), one_hot=False, results={})
    if all(value.are_gates for value in values):
        result.softmax = min(value.softmax for value in values)
    for i, (value, other) in enumerate((values, values[::-1])):
        if not value.are_gates and follower.routes(other, [value]):
            result.choice -= other.choice
        follower.use(value, "elementwise", product.eqn)
        summed = any(axes_in(value.results[x], contract[i]) for x in value.outputs())
        is_kernel = other.given_floats and not follower.is_transposed(product.eqn)
        if is_kernel and summed and product.free[1 - i]:
            _feed(result)
        for x, factors in value.results.items():
            if isinstance(x, Output):
                inside = axes_in(factors, contract[i])
                for axis in inside if other.are_gates else ():
                    x.use.separate(axis)
                if x.use.by_gates:
                    _find_mixture(x, inside, axes_in(factors, product.free[i]))
                result.results[x] = product.placed(i, factors)
            elif x.soft and axes_in(factors, contract[i]) == x.keys:
                result.results |= _attended(product, x, 1 - i)
    left, right = (value.outputs() for value in values)
    if left and right and all(value.data for value in values):
        scores = Scores((left, right))
        scores = follower.scores.setdefault(follower.place(product.eqn), scores)
        scores.operands = left, right
        shape, start = shape_of(product.eqn.outvars[0]), len(product.batch[0])
        second = start + len(product.free[0])
        result.results[scores] = tuple(
            (Factor(int(a >= second), 1, size),) if a >= start and size > 1 else ()
            for a, size in enumerate(shape)
        )
    return result


def _feed(result: Value) -> None:
    """Note that a frozen kernel takes the result, as a parameter would."""
    for use in result.sources:
        use.feeds = True


def _attended(product: Product, scores: Scores, i: int) -> Results:
    """Give the query, key and value of an attention their roles.

    Operand i holds the values. Returns outputs that mark the result as attention's.
    """
    (key,), values = scores.keys, product.values[i]
    result: Results = {}
    for role, operand in (("key", key), ("query", 1 - key)):
        for x in scores.operands[operand]:
            x.become(role)
    for x in values.outputs():
        x.become("value")
        after = x.use.output(None, -1, -1)
        after.role = "attended"
        result[after] = product.placed(i, values.results[x])
    return result


def _find_mixture(x: Output, inside: set[int], outside: set[int]) -> None:
    """Revise the roles of a leaf that data mixes into matrices of these axes."""
    roles = x.use.roles
    is_matrix = inside and outside and not inside & outside and x.axis is None
    if is_matrix and all(roles.get(a) == {OUT} for a in inside | outside):
        after = {a: BATCH if r & {IN, BATCH} else OUT for a, r in roles.items()}
        after |= dict.fromkeys(inside, IN)
        x.use.revise({a: frozenset({role}) for a, role in after.items()})


@rule("conv_general_dilated")
def _convolution(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    (data, kernel), params = values, eqn.params
    numbers, shape = params["dimension_numbers"], shape_of(eqn.invars[1])
    is_transposed = follower.is_transposed(eqn)
    out, fan_in, *window = numbers.rhs_spec
    data = follower.given(data, eqn, [numbers.lhs_spec[1]])
    groups = params["feature_group_count"]
    for x in data.outputs():
        members, _ = _members(data.results[x][numbers.lhs_spec[1]], groups)
        for axis in members:
            x.use.separate(axis)
    if not kernel.leaves:
        product = dataclasses.replace(joined(values), results={}, one_hot=False)
        if kernel.given_floats and not is_transposed:
            _feed(product)
        for x in kernel.outputs():
            factors = kernel.results[x]
            inside = axes_in(factors, [fan_in, *window])
            _find_mixture(x, inside, axes_in(factors, [out]))
        return product
    last = fan_in if is_transposed else out
    roles = [OUT if a == last else IN for a in range(len(shape))]
    for a, step in zip(window, params["lhs_dilation"], strict=True):
        if step == shape[a] > 1 and not is_transposed:  # its windows do not overlap
            roles[a] = OUT
    uses = follower.use(kernel, "convolved", eqn, roles, by=data)
    for use in uses:
        of_out = kernel.leaves[use.path][out]
        members, left = _members(of_out, groups)
        if shape[fan_in] == 1 and members and members[0] > (of_out[-1].axis or 0):
            members, left = [], groups  # depthwise, with members of its own
        use.revise(dict.fromkeys(members, frozenset({BATCH})))
        if left > 1:
            use.kind = "depthwise" if shape[fan_in] == 1 else "grouped"
    source, result = {numbers.out_spec[1]: out}, shape_of(eqn.outvars[0])
    return follower.result(
        uses, [placed(kernel.leaves[use.path], source, result) for use in uses]
    )


def _members(factors: Sequence[Factor], groups: int) -> tuple[list[int], int]:
    """The axes of a leaf that `vmap` made groups of, and the groups that are left."""
    members = []
    for axis, _, size, whole in factors[:-1]:
        if axis is None or not whole or groups % size:
            break
        members.append(axis)
        groups //= size
    return members, groups


@rule("pallas_call")
def _pallas_call(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> Value:
    """A kernel: a product of a leaf and an activation, if their widths leave no choice.

    Otherwise it is opaque to leaves; of activations alone, any function of them.
    """
    result = dataclasses.replace(joined(values), results={}, one_hot=False)
    shapes = [shape_of(v) for v in eqn.invars]
    weights = [i for i, x in enumerate(values) if x.leaves and not x.data]
    data = [i for i, x in enumerate(values) if x.sources and len(shapes[i]) > 1]
    if len(weights) == len(data) == len(eqn.outvars) == 1:
        shape, (*_, before) = shapes[weights[0]], shapes[data[0]]
        *_, after = shape_of(eqn.outvars[0])
        if before != after and shape.count(before) == shape.count(after) == 1:
            roles = [{before: IN, after: OUT}.get(n, BATCH) for n in shape]
            weight, by = values[weights[0]], values[data[0]]
            uses = follower.use(weight, "contracted", eqn, roles, by)
            return dataclasses.replace(result, sources=frozenset(uses))
    for value in values:
        follower.use(value, "opaque", eqn)
    return result
