"""Read a whole tree of parameters: which are matrices, along which axes, and why.

A tree is read once and as a whole, since the role of a parameter depends on its
neighbours. `read_leaves` goes from certain to likely evidence: axes of layers, experts,
the role by words and neighbours, the axes by role. The user's rules (`overrides`) come
last and override the rest.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_muon import paths
from jax_muon.reading import decide, layers, roles
from jax_muon.reading.decide import Parameter
from jax_muon.reading.tree import Leaf, Tree


def read_leaves(leaves: Sequence[Leaf], out_in: bool | None = None) -> list[Parameter]:
    """Read all leaves of a model, each in view of all others, without any rules."""
    tree = Tree(leaves)
    layers.find_layers(tree)
    layers.find_experts(tree)
    found = {node: roles.role_of(tree, node) for node in tree.nodes}
    decider = decide.Decider(tree, found, out_in)
    return decide.agreeing([decider.parameter(node) for node in tree.nodes])


def leaves_of(params: Any) -> list[Leaf]:
    """Every parameter.

    Raises:
      ValueError: two parameters with one path.
    """
    flat = paths.leaves_with_paths(params)
    leaves = dict(flat)
    if len(leaves) < len(flat):
        twice = next(path for path, x in flat if leaves[path] is not x)
        raise ValueError(
            f"two parameters have the path {twice!r}; expected different paths, since "
            "labels and rules go by them"
        )
    return [Leaf(path, tuple(x.shape), jnp.result_type(x)) for path, x in flat]
