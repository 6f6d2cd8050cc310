"""Which axes of the leaves are layers: where a model is scanned over its blocks.

A scan stacks every leaf of a block on the same axis, norms and biases too. So one axis
(the first, or the second, as MaxText has it) has the same size in all leaves below a
module, and a norm there has two axes instead of one. Both must hold; then every leaf
loses that axis, and the search goes on inside.
"""

from collections.abc import Iterable

from jax_muon import paths
from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree

# Place among the native axes, and size.
_Axis = tuple[int, int]


def find_layers(tree: Tree) -> None:
    """Give every node its axes of layers, as `batch` and `batch_reason`."""
    _search(tree, (), set())
    tree.forget_widths()


def _search(tree: Tree, module: tuple[str, ...], inherited: set[_Axis]) -> None:
    nodes = tree.under[module]
    candidates = {
        (place, node.sizes[place])
        for node in nodes
        if node.is_norm and _is_stacked_vector(node)
        for place in range(2)
    }
    reason = "the norms around it have an axis of {} layers too"
    # A width that several kernels share is not a number of layers, seen from outside.
    inherited = {axis for axis in inherited if axis[1] not in tree.streams}
    found = _shared(nodes, inherited | candidates, tree)
    if found is None and (found := _by_container(module, nodes)):
        reason = f"every leaf below {module[-1] if module else ''!r} has {{}} layers"
    if found is not None:
        place, size = found
        for node in nodes:
            node.batch = (*node.batch, node.native[place])
            node.batch_reason = reason.format(size)
        _search(tree, module, set())
        return
    for child in tree.children.get(module, {}):
        if all(len(node.sizes) <= 1 for node in tree.under[(*module, child)]):
            continue
        _search(tree, (*module, child), inherited | candidates)


def _is_stacked_vector(node: Node) -> bool:
    """Whether a norm has exactly one axis, or more than one, beyond its width.

    (1, 1, 1, 64) is how some write a scale for images, and not a stack.
    """
    sizes = node.sizes
    return len(sizes) == 2 or (len(sizes) > 2 and sum(size > 1 for size in sizes) > 1)


def _shared(nodes: list[Node], candidates: Iterable[_Axis], tree: Tree) -> _Axis | None:
    """The candidate axis that all leaves have, the likeliest if there are several."""
    fitting = []
    for place, size in candidates:
        fits = all(
            len(node.sizes) > place and node.sizes[place] == size for node in nodes
        )
        # One leaf, or leaves of one shape, agree with themselves by nature.
        if fits and len({node.sizes for node in nodes}) > 1:
            fitting.append((size in tree.streams, size, place))
    if not fitting:
        return None
    _, size, place = min(fitting)
    return place, size


def _by_container(module: tuple[str, ...], nodes: list[Node]) -> _Axis | None:
    """Axis 0 of everything in a module called "layers" or "blocks", without numbers."""
    if not module or "_".join(paths.words(module[-1])) not in words.STACKS:
        return None
    if module[-1][-1].isdigit() or any(node.batch for node in nodes):
        return None
    if any(not node.sizes for node in nodes):
        return None
    below = {node.parts[len(module)] for node in nodes if node.parts != module}
    size = nodes[0].sizes[0]
    stacked = (
        not any(
            part[-1].isdigit() and part.rstrip("0123456789") == "" for part in below
        )
        and {node.sizes[0] for node in nodes} == {size}
        and any(len(node.sizes) > 2 for node in nodes)
        and all(
            size <= min((n for n in node.sizes[1:] if n > 1), default=size)
            for node in nodes
            if len(node.sizes) > 2
        )
    )
    return (0, size) if stacked else None
