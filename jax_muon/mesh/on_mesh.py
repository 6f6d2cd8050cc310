"""Run an optimizer on a mesh, with state sharded more finely than the parameters.

Inside `on_mesh` all mesh axes are Auto: gradients, parameters and state are sharded as
the layout says, and XLA divides all elementwise work alike. So any transform of global
arrays runs there, and ZeRO-2 needs no more code: gradients and state come in sharded
over more mesh axes than the parameters, and updates go out sharded like these. Only
`orthogonalize` needs whole matrices, and asks the layout where their parts are.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jax_muon.base import array_types, checks, facts, trees
from jax_muon.base.dtypes import sent_dtype
from jax_muon.base.specs import AxisName, spelled
from jax_muon.matrices.as_matrices import Read
from jax_muon.mesh import xla_options
from jax_muon.mesh.layout import MIN_SIZE, Layout, Parameters, Placed, Where

Updated = tuple[optax.Updates, optax.OptState]


def on_mesh(
    tx: optax.GradientTransformation,
    where: Where,
    *,
    divide: AxisName = (),
    min_size: int = MIN_SIZE,
    gather_dtype: DTypeLike | None = None,
) -> "OnMesh":
    """Run an optimizer on a mesh, with gradients and state sharded further.

    Works in plain jit, on Auto and Explicit axes, with and without `jax.set_mesh`;
    eager calls are jitted. The updates are the same as on one device, to rounding.

    Args:
      tx: any optax transform of global arrays: a recipe, or a chain around one.
      where: where the parameters are. A mesh, whose axes are all Auto or all Explicit:
        on Auto axes every device has whole parameters, on Explicit ones they are
        sharded as their types show. Or `jax.sharding.NamedSharding`s, as from
        `fsdp` or `jax.tree.map(lambda p: p.sharding, params)`: a tree of them (a prefix
        will do, and None in it means everywhere), one for all parameters, or a function
        of the parameters that returns one of these.
      divide: mesh axes that shard gradients and state further (ZeRO-2, arXiv
        1910.02054), along the first axis of a leaf that they divide evenly; an axis of
        layers comes last. Leaves without one stay as they are; `describe` shows them.
      min_size: leaves of fewer elements are not divided; their gradients are summed.
      gather_dtype: dtype in which updates, and in `make_train_step` parameters, are
        sent; None for their own.

    Returns:
      An `OnMesh`: an optax transform whose state has the same shapes as without it,
      so that a checkpoint can be restored on any mesh.

    Raises:
      ValueError: at init and update: a mesh with both Auto and Explicit axes; `divide`
        names an axis that the mesh lacks; `on_mesh` inside of `on_mesh`; with path and
        shape, shardings that do not fit, or are not of one mesh; state that does not
        belong to `tx` and these parameters.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> recipe = jm.nanochat(0.02, matrices={"mlp": "muon"})
      >>> tx = jm.on_mesh(recipe, mesh, divide="data")
      >>> state = jax.jit(tx.init)(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> updates["mlp"]["up"].shape
      (64, 256)
      >>> target = tx.abstract_state(params)  # for orbax
      >>> all(x.sharding.mesh == mesh for x in jax.tree.leaves(target))
      True
    """
    tx = checks.as_transform("tx", tx)
    checks.check_float_dtype("gather_dtype", gather_dtype)
    optimizer = MeshOptimizer(tx, Layout(where, divide, min_size), gather_dtype)
    transform = OnMesh(optimizer.init, optimizer.update)
    transform.optimizer = optimizer
    return transform


class OnMesh(optax.GradientTransformationExtraArgs):
    """An optax transform on a mesh, which knows where parameters and state are."""

    optimizer: "MeshOptimizer"

    def abstract_state(self, params: optax.Params) -> optax.OptState:
        """Shapes, dtypes and shardings of the state of these parameters, or shapes.

        Global shapes do not depend on the layout, so one layout can restore what
        another saved: give these `jax.ShapeDtypeStruct`s to Orbax as the target.
        """
        return self.optimizer.abstract(params)[1]

    def xla_options(
        self, params: optax.Params, axis: AxisName | None = None
    ) -> dict[str, Any]:
        """Options of XLA's GPU compiler for your own jitted step.

        `jax.jit(step, compiler_options=tx.xla_options(params))`; a `TrainStep` uses its
        own. Leaves are sent in buckets by the model's size, or of a layer of
        `scan_layers`; a transfer starts when its input is there, and ten are in flight.
        If XLA gathers layers itself, in a `jax.lax.scan`, they are MaxText's options.
        What this jaxlib does not know is left out.

        Args:
          params: the parameters, or their shapes.
          axis: mesh axes that divide the batch; None for all.

        Returns:
          Options for `jax.jit`; {} on one device, and for devices other than GPUs.
        """
        params = checks.as_arrays("params", params)
        placed, state = self.optimizer.place(params)
        known = map(state.parameters.get, placed.paths)
        scans = [x.scan or "lax.scan" if x and x.scanned else "" for x in known]
        return xla_options.choose(placed, jax.tree.leaves(params), scans, axis)


class OnMeshes(list[tuple[Placed, "PlacedState"]]):
    """Of each `on_mesh` whose update was traced: recorded for `describe`."""


class MeshOptimizer:
    """An optimizer and its layout."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        layout: Layout,
        gather_dtype: DTypeLike | None,
    ) -> None:
        """Nothing is traced yet."""
        self.tx, self.layout, self.gather_dtype = tx, layout, gather_dtype
        self._jitted = {x: jax.jit(x) for x in (self._init, self._update)}
        self._known: dict[Hashable, tuple[Placed, PlacedState]] = {}

    def place(self, params: PyTree) -> tuple[Placed, "PlacedState"]:
        """Where parameters, their gradients and their state are.

        `divide` takes axes of layers last; a trace of `tx.init` shows these, and needs
        types that are divided already. So nothing counts as a layer at first: (8, 64,
        256) that 8 devices divide is P("data", None, None). If the trace shows that
        these are layers it is P(None, "data", None), and `tx.init` is traced again.
        """
        leaves, treedef = jax.tree.flatten(params)
        # Types have shardings on Explicit axes. Shapes may lack them, which is refused.
        is_shape = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        key = treedef, *is_shape, *map(jax.typeof, leaves)
        if key not in self._known:
            first = self.layout.place(params, {})
            state = trace_init(self.tx, params, first)
            placed = self.layout.place(params, state.parameters)
            if placed.state_specs != first.state_specs:
                state = trace_init(self.tx, params, placed)
            self._known[key] = placed, state
        return self._known[key]

    def init(self, params: optax.Params) -> optax.OptState:
        """State of these parameters, sharded further than they are."""
        params = checks.as_arrays("params", params)
        return cast(optax.OptState, self._run(self._init, params, params))

    def _init(self, params: optax.Params) -> optax.OptState:
        placed, state = self.place(params)
        return _on_auto_axes(self.tx.init, placed, (on_devices(params),), state.specs)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> Updated:
        """Updates sharded like the parameters, and the new state."""
        like = updates if params is None else params
        run = self._run(self._update, like, updates, state, params, **extra_args)
        return cast(Updated, run)

    def _run(
        self, method: Callable[..., Any], like: PyTree, *args: Any, **extra_args: Any
    ) -> PyTree:
        """The result of a method, which an eager caller gets from a jitted program."""
        # Under jit every new array is a tracer, but not in an eager `jax.grad`.
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            return method(*args, **extra_args)
        self.layout.check_concrete(like)
        with jax.disable_jit(False):
            return self._jitted[method](*args, **extra_args)

    def _update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Updated:
        placed, _ = self.place(updates if params is None else params)
        # Parameters may be in the host's memory: updates are computed on devices, and
        # go where the parameters are.
        updates, params = on_devices((updates, params))
        updates, state = self.update_on_devices(updates, state, params, **extra_args)
        kinds = placed.memory_kinds
        return to_memory(updates, placed.mesh, placed.param_specs, kinds), state

    def update_on_devices(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Updated:
        """As `update`, inside jit, of gradients and parameters in devices' memory.

        1. check: the gradients and the state belong to these parameters;
        2. enter: gradients, parameters and state are sharded as the layout says;
        3. update: `tx` runs on these global arrays;
        4. leave: updates are gathered to where the parameters are, state stays.
        """
        # 1. Check.
        checks.check_gradients(updates, params)
        placed, known = self.place(updates if params is None else params)
        checks.check_state(state, known.shapes)
        facts.record(OnMeshes).append((placed, known))
        arrays, others = array_types.arrays_and_others(extra_args)

        def update(
            updates: PyTree, state: PyTree, params: PyTree, arrays: PyTree
        ) -> Updated:
            # 2. Enter: under ZeRO-2 on 8 devices, a gradient (768, 3072) becomes shards
            # (96, 3072). From a train step it is these already; in plain jit each
            # device has a part of the sum, and XLA chooses how to add and divide them.
            updates = _constrained(updates, placed.state_specs)
            if params is not None:
                params = _constrained(params, placed.state_specs)
            state = _constrained(state, known.specs)
            # 3. Update.
            updates, state = self.tx.update(updates, state, params, **others, **arrays)
            # 4. Leave; state is constrained by `_on_auto_axes`.
            return self._gathered(updates, placed), state

        kinds = list(map(_memory_kind, jax.tree.leaves(state)))
        args = updates, on_devices(state), params, arrays
        specs = [*placed.param_specs, *known.specs]
        updates, state = _on_auto_axes(update, placed, args, specs)
        return updates, to_memory(state, placed.mesh, known.specs, kinds)

    def _gathered(self, updates: PyTree, placed: Placed) -> PyTree:
        """Updates sharded like the parameters, which devices send in `gather_dtype`."""
        treedef: PyTreeDef
        leaves, treedef = jax.tree.flatten(updates)
        rows = zip(leaves, placed.state_specs, placed.param_specs, strict=True)
        sent = [
            x if old == new else x.astype(sent_dtype(x.dtype, self.gather_dtype))
            for x, old, new in rows
        ]
        sent = _constrained(sent, placed.state_specs)  # so that XLA casts shards,
        sent = _constrained(sent, placed.param_specs)  # and gathers what is cast
        return treedef.unflatten(
            x.astype(like.dtype) for x, like in zip(sent, leaves, strict=True)
        )

    def abstract(self, params: optax.Params) -> tuple[optax.Params, optax.OptState]:
        """Shapes, dtypes and shardings of the parameters and of the state."""
        params = checks.as_arrays("params", params)
        placed, state = self.place(params)
        shapes = array_types.with_shardings(params, placed.shardings)
        return shapes, state.on(placed.mesh)


class PlacedState(NamedTuple):
    """What a trace of `tx.init` shows of the state, before there is any."""

    shapes: PyTree
    specs: list[PartitionSpec]  # of its leaves
    parameters: Parameters  # as transforms record how they are read
    # Arrays that every device has whole, as nothing shows how to shard them.
    whole: list[str]

    def on(self, mesh: Mesh) -> PyTree:
        """Shapes and dtypes, with shardings."""
        shardings = (spelled(mesh, spec) for spec in self.specs)
        return array_types.with_shardings(self.shapes, shardings)


def trace_init(
    tx: optax.GradientTransformation, params: PyTree, placed: Placed
) -> PlacedState:
    """The state of parameters that are sharded as gradients and state are.

    On Explicit axes types show it: of a parameter f32[768@data,3072], momentum has the
    same type, a mean over the last axis f32[768@data], and jnp.zeros(p.shape) none: it
    is whole. JAX cannot type all that an `init` may do; then the path and the shape of
    each array decide, and if they leave a choice, every device has all of it.
    """
    mesh, outside = array_types.explicit(placed.mesh), jax.sharding.get_abstract_mesh()
    pairs = zip(placed.shapes, placed.state_specs, strict=True)
    divided = [math.prod(x) for x, spec in pairs if any(spec) and len(x) > 1]
    large = min(divided, default=math.inf)  # elements of state that should be divided
    with array_types.in_mesh_context(users_mesh=outside):
        try:
            with jax.sharding.use_abstract_mesh(mesh):
                types = array_types.typed(params, placed.state_specs, mesh)
                state, recorded = facts.eval_shape(tx.init, types)
            found = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(state)]
        except Exception:  # an error of `init` itself is raised again here
            shapes = array_types.shapes_of(params)
            state, recorded = facts.eval_shape(tx.init, shapes)
            large, flat = 2, trees.leaves_with_paths(state)
            found = [placed.spec_by_path(path, jnp.shape(x)) for path, x in flat]
    rows = zip(trees.leaves_with_paths(state), found, strict=True)
    whole = [path for (path, x), spec in rows if x.size >= large and not any(spec)]
    return PlacedState(state, found, recorded[Read].leaves, whole)


