"""What a trace knows about mesh axes; JAX's unstable corners are read only here."""

from typing import Any

import jax

AxisName = str | tuple[str, ...]


def axis_names(axis: AxisName) -> tuple[str, ...]:
    """One or several mesh axes as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value differs between devices, inside shard_map."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Any, axis: AxisName) -> Any:
    """The same value, marked as different on every device of the axis."""
    missing = tuple(name for name in axis_names(axis) if name not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def replicated(x: Any) -> Any:
    """The same value whole on every device, where its type says that it is divided."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.reshard(x, jax.NamedSharding(sharding.mesh, jax.P()))


def manual_axis_size(axis: AxisName, what: str) -> int:
    """Number of devices along an axis, which must be manual here.

    Raises:
      ValueError: outside shard_map, or the axis is unknown there or not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for name in axis_names(axis):
        if name not in mesh.manual_axes:
            raise ValueError(
                f"{what}: mesh axis {name!r} is not manual here (mesh axes "
                f"{mesh.axis_names}, manual {mesh.manual_axes}); valid is a call "
                "inside jax.shard_map over that axis, as init_optimizer and "
                "make_train_step do"
            )
    return jax.lax.axis_size(axis_names(axis))
