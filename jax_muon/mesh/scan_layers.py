"""`scan_layers`: a scan over sharded layers that gathers each while another one runs.

The gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i + 1
            is scattered, all at once: many devices have long latencies.

The forward pass saves what `jax.vjp` of a layer saves, without the layer itself. There
are two exchanges: collectives, where this device's shards are visible, and elsewhere
sharding constraints, by which XLA gathers and scatters.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import checks, jaxprs, trees
from jax_muon.mesh.layout import Layout, Specs
from jax_muon.mesh.specs import (
    AxisName,
    checked_axes,
    divided_axes,
    dividing,
    entry_names,
    only,
    spec_names,
)
from jax_muon.mesh.wire import Wire, of_step

Function = Callable[..., Any]


def scan_layers(
    block: Function,
    carry: Any,
    layers: Any,
    mesh: Mesh,
    specs: Specs = None,
    *,
    axis: AxisName | None = None,
    local_batch: bool = False,
    keep_gathered: bool = False,
    reverse: bool = False,
    unroll: int = 1,
) -> Any:
    """`jax.lax.scan(block, carry, layers)` that gathers each layer while another runs.

    For models in plain jit, and in `make_train_step` for parameters that its `scanned`
    names. The backward pass gathers layers again and scatters each layer's gradient
    while the next one is computed. Put `jax.checkpoint` around `block`: what it keeps
    is kept, and without it copies of a layer in another dtype would be, too. Like any
    `jax.custom_vjp`, it has reverse-mode derivatives only.

    Args:
      block: `block(carry, layer)` returns the next carry and an output, as for a scan.
      carry: the carry of the first layer.
      layers: a tree of arrays with a leading axis of layers, (layers, ...): weights,
        and whatever else differs between layers, such as keys. They are sent in their
        dtype, or in that of `make_train_step`.
      mesh: the mesh that `layers` are sharded over.
      specs: how `layers` are sharded: see `on_mesh`. None: as their types say, which on
        Auto axes and in shard_map means replicated, so that nothing is gathered.
      axis: mesh axes over which layers are gathered, and which divide the batch; None
        for all. With other axes in the mesh, such as "tp", over which a layer stays
        sharded, name the FSDP axes.
      local_batch: whether `block` gets each device's part of the batch by itself, as in
        `make_train_step`. Then a layer's gradient is sent in one collective between
        devices, which on 64 and more saves most of the waiting. `axis` has to divide
        the first axis of every array in `carry` and in the outputs of `block`, and
        `block` must treat samples independently of each other: what varies with the
        sample, such as a mask, belongs into `carry`. On Explicit axes it must not use
        arrays other than its arguments. In a shard_map of your own it is so anyway; a
        layer's gradient is summed over the mesh axes that divide it, and no others.
      keep_gathered: keep gathered layers for the backward pass.
      reverse: whether the last layer comes first.
      unroll: layers in one turn of the loop.

    Returns:
      The last carry, and the stacked outputs.

    Raises:
      ValueError: an axis that the mesh lacks; with the path, a leaf that is no array or
        a scalar, a spec that does not fit, or one that shards the axis of layers over
        `axis`; arrays without a batch that `local_batch` promises.

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
    checks.flag("local_batch", local_batch)
    names = mesh.axis_names if axis is None else checked_axes("axis", axis, mesh)
    manual = {*jax.sharding.get_abstract_mesh().manual_axes} & {*names}
    if manual:
        names, local_batch = tuple(n for n in names if n in manual), False
    layout = Layout(
        mesh,
        specs,
        names if local_batch else (),
        layers=lambda tree: {path: (0,) for path, _ in trees.leaves_with_paths(tree)},
        of_shards=bool(manual),
    )
    treedef: Any
    flat, treedef = jax.tree.flatten(layers)
    leaves = _leaves(layers, layout, names)
    left = {name for leaf in leaves for name in spec_names(leaf.spec)} - {*names}
    left = left if AxisType.Explicit in mesh.axis_types else set()
    words = (
        f"axis={axis!r} leaves layers sharded over {', '.join(sorted(left))}, with "
        "which block cannot compute on Explicit axes; expected axis= to name these as "
        "well, or a mesh with Auto axes"
    )
    if left and local_batch:
        raise ValueError(words)
    if manual:
        flat = _marked(flat, leaves)
    exchange = _collectives if manual or local_batch else _constraints
    gather, *scatters = exchange(mesh, names, leaves)
    is_ahead = [x.has_gradient and (any(x.spec) or local_batch) for x in leaves]
    ahead, of_layer = ([*itertools.compress(x, is_ahead)] for x in (flat, leaves))
    # Integers have no gradient to scatter; without specs, nothing is gathered.
    others = [
        x if local_batch else gather(x, leaf)
        for x, leaf, first in zip(flat, leaves, is_ahead, strict=True)
        if not first
    ]
    of_layer = [leaf.of_layer() for leaf in of_layer]

    def block_of(carry: Any, layer: Sequence[Any], xs: Sequence[Any]) -> Any:
        parts = {True: iter(layer), False: iter(xs)}
        return block(carry, treedef.unflatten([next(parts[x]) for x in is_ahead]))

    loop = functools.partial(jax.lax.scan, unroll=unroll)
    if not ahead:
        step = lambda carry, xs: block_of(carry, [], xs)  # noqa: E731
        return loop(step, carry, others, reverse=reverse)

    def of_all(exchange: Function) -> Function:
        return lambda arrays: [*map(exchange, arrays, of_layer)]

    per_device = None
    if local_batch:
        _check_batch("carry", carry, mesh, names)
        per_device = _PerDevice(mesh, names, of_layer)
    # What the block closes over becomes an argument, so that it gets a gradient.
    program: list[Any] = []

    def trace(carry: Any, ahead: Any, xs: Any) -> None:
        first = of_all(gather)([x[0] for x in ahead]), [x[0] for x in xs]
        program[:] = jax.make_jaxpr(block_of, return_shape=True)(carry, *first)

    traced = per_device.traced(trace) if per_device else trace
    try:
        jax.eval_shape(traced, carry, ahead, others)
    except Exception as error:
        if type(error).__name__ == "ShardingTypeError" and left:
            raise ValueError(f"{words} ({error})") from error
        raise
    closed, results = program
    if local_batch:
        _check_batch("the output of block", results[1], mesh, ())

    def run(consts: list[Any], *args: Any) -> Any:
        function = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))
        flat = function(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(results), flat)

    exchanges = of_all(gather), [*map(of_all, scatters)]
    forward, backward = _directions(
        run, *exchanges, results, loop, reverse, keep_gathered
    )
    if per_device:
        forward, backward = per_device.forward(forward), per_device.backward(backward)
    scan = jax.custom_vjp(lambda *args: forward(args, False)[0])

    def save(*args: Any) -> Any:
        outputs, saved = forward(args, True)
        return outputs, (saved, args)

    scan.defvjp(save, lambda saved, d: backward(*saved, _reals(d)))
    return scan(closed.consts, carry, ahead, others)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Weights of all layers, or of one of them.

    Attributes:
      spec: how they are sharded; () if they need not be gathered.
      fine: how their gradients are to be.
      dtype: of both.
      has_gradient: False for integers, and without layers.
    """

    spec: PartitionSpec
    fine: PartitionSpec
    dtype: Any
    has_gradient: bool

    def of_layer(self) -> "_Leaf":
        spec, fine = (PartitionSpec(*x[1:]) for x in (self.spec, self.fine))
        return dataclasses.replace(self, spec=spec, fine=fine)


def _leaves(layers: Any, layout: Layout, names: Sequence[str]) -> list[_Leaf]:
    """How each leaf is sharded over these mesh axes, and others."""
    leaves = []
    triples = zip(*layout.of_leaves(layers), strict=True)
    for x, (path, spec, fine) in zip(jax.tree.leaves(layers), triples, strict=True):
        if not len(spec):
            raise ValueError(
                f"layers at {path!r} is a scalar; expected arrays with a leading axis "
                "of layers"
            )
        if set(entry_names(spec[0])) & set(names):
            raise ValueError(
                f"layers at {path!r} with {spec} are divided along the axis of layers; "
                "expected another axis, so that each device has a part of every layer"
            )
        spec, fine = (dividing(s, layout.mesh.shape) for s in (spec, fine))
        if set(entry_names(fine[0])) & set(names):  # no other axis fits
            fine = spec
        if not set(spec_names(spec)) & set(names):
            spec = PartitionSpec()
        real = jnp.issubdtype(x.dtype, jnp.inexact)
        leaves.append(_Leaf(spec, fine, x.dtype, bool(len(x) and real)))
    return leaves


def mark(spec: PartitionSpec) -> str:
    """The name that marks layers gathered inside shard_map, in a traced loss."""
    return f"scan_layers over {spec_names(spec)}"


def _marked(flat: Sequence[Any], leaves: Sequence[_Leaf]) -> list[Any]:
    """Shards, marked for the check of `make_train_step`, if this is its loss."""
    wire = of_step.get()
    if wire and not wire.scanned and any(any(leaf.spec) for leaf in leaves):
        raise ValueError(
            "scan_layers in the loss of make_train_step got whole parameters; expected "
            "make_train_step(scanned=[...]), with patterns of the paths of those that "
            "it is to gather"
        )
    return [
        jaxprs.marked(x, mark(leaf.spec)) if any(leaf.spec) else x
        for x, leaf in zip(flat, leaves, strict=True)
    ]


def _check_batch(what: str, tree: Any, mesh: Mesh, names: Sequence[str]) -> None:
    """Refuse arrays whose first axis these mesh axes do not divide."""
    devices = math.prod(mesh.shape[name] for name in names)
    for path, x in jax.tree.leaves_with_path(tree):
        if not jnp.ndim(x) or jnp.shape(x)[0] % devices:
            raise ValueError(
                f"local_batch=True: {what}{jax.tree_util.keystr(path)} has shape "
                f"{jnp.shape(x)}; expected a first axis of samples, which the mesh "
                f"axes {tuple(names)} divide, or local_batch=False"
            )


def _collectives(
    mesh: Mesh, names: tuple[str, ...], leaves: Sequence[_Leaf]
) -> tuple[Function, ...]:
    """How a device gathers an array over these mesh axes, and scatters its gradient.

    If devices repeat shards, the sum over these, between hosts, comes a layer later.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    wire = of_step.get() or Wire(names, sum_wide=is_cpu)
    # In a shard_map of the user's, that sum is left to the user, or to JAX.
    is_theirs = not of_step.get() and jax.sharding.get_abstract_mesh().manual_axes

    def gather(x: Any, leaf: _Leaf) -> Any:
        return wire.gather(x, leaf.spec)

    def over_shards(g: Any, leaf: _Leaf) -> Any:
        over = dataclasses.replace(wire, axes=spec_names(only(leaf.spec, wire.axes)))
        g = over.scatter(g, leaf.spec, leaf.dtype)
        return g.astype(leaf.dtype) if is_theirs else g

    def over_replicas(g: Any, leaf: _Leaf) -> Any:
        rest = tuple(n for n in wire.axes if n not in spec_names(leaf.spec))
        over = dataclasses.replace(wire, axes=rest, parts=1)
        return over.scatter(g, leaf.fine, leaf.dtype).astype(leaf.dtype)

    several = {*divided_axes(mesh.shape)} & {*names}
    if is_theirs:
        return gather, over_shards
    if any(any(x.spec) and several - {*spec_names(x.spec)} for x in leaves):
        return gather, over_shards, over_replicas
    return gather, lambda g, leaf: wire.scatter(g, leaf.fine, leaf.dtype).astype(
        leaf.dtype
    )


