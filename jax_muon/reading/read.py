"""Read a whole tree of parameters: which are matrices, along which axes, and why.

A tree is read once and as a whole, since the role of a parameter depends on its
neighbours. `read_leaves` goes from certain to likely evidence: axes of layers, axis
names, experts, the role by words and neighbours, the axes by role. The user's rules
(`overrides`) come last and override the rest.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_muon import paths
from jax_muon.reading import axis_names, decide, layers, roles, vocabulary
from jax_muon.reading.decide import Parameter
from jax_muon.reading.tree import Leaf, Node, Tree


def read_leaves(
    leaves: Sequence[Leaf],
    *,
    out_in: bool | None = None,
    table: axis_names.Table | None = None,
    strict_names: bool = False,
) -> list[Parameter]:
    """Read all leaves of a model, each in view of all others, without a user's rules.

    With `strict_names` an axis name of unknown kind is an error, unless it is that of a
    mesh axis, such as "fsdp".
    """
    known, tree = axis_names.table_with(table), Tree(leaves)
    if strict_names:
        axis_names.check_known(tree.nodes, known)
    layers.find_layers(tree)
    for node in tree.nodes:
        node.kinds = axis_names.kinds_of(node.leaf, known)
        if node.kinds is not None:
            batch = [i for i, kind in enumerate(node.kinds) if kind == vocabulary.BATCH]
            node.batch = tuple(batch)
            node.batch_reason = axis_names.shown(node, batch)
    layers.find_experts(tree)
    found = {node: _role(tree, node) for node in tree.nodes}
    decider = decide.Decider(tree, found, out_in)
    return decide.agreeing([decider.parameter(node) for node in tree.nodes])


def _role(tree: Tree, node: Node) -> roles.Role:
    """The role by axis names, or else by words and neighbours."""
    kinds = node.kinds or ()
    named, found = f"its axes are named {node.leaf.names}", roles.role_of(tree, node)
    if vocabulary.NORMED in kinds:
        return "norm", named
    if vocabulary.POSITIONS in kinds:
        return "embedding", named
    if vocabulary.VOCAB in kinds and len(node.sizes) == 2:
        return ("embedding" if found[0] == "embedding" else "head"), named
    return found


def leaves_of(params: Any, given: axis_names.ByPath | None) -> list[Leaf]:
    """Every parameter with its axis names, those given or else those that it carries.

    Raises:
      ValueError: two parameters with one path; names for a path that no parameter has.
    """
    flat, given = paths.leaves_with_paths(params), given or {}
    leaves = dict(flat)
    if len(leaves) < len(flat):
        twice = next(path for path, x in flat if leaves[path] is not x)
        raise ValueError(
            f"two parameters have the path {twice!r}; expected different paths, since "
            "labels and rules go by them"
        )
    paths.check_known("names", given, leaves, modules=False)
    names = {**axis_names.of_tree(params), **given}
    return [
        Leaf(
            path,
            tuple(x.shape),
            jnp.result_type(x),
            tuple(names[path]) if path in names else None,
        )
        for path, x in leaves.items()
    ]
