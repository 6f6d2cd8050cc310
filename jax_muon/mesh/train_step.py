"""A whole train step of data parallelism: gradients scattered, updates gathered.

  gather:  each device gathers the sharded parameters, leaf by leaf, except those that
           the loss gathers itself, by `scan_layers`;
  scatter: gradients of each device's own batch are summed leaf by leaf, under the
           backward pass; each device receives the sum for its shard of the state;
  update:  `on_mesh`, on gradients and state that are sharded so.

The first two run inside shard_map: plain jit promises no reduce-scatters.
"""

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_muon.base import checks, jaxprs, trees
from jax_muon.base.array_types import setting
from jax_muon.base.dtypes import wide
from jax_muon.base.specs import dividing, spelled
from jax_muon.mesh.communicator import Communicator, Scans
from jax_muon.mesh.layout import Placed, sharded
from jax_muon.mesh.on_mesh import OnMesh, on_devices

Step = tuple[Any, Any, dict[str, Any]]  # parameters, state, metrics


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: OnMesh,
    *,
    has_aux: bool = False,
    max_aux: Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    reduce_dtype: jax.typing.DTypeLike | None = None,
    donate: bool = True,
) -> "TrainStep":
    """A jitted train step over a batch that is divided between all devices of a mesh.

    The optimizer says where parameters are, and its `divide` how gradients and state
    are divided further. All axes of its mesh divide the batch. Layers that the loss
    gives to `scan_layers` and to nothing else stay sharded, and it gathers them one at
    a time; all other parameters are gathered before the loss.

    Args:
      loss_fn: `loss_fn(params, batch, *others)` returns the mean loss of its device's
        batch, or of all, if it calls collectives over axes of the mesh. Integers and
        booleans among the parameters stay as they are.
      tx: an optimizer in `on_mesh`, around all other transforms. Its update gets the
        loss as `value`, which `optax.contrib.reduce_on_plateau` asks for.
      has_aux: whether loss_fn returns a pair of the loss and a tree of arrays.
      max_aux: names of entries of the auxiliary output, a dictionary, whose maximum
        counts instead of the mean, and is an extra argument for `tx`, such as
        "max_logits" for `clip_qk`.
      weighted: whether the loss is a pair of the mean and its weight, such as the
        number of unmasked tokens. A device with weight 0 is ignored even if its loss is
        NaN. With collectives or `scan_layers` in the loss the NaN spreads: then divide
        by `jnp.maximum(count, 1)`. A weight below 0 makes everything NaN.
      microbatches: number of parts in which a device takes its batch, one by one. The
        sum of their gradients is sent once, but for layers of `scan_layers`.
      reduce_dtype: dtype in which gradients are sent; None for the parameters'.
      donate: whether parameters and state are updated in place.

    Returns:
      A `TrainStep`.

    Raises:
      ValueError: an optimizer that is not in `on_mesh`; at the first call, a batch that
        devices and microbatches do not divide, output of loss_fn without what the flags
        promise, and what `on_mesh` raises.

    Examples:
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params["mlp"]) ** 2)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> recipe = jm.nanochat(0.02, matrices={"*": "muon"})
      >>> step = jm.make_train_step(loss_fn, jm.on_mesh(recipe, mesh, divide="data"))
      >>> params, state = step.init({"mlp": jnp.eye(64)})
      >>> batch = jnp.ones((jax.device_count(), 64))
      >>> params, state, metrics = step(params, state, batch)
      >>> float(metrics["loss"])
      1.0
    """
    checks.check_kind("tx", tx, OnMesh, IN_ON_MESH)
    checks.check_count("microbatches", microbatches)
    checks.check_float_dtype("reduce_dtype", reduce_dtype)
    maxima = checks.as_strings("max_aux", max_aux)
    loss = functools.partial(_outputs, loss_fn, has_aux, maxima, weighted)
    return TrainStep(tx, loss, microbatches, reduce_dtype, donate)


