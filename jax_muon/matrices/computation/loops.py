"""Follow parameters through control flow: scans, loops and branches."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.matrices.computation.moves import cut, reduced
from jax_muon.matrices.computation.trace import ELEMENTWISE, RULES, Trace, rule
from jax_muon.matrices.computation.values import (
    AxisPart,
    Edge,
    Use,
    Value,
    axes_in,
    free,
    joined,
)


@rule("scan")
def _scan(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    constants, start = jaxprs.scan_starts(eqn)
    body, length, rows = eqn.params["jaxpr"], eqn.params["length"], []
    arrays = [x.axes_in([0]).items() for x in values[start:]]
    turning = [{(leaf, a) for leaf, axes in x for a in axes} for x in arrays]
    for value, v, over in zip(values[start:], eqn.invars[start:], turning, strict=True):
        for leaf, axis in over:
            trace.scan(leaf, axis, eqn)
        if any(x is not over and x for x in turning):  # h[i] @ w[i] of outputs h
            for use, parts in value.outputs.items():
                trace.note("batched", use, axes_in(parts, [0]))
        row = cut(trace, value, shape_of(v), (1, *shape_of(v)[1:]))
        row = replace(row, rows=value.rows | dict.fromkeys(over, id(eqn)), numbers=None)
        if value.selects(range(1, len(shape_of(v)))):  # each row of an identity
            row.numbers = functools.partial(_first_row, value)
        rows.append(row.moved(lambda parts: parts[1:]))
    before, carry = values[:constants], values[constants:start]
    carry, ys = _repeat(trace, eqn, body, before, carry, rows)
    for x in values[start:]:  # experts (5, 16, 40) added one by one to (16, 40)
        carry = [reduced(trace, eqn, y, x, [0]) for y in carry]
    ys = [y.moved(lambda parts: (free(length), *parts)) for y in ys]
    for y, x in itertools.product(ys, values[start:]):
        outputs = _put_together(y, x)
        # Data that turns as well, einsum("eij,ejo->eio", a, x @ w), has members.
        for use, axes in outputs.items() if all(turning) and not carry else ():
            if Edge("in turns", use, axes) in trace.edges:
                trace.note("in turns", use, axes, about="side by side")
    return [*carry, *ys]


def _first_row(value: Value) -> np.ndarray:
    numbers = value.computed()
    assert numbers is not None
    return numbers[0]


def _put_together(y: Value, x: Value) -> dict[Use, frozenset[int]]:
    """Rows that a scan makes of the rows of another array have its first axis.

    `lax.map(lambda c: x @ c, w.T)` puts the outputs of w, one by one, together again.
    Returns the axes of such outputs.
    """
    for leaf in y.leaves.keys() & x.leaves.keys():
        if not axes_in(y.leaves[leaf], [0]):
            y.leaves[leaf] = (*x.leaves[leaf][:1], *y.leaves[leaf][1:])
    outputs = {}
    for result, parts in y.results.items():
        if isinstance(result, Use):
            first = x.leaves.get(result.path, ())[:1]
        else:  # of scores, the axis of the operand whose rows x has
            paths = [{use.path for use in uses} for uses in result.operands]
            of = [i for i in (0, 1) if paths[i] & x.leaves.keys()]
            first = tuple((AxisPart(i, 1, 2),) for i in of if len(of) == 1)
        if first and not axes_in(parts, [0]):
            y.results[result] = (*first, *parts[1:])
            if isinstance(result, Use):
                outputs[result] = frozenset(axes_in(first))
    return outputs


@rule("while")
def _while(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"]
    return _repeat(trace, eqn, body, values[start:end], values[end:], [])[0]


@rule("cond")
def _cond(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    trace.routes(values[0], values[1:])
    functions = eqn.params["branches"]
    branches = [trace.call(eqn, x, values[1:]) for x in functions]
    meet = functools.partial(_meet, trace, eqn)
    return [functools.reduce(meet, results) for results in zip(*branches, strict=True)]


@rule(jaxprs.LINEAR_SOLVE)
def _linear_solve(
    trace: Trace, eqn: JaxprEqn, values: list[Value]
) -> Value | list[Value]:
    """The solution of A y = b: its axes are those of A^T b.

    Axis 0 of A (24, 24) meets b, and axis 1 is left. But the rotation (I + w)^-1
    (I - w), of one leaf on both sides, has the axes of b.
    """
    functions, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    if functions.vecmat is None:  # nobody has told JAX how to transpose it
        return RULES[ELEMENTWISE](trace, eqn, values)
    matrix, right = values[lengths.matvec :][: lengths.vecmat], values[sum(lengths) :]
    others = [joined(values)] * (len(eqn.outvars) - len(right))  # the solver's own
    both = [{leaf for x in of for leaf in x.leaves} for of in (matrix, right)]
    if both[0] == both[1] and len(both[0]) == 1:
        return [*right, *others]
    return [*trace.call(eqn, functions.vecmat, [*matrix, *right]), *others]


def _repeat(
    trace: Trace,
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    constants: Sequence[Value],
    carry: list[Value],
    rows: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """The carry and the other results of a loop, after as many turns as change them."""
    loop = id(eqn)

    def turning(values: Sequence[Value]) -> list[Value]:
        return [replace(x, turns=x.turns | {loop}) for x in values]

    def outside(x: Value) -> Value:
        rows = {axis: n for axis, n in x.rows.items() if n != loop}
        return replace(x, turns=x.turns - {loop}, rows=rows)

    rows = turning(rows)
    seen, first = trace.seen(), carry
    for _ in range(len(carry) + 2):  # a fact may take a turn for each part of it
        trace.forget(seen)  # of the first turns, which may see zeros instead of data
        unknown = [replace(x, numbers=None) for x in turning(carry)]
        results = trace.call(eqn, body, [*constants, *unknown, *rows])
        results = [*map(outside, results)]
        before, pairs = carry, zip(carry, results, strict=False)
        carry = [_meet(trace, eqn, *pair) for pair in pairs]
        facts = functools.partial(_facts, trace)
        if list(map(facts, before)) == list(map(facts, carry)):
            break
    for value, after in zip(first, carry, strict=True):
        if value.leaves and not after.leaves:  # a memory that data rewrites
            trace.use(value, "elementwise", eqn)
    return carry, results[len(carry) :]


def _facts(trace: Trace, x: Value) -> tuple[object, ...]:
    """Facts that a turn may add; in a residual stream, uses that nothing takes yet."""
    uses = x.sources - trace.taken, {*x.results} - trace.taken
    return x.data, {*x.leaves}, x.picked, uses, x.one_hot


def _meet(trace: Trace, eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """What holds of a value that is one of two."""
    result = joined([a, b])
    for value, other in ((a, b), (b, a)):
        if value.leaves and not other.leaves and other.data:
            trace.use(value, "elementwise", eqn)
            return result
    for value in (a, b):
        ndim = len(next(iter(value.leaves.values()), ()))
        result = result.with_leaves(value, ndim)
    return result
