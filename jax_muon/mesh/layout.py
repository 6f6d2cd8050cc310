"""Where parameters lie on a mesh, and how much finer their gradients and state do."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_muon import paths
from jax_muon.checks import check_count
from jax_muon.mesh.specs import (
    Specs,
    as_entry,
    check_mesh,
    check_specs,
    devices_over,
    dividing,
    entry_names,
    full_rank,
    own_sharding,
    spec_by_path,
    spec_names,
)
from jax_muon.reading import layers as layer_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where parameters lie on a mesh, and where their gradients and state do.

    Attributes:
      mesh: the mesh.
      specs: of the parameters; see `on_mesh`.
      divide: mesh axes that further divide gradients and state.
      summed: mesh axes that gradients are summed over, for `plan`.
      min_size: least elements of a leaf that is divided so.
      skip_used: whether an axis of `divide` that a leaf's spec uses is passed over for
        that leaf, instead of being an error.
      params_divided: whether parameters lie as finely as gradients and state.
      by_layers: whether axes of layers, which a scan goes along, are divided only where
        no other axis can be.
    """

    mesh: Mesh
    specs: Specs
    divide: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    min_size: int = 1024
    skip_used: bool = False
    params_divided: bool = False
    by_layers: bool = False

    def __post_init__(self) -> None:
        check_mesh("mesh", self.mesh)
        check_specs("specs", self.specs)
        check_count("min_size", self.min_size, least=0)

    def of_params(self, tree: Any) -> Any:
        """PartitionSpecs of parameters, with an entry for each axis."""
        return self.of_state(tree) if self.params_divided else self._given(tree)

    def _given(self, tree: Any) -> Any:
        given = None if self.specs is None else spec_by_path(self.specs)

        def spec(key_path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            path = paths.path_string(key_path)
            found = _own_spec(leaf) if given is None else given(path)
            return full_rank(found, path, tuple(leaf.shape), self.mesh.shape)

        return jax.tree_util.tree_map_with_path(spec, tree)

    def check_concrete(self, tree: Any) -> None:
        """Refuse arrays that lie divided on Auto axes where specs do not say so."""
        if self.specs is not None or AxisType.Auto not in self.mesh.axis_types:
            return
        for path, leaf in paths.leaves_with_paths(tree):
            sharding = own_sharding(leaf)
            if sharding and any(dividing(sharding.spec, sharding.mesh.shape)):
                raise ValueError(
                    f"parameter {path!r} lies divided by {sharding.spec} on a mesh "
                    "with Auto axes, which types do not show; expected specs, such as "
                    "jax.tree.map(lambda p: p.sharding, params)"
                )

    def of_state(self, tree: Any) -> Any:
        """PartitionSpecs of gradients, and of state with a parameter's shape."""
        layers = layer_axes.axes_of_layers(tree) if self.by_layers else {}

        def spec(key_path: tuple[Any, ...], leaf: Any, own: PartitionSpec) -> Any:
            path = paths.path_string(key_path)
            used = set(spec_names(own)) & set(self.divide)
            if used and not self.skip_used:
                raise ValueError(
                    f"parameter {path!r} of shape {leaf.shape} "
                    f"with {own} is divided over {sorted(used)} already; expected "
                    f"other axes in divide={self.divide}, which repeat it"
                )
            axes = tuple(name for name in self.divide if name not in used)
            last = layers.get(path, ())
            return _finer(tuple(leaf.shape), own, axes, self.mesh, self.min_size, last)

        return jax.tree_util.tree_map_with_path(spec, tree, self._given(tree))


def _own_spec(leaf: Any) -> PartitionSpec:
    """The spec that a leaf's type shows, or, for a shape, its sharding."""
    sharding = own_sharding(leaf)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return PartitionSpec()
    return sharding.spec


def _finer(
    shape: tuple[int, ...],
    own: PartitionSpec,
    axes: tuple[str, ...],
    mesh: Mesh,
    min_size: int,
    last: Collection[int],
) -> PartitionSpec:
    """A spec with mesh axes added where the first axis takes all of them.

    Axes in `last` come after all others.
    """
    devices = math.prod(mesh.shape[name] for name in axes)
    if not axes or math.prod(shape) < min_size:
        return own
    for axis in sorted(range(len(own)), key=lambda axis: axis in last):
        entry = own[axis]
        if shape[axis] and shape[axis] % (devices_over(entry, mesh.shape) * devices):
            continue
        entries = list(own)
        entries[axis] = as_entry((*entry_names(entry), *axes))
        return PartitionSpec(*entries)
    return own
