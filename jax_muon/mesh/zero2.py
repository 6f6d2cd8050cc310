"""ZeRO-2: parameters replicated, gradients reduced straight to owners, state divided.

Two wrappers turn any optax transform into one that runs inside `jax.shard_map` on the
part that a device owns. In three phases, in the same words as in the code:

  scatter: local gradients are summed over devices, each sum arriving at its owner;
  update:  the inner transform sees the owned parts, as if they were all there is;
  gather:  the updates of all owners go to every device.

`zero2_matrices` gives whole matrices to owners, for Muon; `zero2_rows` slices of the
leading axis, for elementwise optimizers such as AdamW.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jax_muon.mesh.axes import (
    AxisName,
    axis_names,
    manual_axis_size,
    vary,
    varying_axes,
)
from jax_muon.mesh.owned import (
    Layout,
    MatrixLayout,
    Owned,
    RowLayout,
    check_devices,
    is_owned,
    map_owned,
)
from jax_muon.reading import paths
from jax_muon.reading.axes import DimensionNumbers
from jax_muon.reading.joins import Joins


def zero2_matrices(
    inner: optax.GradientTransformation,
    axis: AxisName,
    *,
    dimension_numbers: DimensionNumbers = None,
    joins: Joins | None = None,
    reduce_dtype: jax.typing.DTypeLike | None = None,
    gather_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run a transform of matrices on the matrices that each device owns.

    All matrices of one shape form one stack, which takes one reduce-scatter and one
    all-gather. Where their number does not divide, the odd ones go to the devices that
    have least to do, and `orthogonalize` does not compute the others' empty slots.

    Args:
      inner: a transform that treats matrices independently, on leaves (k, in, out), and
        (k, K, in, out) of joined ones: every piece of this package, and their chains.
      axis: mesh axis, or axes, that the gradients were computed over.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`. The
        inner transform needs none.
      joins: which matrices are orthogonalized as one, and so have one owner; see
        `orthogonalize`. The inner transform needs none.
      reduce_dtype: of gradients on the wire; None for their own.
      gather_dtype: of updates on the wire; None for their own.

    Returns:
      A transform for use inside `jax.shard_map`: see `init_optimizer` and
      `make_train_step`. It takes local gradients and gives updates that are the same on
      all devices, those of the mean gradient.

    Raises:
      ValueError: while tracing: outside shard_map, an unknown axis, gradients that are
        not local, state or a tree of another layout.

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054; nanochat's DistMuonAdamW.
    """

    def layout(tree: Any, devices: int) -> Layout:
        return MatrixLayout.of(tree, axis, devices, dimension_numbers, joins)

    return _Owners(
        optax.with_extra_args_support(inner),
        axis,
        layout,
        reduce_dtype,
        gather_dtype,
        "zero2_matrices",
    ).transform()


