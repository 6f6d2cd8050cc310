"""What stands where in a tree: the leaves of a model, as nodes among neighbours.

Nothing is decided here. A `Node` is one leaf with the words of its path; a `Tree` finds
the bias beside a node, the modules beside its module, the norms around it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_muon import paths
from jax_muon.reading import words

Shape = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Node:
    """One leaf: what its path says, and which of its axes are layers or experts."""

    index: int
    path: str
    shape: Shape
    dtype: Any
    names: tuple[str | None, ...] | None
    parts: tuple[str, ...]  # the path, without the index of a box around the leaf
    is_bias: bool  # by its name, or by that of a kernel beside it
    batch: tuple[int, ...] = ()
    batch_reason: str = ""
    chooses: bool = False  # whether experts beside it were told by it

    @property
    def name(self) -> str:
        """The last component: "kernel", "bias", "wi_0"."""
        return self.parts[-1]

    @property
    def native(self) -> tuple[int, ...]:
        """The axes that are neither layers nor experts."""
        return tuple(i for i in range(len(self.shape)) if i not in self.batch)

    @property
    def sizes(self) -> Shape:
        """The sizes of the native axes."""
        return tuple(self.shape[axis] for axis in self.native)

    @functools.cached_property
    def own_words(self) -> list[str]:
        """Words of the leaf's name."""
        return paths.words(self.name)

    @functools.cached_property
    def owner_parts(self) -> tuple[str, ...]:
        """The module: the path without a name that says only "kernel" or "bias"."""
        plain = words.GENERIC | words.BIAS | words.SCALE | {"embedding", "embeddings"}
        generic = self.name.lower() in plain
        return self.parts[:-1] if generic and len(self.parts) > 1 else self.parts

    @functools.cached_property
    def title(self) -> str:
        """The module's name in lower case, without numbers and containers around it."""
        for part in reversed(self.owner_parts):
            if part.isdigit() or "_".join(paths.words(part)) in words.CONTAINERS:
                continue
            return "_".join(paths.words(part)) or part.lower()
        return ""

    @functools.cached_property
    def role_title(self) -> str:
        """`title`, or that of the module above where it says only "dense"."""
        skipped = words.CONTAINERS | words.PLAIN
        for part in reversed(self.owner_parts):
            title = "_".join(paths.words(part))
            if title and title not in skipped:
                return title
        return self.title

    @functools.cached_property
    def core(self) -> str:
        """`role_title` without the words around the name of a projection."""
        return words.core(self.role_title)

    @functools.cached_property
    def title_words(self) -> list[str]:
        """Words of `title`."""
        return self.title.split("_")

    @property
    def is_norm(self) -> bool:
        """Whether this is the scale or bias of a norm, by its name and module."""
        if self.name == "kernel":
            return False
        last = self.title_words[-1:] if self.owner_parts != self.parts else []
        first = self.title_words[:1] if len(self.shape) == 1 else []
        named = {*self.own_words[-1:], *last, *first} & words.NORM
        if len(self.shape) > 1 and words.ADAPTIVE & {*self.title_words}:
            named = set()  # the kernel that makes the scales of a norm: adaLN/weight
        is_scale = self.name.lower() in words.SCALE
        if self.name.lower() == "g" and len(self.shape) > 1:
            is_scale = False  # a gate, if its module is not a norm
        return is_scale or bool(named)


def nodes_of(leaves: Sequence[Any]) -> list[Node]:
    """The nodes of all leaves, under names that say more.

    The index of a box around a leaf is left out. `in_proj_weight` beside a bias, and
    `query_w` in a module that has pairs `gate_w` and `gate_b`, are read as
    `in_proj/weight` and `query/w` are. Factors `lora/a` are read as `lora/lora_a`,
    since a `b` is a bias.
    """
    ranks = {leaf.path: len(leaf.shape) for leaf in leaves}
    # `rel_pos_w` elsewhere is the table of a width.
    haiku = {path.rpartition("/")[0] for path in ranks if _is_beside_w(path, ranks)}
    return [_node(index, leaf, ranks, haiku) for index, leaf in enumerate(leaves)]


def _is_beside_w(path: str, ranks: Mapping[str, int]) -> bool:
    """Whether this is the `gate_b` of a `gate_w`, or the `bq` of a `wq`."""
    around, slash, name = path.rpartition("/")
    kernel = name[:-1] + "w" if name.endswith("_b") else "w" + name[1:]
    is_b = name.endswith("_b") or name.startswith("b")
    return is_b and ranks[path] < ranks.get(f"{around}{slash}{kernel}", 0)


