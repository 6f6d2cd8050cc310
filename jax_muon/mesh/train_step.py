"""A whole train step on a mesh: local gradients, scattered; owners; gathered updates.

In these phases, in the same words as in the code:

  gather:  each device gathers the parameters that lie divided, leaf by leaf, at the
           beginning of the step, where gathers hide under the forward pass; those of
           scanned layers a layer at a time, while another one runs;
  scatter: gradients of a device's own batch are summed leaf by leaf, each sum arriving
           where its part of the state lies, under the backward pass;
  update:  the optimizer, in global view, on gradients and state that lie so;
  place:   updates go where the parameters lie.

The first two run inside shard_map over the axes that divide the batch, since plain jit
cannot promise reduce-scatters on every backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.checks import (
    check_arrays,
    check_choice,
    check_count,
    check_flag,
    check_float_dtype,
    check_function,
    check_mapping,
    refuse,
)
from jax_muon.mesh.gradients import MeanGradients
from jax_muon.mesh.layout import Layout
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.specs import (
    AxisName,
    Specs,
    checked_axes,
    is_spec,
    only,
    spec_names,
)
from jax_muon.mesh.xla_options import gpu_options
from jax_muon.notes import listening

Step = tuple[Any, Any, dict[str, Any]]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: AxisName = "data",
    specs: Specs = None,
    divide: AxisName | None = None,
    parameters: str = "as specs",
    min_size: int = 1024,
    has_aux: bool = False,
    max_aux: str | Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    accumulate: str = "local",
    reduce_dtype: jax.typing.DTypeLike | None = None,
    gather_dtype: jax.typing.DTypeLike | None = None,
    gather: str = "auto",
    keep_gathered: bool = False,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """A jitted train step over a batch that is divided between devices.

    Args:
      loss_fn: `loss_fn(params, batch)` gives the mean loss of its batch, a scalar; or
        the mean over all devices, by collectives of its own over `axis`;
        with `weighted`, the pair (mean loss, weight), where the weight says how much
        the mean counts: the number of unmasked tokens, for example; a mean of weight 0
        does not count, even where it is NaN. With `has_aux`, a pair of that and a tree
        of arrays. It sees whole parameters, except for mesh axes other than `axis`,
        such as those of tensor parallelism.
      tx: an optimizer in global view, such as a recipe; not wrapped in `on_mesh`, which
        this does.
      mesh: the mesh.
      axis: mesh axis, or axes, over which batches are divided along their leading axis.
      specs: where parameters lie between steps; see `on_mesh`. None: replicated.
      divide: mesh axes over which gradients and state are further divided; None for
        those of `axis`, as far as a parameter's spec does not use them. () for none.
      parameters: "as specs", or "divided": between steps parameters lie as finely as
        gradients and state, and are gathered leaf by leaf at the beginning of a step.
      min_size: leaves of fewer elements are repeated and all-reduced.
      has_aux: whether loss_fn gives auxiliary output.
      max_aux: with a dictionary as auxiliary output, the entries whose maximum counts
        instead of the mean, over devices and microbatches. `tx` gets them as extra
        arguments of these names: "max_logits" for `clip_qk`.
      weighted: whether loss_fn gives weights.
      microbatches: number of parts that a device's batch is taken in, one after
        another.
      accumulate: of microbatches, "local": each device adds its gradients up and sends
        them once; "scattered": each microbatch's gradients are scattered at once, so
        that no device holds a sum of all.
      reduce_dtype: of gradients on the wire; None for the parameters'.
      gather_dtype: of parameters and updates on the wire; None for their own.
      gather: of parameters that lie divided over `axis`. "auto": those that a scan in
        loss_fn takes a layer at a time are gathered so, in the forward pass and again
        in the backward one, while another layer runs; their gradients are summed so
        too, for each microbatch, whatever `accumulate` says. All others are gathered
        leaf by leaf at the beginning of a step. "layers": the same, and an error for
        one of three or more axes that has to be whole. "leaves": all at the beginning.
      keep_gathered: whether gathered layers are kept for the backward pass, in all the
        memory that they take.
      donate: whether parameters and state are updated in place.
      compiler_options: for XLA; None for `gpu_options` on GPUs, and none elsewhere.

    Returns:
      A `TrainStep`.

    Raises:
      ValueError: microbatches below 1, an axis that the mesh lacks, max_aux without
        has_aux, unknown choices; at the first call, a batch that microbatches or
        devices do not divide, auxiliary output without an entry of max_aux, a state of
        other parameters, and what `on_mesh` raises.

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """
    check_function("loss_fn", loss_fn, "a function of (params, batch)")
    if isinstance(getattr(getattr(tx, "update", None), "__self__", None), OnMesh):
        raise ValueError(
            "tx is an optimizer on a mesh already, and make_train_step puts it there; "
            "expected the optimizer itself: make_train_step(loss_fn, tx, mesh, "
            "specs=..., divide=...) instead of on_mesh(tx, mesh, ...)"
        )
    axis = checked_axes("axis", axis, mesh) or refuse("axis", axis, "at least one")
    divided = None if divide is None else checked_axes("divide", divide, mesh)
    _check_axes(mesh, axis, divided or ())
    check_choice("parameters", parameters, ("as specs", "divided"))
    check_count("microbatches", microbatches)
    check_choice("accumulate", accumulate, ("local", "scattered"))
    check_choice("gather", gather, ("auto", "layers", "leaves"))
    check_float_dtype("reduce_dtype", reduce_dtype)
    check_float_dtype("gather_dtype", gather_dtype)
    for name, flag in (
        ("has_aux", has_aux),
        ("weighted", weighted),
        ("donate", donate),
        ("keep_gathered", keep_gathered),
    ):
        check_flag(name, flag)
    max_aux = _names(max_aux)
    if max_aux and not has_aux:
        raise ValueError(f"max_aux={max_aux!r}; expected has_aux=True with it")
    if compiler_options is not None:
        options = "a mapping of XLA's options, or None"
        check_mapping("compiler_options", compiler_options, options)
    layout = Layout(
        mesh,
        PartitionSpec() if specs is None else specs,
        axis if divided is None else divided,
        axis,
        min_size,
        skip_used=divided is None,
        params_divided=parameters == "divided",
        by_layers=parameters == "divided" and gather != "leaves",
    )
    gradients = MeanGradients(
        loss_fn,
        axis,
        math.prod(mesh.shape[name] for name in axis),
        has_aux,
        max_aux,
        weighted,
        microbatches,
        accumulate,
        reduce_dtype,
        gather_dtype,
        reduce_wide=mesh.devices.flat[0].platform == "cpu",
        how=gather,
        keep_gathered=keep_gathered,
    )
    optimizer = OnMesh(tx, layout, gather_dtype)
    return TrainStep(gradients, optimizer, donate, compiler_options)


class TrainStep:
    """What `make_train_step` gives: a step, and where everything lies for it.

    `step.init(params)` gives parameters and state as they lie between steps;
    `step(params, state, batch)` gives both anew, and metrics: "loss", the mean over the
    whole batch, and with `has_aux` "aux", its mean over devices and microbatches, or
    maximum where `max_aux` says so. `step.abstract(params)` is what a checkpoint is
    restored into. `step.tx` is the optimizer on its mesh, for `describe` and `plan`.
    """

    def __init__(
        self,
        gradients: MeanGradients,
        optimizer: OnMesh,
        donate: bool,
        options: Mapping[str, Any] | None,
    ) -> None:
        """`make_train_step` calls this."""
        self._options = options
        self._gradients, self._optimizer = gradients, optimizer
        self._layout = optimizer.layout
        self._donate = (0, 1) if donate else ()
        self._jitted: dict[Any, Any] = {}
        self.tx = optimizer.transform()

    def init(self, params: optax.Params) -> tuple[Any, Any]:
        """Parameters and state of the optimizer, placed as they lie between steps."""
        check_arrays("params", params)
        shardings = self._param_shardings(params)
        placed = jax.tree.map(jax.device_put, params, shardings)
        both = (placed, self._optimizer.init(placed))
        places = (shardings, self._optimizer.state_shardings(params))
        # A copy, since the first step donates its arguments: device_put may alias.
        copy = jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=places)
        copied: tuple[Any, Any] = copy(both)
        return copied

    def abstract(self, params: optax.Params) -> tuple[Any, Any]:
        """Shapes, dtypes and shardings of parameters and state between steps.

        Args:
          params: the parameters, or their shapes.
        """
        check_arrays("params", params)
        places = (
            self._param_shardings(params),
            self._optimizer.state_shardings(params),
        )
        leaves = (params, self._optimizer.state_leaves(params))
        return jax.tree.map(
            lambda place, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            places,
            leaves,
            is_leaf=lambda x: isinstance(x, NamedSharding),
        )

    def __call__(self, params: Any, state: Any, batch: Any) -> Step:
        """One step; see the class."""
        _check_alive(params, state)
        return self._jit(params)(params, state, batch)

    def lower(self, params: Any, state: Any, batch: Any) -> Any:
        """The step lowered for these arguments, or their shapes with shardings."""
        return self._jit(params).lower(params, state, batch)

    def gathers(self, params: Any, batch: Any) -> dict[str, str]:
        """How each parameter that lies divided over `axis` is gathered, by its path.

        Args:
          params: the parameters, or their shapes.
          batch: a batch, or its shapes.

        Returns:
          "a layer at a time", or "whole" with the operation of the loss that needs it.
        """
        with listening() as notes:
            # A function of its own, which has not been traced yet.
            jax.eval_shape(lambda *x: self._step(*x), *self.abstract(params), batch)
        found: dict[str, str] = {}
        for kind, facts in notes:
            if kind == "gathered":
                found |= dict.fromkeys(facts["by_layers"], "a layer at a time")
                found |= {k: f"whole, for {v}" for k, v in facts["whole"].items()}
        return found

    def cache_size(self) -> int:
        """How many programs have been compiled."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def compiler_options(self, params: Any) -> dict[str, Any]:
        """What XLA is told for these parameters, or their shapes; see `gpu_options`."""
        if self._options is not None:
            return dict(self._options)
        axis = self._gradients.axis
        specs = jax.tree.leaves(self._layout.of_params(params), is_leaf=is_spec)
        return gpu_options(
            params,
            self._layout.mesh,
            axis=axis,
            gathers_first=any(set(spec_names(spec)) & set(axis) for spec in specs),
            layers=None if self._gradients.how != "leaves" else False,
        )

    def _jit(self, params: Any) -> Any:
        """The jitted step, with the compiler's options for these parameters."""
        leaves, treedef = jax.tree.flatten(params)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._jitted:
            options = self.compiler_options(params)
            self._jitted[key] = jax.jit(
                self._step,
                donate_argnums=self._donate,
                compiler_options=options or None,
            )
        return self._jitted[key]

    def _param_shardings(self, params: Any) -> Any:
        return jax.tree.map(
            self._optimizer.sharding, self._layout.of_params(params), is_leaf=is_spec
        )

    def _step(self, params: Any, state: Any, batch: Any) -> Step:
        devices, microbatches = self._gradients.devices, self._gradients.microbatches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if not leaf.shape or leaf.shape[0] % (devices * microbatches):
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} of shape {leaf.shape}; "
                    f"expected a leading axis that {devices} devices x {microbatches} "
                    "microbatches divide"
                )
        specs = self._layout.of_params(params), self._layout.of_state(params)
        here, scattered = jax.tree.map(
            lambda x: only(x, self._gradients.axis), specs, is_leaf=is_spec
        )
        batch_spec = PartitionSpec(self._gradients.axis)
        if AxisType.Explicit in self._layout.mesh.axis_types:
            _check_named(specs, self._gradients.axis)
            batch = jax.reshard(batch, NamedSharding(self._layout.mesh, batch_spec))

        def local(params: Any, batch: Any) -> Any:
            return self._gradients(params, batch, here, scattered)

        # With check_vma=True, the gradient of a parameter that devices share would be
        # summed already, loops could not start from constants, and a loss that ends in
        # a pmean would have a gradient that is too small by the number of devices.
        grads, largest, metrics = jax.shard_map(
            local,
            mesh=self._layout.mesh,
            in_specs=(here, batch_spec),
            out_specs=(scattered, PartitionSpec(), PartitionSpec()),
            axis_names=set(self._gradients.axis),
            check_vma=False,
        )(params, batch)
        updates, state = self._optimizer.update(grads, state, params, **largest)
        return optax.apply_updates(params, updates), state, metrics


