"""A whole train step on a mesh: local gradients, scattered; owners; gathered updates.

The phases:

  gather:  each device gathers the sharded parameters, leaf by leaf at the beginning of
           a step, where that overlaps with the forward pass; scanned layers one at a
           time, each while another one runs;
  scatter: gradients of each device's own batch are summed leaf by leaf, under the
           backward pass; each device receives the sum for its shard of the state;
  update:  the optimizer, in global view, on gradients and state that are sharded so;
  place:   updates go where the parameters are.

The first two run inside shard_map over the axes that divide the batch: plain jit
does not promise reduce-scatters on every backend.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import checks, notes
from jax_muon.mesh import gradients, in_backward, layout, xla_options
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.specs import AxisName, checked_axes, dividing, only
from jax_muon.mesh.transfers import Transfers, Wire, scatters_late

Step = tuple[Any, Any, dict[str, Any]]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: AxisName = "data",
    specs: layout.Specs = None,
    divide: AxisName | None = None,
    parameters: str = "as specs",
    min_size: int = 1024,
    has_aux: bool = False,
    max_aux: str | Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    transfers: Transfers = Transfers(),
    update: str = "after backward",
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """A jitted train step over a batch that is divided between devices.

    Args:
      loss_fn: `loss_fn(params, batch)` returns the mean loss of the batch it is given,
        a scalar, or the mean over all devices, if it calls collectives over `axis`
        itself. It sees whole parameters, except along mesh axes other than `axis`, such
        as tensor parallelism's. Integers and booleans among them, such as counters and
        masks, stay as they are.
      tx: an optimizer, such as a recipe. The step puts it on the mesh; an `on_mesh`
        around it or in it is not needed. Its update gets the loss as `value`, which
        `optax.contrib.reduce_on_plateau` asks for.
      mesh: a mesh of Auto axes; or of Explicit ones, if all but those in `axis` have
        one device.
      axis: mesh axis, or axes, that divide the leading axis of batches.
      specs: how parameters are sharded between steps; see `on_mesh`. None: replicated,
        also on Explicit axes.
      divide: mesh axes over which gradients and state are sharded further, as in
        `on_mesh`; None for `axis`, () for none.
      parameters: "as specs", or "divided": shard parameters like the state between
        steps and gather them for each step (ZeRO-3).
      min_size: leaves of fewer elements are replicated, their gradients all-reduced.
      has_aux: whether loss_fn returns a pair of the loss and a tree of arrays.
      max_aux: names of entries of the auxiliary output, a dictionary. Their maximum
        over devices and microbatches counts instead of the mean. `tx` gets them
        as extra arguments of these names: "max_logits" for `clip_qk`.
      weighted: whether the loss is a pair of the mean and its weight, such as the
        number of unmasked tokens. A mean of weight 0 does not count, even if it is
        NaN. If loss_fn calls collectives, divide by `jnp.maximum(count, 1)` instead:
        their gradient would take the NaN of 0 / 0 to all devices.
      microbatches: number of parts in which a device takes its batch, one by one. It
        adds up their gradients, and sends the sum once.
      transfers: how gradients, parameters and updates are sent.
      update: "after backward", or "in backward": layers that a scan in loss_fn takes
        are updated inside the backward pass, at least as many at a time as there are
        devices, so that gradients of all layers never exist at once. For one
        microbatch, a mesh whose axes all divide batches, and an optimizer whose update
        of a layer needs no other layer's gradient.
      donate: whether parameters and state are updated in place.
      compiler_options: for XLA; None for `gpu_options` on GPUs, and none elsewhere.

    Returns:
      A `TrainStep`.

    Raises:
      ValueError: microbatches below 1, an axis that the mesh lacks, unknown choices; at
        the first call, a batch that devices and microbatches do not divide, output of
        loss_fn without what the flags promise, a state of other parameters, and what
        `on_mesh` raises.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params["mlp"]) ** 2)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = jm.nanochat(matrices={"*": "muon"})
      >>> step = jm.make_train_step(loss_fn, tx, mesh)
      >>> params, state = step.init({"mlp": jnp.eye(64)})
      >>> batch = jnp.ones((jax.device_count(), 64))
      >>> params, state, metrics = step(params, state, batch)
      >>> float(metrics["loss"])
      1.0

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """
    names = checked_axes("axis", axis, mesh)
    if not names:  # to shard_map no axes are all
        checks.refuse("axis", axis, "at least one")
    divided = names if divide is None else checked_axes("divide", divide, mesh)
    others = [n for n in mesh.axis_names if n not in names and mesh.shape[n] > 1]
    if AxisType.Explicit in mesh.axis_types and others:
        # JAX cannot scatter arrays whose types show other axes.
        raise ValueError(
            f"the mesh has Explicit axes, and {others[0]!r} beside those of the batch, "
            f"axis={names}; expected a mesh with Auto axes"
        )
    checks.choice("parameters", parameters, ("as specs", "divided"))
    checks.count("microbatches", microbatches)
    checks.kind("transfers", transfers, Transfers, "a jax_muon.Transfers")
    if transfers.gather == "levels" and len(names) < 2:
        checks.refuse(
            "axis",
            axis,
            "with gather='levels' an axis within a host first, "
            "and then one between hosts",
        )
    checks.choice("update", update, ("after backward", "in backward"))
    early = update == "in backward"
    alone = early and mesh.size == 1
    if early:
        _check_early(microbatches, weighted, max_aux)
    if early and not alone and (others or transfers.gather != "auto"):
        raise ValueError(
            f"update='in backward' with gather={transfers.gather!r} and the mesh axes "
            f"{others} beside those of the batch, axis={names}: each layer is gathered "
            "over the axes of the batch at once; expected gather='auto' and a mesh of "
            "these axes alone, or update='after backward'"
        )
    flags = {"has_aux": has_aux, "weighted": weighted, "donate": donate}
    for name, value in flags.items():
        checks.flag(name, value)
    maxima = (max_aux,) if isinstance(max_aux, str) else tuple(max_aux)
    loss = gradients.Loss(loss_fn, has_aux, maxima, weighted)
    wire = Wire(names, transfers, sum_wide=mesh.devices.flat[0].platform == "cpu")
    means = gradients.MeanGradients(loss, wire, microbatches)
    levels = wire.levels or (names,)
    places = layout.Layout(
        mesh,
        PartitionSpec() if specs is None or alone else specs,
        () if alone else divided,
        min_size,
        params_divided=parameters == "divided",
        scanned=None if transfers.gather == "leaves" else layout.scanned_by(tx),
        hops=tuple(map(layout.Hop, levels)),
        # The backward pass gathers again, but keeps what came from other hosts.
        layer_hops=tuple(
            layout.Hop(
                axes,
                (1 if transfers.keep_gathered or i else 2) * microbatches,
                microbatches,
            )
            for i, axes in enumerate(levels)
        ),
        scanned_last=early,
    )
    optimizer = OnMesh(tx, places, transfers.gather_dtype)
    return TrainStep(means, optimizer, early, donate, compiler_options)


class TrainStep:
    """A train step, and the shardings of everything in it.

    `step.init(params)` returns the parameters and the optimizer's state, sharded as
    they are between steps; `step(params, state, batch)` returns the new ones and
    metrics: "loss", the mean over the whole batch, and with `has_aux` "aux", its mean
    over devices and microbatches, or the maximum for entries in `max_aux`.
    `step.abstract(params)` is what a checkpoint is restored into. `step.tx` is the
    optimizer on its mesh, for `describe`.
    """

    def __init__(
        self,
        means: gradients.MeanGradients,
        optimizer: OnMesh,
        early: bool,
        donate: bool,
        options: Mapping[str, Any] | None,
    ) -> None:
        """Use `make_train_step`."""
        self._options = options
        self._gradients, self._optimizer = means, optimizer
        self._layout = optimizer.layout
        self._early = early
        self._donate = (0, 1) if donate else ()
        self._jitted: Any = None
        self.tx = optimizer.transform()

    def init(self, params: optax.Params) -> tuple[Any, Any]:
        """The parameters, and the optimizer's state, in their shardings."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract(params))
        placed = jax.device_put(params, shardings[0])
        # A copy, since the first step donates its arguments: device_put may alias.
        copy = jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=shardings)
        copied: tuple[Any, Any] = copy((placed, self._optimizer.init(placed)))
        return copied

    def abstract(self, params: optax.Params) -> tuple[Any, Any]:
        """Shapes, dtypes and shardings of parameters and state between steps.

        Args:
          params: the parameters, or their shapes.
        """
        return self._optimizer.abstract(params)

    def __call__(self, params: Any, state: Any, batch: Any) -> Step:
        """One step; see the class."""
        _check_alive(params, state)
        try:
            return self._jit(params)(params, state, batch)
        except Exception as error:
            if self._are_swapped(params, state):
                raise ValueError(
                    "params and state are swapped; expected step(params, state, batch)"
                ) from error
            raise

    def lower(self, params: Any, state: Any, batch: Any) -> Any:
        """The step lowered for these arguments, or their shapes with shardings."""
        return self._jit(params).lower(params, state, batch)

    def gathers(self, params: Any, batch: Any) -> dict[str, str]:
        """How each parameter that is sharded over `axis` is gathered, by its path.

        Args:
          params: the parameters, or their shapes.
          batch: a batch, or its shapes.

        Returns:
          "a layer at a time", or "whole" with the operation of the loss that needs it.
          Nothing with gather="leaves", which gathers all of them whole.
        """
        _, heard = notes.traced(self._step, *self.abstract(params), batch)
        return heard["gathered"]

    def compiler_options(self, params: Any) -> dict[str, Any]:
        """XLA's options for these parameters, or their shapes; see `gpu_options`."""
        if self._options is not None:
            return dict(self._options)
        wire, mesh = self._gradients.wire, self._layout.mesh
        _, specs, _ = self._layout.of_leaves(params)
        sharded = [only(spec, wire.axis) for spec in specs]
        first, stacks = any(map(any, sharded)), self._layout.scanned_axes(params)
        layers = first and any(stacks.values())
        late = scatters_late(sharded, mesh.shape)
        inner = wire.axis[0] if layers and wire.levels else None
        return xla_options.options_of(
            params, mesh, wire.axis, stacks, first, layers, late, inner
        )

    def _are_swapped(self, params: Any, state: Any) -> bool:
        """True if `params` is the optimizer's state for parameters like `state`."""
        structure: Any = jax.tree.structure
        try:
            expected = jax.eval_shape(self._optimizer.tx.init, state)
        except Exception:
            return False
        return structure(params) == structure(expected) != structure(state)

    def _jit(self, params: Any) -> Any:
        """The jitted step, with the compiler's options for its first parameters."""
        if self._jitted is None:
            self._jitted = jax.jit(
                self._step,
                donate_argnums=self._donate,
                compiler_options=self.compiler_options(params) or None,
            )
        return self._jitted

    def _step(self, params: Any, state: Any, batch: Any) -> Step:
        axis, mesh = self._gradients.wire.axis, self._layout.mesh
        manual, specs = set(axis), self._layout.of_tree(params)
        devices = math.prod(mesh.shape[name] for name in axis)
        _check_batch(batch, devices, self._gradients.microbatches)
        if AxisType.Explicit in mesh.axis_types:
            batch = jax.reshard(batch, NamedSharding(mesh, PartitionSpec(axis)))
            manual = set(mesh.axis_names)  # the others have one device
        if self._early:
            return self._step_in_backward(params, state, batch)
        # What shard_map is told of, and all that divides arrays: XLA does the rest.
        coarse, fine = jax.tree.map(lambda x: only(x, manual), specs)
        all_specs = jax.tree.map(lambda x: dividing(x, mesh.shape), specs)
        # With check_vma=True, the gradient of a parameter that devices share would be
        # summed already, loops could not start from constants, and a loss that ends in
        # a pmean would have a gradient that is too small by the number of devices.
        grads, maxima, metrics = jax.shard_map(
            lambda params, batch: self._gradients(params, batch, *all_specs),
            mesh=mesh,
            in_specs=(coarse, PartitionSpec(axis)),
            out_specs=(fine, PartitionSpec(), PartitionSpec()),
            axis_names=manual,
            check_vma=False,
        )(params, batch)
        extra = {"value": metrics["loss"], **maxima}
        updates, state = self._optimizer.update(grads, state, params, **extra)
        return gradients.applied(params, updates), state, metrics

    def _step_in_backward(self, params: Any, state: Any, batch: Any) -> Step:
        axis, mesh = self._gradients.wire.axis, self._layout.mesh
        optimizer = self._optimizer.on_auto_axes()
        step = functools.partial(in_backward.step, self._gradients, optimizer)
        if mesh.size == 1:
            step = jax.shard_map(  # in it, types show no mesh
                step,
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(axis)),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        elif AxisType.Explicit in mesh.axis_types:
            shardings = jax.tree.map(lambda x: x.sharding, self.abstract(params))
            everywhere = NamedSharding(mesh, PartitionSpec())
            step = jax.sharding.auto_axes(step, out_sharding=(*shardings, everywhere))
        result: Step = step(params, state, batch)
        return result


