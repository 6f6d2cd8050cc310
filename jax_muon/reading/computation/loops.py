"""Follow parameters through control flow: scans, loops, branches, shard_map."""

import functools
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from jax_muon import jaxprs
from jax_muon.reading.computation.follow import Follower, cut, rule, shape_of
from jax_muon.reading.computation.values import (
    Value,
    axes_of,
    fit,
    free,
    joined,
)


@rule("scan")
def _scan(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    constants, start = jaxprs.scan_starts(eqn)
    length, rows = eqn.params["length"], []
    for value, v in zip(values[start:], eqn.invars[start:], strict=True):
        shape = shape_of(v)
        for leaf, sides in value.leaves.items():
            follower.scanned[leaf] |= {*axes_of(sides[0])}
        row = cut(value, shape, (1, *shape[1:])).moved(lambda sides: sides[1:])
        rows.append(row)
    carry, ys = _repeat(
        follower,
        eqn,
        eqn.params["jaxpr"].jaxpr,
        values[:constants],
        values[constants:start],
        rows,
    )
    return [*carry, *(y.moved(lambda sides: (free(length), *sides)) for y in ys)]


@rule("while")
def _while(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"].jaxpr
    return _repeat(follower, eqn, body, values[start:end], values[end:], [])[0]


@rule("cond")
def _cond(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    branches = [
        follower.call(eqn, branch.jaxpr, values[1:])
        for branch in eqn.params["branches"]
    ]
    met = [
        functools.reduce(functools.partial(_meet, follower, eqn), results)
        for results in zip(*branches, strict=True)
    ]
    for value in met:
        value.data |= bool(value.leaves) and values[0].data
    return met


@rule("shard_map")
def _shard_map(follower: Follower, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    closed = jaxprs.called(eqn)
    assert closed is not None
    shards = [
        value.moved(lambda sides, v=v: fit(sides, shape_of(v)))
        for value, v in zip(values, closed.jaxpr.invars, strict=True)
    ]
    return follower.call(eqn, closed.jaxpr, shards)


def _repeat(
    follower: Follower,
    eqn: JaxprEqn,
    body: Jaxpr,
    constants: Sequence[Value],
    carry: list[Value],
    rows: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """The carry and the other results of a loop, after as many turns as change them."""
    for _ in range(4):
        results = follower.call(eqn, body, [*constants, *carry, *rows])
        before = carry
        carry = [
            _meet(follower, eqn, *pair) for pair in zip(before, results, strict=False)
        ]
        if all(map(_same, before, carry)):
            break
    return carry, results[len(carry) :]


def _same(a: Value, b: Value) -> bool:
    def facts(x: Value) -> tuple[object, ...]:
        return x.data, {*x.leaves}, x.picked, x.behind, {*x.results}, x.one_hot

    return facts(a) == facts(b)


def _meet(follower: Follower, eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """What holds of a value that is one of two."""
    for value, other in ((a, b), (b, a)):
        if value.leaves and not other.leaves and other.data:
            follower.use(value, "elementwise", eqn)
            return joined([value, other])
    result = joined([a, b], one_hot=a.one_hot and b.one_hot)
    for value in (a, b):
        result.leaves = {**value.leaves, **result.leaves}
        result.picked |= value.picked
        result = result.with_roles(value.roles)
    return result
