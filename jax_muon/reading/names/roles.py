"""The role of a parameter, from the words of its path and its neighbours.

`RULES` are asked in their order, and the first that gives a role decides. Each gives
the role with the reason that users are shown.
"""

import re
from collections.abc import Callable

from jax_muon import axes, paths
from jax_muon.reading.names import vocabulary
from jax_muon.reading.names.tree import Module, Node, Tree
from jax_muon.reading.projections import ATTENTION

Role = tuple[str, str]
Rule = Callable[[Tree, Node], Role | None]

# Windows of the depthwise convolutions of recurrent layers are not longer than this.
LONGEST_FILTER = 8


def role_of(tree: Tree, node: Node) -> Role:
    """The role of a leaf whose axes of layers are known, and why."""
    answers = (rule(tree, node) for rule in RULES)
    return next(filter(None, answers), ("kernel", "a matrix (in, out)"))


# --- words that several rules ask for -------------------------------------------------


def in_attention(tree: Tree, node: Node) -> bool:
    """True with attention in the path, or a query beside: MLPs also have `wo`, `v`."""
    named = any(ATTENTION & {*paths.words(part)} for part in node.parts)
    return named or not tree.projections(node) <= {"value", "out", None}


def is_convolution(node: Node) -> bool:
    """True if the module is called a convolution.

    ConvLocal is not one: it has a matrix (window and in, out) for each place.
    """
    named = {*node.title_words, *node.own_words}
    return bool(vocabulary.CONVOLUTION & named) and "local" not in named


# --- vectors --------------------------------------------------------------------------


def _not_real(tree: Tree, node: Node) -> Role | None:
    if axes.is_real(node.leaf.dtype) and 0 not in node.leaf.shape:
        return None
    return "vector", "it is empty or not of real numbers"


def _bias(tree: Tree, node: Node) -> Role | None:
    return ("bias", "a bias") if node.is_bias else None


def _norm(tree: Tree, node: Node) -> Role | None:
    return ("norm", "a norm") if node.is_norm else None


def _vector(tree: Tree, node: Node) -> Role | None:
    stacked = f"; {node.batch_reason}" if node.batch else ""
    return ("vector", f"a vector{stacked}") if node.is_vector else None


def _lora(tree: Tree, node: Node) -> Role | None:
    """Factors of LoRA, which take the role of the adapted kernel."""
    if not any("lora" in paths.words(part) for part in node.parts[-2:]):
        return None
    return _head(tree, node) or _table(tree, node) or ("lora", "a factor of LoRA")


def _state_space(tree: Tree, node: Node) -> Role | None:
    """The matrices of S4, S5 and Mamba, whose products are no matrix products."""
    name = node.name.lower()
    skip = tree.under.get((*node.parts[:-1], "D"), ())
    beside_a_skip = any(other.is_vector for other in skip)
    named = "_".join(node.own_words) in vocabulary.STATE_SPACE or name in ("d", "ds")
    if named or (name.rstrip("0123456789s") in ("b", "c") and beside_a_skip):
        return "vector", f"{node.name!r} of a state-space layer is not a matrix"
    return None


def _named_vector(tree: Tree, node: Node) -> Role | None:
    projects = vocabulary.PROJECTION & {*node.own_words[-1:]}
    if projects or vocabulary.VECTOR.isdisjoint(node.own_words):
        return None
    return "vector", f"{node.name!r} is not a kernel, by its name"


def _single_line(tree: Tree, node: Node) -> Role | None:
    """A matrix with one row or column has no more directions than a vector."""
    if sum(size > 1 for size in node.sizes) > 1:
        return None
    return "vector", "all axes but one have size 1"


# --- tables, heads and routers --------------------------------------------------------


def _table(tree: Tree, node: Node) -> Role | None:
    title, is_kernel = {*node.title_words}, node.name == "kernel"
    if {*node.own_words[-1:]} & (vocabulary.TABLE | {"table"}):
        return "embedding", "an embedding table: rows are looked up, not multiplied"
    raw = not node.is_generic or "embed" in node.title
    if title & vocabulary.POSITION and raw and not is_kernel:
        return "embedding", "positions are looked up, they do not multiply"
    # `embed_linear` and `patch_embed/kernel` are, `time_embed_proj` is not.
    whole = title <= vocabulary.EMBEDDING | vocabulary.EMBEDDED
    named = title & vocabulary.EMBEDDING and not title & vocabulary.TIME
    if named and (whole or not (is_kernel or title & vocabulary.PROJECTION)):
        return "embedding", "an embedding, by its name"
    return None


def _head(tree: Tree, node: Node) -> Role | None:
    """The kernel that gives the outputs of a model, or of a small network on top."""
    for depth, part in enumerate(node.owner):
        inside = node.owner[depth + 1 :]
        if _is_head(part) and all(map(_is_transparent, inside)):
            return _last_of(tree, node, node.parts[: depth + 1])
    if _is_at_the_top(tree, node):
        return "head", f"{node.title!r} outside the layers gives the outputs"
    if (rows := _rows_of_a_table(tree, node)) is not None:
        return "head", f"its {rows} outputs are the rows of the embedding table"
    return None


def _is_head(part: str) -> bool:
    words = paths.words(part)
    if not words or words[0] in vocabulary.NO_HEAD:
        return False
    return words[-1] in vocabulary.HEAD_LAST or bool({*words} & vocabulary.HEAD)


