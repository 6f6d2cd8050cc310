"""Splits: one parameter that holds several matrices.

A kernel with query, key and value side by side is three matrices, each with its own
polar factor, means and scale.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_muon.base import array_types, checks, specs, trees
from jax_muon.matrices.matrices import MatrixAxes, Parameter

_PROJECTIONS = {
    "query": ("q", "query", "queries"),
    "key": ("k", "key", "keys"),
    "value": ("v", "value", "values"),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """How one axis of a parameter is divided.

    Attributes:
      parts: names of the parts with their widths, `{"query": 768, "key": 256}`, or the
        names alone if all have one width, `("query", "key", "value")`. Each part is a
        separate parameter. For many parts without names see `Split.heads`.
      axis: of the parameter; the default is the last, the outputs of a kernel.

    Examples:
      >>> params = {"attn": {"qkv": jnp.ones((4, 12))}}
      >>> splits = {"qkv": jm.Split(("query", "key", "value"))}
      >>> matrices = jm.find_matrices(params, rules={"attn": "muon"}, splits=splits)
      >>> plan = jm.describe(jm.nanochat(0.02, matrices=matrices), params)
      >>> [x.parameter.path for x in plan.parameters]
      ['attn/qkv/query', 'attn/qkv/key', 'attn/qkv/value']
    """

    parts: Sequence[str] | Mapping[str, int]
    axis: int = -1

    @classmethod
    def heads(cls, number: int, axis: int = -1) -> "Split":
        """Equal parts, such as attention heads, that become one batch of matrices.

        The parameter stays one, with an axis of this size in front of its last two.

        Args:
          number: of parts.
          axis: of the parameter that is divided.

        Examples:
          >>> splits = {"query": jm.Split.heads(3)}
          >>> params = {"query": jnp.ones((4, 12))}
          >>> rules = {"query": "muon"}
          >>> matrices = jm.find_matrices(params, rules=rules, splits=splits)
          >>> tx = jm.nanochat(0.02, matrices=matrices)
          >>> jm.describe(tx, params).parameters[0].matrices  # three of (4, 4)
          (3, 4, 4)
        """
        checks.check_count("number", number)
        parts: Any = _Number(number)
        return cls(parts, axis)

    def __post_init__(self) -> None:
        parts = self.parts
        named = isinstance(parts, Sequence) and not isinstance(parts, str)
        widths = parts.values() if isinstance(parts, Mapping) else ()
        known = named or isinstance(parts, (Mapping, _Number))
        if not known or not all(isinstance(x, int) for x in widths):
            expected = "names in their order, or names with widths, or Split.heads(12)"
            checks.refuse("parts", parts, expected)

    def __hash__(self) -> int:
        parts: Any = self.parts
        pairs = parts.items() if isinstance(parts, Mapping) else parts
        return hash((pairs if isinstance(pairs, int) else tuple(pairs), self.axis))

    def __repr__(self) -> str:
        if isinstance(self.parts, int):
            return f"Split.heads({self.parts}, axis={self.axis})"
        return f"Split({self.parts}, axis={self.axis})"

    def fitted(self, path: str, shape: tuple[int, ...]) -> "Split":
        """The same for one parameter: names with widths, and an axis of at least 0."""
        where = f"splits: parameter {path!r} of shape {shape}"
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where} has no axis {self.axis}; expected {-len(shape)} to "
                f"{len(shape) - 1}"
            )
        parts, size = self.parts, shape[self.axis]
        if not isinstance(parts, (int, Mapping)):
            parts = dict.fromkeys(parts, size // max(len(parts), 1))
        if isinstance(parts, int):
            fits = size % parts == 0
        else:
            fits = sum(parts.values()) == size and min(parts.values(), default=0) > 0
        if not fits:
            raise ValueError(
                f"{where}: axis {self.axis} of size {size} does not divide into "
                f"parts={self.parts!r}; expected names with widths that add up to "
                f"{size}, or a number of heads or of different names that divides it"
            )
        return Split(parts, self.axis % len(shape))


class _Number(int):
    """A number of equal parts without names; see `Split.heads`."""


# Path pattern to split. Patterns apply in order, also to parts of parts.
Splits = Mapping[str, Split]


def _batch_axis(ndim: int) -> int:
    """Where equal parts of an array become a batch: in front of (in, out)."""
    return max(ndim - 2, 0)


# What is shown of a leaf: an array; or its parts by name, in an OrderedDict, since
# nnx.State would turn a dict into a State.
Parts: TypeAlias = "Array | OrderedDict[str, Parts]"
# What is shown of a leaf at a path, and what makes the leaf of that again.
View = Callable[[str, Array], tuple[Parts, Callable[[Any], Array]]]


def cut(
    view: View, splits: Sequence[tuple[str, Split]], path: str, x: Array
) -> tuple[Parts, Callable[[Any], Array]]:
    """A view of the parts of a leaf, or of the leaf if no split matches.

    (768, 2304) into q, k and v: three arrays (768, 768). (768, 768) into 12 heads: one
    array (12, 768, 64).
    """
    matching = (i for i, (x, _) in enumerate(splits) if trees.matches(x, path))
    if (number := next(matching, None)) is None:
        return view(path, x)
    split, rest = splits[number][1].fitted(path, tuple(x.shape)), splits[number + 1 :]
    if isinstance(split.parts, int):
        shown, undo = cut(view, rest, path, _batched(split, x))
        return shown, lambda shown: _joined(split, x, [undo(shown)])
    parts, undos = OrderedDict[str, Parts](), {}
    for name, part in _named(split, x):
        parts[name], undos[name] = cut(view, rest, f"{path}/{name}", part)

    def joined(shown: Any) -> Array:
        return _joined(split, x, [undo(shown[name]) for name, undo in undos.items()])

    return parts, joined


def check_splits(splits: Splits, paths: list[str]) -> None:
    """Raise a ValueError for a value that is no Split, and a pattern that matches none.

    A pattern may match parts of those before it.
    """
    for pattern, split in splits.items():
        checks.check_kind(f"splits[{pattern!r}]", split, Split, "a jax_muon.Split")
        trees.check_patterns_match("splits", [pattern], paths)
        parts = () if isinstance(split.parts, int) else split.parts
        matching = [path for path in paths if parts and trees.matches(pattern, path)]
        paths = [path for path in paths if path not in matching]
        paths += [f"{path}/{name}" for path in matching for name in parts]


def read_parts(
    parameters: Mapping[str, Parameter], splits: Splits
) -> dict[str, Parameter]:
    """How the parts of parameters are read, given how the whole ones are."""
    check_splits(splits, [*parameters])
    parts = dict(parameters)
    for pattern, split in splits.items():
        whole, parts = parts, {}
        for path, x in whole.items():
            matches = trees.matches(pattern, path)
            read = _read(split.fitted(path, x.shape), x) if matches else [x]
            parts |= {part.path: part for part in read}
    return parts


def _read(split: Split, whole: Parameter) -> list[Parameter]:
    """How the parts of a parameter are read: by name, or as a batch, as in `cut`."""
    shape, axis = list(whole.shape), split.axis
    parts: Any = split.parts
    if not isinstance(parts, int):
        return [
            dataclasses.replace(
                whole,
                path=f"{whole.path}/{name}",
                shape=(*shape[:axis], width, *shape[axis + 1 :]),
                role=projection(name) or whole.role,
            )
            for name, width in parts.items()
        ]
    batch, axes = _batch_axis(len(shape)), whole.axes
    shape[axis] //= parts
    shape.insert(batch, parts)
    if axes is not None:
        before, fan_in, fan_out = (
            tuple(axis + (axis >= batch) for axis in side)
            for side in (axes.batch, axes.reduction, axes.output)
        )
        axes = MatrixAxes(tuple(sorted((*before, batch))), fan_in, fan_out)
    return [dataclasses.replace(whole, shape=tuple(shape), axes=axes)]


def projection(name: str) -> str | None:
    """The projection that a user's name means, such as the query of "to_q", or None."""
    around = {"to", "w", "proj", "projection", "linear", "attention", "attn"}
    core = [x.removeprefix("w") for x in trees.words(name) if x not in around]
    found = _PROJECTIONS.items()
    return next((role for role, names in found if "_".join(core) in names), None)


