"""Logical axis names: where a tree carries them, and what each name says of an axis.

Names come before all evidence. An axis is a batch (layers, experts), the residual
stream, a part of attention heads, hidden, a latent (the rank of a factored projection)
or a vocabulary. Which of the sides is in and which is out does not follow from their
order, but from what the module does: `wi` and `query` read the residual stream, `wo`
and `out` write it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_muon import paths
from jax_muon.checks import check_arrays, check_choice, check_mapping, refuse
from jax_muon.reading import words
from jax_muon.reading.evidence import Node, Tree
from jax_muon.reading.shapes import Places

# Name of an axis to its kind.
Table = Mapping[str, str]
# Names by path.
ByPath = Mapping[str, tuple[str | None, ...]]

BATCH, STREAM, HEADS, HIDDEN = "batch", "stream", "heads", "hidden"
LATENT, VOCAB, NORM, POSITION = "latent", "vocab", "norm", "position"
IN, OUT = "in", "out"
KINDS = (BATCH, STREAM, HEADS, HIDDEN, LATENT, VOCAB, NORM, POSITION, IN, OUT)

# Names whose words are not enough: MaxText's, and the letters of Simply's annotations.
NAMES: Table = {
    "circular_repeats": BATCH,
    "o_groups": BATCH,
    "indexer_weights": HEADS,
    "num_activations": HIDDEN,
    "i": IN,
    "o": OUT,
    ".": BATCH,
    "h": HIDDEN,
}
# The words of a name and its kind; the first kind counts where several are named, as
# in `expert_mlp`, which is hidden, and `kv_lora`, which is latent.
WORDS: Mapping[str, set[str]] = {
    LATENT: {"lora", "latent", "rank"},
    STREAM: {"embed"},
    HIDDEN: {"mlp", "hidden", "intermediate"},
    HEADS: {"head", "heads", "q", "kv", "qkv"},
    VOCAB: {"vocab"},
    NORM: {"norm"},
    POSITION: {"pos", "position", "length", "relpos", "abspos"},
    BATCH: {"layer", "layers", "block", "blocks", "stack", "stage", "exp", "expert"}
    | {"experts"},
}
# Names that people give to the axes of a mesh; they say nothing of a parameter.
MESH = {"data", "model", "fsdp", "tensor", "replica", "pipeline", "sequence"}
MESH |= {"context", "dp", "tp", "pp", "sp", "cp", "ep"}


def check_table(table: Table | None) -> Table:
    """The built-in names with those of a user, which come first.

    Raises:
      ValueError: for a kind that is not one of `KINDS`.
    """
    table = {} if table is None else table
    check_mapping("table", table, "a mapping of axis names to kinds, or None")
    for name, kind in table.items():
        check_choice(f"table[{name!r}]", kind, KINDS)
    return {**NAMES, **table}


def kind_of(name: str, table: Table) -> str | None:
    """The kind of an axis by its name, or by the words of it; None where unknown."""
    words = {*paths.words(name)}
    by_word = (kind for kind, known in WORDS.items() if known & words)
    return table.get(name) or next(by_word, None)


def check_kinds(nodes: Sequence[Node], table: Table) -> None:
    """Raise a ValueError that lists all names of unknown kind, but for a mesh's."""
    unknown = {
        name: node
        for node in nodes
        for name in node.names or ()
        if name and not kind_of(name, table) and name not in MESH
    }
    if unknown:
        where = "; ".join(
            f"{name!r} among the axis names {node.names} of parameter {node.path!r} of "
            f"shape {node.shape}"
            for name, node in unknown.items()
        )
        width = {"model", "dim", "width", "channels", "features"}
        likely = {n: STREAM if width & {*paths.words(n)} else HIDDEN for n in unknown}
        raise ValueError(
            f"nothing is known of {where}; expected a table that says what each is, "
            f"such as jax_muon.read(params, table={likely}); the kinds are "
            + ", ".join(KINDS)
        )


def check_names(names: ByPath | None) -> None:
    """Refuse what is neither None nor a tuple of names, or None, for every path."""

    def check(where: str, axes: Any) -> None:
        if not isinstance(axes, tuple) or not all(map(_is_name, axes)):
            refuse(where, axes, "a tuple with a name or None for every axis")

    check_mapping("names", names or {}, "a mapping of path to axis names", check)


