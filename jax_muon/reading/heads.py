"""Output heads: the last layer of a model or of a small network on top of it."""

from jax_muon import paths
from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree


def head(tree: Tree, node: Node) -> tuple[str, str] | None:
    """("head", why) for the kernel that gives a model's outputs, else None."""
    for depth, part in enumerate(node.owner_parts):
        if not _is_head_module(part):
            continue
        rest = node.owner_parts[depth + 1 :]
        if all(_is_transparent(inner) for inner in rest):
            return _last_of(tree, node, node.parts[: depth + 1])
    if _is_at_the_top(tree, node):
        return "head", f"{node.title!r} outside the layers gives the outputs"
    if (rows := _rows_of_a_table(tree, node)) is not None:
        return "head", f"its {rows} outputs are the rows of the embedding table"
    return None


def _is_head_module(part: str) -> bool:
    of_part = paths.words(part)
    if not of_part or of_part[0] in ("pre", "multi"):
        return False
    return of_part[-1] in words.HEAD_LAST or bool({*of_part} & words.HEAD)


def _is_transparent(part: str) -> bool:
    """Whether a module inside a head is one of its own layers."""
    of_part = {*paths.words(part)}
    return not of_part or "lora" in of_part or of_part <= words.HEAD_PARTS


def _last_of(tree: Tree, node: Node, module: tuple[str, ...]) -> tuple[str, str] | None:
    """The head, if no other kernel below its module comes after this one."""
    inside = tree.under[module]
    norms = {n.sizes[0] for n in inside if n.is_norm and len(n.sizes) == 1}
    kernels = [n for n in inside if len(n.sizes) > 1 and not n.is_bias]
    kernels = [n for n in kernels if "lora" not in n.path.lower()]
    own = [
        n for n in kernels if all(map(_is_transparent, n.owner_parts[len(module) :]))
    ]
    if node.sizes[-1] in norms and node.sizes[0] == node.sizes[-1]:
        return None  # a norm follows: the head proper is a table that is used twice
    reason = f"the output layer, by the name {module[-1]!r}"
    if node in own and _comes_last(own) is not node and _leads_on(node, own):
        return None
    return "head", reason


def _leads_on(node: Node, kernels: list[Node]) -> bool:
    """Whether another kernel takes what this one gives; heads side by side do not."""
    return any(
        node.sizes[-1] == other.sizes[-2] or node.sizes[-2] == other.sizes[-1]
        for other in kernels
        if other is not node
    )


def _comes_last(kernels: list[Node]) -> Node:
    named = [
        node for node in kernels if words.HEAD_ENDS & {*paths.words(_module(node))}
    ]
    if named:
        return named[-1]
    return max(kernels, key=lambda node: (_numbers(node), kernels.index(node)))


def _module(node: Node) -> str:
    return node.owner_parts[-1]


def _numbers(node: Node) -> tuple[int, ...]:
    """The numbers in a path, in their order."""
    digits = "".join(c if c.isdigit() else " " for c in node.path)
    return tuple(int(number) for number in digits.split())


def _rows_of_a_table(tree: Tree, node: Node) -> int | None:
    """The vocabulary, if a kernel outside the layers leads to it from its table."""
    if len(node.sizes) != 2 or node.batch or any(part.isdigit() for part in node.parts):
        return None
    for other in tree.tables:
        rows, *width = other.sizes or (0,)
        if len(width) == 1 and rows > 4 * width[0] and {*node.sizes} == {rows, *width}:
            return rows
    return None


def _is_at_the_top(tree: Tree, node: Node) -> bool:
    """Whether a module with a name such as "fc" lies outside all layers.

    It has no numbered sibling, and no query stands beside it.
    """
    owner = [part for part in node.owner_parts if part != "params"]
    name = owner[-1].lower()
    outermost = node.owner_parts[:-1] == tree.root and name in words.OUTERMOST_HEADS
    if node.batch or len(node.sizes) != 2:
        return False
    if not outermost and name not in words.WEAK_HEADS:
        return False
    if any(part.isdigit() or paths.words(part)[-1:] in _LAYERS for part in owner[:-1]):
        return False
    attention = words.QUERY | words.FUSED | words.KEY_VALUE
    for other in tree.beside(node):
        title = words.core(tree.module(other)[-1])
        if other is not node and title in attention:
            return False
        beside = other.owner_parts[-1].lower()
        if beside != name == beside.rstrip("0123456789_"):
            return False
    return not (node.sizes[0] == node.sizes[1] or node.sizes[1] in tree.streams)


_LAYERS = (["layer"], ["layers"], ["block"], ["blocks"], ["attention"], ["mlp"])
