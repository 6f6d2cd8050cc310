"""`scan_layers`: a scan over sharded layers, in plain jit."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import checks
from jax_muon.mesh.by_layers import ByLayers, Exchange
from jax_muon.mesh.layout import Layout, Specs
from jax_muon.mesh.specs import AxisName, checked_axes, entry_names, only, spec_names


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
    """`jax.lax.scan(block, carry, layers)` that gathers each layer while another runs.

    For models in plain jit, on Auto and Explicit axes. The backward pass gathers layers
    again and scatters each layer's gradient while the next one is computed. It keeps
    neither gathered layers nor copies of them in another dtype; what `jax.checkpoint`
    around `block` keeps is kept. Within `make_train_step`, which does all this for any
    scan, it is a plain scan. Like any `jax.custom_vjp`, it has reverse-mode
    derivatives only.

    Args:
      block: `block(carry, layer)` returns the next carry and an output, as for a scan.
      carry: the carry of the first layer.
      layers: a tree of arrays with a leading axis of layers, (layers, ...): weights,
        and whatever else differs between layers, such as keys.
      mesh: the mesh that `layers` are sharded over.
      specs: how `layers` are sharded: see `on_mesh`. None: as their types say, which on
        Auto axes means replicated, so that nothing is gathered.
      axis: mesh axes over which layers are gathered; None for all. With other axes in
        the mesh, such as "tp", over which a layer stays sharded, name the FSDP axes.
      keep_gathered: keep gathered layers for the backward pass.
      reverse: whether the last layer comes first.
      unroll: layers in one turn of the loop.

    Returns:
      The last carry, and the stacked outputs.

    Raises:
      ValueError: an axis that the mesh lacks; with the path, a leaf that is no array or
        a scalar, a spec that does not fit, or one that shards the axis of layers over
        `axis`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> layers = 2.0 * jnp.ones((3, 8))
      >>> def block(x, layer):
      ...     return x * layer, None
      >>> x, _ = jm.scan_layers(block, jnp.ones(8), layers, mesh)
      >>> float(x[0])
      8.0
    """
    checks.arrays("layers", layers)
    layout = Layout(mesh, specs)
    names = mesh.axis_names if axis is None else checked_axes("axis", axis, mesh)

    def scan(layers: Any, carry: Any) -> Any:
        return jax.lax.scan(block, carry, layers, reverse=reverse, unroll=unroll)

    context = jax.sharding.get_abstract_mesh()
    if set(names) & set(context.manual_axes):
        return scan(layers, carry)
    flat, treedef = jax.tree.flatten(layers)
    divided = []
    for x, path, spec, _ in zip(flat, *layout.of_leaves(layers), strict=True):
        if not x.shape:
            raise ValueError(
                f"layers at {path!r} is a scalar; expected arrays with a leading axis "
                "of layers"
            )
        if set(entry_names(spec[0])) & set(names):
            raise ValueError(
                f"layers at {path!r} of shape {x.shape} with {spec} are divided along "
                "the axis of layers; expected another axis, so that each device has a "
                "part of every layer"
            )
        is_gathered = set(spec_names(spec)) & set(names)
        divided.append(spec if is_gathered else PartitionSpec())
    explicit = AxisType.Explicit in mesh.axis_types
    place = jax.reshard if explicit else jax.lax.with_sharding_constraint
    on = mesh if context.empty else context
    others = set(mesh.axis_names) - set(names)

    def gather(x: Any, spec: PartitionSpec) -> Any:
        return place(x, NamedSharding(on, only(spec, others)))

    def scatter(g: Any, spec: PartitionSpec, dtype: Any) -> Any:
        return place(g.astype(dtype), NamedSharding(on, spec))

    traced = ByLayers(scan, (layers, carry), divided, mesh.axis_names, gather)
    for leaf, spec in enumerate(divided):
        if any(spec) and leaf not in traced.held:
            flat[leaf] = gather(flat[leaf], spec)
    layers = jax.tree.unflatten(treedef, flat)
    return traced(Exchange(gather, scatter, keep_gathered), layers, carry)
