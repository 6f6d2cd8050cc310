"""What the types of arrays show: their mesh, and how they are sharded on it."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a transform or a loss is traced in, where types of arrays do not show it."""

    trusted: bool = False  # in `on_replicas`, which takes all arrays for whole
    users_mesh: AbstractMesh | None = None  # outside `on_mesh`; None if in none
    devices_per_host: int = 8  # neighbours on the mesh of `on_mesh`
    scans: Any = None  # in the loss of a train step; see `mesh/communicator.py`


_NONE = Surroundings()
_surroundings = contextvars.ContextVar("jax_muon_surroundings", default=_NONE)


def surroundings() -> Surroundings:
    """Those of what is being traced."""
    return _surroundings.get()


@contextlib.contextmanager
def setting(**changes: Any) -> Iterator[None]:
    """These fields of the surroundings have other values inside the `with` block."""
    token = _surroundings.set(dataclasses.replace(surroundings(), **changes))
    try:
        yield
    finally:
        _surroundings.reset(token)


@contextlib.contextmanager
def on_explicit_axes(mesh: AbstractMesh, devices_per_host: int) -> Iterator[None]:
    """Inside the `with` block, types of arrays show how they are sharded on `mesh`."""
    known = {"devices_per_host": devices_per_host}
    outer = jax.sharding.get_abstract_mesh()
    with setting(users_mesh=outer, **known), jax.sharding.use_abstract_mesh(mesh):
        yield


def on_users_axes() -> contextlib.AbstractContextManager[Any]:
    """The mesh outside `on_explicit_axes`: a user's loss may not know Explicit axes."""
    mesh, on = surroundings().users_mesh, jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else on(mesh)


def own_sharding(x: Any) -> NamedSharding | None:
    """The NamedSharding of an array, a tracer or a shape; None if it has none.

    For a tracer this reads the type. Its attribute `sharding` raises an error, and JAX
    walks every equation traced so far to write the message: 68 s for 400 leaves.
    """
    tracer = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if tracer else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def is_explicit(x: Any) -> bool:
    """True for an array on Explicit mesh axes, whose type shows its spec."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def replicated(tree: Any) -> Any:
    """The tree with its arrays replicated, where types show how they are sharded."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return tree
    return jax.tree.map(
        lambda x: jax.reshard(x, PartitionSpec()) if hasattr(x, "shape") else x, tree
    )


def arrays_and_others(extra_args: dict[str, Any]) -> tuple[dict, dict]:
    """Extra arguments that are trees of arrays, and all others."""
    arrays: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in extra_args.items():
        leaves = jax.tree.leaves(value)
        are_arrays = leaves and all(hasattr(x, "shape") for x in leaves)
        (arrays if are_arrays else others)[name] = value
    return arrays, others


def check_same_everywhere(what: str, flat: Sequence[tuple[str, Any]]) -> None:
    """Raise a ValueError if arrays inside shard_map may differ between devices.

    Not over mesh axes of one device, nor where the user says so by `on_replicas`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(name for name in mesh.manual_axes if mesh.shape[name] > 1)
    if surroundings().trusted or not manual or not flat:
        return

    def varying(x: Any) -> set[str]:
        return {*jax.typeof(x).manual_axis_type.varying}

    # A device's index differs between devices; without check_vma its type is like any.
    if not varying(jax.lax.axis_index(manual)):
        raise ValueError(
            f"{what} is inside jax.pmap, or shard_map with check_vma=False, where JAX "
            "does not track what differs between devices; expected it within "
            "jax_muon.on_replicas(tx), if all have whole parameters and the same "
            "gradients; or the update outside, or in shard_map with check_vma=True"
        )
    for path, leaf in flat:
        if differing := sorted(varying(leaf) & {*manual}):
            raise ValueError(
                f"{what}: parameter {path!r} differs between the devices of the mesh "
                f"axis {differing}, inside shard_map, and would be treated block by "
                "block; expected jax_muon.on_mesh(tx, mesh) outside of it, on the "
                "gradients that it returns, as in jax_muon.make_train_step"
            )


def mesh_of_types(flat: Sequence[tuple[str, Any]]) -> Any:
    """The mesh with Explicit axes of these arrays; None for whole ones in shard_map.

    Raises a ValueError for an array whose type does not show how it is sharded.
    """
    check_same_everywhere("orthogonalize", flat)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    for path, leaf in flat:
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Auto in mesh.axis_types and mesh.size > 1:
            raise ValueError(
                f"parameter {path!r} is on a mesh {dict(mesh.shape)} with Auto axes, "
                "where types show no sharding; expected the optimizer within "
                "jax_muon.on_mesh(tx, where), with jax.tree.map(lambda p: p.sharding, "
                "params), or with the mesh for replicated parameters"
            )
    return next((jax.typeof(x).sharding.mesh for _, x in flat if is_explicit(x)), None)