def _node(index: int, leaf: Any, ranks: Mapping[str, int], haiku: set[str]) -> Node:
    parts = leaf.path.split("/")
    while len(parts) > 1 and parts[-1].isdigit():
        parts = parts[:-1]
    *around, name = parts
    stem, _, end = name.rpartition("_")
    is_b = _is_beside_w(leaf.path, ranks)
    written = (end == "w" or is_b) and "/".join(around) in haiku
    if around[-1:] == ["lora"] and name in words.OTHER_FACTOR:
        parts = [*around, f"lora_{name}"]
    elif stem and (written or f"{leaf.path[: -len(end)]}bias" in ranks):
        parts = [*around, stem, end]
    is_bias = is_b or parts[-1].lower() in words.BIAS or end in ("bias", "biases")
    names = None if leaf.names is None else tuple(leaf.names)
    shape = tuple(leaf.shape)
    return Node(index, leaf.path, shape, leaf.dtype, names, tuple(parts), is_bias)


class Tree:
    """All leaves of a model, and which stand beside which."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = list(nodes)
        self.under: dict[tuple[str, ...], list[Node]] = {}
        self.children: dict[tuple[str, ...], dict[str, None]] = {}
        for node in self.nodes:
            for depth in range(len(node.parts) + 1):
                self.under.setdefault(node.parts[:depth], []).append(node)
                if depth < len(node.parts):
                    inside = self.children.setdefault(node.parts[:depth], {})
                    inside[node.parts[depth]] = None

    @functools.cached_property
    def by_path(self) -> dict[str, Node]:
        """All nodes by the path of their leaf."""
        return {node.path: node for node in self.nodes}

    @functools.cached_property
    def root(self) -> tuple[str, ...]:
        """The modules around the whole model, such as ("params",)."""
        root: tuple[str, ...] = ()
        while len(self.children.get(root, ())) == 1:
            root = (*root, *self.children[root])
        return root

    @functools.cached_property
    def tables(self) -> list[Node]:
        """Embedding tables, by the name of the leaf or of the module above it."""
        names = ("embedding", "input_embedding", "embeddings", "token_embeddings")
        return [
            node
            for node in self.nodes
            if node.name in names
            or (
                node.name != "kernel"
                and len(node.parts) > 1
                and words.EMBEDDING & {*paths.words(node.parts[-2])}
            )
        ]

    def bias_of(self, node: Node) -> Node | None:
        """The bias beside a kernel: `bias` or `b`, or `wi_0_bias` beside `wi_0`."""
        *around, name = node.parts
        beside = [(*around, "bias"), (*around, "b")]
        if node.owner_parts == node.parts:
            beside = [(*around, f"{name}_bias"), (*around, f"b{name[1:]}")]
        elif around:
            beside += [(*around[:-1], f"{around[-1]}_bias")]
        for parts in beside:
            for other in self.under.get(parts, ()):
                if other.is_bias and other.parts == parts:
                    return other
        return None

    def beside(self, node: Node) -> Iterator[Node]:
        """Kernels of the modules that stand beside the node's module, it included."""
        module = self.module(node)
        for other in self.under[module[:-1]]:
            if not other.is_bias and not other.is_norm:
                shorter = self.module(other)
                if len(shorter) == len(module) and shorter[:-1] == module[:-1]:
                    yield other

    def module(self, node: Node) -> tuple[str, ...]:
        """The module of a node, without the plain modules and numbers below it."""
        parts = node.owner_parts
        while len(parts) > 1 and (
            parts[-1].isdigit()
            or "_".join(paths.words(parts[-1])) in words.PLAIN | {"lora"}
        ):
            parts = parts[:-1]
        return parts

    @functools.cached_property
    def widths(self) -> dict[tuple[str, ...], set[int]]:
        """Widths of the norms below every module, by path."""
        found: dict[tuple[str, ...], set[int]] = {}
        for node in self.nodes:
            if node.is_norm and len(node.sizes) == 1:
                for depth in range(len(node.parts)):
                    found.setdefault(node.parts[:depth], set()).add(node.sizes[0])
        return found

    def widths_near(self, node: Node) -> set[int]:
        """Widths of the norms in the nearest module around a node that has any."""
        for depth in range(len(node.parts) - 1, -1, -1):
            if found := self.widths.get(node.parts[:depth]):
                return found
        return set()

    def widths_around(self, node: Node) -> Iterator[set[int]]:
        """Widths of the norms in every module around a node, from the inside out."""
        for depth in range(len(node.parts) - 1, -1, -1):
            yield self.widths.get(node.parts[:depth], set())

    @functools.cached_property
    def streams(self) -> set[int]:
        """Widths of the model: those of its embedding tables and outermost norms."""
        norms = [n for n in self.nodes if n.is_norm and len(n.sizes) == 1]
        tables = [node for node in self.tables if len(node.sizes) == 2]
        if not norms:
            return {node.sizes[1] for node in tables}
        least = min(len(node.parts) for node in norms)
        outer = {node.sizes[0] for node in norms if len(node.parts) == least}
        return outer | {node.sizes[1] for node in tables}

    def forget_widths(self) -> None:
        """Have the widths found anew, after nodes were given axes of layers."""
        for name in ("widths", "streams"):
            self.__dict__.pop(name, None)