def _check_early(
    microbatches: int, weighted: bool, max_aux: str | Sequence[str]
) -> None:
    """Refuse what needs all gradients of a step before the first update."""
    if microbatches > 1 or weighted or max_aux:
        raise ValueError(
            f"update='in backward' with microbatches={microbatches}, "
            f"weighted={weighted} and max_aux={max_aux}: a layer is updated as soon as "
            "it has a gradient; expected one microbatch and neither of the others, or "
            "update='after backward'"
        )


def _check_alive(params: Any, state: Any) -> None:
    """Refuse deleted arrays: JAX ends the process when several devices get them."""
    for path, x in jax.tree.leaves_with_path((params, state)):
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            name = ("params", "state")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"{name} of shape {x.shape} is deleted: an earlier call updated it in "
                "place; expected params, state, metrics = step(params, state, batch), "
                "or make_train_step(donate=False)"
            )


def _check_batch(batch: Any, devices: int, microbatches: int) -> None:
    """Refuse arrays whose leading axis devices and microbatches do not divide."""
    for path, x in jax.tree.leaves_with_path(batch):
        shape = jnp.shape(x)
        if not shape or shape[0] % (devices * microbatches):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {shape}; expected arrays "
                f"whose leading axis is a multiple of {devices * microbatches}, the "
                f"devices ({devices}) times the microbatches ({microbatches})"
            )
