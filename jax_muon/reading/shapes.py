"""Which axes of a kernel of three axes and more are batch, in and out.

Every reader below takes the native axes of a leaf, without layers and experts, and
gives the places of batch, in and out among them with the reason, or None. Sizes are in
comments with examples: N heads of width H, D the width of the model.
"""

import dataclasses
import math

from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree
from jax_muon.reading.kinds import attention_part, is_convolution

# Windows of convolutions are not longer than this.
LONGEST_WINDOW = 31


@dataclasses.dataclass(frozen=True)
class Places:
    """Places among the native axes."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    reason: str
    role: str | None = None  # where the shape tells another role than the words


def places_of(tree: Tree, node: Node, role: str) -> Places | None:
    """Where batch, in and out of a kernel of three native axes and more are."""
    if role == "lora":
        return lora(tree, node)
    if role == "convolution":
        return convolution(tree, node)
    beside = (n for n in tree.beside(node) if attention_part(n) in ("query", "key"))
    projects = role in ("query", "key", "value", "qkv", "out")
    projects = projects or any(n.sizes == node.sizes for n in beside)
    readers = [attention] if projects else []
    for reader in (by_bias, *readers, groups, gates, depthwise, by_window, stack):
        if found := reader(tree, node):
            return found
    return None


def by_bias(tree: Tree, node: Node) -> Places | None:
    """The one reading in which the bias beside a kernel is (*batch, *output)."""
    beside, sizes = tree.bias_of(node), node.sizes
    if beside is None or not beside.sizes:
        return None
    bias, end, found = beside.sizes, len(sizes), []
    if bias == (sizes[0],) + (1,) * (end - 2) and end > 2:
        return convolution(tree, node)  # (out, 1, 1), as equinox has it
    for batch in range(len(bias)):
        output = tuple(range(end - len(bias) + batch, end))
        inputs = tuple(i for i in range(batch, end) if i not in output)
        fits = bias == tuple(sizes[i] for i in (*range(batch), *output))
        if len(bias) < end and fits:
            found.append((tuple(range(batch)), inputs, output))
    if not found and len(bias) == 1:  # (D, N, H) to D, or a transposed convolution
        for axis in (i for i in range(end) if sizes[i] == bias[0]):
            inputs = tuple(i for i in range(end) if i != axis)
            found.append(((), inputs, (axis,)))
    if len(found) != 1:
        return None
    return Places(*found[0], f"the bias {bias} beside it names the outputs")


def convolution(tree: Tree, node: Node) -> Places | None:
    """(*window, in, out), or (out, in, *window), or a transposed kernel."""
    bias = tree.bias_of(node)
    beside = tuple(size for size in bias.sizes if size > 1) if bias else ()
    lead = len(beside) - 1
    if lead > 0:  # scanned, or a matrix for each place
        if found := by_bias(tree, node):
            return found
        lead = lead if beside[:-1] == node.sizes[:lead] else 0
    lead = max(lead, 0)
    sizes, end = node.sizes[lead:], len(node.sizes) - lead
    if end < 3:
        return None
    near = tree.widths_near(node) & {*sizes[-2:], *sizes[:2]}
    if end > 4 and not beside and not near:
        return None
    window, fan_in, fan_out = _layout(node, sizes, beside[-1:])
    inputs = tuple(sorted(lead + axis for axis in (*window, fan_in)))
    reason, role = "window and channels are summed over", None
    if sizes[fan_in] == 1 and math.prod(sizes[axis] for axis in window) > 1:
        reason, role = "one input channel: depthwise, or a first layer", "depthwise"
    return Places(tuple(range(lead)), inputs, (lead + fan_out,), reason, role)


def _layout(
    node: Node, sizes: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[tuple[int, ...], int, int]:
    """Window, in and out of a kernel of a convolution without layers."""
    end = len(sizes)
    last = (tuple(range(end - 2)), end - 2, end - 1)
    transposed = (tuple(range(end - 2)), end - 1, end - 2)
    first = (tuple(range(2, end)), 1, 0)
    layouts = [last, transposed]
    if node.name in ("weight", "weight_v"):  # equinox has (out, in, *window)
        layouts = sorted([last, first], key=lambda one: max(sizes[i] for i in one[0]))
    elif node.name == "w" and {*node.title_words} & words.TRANSPOSED:
        layouts = [transposed, last]  # haiku has (*window, out, in)
    fitting = [one for one in layouts if sizes[one[2]] in outputs]
    return (fitting or layouts)[0]


def attention(tree: Tree, node: Node) -> Places | None:
    """Projections that keep their heads apart: (D, N, H), (N, D, H), (N, H, D)."""
    beside = [n for n in tree.beside(node) if attention_part(n) and n is not node]
    if len(node.sizes) > 3 and (found := _scanned(node, beside)):
        return found
    outs = [n.sizes for n in beside if attention_part(n) == "out" and len(n.sizes) > 1]
    queries = [n.sizes for n in beside if attention_part(n) not in ("out", None)]
    if attention_part(node) == "out":
        return _out(tree, node, queries)
    return _query(tree, node, outs)


def fits(query: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether query (D, N, H) and out (N, H, D) are of one attention.

    The heads of values may be wider than those of queries, or out may give another
    width than query takes: then the other two sizes have to agree.
    """
    return query[1:] == out[:2] or (query[0], query[1]) == (out[2], out[0])