def names_of(tree: Any) -> dict[str, tuple[str | None, ...]]:
    """Logical axis names of the leaves that carry them, by path.

    They are read from Flax boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`), from
    the sharding metadata of NNX variables, and from arrays of haliax.

    Args:
      tree: parameters, before their boxes are taken off.

    Returns:
      Path, as `path_string` has it, to one name or None for every axis.

    Raises:
      ValueError: a leaf that is not an array.
    """
    check_arrays("tree", tree)
    found = {}
    boxes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: _names_on(node) is not None
    )
    for key_path, node in boxes:
        names = _names_on(node)
        if names is None:
            continue
        inside = jax.tree_util.tree_leaves_with_path(node)
        if len(inside) == 1:
            found[paths.path_string((*key_path, *inside[0][0]))] = names
    return found


def _names_on(node: Any) -> tuple[str | None, ...] | None:
    """The names that a box or a haliax array has for its axes, or None."""
    axes = getattr(node, "axes", None)
    if isinstance(axes, tuple) and axes and all(hasattr(a, "name") for a in axes):
        return tuple(axis.name for axis in axes)
    for attribute in ("names", "sharding_names", "out_sharding", "sharding"):
        names = _metadata(node, attribute)
        if isinstance(names, jax.sharding.PartitionSpec):
            names = tuple(names)
        if isinstance(names, tuple) and names and all(_is_name(n) for n in names):
            return tuple(_first(name) for name in names)
    return None


def _metadata(node: Any, attribute: str) -> Any:
    get = getattr(node, "get_metadata", None)
    if callable(get):
        return get().get(attribute)
    return getattr(node, attribute, None) if hasattr(node, "unbox") else None


def _is_name(name: Any) -> bool:
    if isinstance(name, tuple):
        return all(isinstance(one, str) for one in name)
    return name is None or isinstance(name, str)


def _first(name: Any) -> str | None:
    return (name[0] if name else None) if isinstance(name, tuple) else name


def kinds_of(node: Node, table: Table) -> list[str | None] | None:
    """The kind of every axis by its name; None where the names say nothing.

    Names such as `("fsdp", "tp")` are those of a mesh and in no table.
    """
    if node.names is None or len(node.names) != len(node.shape):
        return None
    kinds = [kind_of(name, table) if name else None for name in node.names]
    known = all(kind or not name for kind, name in zip(kinds, node.names, strict=True))
    return kinds if known and any(kinds) else None


def places_by_name(tree: Tree, node: Node, table: Table) -> Places | None:
    """Where in and out are among the native axes of a leaf.

    None where the names do not tell, as where all of them are of one kind.
    """
    kinds = kinds_of(node, table)
    if kinds is None or node.names is None or len(node.sizes) < 2:
        return None
    native = [kinds[axis] for axis in node.native]
    sides: dict[str, tuple[int, ...]] = {}
    for place, kind in enumerate(native):
        side = kind if kind in (STREAM, LATENT, IN, OUT) else "inner"
        sides[side] = (*sides.get(side, ()), place)
    if len(sides) != 2:
        return None
    reason = f"its axes are named {', '.join(str(node.names[i]) for i in node.native)}"
    if IN in sides and OUT in sides:
        return Places((), sides[IN], sides[OUT], reason)
    writes = node.core in words.OUT | words.DOWN | words.FIRST_FACTOR_OUT
    factor = words.LORA_FACTOR.fullmatch(node.path)
    known = words.UP | words.QUERY | words.KEY_VALUE | words.FUSED | words.FIRST_FACTOR
    reads = node.core in known or node.role_title.startswith("in_proj")
    # The stream is an input, or else the latent, unless the module writes.
    first = STREAM if STREAM in sides else LATENT
    (second,) = sides.keys() - {first}
    beside = _named_outputs(tree, node, table)
    if beside in sides:
        fan_out = beside
    elif factor is not None and LATENT in sides:
        fan_out = LATENT if factor[2] in "aA" else (sides.keys() - {LATENT}).pop()
    elif writes or reads:
        fan_out = first if writes else second
    else:
        fan_out = next(side for side in reversed(sides) if side in sides)
    (fan_in,) = sides.keys() - {fan_out}
    return Places((), sides[fan_in], sides[fan_out], reason)


def _named_outputs(tree: Tree, node: Node, table: Table) -> str | None:
    """The side that the bias beside a kernel has, by the names of its axes."""
    bias = tree.bias_of(node)
    kinds = kinds_of(bias, table) if bias else None
    if bias is None or kinds is None:
        return None
    sides = {
        kind if kind in (STREAM, LATENT) else "inner"
        for axis in bias.native
        if (kind := kinds[axis])
    }
    return sides.pop() if len(sides) == 1 else None
