"""The reading of a whole tree: role, label and axes of every leaf, and why.

`read_leaves` is pure: it sees paths, shapes, dtypes and axis names, and no arrays. It
goes from what is certain to what is likely: axis names, then axes of layers, then
experts, then the role by words and neighbours, then the axes by role. Where nothing
tells, it says so in `Read.doubt` and does not guess.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_muon import paths
from jax_muon.axes import MatrixAxes, is_real
from jax_muon.checks import check_flag
from jax_muon.reading import names as axis_names
from jax_muon.reading import shapes
from jax_muon.reading.evidence import Node, Tree, nodes_of
from jax_muon.reading.experts import find_experts
from jax_muon.reading.kinds import is_bare, role_of
from jax_muon.reading.layers import find_layers
from jax_muon.reading.orientation import Orientation
from jax_muon.reading.shapes import Places

MUON = "muon"
ADAMW = "adamw"

# Role to label; every other role is a matrix and goes to Muon.
LABELS: Mapping[str, str] = {
    "embedding": ADAMW,
    "head": ADAMW,
    "norm": ADAMW,
    "bias": ADAMW,
    "vector": ADAMW,
    "router": ADAMW,
    "depthwise": ADAMW,
}

# True for kernels (out, in), False for (in, out), None to look at the tree; or a
# function of the path that gives one of these.
OutIn = bool | None | Callable[[str], bool | None]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter, as it stands in the tree."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] | None = None  # logical axis names


@dataclasses.dataclass(frozen=True)
class Read:
    """What is made of one parameter."""

    role: str
    reason: str
    label: str
    axes: MatrixAxes | None  # as matrices; None where it cannot be read so
    doubt: str | None = None  # why it is not read, and what a user writes


def read_leaves(
    leaves: Sequence[Leaf],
    *,
    out_in: OutIn = None,
    table: axis_names.Table | None = None,
    strict_names: bool = False,
) -> list[Read]:
    """Read all leaves of a model, each in view of all others.

    Args:
      leaves: every parameter of the model, in any order.
      out_in: whether kernels of two axes are (out, in), as in PyTorch and equinox.
        None looks at biases and at names of projections.
      table: the user's axis names, to one of `names.KINDS`; they come before what the
        words of a name say.
      strict_names: whether a name of unknown kind is an error; those of a mesh, such
        as "fsdp", are not.

    Returns:
      One `Read` a leaf, in their order.

    Raises:
      ValueError: for a table with unknown kinds, and for unknown names where
        `strict_names`.
    """
    known = axis_names.check_table(table)
    nodes = nodes_of(leaves)
    if strict_names:
        axis_names.check_kinds(nodes, known)
    tree = Tree(nodes)
    unnamed = []
    for node in nodes:
        kinds = axis_names.kinds_of(node, known)
        if kinds is None:
            unnamed.append(node)
            continue
        node.batch = tuple(i for i, kind in enumerate(kinds) if kind == "batch")
        node.batch_reason = ", ".join(str(node.names[i]) for i in node.batch)  # type: ignore[index]
    if unnamed:
        named = {node.index: node.batch for node in nodes if node not in unnamed}
        _find_layers_of(tree, unnamed, named)
    find_experts(tree)
    tree.forget_widths()
    roles = [_role(tree, node, known) for node in nodes]
    silent = {i for i, (role, _) in enumerate(roles) if LABELS.get(role) == ADAMW}
    reader = _Reader(tree, known, out_in, Orientation(tree, silent))
    return _agreeing(nodes, [reader.read(node, *roles[node.index]) for node in nodes])


def axes_of_layers(tree: Any) -> dict[str, tuple[int, ...]]:
    """Axes of layers by path, as names of modules and shapes show them."""
    nodes = nodes_of(
        [
            Leaf(path, tuple(leaf.shape), leaf.dtype)
            for path, leaf in paths.leaves_with_paths(tree)
        ]
    )
    find_layers(Tree(nodes))
    return {node.path: node.batch for node in nodes}


def _agreeing(nodes: list[Node], reads: list[Read]) -> list[Read]:
    """The same, with a doubt for leaves of several layers that are read differently.

    Leaves are of one kind where their paths differ by numbers alone and their shapes
    not at all, as `blocks/0/up` and `blocks/1/up` of one width.
    """
    first: dict[Any, int] = {}
    doubts: dict[int, Read] = {}
    for node, read in zip(nodes, reads, strict=True):
        if read.doubt is not None:
            continue
        kind = (re.sub(r"\d+", "0", node.path), node.shape)
        other = first.setdefault(kind, node.index)
        if reading(read) == reading(reads[other]):
            continue
        for one, beside in ((node.index, other), (other, node.index)):
            text = (
                f"it would be {reading(reads[one])} ({reads[one].reason}), and "
                f"{nodes[beside].path!r} of the same shape "
                f"{reading(reads[beside])} ({reads[beside].reason})"
            )
            doubts[one] = dataclasses.replace(
                reads[one], label=MUON, axes=None, doubt=_doubt(nodes[one], text)
            )
    return [doubts.get(index, read) for index, read in enumerate(reads)]


def reading(read: Read) -> str:
    """The label, and the axes of a matrix as a user would write them."""
    if read.label == ADAMW or read.axes is None:
        return repr(read.label)
    return f"{read.label!r} by {_written(read.axes.reduction, read.axes.output)}"


def _find_layers_of(
    tree: Tree, unnamed: list[Node], named: dict[int, tuple[int, ...]]
) -> None:
    """Axes of layers of the leaves without names, in view of those with names."""
    before = {node.index: (node.batch, node.batch_reason) for node in tree.nodes}
    for node in tree.nodes:
        node.batch, node.batch_reason = (), ""
    find_layers(tree)
    for node in tree.nodes:
        if node.index in named:
            node.batch, node.batch_reason = before[node.index]


def _role(tree: Tree, node: Node, known: axis_names.Table) -> tuple[str, str]:
    kinds = axis_names.kinds_of(node, known) or []
    named = f"its axes are named {node.names}"
    if axis_names.NORM in kinds:
        return "norm", named
    if axis_names.POSITION in kinds:
        return "embedding", named
    if axis_names.VOCAB in kinds and len(node.sizes) == 2:
        table = role_of(tree, node)[0] == "embedding"
        return ("embedding" if table else "head"), named
    return role_of(tree, node)


class _Reader:
    """Gives the axes of one leaf after the other."""

    def __init__(
        self,
        tree: Tree,
        known: axis_names.Table,
        out_in: OutIn,
        orientation: Orientation,
    ):
        self.tree = tree
        self.known = known
        self.out_in = out_in
        self.orientation = orientation

    def read(self, node: Node, role: str, reason: str) -> Read:
        label = LABELS.get(role, MUON)
        if len(node.shape) < 2 or 0 in node.shape or not is_real(node.dtype):
            return Read(role, reason, ADAMW, None)
        if node.names and len(node.names) != len(node.shape) and label == MUON:
            text = (
                f"its {len(node.names)} axis names {node.names} are too few or too many"
            )
            return Read(role, reason, label, None, _doubt(node, text))
        if len(node.sizes) < 2:
            end = len(node.shape)
            axes = MatrixAxes(tuple(range(end - 2)), (end - 2,), (end - 1,))
            return Read(role, reason, label, axes)
        places = self._places(node, role, label)
        if isinstance(places, str):
            return Read(role, reason, label, None, _doubt(node, places))
        if places.role and label == MUON:
            role, reason = places.role, places.reason
        elif places.reason:
            reason = f"{reason}; {places.reason}" if reason else places.reason
        label, axes, doubt = LABELS.get(role, MUON), _axes(node, places), None
        single = label == MUON and role != "lora" and 1 in axes.fan(node.shape)
        if single and is_bare(self.tree, node):
            doubt = _doubt(node, "a matrix with one row or column is a vector")
        return Read(role, reason, label, axes, doubt)

    def _places(self, node: Node, role: str, label: str) -> Places | str:
        found = axis_names.places_by_name(self.tree, node, self.known)
        if found is None and len(node.sizes) == 2:
            return self._two_axes(node, role, label)
        found = found or shapes.places_of(self.tree, node, role)
        if found is not None:
            text = self._contradiction(node, found) if label == MUON else None
            return text or found
        if label == ADAMW:
            end = len(node.sizes)
            return Places(tuple(range(end - 2)), (end - 2,), (end - 1,), "")
        if role == "convolution":
            return "its window cannot be told from scanned layers"
        return "nothing around it tells which of its axes are batch, in and out"

    def _contradiction(self, node: Node, places: Places) -> str | None:
        """A doubt, where the bias beside a kernel has another size than its outputs."""
        bias = self.tree.bias_of(node)
        output = tuple(node.sizes[place] for place in places.output)
        if bias is None or not bias.sizes or {*output} <= {*bias.shape}:
            return None
        return (
            f"{places.reason}, which makes {output} its outputs, and the bias "
            f"{bias.path!r} beside it has shape {bias.shape}"
        )

    def _two_axes(self, node: Node, role: str, label: str) -> Places | str:
        flipped = self.out_in(node.path) if callable(self.out_in) else self.out_in
        if flipped is not None:
            check_flag(f"out_in({node.path!r})", flipped)
        reason = ""
        if label == MUON and flipped is not None:
            beside, bias = self.orientation.by_bias(node), self.tree.bias_of(node)
            if bias is not None and beside not in (None, flipped):
                return (
                    f"out_in={flipped} makes its outputs "
                    f"{node.sizes[0 if flipped else 1]}, and the bias {bias.path!r} "
                    f"beside it has shape {bias.shape}"
                )
        if flipped is None and role == "lora":
            found = shapes.lora(self.tree, node)
            if found is not None:
                return found
        elif flipped is None and role not in ("embedding", "vector"):
            flipped, reason = self.orientation.of(node)
            if flipped is None and label == MUON:
                return (
                    "nothing tells whether it is (in, out) or (out, in), which out_in "
                    "says for all"
                )
        fan_in, fan_out = (1, 0) if flipped else (0, 1)
        return Places((), (fan_in,), (fan_out,), reason)


def _axes(node: Node, places: Places) -> MatrixAxes:
    native = node.native
    matrix = [native[place] for place in (*places.reduction, *places.output)]
    batch = tuple(i for i in range(len(node.shape)) if i not in matrix)
    count = len(places.reduction)
    return MatrixAxes(batch, tuple(matrix[:count]), tuple(matrix[count:]))


def _doubt(node: Node, text: str) -> str:
    """The readings there are, and the line that chooses the first of them."""
    shape, end = node.shape, len(node.shape)
    readings = []
    for batch in range(end - 1):
        for cut in {batch + 1, end - 1}:
            fan_in, fan_out = math.prod(shape[batch:cut]), math.prod(shape[cut:])
            count = math.prod(shape[:batch])
            numbers = _written(range(batch, cut), range(cut, end))
            readings.append(f"{count} x ({fan_in}, {fan_out}) by {numbers}")
    if end == 2:
        readings.append(f"1 x ({shape[1]}, {shape[0]}) by {_written([1], [0])}")
    last = readings[0].split(" by ")[1]
    return (
        f"parameter {node.path!r} of shape {shape}: {text}; it could be read as "
        f"{', or as '.join(readings)}; expected rules such as "
        f"{{{node.path!r}: {last}}} or {{{node.path!r}: 'adamw'}}"
    )


def _written(reduction: Iterable[int], output: Iterable[int]) -> str:
    """Dimension numbers as a user writes them."""
    sides = [
        axes if len(axes) > 1 else axes[0] for axes in map(tuple, (reduction, output))
    ]
    return f"MuonDimensionNumbers({sides[0]}, {sides[1]})"
