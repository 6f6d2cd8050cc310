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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from jax_muon.base import checks, jaxprs, trees
from jax_muon.base.array_types import in_mesh_context, typed
from jax_muon.base.dtypes import is_key, wide
from jax_muon.base.jaxprs import Mark
from jax_muon.base.specs import dividing
from jax_muon.mesh import xla_options
from jax_muon.mesh.check_loss import check_loss
from jax_muon.mesh.communicator import Communicator, Scans
from jax_muon.mesh.layout import Placed
from jax_muon.mesh.on_mesh import OnMesh, Updated, on_devices, to_memory

Step = tuple[optax.Params, optax.OptState, dict[str, PyTree]]  # the last: metrics


def make_train_step(
    loss_fn: Callable[..., PyTree],
    tx: OnMesh,
    *,
    has_aux: bool = False,
    max_aux: Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    reduce_dtype: DTypeLike | None = None,
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
        sum of their gradients, in at least float32, is sent once, but for layers of
        `scan_layers`.
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
      >>> recipe = jm.nanochat(0.02, matrices={"mlp": "muon"})
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

Flat = list[Array]  # parameters of a step, or gradients, in order


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Where the parameters of a step are, and what gathers each of them."""

    placed: Placed
    # For each parameter: the mark of the leaf of `scan_layers` that gathers it, such as
    # Mark(call=0, leaf=1); None if it is gathered before the loss, or not sharded.
    marks: list[Mark | None]
    layer_specs: dict[Mark, PartitionSpec]  # of one layer

    @property
    def param_specs(self) -> list[PartitionSpec]:
        """Specs of the parameters, without mesh axes of one device."""
        return self._dividing(self.placed.param_specs)

    @property
    def grad_specs(self) -> list[PartitionSpec]:
        """Specs of gradients; `scan_layers` leaves its own sharded like parameters."""
        placed = self.placed
        rows = zip(self.marks, placed.param_specs, placed.state_specs, strict=True)
        return self._dividing([x if mark else y for mark, x, y in rows])

    def _dividing(self, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        return [dividing(spec, self.placed.mesh.shape) for spec in specs]


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
    _reduce_dtype: DTypeLike | None
    _donate: bool
    _jitted: jax.stages.Wrapped | None = None
    _known: dict[Hashable, Gathers] = dataclasses.field(default_factory=dict)

    def init(self, params: optax.Params) -> Updated:
        """The parameters, and the optimizer's state, in their shardings."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract(params))
        placed = jax.device_put(params, shardings[0])
        # A copy, since the first step donates its arguments: device_put may alias.
        copy = jax.jit(lambda *x: jax.tree.map(jnp.copy, x), out_shardings=shardings)
        return cast(Updated, copy(placed, self.tx.init(placed)))

    def abstract(self, params: optax.Params) -> tuple[optax.Params, optax.OptState]:
        """Shapes and shardings of parameters and state, to restore them into."""
        return self.tx.optimizer.abstract(params)

    def __call__(
        self, params: PyTree, state: PyTree, batch: PyTree, *others: PyTree
    ) -> Step:
        """One step; see the class."""
        _check_alive(params, state)
        args = params, state, batch, *others
        return cast(Step, self._jit(*args)(*args))

    def check_loss(
        self, params: PyTree, batch: PyTree, *others: PyTree
    ) -> tuple[str, ...]:
        """What is wrong with the loss on these devices, in sentences; empty if nothing.

        Call it once before a run: it compares the loss of a batch on the mesh with the
        same loss on one device, which has to hold parameters and batch, and repeats
        both with samples exchanged between devices. So it can say that samples interact
        (negatives in the batch, BatchNorm without axis_name), that one random key
        serves all samples, or else that the loss depends on the number of devices.
        Values may differ by 1e-4, or by 1e-2 with 16-bit parameters or data.
        """
        placed, _ = self.tx.optimizer.place(params)
        loss = functools.partial(self._mean_loss, placed)
        whole = jax.tree.map(jax.device_get, params)
        return check_loss(loss, placed.mesh, self._microbatches, (whole, batch, others))

    def _mean_loss(
        self, placed: Placed, mesh: Mesh, microbatches: int, args: PyTree
    ) -> float:
        """The loss on another mesh, whose devices have whole parameters."""
        specs = [PartitionSpec()] * len(placed.paths)
        placed = dataclasses.replace(
            placed, mesh=mesh, param_specs=specs, state_specs=specs
        )
        step = dataclasses.replace(self, _microbatches=microbatches)
        gathers = Gathers(placed, [None] * len(specs), {})
        # XLA leaves out the gradients, which nothing uses.
        loss = jax.jit(lambda *args: step._on_devices(gathers, *args)[2]["loss"])
        with jax.set_mesh(mesh):
            return float(loss(*jax.device_put(args, NamedSharding(mesh, specs[0]))))

    def lower(
        self, params: PyTree, state: PyTree, batch: PyTree, *others: PyTree
    ) -> jax.stages.Lowered:
        """The step lowered for these arguments, or their shapes with shardings."""
        args = params, state, batch, *others
        return self._jit(*args).lower(*args)

    def xla_options(
        self, params: PyTree, state: PyTree, batch: PyTree, *others: PyTree
    ) -> xla_options.Options:
        """XLA's options for these arguments, or their shapes, which the step uses."""
        del state
        gathers = self.gathers(params, batch, *others)
        scans = ["scan_layers" if mark else "" for mark in gathers.marks]
        return xla_options.choose(gathers.placed, jax.tree.leaves(params), scans)

    def _jit(self, *args: PyTree) -> jax.stages.Wrapped:
        """The jitted step, with the compiler's options for its first arguments."""
        if self._jitted is None:
            self._jitted = jax.jit(
                self._step,
                donate_argnums=(0, 1) if self._donate else (),
                compiler_options=self.xla_options(*args) or None,
            )
        return self._jitted

    def _step(
        self, params: PyTree, state: PyTree, batch: PyTree, *others: PyTree
    ) -> Step:
        gathers = self.gathers(params, batch, *others)
        placed, mesh = gathers.placed, gathers.placed.mesh
        params = on_devices(params)
        treedef: PyTreeDef = jax.tree.structure(params)
        grads, maxima, metrics = self._on_devices(gathers, params, batch, others)
        grads, extra = treedef.unflatten(grads), {"value": metrics["loss"], **maxima}
        step = self.tx.optimizer.update_on_devices
        updates, state = step(grads, state, params, **extra)
        after = jax.tree.map(
            lambda old, new: new if jnp.issubdtype(old.dtype, jnp.inexact) else old,
            params,
            optax.apply_updates(params, updates),
        )
        kinds = placed.memory_kinds
        return to_memory(after, mesh, placed.param_specs, kinds), state, metrics

    def _on_devices(
        self, gathers: Gathers, params: PyTree, batch: PyTree, others: PyTree
    ) -> tuple[Flat, dict[str, Array], dict[str, PyTree]]:
        """Each device's `_gradients`, as global arrays."""
        mesh = gathers.placed.mesh
        everywhere, axes = PartitionSpec(), PartitionSpec(mesh.axis_names)
        if AxisType.Explicit in mesh.axis_types:
            batch = jax.reshard(batch, NamedSharding(mesh, axes))
            others = jax.reshard(others, NamedSharding(mesh, everywhere))
        # With check_vma=True, the gradient of a parameter that devices share would be
        # summed already, loops could not start from constants, and a loss that ends in
        # a pmean would have a gradient too small by the number of devices.
        return jax.shard_map(
            functools.partial(self._gradients, gathers, jax.tree.structure(params)),
            mesh=mesh,
            in_specs=(gathers.param_specs, axes, everywhere),
            out_specs=(gathers.grad_specs, everywhere, everywhere),
            check_vma=False,
        )(jax.tree.leaves(params), batch, others)

    def _communicator(self, placed: Placed) -> Communicator:
        axes, dtype = placed.mesh.axis_names, self.tx.optimizer.gather_dtype
        return Communicator(placed.mesh, axes, dtype, self._reduce_dtype)

    # --- what the loss gives to `scan_layers` -----------------------------------------

    def gathers(self, params: PyTree, batch: PyTree, *others: PyTree) -> Gathers:
        """Which parameters `scan_layers` gathers, by a trace of the loss.

        Warns of layers that are passed to it and yet must be gathered whole.
        """
        checks.check_no_text("batch", batch)
        leaves, treedef = jax.tree.flatten((params, batch, others))
        key = treedef, *map(jax.typeof, leaves)  # on Explicit axes with shardings
        if key not in self._known:
            placed, _ = self.tx.optimizer.place(params)
            self._known[key] = self._look(placed, params, batch, others)
        return self._known[key]

    def _look(
        self, placed: Placed, params: PyTree, batch: PyTree, others: PyTree
    ) -> Gathers:
        """Follow the layers from parameters to the leaves of `scan_layers`.

        1. trace: how does the loss use each parameter?
        2. match: which specs come to each leaf of `scan_layers`?
        3. choose: a leaf with one spec gathers its parameter itself;
        4. warn: of layers that are gathered whole all the same.

        Two leaves of one call, and the L2 term uses the first:
          uses         [[Mark(0, 0), "mul"], [Mark(0, 1)]]
          specs        [P(None, "data"), P(None, "data")]
          specs_at     {Mark(0, 0): {None}, Mark(0, 1): {P("data")}}
          layer_specs  {Mark(0, 1): P("data")}
          marks        [None, Mark(0, 1)], and a warning of the first
        """
        # 1. Trace.
        self._check_batch(placed, batch)
        _warn_of_keys(others)
        whole = Gathers(placed, [None] * len(placed.paths), {})
        specs = whole.param_specs
        if not any(map(any, specs)):
            return whole
        uses = self._uses(placed, params, batch, others)
        # 2. Match: the spec of one layer; None for a parameter that is gathered whole.
        specs_at = collections.defaultdict[Mark, set[PartitionSpec | None]](set)
        for spec, leaf_uses in zip(specs, uses, strict=True):
            held = len(leaf_uses) == 1 and any(spec) and not any(spec[:1])
            for mark in (use.mark for use in leaf_uses if use.mark):
                specs_at[mark].add(PartitionSpec(*spec[1:]) if held else None)
        # 3. Choose.
        layer_specs = {
            mark: spec
            for mark, (spec, *others) in specs_at.items()
            if spec is not None and not others
        }
        firsts = [leaf_uses[0].mark if leaf_uses else None for leaf_uses in uses]
        marks = [mark if mark in layer_specs else None for mark in firsts]
        # 4. Warn.
        for path, spec, leaf_uses, by in zip(
            placed.paths, specs, uses, marks, strict=True
        ):
            if by is None and any(spec) and any(use.mark for use in leaf_uses):
                why = f"it is used by {', '.join(map(str, leaf_uses))}"
                if any(spec[:1]):
                    why = f"it is sharded along its layers, by {spec}"
                warnings.warn(
                    f"parameter {path!r} is gathered whole, all layers at "
                    f"once: {why}; use one scan_layers and nothing else",
                    stacklevel=2,
                )
        return Gathers(placed, marks, layer_specs)

    def _uses(
        self, placed: Placed, params: PyTree, batch: PyTree, others: PyTree
    ) -> list[list[jaxprs.LayerUse]]:
        """How the loss uses each whole parameter on a device."""
        uses: list[list[jaxprs.LayerUse]] = []
        mesh, axes = placed.mesh, PartitionSpec(placed.mesh.axis_names)

        def look(params: PyTree, batch: PyTree, others: PyTree) -> tuple[()]:
            first = jax.tree.map(lambda x: x[0], self._parts(batch))
            scans = Scans(self._communicator(placed), {})
            uses.extend(self._trace(scans, params, first, others)[0])
            return ()

        args, specs = (params, batch, others), (PartitionSpec(), axes, PartitionSpec())
        of_leaves = jax.tree.leaves(jax.tree.broadcast(specs, args))
        look = jax.shard_map(
            look, mesh=mesh, in_specs=specs, out_specs=(), check_vma=False
        )
        jax.eval_shape(look, *typed(args, of_leaves, mesh))
        return uses

    def _trace(
        self, scans: Scans, params: PyTree, part: PyTree, others: PyTree
    ) -> tuple[list[list[jaxprs.LayerUse]], Callable[..., "_Outputs"]]:
        """How the loss uses each parameter, and the loss as traced."""
        # With a separate axis a trace finds no function that JAX remembers from
        # another one, in which `scan_layers` did something else.
        axis = f"trace {next(_traces)} of jax_muon"
        with in_mesh_context(scans=scans):
            trace = jax.make_jaxpr(self._loss, axis_env=[(axis, 1)], return_shape=True)
            closed, results = trace(params, part, *others)
        count = len(jax.tree.leaves(params))

        def loss(*args: PyTree) -> PyTree:
            flat = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(results), flat)

        return jaxprs.uses_of_layers(closed.jaxpr, closed.jaxpr.invars[:count]), loss

    def _check_batch(self, placed: Placed, batch: PyTree) -> None:
        """Arrays need a first axis that the devices divide; warn if these differ."""
        number = placed.mesh.size * self._microbatches
        sizes: dict[int, str] = {}
        for path, x in jax.tree.leaves_with_path(batch):
            name, shape = f"batch{jax.tree_util.keystr(path)}", jnp.shape(x)
            if not shape or shape[0] % number:
                raise ValueError(
                    f"{name} has shape {shape}; expected arrays whose leading axis is "
                    f"a multiple of {number}, the devices ({placed.mesh.size}) times "
                    f"the microbatches ({self._microbatches}); what has no samples "
                    "goes into others: step(params, state, batch, *others)"
                )
            sizes.setdefault(shape[0], f"{name} {shape}")
        if len(sizes) > 1:
            warnings.warn(
                f"{' and '.join(sizes.values())} have different first axes, and each "
                "is divided between the devices; expected samples along all of them, "
                "and what every device needs whole in others: step(params, state, "
                "batch, *others)",
                stacklevel=2,
            )

    # --- on each device, inside shard_map ---------------------------------------------

    def _parts(self, batch: PyTree[Array]) -> PyTree[Array]:
        """A device's batch, as microbatches along a new first axis."""
        count = self._microbatches
        return jax.tree.map(
            lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch
        )

    def _gradients(
        self,
        gathers: Gathers,
        treedef: PyTreeDef,
        shards: Flat,
        batch: PyTree,
        others: PyTree,
    ) -> tuple[Flat, dict[str, Array], dict[str, PyTree]]:
        """This device's shard of the mean gradient; maxima; metrics.

        With a parameter (768, 3072), sharded P("data", None) over 8 devices:

        1. gather:  shards (96, 3072) become the parameter, or `scan_layers` does that;
        2. loss:    gradients (768, 3072) of the samples of this device, summed over its
                    microbatches, and divided by the weight of all;
        3. scatter: (96, 3072) of the mean over all devices.
        """
        # 1. Gather.
        comm, marks = self._communicator(gathers.placed), gathers.marks
        whole = [
            x if mark else comm.gather(x, spec)
            for x, spec, mark in zip(shards, gathers.param_specs, marks, strict=True)
        ]
        # 2. Loss.
        count, parts = self._microbatches, self._parts(batch)  # (count, samples, ...)
        first = jax.tree.map(lambda x: x[0], parts)
        scans = Scans(comm, gathers.layer_specs)

        def loss(params: Flat, part: PyTree) -> "_Outputs":
            with in_mesh_context(scans=scans):  # in it `shardings` do not count
                return self._loss(treedef.unflatten(params), part, *others)

        if gathers.layer_specs:
            uses, traced = self._trace(scans, treedef.unflatten(whole), first, others)
            if any(
                mark and [use.mark for use in leaf_uses] != [mark]
                for mark, leaf_uses in zip(marks, uses, strict=True)
            ):
                raise ValueError(
                    "loss_fn gives other parameters to scan_layers when it is traced "
                    "a second time; expected the same calls in the same order"
                )
            loss = lambda params, part: traced(params, part, others)  # noqa: E731
        microbatch = functools.partial(self._microbatch, loss, comm, marks, whole)
        (total, sums, aux), maxima = (
            microbatch(first) if count == 1 else _sum_over(microbatch, parts, first)
        )
        # A batch in which nothing counts has no gradient.
        value, grads = _times(sums, jnp.where(total == 0, 0, 1 / total))

        # 3. Scatter.
        def scatter(g: Array, x: Array, spec: PartitionSpec, by: Mark | None) -> Array:
            kind = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else g.dtype
            if by is None:
                g = comm.scatter(g / comm.mesh.size, spec, kind, comm.axes)
            return g.astype(x.dtype)

        rows = zip(grads, shards, gathers.grad_specs, marks, strict=True)
        grads = list(itertools.starmap(scatter, rows))
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
        loss: Callable[[Flat, PyTree], "_Outputs"],
        comm: Communicator,
        marks: list[Mark | None],
        params: Flat,
        part: PyTree,
    ) -> tuple[PyTree, dict[str, Array]]:
        """One microbatch: its weight, this device's part of its mean times that weight.

        1. run:    the loss of this device's samples, and how to pull a cotangent back;
        2. share:  this device's weight over the mean weight;
        3. pull:   the gradient of the loss times the share;
        4. count:  both times the total weight, so that microbatches can be added up.

        The part is not divided by the number of devices yet. On two devices:
          value    (2, 4), the mean losses
          weight   (3, 1), and the total is 4
          share    (1.5, 0.5)
          mean     (3, 2), whose mean over devices is the loss, 2.5
          result   (12, 8), and 10, the mean of both, over the total weight 4 is 2.5
        """
        # 1. Run.
        value, pull, (weight, aux, maxima) = jax.vjp(
            lambda params: loss(params, part), params, has_aux=True
        )
        # 2. Share.
        devices, share = comm.mesh.size, cast(Array | float, 1.0)
        total, mean = jnp.asarray(devices, float), wide(value)
        if weight is not None:
            # Collectives in the loss mix the cotangents of devices, so these must be
            # in the ratio of the weights. They are 1 on average, as float16 needs it:
            # (1.5, 0.5) of (3, 1).
            total = jax.lax.psum(weight, comm.axes)
            share = weight * devices / jnp.where(total == 0, 1, total)
            mean = jnp.where(weight == 0, 0, mean * share)
        # 3. Pull.
        cotangent = jnp.asarray(share, value.dtype)
        # A share of 4/3 is 1.3330 in float16, and gradients get the factor 1.0002.
        rounded_off = jnp.where(cotangent == 0, 1, share / wide(cotangent))
        (grads,) = pull(cotangent)

        def counted(g: Array, mark: Mark | None) -> Array:
            """This device's part, unless summed already; 0 for a mean of 0 / 0."""
            if g.dtype == jax.dtypes.float0:
                return jnp.zeros(g.shape)
            if mark or weight is None:
                return wide(g)
            g = _times(wide(g), rounded_off)
            return jnp.where((weight == 0) & jnp.isnan(g), 0, g)

        # 4. Count.
        means = mean, list(map(counted, grads, marks))
        # Not after the sum: booleans and int8 have none.
        count = devices * self._microbatches
        aux = jax.tree.map(lambda x: jnp.asarray(x) / count, aux)
        return (total, _times(means, total), aux), maxima