def _constraints(
    mesh: Mesh, names: tuple[str, ...], leaves: Sequence[_Leaf]
) -> tuple[Function, ...]:
    """The same by sharding constraints, for XLA to carry out."""
    del leaves
    context = jax.sharding.get_abstract_mesh()
    on = mesh if context.empty else context
    explicit = AxisType.Explicit in mesh.axis_types
    place = jax.reshard if explicit else jax.lax.with_sharding_constraint
    others = set(mesh.axis_names) - set(names)

    def gather(x: Any, leaf: _Leaf) -> Any:
        if not any(leaf.spec):
            return x
        return place(x, NamedSharding(on, only(leaf.spec, others)))

    def scatter(g: Any, leaf: _Leaf) -> Any:
        return place(g.astype(leaf.dtype), NamedSharding(on, leaf.spec))

    return gather, scatter


@dataclasses.dataclass(frozen=True)
class _PerDevice:
    """The loop in shard_map, on each device's part of the batch.

    What the forward pass saves leaves shard_map with an axis of devices before all
    others.
    """

    mesh: Mesh
    names: tuple[str, ...]
    leaves: list[_Leaf]

    def _mapped(self, function: Function, in_specs: Any, out_specs: Any) -> Function:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.names},
            check_vma=False,
        )

    def _specs(self, fine: bool = False) -> tuple[Any, ...]:
        """Of what the block closes over, the carry, shards, and other layers."""
        of_layer = [x.fine if fine else x.spec for x in self.leaves]
        shards = [PartitionSpec(None, *only(x, self.names)) for x in of_layer]
        return PartitionSpec(), PartitionSpec(self.names), shards, PartitionSpec()

    @property
    def _outputs(self) -> tuple[PartitionSpec, PartitionSpec]:
        return PartitionSpec(self.names), PartitionSpec(None, self.names)

    def traced(self, trace: Function) -> Function:
        return self._mapped(trace, self._specs()[1:], PartitionSpec())

    def forward(self, forward: Function) -> Function:
        def run(args: Any, saves: bool) -> Any:
            def on_device(args: Any) -> Any:
                outputs, saved = forward(args, saves)
                return outputs, jax.tree.map(lambda x: x[None], saved)

            out = self._outputs, PartitionSpec(self.names)
            return self._mapped(on_device, (self._specs(),), out)(args)

        return run

    def backward(self, backward: Function) -> Function:
        def on_device(saved: Any, args: Any, cotangents: Any) -> Any:
            saved = jax.tree.map(lambda x: x[0], saved)
            d_consts, *others = backward(saved, args, cotangents)
            return jax.lax.psum(d_consts, self.names), *others

        into = PartitionSpec(self.names), self._specs(), self._outputs
        return self._mapped(on_device, into, self._specs(fine=True))