# --- one parameter --------------------------------------------------------------------


def _named(split: Split, x: Array) -> list[tuple[str, Array]]:
    """Parts by name: (768, 2304) into q, k and v, (768, 768) each."""
    widths: Any = split.parts
    *ends, _ = np.cumsum([*widths.values()])
    parts = jnp.split(_undivided(split, x), ends, split.axis)
    return list(zip(widths, parts, strict=True))


def _batched(split: Split, x: Array) -> Array:
    """Equal parts as a batch: (768, 768) into 12 heads (12, 768, 64)."""
    x, axis = _undivided(split, x), split.axis
    x = x.reshape(*x.shape[:axis], split.parts, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, _batch_axis(x.ndim - 1))


def _joined(split: Split, like: Array, parts: Sequence[Array]) -> Array:
    """The parts as one, sharded like the whole."""
    if isinstance(split.parts, int):
        x = jnp.moveaxis(parts[0], _batch_axis(like.ndim), split.axis)
        x = x.reshape(like.shape)
    else:
        x = jnp.concatenate(parts, split.axis)
    return array_types.reshard(x, array_types.entries(like))


def _undivided(split: Split, x: Array) -> Array:
    """x with its split axis not sharded, unless the mesh axes there divide every part.

    They move to another axis if one is free, so that state stays sharded: q, k and v of
    (768, 2304) over 8 devices along the last axis are 768 wide, which 8 divides, so it
    stays; widths (768, 4, 4) go to P("data", None).
    """
    entries, axis = [*array_types.entries(x)], split.axis
    if not any(entries):
        return x
    sizes = jax.typeof(x).sharding.mesh.shape
    names, entries[axis] = specs.entry_names(entries[axis]), None
    devices = specs.devices_over(names, sizes)
    parts: Any = split.parts
    widths = [parts] if isinstance(parts, int) else parts.values()
    if all(width % devices == 0 for width in widths):
        return x
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    spec = specs.finer(PartitionSpec(*entries), shape, names, sizes)
    return array_types.reshard(x, spec)
