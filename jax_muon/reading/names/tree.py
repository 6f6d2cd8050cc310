"""The model as a tree of nodes that can look up their neighbours. Decides nothing.

A `Node` is one leaf with the words of its path; a `Tree` finds the bias beside a node,
the modules beside its module, and the norms around it.
"""

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
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

    def __post_init__(self) -> None:
        self.native = tuple(range(len(self.leaf.shape)))  # axes that are no batch
        self.sizes = self.leaf.shape  # of the native axes

    def stack(self, places: Iterable[int], reason: str) -> None:
        """Make the native axes at these places a batch."""
        self.batch = (*self.batch, *(self.native[place] for place in places))
        self.batch_reason = reason
        axes = range(len(self.leaf.shape))
        self.native = tuple(axis for axis in axes if axis not in self.batch)
        self.sizes = tuple(self.leaf.shape[axis] for axis in self.native)

    @functools.cached_property
    def path(self) -> str:
        """The path of the leaf, with slashes alone."""
        return paths.slashed(self.leaf.path)

    @property
    def name(self) -> str:
        """The last component: "kernel", "bias", "wi_0"."""
        return self.parts[-1]

    @functools.cached_property
    def own_words(self) -> list[str]:
        """Words of the leaf's name."""
        return paths.words(self.name)

    @functools.cached_property
    def is_generic(self) -> bool:
        """True if the leaf's name says only "kernel", "weight_hh_l0" or "bias"."""
        plain = vocabulary.GENERIC | vocabulary.BIAS | vocabulary.SCALE
        says_kernel = self.own_words[:1] in (["weight"], ["kernel"])
        return len(self.parts) > 1 and (says_kernel or self.name.lower() in plain)

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

    @functools.cached_property
    def is_norm(self) -> bool:
        """True for the scale or bias of a norm, by its name and module."""
        name, is_array = self.name.lower(), len(self.leaf.shape) > 1
        if name == "kernel":
            return False
        names = {name, self.title} if self.is_generic else {name}
        if names & vocabulary.SCALE and not (name == "g" and is_array):  # or a gate
            return True
        if is_array and vocabulary.ADAPTIVE & {*self.title_words}:
            return False  # the kernel that makes the scales of a norm: adaLN/weight
        first = [] if is_array else self.title_words[:1]
        return bool({*self.title_words[-1:], *first} & vocabulary.NORM)


class Tree:
    """All leaves of a model, and their neighbours."""

    def __init__(self, leaves: Sequence[Leaf]):
        ranks = {paths.slashed(leaf.path): len(leaf.shape) for leaf in leaves}
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
            around = {*paths.words(node.parts[-2:][0])}  # its own, without a module
            by_module = node.name != "kernel" and around & vocabulary.EMBEDDING
            return node.name in vocabulary.TABLE or bool(by_module)

        return [node for node in self.nodes if is_table(node)]

    def bias_of(self, node: Node) -> Node | None:
        """The bias beside a kernel: `bias` or `b`, or `b1` beside `w1`."""
        *around, name = node.parts
        beside = [(*around, "bias"), (*around, "b")]
        if not node.is_generic:
            beside = [(*around, f"b{name[1:]}")]
        candidates = (n for parts in beside for n in self.under.get(parts, ()))
        return next((n for n in candidates if n.is_bias), None)

    def beside(self, node: Node) -> Sequence[Node]:
        """Kernels of the modules beside the node's module, its own included."""
        return self._kernels[self.module(node)[:-1]]

    def projections(self, node: Node) -> set[str | None]:
        """The projections of attention among the kernels beside a node."""
        return self._projections[self.module(node)[:-1]]

    def sizes_beside(self, node: Node, kinds: Container[str | None]) -> list[Shape]:
        """The sizes of these projections beside a node, each of them once."""
        beside = self._sizes[self.module(node)[:-1]]
        return [sizes for projection, sizes in beside if projection in kinds]

    @functools.cached_property
    def _projections(self) -> Mapping[Module, set[str | None]]:
        return {
            at: {n.projection for n in kernels} for at, kernels in self._kernels.items()
        }

    @functools.cached_property
    def _sizes(self) -> Mapping[Module, Iterable[tuple[str | None, Shape]]]:
        return {
            module: dict.fromkeys((n.projection, n.sizes) for n in kernels)
            for module, kernels in self._kernels.items()
        }

    @functools.cached_property
    def _kernels(self) -> Mapping[Module, list[Node]]:
        """The kernels of the modules that are directly inside a module."""
        by_module: dict[Module, list[Node]] = {
            self.module(n)[:-1]: [] for n in self.nodes
        }
        for node in self.nodes:
            if not node.is_bias:
                by_module[self.module(node)[:-1]].append(node)
        return by_module

    def module(self, node: Node) -> Module:
        """The module of a node, without plain modules below it, as in `query/dense`."""
        parts, plain = node.owner, vocabulary.PLAIN | {"lora", ""}
        while len(parts) > 1 and "_".join(paths.words(parts[-1])) in plain:
            parts = parts[:-1]
        return parts

    @functools.cached_property
    def stacks(self) -> dict[Module, int]:
        """Modules whose leaves may be stacked on the first or the second axis: on it.

        They differ in shape, but have that axis and its size in common, and half of
        them have three axes. The size is not a norm's width, and the smaller of two.
        """
        by_name = {}
        for module, inside in self.under.items():
            shapes = {n.leaf.shape for n in inside}
            stacked = sum(len(n.leaf.shape) > 2 for n in inside)
            if len(inside) < 3 or len(shapes) == 1 or 2 * stacked < len(inside):
                continue
            axes = zip(*(enumerate(shape[:2]) for shape in shapes), strict=False)
            shared = [
                (places[0][1], places[0][0]) for places in axes if len({*places}) == 1
            ]
            if least := min(
                (x for x in shared if x[0] not in self.widths), default=None
            ):
                by_name[module] = least[1]
        return by_name

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

    @functools.cached_property
    def widths(self) -> set[int]:
        """Widths of all norms."""
        return {norm.sizes[0] for norm in self.norms}

    def forget_norms(self) -> None:
        """Clear the cached norms, after nodes were given axes of layers."""
        for name in ("norms", "streams", "widths"):
            self.__dict__.pop(name, None)