def zero2_rows(
    inner: optax.GradientTransformation,
    axis: AxisName,
    *,
    min_size: int = 1024,
    reduce_dtype: jax.typing.DTypeLike | None = None,
    gather_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run an elementwise transform on the rows that each device owns.

    Args:
      inner: a transform that treats elements independently, such as `optax.adamw`.
      axis: mesh axis, or axes, that the gradients were computed over.
      min_size: leaves with fewer elements are all-reduced and updated everywhere, in
        one collective. Others are divided along their leading axis, padded with zeros.
      reduce_dtype: of divided gradients on the wire; None for their own.
      gather_dtype: of updates on the wire; None for their own.

    Returns:
      A transform for use inside `jax.shard_map`, as `zero2_matrices` gives.

    Raises:
      ValueError: as `zero2_matrices`.

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """

    def layout(tree: Any, devices: int) -> Layout:
        return RowLayout.of(tree, axis, devices, min_size)

    return _Owners(
        optax.with_extra_args_support(inner),
        axis,
        layout,
        reduce_dtype,
        gather_dtype,
        "zero2_rows",
    ).transform()


@dataclasses.dataclass(frozen=True)
class _Owners:
    """An inner transform and its layout, with the phases of an update one by one."""

    inner: optax.GradientTransformationExtraArgs
    axis: AxisName
    make_layout: Callable[[Any, int], Layout]
    reduce_dtype: Any
    gather_dtype: Any
    name: str

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """All phases as one optax transform."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def layout(self, tree: Any) -> Layout:
        return self.make_layout(tree, manual_axis_size(self.axis, self.name))

    def init(self, params: optax.Params) -> Any:
        if not jax.tree.leaves(params):  # nothing to divide, and perhaps no mesh
            return self.inner.init(params)
        return _vary_owned(self.inner.init(self.layout(params).own(params)))

    def scatter(self, updates: optax.Updates, state: Any) -> Owned:
        layout = self.layout(updates)
        _check_local(updates, self.axis, self.name)
        _check_state(state, layout, self.name)
        return layout.scatter(updates, self.reduce_dtype)

    def update_and_gather(
        self, owned: Owned, state: Any, params: optax.Params | None, extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        layout = owned.layout
        if isinstance(layout, MatrixLayout):
            stacks = {"filled": layout.filled(), "joined": layout.joined()}
            extra_args = {**extra_args, **stacks}
        owned_params = None if params is None else layout.own(params)
        owned, state = self.inner.update(owned, state, owned_params, **extra_args)
        return layout.gather(owned, self.gather_dtype), _vary_owned(state)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        if not jax.tree.leaves(updates):
            return self.inner.update(updates, state, params, **extra_args)
        owned = self.scatter(updates, state)
        return self.update_and_gather(owned, state, params, extra_args)


def is_zero2(tx: optax.GradientTransformation) -> bool:
    """Whether a transform is what `zero2_matrices` or `zero2_rows` gives."""
    return isinstance(getattr(tx.update, "__self__", None), _Owners)


def zero2_multi_transform(
    transforms: Mapping[str, optax.GradientTransformation],
    labels: Any,
    before: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`optax.multi_transform` of ZeRO-2 wrappers, after a transform of all they own.

    Args:
      transforms: label to a transform that `zero2_matrices` or `zero2_rows` made.
      labels: a tree of labels, or a function of the parameters.
      before: applied to the reduced gradients of all groups together, between scatter
        and update: `clip_by_global_norm(1.0, axis=...)`, which there costs the sum of
        one number over devices. Its state must not depend on parameters.

    Returns:
      A transform whose state is that of `optax.chain(before, multi_transform)`.

    Raises:
      ValueError: a transform that is no ZeRO-2 wrapper; and as these raise.
    """
    groups: dict[str, _Owners] = {}
    for label, tx in transforms.items():
        if not is_zero2(tx):
            raise ValueError(
                f"the transform of {label!r} is {tx}; valid is what zero2_matrices or "
                "zero2_rows gives"
            )
        groups[label] = tx.update.__self__
    init_fn = optax.chain(before, optax.multi_transform(transforms, labels)).init

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        before_state, partition = state
        label_tree = labels(updates) if callable(labels) else labels

        def members(tree: Any, label: str) -> Any:
            return jax.tree.map(
                lambda own, x: x if own == label else optax.MaskedNode(),
                label_tree,
                tree,
            )

        masked = {label: members(updates, label) for label in groups}
        filled = [label for label in groups if jax.tree.leaves(masked[label])]
        states = dict(partition.inner_states)
        owned = {
            label: groups[label].scatter(masked[label], states[label].inner_state)
            for label in filled
        }
        owned, before_state = before.update(owned, before_state)
        results = {}
        for label in filled:
            results[label], new = groups[label].update_and_gather(
                owned[label],
                states[label].inner_state,
                None if params is None else members(params, label),
                extra_args,
            )
            states[label] = states[label]._replace(inner_state=new)
        merged = jax.tree.map(
            lambda own, *parts: parts[filled.index(own)], label_tree, *results.values()
        )
        return merged, (before_state, partition._replace(inner_states=states))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _vary_owned(state: Any) -> Any:
    """Owned parts differ between devices, also while they are all zero."""

    def mark(owned: Owned) -> Owned:
        specs = owned.layout.specs().parts
        parts = {
            name: vary(x, owned.layout.axis) if specs[name] else x
            for name, x in owned.parts.items()
        }
        return Owned(parts, owned.layout)

    return map_owned(mark, state)


def _check_local(updates: Any, axis: AxisName, name: str) -> None:
    for path, leaf in paths.leaves_with_paths(updates):
        missing = set(axis_names(axis)) - varying_axes(leaf)
        if missing:
            raise ValueError(
                f"{name}: the gradient of {path!r} does not vary over the mesh axis "
                f"{sorted(missing)}, so it has been summed over it already; valid are "
                "local gradients: differentiate with respect to "
                f"jax.lax.pcast(params, {axis!r}, to='varying'), in a shard_map with "
                "check_vma=True"
            )


def _check_state(state: Any, layout: Layout, name: str) -> None:
    for node in jax.tree.leaves(state, is_leaf=is_owned):
        if not is_owned(node) or node.layout == layout:
            continue
        check_devices(node, layout.devices)
        raise ValueError(
            f"{name}: state that was initialized for "
            f"{', '.join(map(str, node.layout.leaves))}, updated with gradients of "
            f"{', '.join(map(str, layout.leaves))}"
        )
