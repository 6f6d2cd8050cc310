"""A whole train step of data parallelism: gradients scattered, updates gathered.

  gather:  each device gathers the sharded parameters, leaf by leaf, except those that
           the loss gathers itself, by `scan_layers`;
  scatter: gradients of each device's own batch are summed leaf by leaf, under the
           backward pass; each device receives the sum for its shard of the state;
  update:  `on_mesh`, on gradients and state that are sharded so.

The first two run inside shard_map: plain jit promises no reduce-scatters.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.base import checks, jaxprs, trees
from jax_muon.base.array_types import setting
from jax_muon.base.dtypes import wide
from jax_muon.base.specs import divided_axes, dividing
from jax_muon.mesh.layout import Layout, Specs, axes_of_layers
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.scan_layers import mark
from jax_muon.mesh.wire import Wire
from jax_muon.mesh.xla_options import gpu_options

Step = tuple[Any, Any, dict[str, Any]]  # parameters, state, metrics


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    specs: Specs = None,
    scanned: Sequence[str] = (),
    min_size: int = 1024,
    has_aux: bool = False,
    max_aux: Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    reduce_dtype: jax.typing.DTypeLike | None = None,
    gather_dtype: jax.typing.DTypeLike | None = None,
    donate: bool = True,
) -> "TrainStep":
    """A jitted train step over a batch that is divided between all devices of a mesh.

    Gradients and state are divided between all devices (ZeRO-2, arXiv 1910.02054).

    Args:
      loss_fn: `loss_fn(params, batch)` returns the mean loss of its device's batch, or
        of all, if it calls collectives over axes of the mesh. Integers and booleans
        among the parameters stay as they are.
      tx: an optimizer, such as a recipe. Its update gets the loss as `value`, which
        `optax.contrib.reduce_on_plateau` asks for.
      mesh: a mesh of Auto or of Explicit axes, all of which divide the batch.
      specs: see `on_mesh`. None: replicated, also on Explicit axes.
      scanned: patterns of the paths of parameters that loss_fn gathers: it sees each
        device's shards, which it may cast, slice and reshape, and gives to
        `scan_layers` with these specs, and to nothing else.
      min_size: leaves of fewer elements are sharded as `specs` says and no further.
      has_aux: whether loss_fn returns a pair of the loss and a tree of arrays.
      max_aux: names of entries of the auxiliary output, a dictionary, whose maximum
        counts instead of the mean, and is an extra argument for `tx`, such as
        "max_logits" for `clip_qk`.
      weighted: whether the loss is a pair of the mean and its weight, such as the
        number of unmasked tokens. A mean of weight 0 does not count, even if it is NaN,
        unless collectives or `scan_layers` take that NaN to other devices: then divide
        by `jnp.maximum(count, 1)`. With a weight below 0 all is NaN.
      microbatches: number of parts in which a device takes its batch, one by one. The
        sum of their gradients is sent once, but for scanned layers.
      reduce_dtype: dtype in which gradients are sent; None for the parameters'.
      gather_dtype: dtype in which parameters and updates are sent; None for their own.
      donate: whether parameters and state are updated in place.

    Returns:
      A `TrainStep`.

    Raises:
      ValueError: at the first call, a batch that devices and microbatches do not
        divide, output of loss_fn without what the flags promise, a parameter of
        `scanned` that is used otherwise, and what `on_mesh` raises.

    Examples:
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params["mlp"]) ** 2)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = jm.nanochat(0.02, matrices={"*": "muon"})
      >>> step = jm.make_train_step(loss_fn, tx, mesh)
      >>> params, state = step.init({"mlp": jnp.eye(64)})
      >>> batch = jnp.ones((jax.device_count(), 64))
      >>> params, state, metrics = step(params, state, batch)
      >>> float(metrics["loss"])
      1.0
    """
    checks.count("microbatches", microbatches)
    checks.float_dtype("reduce_dtype", reduce_dtype)
    checks.float_dtype("gather_dtype", gather_dtype)
    maxima = checks.strings("max_aux", max_aux)
    patterns = checks.strings("scanned", scanned)
    loss = functools.partial(_outputs, loss_fn, has_aux, maxima, weighted)
    specs = PartitionSpec() if specs is None else specs
    divided = divided_axes(mesh.shape)
    layout = Layout(mesh, specs, divided, min_size, axes_of_layers(tx))
    wire = Wire(mesh, mesh.axis_names, gather_dtype, reduce_dtype, patterns)
    on_mesh = OnMesh(tx, layout, gather_dtype)
    return TrainStep(loss, on_mesh, wire, microbatches, donate)


@dataclasses.dataclass(eq=False)
class TrainStep:
    """A train step, and the shardings of everything in it.

    `step.init(params)` returns the parameters and the optimizer's state, sharded as
    they are between steps; `step(params, state, batch)` returns the new ones and
    metrics: "loss", the mean over the whole batch, and with `has_aux` "aux", its mean
    over devices and microbatches, or the maximum for entries in `max_aux`.
    """

    _loss: Callable[..., "_Outputs"]
    _optimizer: OnMesh
    _wire: Wire
    _microbatches: int
    _donate: bool
    _jitted: Any = None

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer on its mesh, for `describe`."""
        return self._optimizer.transform()

    def init(self, params: optax.Params) -> tuple[Any, Any]:
        """The parameters, and the optimizer's state, in their shardings."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract(params))
        placed = jax.device_put(params, shardings[0])
        # A copy, since the first step donates its arguments: device_put may alias.
        copy = jax.jit(lambda *x: jax.tree.map(jnp.copy, x), out_shardings=shardings)
        return cast(Any, copy(placed, self._optimizer.init(placed)))

    def abstract(self, params: optax.Params) -> tuple[Any, Any]:
        """Shapes and shardings of parameters and state, to restore them into."""
        return self._optimizer.abstract(params)

    def __call__(self, params: Any, state: Any, batch: Any) -> Step:
        """One step; see the class."""
        _check_alive(params, state)
        return cast(Step, self._jit(params)(params, state, batch))

    def lower(self, params: Any, state: Any, batch: Any) -> Any:
        """The step lowered for these arguments, or their shapes with shardings."""
        return self._jit(params).lower(params, state, batch)

    def compiler_options(self, params: Any) -> dict[str, Any]:
        """XLA's options for these parameters, or their shapes; see `gpu_options`."""
        layout = self._optimizer.layout
        return gpu_options(
            params,
            layout.mesh,
            matrices=None,  # what `scanned` does not name is gathered whole
            gathers_first=any(map(any, layout.of_leaves(params)[1])),
            scanned=self._wire.scanned,
        )

    def _jit(self, params: Any) -> Any:
        """The jitted step, with the compiler's options for its first parameters."""
        if self._jitted is None:
            self._jitted = jax.jit(
                self._step,
                donate_argnums=(0, 1) if self._donate else (),
                compiler_options=self.compiler_options(params) or None,
            )
        return self._jitted

    def _step(self, params: Any, state: Any, batch: Any) -> Step:
        layout, wire = self._optimizer.layout, self._wire
        mesh, axes = layout.mesh, PartitionSpec(wire.axes)
        number = mesh.size * self._microbatches
        expected = (
            f"arrays whose leading axis is a multiple of {number}, the devices "
            f"({mesh.size}) times the microbatches ({self._microbatches})"
        )
        checks.samples("batch", batch, number, expected)
        if AxisType.Explicit in mesh.axis_types:
            batch = jax.reshard(batch, NamedSharding(mesh, axes))
        names, *both = layout.of_leaves(params)
        of_params, of_state = ([dividing(spec, mesh.shape) for spec in x] for x in both)
        trees.check_patterns_match("scanned", wire.scanned, names)
        held = [
            any(spec) and any(trees.matches(pattern, name) for pattern in wire.scanned)
            for name, spec in zip(names, of_params, strict=True)
        ]
        # `scan_layers` sums gradients over all devices, sharded like the parameters.
        rows = zip(of_params, of_state, held, strict=True)
        of_grads = [x if is_held else y for x, y, is_held in rows]
        treedef: Any = jax.tree.structure(params)
        specs, of_grads, held = map(treedef.unflatten, (of_params, of_grads, held))
        with setting(scans=wire):
            # With check_vma=True, the gradient of a parameter that devices share would
            # be summed already, loops could not start from constants, and a loss that
            # ends in a pmean would have a gradient too small by the number of devices.
            grads, maxima, metrics = jax.shard_map(
                functools.partial(self._gradients, specs, of_grads, held),
                mesh=mesh,
                in_specs=(specs, axes),
                out_specs=(of_grads, PartitionSpec(), PartitionSpec()),
                check_vma=False,
            )(params, batch)
        extra = {"value": metrics["loss"], **maxima}
        updates, state = self._optimizer.update(grads, state, params, **extra)
        after = jax.tree.map(
            lambda old, new: new if jnp.issubdtype(old.dtype, jnp.inexact) else old,
            params,
            optax.apply_updates(params, updates),
        )
        return after, state, metrics

    # --- on each device, inside shard_map ---------------------------------------------

    def _gradients(
        self, of_params: Any, of_grads: Any, held: Any, params: Any, batch: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """This device's shard of the mean gradient, by `of_grads`; maxima; metrics.

        The loss gathers those parameters itself that are `held`.
        """
        count, wire = self._microbatches, self._wire
        parts = jax.tree.map(
            lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch
        )
        first = jax.tree.map(lambda x: x[0], parts)
        whole = jax.tree.map(
            lambda x, spec, held: x if held else wire.gather(x, spec),
            *(params, of_params, held),
        )
        if wire.scanned:
            self._check_scanned(whole, first, of_params, held)
        of_part = functools.partial(self._of_part, held, whole)
        (total, sums, aux), maxima = (
            of_part(first) if count == 1 else _sum_over(of_part, parts, first)
        )
        # A batch in which nothing counts has no gradient.
        loss, grads = _times(sums, jnp.where(total == 0, 0, 1 / total))

        def scatter(g: Any, x: Any, spec: Any, held: bool) -> Any:
            kind = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else g.dtype
            g = g if held else wire.scatter(g / wire.mesh.size, spec, kind, wire.axes)
            return g.astype(x.dtype)

        grads = jax.tree.map(scatter, grads, params, of_grads, held)
        maxima = jax.lax.pmax(maxima, wire.axes)
        metrics = {"loss": jax.lax.pmean(loss, wire.axes)}
        if aux is not None:
            aux = jax.tree.map(
                lambda x: jax.lax.psum(wide(x), wire.axes).astype(x.dtype), aux
            )
            metrics["aux"] = aux | maxima if maxima else aux
        return grads, maxima, metrics

    def _of_part(self, held: Any, params: Any, part: Any) -> tuple[Any, Any]:
        """One microbatch: its weight, this device's part of its mean times that weight.

        These parts are not divided by the number of devices yet.
        """
        loss, pull, (weight, aux, maxima) = jax.vjp(
            lambda params: self._loss(params, part), params, has_aux=True
        )
        devices = self._wire.mesh.size
        total, mean, share = jnp.asarray(devices, float), wide(loss), 1.0
        if weight is not None:
            # Collectives in the loss mix the cotangents of devices, so these have to be
            # in the ratio of the weights. They are 1 on average, as float16 needs it.
            total = jax.lax.psum(weight, self._wire.axes)
            share = weight * devices / jnp.where(total == 0, 1, total)
            mean = jnp.where(weight == 0, 0, mean * share)
        cotangent = jnp.asarray(share, loss.dtype)
        rounded_off = jnp.where(cotangent == 0, 1, share / wide(cotangent))
        (grads,) = pull(cotangent)

        def counted(g: Any, held: bool) -> Any:
            """This device's part, unless summed already; 0 for a mean of 0 / 0."""
            if g.dtype == jax.dtypes.float0:
                return jnp.zeros(g.shape)
            if held or weight is None:
                return wide(g)
            g = _times(wide(g), rounded_off)
            return jnp.where((weight == 0) & jnp.isnan(g), 0, g)

        means = mean, jax.tree.map(counted, grads, held)
        # Not after the sum: booleans and int8 have none.
        count = devices * self._microbatches
        aux = jax.tree.map(lambda x: jnp.asarray(x) / count, aux)
        return (total, _times(means, total), aux), maxima

    def _check_scanned(self, params: Any, part: Any, of_params: Any, held: Any) -> None:
        """Refuse a loss that uses a parameter otherwise than `scanned` says."""
        try:
            jaxpr = jax.make_jaxpr(self._loss)(params, part).jaxpr
        except Exception as error:
            error.add_note(
                f"scanned={self._wire.scanned}: loss_fn sees each device's shards of "
                "these parameters; expected that it gives them to scan_layers, with "
                "the specs of make_train_step"
            )
            raise
        names = [path for path, _ in trees.leaves_with_paths(params)]
        specs, held = map(jax.tree.leaves, (of_params, held))
        rows = zip(names, specs, held, jaxpr.invars, strict=False)  # the batch's last
        for path, spec, is_held, variable in rows:
            found, is_result = jaxprs.uses(jaxpr, {variable})
            if is_held and (found != [mark(spec)] or any(is_result)):
                raise ValueError(
                    f"scanned: loss_fn uses {path!r}, sharded by {spec}, for "
                    f"{', '.join(found) or 'nothing'}; expected one {mark(spec)} and "
                    "nothing else, or a pattern that leaves it out, so that it is "
                    "gathered before the loss"
                )


# The loss, and its weight, auxiliary output and maxima: None and {} without such.
_Outputs = tuple[Any, tuple[Any, Any, dict[str, Any]]]


def _outputs(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    max_aux: Sequence[str],
    weighted: bool,
    params: Any,
    batch: Any,
) -> _Outputs:
    """What a loss function returns, in one form; see `make_train_step`."""
    loss, weight, aux = loss_fn(params, batch), None, None
    if has_aux:
        loss, aux = _pair("has_aux", loss)
    if weighted:
        loss, weight = _pair("weighted", loss)
        weight = checks.scalar("the weight of loss_fn", weight, "a real scalar")
        weight = jnp.asarray(weight, float)
        weight = jax.lax.stop_gradient(jnp.where(weight < 0, jnp.nan, weight))
    entries = aux if isinstance(aux, Mapping) else {}
    if not {*max_aux} <= {*entries}:
        expected = f"entries of the auxiliary output, which has {[*entries]}"
        checks.refuse("max_aux", max_aux, expected)
    maxima = {name: entries[name] for name in max_aux}
    if maxima:
        aux = {name: x for name, x in entries.items() if name not in maxima}
    expected = "a real scalar in floating point"
    loss = jnp.asarray(checks.scalar("the loss of loss_fn", loss, expected))
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        checks.refuse("the loss of loss_fn", loss, f"{expected}, which has a gradient")
    return loss, (weight, aux, maxima)


def _sum_over(
    function: Callable[[Any], tuple[Any, Any]], parts: Any, first: Any
) -> tuple[Any, Any]:
    """The sum of a function's first result over parts, and maxima of the other."""

    def add(so_far: Any, part: Any) -> tuple[Any, Any]:
        more, maxima = function(part)
        return jax.tree.map(jnp.add, so_far, more), maxima

    shapes, _ = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    summed, maxima = jax.lax.scan(add, zeros, parts)
    return summed, jax.tree.map(lambda x: jnp.max(x, axis=0), maxima)


def _pair(flag: str, output: Any) -> Any:
    """The output of loss_fn, if it is the pair that a flag promises."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(
            f"{flag}=True, and loss_fn returned {output!r}; expected (loss, weight) if "
            "weighted, (loss, auxiliary output) if has_aux, or ((loss, weight), "
            "auxiliary output) if both"
        )
    return output


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _check_alive(params: Any, state: Any) -> None:
    """Refuse deleted arrays: JAX ends the process when several devices get them."""
    for path, x in trees.leaves_with_paths({"params": params, "state": state}):
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise ValueError(
                f"{path!r} of shape {x.shape} is deleted: an earlier call updated it "
                "in place; expected params, state, metrics = step(params, state, "
                "batch), or make_train_step(donate=False)"
            )
