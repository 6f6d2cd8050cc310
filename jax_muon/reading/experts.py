"""Which axis of stacked kernels counts experts.

The batch of experts is known by a router beside it with as many outputs, or by the name
of a module.
"""

from jax_muon import paths
from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree
from jax_muon.reading.kinds import attention_part, in_attention, is_convolution


def find_experts(tree: Tree) -> None:
    """Give the stacked kernels of experts their axis of experts, as a batch."""
    for node in tree.nodes:
        if len(node.sizes) < 3 or node.is_bias or node.is_norm:
            continue
        if attention_part(node) and in_attention(tree, node):
            continue
        count = node.sizes[0]
        router = next(
            (r for r in _routers_of(tree, node) if r.sizes[-1] == count), None
        )
        named = any(_is_expert_module(part) for part in node.parts)
        if router is not None:
            reason = f"{router.path!r} beside it chooses among {count} experts"
            router.chooses = True
        elif named and not is_convolution(node) and count not in tree.streams:
            reason = f"{count} experts, by the name of its module"
        else:
            continue
        node.batch = (*node.batch, node.native[0])
        node.batch_reason = reason


def _is_expert_module(part: str) -> bool:
    of_part = paths.words(part)
    if "shared" in of_part:
        return False
    return of_part[-1:] in (["expert"], ["experts"]) or of_part in (
        ["moe"],
        ["moe", "block"],
        ["moe", "mlp"],
        ["sparse", "moe"],
    )


def _routers_of(tree: Tree, node: Node) -> list[Node]:
    """Kernels (in, experts) called gate or router in the modules around a node."""
    found = []
    for depth in {len(node.parts) - 1, len(tree.module(node)) - 1} - {-1}:
        for other in tree.under[node.parts[:depth]]:
            close = len(other.parts) <= len(node.parts) + 2
            named = (words.ROUTER | words.GATE) & {*other.title.split("_")}
            if not close or not named or len(other.sizes) != 2 or other.is_bias:
                continue
            if other.sizes[0] in node.sizes[1:] or "router" in other.title:
                found.append(other)
    return found
