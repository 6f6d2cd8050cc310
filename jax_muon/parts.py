"""Run a transform on the parts of parameters with splits.

The inner transform sees a tree in which a split parameter is a node with its parts.
Every piece, recipe and layout then works on parts as on parameters, and knows nothing
of splits.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jax_muon import checks, trees
from jax_muon import splits as splitting
from jax_muon.mesh import array_types, specs
from jax_muon.splits import Fitted, Splits


def with_splits(
    inner: optax.GradientTransformation, splits: Splits
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on the parts of parameters.

    A parameter `attn/qkv/kernel` with the split `Split(("q", "k", "v"))` is seen by the
    inner transform as three: `attn/qkv/kernel/q`, `/k` and `/v`. A number of parts
    gives one, with a leading batch axis.

    Args:
      inner: any transform, such as a chain of pieces; recipes and `partition` take
        `matrices=jax_muon.read(params, splits=...)`.
      splits: path pattern to `Split`.

    Returns:
      A transform of the whole parameters, with the state of the parts.

    Raises:
      ValueError: at init and update, with path and shape: a pattern that matches no
        parameter, a split that does not fit.

    Examples:
      >>> import jax_muon as jm
      >>> tx = with_splits(optax.sgd(1.0), {"qkv": jm.Split(("q", "k"), axis=0)})
      >>> state = tx.init({"qkv": jnp.zeros(4)})
      >>> tx.update({"qkv": jnp.arange(4.0)}, state)[0]["qkv"].tolist()
      [-0.0, -1.0, -2.0, -3.0]
    """
    inner = checks.as_transform("inner", inner)
    splitting.check(splits)

    def init_fn(params: optax.Params) -> Any:
        for pattern, split in splits.items():
            fitted = splitting.fit(pattern, split, params)
            params = _map_split(_parts, fitted, params)
        return inner.init(params)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        checks.gradients(updates, params)
        wholes = []
        for pattern, split in splits.items():
            fitted = splitting.fit(pattern, split, updates)
            wholes.append((updates, fitted))
            updates, params = (
                _map_split(_parts, fitted, tree) for tree in (updates, params)
            )
        updates, state = inner.update(updates, state, params, **extra_args)
        for like, fitted in reversed(wholes):
            updates = _map_split(_join, fitted, like, updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# --- trees ----------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NamedParts:
    """The parts of a parameter, in its place in the tree.

    Not a dictionary, which nnx.State would turn into a State.
    """

    parts: dict[str, Any]

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys, and the names."""
        children = [(jax.tree_util.DictKey(k), v) for k, v in self.parts.items()]
        return children, tuple(self.parts)

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "NamedParts":
        """Rebuild the parts from names and children."""
        return cls(dict(zip(names, children, strict=True)))


def _map_split(
    function: Callable[..., Any], fitted: Mapping[str, Fitted], tree: Any, *rest: Any
) -> Any:
    """Apply a function to parameters with splits; take others from the last tree."""

    def apply(key_path: tuple[Any, ...], *nodes: Any) -> Any:
        split = fitted.get(trees.path_string(key_path))
        return nodes[-1] if split is None else function(split, *nodes)

    return jax.tree_util.tree_map_with_path(apply, tree, *rest, is_leaf=trees.is_box)


# --- one parameter --------------------------------------------------------------------


def _parts(split: Fitted, whole: Any) -> Any:
    """The parts of a parameter: `NamedParts`, or a batch of equal ones.

    Parts are unboxed: NNX expects exactly one box per model variable.
    """
    (x,), axis, parts = jax.tree.leaves(whole), split.axis, split.parts
    x = _undivided(split, x)
    if isinstance(parts, int):
        x = x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, splitting.batch_axis(x.ndim - 1))
    *ends, _ = np.cumsum([*parts.values()])
    return NamedParts(dict(zip(parts, jnp.split(x, ends, axis), strict=True)))


def _join(split: Fitted, whole: Any, parts: Any) -> Any:
    """The parts as one, with the box and sharding of `whole`."""
    (like,), axis = jax.tree.leaves(whole), split.axis
    if isinstance(split.parts, int):
        x = jnp.moveaxis(parts, splitting.batch_axis(like.ndim), axis)
        x = x.reshape(like.shape)
    else:
        x = jnp.concatenate([*parts.parts.values()], axis)
    if isinstance(like, jax.Array) and array_types.is_explicit(like):
        x = jax.reshard(x, jax.typeof(like).sharding)
    return jax.tree.map(lambda _: x, whole)


def _undivided(split: Fitted, x: Any) -> Any:
    """x with its split axis not sharded, unless the mesh axes there divide every part.

    These mesh axes move to another axis if one is free, so that state stays sharded.
    """
    if not isinstance(x, jax.Array) or not array_types.is_explicit(x):
        return x
    sharding = jax.typeof(x).sharding
    entries, parts = list(sharding.spec), split.parts
    moved, entries[split.axis] = entries[split.axis], None
    devices = specs.devices_over(moved, sharding.mesh.shape)
    sizes = [parts] if isinstance(parts, int) else parts.values()
    if all(size % devices == 0 for size in sizes):
        return x
    for axis, entry in enumerate(entries):
        if entry is None and axis != split.axis and x.shape[axis] % devices == 0:
            entries[axis] = moved
            break
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*entries)))
