"""Where sharded parameters lie, as plain jit sees them: a mesh, and a spec for each.

With Explicit mesh axes the types of arrays tell. With Auto axes they do not, so that
the user gives specs. What is found here `owners.py` works on.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_muon.reading import paths

# A PartitionSpec or NamedSharding for all parameters, a tree (or a prefix of one) of
# them, or a function of a parameter's path. None in a tree: replicated.
Specs = Any

_REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class GlobalView:
    """A mesh, and how each leaf of a tree is divided over it."""

    mesh: Any  # Mesh or AbstractMesh
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, tree: Any, mesh: Any, specs: Specs) -> "GlobalView":
        """The view of a tree of arrays, or of their shapes, with these specs."""
        given = spec_by_path(specs)
        return cls(
            mesh,
            tuple(
                _full_rank(given(path), path, leaf.shape, mesh)
                for path, leaf in paths.leaves_with_paths(tree)
            ),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return dict(self.mesh.shape)

    def map(
        self,
        function: Callable[[list[Array]], list[Array]],
        leaves: Sequence[Array],
        specs: Sequence[PartitionSpec],
    ) -> list[Array]:
        """Apply a function of each device's pieces, placed as `specs` say for it."""
        moved = [
            self._reshard(x, spec) if spec != own else x
            for x, spec, own in zip(leaves, specs, self.specs, strict=True)
        ]
        results = jax.shard_map(
            function, mesh=self.mesh, in_specs=(list(specs),), out_specs=list(specs)
        )(moved)
        return [
            self._reshard(x, own) if spec != own else x
            for x, spec, own in zip(results, specs, self.specs, strict=True)
        ]

    def _reshard(self, x: Array, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(self.mesh, spec)
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)


def find_view(tree: Any, mesh: Any, specs: Specs) -> GlobalView | None:
    """How a tree of arrays lies on a mesh, or None where there is nothing to divide.

    Args:
      tree: arrays, traced or not.
      mesh: the user's mesh; None for that of the arrays.
      specs: the user's specs; None for those of the types.

    Returns:
      The view; None on one device, and inside shard_map, where arrays are local.

    Raises:
      ValueError: with the path: Auto axes without specs, an array that its spec does
        not divide evenly, specs that are not those of the types of Explicit axes.
    """
    flat = paths.leaves_with_paths(tree)
    if not flat or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    types = {path: jax.typeof(leaf).sharding for path, leaf in flat}
    mesh = find_mesh(tree, mesh)
    automatic = mesh is not None and AxisType.Auto in mesh.axis_types
    if mesh is None or (automatic and mesh.size == 1):
        return None
    if automatic and specs is None:
        path = flat[0][0]
        raise ValueError(
            f"parameter {path!r} and others lie on a mesh {dict(mesh.shape)} with Auto "
            "axes, on which types do not show how; valid are specs, such as "
            "jax.tree.map(lambda p: p.sharding, params) or PartitionSpec() for "
            "parameters that are replicated, and a mesh with Explicit axes"
        )
    if specs is None:
        return GlobalView.of(
            tree, mesh, {path: own.spec for path, own in types.items()}
        )
    view = GlobalView.of(tree, mesh, specs)
    for (path, leaf), spec in zip(flat, view.specs, strict=True):
        own = types[path]
        if automatic or not own.mesh.axis_names:
            continue
        if spec != _full_rank(own.spec, path, leaf.shape, mesh):
            raise ValueError(
                f"parameter {path!r} has the type {jax.typeof(leaf)}, and specs say "
                f"{spec}; valid with Explicit axes are no specs"
            )
    return view


def find_mesh(tree: Any, mesh: Any = None) -> Any:
    """The given mesh, or that of the types of arrays, or None."""
    if mesh is not None:
        return mesh
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.typeof(leaf).sharding.mesh.axis_names:
            return jax.typeof(leaf).sharding.mesh
    return None


