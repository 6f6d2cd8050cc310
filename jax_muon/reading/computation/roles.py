"""The role of each axis of a leaf in one use."""

import math
from collections.abc import Sequence

from jax_muon.matrices import MatrixAxes

# Batch, in or out. Before the use, the axis may have been contracted with another leaf
# (INNER) or a constant, or indexed (PART).
BATCH, IN, OUT = "batch", "in", "out"
INNER, CONSTANT, PART = "inner", "constant", "part"
Roles = dict[int, frozenset[str]]  # by axis of the leaf


def merged(a: Roles, b: Roles) -> Roles:
    """The roles in either."""
    return a | {axis: a.get(axis, frozenset()) | roles for axis, roles in b.items()}


def matrix_axes(shape: Sequence[int], of: Roles) -> MatrixAxes | str:
    """The axes of one use, or why they are unknown."""
    roles = {axis: {*of.get(axis, ())} for axis in range(len(shape))}
    known = set().union(*roles.values())
    matrix = [a for a, x in roles.items() if INNER not in x and x != {BATCH}]
    for axis, x in roles.items():
        if INNER in x and shape[axis] >= math.prod(shape[a] for a in matrix):
            return "of two parameters multiplied with each other either may be data,"
        if INNER in x:
            x ^= {INNER, OUT if IN in known else IN}
        if PART in x:
            x ^= {PART} if len(x) > 1 else {PART, BATCH}
    _resolve_constants(roles)
    for axis, x in roles.items():
        if not x and shape[axis] == 1:
            x.add(BATCH)
        if len(x) != 1:
            sides = f"both {' and '.join(sorted(x))}" if x else "neither in nor out"
            return f"axis {axis} is {sides}"
    batch, fan_in, fan_out = (
        tuple(a for a in roles if roles[a] == {side}) for side in (BATCH, IN, OUT)
    )
    return MatrixAxes(batch, fan_in, fan_out)


def _resolve_constants(roles: dict[int, set[str]]) -> None:
    """An axis that only constants are contracted with is an input; others are out."""
    inputs = [axis for axis, x in roles.items() if x == {CONSTANT}]
    others = [axis for axis, x in roles.items() if x and axis not in inputs]
    for x in roles.values():
        x.discard(CONSTANT)
    for axis in inputs:
        roles[axis].add(IN)
    for axis in [a for a in others if roles[a] != {BATCH}] or others if inputs else []:
        roles[axis] = {OUT}
