"""What a parameter is for: its role, from the words of its path and its neighbours.

The tests are made in the order of `role_of`; the first that holds decides. Each gives
the role with the reason that users are shown.
"""

from jax_muon import paths
from jax_muon.axes import is_real
from jax_muon.reading import heads, words
from jax_muon.reading.evidence import Node, Tree

Role = tuple[str, str]

# Windows of the depthwise convolutions of recurrent layers are not longer than this.
LONGEST_FILTER = 8


def attention_part(node: Node) -> str | None:
    """Which projection of attention a title names: query, key, qkv or out."""
    for title in (words.core(node.title), node.core):
        if title in words.FUSED:
            return "qkv"
        if title in words.QUERY:
            return "query"
        if title in words.KEY_VALUE:
            return "value" if "v" in title.split("_")[0] else "key"
        if title in words.OUT:
            return "out"
    return None


def in_attention(tree: Tree, node: Node) -> bool:
    """Whether attention is in the path, or a query beside: MLPs have a `wo` too."""
    named = any(words.ATTENTION & {*paths.words(part)} for part in node.parts)
    return named or any(
        attention_part(other) not in ("out", None) for other in tree.beside(node)
    )


def is_convolution(node: Node) -> bool:
    """Whether the module is called a convolution.

    ConvLocal is not one: it has a matrix (window and in, out) for each place.
    """
    named = {*node.title_words, *node.own_words}
    return bool(words.CONVOLUTION & named) and "local" not in named


def role_of(tree: Tree, node: Node) -> Role:
    """The role of a leaf whose axes of layers are known, and why."""
    return (
        _not_a_matrix(node)
        or _lora(tree, node)
        or _by_own_name(tree, node)
        or _single_line(tree, node)
        or _table(node)
        or heads.head(tree, node)
        or _router(tree, node)
        or _by_module(tree, node)
        or ("kernel", "a matrix (in, out)")
    )


def _not_a_matrix(node: Node) -> Role | None:
    if not is_real(node.dtype) or 0 in node.shape:
        return "vector", "it is empty or not of real numbers"
    if node.is_bias and "embedding" not in node.name:
        return "bias", "a bias"
    if node.is_norm:
        return "norm", "a norm"
    if len(node.sizes) < 2:
        stacked = f"; {node.batch_reason}" if node.batch else ""
        return "vector", f"a vector{stacked}"
    return None


def _lora(tree: Tree, node: Node) -> Role | None:
    """Factors of LoRA, which have the role of what they adapt."""
    if not any("lora" in paths.words(part) for part in node.parts[-2:]):
        return None
    adapted = heads.head(tree, node) or _table(node)
    return adapted or ("lora", "a factor of LoRA")


def _by_own_name(tree: Tree, node: Node) -> Role | None:
    name, own = node.name.lower(), {*node.own_words}
    skips = [
        n for n in tree.under.get((*node.parts[:-1], "D"), ()) if len(n.sizes) == 1
    ]
    of_state = name.rstrip("0123456789s") in ("b", "c") and skips  # S4, S5, Mamba
    if of_state or "_".join(node.own_words) in words.STATE_SPACE or name in ("d", "ds"):
        return "vector", f"{node.name!r} of a state-space layer is not a matrix"
    if name == "weight_g" or own & (words.SCALE | words.BIAS) - {"b", "g"}:
        return "vector", f"{node.name!r} scales or shifts, it does not multiply"
    generic = node.owner_parts != node.parts
    projects = node.own_words[-1:] and node.own_words[-1] in words.PROJECTION
    if own & words.VECTOR and not generic and not projects:
        return "vector", f"{node.name!r} is not a kernel, by its name"
    return None


def _single_line(tree: Tree, node: Node) -> Role | None:
    """A matrix with one row or column has no more directions than a vector."""
    if sum(size > 1 for size in node.sizes) > 1:
        return None
    if attention_part(node) and len(node.sizes) > 2:
        return None
    if is_bare(tree, node):
        return None
    return "vector", "all axes but one have size 1"


def is_bare(tree: Tree, node: Node) -> bool:
    """Whether an array of two axes stands in no module, in a tree without norms."""
    return not tree.widths and len(node.sizes) == 2 and node.owner_parts == node.parts


def _table(node: Node) -> Role | None:
    title, raw = {*node.title_words}, node.owner_parts == node.parts
    if node.name.lower().split("_")[-1] in ("embedding", "embeddings", "table"):
        return "embedding", "a lookup touches rows, it does not multiply"
    kernel = node.name == "kernel"
    if title & words.POSITION and (raw or "embed" in node.title) and not kernel:
        return "embedding", "positions are looked up, they do not multiply"
    # `embed_linear` and `patch_embed/kernel` are, `time_embed_proj` is not.
    whole = title <= words.EMBEDDING | words.EMBEDDED | {"linear"}
    named = title & words.EMBEDDING and not title & {"time", "timestep"}
    if named and (whole or not (kernel or title & words.PROJECTION)):
        return "embedding", "an embedding, by its name"
    return None


def _router(tree: Tree, node: Node) -> Role | None:
    for part in node.parts:
        if paths.words(part)[-1:] == ["router"]:
            return "router", "everything in a router chooses experts"
    if node.chooses:
        return "router", "it has an output for each expert beside it"
    *_, fan_in, fan_out = node.sizes
    ways = [(fan_in, fan_out), (fan_out, fan_in)] if node.names else [(fan_in, fan_out)]
    for depth, part in enumerate(node.parts):
        if paths.words(part) not in (["gate"], ["gating"]):
            continue
        for other in tree.under[node.parts[:depth]]:
            name = other.parts[depth] if len(other.parts) > depth else part
            if name == part:
                continue
            if words.EXPERTS.intersection(paths.words(name)):
                return "router", f"a gate, and {name!r} stands beside it"
            if any(_counts(other, *way) for way in ways):
                return "router", f"a gate, and {name!r} beside it is for each expert"
    return None


def _counts(other: Node, fan_in: int, fan_out: int) -> bool:
    """Whether a leaf holds as many experts as a gate (fan_in, fan_out) has outputs."""
    all_sizes = [size for i, size in enumerate(other.shape) if i in other.batch]
    experts = fan_out in all_sizes and len(other.sizes) == 2
    unread = len(other.sizes) == 3 and other.sizes[0] == fan_out
    return (experts or unread) and fan_in in other.sizes[-2:]


def _by_module(tree: Tree, node: Node) -> Role | None:
    both = {*node.title_words, *node.own_words}
    grouped = words.GROUPED & both
    if len(node.sizes) > 2 and words.DEPTHWISE & both:
        return "depthwise", "a filter for each channel, by its name"
    if len(node.sizes) > 2 and is_convolution(node) and grouped:
        return "depthwise", "a convolution in groups, by its name"
    if len(node.sizes) == 2 and is_convolution(node):
        window, channels = node.sizes
        if window <= LONGEST_FILTER < channels:
            return "depthwise", f"a filter of {window} for each channel, by its name"
    if node.name == "weight_v":
        return "depthwise", "the direction of a kernel under weight normalization"
    if len(node.sizes) > 2 and is_convolution(node):
        return "convolution", f"a convolution, by the name {node.title!r}"
    part = attention_part(node)
    if part and (part != "out" or in_attention(tree, node)):
        return part, f"a projection of attention, by the name {node.role_title!r}"
    if node.batch and "expert" in node.batch_reason:
        return "expert", node.batch_reason
    return None
