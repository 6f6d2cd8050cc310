"""`scan_layers`: a scan over sharded layers that gathers each while another one runs.

The gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i + 1
            is scattered, all at once: many devices have long latencies.

The forward pass saves what `jax.vjp` of a layer saves, without the layer itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jax_muon.base import checks, jaxprs
from jax_muon.base.array_types import mesh_context
from jax_muon.base.dtypes import wide
from jax_muon.base.specs import (
    AxisName,
    checked_axes,
    devices_over,
    dividing,
    entry_names,
    finer,
    only,
    spec_names,
)
from jax_muon.mesh.communicator import Communicator, Scans
from jax_muon.mesh.layout import MIN_SIZE, Layout, Shaped, Where

Function = Callable[..., PyTree]
Spec = PartitionSpec
# Of a leaf of one layer: how it is sharded, and its gradient, and its dtype.
Leaf = tuple[PartitionSpec, PartitionSpec, np.dtype]


def scan_layers(
    block: Function,
    carry: PyTree[ArrayLike],
    layers: PyTree[ArrayLike],
    *,
    shardings: Where | None = None,
    axis: AxisName | None = None,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """`jax.lax.scan(block, carry, layers)` that gathers each layer while another runs.

    Each device runs `block` on its own samples: axis 0 of every array in `carry` and in
    the outputs must be the batch, which the devices divide, and samples must not
    interact. The block may use arrays of samples from `carry` alone: all others arrive
    whole; on Explicit axes it uses none but its arguments. Put `jax.checkpoint` around
    it, or copies of a layer in another dtype are kept. It has reverse-mode derivatives
    only.

    In the loss of `make_train_step` it needs nothing else: the step knows how layers
    are sharded, and ignores the other arguments. In plain jit `shardings` says it;
    without them it is `jax.lax.scan`.

    Args:
      block: `block(carry, layer)` returns the next carry and an output, as for a scan.
      carry: the carry of the first layer.
      layers: a tree of arrays (layers, ...): weights, and others that do not depend on
        the sample. Keys of samples belong into `carry`.
      shardings: of `layers`, as `where` of `on_mesh`, such as `fsdp` returns; on
        Explicit axes the mesh will do.
      axis: mesh axes over which layers are gathered, and which divide the batch; None
        for all. Over others, such as "tp", a layer stays sharded.

    Returns:
      The last carry, and the stacked outputs.

    Raises:
      ValueError: an axis that the mesh lacks; with the path, a leaf that is no array, a
        sharding that does not fit, or one that shards the axis of layers over `axis`;
        different numbers of layers; by shard_map, a carry whose first axis the devices
        do not divide, and `shardings` inside your own shard_map.

    Examples:
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), auto)
      >>> layers = jnp.broadcast_to(2.0 * jnp.eye(4), (3, 4, 4))
      >>> def block(x, layer):
      ...     return x @ layer, None
      >>> everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
      >>> x, _ = jm.scan_layers(block, jnp.ones((8, 4)), layers, shardings=everywhere)
      >>> float(x[0, 0])
      8.0
    """
    layers = checks.as_arrays("layers", layers)
    lengths = {x.shape[:1] for x in jax.tree.leaves(layers)}
    if len(lengths) != 1 or () in lengths:
        expected = "one first axis, of layers, in all arrays"
        checks.refuse("first axes of layers", sorted(lengths), expected)
    treedef: PyTreeDef
    flat, treedef = jax.tree.flatten(layers)
    scans: Scans | None = mesh_context().scans
    if scans:
        comm, specs, marks = scans.comm, scans.specs, scans.marks(len(flat))
        layer_specs = grad_specs = [specs.get(x, PartitionSpec()) for x in marks]
        flat = list(map(jaxprs.marked, flat, marks))
    elif shardings is None:
        return _plain_scan(block, carry, layers)
    else:
        layout = Layout(shardings)
        mesh, rows = layout.leaf_shardings(layers)
        names = checked_axes("axis", axis, mesh)
        layout.place(layers, {})  # checks that they fit
        comm = Communicator(mesh, names)
        layer_specs, grad_specs = _layer_specs(rows, comm)
    is_sharded = any(map(any, layer_specs)) or not scans
    if not is_sharded or (0,) in lengths:
        return _plain_scan(block, carry, treedef.unflatten(flat))
    leaves = [*zip(layer_specs, grad_specs, (x.dtype for x in flat), strict=True)]

    def for_all_leaves(function: Function) -> Function:
        return lambda layer: [
            None if x is None else function(x, *leaf)
            for x, leaf in zip(layer, leaves, strict=True)
        ]

    exchange = _exchange(comm, leaves, in_step=scans is not None)
    gather, *scatters = map(for_all_leaves, exchange)

    def on_device(carry: PyTree, shards: list[Array], divided: list[Array]) -> PyTree:
        first = jax.eval_shape(lambda x: gather([y[0] for y in x]), shards)
        trace = jax.make_jaxpr(block, return_shape=True)
        closed, results = trace(carry, treedef.unflatten(first))

        # What the block closes over becomes an argument, so that it gets a gradient.
        def run(consts: list[Array], carry: PyTree, layer: list[Array]) -> PyTree:
            function = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))
            flat = function(*jax.tree.leaves((carry, layer)))
            return jax.tree.unflatten(jax.tree.structure(results), flat)

        scan = _scan(run, gather, scatters, results)
        return scan(closed.consts, carry, shards, divided)

    if not scans:
        batch, by_layer = PartitionSpec(comm.axes), PartitionSpec(None, comm.axes)
        shard_specs, shard_grad_specs = (
            [PartitionSpec(None, *only(spec, comm.axes)) for spec in x]
            for x in (layer_specs, grad_specs)
        )
        on_device = jax.shard_map(
            on_device,
            mesh=comm.mesh,
            in_specs=(batch, shard_specs, shard_grad_specs),
            out_specs=(batch, by_layer),
            axis_names={*comm.axes},
            check_vma=False,
        )
    with jax.named_scope(jaxprs.SCAN_LAYERS):
        return on_device(carry, jax.lax.stop_gradient(flat), flat)


def _plain_scan(
    block: Function, carry: PyTree, layers: PyTree
) -> tuple[PyTree, PyTree]:
    with jax.named_scope(jaxprs.SCAN_LAYERS):  # which `find_matrices` looks for
        return jax.lax.scan(block, carry, layers)


def _layer_specs(
    rows: Sequence[tuple[str, Shaped, NamedSharding]], comm: Communicator
) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """How each leaf of one layer is sharded over these mesh axes, and its gradient."""
    layer_specs, grad_specs = [], []
    names, sizes = comm.axes, comm.mesh.shape
    for path, x, sharding in rows:
        spec = sharding.spec
        if any(only(spec, names)[:1]):
            raise ValueError(
                f"layers at {path!r} with {spec} are divided along the axis of layers; "
                "use shardings along another axis, as jax_muon.fsdp makes them: then "
                "each device has a part of every layer"
            )
        spec = dividing(PartitionSpec(*spec[1:]), sizes)
        divided = names if x.size >= MIN_SIZE else ()
        grad_specs.append(finer(spec, x.shape[1:], divided, sizes))
        layer_specs.append(spec if any(only(spec, names)) else PartitionSpec())
    return layer_specs, grad_specs


def _exchange(
    comm: Communicator, leaves: Sequence[Leaf], in_step: bool
) -> tuple[Function, ...]:
    """How a device gathers a layer over these mesh axes, and scatters its gradient.

    Three functions of one leaf. On 8 hosts with 8 GPUs each, P("gpu", None) and
    gradients P(("gpu", "host"), None):

      gather:         a shard (512, 14336) becomes the layer (4096, 14336);
      over_shards:    its gradient becomes (512, 14336) of the sum over the host;
      over_replicas:  that becomes (64, 14336) of the sum over all hosts.

    The last one is there only if devices repeat shards. It comes a layer later, since
    it goes between hosts: with experts on 1024 GPUs products then wait 34 ms less.
    Outside of a step the shard_map sums a gradient over the axes that do not divide it.
    """
    mesh, names = comm.mesh, comm.axes

    def gather(x: Array, spec: Spec, *_: object) -> Array:
        return _beside(names, spec, functools.partial(comm.gather, spec=spec))(x)

    def others(spec: Spec, grad_spec: Spec) -> tuple[str, ...]:
        axes = names if in_step and any(spec) else spec_names(only(grad_spec, names))
        return tuple(name for name in axes if name not in spec_names(spec))

    def over_shards(g: Array, spec: Spec, grad_spec: Spec, dtype: np.dtype) -> Array:
        if in_step and any(spec):  # before the sum: eight of 9000 overflow float16
            g = wide(g) / mesh.size
        axes = spec_names(only(spec, names))
        scatter = functools.partial(comm.scatter, spec=spec, dtype=dtype, axes=axes)
        return _beside(names, grad_spec, scatter)(g)

    def over_replicas(g: Array, spec: Spec, grad_spec: Spec, dtype: np.dtype) -> Array:
        spec, axes = grad_spec, others(spec, grad_spec)
        scatter = functools.partial(comm.scatter, spec=spec, dtype=dtype, axes=axes)
        return _beside(names, spec, scatter)(g)

    repeats = (devices_over(others(*both), mesh.shape) for *both, _ in leaves)
    return gather, over_shards, *([over_replicas] if max(repeats) > 1 else [])


def _beside(
    names: tuple[str, ...], spec: PartitionSpec, exchange: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """The exchange over these mesh axes, of each device's own part along others.

    Left to XLA, an array that "tp" shards as well is gathered over "tp" first: with
    P("data", "tp") a GPU would receive (4096, 14336) of a layer and not (4096, 1792).
    With llama-7b on 256 GPUs products then waited 883 ms. Only where both shard one
    axis of the array, XLA has to do that.
    """
    rest = PartitionSpec(
        *(None if {*entry_names(entry)} & {*names} else entry for entry in spec)
    )
    if not any(rest):
        return exchange
    manual = {*spec_names(rest)}
    return jax.shard_map(
        exchange, in_specs=rest, out_specs=rest, axis_names=manual, check_vma=False
    )


def _scan(
    run: Function, gather: Function, scatters: Sequence[Function], results: PyTree
) -> Function:
    """A scan over layers with a derivative written by hand.

    For 12 layers of one weight (768, 3072) on 8 devices, it is a function of

      consts:   what the block closes over, such as a mask (1024, 1024);
      carry:    samples of this device (2, 1024, 768);
      shards:   of all layers [(12, 96, 3072)];
      divided:  the same again, as their gradients are to be divided. Over 2 hosts that
                repeat the shards, that is [(12, 48, 3072)].

    Args:
      run: maps (consts, carry, layer) to (carry, ys), with a layer [(768, 3072)].
      gather: maps shards of one layer [(96, 3072)] to the layer.
      scatters: one after another, map its gradient [(768, 3072)] to [(96, 3072)], and
        that to [(48, 3072)].
      results: shapes of (carry, ys).
    """

    def layer_at(shards: list[Array], i: ArrayLike) -> list[Array]:
        i = jnp.clip(i, 0, len(shards[0]) - 1)  # beyond an end, the last one there
        at = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return gather([at(x, i, 0) for x in shards])

    def run_and_save(*args: PyTree) -> tuple[PyTree, Any]:
        pull: Any
        outputs, pull = jax.vjp(run, *args)
        pull.args_res[0] = None  # the backward pass has these again
        pull.args_res[2] = None
        return outputs, pull

    # Forward: gather layer i + 1, run layer i.
    def forward(run_layer: Function, *args: PyTree) -> tuple[PyTree, PyTree]:
        consts, carry, shards, _ = args

        def step(state: PyTree, i: ArrayLike) -> tuple[PyTree, PyTree]:
            carry, layer = state
            ahead = layer_at(shards, i + 1)  # on its way while layer i runs
            (carry, ys), saved = run_layer(consts, carry, layer)
            return (carry, ahead), (ys, saved)

        start, numbers = (carry, layer_at(shards, 0)), np.arange(len(shards[0]))
        (carry, last), (ys, saved) = jax.lax.scan(step, start, numbers)
        return (carry, ys), (saved, last, args)

    # Backward, from the last layer to the first: scatter the gradient of layer i + 1,
    # gather layer i - 1, pull the cotangents back through layer i.
    def backward(residuals: PyTree, cotangents: PyTree) -> tuple[PyTree, ...]:
        saved, last, (consts, _, shards, divided) = residuals
        d_carry, d_ys = _reals(cotangents)

        def put(d_shards: list[Array], d_layer: list[Array], i: ArrayLike) -> PyTree:
            into = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(
                lambda x, d: into(x, d.astype(x.dtype), i, 0), d_shards, d_layer
            )

        def step(state: PyTree, inputs: PyTree) -> tuple[PyTree, None]:
            # `layer` is whole layer i, and `waiting` has gradients of later layers: of
            # layer i + 1 (768, 3072), to be scattered; with replicas also of layer
            # i + 2 (96, 3072), to be summed over these.
            d_carry, total, layer, waiting, d_shards = state
            i, pull, d_ys = inputs
            *waiting, done = (f(x) for f, x in zip(scatters, waiting, strict=True))
            # In the first turns these are zeros, which are overwritten later.
            d_shards = put(d_shards, done, i + len(scatters))
            before = layer_at(shards, i - 1)
            pull.args_res[0], pull.args_res[2] = consts, layer
            d_consts, d_carry, d_layer = _reals(pull(_all((d_carry, d_ys), results)))
            total = jax.tree.map(jnp.add, total, d_consts)
            return (d_carry, total, before, [d_layer, *waiting], d_shards), None

        total, d_layer, d_shards = jax.tree.map(
            jnp.zeros_like, _reals((consts, last, divided))
        )
        waiting = [d_layer]
        for scatter in scatters[:-1]:
            shapes = jax.eval_shape(scatter, waiting[-1])
            waiting.append(jax.tree.map(jnp.zeros_like, shapes))
        start = d_carry, total, last, waiting, d_shards
        inputs = np.arange(len(shards[0])), saved, d_ys
        (d_carry, d_consts, _, waiting, d_shards), _ = jax.lax.scan(
            step, start, inputs, reverse=True
        )
        # Of two stages, layer 1 has one left, and layer 0 has both.
        for late in reversed(range(len(scatters))):
            done = waiting[late]
            for scatter in scatters[late:]:
                done = scatter(done)
            d_shards = put(d_shards, done, late)
        return d_consts, d_carry, None, d_shards

    scan = jax.custom_vjp(
        lambda *args: forward(lambda *args: (run(*args), ()), *args)[0]
    )
    scan.defvjp(functools.partial(forward, run_and_save), backward)
    return scan


def _reals(tree: PyTree[Array]) -> PyTree[Array | None]:
    """The leaves that have a gradient; None for the others, such as integers."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree
    )


def _all(cotangents: PyTree[Array | None], like: PyTree) -> PyTree:
    """Cotangents of all results; JAX's zeros where there is none."""
    return jax.tree.map(
        lambda x, d: np.zeros(x.shape, jax.dtypes.float0) if d is None else d,
        *(like, cotangents),
    )
