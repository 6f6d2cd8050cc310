"""How the parameters of a tree are sharded, and their gradients and state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.base import checks, facts, trees
from jax_muon.base.array_types import own_sharding
from jax_muon.base.specs import AxisName, checked_axes, dividing, finer, full_rank
from jax_muon.matrices.find import Reader, reader

# A PartitionSpec or NamedSharding for all parameters, a tree (or a prefix of one) of
# them, or a function of the parameters that returns one. None in a tree: replicated.
Specs = Any
AxesOfLayers = Mapping[str, tuple[int, ...]]  # by the path of a parameter


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters are sharded on a mesh, and how their gradients and state are."""

    mesh: Mesh
    specs: Specs  # of parameters; see `on_mesh`
    # Mesh axes that further divide gradients and state, where the spec of a leaf of at
    # least `min_size` elements does not use them; the axes of layers come last.
    divide: tuple[str, ...] = ()
    min_size: int = 1024
    layers: Callable[[Any], AxesOfLayers] = lambda tree: {}

    def of_leaves(
        self, tree: Any
    ) -> tuple[list[str], list[PartitionSpec], list[PartitionSpec]]:
        """Paths, specs of parameters, and specs of their gradients and state."""
        paths, of_params, of_state = [], [], []
        layers = self.layers(tree) if self.divide else {}
        for path, x, spec in self.given(tree):
            spec = full_rank(spec, path, x.shape, self.mesh)
            names = self.divide if x.size >= self.min_size else ()
            last = layers.get(path, ())
            paths.append(path)
            of_params.append(spec)
            of_state.append(finer(spec, x.shape, names, self.mesh.shape, last))
        return paths, of_params, of_state

    def given(self, tree: Any) -> list[tuple[str, Any, PartitionSpec]]:
        """Paths, leaves, and their specs as the user wrote them."""
        leaves = trees.leaves_with_paths(tree)
        if self.specs is None:
            return [(path, x, jax.typeof(x).sharding.spec) for path, x in leaves]
        specs = self.specs(tree) if trees.is_function(self.specs) else self.specs
        by_path = dict(trees.leaves_with_paths(specs, is_leaf=lambda x: x is None))
        return [(path, x, _spec_at(by_path, path)) for path, x in leaves]

    def check_concrete(self, tree: Any) -> None:
        """Raise a ValueError for arrays sharded on Auto axes without specs."""
        checked = self.specs is None and AxisType.Auto in self.mesh.axis_types
        for path, leaf in trees.leaves_with_paths(tree) if checked else ():
            sharding = own_sharding(leaf)
            if sharding and any(dividing(sharding.spec, sharding.mesh.shape)):
                raise ValueError(
                    f"parameter {path!r} is sharded by {sharding.spec} on a mesh with "
                    "Auto axes, which types do not show; expected specs, such as "
                    "jax.tree.map(lambda p: p.sharding, params)"
                )


def divided_specs(
    params: Any,
    mesh: Mesh,
    axes: AxisName | None = None,
    matrices: Reader = None,
    min_size: int = 1024,
) -> Any:
    """PartitionSpecs that divide every parameter evenly over a mesh (ZeRO-3).

    For `specs` of `on_mesh`, `make_train_step` and `scan_layers`. Each leaf is divided
    along the first axis whose size the devices divide, and along an axis of layers only
    if no other fits: then no scan can gather it a layer at a time.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh.
      axes: mesh axes that divide parameters; None for all.
      matrices: as in `partition`, to see what axes a scan takes; None if none does.
      min_size: leaves of fewer elements stay replicated, as do those without an axis
        that fits.

    Returns:
      A tree like `params`, with a PartitionSpec for each leaf.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"up": jnp.ones((64, 256)), "scale": jnp.ones(64)}
      >>> specs = jm.divided_specs(params, mesh)
      >>> tuple(specs["up"]), tuple(specs["scale"])
      (('data', None), (None,))
    """
    names = checked_axes("axes", axes, mesh)
    params = checks.arrays("params", params)
    layers = functools.partial(read_layers, matrices)
    layout = Layout(mesh, PartitionSpec(), names, min_size, layers)
    treedef: Any = jax.tree.structure(params)
    return treedef.unflatten(layout.of_leaves(params)[2])


def read_layers(matrices: Reader, params: Any) -> AxesOfLayers:
    """The axes that a scan takes, by a reading; none without one."""
    if matrices is None:
        return {}
    return {path: x.scanned for path, x in reader(matrices)(params).items()}


def axes_of_layers(tx: optax.GradientTransformation) -> Callable[[Any], AxesOfLayers]:
    """The axes that a scan takes, by the reading that an optimizer goes by."""

    @functools.lru_cache(maxsize=4)
    def of_shapes(treedef: Any, *shapes: jax.ShapeDtypeStruct) -> AxesOfLayers:
        _, recorded = facts.trace(tx.init, treedef.unflatten(shapes))
        return {path: x.scanned for path, x in recorded.leaves.items()}

    def of_tree(tree: Any) -> AxesOfLayers:
        leaves, treedef = jax.tree.flatten(tree)
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        return of_shapes(treedef, *shapes)

    return of_tree


def _spec_at(by_path: Mapping[str, Any], path: str) -> PartitionSpec:
    """The entry of specs for a path, or for the nearest prefix of it."""
    prefix = trees.nearest_prefix(by_path, path)
    if prefix is None:
        raise ValueError(
            f"specs have nothing for parameter {path!r}; there are {', '.join(by_path)}"
        )
    entry, kinds = by_path[prefix], (PartitionSpec, NamedSharding, type(None))
    expected = "a PartitionSpec, a NamedSharding, or None"
    checks.kind(f"specs for parameter {path!r}", entry, kinds, expected)
    entry = entry.spec if isinstance(entry, NamedSharding) else entry
    return entry or PartitionSpec()
