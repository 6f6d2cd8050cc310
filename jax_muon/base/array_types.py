"""The mesh of arrays and how they are sharded on it, as their types show."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

if TYPE_CHECKING:  # of a higher floor, whose module sets it here
    from jax_muon.mesh.communicator import Scans


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Facts about the code that is being traced which types of arrays do not show."""

    trusted: bool = False  # in `on_replicas`: every device has whole arrays
    users_mesh: AbstractMesh | None = None  # inside `on_mesh`: the mesh around it
    devices_per_host: int = 8  # neighbours on the mesh of `on_mesh`
    scans: "Scans | None" = None  # in the loss of a train step


_NONE = Surroundings()
_surroundings = contextvars.ContextVar("jax_muon_surroundings", default=_NONE)


def surroundings() -> Surroundings:
    """The surroundings of the code that is being traced."""
    return _surroundings.get()


@contextlib.contextmanager
def setting(**changes: Any) -> Iterator[None]:
    """Inside the `with` block, fields of the surroundings have these values.

    `with setting(trusted=True): tx.update(...)` is what `on_replicas` does.
    """
    token = _surroundings.set(dataclasses.replace(surroundings(), **changes))
    try:
        yield
    finally:
        _surroundings.reset(token)


def on_users_axes() -> contextlib.AbstractContextManager[Any]:
    """The mesh outside of `on_mesh`: a user's loss may not know Explicit axes."""
    mesh, on = surroundings().users_mesh, jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else on(mesh)


def own_sharding(x: object) -> NamedSharding | None:
    """The NamedSharding of an array, a tracer or a shape; None if it has none.

    For a tracer this reads the type. Its attribute `sharding` raises an error, and JAX
    walks every equation traced so far to write the message: 68 s for 400 leaves.
    """
    tracer = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if tracer else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def is_explicit(x: object) -> bool:
    """True for an array on Explicit mesh axes, whose type shows its spec.

    `jax.typeof(x)` is then `float32[1024@data,768]`; on Auto axes float32[1024,768].
    """
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def entries(x: Array) -> tuple[Any, ...]:
    """The entry of the spec for each axis; None where the type does not show it."""
    if not (isinstance(x, jax.Array) and is_explicit(x)):
        return (None,) * x.ndim
    return tuple(jax.typeof(x).sharding.spec)


def reshard(x: Array, spec: Iterable[Any]) -> Array:
    """The array with these entries of its spec, if its type shows them."""
    spec = PartitionSpec(*spec)
    if entries(x) == tuple(spec):
        return x
    return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))


def reshape(x: Array, shape: Sequence[int], spec: Iterable[Any]) -> Array:
    """The array in another shape, with these entries of its spec."""
    if not (isinstance(x, jax.Array) and is_explicit(x)):
        return x.reshape(tuple(shape))
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.reshape(x, tuple(shape), out_sharding=sharding)


def replicated(tree: PyTree) -> PyTree:
    """The tree with its arrays replicated, where types show how they are sharded."""
    # On Auto axes XLA gathers what it needs; on Explicit ones JAX refuses a product of
    # a sharded norm with arrays that are sharded otherwise.
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return tree
    return jax.tree.map(
        lambda x: jax.reshard(x, PartitionSpec()) if hasattr(x, "shape") else x, tree
    )


def arrays_and_others(
    extra_args: Mapping[str, PyTree],
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """Extra arguments that are trees of arrays, and all others.

    Of max_logits={"q": Array}, value_fn=loss: the first is traced, the second is not.
    """
    arrays: dict[str, PyTree] = {}
    others: dict[str, PyTree] = {}
    for name, value in extra_args.items():
        leaves = jax.tree.leaves(value)
        are_arrays = leaves and all(hasattr(x, "shape") for x in leaves)
        (arrays if are_arrays else others)[name] = value
    return arrays, others


def check_same_everywhere(what: str, flat: Sequence[tuple[str, Array]]) -> None:
    """Raise a ValueError if arrays inside shard_map may differ between devices.

    Under in_specs=P("data"), a parameter (1024, 768) is a block (128, 768) on each of
    eight devices, and each block would get a separate polar factor. Mesh axes of one
    device are not checked, and nothing is inside `on_replicas`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(name for name in mesh.manual_axes if mesh.shape[name] > 1)
    if surroundings().trusted or not manual or not flat:
        return

    def varying(x: Array) -> set[str]:
        return {*jax.typeof(x).manual_axis_type.varying}

    # A device's index varies over "data". If its type does not say so, check_vma is
    # False, and no type says anything.
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


def mesh_of_types(flat: Sequence[tuple[str, Array]]) -> AbstractMesh | None:
    """The Explicit mesh of these arrays; None on one device, or for whole arrays.

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
