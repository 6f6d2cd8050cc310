"""How parameters are sharded on a mesh, and how their gradients and state are."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_muon import checks, paths
from jax_muon.mesh import specs as mesh_specs
from jax_muon.reading import layers as layer_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters are sharded on a mesh, and how their gradients and state are.

    Attributes:
      mesh: the mesh.
      specs: of the parameters; see `on_mesh`.
      divide: mesh axes that further divide gradients and state.
      summed: mesh axes that gradients are summed over, for `describe`.
      min_size: least elements of a leaf that is divided so.
      skip_used: for a leaf whose spec has an axis of `divide`, pass over that axis; if
        False that is an error.
      params_divided: parameters are sharded like gradients and state.
      by_layers: axes of layers, which a scan goes along, are divided only where no
        other axis can be.
    """

    mesh: Mesh
    specs: mesh_specs.Specs
    divide: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    min_size: int = 1024
    skip_used: bool = False
    params_divided: bool = False
    by_layers: bool = False

    def __post_init__(self) -> None:
        mesh_specs.check_mesh("mesh", self.mesh)
        mesh_specs.check_specs("specs", self.specs)
        checks.count("min_size", self.min_size, least=0)

    def of_params(self, tree: Any) -> Any:
        """PartitionSpecs of parameters, with an entry for each axis."""
        return self.of_both(tree)[0]

    def of_state(self, tree: Any) -> Any:
        """PartitionSpecs of gradients, and of state with a parameter's shape."""
        return self.of_both(tree)[1]

    def of_both(self, tree: Any) -> tuple[Any, Any]:
        """PartitionSpecs of parameters, and of gradients and state.

        Raises:
          ValueError: with path and shape, for specs that do not fit, or that use an
            axis of `divide`.
        """
        treedef = jax.tree.structure(tree)
        given = None if self.specs is None else mesh_specs.spec_by_path(self.specs)
        layers = layer_axes.axes_of_layers(tree) if self.by_layers else {}
        coarse, fine = [], []
        for path, leaf in paths.leaves_with_paths(tree):
            shape = tuple(leaf.shape)
            found = _own_spec(leaf) if given is None else given(path)
            own = mesh_specs.full_rank(found, path, shape, self.mesh.shape)
            finer = self._finer(path, shape, own, layers.get(path, ()))
            coarse.append(finer if self.params_divided else own)
            fine.append(finer)
        return jax.tree.unflatten(treedef, coarse), jax.tree.unflatten(treedef, fine)

    def check_concrete(self, tree: Any) -> None:
        """Raise a ValueError for arrays sharded on Auto axes without specs."""
        if self.specs is not None or AxisType.Auto not in self.mesh.axis_types:
            return
        for path, leaf in paths.leaves_with_paths(tree):
            sharding = mesh_specs.own_sharding(leaf)
            if sharding and any(
                mesh_specs.dividing(sharding.spec, sharding.mesh.shape)
            ):
                raise ValueError(
                    f"parameter {path!r} is sharded by {sharding.spec} on a mesh with "
                    "Auto axes, which types do not show; expected specs, such as "
                    "jax.tree.map(lambda p: p.sharding, params)"
                )

    def _finer(
        self,
        path: str,
        shape: tuple[int, ...],
        own: PartitionSpec,
        last: Collection[int],
    ) -> PartitionSpec:
        """The spec with `divide` added where the first axis takes all of it.

        Axes in `last` come after all others.
        """
        used = set(mesh_specs.spec_names(own)) & set(self.divide)
        if used and not self.skip_used:
            raise ValueError(
                f"parameter {path!r} of shape {shape} with {own} is divided over "
                f"{sorted(used)} already; expected other axes in "
                f"divide={self.divide}, which replicate it"
            )
        names = tuple(name for name in self.divide if name not in used)
        devices = math.prod(self.mesh.shape[name] for name in names)
        if not names or math.prod(shape) < self.min_size:
            return own
        for axis in sorted(range(len(own)), key=lambda axis: axis in last):
            entry = mesh_specs.entry_names(own[axis])
            here = devices * mesh_specs.devices_over(own[axis], self.mesh.shape)
            if shape[axis] == 0 or shape[axis] % here == 0:
                entries = list(own)
                entries[axis] = (*entry, *names)
                return PartitionSpec(*entries)
        return own


def _own_spec(leaf: Any) -> PartitionSpec:
    """The spec that a leaf's type shows, or, for a shape, its sharding."""
    sharding = mesh_specs.own_sharding(leaf)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return PartitionSpec()
    return sharding.spec
