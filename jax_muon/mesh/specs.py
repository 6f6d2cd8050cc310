"""How the arrays of a tree are sharded: PartitionSpecs from types, or from a user.

JAX's less stable APIs, about meshes and types in a trace, are used only here.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import checks, paths

AxisName = str | tuple[str, ...]

# A PartitionSpec or NamedSharding for all parameters, a tree (or a prefix of one) of
# them, or a function of a parameter's path. None in a tree: replicated.
Specs = Any

Sizes = Mapping[str, int]  # of mesh axes, by name


_PLACES = (PartitionSpec, NamedSharding)


def check_mesh(name: str, mesh: Any) -> None:
    """Raise a ValueError for anything but a mesh of devices."""
    checks.kind(name, mesh, Mesh, "a jax.sharding.Mesh")


def checked_axes(name: str, axis: Any, mesh: Mesh) -> tuple[str, ...]:
    """One or several axes of a mesh as a tuple, each once."""
    check_mesh("mesh", mesh)
    names = (axis,) if isinstance(axis, str) else axis
    if (
        not isinstance(names, (tuple, list))
        or any(one not in mesh.axis_names for one in names)
        or len(set(names)) < len(names)
    ):
        checks.refuse(name, axis, f"axes of the mesh, {mesh.axis_names}, each once")
    return tuple(names)


def check_specs(name: str, specs: Specs) -> None:
    """Raise a ValueError for anything but specs; see `on_mesh`."""
    if paths.is_function(specs) and not _is_place(specs):
        return
    for path, leaf in paths.leaves_with_paths(specs, is_leaf=_is_place):
        where = f"{name} at {path!r}" if path else name
        checks.kind(
            where, leaf, _PLACES, "a PartitionSpec, a NamedSharding, None, or a tree"
        )


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value differs between devices, inside shard_map."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def own_sharding(x: Any) -> NamedSharding | None:
    """The NamedSharding of an array, a tracer or a shape; None if it has none.

    For a tracer this reads the type. Its attribute `sharding` raises an error, and JAX
    walks every equation traced so far to write the message: 68 s for 400 leaves.
    """
    tracer = isinstance(x, jax.core.Tracer)
    found = jax.typeof(x).sharding if tracer else getattr(x, "sharding", None)
    return found if isinstance(found, NamedSharding) else None


def is_explicit(x: Any) -> bool:
    """Return True for an array on Explicit mesh axes, whose type shows its spec."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def replicated(x: Any) -> Any:
    """The same value, whole on every device if its type shows that it is sharded."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def entry_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def spec_names(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes of a PartitionSpec."""
    return tuple(name for entry in spec for name in entry_names(entry))


def devices_over(entry: Any, sizes: Sizes) -> int:
    """Devices that an entry of a PartitionSpec divides an axis over."""
    return math.prod(sizes[name] for name in entry_names(entry))


def shard_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Sizes
) -> tuple[int, ...]:
    """Shape of one device's shard of an array that the mesh divides evenly."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(
        size // devices_over(entry, sizes)
        for size, entry in zip(shape, entries, strict=True)
    )


def wire_dtype(dtype: Any, asked: Any) -> Any:
    """The dtype in which arrays are sent: the one asked for, if they are real."""
    real = jnp.issubdtype(dtype, jnp.floating)
    return dtype if asked is None or not real else asked


def arrays_and_others(extra_args: dict[str, Any]) -> tuple[dict, dict]:
    """Extra arguments that are trees of arrays, and all others."""
    arrays = {
        name: value
        for name, value in extra_args.items()
        if all(hasattr(x, "shape") for x in jax.tree.leaves(value))
        and jax.tree.leaves(value)
    }
    return arrays, {k: v for k, v in extra_args.items() if k not in arrays}


def bytes_on_a_device(x: Any) -> int:
    """Bytes of one device's shard of an array, as far as its type shows the spec."""
    sharding = jax.typeof(x).sharding
    shape = shard_shape(x.shape, sharding.spec, dict(sharding.mesh.shape))
    return math.prod(shape) * x.dtype.itemsize


def spec_by_path(specs: Specs) -> Callable[[str], PartitionSpec]:
    """Specs in any form, as a function of the path."""

    def as_spec(x: Any, path: str) -> PartitionSpec:
        if x is not None and not _is_place(x):
            raise ValueError(
                f"specs have {x!r} for parameter {path!r}; expected a PartitionSpec, a "
                "NamedSharding, or None"
            )
        return x.spec if isinstance(x, NamedSharding) else x or PartitionSpec()

    if paths.is_function(specs) and not _is_place(specs):
        return lambda path: as_spec(specs(path), path)
    flat = dict(
        paths.leaves_with_paths(specs, is_leaf=lambda x: x is None or _is_place(x))
    )
    if "" in flat:
        return lambda path: as_spec(flat[""], path)

    def find(path: str) -> PartitionSpec:
        prefix = path
        while prefix not in flat:
            if not prefix:
                raise ValueError(
                    f"specs have nothing for parameter {path!r}; there are "
                    + ", ".join(flat)
                )
            prefix = prefix.rpartition("/")[0]
        return as_spec(flat[prefix], path)

    return find


