"""Read a whole tree of parameters by paths and shapes: the last source, and a guess.

A tree is read as a whole, since the role of a parameter depends on its neighbours, from
certain to likely evidence: axes of layers, experts, the role by words and neighbours,
the axes by role.
"""

import dataclasses
from collections.abc import Sequence

from jax_muon.axes import Parameter
from jax_muon.reading.names import decide, layers, roles
from jax_muon.reading.names.tree import Leaf, Tree


def is_certain(parameter: Parameter) -> bool:
    """True if names neither leave a doubt nor assume which side is which."""
    return not (parameter.doubt or parameter.reason.endswith(decide.ASSUMED))


def read_leaves(leaves: Sequence[Leaf], out_in: bool | None = None) -> list[Parameter]:
    """Read all leaves of a model, each in view of all others, without any rules."""
    tree = Tree(leaves)
    layers.find_layers(tree)
    scanned = {node.leaf.path: node.batch for node in tree.nodes}
    layers.find_members(tree)
    layers.find_experts(tree)
    role_of = {node: roles.role_of(tree, node) for node in tree.nodes}
    decider = decide.Decider(tree, role_of, out_in)
    return [
        dataclasses.replace(x, scanned=scanned[x.path])
        for x in decide.doubtful_if_layers_differ(
            [decider.parameter(node) for node in tree.nodes]
        )
    ]