def _scanned(node: Node, beside: list[Node]) -> Places | None:
    """Heads apart behind the same axes of layers, in query and out."""
    sizes, lead = node.sizes, len(node.sizes) - 3
    is_out = attention_part(node) == "out"
    for other in beside:
        if (attention_part(other) == "out") == is_out or len(other.sizes) < lead + 3:
            continue
        query, out = (other.sizes, sizes) if is_out else (sizes, other.sizes)
        if query[:lead] == out[:lead] and fits(query[lead:], out[lead:]):
            reason = f"heads behind layers, as {other.sizes} beside it tells"
            fan_in = (lead, lead + 1) if is_out else (lead,)
            fan_out = tuple(range(fan_in[-1] + 1, lead + 3))
            return Places(tuple(range(lead)), fan_in, fan_out, reason)
    return None


def _widths(tree: Tree, node: Node) -> set[int]:
    return tree.widths_near(node) | tree.streams


def _out(tree: Tree, node: Node, queries: list[tuple[int, ...]]) -> Places | None:
    sizes, end = node.sizes, len(node.sizes)
    apart = Places((), tuple(range(end - 1)), (end - 1,), "")
    whole = [query for query in queries if len(query) == end == 3]
    for query in whole:
        if fits(query, sizes):
            reason = f"heads are summed over, as the query {query} beside it tells"
            return dataclasses.replace(apart, reason=reason)
    in_width = sizes[-1] in _widths(tree, node)
    named = "einsum" in node.title or "attn" in node.title
    heads_apart = any(
        query[1:] == sizes[:-1]
        or (end == 3 and query[1] == sizes[0])  # a query from a latent
        or (query[0], query[2]) == (sizes[0], sizes[1])
        for query in queries
        if len(query) == end
    )
    if in_width and (heads_apart or (named and end == 3)):
        reason = f"heads are summed over to the width {sizes[-1]} of the norms"
        return dataclasses.replace(apart, reason=reason)
    elsewhere = {*sizes[1:]} & tree.streams
    if sizes[0] in tree.streams and not elsewhere:
        reason = f"heads are summed over to the width {sizes[0]} of the norms"
        return Places((), tuple(range(1, end)), (0,), reason)
    return None


def _query(tree: Tree, node: Node, outs: list[tuple[int, ...]]) -> Places | None:
    sizes, end = node.sizes, len(node.sizes)
    for out in outs:
        if end == 3 == len(out) and fits(sizes, out):
            reason = f"heads and their width, as out {out} beside it tells"
            return Places((), (0,), (1, 2), reason)
    widths = {out[-1] for out in outs} & _widths(tree, node)
    widths = widths or _widths(tree, node) or {out[-1] for out in outs}
    # The last axis, as in (N, H, D), is an input only where it is the model's width:
    # norms of queries and keys have the width H of heads.
    inputs = [place for place in range(end) if sizes[place] in tree.streams]
    for known in (widths, _widths(tree, node), *tree.widths_around(node)):
        inputs = inputs or [p for p in range(end - 1) if sizes[p] in known]
    if len(inputs) > 1:  # the heads that are left have to be those of out
        heads = {out[0] for out in outs if len(out) == 3}
        inputs = [p for p in inputs if end == 3 and sizes[1 if p == 0 else 0] in heads]
    if len(inputs) != 1:
        return None
    (place,) = inputs
    is_width = sizes[place] in tree.widths.get((), set()) | tree.streams
    if not is_width and place and "einsum" not in node.title:
        return None  # (layers, in, out), as far as anything here tells
    reason = f"the axis of {sizes[place]} is the width of the model, the others heads"
    fused = node.core in words.FUSED | {"kv"}
    grouped = any(out[:-1] == sizes[1:] for out in outs) or place == end - 1
    if not grouped and not {2, 3} & {*sizes[:2]} and (end > 3 or (fused and place)):
        return None  # one axis too many for heads: layers, perhaps
    if fused and end > 3 and place and sizes[0] in (2, 3):
        rest = tuple(axis for axis in range(1, end) if axis != place)
        return Places((0,), (place,), rest, reason)
    rest = tuple(axis for axis in range(end) if axis != place)
    return Places((), (place,), rest, reason)