def _constrained(tree: PyTree, specs: Sequence[PartitionSpec]) -> PyTree:
    """The tree sharded by these specs, inside `_on_auto_axes`."""
    treedef: PyTreeDef
    leaves, treedef = jax.tree.flatten(tree)
    layout = array_types.mesh_context().layout
    assert layout is not None
    shardings = [NamedSharding(layout.mesh, spec) for spec in specs]
    return treedef.unflatten(jax.lax.with_sharding_constraint(leaves, shardings))


def _on_auto_axes(
    function: Callable[..., PyTree],
    placed: Placed,
    args: Sequence[PyTree],
    specs: Sequence[PartitionSpec],
) -> PyTree:
    """Results of a function that runs on Auto axes, on the user's kind of axes.

    They are sharded by these specs, one for each leaf.
    """
    axis_types = placed.mesh.axis_types
    if len({*axis_types}) > 1:
        raise ValueError(
            f"a mesh whose axes {placed.mesh.axis_names} are {axis_types}; expected "
            "Auto for all, or Explicit for all"
        )
    if array_types.mesh_context().layout is not None:
        raise ValueError(
            "on_mesh inside of on_mesh; use one, around all other transforms"
        )
    outside = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in axis_types:
        outside = placed.mesh.abstract_mesh
    # `trace_init` calls this on an Explicit copy of an Auto mesh: ask the mesh around.
    is_explicit = AxisType.Explicit in outside.axis_types
    treedef: PyTreeDef = jax.tree.structure(None)

    def run(*args: PyTree) -> list[Array]:
        nonlocal treedef
        # Constraints want Auto axes: those of `auto_axes`, if the user's are Explicit.
        mesh = jax.sharding.get_abstract_mesh() if is_explicit else placed.mesh
        by_path = dict(zip(placed.paths, placed.state_specs, strict=True))
        layout = array_types.LayoutByPath(mesh, by_path)
        with array_types.in_mesh_context(layout=layout, users_mesh=outside):
            leaves, treedef = jax.tree.flatten(function(*args))
            return cast(list[Array], _constrained(leaves, specs))

    if not is_explicit:
        leaves = run(*args)
        return treedef.unflatten(leaves)
    try:
        with jax.sharding.use_abstract_mesh(outside):
            leaves = jax.sharding.auto_axes(run, out_sharding=list(specs))(*args)
    except ValueError as error:
        if "aval mesh" not in str(error):
            raise
        raise ValueError(  # an array that is still on Explicit axes
            "the optimizer inside on_mesh uses an array that is no argument of its "
            f"update, on a mesh with Explicit axes ({error}); if it is a rate of "
            "optax.inject_hyperparams, use "
            "on_mesh(optax.inject_hyperparams(...)(...), where)"
        ) from error
    if AxisType.Explicit in axis_types:  # types have an abstract mesh: name devices
        shardings = list(map(functools.partial(spelled, placed.mesh), specs))
        leaves = jax.jit(lambda x: x, out_shardings=shardings)(leaves)
    return treedef.unflatten(leaves)


def _memory_kind(x: Array) -> str | None:
    """Where the type shows that an array is, unless that is a device's memory."""
    on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return "pinned_host" if on_host else None


def on_devices(tree: PyTree) -> PyTree:
    """Arrays in the memory of devices."""
    to = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, to) if _memory_kind(x) else x, tree)


def to_memory(
    tree: PyTree,
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    kinds: Sequence[str | None],
) -> PyTree:
    """Arrays in these kinds of memory, one for each leaf; None is a device's."""
    treedef: PyTreeDef
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.device_put(x, spelled(mesh, spec, kind)) if kind else x
        for x, spec, kind in zip(leaves, specs, kinds, strict=True)
    )