def _directions(
    run: Function,
    gather: Callable[[list[Any]], list[Any]],
    scatters: Sequence[Callable[[list[Any]], list[Any]]],
    results: Any,
    loop: Function,
    reverse: bool,
    keep_gathered: bool,
) -> tuple[Function, Function]:
    """A scan over layers, forward and backward, for (consts, carry, shards, xs).

    `run` maps (consts, carry, layer, xs) to (carry, ys), with shapes as `results`.
    """
    following = -1 if reverse else 1

    def layer_at(shards: list[Any], i: Any) -> list[Any]:
        i = jnp.clip(i, 0, len(shards[0]) - 1)  # beyond an end, the last one there
        at = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return gather([at(x, i, 0) for x in shards])

    def run_and_save(*args: Any) -> Any:
        pull: Any
        outputs, pull = jax.vjp(run, *args)
        # The backward pass has these again.
        pull.args_res[0] = pull.args_res[3] = None
        if not keep_gathered:
            pull.args_res[2] = None
        return outputs, pull

    def forward(args: Any, saves: bool) -> Any:
        consts, carry, shards, xs = args
        numbers = np.arange(len(shards[0]))
        run_layer = run_and_save if saves else lambda *args: (run(*args), ())

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer), (i, x) = state, i_x
            ahead = layer_at(shards, i + following)
            (carry, ys), saved = run_layer(consts, carry, layer, x)
            return (carry, ahead), (ys, saved)

        start = carry, layer_at(shards, numbers[-1] if reverse else 0)
        (carry, last), (ys, saved) = loop(step, start, (numbers, xs), reverse=reverse)
        return (carry, ys), (saved, last) if saves else ()

    def backward(residuals: Any, args: Any, cotangents: Any) -> Any:
        (saved, last), (consts, _, shards, xs), (d_carry, d_ys) = (
            residuals,
            args,
            cotangents,
        )
        numbers = np.arange(len(shards[0]))

        def put(d_shards: list[Any], d_layer: list[Any], i: Any) -> list[Any]:
            i = jnp.clip(i, 0, len(shards[0]) - 1)  # of zeros, before the first
            into = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
            return [into(x, d, index=i) for x, d in zip(d_shards, d_layer, strict=True)]

        def step(state: Any, inputs: Any) -> Any:
            d_carry, total, layer, waiting, d_shards = state
            i, pull, x, d_ys = inputs
            *waiting, done = (f(w) for f, w in zip(scatters, waiting, strict=True))
            d_shards = put(d_shards, done, i + len(scatters) * following)
            before = layer
            if not keep_gathered:
                before = layer_at(shards, i - following)
                pull.args_res[2] = layer
            pull.args_res[0], pull.args_res[3] = consts, x
            d_consts, d_carry, d_layer, d_x = _reals(
                pull(_all((d_carry, d_ys), results))
            )
            total = jax.tree.map(jnp.add, total, d_consts)
            return (d_carry, total, before, [d_layer, *waiting], d_shards), d_x

        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        waiting = [zeros(last)]
        for scatter in scatters:
            shapes = jax.eval_shape(scatter, waiting[-1])
            waiting.append([jnp.zeros(x.shape, x.dtype) for x in shapes])
        d_shards = [
            jnp.zeros_like(w)  # as its type says, on Explicit axes
            if d.shape == w.shape[1:]
            else jnp.zeros((len(w), *d.shape), d.dtype)
            for w, d in zip(shards, waiting.pop(), strict=True)
        ]
        start = d_carry, zeros(_reals(consts)), last, waiting, d_shards
        (d_carry, d_consts, _, waiting, d_shards), d_xs = loop(
            step, start, (numbers, saved, xs, d_ys), reverse=not reverse
        )
        first = numbers[-1] if reverse else 0
        for late in reversed(range(len(scatters))):
            d_layer = waiting[late]
            for scatter in scatters[late:]:
                d_layer = scatter(d_layer)
            d_shards = put(d_shards, d_layer, first + late * following)
        return d_consts, d_carry, d_shards, d_xs

    return forward, backward


def _reals(tree: Any) -> Any:
    """The leaves that have a gradient; None for the others, such as integers."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree
    )


def _all(cotangents: Any, like: Any) -> Any:
    """Those of results that have one, and JAX's zeros for the others."""
    return jax.tree.map(
        lambda x, d: np.zeros(x.shape, jax.dtypes.float0) if d is None else d,
        *(like, cotangents),
    )
