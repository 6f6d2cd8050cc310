"""Which axes of the leaves are layers or experts: batches of matrices.

A scan stacks every leaf of a block on the same axis, including norms and biases. So one
axis (the first, or the second in MaxText) has the same size in all leaves below a
module, and a norm there has two axes instead of one. Both must hold; then every leaf
loses that axis, and the search continues inside. Experts are counted by a router beside
them with as many outputs, or by the name of their module.
"""

from collections.abc import Iterable
from typing import Any

from jax_muon import paths
from jax_muon.reading.names import roles, vocabulary
from jax_muon.reading.names.tree import Leaf, Module, Node, Tree


def axes_of_layers(tree: Any) -> dict[str, tuple[int, ...]]:
    """Axes of layers by path, as names of modules and shapes show them."""
    leaves = paths.leaves_with_paths(tree)
    names = Tree([Leaf(path, tuple(x.shape), x.dtype) for path, x in leaves])
    find_layers(names)
    return {node.leaf.path: node.batch for node in names.nodes}


def find_layers(tree: Tree) -> None:
    """Give every node its axes of layers, as `batch` and `batch_reason`."""
    _search(tree, (), set())
    tree.forget_norms()


def _search(tree: Tree, module: Module, inherited: set[tuple[int, int]]) -> None:
    """Look for an axis, its place and size, from the outermost module inwards."""
    nodes = tree.under[module]
    # An outer candidate is dropped if it is a width that several kernels share,
    candidates = {axis for axis in inherited if axis[1] not in tree.streams}
    for node in nodes:
        if node.is_norm and len(node.sizes) > 1:
            candidates |= {*enumerate(node.sizes[:2])}
    # nor is the width of the embedding tables, which norms have on their last axis.
    candidates -= {(1, width) for width in tree.streams}
    # If all leaves have one shape, agreement proves nothing.
    alike = len({node.sizes for node in nodes}) == 1
    shared = [
        (size, place)
        for place, size in candidates
        if not alike and all(node.sizes[place : place + 1] == (size,) for node in nodes)
    ]
    if shared:
        place = min(shared)[-1]
        reason = "the norms around it have an axis of {} layers too"
    elif _is_container(tree, module):
        place, reason = 0, f"every leaf below {module[-1]!r} has {{}} layers"
    else:
        for child in tree.children(module):
            _search(tree, (*module, child), candidates)
        return
    for node in nodes:
        node.stack([place], reason.format(node.sizes[place]))
    _search(tree, module, set())


def _is_container(tree: Tree, module: Module) -> bool:
    """True if axis 0 of all leaves in a module called "layers" or "blocks" is theirs.

    It has no number, and no numbers inside.
    """
    name = "_".join(paths.words(module[-1])) if module else ""
    numbered = [part for part in tree.children(module) if part.isdigit()]
    if name not in vocabulary.STACKS or module[-1][-1].isdigit() or numbered:
        return False
    nodes = tree.under[module]
    kernels = [node.sizes for node in nodes if len(node.sizes) > 2]
    counts = {node.sizes[:1] for node in nodes}
    if not kernels or len(counts) > 1 or nodes[0].batch:
        return False
    ((count,),) = counts
    return all(count <= max(sizes[1:]) for sizes in kernels)


def find_members(tree: Tree) -> None:
    """Give a stack of kernels its batch, if the bias beside it has the same one.

    A bias (2, 1) is one for each of two kernels (256, 1), and not (out, 1), as beside a
    `weight` (out, in, window) of equinox.
    """
    for node in tree.nodes:
        bias = tree.bias_of(node) if node.is_generic else None
        if bias is None or bias.batch or bias.is_vector:
            continue
        *stack, width = bias.sizes
        is_window = width == 1 and node.name == "weight"
        is_trailing = node.sizes[1:] == bias.sizes  # heads, perhaps
        fits = node.sizes[:-2] == (*stack,) and width in node.sizes[-2:]
        if fits and not is_window and not is_trailing:
            for stacked in (node, bias):
                reason = f"the bias {bias.leaf.shape} beside it is stacked too"
                stacked.stack(range(len(stack)), reason)
    tree.forget_norms()


def find_experts(tree: Tree) -> None:
    """Give the stacked kernels of experts their axis of experts, as a batch."""
    routers: dict[Module, list[Node]] = {}  # kernels called so, by the modules around
    for node in tree.nodes:
        if (vocabulary.ROUTER | vocabulary.GATE) & {*node.title_words}:
            for depth in range(len(node.parts)):
                routers.setdefault(node.parts[:depth], []).append(node)
    for node in tree.nodes:
        if node.is_bias or len(node.sizes) < 3:
            continue
        count = node.sizes[0]
        if router := _router_of(node, routers.get(tree.module(node)[:-1], ())):
            reason = f"{router.path!r} beside it chooses among {count} experts"
            router.chooses = True
        elif (
            any(map(_is_of_experts, node.parts))
            and count not in tree.streams
            and not (node.projection and roles.in_attention(tree, node))
        ):
            reason = f"{count} experts, by the name of its module"
        else:
            continue
        node.stack([0], reason)


def _is_of_experts(part: str) -> bool:
    words = paths.words(part)
    named = "_".join(words) in vocabulary.EXPERT_MODULES
    # A shared expert has no axis of experts.
    return named or (words[-1:] in (["expert"], ["experts"]) and "shared" not in words)


def _router_of(node: Node, routers: Iterable[Node]) -> Node | None:
    """A kernel (in, experts) among those called gate or router around a node's."""
    for other in routers:
        if other.sizes[1:] == node.sizes[:1] and other.sizes[0] in node.sizes[1:]:
            return other
    return None