IN_ON_MESH = (
    "what jax_muon.on_mesh returns, around all other transforms: "
    "on_mesh(optax.chain(...), mesh, divide='data')"
)
_traces = itertools.count()


@dataclasses.dataclass(frozen=True)
class Gathers:
    """How the parameters of a step are gathered."""

    # For each: the number of the leaf of `scan_layers` that gathers it, or None.
    numbers: list[str | None]
    specs: dict[str, PartitionSpec]  # of one layer, by those numbers


@dataclasses.dataclass(eq=False)
class TrainStep:
    """A train step, and the shardings of everything in it.

    `step.init(params)` returns the parameters and the optimizer's state, sharded as
    they are between steps; `step(params, state, batch, *others)` returns the new ones
    and metrics: "loss", the mean over the whole batch, and with `has_aux` "aux", its
    mean over devices and microbatches, or the maximum for entries in `max_aux`.

    The first axis of every array in `batch` is divided between the devices. `others`
    are trees of arrays that each device gets whole: class weights, say, or a teacher.
    """

    tx: OnMesh
    _loss: Callable[..., "_Outputs"]
    _microbatches: int
    _reduce_dtype: Any
    _donate: bool
    _jitted: Any = None
    _known: dict[Any, Gathers] = dataclasses.field(default_factory=dict)

    def init(self, params: optax.Params) -> tuple[Any, Any]:
        """The parameters, and the optimizer's state, in their shardings."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract(params))
        placed = jax.device_put(params, shardings[0])
        # A copy, since the first step donates its arguments: device_put may alias.
        copy = jax.jit(lambda *x: jax.tree.map(jnp.copy, x), out_shardings=shardings)
        return cast(Any, copy(placed, self.tx.init(placed)))

    def abstract(self, params: optax.Params) -> tuple[Any, Any]:
        """Shapes and shardings of parameters and state, to restore them into."""
        return self.tx.optimizer.abstract(params)

    def __call__(self, params: Any, state: Any, batch: Any, *others: Any) -> Step:
        """One step; see the class."""
        _check_alive(params, state)
        args = params, state, batch, *others
        return cast(Step, self._jit(*args)(*args))

    def lower(self, params: Any, state: Any, batch: Any, *others: Any) -> Any:
        """The step lowered for these arguments, or their shapes with shardings."""
        args = params, state, batch, *others
        return self._jit(*args).lower(*args)

    def xla_options(
        self, params: Any, state: Any, batch: Any, *others: Any
    ) -> dict[str, Any]:
        """XLA's options for these arguments, or their shapes, which the step uses."""
        del state
        numbers = self.gathers(params, batch, *others).numbers
        scans = ["scan_layers" if number else "" for number in numbers]
        return self.tx.optimizer.xla_options(params, scans=scans)

    def _jit(self, *args: Any) -> Any:
        """The jitted step, with the compiler's options for its first arguments."""
        if self._jitted is None:
            self._jitted = jax.jit(
                self._step,
                donate_argnums=(0, 1) if self._donate else (),
                compiler_options=self.xla_options(*args) or None,
            )
        return self._jitted

    def _step(self, params: Any, state: Any, batch: Any, *others: Any) -> Step:
        optimizer = self.tx.optimizer
        placed = optimizer.layout.of_leaves(params)
        mesh, axes = placed.mesh, PartitionSpec(placed.mesh.axis_names)
        gathers = self.gathers(params, batch, *others)
        params = on_devices(params)
        param_specs, state_specs = (
            [dividing(spec, mesh.shape) for spec in x]
            for x in (placed.param_specs, placed.state_specs)
        )
        # `scan_layers` sums gradients over all devices, sharded like the parameters.
        rows = zip(param_specs, state_specs, gathers.numbers, strict=True)
        grad_specs = [x if number else y for x, y, number in rows]
        treedef: Any = jax.tree.structure(params)
        param_specs, grad_specs = map(treedef.unflatten, (param_specs, grad_specs))
        if AxisType.Explicit in mesh.axis_types:
            batch = jax.reshard(batch, NamedSharding(mesh, axes))
            others = jax.reshard(others, NamedSharding(mesh, PartitionSpec()))
        # With check_vma=True, the gradient of a parameter that devices share would be
        # summed already, loops could not start from constants, and a loss that ends in
        # a pmean would have a gradient too small by the number of devices.
        grads, maxima, metrics = jax.shard_map(
            functools.partial(
                self._gradients,
                self._communicator(placed),
                param_specs,
                grad_specs,
                gathers,
            ),
            mesh=mesh,
            in_specs=(param_specs, axes, PartitionSpec()),
            out_specs=(grad_specs, PartitionSpec(), PartitionSpec()),
            check_vma=False,
        )(params, batch, others)
        extra = {"value": metrics["loss"], **maxima}
        updates, state = optimizer.update(grads, state, params, **extra)
        after = jax.tree.map(
            lambda old, new: new if jnp.issubdtype(old.dtype, jnp.inexact) else old,
            params,
            optax.apply_updates(params, on_devices(updates)),
        )
        if any(placed.memory_kinds):  # back to the host
            of_leaf = functools.partial(spelled, mesh)
            places = map(of_leaf, placed.param_specs, placed.memory_kinds)
            after = jax.device_put(after, treedef.unflatten(places))
        return after, state, metrics

    def _communicator(self, placed: Placed) -> Communicator:
        axes, dtype = placed.mesh.axis_names, self.tx.optimizer.gather_dtype
        return Communicator(placed.mesh, axes, dtype, self._reduce_dtype)

    # --- what the loss gives to `scan_layers` -----------------------------------------

    def gathers(self, params: Any, batch: Any, *others: Any) -> Gathers:
        """Which parameters `scan_layers` gathers, by a trace of the loss.

        Warns of layers that are passed to it and yet must be gathered whole.
        """
        placed = self.tx.optimizer.layout.of_leaves(params)
        leaves, treedef = jax.tree.flatten((params, batch, others))
        shapes = ((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        # On Explicit axes arrays of one shape may be sharded otherwise.
        key = treedef, *shapes, *placed.param_specs
        if key not in self._known:
            self._known[key] = self._look(placed, params, batch, others)
        return self._known[key]

    def _look(self, placed: Placed, params: Any, batch: Any, others: Any) -> Gathers:
        self._check_batch(placed, batch)
        specs = [dividing(spec, placed.mesh.shape) for spec in placed.param_specs]
        if not sharded(specs):
            return Gathers([None] * len(specs), {})
        uses = self._uses(placed, params, batch, others)
        # Specs of a layer, by its mark; None where it cannot be held.
        mark_specs: dict[str, set[Any]] = collections.defaultdict(set)
        for spec, of_leaf in zip(specs, uses, strict=True):
            held = len(of_leaf) == 1 and not any(spec[:1])
            for use in of_leaf:
                mark_specs[use.mark].add(PartitionSpec(*spec[1:]) if held else None)
        layer_specs = {
            mark: spec
            for mark, found in mark_specs.items()
            for spec in found
            if mark and len(found) == 1 and any(spec or ())
        }
        marks = [{use.mark for use in of_leaf} - {""} for of_leaf in uses]
        numbers = [next(iter(found & layer_specs.keys()), None) for found in marks]
        for i, number in enumerate(numbers):
            if marks[i] and any(specs[i]) and number is None:
                why = f"it is used by {', '.join(map(str, uses[i]))}"
                if any(specs[i][:1]):
                    why = f"it is sharded along its layers, by {specs[i]}"
                warnings.warn(
                    f"parameter {placed.paths[i]!r} is gathered whole, all layers at "
                    f"once: {why}; expected one scan_layers and nothing else",
                    stacklevel=2,
                )
        return Gathers(numbers, layer_specs)

    def _uses(
        self, placed: Placed, params: Any, batch: Any, others: Any
    ) -> list[list[jaxprs.LayerUse]]:
        """How the loss uses each whole parameter on a device."""
        uses: list[list[jaxprs.LayerUse]] = []
        mesh, axes = placed.mesh, PartitionSpec(placed.mesh.axis_names)

        def look(params: Any, batch: Any, others: Any) -> tuple[()]:
            first = jax.tree.map(lambda x: x[0], self._parts(batch))
            scans = Scans(self._communicator(placed), {})
            uses.extend(self._trace(scans, params, first, others)[0])
            return ()

        specs = PartitionSpec(), axes, PartitionSpec()
        shapes = [
            jax.tree.map(functools.partial(_shape, NamedSharding(mesh, spec)), tree)
            for tree, spec in zip((params, batch, others), specs, strict=True)
        ]
        look = jax.shard_map(
            look, mesh=mesh, in_specs=specs, out_specs=(), check_vma=False
        )
        jax.eval_shape(look, *shapes)
        return uses

    def _trace(
        self, scans: Scans, params: Any, part: Any, others: Any
    ) -> tuple[list[list[jaxprs.LayerUse]], Callable[..., Any]]:
        """How the loss uses each parameter, and the loss as traced."""
        # With a separate axis a trace finds no function that JAX remembers from
        # another one, in which `scan_layers` did something else.
        axis = f"trace {next(_traces)} of jax_muon"
        with setting(scans=scans):
            trace = jax.make_jaxpr(self._loss, axis_env=[(axis, 1)], return_shape=True)
            closed, results = trace(params, part, *others)
        count = len(jax.tree.leaves(params))

        def loss(*args: Any) -> Any:
            flat = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(results), flat)

        return jaxprs.uses_of_layers(closed.jaxpr, closed.jaxpr.invars[:count]), loss

    def _check_batch(self, placed: Placed, batch: Any) -> None:
        """Arrays need a first axis that the devices divide; warn if these differ."""
        number = placed.mesh.size * self._microbatches
        expected = (
            f"arrays whose leading axis is a multiple of {number}, the devices "
            f"({placed.mesh.size}) times the microbatches ({self._microbatches}); what "
            "has no samples goes into others: step(params, state, batch, *others)"
        )
        checks.check_samples("batch", batch, number, expected)
        sizes: dict[int, str] = {}
        for path, x in jax.tree.leaves_with_path(batch):
            sizes.setdefault(len(x), f"batch{jax.tree_util.keystr(path)} {x.shape}")
        if len(sizes) > 1:
            warnings.warn(
                f"{' and '.join(sizes.values())} have different first axes, and each "
                "is divided between the devices; expected samples along all of them, "
                "and what every device needs whole in others: step(params, state, "
                "batch, *others)",
                stacklevel=2,
            )

    # --- on each device, inside shard_map ---------------------------------------------

    def _parts(self, batch: Any) -> Any:
        """A device's batch, as microbatches along a new first axis."""
        count = self._microbatches
        return jax.tree.map(
            lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch
        )

    def _gradients(
        self,
        comm: Communicator,
        param_specs: Any,
        grad_specs: Any,
        gathers: Gathers,
        params: Any,
        batch: Any,
        others: Any,
    ) -> tuple[Any, Any, dict[str, Any]]:
        """This device's shard of the mean gradient; maxima; metrics."""
        count, parts = self._microbatches, self._parts(batch)
        first = jax.tree.map(lambda x: x[0], parts)
        treedef: Any = jax.tree.structure(params)
        held = treedef.unflatten([number is not None for number in gathers.numbers])
        whole = jax.tree.map(
            lambda x, spec, held: x if held else comm.gather(x, spec),
            *(params, param_specs, held),
        )
        loss = self._loss
        if gathers.specs:
            scans = Scans(comm, gathers.specs)
            uses, loss = self._trace(scans, whole, first, others)
            rows = zip(uses, gathers.numbers, strict=True)
            if any(number and [x.mark for x in of] != [number] for of, number in rows):
                raise ValueError(
                    "loss_fn gives other parameters to scan_layers when it is traced "
                    "a second time; expected the same calls in the same order"
                )
        microbatch = functools.partial(
            self._microbatch, loss, comm, held, whole, others
        )
        (total, sums, aux), maxima = (
            microbatch(first) if count == 1 else _sum_over(microbatch, parts, first)
        )
        # A batch in which nothing counts has no gradient.
        value, grads = _times(sums, jnp.where(total == 0, 0, 1 / total))

        def scatter(g: Any, x: Any, spec: Any, held: bool) -> Any:
            kind = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else g.dtype
            g = g if held else comm.scatter(g / comm.mesh.size, spec, kind, comm.axes)
            return g.astype(x.dtype)

        grads = jax.tree.map(scatter, grads, params, grad_specs, held)
        maxima = jax.lax.pmax(maxima, comm.axes)
        metrics = {"loss": jax.lax.pmean(value, comm.axes)}
        if aux is not None:
            aux = jax.tree.map(
                lambda x: jax.lax.psum(wide(x), comm.axes).astype(x.dtype), aux
            )
            metrics["aux"] = aux | maxima if maxima else aux
        return grads, maxima, metrics

    def _microbatch(
        self,
        loss_fn: Any,
        comm: Communicator,
        held: Any,
        params: Any,
        others: Any,
        part: Any,
    ) -> tuple[Any, Any]:
        """One microbatch: its weight, this device's part of its mean times that weight.

        These parts are not divided by the number of devices yet.
        """
        loss, pull, (weight, aux, maxima) = jax.vjp(
            lambda params: loss_fn(params, part, *others), params, has_aux=True
        )
        devices = comm.mesh.size
        total, mean, share = jnp.asarray(devices, float), wide(loss), 1.0
        if weight is not None:
            # Collectives in the loss mix the cotangents of devices, so these must be
            # in the ratio of the weights. They are 1 on average, as float16 needs it.
            total = jax.lax.psum(weight, comm.axes)
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


# The loss, and its weight, auxiliary output and maxima: None and {} without such.
_Outputs = tuple[Any, tuple[Any, Any, dict[str, Any]]]


def _outputs(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    max_aux: Sequence[str],
    weighted: bool,
    params: Any,
    batch: Any,
    *others: Any,
) -> _Outputs:
    """The results of a loss function, in one form; see `make_train_step`."""
    # Rebuilt, since a variable of NNX can change only in the trace that made it.
    args = jax.tree.map(lambda x: x, (batch, *others))
    loss, weight, aux = loss_fn(params, *args), None, None
    if has_aux:
        loss, aux = _pair("has_aux", loss)
    if weighted:
        loss, weight = _pair("weighted", loss)
        weight = checks.as_scalar("the weight of loss_fn", weight, "a real scalar")
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
    loss = jnp.asarray(checks.as_scalar("the loss of loss_fn", loss, expected))
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


def _shape(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = jnp.shape(x), jnp.result_type(x)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _check_alive(params: Any, state: Any) -> None:
    """Refuse deleted arrays: JAX ends the process when several devices get them."""
    both = {"params": params, "state": state}
    if not any(map(_is_deleted, jax.tree.leaves(both))):
        return  # without a path for each array: 2 ms for 436 of them
    path, x = next(x for x in trees.leaves_with_paths(both) if _is_deleted(x[1]))
    raise ValueError(
        f"{path!r} of shape {x.shape} is deleted: an earlier call updated it in place; "
        "expected params, state, metrics = step(params, state, batch), or "
        "make_train_step(donate=False)"
    )


def _is_deleted(x: Any) -> bool:
    traced = isinstance(x, jax.core.Tracer)
    return isinstance(x, jax.Array) and not traced and x.is_deleted()