def _warn_of_keys(others: PyTree) -> None:
    """Warn of random keys that all devices get, each for samples of its own.

    `jax.random.key(0)`, and `jax.random.PRNGKey(0)`, which is uint32 of shape (2,).

    A mask that is drawn from one key has other values on eight devices than on one:
    each device draws the mask of its samples, and all draw the same.
    """
    for path, x in jax.tree.leaves_with_path(others):
        dtype = getattr(x, "dtype", int)
        if is_key(dtype) or (dtype == jnp.uint32 and x.shape == (2,)):
            warnings.warn(
                f"others{jax.tree_util.keystr(path)} is a random key, from which every "
                "device draws the same numbers for its samples; use one key per sample "
                "in the batch: jax.random.split(key, samples)",
                stacklevel=2,
            )


# The loss, and its weight, auxiliary output and maxima: None and {} without such.
_Outputs = tuple[Array, tuple[Array | None, PyTree[Array], dict[str, Array]]]


def _outputs(
    loss_fn: Callable[..., PyTree],
    has_aux: bool,
    max_aux: Sequence[str],
    weighted: bool,
    params: PyTree,
    batch: PyTree,
    *others: PyTree,
) -> _Outputs:
    """The results of a loss function, in one form; see `make_train_step`."""
    # Rebuilt, since a variable of NNX can change only in the trace that made it.
    args = jax.tree.map(lambda x: x, (batch, *others))
    loss, weight, aux = loss_fn(params, *args), None, None
    if has_aux:
        loss, aux = _pair("has_aux", loss)
    if weighted:
        loss, weight = _pair("weighted", loss)
        name, real = "the weight of loss_fn", (jnp.floating, jnp.integer)
        weight = checks.as_scalar(name, weight, "a real scalar", *real).astype(float)
        weight = jnp.where(weight < 0, jnp.nan, weight)
    entries = aux if isinstance(aux, Mapping) else {}
    if not {*max_aux} <= {*entries}:
        expected = f"entries of the auxiliary output, which has {[*entries]}"
        checks.refuse("max_aux", max_aux, expected)
    maxima = {name: entries[name] for name in max_aux}
    if maxima:
        aux = {name: x for name, x in entries.items() if name not in maxima}
    expected = "a real scalar in floating point, which has a gradient"
    loss = checks.as_scalar("the loss of loss_fn", loss, expected, jnp.floating)
    return loss, (weight, aux, maxima)