def _check_alive(params: Any, state: Any) -> None:
    """Refuse deleted arrays: JAX ends the process when several devices get them."""
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            name = ("params", "state")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"{name} of shape {x.shape} is deleted: an earlier call updated it in "
                "place; expected params, state, metrics = step(params, state, batch), "
                "or make_train_step(donate=False)"
            )


def _names(names: Any) -> tuple[str, ...]:
    """The entries of max_aux as a tuple."""
    found = (names,) if isinstance(names, str) else names
    if not isinstance(found, (tuple, list)) or any(
        not isinstance(x, str) for x in found
    ):
        refuse("max_aux", names, "names of auxiliary output")
    return tuple(found)


def _check_axes(mesh: Mesh, axis: tuple[str, ...], divide: tuple[str, ...]) -> None:
    for name in set(divide) - set(axis):
        raise ValueError(
            f"divide={divide}: gradients are not summed over {name!r}; expected mesh "
            f"axes of axis={axis}"
        )
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        # JAX 0.10 cannot scatter arrays there whose types show other axes.
        if name not in axis and kind == AxisType.Explicit and mesh.shape[name] > 1:
            raise ValueError(
                f"the mesh axis {name!r} has Explicit axes; expected a mesh with Auto "
                f"axes, since there are others than those of the batch, axis={axis}"
            )


def _check_named(specs: Any, axis: tuple[str, ...]) -> None:
    """Refuse specs on Explicit axes that `_check_axes` lets pass, of one device."""
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        for name in set(spec_names(spec)) - set(axis):
            raise ValueError(
                f"specs name the mesh axis {name!r}, an Explicit one of one device, "
                f"which is not among those of the batch, axis={axis}; expected specs "
                "without it, or it in axis"
            )
