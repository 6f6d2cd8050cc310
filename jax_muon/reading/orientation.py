"""Whether kernels of two axes are (in, out) or (out, in).

A bias has the size of the outputs, so a kernel that is not square votes by the bias
beside it. Where no kernel has a bias, projections vote whose name says which side is
the width of the model: `up` and `query` take it in, `down` and `out` give it.
"""

import functools
import re
from collections.abc import Callable

from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree

# Module and name of its kernels, to the votes for (in, out) and for (out, in).
_Votes = dict[tuple[tuple[str, ...], str], list[int]]


# The two layers of an MLP, such as `fc1` and `linear1_0`: the second gives the width.
_NUMBERED = re.compile(r"(?:linear|dense|fc|w)_?([12])(?:_\d+)?")


class Orientation:
    """The votes of a tree, counted for every module."""

    def __init__(self, tree: Tree, skipped: set[int]):
        self.tree = tree
        self.skipped = skipped  # embeddings and heads, which have no say

    def of(self, node: Node) -> tuple[bool | None, str]:
        """Whether a kernel is (out, in), and why; None where votes are divided."""
        own = self.by_bias(node)
        if own is not None:
            return own, "the bias beside it has the size of the outputs"
        for votes, reason in (
            (self._bias_votes, "as the kernels around it whose biases tell"),
            (self._width_votes, "as kernels whose sides are the model's width tell"),
        ):
            if votes is self._width_votes and _is_in_out(node):
                continue
            for depth in range(len(node.parts) - 1, -1, -1):
                for_in_out, for_out_in = votes.get(
                    (node.parts[:depth], _name(node)), (0, 0)
                )
                if not for_in_out + for_out_in:
                    continue
                if 10 * min(for_in_out, for_out_in) < max(for_in_out, for_out_in):
                    return for_out_in > for_in_out, reason
                if depth == 0 or votes is self._bias_votes:
                    return None, reason
        # PyTorch's name, which some libraries have with (in, out).
        return (None if node.name == "weight" else False), ""

    def by_bias(self, node: Node) -> bool | None:
        """Whether a kernel is (out, in) by its bias; None where that does not tell."""
        bias = self.tree.bias_of(node)
        if bias is None or len(node.sizes) != 2 or len(bias.sizes) != 1:
            return None
        fan_in, fan_out = node.sizes
        if fan_in == fan_out or bias.sizes[0] not in node.sizes:
            return None
        return bias.sizes[0] == fan_in

    def _by_width(self, node: Node) -> bool | None:
        """By the side that is the width of the model: in for "up", out for "down".

        Keys and values are not asked: in cross-attention their input has another width.
        """
        if _is_in_out(node):
            return None
        widths = self.tree.widths.get((), set()) or self.tree.streams
        if len(node.sizes) != 2 or (node.sizes[0] in widths) == (
            node.sizes[1] in widths
        ):
            return None
        number = _NUMBERED.fullmatch(node.owner_parts[-1].lower())
        second_is_width = node.sizes[1] in widths
        if number:
            return second_is_width == (number[1] == "1")
        second_factors = {"q_b", "q_up"}  # from a latent, not from the width
        if node.core in (words.UP | words.QUERY | words.FUSED) - second_factors:
            return second_is_width
        if node.core in words.DOWN | words.OUT:
            return not second_is_width
        return None

    @functools.cached_property
    def _bias_votes(self) -> _Votes:
        return self._count(self.by_bias)

    @functools.cached_property
    def _width_votes(self) -> _Votes:
        return self._count(self._by_width)

    def _count(self, vote_of: Callable[[Node], bool | None]) -> _Votes:
        votes: _Votes = {}
        for node in self.tree.nodes:
            vote = None if node.index in self.skipped else vote_of(node)
            if vote is not None:
                for depth in range(len(node.parts)):
                    key = (node.parts[:depth], _name(node))
                    votes.setdefault(key, [0, 0])[vote] += 1
        return votes


def _is_in_out(node: Node) -> bool:
    """Whether a leaf has the name for (in, out) in Flax or haiku.

    Only a bias says otherwise, as for the Conv1D of Hugging Face's GPT-2.
    """
    return node.name in ("kernel", "w")


def _name(node: Node) -> str:
    """What the kernels of one code base share: "kernel", "weight", or a name each."""
    return node.name if node.owner_parts != node.parts else ""