def _sum_over(
    function: Callable[[PyTree], tuple[PyTree, PyTree]], parts: PyTree, first: PyTree
) -> tuple[PyTree, PyTree]:
    """The sum of a function's first result over parts, and maxima of the other."""

    def add(so_far: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
        more, maxima = function(part)
        return jax.tree.map(jnp.add, so_far, more), maxima

    shapes, _ = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    summed, maxima = jax.lax.scan(add, zeros, parts)
    return summed, jax.tree.map(lambda x: jnp.max(x, axis=0), maxima)


def _pair(flag: str, output: PyTree) -> PyTree:
    """The output of loss_fn, if it is the pair that a flag promises."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(
            f"{flag}=True, and loss_fn returned {output!r}; expected (loss, weight) if "
            "weighted, (loss, auxiliary output) if has_aux, or ((loss, weight), "
            "auxiliary output) if both"
        )
    return output


def _times(tree: PyTree[Array], factor: Array) -> PyTree[Array]:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _check_alive(params: optax.Params, state: optax.OptState) -> None:
    """Refuse deleted arrays: JAX ends the process when several devices get them."""
    both = {"params": params, "state": state}
    if not any(map(_is_deleted, jax.tree.leaves(both))):
        return  # without a path for each array: 2 ms for 436 of them
    path, x = next(x for x in trees.leaves_with_paths(both) if _is_deleted(x[1]))
    raise ValueError(
        f"{path!r} of shape {x.shape} is deleted: an earlier call updated it in place; "
        "use params, state, metrics = step(params, state, batch), or "
        "make_train_step(donate=False)"
    )


def _is_deleted(x: ArrayLike) -> bool:
    traced = isinstance(x, jax.core.Tracer)
    return isinstance(x, jax.Array) and not traced and x.is_deleted()
