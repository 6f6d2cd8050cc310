"""How tests say what they know of a tree before there is one."""

import functools

from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon import paths

STACKS = MuonDimensionNumbers(-2, -1)  # (..., in, out)


def reader(rules=STACKS, **settings):
    """`jax_muon.read` by rules alone, for `matrices=`."""
    return functools.partial(jm.read, rules=rules, **settings)


def toy(params, joins=None, splits=None):
    """Tables are called wte and convolutions conv; all else are stacks (..., in, out).

    What `joins` and `splits` do not match stays single and whole.
    """
    convolution = MuonDimensionNumbers((0, 1, 2), 3)
    rules = {"wte": "adamw", "[cC]onv*": convolution, "*": STACKS}
    rules, joins, splits = (
        {x: y for x, y in given.items() if _matches(x.replace("{i}", "[0-9]"), params)}
        for given in (rules, joins or {}, splits or {})
    )
    is_matrix = any(x.ndim > 1 and x.size for _, x in paths.leaves_with_paths(params))
    rules = rules if is_matrix else None
    return jm.read(params, rules=rules, joins=joins, splits=splits)


def _matches(pattern, params):
    leaves = paths.leaves_with_paths(params)
    return any(paths.matches(pattern, path) for path, _ in leaves)
