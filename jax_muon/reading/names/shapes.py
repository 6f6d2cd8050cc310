"""Which axes of a kernel of three axes and more are batch, in and out.

Every rule below takes the native axes of a leaf, without layers and experts, and gives
the places of batch, in and out among them with the reason, or None. Sizes are in
comments with examples: N heads of width H, D the width of the model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from jax_muon.reading.names import roles, vocabulary
from jax_muon.reading.names.tree import Node, Shape, Tree
from jax_muon.reading.projections import PROJECTIONS


@dataclasses.dataclass(frozen=True)
class Places:
    """In and out among the native axes; the others are a batch."""

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    reason: str
    role: str | None = None  # if the shape shows another role than the words

    @classmethod
    def out_of(
        cls, end: int, outputs: Iterable[int], reason: str, batch: int = 0
    ) -> "Places":
        """These axes are the outputs, the first ones a batch, all others inputs."""
        fan_out = tuple(outputs)
        fan_in = tuple(axis for axis in range(batch, end) if axis not in fan_out)
        return cls(fan_in, fan_out, reason)


Rule = Callable[[Tree, Node], Places | None]


def places_of(tree: Tree, node: Node, role: str) -> Places | None:
    """Where batch, in and out of a kernel of three native axes and more are."""
    if role in BY_ROLE:
        return BY_ROLE[role](tree, node)
    answers = (rule(tree, node) for rule in RULES)
    return next(filter(None, answers), None)


# --- by the bias, or the window -------------------------------------------------------


def _by_bias(tree: Tree, node: Node) -> Places | None:
    """The one reading in which the bias beside a kernel is (*batch, *output)."""
    beside, sizes, end = tree.bias_of(node), node.sizes, len(node.sizes)
    if beside is None:
        return None
    bias = beside.sizes
    if bias[1:] == (1,) * (end - 2) and bias[:1] == sizes[:1]:
        return convolution(tree, node)  # (out, 1, 1), as equinox has it
    reason = f"the bias {bias} beside it names the outputs"
    possible = [
        Places.out_of(end, range(end - len(bias) + batch, end), reason, batch)
        for batch in range(len(bias))
        if len(bias) < end and bias == sizes[:batch] + sizes[end - len(bias) + batch :]
    ]
    if not possible and len(bias) == 1:  # (D, N, H) to D, or a transposed convolution
        same = [axis for axis in range(end) if sizes[axis] == bias[0]]
        possible = [Places.out_of(end, [axis], reason) for axis in same]
    return possible[0] if len(possible) == 1 else None


def convolution(tree: Tree, node: Node) -> Places | None:
    """(*window, in, out), or (out, in, *window), or a transposed kernel."""
    bias = tree.bias_of(node)
    beside = tuple(size for size in bias.sizes if size > 1) if bias else ()
    lead = max(len(beside) - 1, 0)  # scanned
    sizes = node.sizes[lead:]
    if beside[:-1] != node.sizes[:lead] or len(sizes) < 3:
        lead, sizes = 0, node.sizes
    known = tree.streams & {*sizes[-2:], *sizes[:2]}
    if len(sizes) > 4 and not beside and not known:
        return None
    fan_in, fan_out = _in_and_out(node, sizes, beside[-1:])
    reason = "window and channels are summed over"
    places = Places.out_of(len(node.sizes), [lead + fan_out], reason, lead)
    if sizes[fan_in] > 1:
        return places
    reason = "one input channel: depthwise, or a first layer"
    return dataclasses.replace(places, reason=reason, role="depthwise")


def _in_and_out(node: Node, sizes: Shape, outputs: Shape) -> tuple[int, int]:
    """In and out of a kernel of a convolution without layers."""
    end = len(sizes)
    last, transposed, first = (end - 2, end - 1), (end - 1, end - 2), (1, 0)
    pairs = [last, transposed]
    if node.name == "weight":  # equinox has (out, in, *window)
        small_in_front = max(sizes[:-2]) <= max(sizes[2:])
        pairs = [last, first] if small_in_front else [first, last]
    fitting = [pair for pair in pairs if sizes[pair[1]] in outputs]
    return (fitting or pairs)[0]


def _by_window(tree: Tree, node: Node) -> Places | None:
    """A convolution that only its window shows: (3, 3, in, out), or (out, in, 3, 3)."""
    if len(node.sizes) != 4:
        return None
    front, back = node.sizes[:2], node.sizes[2:]
    out_in = node.name == "weight" and _is_window(back, front)
    window = convolution(tree, node)
    if window is None or not (out_in or _is_window(front, back)):
        return None
    reason, role = "a convolution, by its window", window.role or "convolution"
    return dataclasses.replace(window, role=role, reason=reason)


def _is_window(window: Shape, channels: Shape) -> bool:
    """Square and odd, or square before the one to four channels of an image."""
    (first, second), few = window, min(channels) <= 4
    return first == second <= max(channels) and (first % 2 == 1 or few)


# --- by the projections beside it -----------------------------------------------------


def _attention(tree: Tree, node: Node) -> Places | None:
    """Projections that keep their heads apart: (D, N, H), (N, D, H), (N, H, D)."""
    alike = node.sizes in tree.sizes_beside(node, ("query", "key"))
    if not alike and not (node.projection and roles.in_attention(tree, node)):
        return None
    is_out = node.projection == "out"
    partners = {*PROJECTIONS} - {"out"} if is_out else {"out"}
    others = tree.sizes_beside(node, partners)
    return _by_partner(node, others) or (
        _out(tree, node, others) if is_out else _query(tree, node, others)
    )


def _by_partner(node: Node, others: Sequence[Shape]) -> Places | None:
    """(*layers, D, N, H) and (*layers, N, H, D), of one attention.

    Two of the three sizes agree at least: values may have wider heads than queries,
    keys fewer, and out may give another width than query takes.
    """
    lead, is_out = len(node.sizes) - 3, node.projection == "out"
    for other in others:
        query, out = (other, node.sizes) if is_out else (node.sizes, other)
        if len(query) != len(out) or query[:lead] != out[:lead]:
            continue
        (d, n, h), (m, g, e) = query[lead:], out[lead:]
        if (d == e) + (n == m) + (h == g) > 1:
            cut = lead + (2 if is_out else 1)
            reason = f"heads and their width, as {other} beside it shows"
            return Places.out_of(lead + 3, range(cut, lead + 3), reason, lead)
    return None


def _out(tree: Tree, node: Node, queries: Sequence[Shape]) -> Places | None:
    sizes, end = node.sizes, len(node.sizes)
    outputs = [place for place in (0, end - 1) if sizes[place] in tree.streams]
    if len(outputs) != 1 or end > 3:  # one axis too many for heads: layers, perhaps
        return None
    reason = f"heads are summed over to the width {sizes[outputs[0]]} of the norms"
    return Places.out_of(end, outputs, reason)


def _query(tree: Tree, node: Node, outs: Sequence[Shape]) -> Places | None:
    sizes, end = node.sizes, len(node.sizes)
    # The last axis, as in (N, H, D), is an input only where it is the model's width:
    # norms of queries and keys have the width H of heads.
    inputs = [place for place in range(end) if sizes[place] in tree.streams]
    inputs = inputs or [p for p in range(end - 1) if sizes[p] in tree.widths]
    if len(inputs) > 1:  # the other axis must be the heads of out
        heads = {out[0] for out in outs if len(out) == 3}
        inputs = [p for p in inputs if end == 3 and sizes[1 if p == 0 else 0] in heads]
    if len(inputs) != 1:
        return None
    (place,) = inputs
    fused = node.projection in ("qkv", "kv")
    rest = [axis for axis in range(end) if axis != place]
    reason = f"the axis of {sizes[place]} is the width of the model, the others heads"
    if fused and end > 3 and place and sizes[0] in (2, 3):
        return Places((place,), tuple(rest[1:]), reason)
    many = end > 3 or (fused and place)
    if many and place < end - 1 and not {2, 3} & {*sizes[:2]}:
        return None  # one axis too many for heads: layers, perhaps
    return Places.out_of(end, rest, reason)


def lora(tree: Tree, node: Node) -> Places | None:
    """A factor of LoRA, by the rank that it shares with the other one beside it.

    They are (*batch, *in, rank) and (*batch, rank, *out), such as (N, H, rank) and
    (rank, D), or (rank, in) and (out, rank).
    """
    match = vocabulary.LORA_FACTOR.fullmatch(node.path)
    if match is None:
        return None
    before, letter, after = match.groups()
    other = tree.by_path.get(before + vocabulary.OTHER_FACTOR[letter] + after)
    if other is None:
        return None
    is_first, end = letter in "aA", len(node.sizes)
    a, b = (node.sizes, other.sizes) if is_first else (other.sizes, node.sizes)
    shared = [
        axis
        for axis in range(min(len(a), len(b)) - 1)
        if a[:axis] == b[:axis] and b[axis] == a[-1]
    ]
    reason = f"the rank is that of {other.sizes} beside it"
    transposed = len(a) == len(b) == 2 and a[0] == b[1]
    if transposed and (not shared or a[0] < a[1]):
        return Places((1,), (0,), reason)
    if not shared:
        return None
    start = shared[-1]  # layers as many as the rank is large come first
    cut = end - 1 if is_first else start + 1
    return Places.out_of(end, range(cut, end), reason, start)


def _pair(tree: Tree, node: Node) -> Places | None:
    """(D, N, H) and (N, H, D) in one module, with D the width of the model."""
    sizes, end = node.sizes, len(node.sizes)
    beside = tree.sizes_beside(node, {*PROJECTIONS, None})
    outputs = [place for place in range(end) if sizes[place] in tree.streams]
    if outputs == [0] and (*sizes[1:], sizes[0]) in beside:
        outputs = [*range(1, end)]
    elif outputs != [end - 1] or (sizes[-1], *sizes[:-1]) not in beside:
        return None
    return Places.out_of(end, outputs, "a kernel beside it leads the other way")


def _gates(tree: Tree, node: Node) -> Places | None:
    """Gate and up projection in one: (2, D, hidden), or (2, hidden, D)."""
    sizes = node.sizes
    inputs = [place for place in (1, 2) if sizes[place] in tree.streams]
    gated = len(sizes) == 3 and sizes[0] == 2 and node.core in vocabulary.UP
    if not gated or len(inputs) != 1:
        return None
    reason = f"gate and up projection, from the width {sizes[inputs[0]]} of the model"
    return Places.out_of(3, [3 - inputs[0]], reason, 1)


def _stack(tree: Tree, node: Node) -> Places | None:
    """(*batch, in, out): plausible with fewer matrices than either side has rows.

    Or else by the name: (groups, in, rank) is the first factor of an output projection.
    """
    sizes, end = node.sizes, len(node.sizes)
    count = math.prod(sizes[:-2])
    named = "local" in node.title_words or "expert" in node.batch_reason
    named = named or node.core in vocabulary.FIRST_FACTOR_OUT
    if not named and (tree.norms or node.batch or count > min(sizes[-2:])):
        return None
    reason = f"{count} matrices (in, out), one behind the other"
    return Places.out_of(end, [end - 1], reason, end - 2)


BY_ROLE: dict[str, Rule] = {"lora": lora, "convolution": convolution}
RULES: list[Rule] = [
    _by_bias,
    _attention,
    _gates,
    _by_window,
    _pair,
    _stack,
]