def lora(tree: Tree, node: Node) -> Places | None:
    """A factor of LoRA, by the rank that it shares with the other one beside it.

    They are (*batch, *in, rank) and (*batch, rank, *out), such as (N, H, rank) and
    (rank, D), or (rank, in) and (out, rank).
    """
    found = words.LORA_FACTOR.fullmatch(node.path)
    if found is None:
        return None
    before, letter, after = found.groups()
    other = tree.by_path.get(before + words.OTHER_FACTOR[letter] + after)
    if other is None:
        return None
    is_first, end = letter in "aA", len(node.sizes)
    a, b = (node, other) if is_first else (other, node)
    shared = [
        axis
        for axis in range(min(len(a.sizes), len(b.sizes)) - 1)
        if a.sizes[:axis] == b.sizes[:axis] and b.sizes[axis] == a.sizes[-1]
    ]
    reason = f"the rank is that of {other.sizes} beside it"
    transposed = len(a.sizes) == len(b.sizes) == 2 and a.sizes[0] == b.sizes[1]
    if transposed and (not shared or a.sizes[0] < a.sizes[1]):
        return Places((), (1,), (0,), reason)
    if not shared:
        return None
    start = shared[-1]  # layers as many as the rank is large come first
    cut = end - 1 if is_first else start + 1
    axes = tuple(range(end))
    return Places(axes[:start], axes[start:cut], axes[cut:], reason)


def groups(tree: Tree, node: Node) -> Places | None:
    """The first factor of an output projection, a matrix for each group of heads.

    (groups, in, rank), where the second factor beside it is (groups * rank, D).
    """
    sizes = node.sizes
    if len(sizes) != 3 or node.core not in words.FIRST_FACTOR_OUT:
        return None
    for other in tree.beside(node):
        if len(other.sizes) == 2 and other.sizes[0] == sizes[0] * sizes[2]:
            reason = f"{sizes[0]} groups, as {other.sizes} beside it tells"
            return Places((0,), (1,), (2,), reason)
    return None


def gates(tree: Tree, node: Node) -> Places | None:
    """Gate and up projection in one: (2, D, hidden), or (2, hidden, D)."""
    sizes = node.sizes
    gated = node.core in words.UP
    if len(sizes) != 3 or sizes[0] != 2 or not gated:
        return None
    widths = _widths(tree, node)
    inputs = [place for place in (1, 2) if sizes[place] in widths]
    if len(inputs) != 1:
        return None
    (place,) = inputs
    reason = f"gate and up projection, from the width {sizes[place]} of the norms"
    return Places((0,), (place,), (3 - place,), reason)


def depthwise(tree: Tree, node: Node) -> Places | None:
    """A filter for each channel, (*window, 1, channels): not a matrix."""
    del tree
    sizes, end = node.sizes, len(node.sizes)
    if sizes[-2] != 1:
        return None
    if all(size <= LONGEST_WINDOW for size in sizes[:-2]):
        reason = "one input channel a filter: depthwise, or the first layer"
        return Places((), tuple(range(end - 1)), (end - 1,), reason, "depthwise")
    reason = "a matrix with an axis of size 1 in it"
    return Places((), tuple(range(end - 1)), (end - 1,), reason)


def by_window(tree: Tree, node: Node) -> Places | None:
    """A convolution that only its window shows: (3, 3, in, out), or (out, in, 3, 3)."""
    if len(node.sizes) != 4:
        return None
    front, back = node.sizes[:2], node.sizes[2:]
    out_in = node.name == "weight" and _is_window(back, front)
    found = convolution(tree, node)
    if found is None or not (out_in or _is_window(front, back)):
        return None
    reason = "a convolution, by its window"
    return dataclasses.replace(found, role=found.role or "convolution", reason=reason)


def _is_window(window: tuple[int, ...], channels: tuple[int, ...]) -> bool:
    """Square and odd, or square before the one to four channels of an image."""
    (first, second), few = window, min(channels) <= 4
    square = first == second and first <= LONGEST_WINDOW
    return square and (first % 2 == 1 or few) and max(channels) >= first


def stack(tree: Tree, node: Node) -> Places | None:
    """(*batch, in, out): plausible, if there are fewer matrices than either side."""
    sizes, end = node.sizes, len(node.sizes)
    count = math.prod(sizes[:-2])
    named = is_local(node) or "expert" in node.batch_reason
    if not named and (tree.widths or node.batch or count > min(sizes[-2:])):
        return None
    reason = f"{count} matrices (in, out), one behind the other"
    return Places(tuple(range(end - 2)), (end - 2,), (end - 1,), reason)


def is_local(node: Node) -> bool:
    """Whether a module is a convolution with a matrix for each place."""
    return "local" in node.title_words and not is_convolution(node)