def _is_beside(path: str, ranks: Mapping[str, int]) -> bool:
    """True for the `gate_b` of a `gate_w`, or the `bq` of a `wq`."""
    around, slash, name = path.rpartition("/")
    kernels = [f"w{name[1:]}", f"W{name[1:]}"]
    if name.endswith("_b"):
        kernels = [f"{name[:-1]}w"]
    elif not name.startswith("b"):
        return False
    return any(
        ranks[path] < ranks.get(f"{around}{slash}{kernel}", 0) for kernel in kernels
    )


def _pair(path: str, ranks: Mapping[str, int]) -> str | None:
    """What a member of a pair (W, b) is: "weight" or "bias"; None for other leaves."""
    layer, _, place = path.rpartition("/")
    kernel, bias = (ranks.get(f"{layer}/{x}", 0) for x in "01")
    is_pair = kernel > bias > 0 and f"{layer}/2" not in ranks
    return {"0": "weight", "1": "bias"}.get(place) if is_pair else None


def _node(leaf: Leaf, ranks: Mapping[str, int], paired: set[str]) -> Node:
    """A node, with the parts of its path normalized.

    The index of a box around a leaf is left out. `in_proj_weight` beside a bias, and
    `query_w` in a module that has pairs `gate_w` and `gate_b`, are read as
    `in_proj/weight` and `query/w` are, and so is the pair (W, b) of a layer in a list.
    Factors `lora/a` are read as `lora/lora_a`, since a `b` is a bias.
    """
    path = paths.slashed(leaf.path)
    parts = path.split("/")
    if (pair := _pair(path, ranks)) is not None:
        return Node(leaf, (*parts[:-1], pair), pair == "bias")
    while len(parts) > 1 and (parts[-1].isdigit() or parts[-1] in vocabulary.BOXES):
        parts = parts[:-1]
    *around, name = parts
    stem, _, end = name.rpartition("_")
    is_b = _is_beside(path, ranks)
    # `rel_pos_w` in another module is the table of a width.
    written = (end == "w" or is_b) and "/".join(around) in paired
    if around[-1:] == ["lora"] and name in vocabulary.OTHER_FACTOR:
        parts = [*around, f"lora_{name}"]
    elif stem and (written or f"{path[: -len(end)]}bias" in ranks):
        parts = [*around, stem, end]
    return Node(leaf, tuple(parts), is_b or parts[-1].lower() in vocabulary.BIAS)
