"""The model as a tree of nodes that can look up their neighbours. Decides nothing.

A `Node` is one leaf with the words of its path; a `Tree` finds the bias beside a node,
the modules beside its module, and the norms around it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_muon import paths
from jax_muon.reading import projections
from jax_muon.reading.names import vocabulary

Shape = tuple[int, ...]
Module = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of the tree."""

    path: str
    shape: Shape
    dtype: Any


@dataclasses.dataclass(eq=False)
class Node:
    """One leaf: what its path says, and which of its axes are layers or experts."""

    leaf: Leaf
    parts: tuple[str, ...]  # the path, normalized by `_node`
    is_bias: bool  # by its name, or by that of a kernel beside it
    batch: tuple[int, ...] = ()
    batch_reason: str = ""
    chooses: bool = False  # experts beside it were found by its outputs

    @property
    def path(self) -> str:
        """The path of the leaf."""
        return self.leaf.path

    @property
    def name(self) -> str:
        """The last component: "kernel", "bias", "wi_0"."""
        return self.parts[-1]

    @property
    def native(self) -> tuple[int, ...]:
        """The axes that are neither layers nor experts."""
        return tuple(i for i in range(len(self.leaf.shape)) if i not in self.batch)

    @property
    def sizes(self) -> Shape:
        """The sizes of the native axes."""
        return tuple(self.leaf.shape[axis] for axis in self.native)

    @functools.cached_property
    def own_words(self) -> list[str]:
        """Words of the leaf's name."""
        return paths.words(self.name)

    @functools.cached_property
    def is_generic(self) -> bool:
        """True if the leaf's name says only "kernel" or "bias"."""
        plain = vocabulary.GENERIC | vocabulary.BIAS | vocabulary.SCALE
        return self.name.lower() in plain and len(self.parts) > 1

    @property
    def owner(self) -> Module:
        """The module; a leaf with a name beyond "kernel" is one."""
        return self.parts[:-1] if self.is_generic else self.parts

    @functools.cached_property
    def title(self) -> str:
        """The module's name in lower case, without numbers and containers around it."""
        return self._title(vocabulary.CONTAINERS)

    @functools.cached_property
    def role_title(self) -> str:
        """`title`, or the title of the module above if it says only "dense"."""
        return self._title(vocabulary.CONTAINERS | vocabulary.PLAIN) or self.title

    def _title(self, skipped: set[str]) -> str:
        titles = ("_".join(paths.words(part)) for part in reversed(self.owner))
        return next((title for title in titles if title and title not in skipped), "")

    @functools.cached_property
    def core(self) -> str:
        """`role_title` without the words around the name of a projection."""
        return projections.core(self.role_title)

    @functools.cached_property
    def projection(self) -> str | None:
        """Which projection of attention it is: query, key, value, kv, qkv or out."""
        return projections.projection(self.role_title)

    @functools.cached_property
    def title_words(self) -> list[str]:
        """Words of `title`."""
        return self.title.split("_")

    @property
    def is_vector(self) -> bool:
        """True for at most one native axis."""
        return len(self.sizes) < 2

    @property
    def is_norm(self) -> bool:
        """True for the scale or bias of a norm, by its name and module."""
        name, is_array = self.name.lower(), len(self.leaf.shape) > 1
        if name == "kernel":
            return False
        if name in vocabulary.SCALE and not (name == "g" and is_array):  # or a gate
            return True
        if is_array and vocabulary.ADAPTIVE & {*self.title_words}:
            return False  # the kernel that makes the scales of a norm: adaLN/weight
        first = [] if is_array else self.title_words[:1]
        return bool({*self.title_words[-1:], *first} & vocabulary.NORM)


