"""The decision about one parameter: its label, its axes and why, or a doubt.

If nothing in the tree decides, `Parameter.doubt` says so, and `Parameter.options` are
the possible readings.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_muon import axes as matrix_axes
from jax_muon import paths
from jax_muon.axes import ADAMW, MUON, MatrixAxes, Parameter
from jax_muon.reading.names import roles, shapes, vocabulary
from jax_muon.reading.names.shapes import Places
from jax_muon.reading.names.tree import Module, Node, Tree
from jax_muon.reading.projections import PROJECTIONS


@dataclasses.dataclass
class Decider:
    """What all decisions about one tree share."""

    tree: Tree
    roles: Mapping[Node, roles.Role]
    out_in: bool | None  # None: as the tree shows

    def parameter(self, node: Node) -> Parameter:
        """The decision about one leaf."""
        leaf, (role, reason) = node.leaf, self.roles[node]
        label, axes, doubt = _label(role), None, None
        options: Sequence[MatrixAxes | None] = ()
        if matrix_axes.not_a_matrix(leaf.shape, leaf.dtype):
            label = ADAMW
        elif isinstance(places := self._places(node, role), str):
            doubt, options = places, self._options(node)
        else:
            axes = _axes(node, places)
            if label == MUON:
                reason = "; ".join(filter(None, (reason, places.reason)))
                role, label = places.role or role, _label(places.role or role)
        return Parameter(
            leaf.path,
            leaf.shape,
            leaf.dtype,
            label=label,
            role=role,
            reason=reason,
            axes=axes,
            doubt=doubt,
            options=tuple(options),
        )

    def _places(self, node: Node, role: str) -> Places | str:
        """The axes of batch, in and out, or why they are unknown."""
        end, is_matrix = len(node.sizes), _label(role) == MUON
        places: Places | str | None = None
        if end == 2:
            places = self._two_axes(node, role)
            if self._by_bias(node) is None:
                return places  # no bias, or one that fits neither side, or both
        elif end > 2:
            places = shapes.places_of(self.tree, node, role)
        if isinstance(places, Places) and is_matrix:
            return self._contradiction(node, places) or places
        if places is not None:
            return places
        if not is_matrix:
            outputs = range(max(end - 1, 0), end)
            return Places.out_of(end, outputs, "", max(end - 2, 0))
        return "its neighbors do not determine which axes are batch, in and out"

    def _options(self, node: Node) -> list[MatrixAxes | None]:
        """How an ambiguous leaf may be read, the likeliest reading first.

        An axis that all leaves around it have is the batch. If two axes are left, they
        may be a vector and its layers.
        """
        stacked = self._stacked_on(node)
        free = [place for place in range(len(node.sizes)) if place != stacked]
        if len(free) < 2:
            return [None, _axes(node, Places((0,), (1,), ""))]
        (first, *others), (*rest, last) = free, free
        from_first = Places((first,), tuple(others), "")
        to_first = Places(tuple(others), (first,), "")
        to_last = Places(tuple(rest), (last,), "")
        stack = Places((free[-2],), (last,), "")
        sizes = [node.sizes[place] for place in free]
        is_window = len(free) > 2 and max(sizes[2:]) < min(sizes[:2])
        is_flipped = is_window or self._orientation(node)[0]
        readings = [
            (node.name == "weight" and is_flipped, to_first),
            (node.projection == "out" or roles.is_convolution(node), to_last),
            (math.prod(sizes[:-2]) <= min(sizes[-2:]), stack),
            *((True, places) for places in (from_first, to_last, stack)),
            (len(free) == 2, to_first),
        ]
        likely = dict.fromkeys(places for is_likely, places in readings if is_likely)
        return [_axes(node, places) for places in likely]

    def _stacked_on(self, node: Node) -> int | None:
        """The place of an axis that a node shares with all leaves around it."""
        modules = (node.parts[:end] for end in range(len(node.parts)))
        stacked = (self.tree.stacks[x] for x in modules if x in self.tree.stacks)
        return None if node.batch else next(stacked, None)

    def _contradiction(self, node: Node, places: Places) -> str | None:
        """A doubt, if the bias beside a kernel has another size than its outputs."""
        bias = self.tree.bias_of(node)
        output = tuple(node.sizes[place] for place in places.output)
        if bias is None or not bias.sizes or {*output} <= {*bias.leaf.shape}:
            return None
        return (
            f"{places.reason}, which makes {output} its outputs, and the bias "
            f"{bias.path!r} beside it has shape {bias.leaf.shape}"
        )

    def _two_axes(self, node: Node, role: str) -> Places | str:
        """(in, out) or (out, in), as the user says, or else as the neighbours show."""
        flipped, reason = self.out_in, f"out_in={self.out_in}"
        if flipped is None:
            if _label(role) != MUON:
                return Places.out_of(2, [1], "")
            if role == "lora" and (factor := shapes.lora(self.tree, node)):
                return factor
            if self._stacked_on(node) is not None:
                return (
                    "it may be a stack of vectors: all leaves around it share an axis"
                )
            flipped, reason = self._orientation(node)
        return Places.out_of(2, [0 if flipped else 1], reason)

    # --- (in, out) or (out, in) -------------------------------------------------------

    def _orientation(self, node: Node) -> tuple[bool, str]:
        """True for (out, in), and why.

        A bias has the size of the outputs, so a kernel that is not square votes by the
        bias beside it. Where no kernel has a bias, projections vote whose name says
        which side is the width of the model: `up` and `query` take it in, `down` and
        `out` give it. Without votes, or with divided ones, (in, out) is assumed.
        """
        by_bias = self._by_bias(node)
        if by_bias is not None:
            return by_bias, "the bias beside it has the size of the outputs"
        for votes, reason in self._votes:
            for depth in range(len(node.parts) - 1, -1, -1):
                kind = node.parts[:depth], _kind(node)
                straight, flipped = votes[*kind, False], votes[*kind, True]
                if straight or flipped:
                    few, many = sorted((straight, flipped))
                    if 10 * few < many:
                        return flipped > straight, reason
                    return False, ASSUMED
        # Libraries with these names have kernels (in, out).
        return False, "" if node.name in ("kernel", "w") else ASSUMED

    def _by_bias(self, node: Node) -> bool | None:
        """True if the bias says (out, in); None without one, or for a square kernel."""
        bias = self.tree.bias_of(node)
        fits = [bias is not None and bias.sizes == (size,) for size in node.sizes]
        return fits[0] if len(fits) == 2 and fits[0] != fits[1] else None

    def _by_width(self, node: Node) -> bool | None:
        """By the side that is the width of the model: in for "up", out for "down".

        Keys and values are not asked: in cross-attention their input has another width.
        "kernel" and haiku's "w" are (in, out), unless a bias says otherwise, as for the
        Conv1D of Hugging Face's GPT-2.
        """
        sides = [size in self.tree.streams for size in node.sizes]
        if node.name in ("kernel", "w") or len(sides) != 2 or sides[0] == sides[1]:
            return None
        number = vocabulary.NUMBERED.fullmatch(node.owner[-1].lower())
        up = vocabulary.UP | PROJECTIONS["query"] | PROJECTIONS["qkv"]
        if number is not None:
            reads = number[1] == "1"
        elif node.core in up - vocabulary.SECOND_FACTOR:
            reads = True
        elif node.core in vocabulary.DOWN | PROJECTIONS["out"]:
            reads = False
        else:
            return None
        return sides[1] == reads

    @functools.cached_property
    def _votes(self) -> "list[tuple[_Votes, str]]":
        by_width = "like the kernels around it, by the width of the model"
        return [
            (self._count(self._by_bias), "like the kernels around it, by their biases"),
            (self._count(self._by_width), by_width),
        ]

    def _count(self, vote_of: Callable[[Node], bool | None]) -> "_Votes":
        return collections.Counter(
            (node.parts[:depth], _kind(node), vote)
            for node in self.tree.nodes
            if _label(self.roles[node][0]) == MUON
            and (vote := vote_of(node)) is not None
            for depth in range(len(node.parts))
        )


ASSUMED = "assumed: (out, in) is as likely"
# Module, name of its kernels, and True for (out, in), to the number of votes.
_Votes = collections.Counter[tuple[Module, str, bool]]


def _kind(node: Node) -> str:
    """What the kernels of one code base share: "kernel", "weight", or a name each."""
    return node.name if node.is_generic else ""


def _label(role: str) -> str:
    return ADAMW if role in vocabulary.NOT_MATRICES else MUON


def _axes(node: Node, places: Places) -> MatrixAxes:
    native, shape = node.native, node.leaf.shape
    fan_in, fan_out = (
        tuple(native[place] for place in side)
        for side in (places.reduction, places.output)
    )
    batch = tuple(i for i in range(len(shape)) if i not in (*fan_in, *fan_out))
    return MatrixAxes(batch, fan_in, fan_out)


def doubtful_if_layers_differ(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The same, with a doubt for leaves of several layers that are read differently.

    Leaves are of one kind where their paths differ by numbers alone and their shapes
    not at all, as `blocks/0/up` and `blocks/1/up` of one width.
    """
    kinds: dict[Any, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.doubt is None:
            kind = paths.numberless(parameter.path), parameter.shape
            kinds.setdefault(kind, []).append(parameter)
    doubts: dict[str, Parameter] = {}
    for alike in kinds.values():
        readings = {(x.label, x.label == MUON and x.axes): x for x in alike}
        if len(readings) > 1:
            options = tuple(
                None if x.label == ADAMW else x.axes for x in readings.values()
            )
            text = "layers of its kind would be read differently: " + ", ".join(
                f"{x.path!r} as {x.label!r} ({x.reason})" for x in readings.values()
            )
            for parameter in alike:
                doubts[parameter.path] = dataclasses.replace(
                    parameter, label=MUON, axes=None, doubt=text, options=options
                )
    return [doubts.get(parameter.path, parameter) for parameter in parameters]
