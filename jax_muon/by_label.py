"""What all recipes share: optimizers put together by label, for the tree at hand."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jax_muon.guards import clip_by_global_norm
from jax_muon.mesh.axes import AxisName
from jax_muon.mesh.global_view import Specs, with_placed_state
from jax_muon.mesh.zero2 import (
    is_zero2,
    zero2_matrices,
    zero2_multi_transform,
    zero2_rows,
)
from jax_muon.reading import paths
from jax_muon.reading.axes import DimensionNumbers, as_dimension_numbers, matrix_axes
from jax_muon.reading.joins import Joins
from jax_muon.reading.labels import ADAMW, MUON, label_params
from jax_muon.splits import Parts, Splits, with_splits

Labels = Any | Callable[[optax.Params], Any] | None
Pieces = list[optax.GradientTransformation]
Groups = Mapping[str, optax.GradientTransformation] | None
Options = Mapping[str, Any]


def by_label(
    pieces: Callable[[Options, Options], Pieces],
    adamw: optax.GradientTransformation,
    adamw_groups: Groups,
    max_norm: float | None,
    labels: Labels,
    dimension_numbers: DimensionNumbers,
    splits: Splits | None,
    joins: Joins | None,
    mesh: Mesh | None,
    specs: Specs,
    small: int | None,
    zero2_axis: AxisName | None,
) -> optax.GradientTransformationExtraArgs:
    """The pieces for "muon", AdamW for "adamw", and the user's groups.

    `pieces` makes the chain for matrices from keyword arguments: those of every piece
    that reads matrices, and those of `orthogonalize` besides. The others are arguments
    of the recipes, documented there.

    The optimizer is put together for the tree that it is given, since labels and the
    reading of a parameter depend on what stands beside it. Both depend on paths and
    shapes alone, so they are the same at every step.
    """
    if zero2_axis is not None and (mesh is not None or specs is not None):
        raise ValueError(
            f"zero2_axis={zero2_axis!r} with mesh or specs: valid is one of the two, "
            "since ZeRO-2 is for replicated parameters"
        )
    groups = {ADAMW: adamw, **(adamw_groups or {})}
    if MUON in groups or ADAMW in (adamw_groups or {}):
        raise ValueError(
            f"adamw_groups has the labels {list(adamw_groups or {})}; valid are others "
            f"than {MUON!r} and {ADAMW!r}, which the recipe holds itself"
        )
    if zero2_axis is not None:
        groups = {
            label: tx if is_zero2(tx) else zero2_rows(tx, zero2_axis)
            for label, tx in groups.items()
        }
    pieces({}, {})  # a rate out of range is an error now
    before = optax.identity()
    if max_norm is not None:
        before = clip_by_global_norm(max_norm, axis=zero2_axis)

    def build(tree: Any) -> optax.GradientTransformationExtraArgs:
        label_tree = _labels_of(tree, labels, (MUON, *groups))
        masked = jax.tree.map(
            lambda label, leaf: leaf if label == MUON else optax.MaskedNode(),
            label_tree,
            tree,
        )
        names = [path for path, _ in paths.leaves_with_paths(masked)]
        axes = matrix_axes(masked, dimension_numbers, context=tree)
        numbers = as_dimension_numbers(dict(zip(names, axes, strict=True)))
        if not splits:
            return divided(label_tree, numbers, specs)
        parts = Parts.of(tree, splits)
        inner = divided(
            parts.spread(label_tree),
            parts.numbers(numbers),
            parts.specs(tree, mesh, specs),
        )
        return with_splits(inner, splits)

    def divided(
        label_tree: Any, numbers: DimensionNumbers, specs: Specs
    ) -> optax.GradientTransformationExtraArgs:
        if zero2_axis is None:
            view = {"dimension_numbers": numbers}
            whole = {"joins": joins, "mesh": mesh, "specs": specs, "small": small}
            chain = optax.chain(*pieces(view, whole))
            tx = optax.multi_transform({MUON: chain, **groups}, label_tree)
            tx = tx if max_norm is None else optax.chain(before, tx)
            return with_placed_state(tx, mesh, specs)
        # The wrapper does the reading, and the pieces see (k, in, out).
        chain = optax.chain(*pieces({}, {}))
        owners = zero2_matrices(
            chain, zero2_axis, dimension_numbers=numbers, joins=joins
        )
        transforms = {MUON: owners, **groups}
        if max_norm is None:
            return optax.multi_transform(transforms, label_tree)
        return zero2_multi_transform(transforms, label_tree, before)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        return build(updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(
        lambda params: build(params).init(params), update_fn
    )


def _labels_of(tree: Any, labels: Labels, valid: tuple[str, ...]) -> Any:
    """A label for every leaf, on the structure of the tree."""
    given = label_params if labels is None else labels
    given = given(tree) if callable(given) else given
    by_path = dict(paths.leaves_with_paths(given))
    names = [path for path, _ in paths.leaves_with_paths(tree)]
    for path in by_path:
        if names and path and not any(f"{n}/".startswith(f"{path}/") for n in names):
            raise ValueError(
                f"labels at {path!r}, which no parameter has; there are "
                + ", ".join(names)
            )

    def label(key_path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        path = paths.path_string(key_path)
        found = paths.find_prefix(by_path, path)
        if found not in valid:
            raise ValueError(
                f"parameter {path!r} has the label {found!r}; valid are "
                + ", ".join(map(repr, valid))
            )
        return found

    return jax.tree_util.tree_map_with_path(label, tree)