def _is_place(x: Any) -> bool:
    return isinstance(x, _PLACES)


def full_rank(
    spec: PartitionSpec, path: str, shape: tuple[int, ...], sizes: Sizes
) -> PartitionSpec:
    """The spec with an entry for each axis, if it fits.

    Raises:
      ValueError: with path and shape, for too many entries, unknown mesh axes, and axes
        that the devices do not divide evenly.
    """
    where = f"parameter {path!r} of shape {shape} with {spec}"
    if len(spec) > len(shape):
        raise ValueError(f"{where}: expected at most {len(shape)} entries")
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for size, entry in zip(shape, entries, strict=True):
        for name in entry_names(entry):
            if name not in sizes:
                raise ValueError(
                    f"{where}: expected the mesh axes {tuple(sizes)} or None"
                )
        devices = devices_over(entry, sizes)
        if size % devices:
            raise ValueError(
                f"{where}: {devices} devices do not divide {size}; expected axes that "
                "they do, or None"
            )
    return PartitionSpec(*entries)


def only(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """The spec with these mesh axes only."""
    return PartitionSpec(
        *(tuple(n for n in entry_names(entry) if n in axes) for entry in spec)
    )


def dividing(spec: PartitionSpec, sizes: Sizes) -> PartitionSpec:
    """The spec without mesh axes of one device, which divide nothing."""
    return only(spec, {name for name, size in sizes.items() if size > 1})


def as_jit_writes(spec: PartitionSpec, sizes: Sizes) -> PartitionSpec:
    """The spec, spelled as JAX spells it for results of jit on Auto axes.

    P("a", None) and P("a") are different specs to JAX, which would compile again.
    """
    spec = dividing(spec, sizes)
    while len(spec) and spec[-1] is None:
        spec = PartitionSpec(*spec[:-1])
    return spec


def check_same_everywhere(what: str, flat: Sequence[tuple[str, Any]]) -> None:
    """Check that arrays inside shard_map are the same on all devices.

    Raises:
      ValueError: with the path, if they differ or JAX does not track it.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # A device's index differs between devices; without check_vma its type is like any.
    if manual and flat and not varying_axes(jax.lax.axis_index(manual[0])):
        raise ValueError(
            f"{what}: parameter {flat[0][0]!r} and others are inside jax.pmap, or "
            f"shard_map with check_vma=False, over {manual}, where JAX does not track "
            "whether they differ between devices; expected the update outside, on "
            "global arrays, as in jax_muon.make_train_step, or in shard_map with "
            "check_vma=True"
        )
    for path, leaf in flat if manual else ():
        if differing := sorted(varying_axes(leaf)):
            raise ValueError(
                f"{what}: parameter {path!r} differs between the devices of the mesh "
                f"axis {differing}, inside shard_map, and would be treated block by "
                "block. Expected a call outside shard_map, on global arrays: give the "
                "gradients out of shard_map with out_specs, and call the update of "
                "jax_muon.on_mesh(tx, mesh) on them; make_train_step does so"
            )


def check_not_in_spmd_vmap(names: Sequence[str]) -> None:
    """Raise a ValueError in a `jax.vmap` whose spmd_axis_name is one of these axes.

    Types there look as if that axis repeated the arrays, so matrices would get owners
    on other workers' devices. JAX fails later, with an error that does not say so.
    """
    from jax._src import core  # JAX 0.10 shows it nowhere else

    env = getattr(core, "get_axis_env", lambda: None)()
    mapped = getattr(env, "spmd_axis_names", ())
    if found := [name for name in names if name in mapped]:
        raise ValueError(
            f"on_mesh inside jax.vmap(spmd_axis_name={found[0]!r}), an axis of its "
            "mesh; expected a call outside the vmap, on the stacked arrays with "
            f"{found[0]!r} first in their specs: the axis of a stack is a batch"
        )


def local_types(flat: Sequence[tuple[str, Any]]) -> Any:
    """The mesh with Explicit axes that these arrays are on, or None.

    Args:
      flat: arrays with their paths, as `orthogonalize` sees them.

    Returns:
      The abstract mesh, if an array's type shows one with several devices; None on one
      device, and for arrays that are whole inside shard_map.

    Raises:
      ValueError: with the path, for an array whose type does not show how it is
        sharded: on a mesh with Auto axes, or different on the devices of a shard_map.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    check_same_everywhere("orthogonalize", flat)
    for path, leaf in flat:
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Auto in mesh.axis_types and mesh.size > 1 and not manual:
            raise ValueError(
                f"parameter {path!r} and others are on a mesh {dict(mesh.shape)} with "
                "Auto axes, where types show no sharding; expected the optimizer "
                "within jax_muon.on_mesh(tx, mesh, specs), where specs are, say, "
                "jax.tree.map(lambda p: p.sharding, params), or none for parameters "
                "that are replicated; or a mesh with Explicit axes"
            )
    if manual:
        return None
    return next(
        (jax.typeof(x).sharding.mesh for _, x in flat if is_explicit(x)),
        None,
    )
