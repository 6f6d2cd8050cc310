"""`scan_layers`: a scan over layers that lie divided, in plain jit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import paths
from jax_muon.checks import check_arrays, check_count, check_flag, check_function
from jax_muon.mesh.layers import ByLayers
from jax_muon.mesh.specs import (
    AxisName,
    Specs,
    check_mesh,
    check_specs,
    checked_axes,
    entry_names,
    full_rank,
    only,
    spec_by_path,
    spec_names,
)


def scan_layers(
    block: Callable[..., Any],
    carry: Any,
    layers: Any,
    mesh: Mesh,
    specs: Specs = None,
    *,
    axis: AxisName | None = None,
    keep_gathered: bool = False,
    reverse: bool = False,
    unroll: int = 1,
) -> Any:
    """`jax.lax.scan(block, carry, layers)`, each layer gathered while another one runs.

    For models in plain jit, on Auto and Explicit axes. In the backward pass layers are
    gathered again, and each one's gradient goes to where its part lies while the next
    one is computed; neither gathered layers nor copies of them in another dtype are
    kept. What `jax.checkpoint` around `block` keeps is kept. Within `make_train_step`,
    which does so for any scan, it is a plain scan.

    Args:
      block: `block(carry, layer)` gives the next carry and an output, as for a scan.
      carry: the carry of the first layer.
      layers: a tree of arrays with a leading axis of layers, (layers, ...): weights,
        and whatever else differs between layers, such as keys.
      mesh: the mesh.
      specs: how `layers` lie: see `on_mesh`. None: as their types say, which on Auto
        axes is replicated: nothing is gathered then.
      axis: mesh axes over which layers are gathered; None for all. Name those of FSDP
        where there are others, such as "tp", over which a layer stays divided.
      keep_gathered: whether gathered layers are kept for the backward pass.
      reverse: whether the last layer comes first.
      unroll: layers in one turn of the loop.

    Returns:
      The last carry, and the outputs, stacked.

    Raises:
      ValueError: an argument of another type, an axis that the mesh lacks; with the
        path, a spec that does not fit, or that divides the axis of layers over `axis`.
    """
    check_function("block", block, "a function of (carry, layer)")
    check_arrays("layers", layers)
    check_flag("keep_gathered", keep_gathered)
    check_flag("reverse", reverse)
    check_count("unroll", unroll)
    check_mesh("mesh", mesh)
    check_specs("specs", specs)
    names = mesh.axis_names if axis is None else checked_axes("axis", axis, mesh)

    def scan(layers: Any, carry: Any) -> Any:
        return jax.lax.scan(block, carry, layers, reverse=reverse, unroll=unroll)

    context = jax.sharding.get_abstract_mesh()
    if set(names) & set(context.manual_axes):
        return scan(layers, carry)
    given = None if specs is None else spec_by_path(specs)
    divided = []
    for path, x in paths.leaves_with_paths(layers):
        spec = jax.typeof(x).sharding.spec if given is None else given(path)
        spec = full_rank(spec, path, x.shape, mesh.shape)
        if set(entry_names(spec[0])) & set(names):
            raise ValueError(
                f"layers at {path!r} of shape {x.shape} with {spec} are divided along "
                "the axis of layers; expected another axis, so that each device has a "
                "part of every layer"
            )
        is_gathered = set(spec_names(spec)) & set(names)
        divided.append(spec if is_gathered else PartitionSpec())
    if not any(map(any, divided)):
        return scan(layers, carry)
    explicit = AxisType.Explicit in mesh.axis_types
    exchange = _Placed(mesh if context.empty else context, names, explicit)
    flat, treedef = jax.tree.flatten(layers)
    whole = [
        jax.eval_shape(lambda x, spec=spec: exchange.gather(x, spec), x)
        for x, spec in zip(flat, divided, strict=True)
    ]
    traced = ByLayers(scan, (jax.tree.unflatten(treedef, whole), carry), divided)
    return traced(exchange, layers, carry, keep_gathered=keep_gathered)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Gathers and scatters by saying how arrays lie; XLA sends what that takes."""

    mesh: Any
    names: tuple[str, ...]
    explicit: bool

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """The array, divided over no axis of `names`."""
        others = set(self.mesh.axis_names) - set(self.names)
        return self._place(x, only(spec, others)) if any(spec) else x

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any, extra: Any) -> Any:
        """A gradient where its array lies."""
        del extra
        return self._place(g.astype(dtype), spec)

    def _place(self, x: Any, spec: PartitionSpec) -> Any:
        place = jax.reshard if self.explicit else jax.lax.with_sharding_constraint
        return place(x, NamedSharding(self.mesh, spec))
