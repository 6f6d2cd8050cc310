"""How the parameters of a tree are sharded, and their gradients and state."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import notes, paths
from jax_muon.mesh.array_types import own_sharding
from jax_muon.mesh.specs import (
    devices_over,
    dividing,
    entry_names,
    full_rank,
    spec_names,
)

# A PartitionSpec or NamedSharding for all parameters, a tree (or a prefix of one) of
# them, or a function of the parameters that returns one. None in a tree: replicated.
Specs = Any
# By the path of a parameter.
ScannedAxes = Mapping[str, tuple[int, ...]]


class Hop(NamedTuple):
    """How often in a step a parameter is gathered over mesh axes, and summed."""

    axes: tuple[str, ...]
    gathers: int = 1
    sums: int = 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters are sharded on a mesh, and how their gradients and state are.

    Attributes:
      specs: how parameters are sharded; see `on_mesh`.
      divide: mesh axes that further divide gradients and state, where the spec of a
        leaf does not use them.
      min_size: least elements of a leaf that is divided so.
      params_divided: parameters are sharded like gradients and state.
      scanned: of a tree of parameters, the axes of each that a scan takes, by path.
        With `params_divided` or `scanned_last` they are divided only where no other
        axis can be. None: no scan takes any.
      whole: shapes of the parameters, if the trees have some of their layers, which are
        sharded like all. None: the trees are whole.
      hops: over which mesh axes a step gathers parameters and sums gradients, one after
        another, and how often; for `describe`.
      layer_hops: the same for scanned layers.
    """

    mesh: Mesh
    specs: Specs
    divide: tuple[str, ...] = ()
    min_size: int = 1024
    params_divided: bool = False
    scanned: "Callable[[Any], ScannedAxes] | None" = None
    hops: tuple[Hop, ...] = ()
    layer_hops: tuple[Hop, ...] = ()
    scanned_last: bool = False
    whole: Any = None

    def of_tree(self, tree: Any) -> tuple[Any, Any]:
        """PartitionSpecs of parameters, and of their gradients and state."""
        treedef = jax.tree.structure(tree)
        _, coarse, fine = self.of_leaves(tree)
        return jax.tree.unflatten(treedef, coarse), jax.tree.unflatten(treedef, fine)

    def of_leaves(
        self, tree: Any
    ) -> tuple[list[str], list[PartitionSpec], list[PartitionSpec]]:
        """Paths, specs of parameters, and specs of their gradients and state.

        Raises:
          ValueError: with path and shape, for specs that do not fit.
        """
        tree = tree if self.whole is None else self.whole
        names, coarse, fine = [], [], []
        by_path = None if self.specs is None else _by_path(self.specs, tree)
        is_last = self.params_divided or self.scanned_last
        scanned = self.scanned_axes(tree) if is_last else {}
        for path, leaf in paths.leaves_with_paths(tree):
            shape = tuple(leaf.shape)
            spec = _spec_of_type(leaf) if by_path is None else by_path(path)
            spec_of_parameter = full_rank(spec, path, shape, self.mesh)
            finer = self._finer(shape, spec_of_parameter, scanned.get(path, ()))
            names.append(path)
            coarse.append(finer if self.params_divided else spec_of_parameter)
            fine.append(finer)
        return names, coarse, fine

    def scanned_axes(self, tree: Any) -> ScannedAxes:
        """The axes of each parameter that a scan takes, by path."""
        return self.scanned(tree) if self.scanned else {}

    def check_concrete(self, tree: Any) -> None:
        """Raise a ValueError for arrays sharded on Auto axes without specs."""
        if self.specs is not None or AxisType.Auto not in self.mesh.axis_types:
            return
        for path, leaf in paths.leaves_with_paths(tree):
            sharding = own_sharding(leaf)
            if sharding and any(dividing(sharding.spec, sharding.mesh.shape)):
                raise ValueError(
                    f"parameter {path!r} is sharded by {sharding.spec} on a mesh with "
                    "Auto axes, which types do not show; expected specs, such as "
                    "jax.tree.map(lambda p: p.sharding, params)"
                )

    def _finer(
        self, shape: tuple[int, ...], coarse: PartitionSpec, avoid: Collection[int]
    ) -> PartitionSpec:
        """The spec with `divide` added where the first axis takes all of it.

        Axes in `avoid` come after all others.
        """
        names = tuple(name for name in self.divide if name not in spec_names(coarse))
        devices = math.prod(self.mesh.shape[name] for name in names)
        if not names or math.prod(shape) < self.min_size:
            return coarse
        for axis in sorted(range(len(coarse)), key=lambda axis: axis in avoid):
            entry = entry_names(coarse[axis])
            shards = devices * devices_over(coarse[axis], self.mesh.shape)
            if shape[axis] == 0 or shape[axis] % shards == 0:
                entries = list(coarse)
                entries[axis] = (*entry, *names)
                return PartitionSpec(*entries)
        return coarse


def scanned_by(tx: optax.GradientTransformation) -> Callable[[Any], ScannedAxes]:
    """The axes that a scan takes, as the reading says that an optimizer goes by.

    Nothing is known of parameters that it does not read, as of `optax.adamw`'s.
    """

    @functools.lru_cache(maxsize=4)
    def of_shapes(treedef: Any, shapes: tuple[Any, ...]) -> ScannedAxes:
        params = jax.tree.unflatten(treedef, shapes)
        return notes.traced(tx.init, params)[1]["scanned"]

    def of_tree(tree: Any) -> ScannedAxes:
        leaves, treedef = jax.tree.flatten(tree)
        return of_shapes(
            treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        )

    return of_tree


def _spec_of_type(leaf: Any) -> PartitionSpec:
    """The spec that a leaf's type shows, or, for a shape, its sharding."""
    sharding = own_sharding(leaf)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return PartitionSpec()
    return sharding.spec


def _by_path(specs: Specs, params: Any) -> Callable[[str], PartitionSpec]:
    """Specs in any form, as a function of the path."""
    tree = specs(params) if paths.is_function(specs) else specs
    flat = dict(paths.leaves_with_paths(tree, is_leaf=lambda x: x is None))

    def spec(path: str) -> PartitionSpec:
        prefix = paths.nearest_prefix(flat, path)
        if prefix is None:
            raise ValueError(
                f"specs have nothing for parameter {path!r}; there are "
                + ", ".join(flat)
            )
        entry = flat[prefix]
        if not isinstance(entry, PartitionSpec | NamedSharding | None):
            raise ValueError(
                f"specs have {entry!r} for parameter {path!r}; expected a "
                "PartitionSpec, a NamedSharding, or None"
            )
        entry = entry.spec if isinstance(entry, NamedSharding) else entry
        return entry or PartitionSpec()

    return spec