def _is_transparent(part: str) -> bool:
    """True if a module inside a head is one of its layers."""
    words = {*paths.words(part)}
    return "lora" in words or words <= vocabulary.HEAD_PARTS


def _last_of(tree: Tree, node: Node, module: Module) -> Role | None:
    """The head, if no other kernel below its module comes after this one."""
    inside = tree.under[module]
    norms = {n.sizes for n in inside if n.is_norm}
    if node.sizes[:1] == node.sizes[1:] and node.sizes[:1] in norms:
        return None  # a norm follows: the head proper is a table that is used twice
    kernels = [
        n
        for n in inside
        if not n.is_vector
        and "lora" not in n.path.lower()
        and all(map(_is_transparent, n.owner[len(module) :]))
    ]
    last = _comes_last(kernels)
    leads_on = any(
        node.sizes[-1] == n.sizes[-2] or node.sizes[-2] == n.sizes[-1] for n in kernels
    )
    if node in kernels and node is not last and leads_on:
        return None  # heads side by side do not lead on to each other
    return "head", f"the output layer, by the name {module[-1]!r}"


def _comes_last(kernels: list[Node]) -> Node | None:
    """The kernel with the name of an output, or else with the highest number."""

    def place(node: Node) -> tuple[bool, list[int]]:
        named = bool(vocabulary.HEAD_ENDS & {*paths.words(node.owner[-1])})
        return named, [int(x) for x in re.findall(r"\d+", node.path)]

    return max(reversed(kernels), key=place, default=None)


def _is_at_the_top(tree: Tree, node: Node) -> bool:
    """True for a module with a name such as "fc" outside all layers.

    It has no numbered sibling, and no query beside it.
    """
    *around, last = node.owner
    name, outermost = last.lower(), node.owner[:-1] == tree.root
    known = vocabulary.WEAK_HEADS | (vocabulary.OUTERMOST_HEADS if outermost else set())
    if name not in known or node.batch or len(node.sizes) != 2:
        return False
    if any(
        part.isdigit() or vocabulary.INSIDE & {*paths.words(part)[-1:]}
        for part in around
    ):
        return False
    for other in tree.beside(node):
        if other is not node and other.projection not in ("out", None):
            return False
        sibling = other.owner[-1].lower()
        if sibling != name == sibling.rstrip("0123456789_"):
            return False
    return not (node.sizes[0] == node.sizes[1] or node.sizes[1] in tree.streams)


def _rows_of_a_table(tree: Tree, node: Node) -> int | None:
    """The vocabulary, if a kernel outside the layers leads to it from its table."""
    for table in tree.tables:
        if sorted(node.sizes) == sorted(table.sizes) and len(table.sizes) == 2:
            rows, width = table.sizes
            if rows > 4 * width and not node.batch:
                return rows
    return None


def _router(tree: Tree, node: Node) -> Role | None:
    if any(paths.words(part)[-1:] == ["router"] for part in node.parts):
        return "router", "part of a router"
    if node.chooses:
        return "router", "it has an output for each expert beside it"
    for depth, part in enumerate(node.parts):
        if paths.words(part) not in (["gate"], ["gating"]):
            continue
        for other in tree.under[node.parts[:depth]]:
            name = other.parts[depth] if len(other.parts) > depth else part
            if vocabulary.EXPERTS & {*paths.words(name)}:
                return "router", f"a gate beside {name!r}"
            counts = {other.leaf.shape[axis] for axis in other.batch}
            fits = counts & {*node.sizes} and {*other.sizes} & {*node.sizes}
            if fits and len(node.sizes) == 2:
                return "router", f"a gate with an output for each expert of {name!r}"
    return None


# --- by the name of the module --------------------------------------------------------


def _depthwise(tree: Tree, node: Node) -> Role | None:
    named, is_array = {*node.title_words, *node.own_words}, len(node.sizes) > 2
    if is_array and vocabulary.DEPTHWISE & named:
        return "depthwise", "a filter for each channel, by its name"
    if is_array and vocabulary.GROUPED & named and is_convolution(node):
        return "depthwise", "a convolution in groups, by its name"
    if node.name == "weight_v":
        return "depthwise", "the direction of a kernel under weight normalization"
    if not is_array and is_convolution(node):
        window, channels = node.sizes
        if window <= LONGEST_FILTER < channels:
            return "depthwise", f"a filter of {window} for each channel, by its name"
    return None


def _convolution(tree: Tree, node: Node) -> Role | None:
    if len(node.sizes) > 2 and is_convolution(node):
        return "convolution", f"a convolution, by the name {node.title!r}"
    return None


def _attention(tree: Tree, node: Node) -> Role | None:
    part = node.projection
    if part is None or not in_attention(tree, node):
        return None
    return part, f"a projection of attention, by the name {node.role_title!r}"


def _expert(tree: Tree, node: Node) -> Role | None:
    return ("expert", node.batch_reason) if "expert" in node.batch_reason else None


RULES: list[Rule] = [
    _not_real,
    _bias,
    _norm,
    _vector,
    _lora,
    _state_space,
    _named_vector,
    _single_line,
    _table,
    _head,
    _router,
    _depthwise,
    _convolution,
    _attention,
    _expert,
]
