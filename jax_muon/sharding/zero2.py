"""ZeRO-2: parameters replicated, gradients reduced straight to owners, state divided.

Two wrappers turn any optax transform into one that runs inside `jax.shard_map` on the
part that a device owns. In three phases, in the same words as in the code:

  scatter: local gradients are summed over devices, each sum arriving at its owner;
  update:  the inner transform sees the owned parts, as if they were all there is;
  gather:  the updates of all owners go to every device.

`zero2_matrices` gives whole matrices to owners, for Muon; `zero2_rows` slices of the
leading axis, for elementwise optimizers such as AdamW.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jax_muon import paths
from jax_muon.matrices import DimensionNumbers
from jax_muon.sharding.axes import (
    AxisName,
    axis_names,
    manual_axis_size,
    vary,
    varying_axes,
)
from jax_muon.sharding.owned import (
    Layout,
    MatrixLayout,
    Owned,
    RowLayout,
    check_devices,
    is_owned,
    map_owned,
)


def zero2_matrices(
    inner: optax.GradientTransformation,
    axis: AxisName,
    *,
    dimension_numbers: DimensionNumbers = None,
    reduce_dtype: jax.typing.DTypeLike | None = None,
    gather_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run a transform of matrices on the matrices that each device owns.

    All matrices of one shape form one stack, which takes one reduce-scatter and one
    all-gather. Where their number does not divide, the odd ones go to the devices that
    have least to do, and `orthogonalize` does not compute the others' empty slots.

    Args:
      inner: a transform that treats matrices independently, on leaves (k, in, out):
        every piece of this package, and chains of them.
      axis: mesh axis, or axes, that the gradients were computed over.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`. The
        inner transform needs none.
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
        return MatrixLayout.of(tree, axis, devices, dimension_numbers)

    name = "zero2_matrices"
    return _zero2(inner, axis, layout, reduce_dtype, gather_dtype, name)


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
      reduce_dtype: of gradients on the wire; None for their own.
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

    return _zero2(inner, axis, layout, reduce_dtype, gather_dtype, "zero2_rows")


def _zero2(
    inner: optax.GradientTransformation,
    axis: AxisName,
    make_layout: Callable[[Any, int], Layout],
    reduce_dtype: Any,
    gather_dtype: Any,
    name: str,
) -> optax.GradientTransformationExtraArgs:
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> Any:
        if not jax.tree.leaves(params):
            return inner.init(params)
        layout = make_layout(params, manual_axis_size(axis, name))
        return _vary_owned(inner.init(layout.own(params)))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        if not jax.tree.leaves(updates):
            return inner.update(updates, state, params, **extra_args)
        layout = make_layout(updates, manual_axis_size(axis, name))
        _check_local(updates, axis, name)
        _check_state(state, layout, name)
        if isinstance(layout, MatrixLayout):
            extra_args = {**extra_args, "filled": layout.filled()}

        owned = layout.scatter(updates, reduce_dtype)
        owned_params = None if params is None else layout.own(params)
        owned, state = inner.update(owned, state, owned_params, **extra_args)
        return layout.gather(owned, gather_dtype), _vary_owned(state)

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
            f"{[(leaf.path, leaf.shape) for leaf in node.layout.leaves]}, updated with "
            f"{[(leaf.path, leaf.shape) for leaf in layout.leaves]}"
        )
