"""The mesh of arrays and how they are sharded on it, as their types show."""

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from jax_muon.base import specs, trees


@dataclasses.dataclass(frozen=True)
class LayoutByPath:
    """How the arrays of a tree are sharded on a mesh whose axes are Auto."""

    mesh: Mesh | AbstractMesh
    specs: Mapping[str, PartitionSpec]  # {"up": P(None, "data")}, and so on


@dataclasses.dataclass(frozen=True)
class MeshContext:
    """What types do not show about the arrays of the code that is being traced."""

    replicas: bool = False  # in `on_replicas`: every device has whole arrays
    layout: LayoutByPath | None = None  # inside `on_mesh`, of the gradients
    users_mesh: AbstractMesh | None = None  # inside `on_mesh`, the mesh around it
    scans: Any = None  # in the loss of a train step: its `Scans`, see `communicator.py`


_NONE = MeshContext()
_context = contextvars.ContextVar("jax_muon_mesh_context", default=_NONE)


def mesh_context() -> MeshContext:
    """The context of the code that is being traced."""
    return _context.get()


@contextlib.contextmanager
def in_mesh_context(**changes: Any) -> Iterator[None]:
    """Inside the `with` block, fields of the context have these values.

    `with in_mesh_context(replicas=True): tx.update(...)` is what `on_replicas` does.
    """
    token = _context.set(dataclasses.replace(mesh_context(), **changes))
    try:
        yield
    finally:
        _context.reset(token)


def on_users_axes() -> contextlib.AbstractContextManager[Any]:
    """The mesh outside of `on_mesh`, for whose kind of axes a loss was written."""
    mesh, on = mesh_context().users_mesh, jax.sharding.use_abstract_mesh
    return contextlib.nullcontext() if mesh is None else on(mesh)


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
    if entries(x) == tuple(spec) or not is_explicit(x):
        return x
    return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))


def reshape(x: Array, shape: Sequence[int], spec: Iterable[Any]) -> Array:
    """The array in another shape, with these entries of its spec."""
    if not (isinstance(x, jax.Array) and is_explicit(x)):
        return x.reshape(tuple(shape))
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.reshape(x, tuple(shape), out_sharding=sharding)


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
    if mesh_context().replicas or not manual or not flat:
        return

    def varying(x: Array) -> set[str]:
        return {*jax.typeof(x).manual_axis_type.varying}

    # A device's index varies over "data". If its type does not say so, check_vma is
    # False, and no type says anything.
    if not varying(jax.lax.axis_index(manual)):
        raise ValueError(
            f"{what} is inside jax.pmap, or shard_map with check_vma=False, where JAX "
            "does not track what differs between devices; use it within "
            "jax_muon.on_replicas(tx), if all have whole parameters and the same "
            "gradients; or the update outside, or in shard_map with check_vma=True"
        )
    for path, leaf in flat:
        if differing := sorted(varying(leaf) & {*manual}):
            raise ValueError(
                f"{what}: parameter {path!r} differs between the devices of the mesh "
                f"axis {differing}, inside shard_map, and would be treated block by "
                "block; use jax_muon.on_mesh(tx, mesh) outside of it, on the "
                "gradients that it returns, as in jax_muon.make_train_step"
            )


def explicit(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh on which types of arrays show how they are sharded."""
    kinds = dict.fromkeys(mesh.axis_names, AxisType.Explicit)
    mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return mesh.update_axis_types(kinds)


def shapes_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes of arrays, without their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def with_shardings(tree: PyTree, shardings: Iterable[NamedSharding]) -> PyTree:
    """Shapes and dtypes of arrays, with a sharding for each leaf."""
    treedef: PyTreeDef
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    )


def typed(
    tree: PyTree, specs: Iterable[PartitionSpec], mesh: Mesh | AbstractMesh
) -> PyTree:
    """Shapes of arrays, with a spec for each leaf: on Explicit axes in its type."""
    return with_shardings(tree, [NamedSharding(mesh, spec) for spec in specs])


def viewed(
    view: Callable[[PyTree], PyTree], tree: PyTree
) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block, the layout has the leaves of `view(tree)`.

    Types say how these are sharded, as on Explicit axes: with "qkv" on P(None, "data"),
    a view of its parts has "qkv/q" on P(None, "data"), and so on.
    """
    layout = mesh_context().layout
    if layout is None:
        return contextlib.nullcontext()
    mesh = explicit(layout.mesh)
    given = [spec_of(layout, *leaf) for leaf in trees.leaves_with_paths(tree)]
    with jax.sharding.use_abstract_mesh(mesh):
        shown = jax.eval_shape(view, typed(tree, given, mesh))
    by_path = {
        path: jax.typeof(x).sharding.spec for path, x in trees.leaves_with_paths(shown)
    }
    return in_mesh_context(layout=LayoutByPath(layout.mesh, by_path))


def spec_of(layout: LayoutByPath, path: str, x: Array) -> PartitionSpec:
    """How an array is sharded; everywhere, if nothing with its path fits it.

    Any spec gives the right numbers. A wrong one costs transfers and memory.
    """
    spec, sizes = layout.specs.get(path, PartitionSpec()), layout.mesh.shape
    devices = [specs.devices_over(entry, sizes) for entry in spec]
    fits = len(spec) == x.ndim and not any(map(operator.mod, x.shape, devices))
    return spec if fits else PartitionSpec(*[None] * x.ndim)


def specs_of(
    flat: Sequence[tuple[str, Array]],
) -> tuple[Mesh | AbstractMesh | None, list[PartitionSpec]]:
    """The mesh of the arrays that `orthogonalize` gets, and how they are sharded.

    The mesh is None where every array is whole: without one, and inside shard_map. The
    layout of `on_mesh` says it, or types on Explicit axes show it. Raises a
    ValueError for an array on a mesh of which neither does.
    """
    check_same_everywhere("orthogonalize", flat)
    layout = mesh_context().layout
    everywhere = [PartitionSpec(*[None] * x.ndim) for _, x in flat]
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None, everywhere
    if layout is not None:
        return layout.mesh, [spec_of(layout, *leaf) for leaf in flat]
    for path, leaf in flat:
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Auto in mesh.axis_types and mesh.size > 1:
            raise ValueError(
                f"parameter {path!r} is on a mesh {dict(mesh.shape)} with Auto axes, "
                "where types show no sharding; use the optimizer within "
                "jax_muon.on_mesh(tx, where), with jax.tree.map(lambda p: p.sharding, "
                "params), or with the mesh for replicated parameters"
            )
    shardings = [jax.typeof(x).sharding for _, x in flat]
    meshes = [x.mesh for x in shardings if AxisType.Explicit in x.mesh.axis_types]
    return (meshes[0], [x.spec for x in shardings]) if meshes else (None, everywhere)