def is_explicit(x: Array) -> bool:
    """Whether an array lies on a mesh whose axes its type shows."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def spec_by_path(specs: Specs) -> Callable[[str], PartitionSpec]:
    """Specs of any form as a function of the path."""

    def is_spec(x: Any) -> bool:
        return isinstance(x, (PartitionSpec, NamedSharding))

    def as_spec(x: Any) -> PartitionSpec:
        return x.spec if isinstance(x, NamedSharding) else x or _REPLICATED

    if callable(specs) and not is_spec(specs):
        return lambda path: as_spec(specs(path))
    flat = dict(
        paths.leaves_with_paths(specs, is_leaf=lambda x: x is None or is_spec(x))
    )
    if "" in flat:
        return lambda path: as_spec(flat[""])

    def find(path: str) -> PartitionSpec:
        prefix = path
        while prefix not in flat:
            if not prefix:
                raise ValueError(
                    f"specs have nothing for parameter {path!r}; there are "
                    + ", ".join(flat)
                )
            prefix = prefix.rpartition("/")[0]
        return as_spec(flat[prefix])

    return find


def own_specs(params: Any) -> Specs:
    """Specs by path of parameters that lie divided over a mesh, or None."""
    shardings = {
        path: getattr(leaf, "sharding", None)
        for path, leaf in paths.leaves_with_paths(params)
    }
    specs = {
        path: own.spec if isinstance(own, NamedSharding) else _REPLICATED
        for path, own in shardings.items()
    }
    return specs if any(any(spec) for spec in specs.values()) else None


def _full_rank(
    spec: PartitionSpec, path: str, shape: tuple[int, ...], mesh: Any
) -> PartitionSpec:
    """The spec with an entry for each axis, after a look whether it fits."""
    where = f"parameter {path!r} of shape {shape} with {spec}"
    if len(spec) > len(shape):
        raise ValueError(f"{where}: valid are at most {len(shape)} entries")
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for size, entry in zip(shape, entries, strict=True):
        names = entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            if name is not None and name not in mesh.shape:
                raise ValueError(
                    f"{where}: valid are the mesh axes {tuple(mesh.shape)} and None"
                )
        devices = math.prod(mesh.shape[name] for name in names if name is not None)
        if size % devices:
            raise ValueError(
                f"{where}: {devices} devices do not divide {size}; valid are axes that "
                "they do, or None"
            )
    return PartitionSpec(*entries)


def with_placed_state(
    tx: optax.GradientTransformation, mesh: Any, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """A transform whose state lies as the parameters do, from the beginning on.

    Args:
      tx: the transform.
      mesh: the mesh; None for that of the parameters. With Auto axes, `init` under jit
        needs it.
      specs: of the parameters; None for those of their types.
    """
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: optax.Params) -> optax.OptState:
        return place_state(tx.init(params), params, mesh, specs)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, state = tx.update(updates, state, params, **extra_args)
        return updates, place_state(state, updates, mesh, specs)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def place_state(state: Any, params: Any, mesh: Any, specs: Specs) -> Any:
    """Optimizer state laid as the parameters: what has their shape, or of their means.

    Everything else, counts for instance, is repeated on all devices.
    """
    view = find_view(params, mesh, specs)
    if view is None or not jax.tree.leaves(state):
        return state
    concrete = mesh or next(
        (
            leaf.sharding.mesh
            for leaf in jax.tree.leaves(params)
            if not isinstance(leaf, jax.core.Tracer)
            and isinstance(leaf.sharding, NamedSharding)
        ),
        view.mesh,
    )

    def place(x: Any, sharding: NamedSharding) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, sharding)
        if AxisType.Explicit in concrete.axis_types:
            return jax.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)

    view = dataclasses.replace(view, mesh=concrete)
    return jax.tree.map(place, state, state_shardings(state, params, view))


def state_shardings(state: Any, params: Any, view: GlobalView) -> Any:
    """Shardings of optimizer state, by the parameters to which its leaves belong."""
    known = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            paths.leaves_with_paths(params), view.specs, strict=True
        )
    }

    def sharding(key_path: tuple[Any, ...], x: Any) -> NamedSharding:
        spec = _state_spec(paths.path_string(key_path), x.shape, known)
        if AxisType.Auto in view.mesh.axis_types:
            # As JAX writes the specs of what comes out of jit: P("a", None) is another
            # to it than P("a"), and would compile the next step again.
            while len(spec) and spec[-1] is None:
                spec = PartitionSpec(*spec[:-1])
        return NamedSharding(view.mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def _state_spec(path: str, shape: tuple[int, ...], known: dict[str, Any]) -> Any:
    """Spec of state at `.../mu/blocks/0/kernel` by the parameter `blocks/0/kernel`."""
    parts = path.split("/")
    for first in range(len(parts) + 1):  # the last is "", a parameter without a tree
        found = known.get("/".join(parts[first:]))
        if found is None or len(found[0]) != len(shape):
            continue
        fits = [have in (size, 1) for have, size in zip(shape, found[0], strict=True)]
        if all(fits):
            return PartitionSpec(
                *(
                    entry if have == size else None
                    for have, size, entry in zip(shape, *found, strict=True)
                )
            )
    return _REPLICATED
