"""Logical axis names: where a tree carries them, and what each name says of an axis.

Names come before all evidence. An axis is a batch (layers, experts), the residual
stream, a part of attention heads, hidden, a latent (the rank of a factored projection)
or a vocabulary. Which of the sides is in and which is out does not follow from their
order, but from what the module does: `wi` and `query` read the residual stream, `wo`
and `out` write it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_muon import checks, paths
from jax_muon.reading import vocabulary
from jax_muon.reading.shapes import Places
from jax_muon.reading.tree import Leaf, Node, Tree
from jax_muon.reading.vocabulary import IN, LATENT, OUTPUT, STREAM

# Name of an axis to its kind.
Table = Mapping[str, str]
# Names by path.
Names = tuple[str | None, ...]
ByPath = Mapping[str, Names]


# --- names that a tree carries --------------------------------------------------------


def of_tree(tree: Any) -> dict[str, Names]:
    """Logical axis names of the leaves that carry them, by path.

    They are read from Flax boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`), from
    the sharding metadata of NNX variables, and from arrays of haliax.
    """
    found = {}
    boxes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: _names_on(node) is not None
    )
    for key_path, box in boxes:
        names, inside = _names_on(box), jax.tree_util.tree_leaves_with_path(box)
        if names is not None and len(inside) == 1:
            found[paths.path_string((*key_path, *inside[0][0]))] = names
    return found


def _names_on(box: Any) -> Names | None:
    """The names that a box or a haliax array has for its axes, or None."""
    axes = getattr(box, "axes", None)
    if isinstance(axes, tuple) and axes and all(hasattr(a, "name") for a in axes):
        return tuple(axis.name for axis in axes)
    if callable(get := getattr(box, "get_metadata", None)):
        metadata = get()
    else:
        metadata = vars(box) if hasattr(box, "unbox") else {}
    for attribute in ("names", "sharding_names", "out_sharding", "sharding"):
        names = metadata.get(attribute)
        if isinstance(names, jax.sharding.PartitionSpec):
            names = tuple(names)
        if names and _is_names(names):
            return tuple(
                (name or (None,))[0] if isinstance(name, tuple) else name
                for name in names
            )
    return None


def _is_names(names: Any) -> bool:
    """True for a tuple of names, tuples of names and None."""
    return isinstance(names, tuple) and all(
        name is None or isinstance(name, str) or _is_names(name) for name in names
    )


# --- meanings of names ----------------------------------------------------------------


def table_with(table: Table | None) -> Table:
    """The built-in names and the user's, which take precedence.

    Raises:
      ValueError: for a kind that is not one of `vocabulary.KINDS`.
    """
    table = table or {}
    for name, kind in table.items():
        checks.choice(f"table[{name!r}]", kind, vocabulary.KINDS)
    return {**vocabulary.AXIS_NAMES, **table}


def kind_of(name: str, table: Table) -> str | None:
    """The kind of an axis by its name, or by the words of it; None where unknown."""
    words = {*paths.words(name)}
    by_word = (kind for kind, known in vocabulary.AXIS_WORDS.items() if known & words)
    return table.get(name) or next(by_word, None)


def check_known(nodes: Sequence[Node], table: Table) -> None:
    """Raise a ValueError that lists all names of unknown kind, except mesh axes."""
    unknown = {
        name: node.leaf
        for node in nodes
        for name in node.leaf.names or ()
        if name and not kind_of(name, table) and name not in vocabulary.MESH
    }
    if not unknown:
        return
    where = "; ".join(
        f"{name!r} among the axis names {leaf.names} of parameter {leaf.path!r} of "
        f"shape {leaf.shape}"
        for name, leaf in unknown.items()
    )
    raise ValueError(
        f"nothing is known of {where}; expected a table with the kind of each, such as "
        "jax_muon.read(params, table={'d_model': 'stream', 'd_ff': 'hidden'}); the "
        f"kinds are {', '.join(vocabulary.KINDS)}"
    )


def kinds_of(leaf: Leaf, table: Table) -> list[str | None] | None:
    """The kind of every axis by its name; None where the names say nothing.

    Names of mesh axes, such as `("fsdp", "tp")`, are in no table.
    """
    names = leaf.names
    if names is None or len(names) != len(leaf.shape):
        return None
    kinds = [kind_of(name, table) if name else None for name in names]
    known = all(kind or not name for kind, name in zip(kinds, names, strict=True))
    return kinds if known and any(kinds) else None


def shown(node: Node, axes: Iterable[int]) -> str:
    """The names of some axes, for the reason of a reading."""
    return ", ".join(str((node.leaf.names or ())[axis]) for axis in axes)


def places_of(tree: Tree, node: Node) -> Places | None:
    """In and out among the native axes of a leaf.

    None where the names do not decide, for example if all are of one kind.
    """
    if node.kinds is None:
        return None
    sides: dict[str, tuple[int, ...]] = {}
    for place, axis in enumerate(node.native):
        side = _side(node.kinds[axis])
        sides[side] = (*sides.get(side, ()), place)
    if len(sides) != 2:
        return None
    fan_out = _outputs(tree, node, list(sides))
    (fan_in,) = sides.keys() - {fan_out}
    reason = f"its axes are named {shown(node, node.native)}"
    return Places(sides[fan_in], sides[fan_out], reason)


# The first of two sides is the input, unless the module writes.
_SIDES = (IN, STREAM, LATENT, "inner", OUTPUT)


def _side(kind: str | None) -> str:
    """The side of a matrix that a kind is on: heads, hidden and the like are one."""
    return kind if kind in _SIDES else "inner"


def _outputs(tree: Tree, node: Node, sides: list[str]) -> str:
    """Which of the two sides of a matrix are its outputs."""
    first, second = sorted(sides, key=_SIDES.index)
    if first == IN or second == OUTPUT:
        return second
    bias = tree.bias_of(node)
    if bias is not None and (kinds := bias.kinds):
        beside = {_side(kinds[axis]) for axis in bias.native if kinds[axis]}
        if len(beside) == 1 and beside <= {*sides}:
            return beside.pop()
    factor = vocabulary.LORA_FACTOR.fullmatch(node.path)
    if factor is not None and LATENT in sides:
        (other,) = {*sides} - {LATENT}
        return LATENT if factor[2] in "aA" else other
    if node.core in vocabulary.WRITES:
        return first
    return second if node.core in vocabulary.READS else sides[-1]
