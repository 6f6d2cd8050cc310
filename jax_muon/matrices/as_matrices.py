"""The door: a transform of matrices (..., in, out) on a tree of parameters in any form.

Boxes of Flax, splits, and axes of heads, windows and layers end here: inside, a tree
has the structure of the user's, and its leaves are arrays (..., in, out).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.tree_util import KeyPath, PyTreeDef
from jaxtyping import Array, PyTree

from jax_muon.base import array_types, checks, facts, trees
from jax_muon.matrices.matrices import Parameter
from jax_muon.matrices.resolve import Reading, check_reading, resolve
from jax_muon.matrices.rules import warn_of_labels
from jax_muon.matrices.splits import Parts, Splits, View, check_splits, cut, read_parts

Undo = Callable[[Parts], Array]


@dataclasses.dataclass
class Read:
    """How an optimizer read its parameters, by path: recorded for tools and layouts."""

    leaves: dict[str, Parameter] = dataclasses.field(default_factory=dict)
    # With parts in place of a split leaf: "qkv/q", "qkv/k", "qkv/v".
    parts: dict[str, Parameter] = dataclasses.field(default_factory=dict)


def as_matrices(
    tx: optax.GradientTransformation, matrices: Reading
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on matrices: it sees every leaf as an array (..., in, out).

    A query (768, 12, 64) is (768, 768), a convolution (3, 3, 64, 128) is (576, 128),
    and a kernel with a split is a dict of its parts, each with its own state. Matrices
    (in, out) and stacks of them, such as scanned layers (12, 768, 3072), stay as they
    are. Updates come back in the shape, the box and the sharding of the gradients.

    Args:
      tx: a transform of arrays (..., in, out), such as a chain of pieces.
      matrices: which axes are batch, in and out: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns, of these parameters or
        of more; labels of these parameters, such as {"up": "muon"}; or a function of
        their shapes that returns one of these.

    Raises:
      ValueError: at init and update, with path and shape, a parameter that is no matrix
        or was read with another shape; gradients or state of other shapes.
      KeyError: a parameter that was not read.
      UserWarning: at init, matrices that only the label "muon" under "*" describes, or
        that labels describe in an `equinox.Module`.

    Examples:
      >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
      >>> matrices = jm.find_matrices(params, rules={"up": "muon"})
      >>> muon = optax.chain(
      ...     jm.scale_by_momentum(0.95),
      ...     jm.as_matrices(jm.orthogonalize(), matrices),
      ...     optax.scale_by_learning_rate(0.02),
      ... )
      >>> groups = {"muon": muon, "adamw": optax.adamw(3e-3)}
      >>> tx = optax.multi_transform(groups, matrices.labels)
      >>> updates, state = tx.update(params, tx.init(params), params)
    """
    check_reading("matrices", matrices)

    def view_of(tree: PyTree) -> View:
        read = resolve(matrices, tree)
        parts = read_parts(read.parameters, read.splits)
        facts.record(Read).leaves.update(read.parameters)
        facts.record(Read).parts.update(parts)
        of_parts = dataclasses.replace(read, parameters=parts, splits={})
        return functools.partial(cut, of_parts.view, tuple(read.splits.items()))

    viewed = _viewed("tx", tx, view_of)

    def init_fn(params: optax.Params) -> optax.OptState:
        state, read = viewed.init(params), resolve(matrices, params)
        paths = [path for path, _ in trees.leaves_with_paths(params)]
        warn_of_labels([read[path] for path in paths], params)
        return state

    return optax.GradientTransformationExtraArgs(init_fn, viewed.update)


def with_splits(
    inner: optax.GradientTransformation, splits: Splits
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on the parts of parameters, and keep the state of the parts.

    A parameter `attn/qkv/kernel` with the split `Split(("q", "k", "v"))` is seen by the
    inner transform as three: `attn/qkv/kernel/q`, `/k` and `/v`.

    Args:
      inner: any transform, such as `clip_qk`; `as_matrices` and recipes split what
        `jax_muon.find_matrices(params, splits=...)` says.
      splits: path pattern to `Split`.

    Raises:
      ValueError: at init and update, with path and shape: a pattern that matches no
        parameter, a split that does not fit.

    Examples:
      >>> tx = jm.with_splits(optax.sgd(1.0), {"qkv": jm.Split(("q", "k"), axis=0)})
      >>> state = tx.init({"qkv": jnp.zeros(4)})
      >>> tx.update({"qkv": jnp.arange(4.0)}, state)[0]["qkv"].tolist()
      [-0.0, -1.0, -2.0, -3.0]
    """

    def view_of(tree: PyTree) -> View:
        check_splits(splits, [path for path, _ in trees.leaves_with_paths(tree)])
        return functools.partial(cut, _whole, tuple(splits.items()))

    return _viewed("inner", inner, view_of)


def _whole(path: str, x: Array) -> tuple[Array, Undo]:
    return x, lambda x: x


def _viewed(
    name: str,
    tx: optax.GradientTransformation,
    view_of: Callable[[PyTree], View],
) -> optax.GradientTransformationExtraArgs:
    """A transform that sees each leaf of a tree, boxed or not, through a view."""
    tx = checks.as_transform(name, tx)

    def init_fn(params: optax.Params) -> optax.OptState:
        params = checks.as_arrays("params", params)
        return tx.init(_shown(params, view_of(params))[0])

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.check_gradients(updates, params)
        view = view_of(updates)
        shown, undos = _shown(updates, view)
        if params is not None:
            params, _ = _shown(params, view)
        with array_types.viewed(lambda tree: _shown(tree, view)[0], updates):
            stepped, state = checks.checked_update(
                tx, shown, state, params, **extra_args
            )
        boxes, treedef = _flat(updates)
        parts = treedef.flatten_up_to(stepped)
        leaves = [undo(part) for undo, part in zip(undos, parts, strict=True)]
        pairs = zip(boxes, leaves, strict=True)
        boxed = [jax.tree.map(lambda _, x=x: x, box) for (_, box), x in pairs]
        return treedef.unflatten(boxed), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _flat(tree: PyTree) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """The leaves of a tree with their paths, boxes as leaves; and its structure."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=trees.is_box)


def _shown(tree: PyTree, view: View) -> tuple[PyTree, list[Undo]]:
    """The tree without boxes, with what is shown of each leaf; and what undoes that."""
    flat, treedef = _flat(tree)
    shown = [view(trees.path_string(path), trees.unboxed(x)) for path, x in flat]
    return treedef.unflatten([x for x, _ in shown]), [undo for _, undo in shown]
