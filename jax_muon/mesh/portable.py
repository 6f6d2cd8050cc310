"""Optimizer state of any layout to the one portable state, and back.

The portable state is what the same recipe would hold on one device: a checkpoint of it
resumes on any number of devices and in any layout. Its arrays are spread over the mesh,
so that no device and no host holds all of them: where parameters are divided, it is the
state itself, divided as they are.
"""

from typing import Any

import jax
import optax
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jaxtyping import Array

from jax_muon.mesh.axes import axis_names, vary
from jax_muon.mesh.global_view import GlobalView, own_specs, state_shardings
from jax_muon.mesh.owned import Layout, Owned, is_owned, map_owned, state_specs
from jax_muon.mesh.train_step import abstract_state


def to_portable(state: optax.OptState) -> optax.OptState:
    """The portable state of any state of this package.

    Args:
      state: of a recipe or chain in any layout. State that is not divided by ZeRO-2 is
        portable as it is.

    Returns:
      The same state on the plain parameters, spread over the devices of `state`.
    """
    nodes = [x for x in jax.tree.leaves(state, is_leaf=is_owned) if is_owned(x)]
    if not nodes:
        return state
    (leaf, *_) = jax.tree.leaves(nodes[0])
    mesh = leaf.sharding.mesh
    return jax.jit(lambda state: _gather(state, mesh))(state)


def from_portable(
    tx: optax.GradientTransformation,
    params: optax.Params,
    portable: optax.OptState,
    mesh: Mesh | None = None,
) -> optax.OptState:
    """The state of `tx` on a mesh, from the portable state.

    Args:
      tx: a recipe or chain with the settings that made the state, in any layout.
      params: the parameters, or their shapes; if they are divided over the mesh, or
        their shapes tell so, the state will be as well.
      portable: as `to_portable` gave it, or a checkpoint of that.
      mesh: the mesh whose axes `tx` names, or that `params` lie on; None for one
        device.

    Returns:
      The state that `init_optimizer(tx, params, mesh)` builds, or `tx.init(params)` for
      divided parameters, with these values.

    Raises:
      ValueError: `portable` is not a state of `tx` on these parameters.
    """
    target = abstract_portable(tx, params, mesh)
    valid: Any = jax.tree.structure(target)
    if valid != jax.tree.structure(portable):
        raise ValueError(
            "the portable state is not one of this optimizer on these parameters: "
            f"{jax.tree.structure(portable)}; valid is {valid}"
        )

    def check(key_path: Any, want: Any, have: Any) -> None:
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            raise ValueError(
                f"portable state{jax.tree_util.keystr(key_path)} has shape "
                f"{have.shape} and dtype {have.dtype}; valid is {want.shape} and "
                f"{want.dtype}"
            )

    jax.tree_util.tree_map_with_path(check, target, portable)
    placed = jax.device_put(portable, jax.tree.map(lambda x: x.sharding, target))
    if mesh is None:
        return placed
    template = abstract_state(tx, _shapes(params), mesh)
    if not any(map(is_owned, jax.tree.leaves(template, is_leaf=is_owned))):
        return placed
    return jax.jit(lambda portable: _own(template, portable, mesh))(placed)


def abstract_portable(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> optax.OptState:
    """Shapes, dtypes and shardings of the portable state, to restore a checkpoint into.

    Args:
      tx: the optimizer, in any layout.
      params: the parameters, or their shapes, with shardings if they are divided.
      mesh: the mesh whose axes `tx` names, or that `params` lie on; None for one
        device.

    Returns:
      The portable state as `jax.ShapeDtypeStruct`s with shardings.
    """
    if mesh is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            jax.eval_shape(tx.init, _shapes(params)),
        )
    template = abstract_state(tx, _shapes(params), mesh)

    def portable(x: Any, sharding: Any) -> Any:
        if not is_owned(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)
            ),
            x.layout.plain(x),
            _spread(x),
        )

    view = GlobalView.of(params, mesh, own_specs(params))
    shardings = state_shardings(template, params, view)
    return jax.tree.map(portable, template, shardings, is_leaf=is_owned)


def _shapes(params: Any) -> Any:
    """Shapes and dtypes without shardings, as one device has them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


# --- the two directions, inside shard_map ---------------------------------------------


def _gather(state: Any, mesh: Mesh) -> Any:
    """Owned parts to plain leaves, of which every device keeps a share."""

    def local(state: Any) -> Any:
        def plain(owned: Owned) -> Any:
            tree = owned.layout.gather(owned, None)
            return jax.tree.map(lambda x: _share(x, owned.layout), tree)

        return map_owned(plain, state)

    spread = jax.tree.map(_spread, state, is_leaf=is_owned)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(state_specs(state),), out_specs=spread
    )(state)


def _own(template: Any, portable: Any, mesh: Mesh) -> Any:
    """Plain leaves, of which every device has a share, to owned parts."""
    nodes, structure = jax.tree.flatten(template, is_leaf=is_owned)
    treedef: Any = structure

    def local(portable: Any) -> Any:
        parts = []
        for node, plain in zip(nodes, treedef.flatten_up_to(portable), strict=True):
            if is_owned(node):
                layout = node.layout
                shapes = layout.plain(node)
                plain = jax.tree.map(
                    lambda x, like, layout=layout: _whole(x, like.shape, layout),
                    plain,
                    shapes,
                )
                plain = layout.own(plain)
            parts.append(plain)
        return jax.tree.unflatten(treedef, parts)

    spread = jax.tree.map(_spread, template, is_leaf=is_owned)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(spread,), out_specs=state_specs(template)
    )(portable)


def _spread(x: Any) -> Any:
    """PartitionSpecs of the plain leaves of an `Owned` node, or of a leaf."""
    if not is_owned(x):
        return PartitionSpec()
    layout = x.layout

    def spec(leaf: Any) -> PartitionSpec:
        axis = _divided_axis(leaf.shape, layout)
        if axis is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * axis, axis_names(layout.axis))

    return jax.tree.map(spec, layout.plain(x))


def _divided_axis(shape: tuple[int, ...], layout: Layout) -> int | None:
    """The first axis that the devices divide."""
    for axis, size in enumerate(shape):
        if size and size % layout.devices == 0:
            return axis
    return None


def _share(x: Array, layout: Layout) -> Array:
    axis = _divided_axis(x.shape, layout)
    if axis is None:
        return x
    size = x.shape[axis] // layout.devices
    start = jax.lax.axis_index(axis_names(layout.axis)) * size
    return jax.lax.dynamic_slice_in_dim(vary(x, layout.axis), start, size, axis)


def _whole(x: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    axis = _divided_axis(shape, layout)
    if axis is None:
        return x
    names = axis_names(layout.axis)
    return jax.lax.all_gather(x, names, axis=axis, tiled=True, to="invarying")
