"""Follow parameters through control flow: scans, loops and branches."""

import functools
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_muon.base import jaxprs
from jax_muon.base.jaxprs import shape_of
from jax_muon.reading import values as v
from jax_muon.reading.moves import looped, together
from jax_muon.reading.trace import Trace, rule
from jax_muon.reading.values import Value


@rule("scan")
def _scan(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    first, second = jaxprs.scan_starts(eqn)
    rows = [x.moved(lambda parts: parts[1:], v.LOOP) for x in values[second:]]
    for before, row in zip(values[second:], rows, strict=True):
        looped(trace, eqn, before, row)
    body = jaxprs.called(eqn)
    assert body is not None
    carry, ys = _repeat(trace, eqn, body, values[:first], values[first:second], rows)
    stacked = []
    for y, x in zip(ys, eqn.outvars[len(carry) :], strict=True):
        shape = shape_of(x)
        source = {a + 1: a for a in range(len(shape) - 1)}
        stacked.append(y.moved(functools.partial(v.placed, source=source, shape=shape)))
        own = [x for x in y.went(v.LOOP) if len(trace.wide(x)) > 1]
        trace.lose(own, "rows of it are put together", eqn)
    return [*carry, *stacked]


@rule("while")
def _while(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"]
    return _repeat(trace, eqn, body, values[start:end], values[end:], [])[0]


@rule("cond")
def _cond(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    trace.routes(eqn, values)
    branches = [trace.call(eqn, x, values[1:]) for x in eqn.params["branches"]]
    return [together(trace, eqn, x) for x in zip(*branches, strict=True)]


def _repeat(
    trace: Trace,
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    constants: Sequence[Value],
    carry: list[Value],
    rows: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """The carry and the other results of a loop, after as many turns as change them."""
    facts, first = trace.facts, carry
    # h = tanh(x @ w + h @ u) from zeros on: in the first turn only constants meet u. In
    # the second h is data, and in the third nothing changes.
    for _ in range(len(carry) + 2):  # a fact may take a turn for each part of it
        trace.facts = facts.copy()  # first turns may see zeros instead of data
        results = trace.call(eqn, body, [*constants, *carry, *rows])
        before, pairs = carry, zip(carry, results, strict=False)
        carry = [together(trace, eqn, pair) for pair in pairs]
        if before == carry:
            break
    for value, after in zip(first, carry, strict=True):
        if value.leaves and not after.leaves:  # a learned state, which data replaces
            trace.as_data(value, eqn)
        elif after.data and not value.data:
            wide = [x for x in value.leaves if len(trace.wide(x)) > 1]
            trace.doubt(wide, "a loop changes it by data", eqn)
    return carry, results[len(carry) :]
