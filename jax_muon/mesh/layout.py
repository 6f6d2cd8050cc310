"""Where the parameters of a tree are on a mesh, and their gradients and state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

from jax_muon.base import checks, trees
from jax_muon.base.specs import (
    AxisName,
    checked_axes,
    dividing,
    finer,
    full_rank,
    spelled,
)
from jax_muon.matrices.matrices import Parameter
from jax_muon.matrices.resolve import Reading, check_reading, resolve

# A mesh: parameters as their types show on Explicit axes, and everywhere on Auto ones.
# Or a NamedSharding for all of them, a tree (or a prefix of one) in which None means
# everywhere, or a function of the parameters that returns one of these.
Where: TypeAlias = Mesh | NamedSharding | PyTree | Callable[[PyTree], PyTree]
MIN_SIZE = 1024  # elements of a leaf that is worth dividing
Parameters = Mapping[str, Parameter]  # by the path of a leaf
Shaped = Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Placed:
    """The leaves of a tree on a mesh, in order."""

    mesh: Mesh
    paths: list[str]
    param_specs: list[PartitionSpec]  # with an entry for each axis, like the others
    state_specs: list[PartitionSpec]  # of gradients and state
    memory_kinds: list[str | None]  # of parameters and updates; None: a device's memory
    shapes: list[tuple[int, ...]]
    divide: tuple[str, ...]  # mesh axes that divide gradients and state further

    @property
    def shardings(self) -> list[NamedSharding]:
        """Of the parameters, as JAX spells them."""
        spell = functools.partial(spelled, self.mesh)
        return list(map(spell, self.param_specs, self.memory_kinds))

    def spec_by_path(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of state, where its type does not show it.

        Of 0/mu/blocks/up, that of the parameter blocks/up, if it has this shape; else
        the one of all parameters of this shape. Without such, and if these are sharded
        in several ways, the array is everywhere.
        """
        rows = zip(self.paths, self.shapes, self.state_specs, strict=True)
        known = {(path, like): spec for path, like, spec in rows}
        ends = path
        while ends and (ends, shape) not in known:
            ends = ends.partition("/")[2]
        if ends:
            return known[ends, shape]
        alike = {spec for (_, like), spec in known.items() if like == shape}
        return alike.pop() if len(alike) == 1 else PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters are sharded, and their gradients and state further."""

    where: Where
    # Mesh axes that further divide gradients and state, where a leaf of at least
    # `min_size` elements is not sharded over them; see `Parameter.divided_last`.
    divide: AxisName = ()
    min_size: int = MIN_SIZE

    def __post_init__(self) -> None:
        if isinstance(self.where, Mesh):  # which can be called, too
            checked_axes("divide", self.divide, self.where)
        elif not trees.is_function(self.where):  # what that returns, at init
            checked_axes("divide", self.divide, _mesh_of(_by_path(self.where)))

    def place(self, tree: PyTree, parameters: Parameters) -> Placed:
        """Where the leaves of a tree are; `parameters` says how they are read."""
        mesh, rows = self.leaf_shardings(tree)
        divided = checked_axes("divide", self.divide, mesh)
        divided = tuple(name for name in divided if mesh.shape[name] > 1)
        placed = Placed(mesh, [], [], [], [], [], divided)
        for path, x, sharding in rows:
            spec = full_rank(sharding.spec, path, x.shape, mesh)
            names = divided if x.size >= self.min_size else ()
            last = parameters[path].divided_last if path in parameters else ()
            placed.paths.append(path)
            placed.shapes.append(tuple(x.shape))
            placed.param_specs.append(spec)
            # Scanned layers (8, 768, 3072) on 8 devices: P(None, "data", None).
            placed.state_specs.append(finer(spec, x.shape, names, mesh.shape, last))
            kind = sharding.memory_kind
            on_host = kind not in (None, "device")
            placed.memory_kinds.append(kind if on_host else None)
        return placed

    def leaf_shardings(
        self, tree: PyTree
    ) -> tuple[Mesh, list[tuple[str, Shaped, NamedSharding]]]:
        """The mesh; and paths, leaves and their shardings, as the user gave them."""
        leaves, where = trees.leaves_with_paths(tree), self.where
        if isinstance(where, Mesh):  # which can be called, too
            explicit = AxisType.Explicit in where.axis_types
            specs = [
                _typed_spec(*leaf) if explicit else PartitionSpec() for leaf in leaves
            ]
            rows = zip(leaves, specs, strict=True)
            return where, [(*leaf, NamedSharding(where, spec)) for leaf, spec in rows]
        where = where(tree) if trees.is_function(where) else where
        by_path = _by_path(where)
        mesh = _mesh_of(by_path)
        everywhere = NamedSharding(mesh, PartitionSpec())
        return mesh, [(path, x, _at(by_path, path) or everywhere) for path, x in leaves]

    def check_concrete(self, tree: PyTree) -> None:
        """Refuse arrays that are sharded on Auto axes, where a mesh alone is given."""
        auto = isinstance(self.where, Mesh) and AxisType.Auto in self.where.axis_types
        for path, leaf in trees.leaves_with_paths(tree) if auto else ():
            # Asked of a tracer, JAX walks every equation traced so far to write an
            # error: 68 s for 400 leaves. On Auto axes its type shows nothing.
            traced = isinstance(leaf, jax.core.Tracer)
            x = None if traced else getattr(leaf, "sharding", None)
            if isinstance(x, NamedSharding) and any(dividing(x.spec, x.mesh.shape)):
                raise ValueError(
                    f"parameter {path!r} is sharded by {x.spec} on a mesh with "
                    "Auto axes, which types do not show; use jax_muon.on_mesh(tx, "
                    "jax.tree.map(lambda p: p.sharding, params))"
                )


def fsdp(
    params: PyTree, mesh: Mesh, matrices: Reading, axes: AxisName | None = None
) -> PyTree[NamedSharding]:
    """Shardings that divide every parameter evenly over a mesh: FSDP, or ZeRO-3.

    For `on_mesh`, `scan_layers`, `jax.device_put`, `out_shardings` of `jax.jit`, and
    whatever restores a checkpoint. Each leaf is divided along the first axis whose size
    the devices divide. Two kinds of axes come last: those that `as_matrices` has to
    gather, such as the heads' width in (768, 12, 64); and axes of layers, since no scan
    could then gather a layer at a time. Leaves of fewer than 1024 elements, and
    those without an axis that fits, are everywhere.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh.
      matrices: as in `as_matrices`; it says which axes are layers, heads and windows.
      axes: mesh axes that divide parameters; None for all.

    Returns:
      A tree like `params`, with a NamedSharding for each leaf.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"up": jnp.ones((64, 256)), "scale": jnp.ones(64)}
      >>> shardings = jm.fsdp(params, mesh, {"up": "muon"})
      >>> shardings["up"].spec[0], shardings["scale"].is_fully_replicated
      ('data', True)
    """
    if isinstance(params, Mesh):
        raise ValueError("fsdp got a mesh first; use jm.fsdp(params, mesh, matrices)")
    names = checked_axes("axes", axes, mesh)
    params = checks.as_arrays("params", params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    check_reading("matrices", matrices)
    treedef: PyTreeDef = jax.tree.structure(params)
    parameters = resolve(matrices, params) if names else {}
    specs = Layout(everywhere, names).place(params, parameters).state_specs
    return treedef.unflatten([spelled(mesh, spec) for spec in specs])


_EXPECTED = (
    "a jax.sharding.NamedSharding of one mesh, or None for everywhere; arrays get one "
    "by jax.device_put(params, jax.sharding.NamedSharding(mesh, PartitionSpec()))"
)


def _typed_spec(path: str, x: Shaped) -> PartitionSpec:
    """The spec that a type on Explicit axes shows."""
    if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
        raise ValueError(
            f"parameter {path!r} of shape {x.shape} shows no sharding, and where is a "
            "mesh with Explicit axes; use parameters on the mesh, or "
            "jax.ShapeDtypeStruct(..., sharding=jax.sharding.NamedSharding(mesh, spec))"
        )
    return jax.typeof(x).sharding.spec


def _by_path(where: PyTree) -> dict[str, NamedSharding | None]:
    return dict(trees.leaves_with_paths(where, is_leaf=lambda x: x is None))


def _mesh_of(by_path: Mapping[str, NamedSharding | None]) -> Mesh:
    """The mesh that all shardings have."""
    meshes: dict[Any, str] = {}
    for path, entry in by_path.items():
        if entry is not None:
            name = f"where for {path!r}" if path else "where"
            checks.check_kind(name, entry, NamedSharding, _EXPECTED)
            meshes.setdefault(entry.mesh, name)
    if not meshes:
        checks.refuse("where", None, f"a mesh, or {_EXPECTED}")
    if len(meshes) > 1:
        names = [f"{name} on {mesh}" for mesh, name in meshes.items()]
        checks.refuse("meshes of where", names, _EXPECTED)
    (mesh,) = meshes
    checks.check_kind("the mesh of where", mesh, Mesh, _EXPECTED)  # not of a type
    return mesh


def _at(by_path: Mapping[str, NamedSharding | None], path: str) -> NamedSharding | None:
    """The entry for a path, or for the nearest prefix of it."""
    prefix = trees.nearest_prefix(by_path, path)
    if prefix is None:
        raise ValueError(
            f"where has nothing for parameter {path!r}; there are {', '.join(by_path)}"
        )
    return by_path[prefix]
