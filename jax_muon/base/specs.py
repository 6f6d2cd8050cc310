"""PartitionSpecs: their mesh axes, and how many devices these divide an array over."""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.base import checks

AxisName = str | tuple[str, ...]

Sizes = Mapping[str, int]  # of mesh axes, by name


def checked_axes(name: str, axis: Any, mesh: Mesh) -> tuple[str, ...]:
    """One or several axes of a mesh as a tuple, each once; all of them for None."""
    checks.check_kind("mesh", mesh, Mesh, "a jax.sharding.Mesh")
    every = mesh.axis_names
    names = checks.as_strings(name, every if axis is None else axis)
    if not {*names} <= {*every} or len({*names}) < len(names):
        checks.refuse(name, axis, f"axes of the mesh, {every}, each once")
    return names


def full_rank(
    spec: PartitionSpec, path: str, shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
    """The spec with an entry for each axis; a ValueError if it does not fit."""
    try:
        sharding = NamedSharding(mesh, spec)
        jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)  # checks the rank
        sharding.shard_shape(shape)
    except Exception as error:  # its type differs
        name = f"parameter {path!r}" if path else "the parameter"  # of a bare array
        raise ValueError(
            f"{name} of shape {shape} with {spec}: {error}; expected None, or axes of "
            f"the mesh {dict(mesh.shape)} that divide the array evenly, such as "
            "those of jax_muon.fsdp(params, mesh, matrices)"
        ) from None
    return PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))


def entry_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def spec_names(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes of a PartitionSpec."""
    return tuple(name for entry in spec for name in entry_names(entry))


def devices_over(entry: Any, sizes: Sizes) -> int:
    """Devices along one or several mesh axes: an entry of a PartitionSpec, or names."""
    return math.prod(sizes[name] for name in entry_names(entry))


def only(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """The spec with these mesh axes only."""
    return PartitionSpec(
        *(tuple(n for n in entry_names(entry) if n in axes) for entry in spec)
    )


def finer(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    names: Sequence[str],
    sizes: Sizes,
    last: Sequence[int] = (),
) -> PartitionSpec:
    """The spec with other mesh axes added to the first axis that all of them divide.

    Axes of `last` come after all others, in that order. If none fits, the spec stays as
    it is.
    """
    names = tuple(name for name in names if name not in spec_names(spec))
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for axis in [x for x in range(len(shape)) if x not in last] + [*last]:
        entry = (*entry_names(entries[axis]), *names)
        if names and shape[axis] % devices_over(entry, sizes) == 0:
            entries[axis] = entry
            return PartitionSpec(*entries)
    return spec


def spelled(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """The sharding, spelled as JAX spells it for results of jit.

    P("a", None) and P("a") are different specs to JAX, which would compile again.
    """
    if AxisType.Auto in mesh.axis_types:
        spec = dividing(spec, mesh.shape)
        while spec and spec[-1] is None:
            spec = PartitionSpec(*spec[:-1])
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def dividing(spec: PartitionSpec, sizes: Sizes) -> PartitionSpec:
    """The spec without mesh axes of one device, which divide nothing."""
    return only(spec, divided_axes(sizes))


def divided_axes(sizes: Sizes) -> tuple[str, ...]:
    """Mesh axes with more than one device."""
    return tuple(name for name, size in sizes.items() if size > 1)
