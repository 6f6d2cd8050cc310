"""How tests say what they know of a tree before there is one."""

import functools

from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.base import trees

STACKS = MuonDimensionNumbers(-2, -1)  # (..., in, out)


def reader(rules=STACKS, **settings):
    """`jax_muon.find_matrices` by rules alone, for `matrices=`."""
    return functools.partial(jm.find_matrices, rules=rules, **settings)


def toy(params, joins=None, splits=None):
    """Tables are called wte and convolutions conv; all else are stacks (..., in, out).

    What `joins` and `splits` do not match stays single and whole.
    """
    leaves = [x for x in trees.leaves_with_paths(params) if x[1].ndim > 1 and x[1].size]
    rules = {"wte": "adamw", "[cC]onv*": MuonDimensionNumbers((0, 1, 2), 3)}
    rules |= {
        path: STACKS
        for path, _ in leaves
        if not any(trees.matches(pattern, path) for pattern in rules)
    }

    def fitting(given):
        patterns = {x: x.replace("{i}", "[0-9]") for x in given or ()}
        found = [
            x for x in patterns if any(trees.matches(patterns[x], y) for y, _ in leaves)
        ]
        return {x: given[x] for x in found}

    return jm.find_matrices(
        params, rules=fitting(rules), joins=fitting(joins), splits=fitting(splits)
    )