class Tree:
    """All leaves of a model, and their neighbours."""

    def __init__(self, leaves: Sequence[Leaf]):
        ranks = {leaf.path: len(leaf.shape) for leaf in leaves}
        paired = {path.rpartition("/")[0] for path in ranks if _is_beside(path, ranks)}
        self.nodes = [_node(leaf, ranks, paired) for leaf in leaves]
        self.by_path = {node.path: node for node in self.nodes}
        self.under: dict[Module, list[Node]] = {(): []}
        for node in self.nodes:
            for depth in range(len(node.parts) + 1):
                self.under.setdefault(node.parts[:depth], []).append(node)

    def children(self, module: Module) -> list[str]:
        """Names of the modules and leaves directly inside a module."""
        end = len(module)
        inside = (n.parts[end] for n in self.under[module] if len(n.parts) > end)
        return list(dict.fromkeys(inside))

    @functools.cached_property
    def root(self) -> Module:
        """The modules around the whole model, such as ("params",)."""
        root: Module = ()
        while len(inside := self.children(root)) == 1:
            root = (*root, *inside)
        return root

    @functools.cached_property
    def tables(self) -> list[Node]:
        """Embedding tables, by the name of the leaf or of the module above it."""

        def is_table(node: Node) -> bool:
            around = {*paths.words(node.parts[-2])} if len(node.parts) > 1 else set()
            by_module = node.name != "kernel" and around & vocabulary.EMBEDDING
            return node.name in vocabulary.TABLE or bool(by_module)

        return [node for node in self.nodes if is_table(node)]

    def bias_of(self, node: Node) -> Node | None:
        """The bias beside a kernel: `bias` or `b`, or `b1` beside `w1`."""
        *around, name = node.parts
        beside = [(*around, "bias"), (*around, "b")]
        if not node.is_generic:
            beside = [(*around, f"b{name[1:]}")]
        found = (n for parts in beside for n in self.under.get(parts, ()))
        return next((n for n in found if n.is_bias), None)

    def beside(self, node: Node) -> Iterator[Node]:
        """Kernels of the modules beside the node's module, its own included."""
        module = self.module(node)
        for other in self.under[module[:-1]]:
            if not other.is_bias and len(self.module(other)) == len(module):
                yield other

    def module(self, node: Node) -> Module:
        """The module of a node, without plain modules below it, as in `query/dense`."""
        parts, plain = node.owner, vocabulary.PLAIN | {"lora", ""}
        while len(parts) > 1 and "_".join(paths.words(parts[-1])) in plain:
            parts = parts[:-1]
        return parts

    @functools.cached_property
    def norms(self) -> list[Node]:
        """The norms, each of which has one width."""
        return [n for n in self.nodes if n.is_norm and len(n.sizes) == 1]

    @functools.cached_property
    def streams(self) -> set[int]:
        """Widths of the model, from its embedding tables and outermost norms."""
        tables = {node.sizes[1] for node in self.tables if len(node.sizes) == 2}
        least = min((len(node.parts) for node in self.norms), default=0)
        return tables | {n.sizes[0] for n in self.norms if len(n.parts) == least}

    def forget_norms(self) -> None:
        """Clear the cached norms, after nodes were given axes of layers."""
        for name in ("norms", "streams"):
            self.__dict__.pop(name, None)


def _is_beside(path: str, ranks: Mapping[str, int]) -> bool:
    """True for the `gate_b` of a `gate_w`, or the `bq` of a `wq`."""
    around, slash, name = path.rpartition("/")
    kernel = f"{name[:-1]}w" if name.endswith("_b") else f"w{name[1:]}"
    is_b = name.endswith("_b") or name.startswith("b")
    return is_b and ranks[path] < ranks.get(f"{around}{slash}{kernel}", 0)


def _node(leaf: Leaf, ranks: Mapping[str, int], paired: set[str]) -> Node:
    """A node, with the parts of its path normalized.

    The index of a box around a leaf is left out. `in_proj_weight` beside a bias, and
    `query_w` in a module that has pairs `gate_w` and `gate_b`, are read as
    `in_proj/weight` and `query/w` are. Factors `lora/a` are read as `lora/lora_a`,
    since a `b` is a bias.
    """
    parts = leaf.path.split("/")
    while len(parts) > 1 and parts[-1].isdigit():
        parts = parts[:-1]
    *around, name = parts
    stem, _, end = name.rpartition("_")
    is_b = _is_beside(leaf.path, ranks)
    # `rel_pos_w` in another module is the table of a width.
    written = (end == "w" or is_b) and "/".join(around) in paired
    if around[-1:] == ["lora"] and name in vocabulary.OTHER_FACTOR:
        parts = [*around, f"lora_{name}"]
    elif stem and (written or f"{leaf.path[: -len(end)]}bias" in ranks):
        parts = [*around, stem, end]
    return Node(leaf, tuple(parts), is_b or parts[-1].lower() in vocabulary.BIAS)
