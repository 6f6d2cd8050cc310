"""What users say as `matrices=`, made a `Matrices`."""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jaxtyping import PyTree

from jax_muon.base import checks, trees
from jax_muon.base.array_types import on_users_axes, shapes_of
from jax_muon.matrices.matrices import Matrices
from jax_muon.matrices.rules import Rules
from jax_muon.reading.find import find_matrices

# How parameters are read: a value, which is a `Matrices`, or rules that make one; or a
# function of the parameters that returns such a value.
Reading: TypeAlias = Matrices | Rules | Callable[[PyTree], Matrices | Rules]


def resolve(matrices: Reading, tree: PyTree) -> Matrices:
    """The reading of a tree, or of one that is a part of what was read.

    `resolve({"wte": "adamw", "*": "muon"}, params)` is
    `find_matrices(params, rules={"wte": "adamw", "*": "muon"})`.
    """
    found = matrices
    if trees.is_function(matrices):
        with on_users_axes():  # a loss may not know Explicit axes
            found = matrices(shapes_of(tree))
        check_reading("matrices(params)", found)
    if not isinstance(found, Matrices):
        found = find_matrices(tree, rules=found)
    return found.of(tree)


def check_reading(name: str, value: Reading) -> None:
    """The value must be a `Matrices`, labels in a container, or a function."""
    if not trees.is_function(value) and (
        value is None or jax.tree_util.all_leaves([value])
    ):
        expected = (
            "jax_muon.find_matrices(params, loss_fn, batch); labels by path, such as "
            "{'embed': 'adamw', '*': 'muon'}, or in a tree; or a function of params "
            "alone that returns one of these" + checks.injected(value, "matrices")
        )
        checks.check_kind(name, value, Matrices, expected)
