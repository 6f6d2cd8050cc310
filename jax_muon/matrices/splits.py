"""Splits: one parameter that holds several matrices, and a transform of its parts.

A kernel with query, key and value side by side is three matrices, each with its own
polar factor, means and scale. The transform sees a tree in which such a parameter is a
node with its parts, and knows nothing of splits.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

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
      >>> matrices = jm.find_matrices(params, rules={"*": "muon"}, splits=splits)
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
          >>> matrices = jm.find_matrices(params, rules={"*": "muon"}, splits=splits)
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


def read_parts(
    parameters: Mapping[str, Parameter], splits: Splits
) -> dict[str, Parameter]:
    """How the parts of parameters are read, given how the whole ones are."""
    parts: Any = OrderedDict(parameters)
    for pattern, split in splits.items():
        parts = _map_split(_read, pattern, split, parts)
    return dict(trees.leaves_with_paths(parts))


def _read(split: Split, whole: Parameter) -> dict[str, Parameter] | Parameter:
    """How the parts of a parameter are read: by name, or as a batch, as in `_parts`."""
    shape, axis = list(whole.shape), split.axis
    parts: Any = split.parts
    if not isinstance(parts, int):
        read: dict[str, Parameter] = OrderedDict()
        for name, width in parts.items():
            read[name] = dataclasses.replace(
                whole,
                path=f"{whole.path}/{name}",
                shape=(*shape[:axis], width, *shape[axis + 1 :]),
                role=projection(name) or whole.role,
            )
        return read
    batch, axes = _batch_axis(len(shape)), whole.axes
    shape[axis] //= parts
    shape.insert(batch, parts)
    if axes is not None:
        before, fan_in, fan_out = (
            tuple(axis + (axis >= batch) for axis in side)
            for side in (axes.batch, axes.reduction, axes.output)
        )
        axes = MatrixAxes(tuple(sorted((*before, batch))), fan_in, fan_out)
    return dataclasses.replace(whole, shape=tuple(shape), axes=axes)


def projection(name: str) -> str | None:
    """The projection that a user's name means, such as the query of "to_q", or None."""
    around = {"to", "w", "proj", "projection", "linear", "attention", "attn"}
    core = [x.removeprefix("w") for x in trees.words(name) if x not in around]
    found = _PROJECTIONS.items()
    return next((role for role, names in found if "_".join(core) in names), None)


def with_splits(
    inner: optax.GradientTransformation, splits: Splits
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on the parts of parameters, and keep the state of the parts.

    A parameter `attn/qkv/kernel` with the split `Split(("q", "k", "v"))` is seen by the
    inner transform as three: `attn/qkv/kernel/q`, `/k` and `/v`.

    Args:
      inner: any transform, such as a chain of pieces; recipes and `partition` take
        `matrices=jax_muon.find_matrices(params, splits=...)`.
      splits: path pattern to `Split`.

    Raises:
      ValueError: at init and update, with path and shape: a pattern that matches no
        parameter, a split that does not fit.

    Examples:
      >>> tx = with_splits(optax.sgd(1.0), {"qkv": jm.Split(("q", "k"), axis=0)})
      >>> state = tx.init({"qkv": jnp.zeros(4)})
      >>> tx.update({"qkv": jnp.arange(4.0)}, state)[0]["qkv"].tolist()
      [-0.0, -1.0, -2.0, -3.0]
    """
    tx = checks.as_transform("inner", inner)
    for pattern, split in reversed([*splits.items()]):
        tx = _with_split(tx, pattern, split)
    return tx


def _with_split(
    inner: optax.GradientTransformationExtraArgs, pattern: str, split: Split
) -> optax.GradientTransformationExtraArgs:
    """A transform on the parts of the parameters that one pattern matches."""

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(_map_split(_parts, pattern, split, params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.check_gradients(updates, params)
        parts, params_parts = (
            _map_split(_parts, pattern, split, x) for x in (updates, params)
        )
        parts, state = inner.update(parts, state, params_parts, **extra_args)
        return _map_split(_join, pattern, split, updates, parts), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _map_split(
    function: Callable[..., PyTree],
    pattern: str,
    split: Split,
    tree: PyTree,
    *rest: PyTree,
) -> PyTree:
    """Apply a function to parameters that match; take others from the last tree."""
    checks.check_kind(f"splits[{pattern!r}]", split, Split, "a jax_muon.Split")
    paths = []

    def apply(key_path: KeyPath, *nodes: PyTree) -> PyTree:
        path = trees.path_string(key_path)
        paths.append(path)
        if not trees.matches(pattern, path):
            return nodes[-1]
        (x,) = jax.tree.leaves(nodes[0])
        return function(split.fitted(path, tuple(x.shape)), *nodes)

    mapped = jax.tree_util.tree_map_with_path(apply, tree, *rest, is_leaf=trees.is_box)
    trees.check_patterns_match("splits", [pattern], paths)
    return mapped


# --- one parameter --------------------------------------------------------------------


def _parts(split: Split, whole: PyTree) -> PyTree:
    """The parts of a parameter, unboxed: by name, or a batch of equal ones.

    (768, 2304) into q, k and v: three arrays (768, 768). (768, 768) into 12 heads: one
    array (12, 768, 64).
    """
    (x,), axis = jax.tree.leaves(whole), split.axis
    parts: Any = split.parts
    x = _undivided(split, x)
    if isinstance(parts, int):
        x = x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, _batch_axis(x.ndim - 1))
    *ends, _ = np.cumsum([*parts.values()])
    # nnx.State would turn a dict into a State.
    return OrderedDict(zip(parts, jnp.split(x, ends, axis), strict=True))


def _join(split: Split, whole: PyTree, parts: PyTree) -> PyTree:
    """The parts as one, with the box and sharding of `whole`."""
    (like,), axis = jax.tree.leaves(whole), split.axis
    if isinstance(split.parts, int):
        x = jnp.moveaxis(parts, _batch_axis(like.ndim), axis)
        x = x.reshape(like.shape)
    else:
        x = jnp.concatenate([*parts.values()], axis)
    if isinstance(like, jax.Array) and array_types.is_explicit(like):
        x = jax.reshard(x, jax.typeof(like).sharding)
    return jax.tree.map(lambda _: x, whole)


def _undivided(split: Split, x: Array) -> Array:
    """x with its split axis not sharded, unless the mesh axes there divide every part.

    They move to another axis if one is free, so that state stays sharded: q, k and v of
    (768, 2304) over 8 devices along the last axis are 768 wide, which 8 divides, so it
    stays; widths (768, 4, 4) go to P("data", None).
    """
    if not isinstance(x, jax.Array) or not array_types.is_explicit(x):
        return x
    sharding, axis = jax.typeof(x).sharding, split.axis
    entries, sizes = [*sharding.spec], sharding.mesh.shape
    names, entries[axis] = specs.entry_names(entries[axis]), None
    devices = specs.devices_over(names, sizes)
    parts: Any = split.parts
    widths = [parts] if isinstance(parts, int) else parts.values()
    if all(width % devices == 0 for width in widths):
        return x
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    spec = specs.finer(PartitionSpec(*entries), shape, names, sizes)
    return jax.reshard(x, NamedSharding(sharding.mesh, spec))
