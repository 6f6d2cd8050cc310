"""Run an optimizer on a mesh, with state sharded more finely than the parameters.

Inside `on_mesh` all arrays are on Explicit mesh axes. Zeros, sums and means keep the
sharding that their types show, and `orthogonalize` reads it there. So ZeRO-2 needs no
more code: gradients and state come in sharded over more mesh axes than the
parameters, and updates go out sharded like these.
"""

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jax_muon.base import array_types, checks, facts
from jax_muon.base.dtypes import sent_dtype
from jax_muon.base.specs import AxisName, dividing, spelled
from jax_muon.mesh import hardware, wrappers, xla_options
from jax_muon.mesh.layout import MIN_SIZE, Layout, Placed, Where, readings

Updated = tuple[optax.Updates, optax.OptState]


def on_mesh(
    tx: optax.GradientTransformation,
    where: Where,
    *,
    divide: AxisName = (),
    devices_per_host: int | None = None,
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
      devices_per_host: number of neighbours on the mesh with fast links among them,
        such as the GPUs of a host. They may share the work on a matrix. None: the
        devices of a slice, if the mesh has several of one size, or else 8.
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
    if devices_per_host is not None:
        checks.check_count("devices_per_host", devices_per_host)
    checks.check_float_dtype("gather_dtype", gather_dtype)
    layout = Layout(where, divide, min_size, readings(tx))
    optimizer = MeshOptimizer(tx, layout, gather_dtype, devices_per_host)
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
        optimizer, params = self.optimizer, checks.as_arrays("params", params)
        placed = optimizer.layout.place(params)
        known = map(optimizer.layout.read(params).get, placed.paths)
        scans = [x.scan or "lax.scan" if x and x.scanned else "" for x in known]
        return xla_options.choose(placed, jax.tree.leaves(params), scans, axis)


class OnMeshes(list[tuple["MeshOptimizer", Placed]]):
    """Each `on_mesh` that was traced, with the specs of its leaves, for tools."""


class MeshOptimizer:
    """An optimizer and its layout."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        layout: Layout,
        gather_dtype: DTypeLike | None,
        devices_per_host: int | None,
    ) -> None:
        """Nothing is traced yet."""
        self.tx, self.layout, self.gather_dtype = tx, layout, gather_dtype
        self._devices_per_host = devices_per_host
        self._jitted = {x: jax.jit(x) for x in (self._init, self._update)}

    def devices_per_host(self, mesh: Mesh) -> int:
        """As the user says, or as the mesh shows."""
        return self._devices_per_host or hardware.devices_per_host(mesh)

    def init(self, params: optax.Params) -> optax.OptState:
        """State of these parameters, sharded further than they are."""
        params = checks.as_arrays("params", params)
        return cast(optax.OptState, self._run(self._init, params, params))

    def _init(self, params: optax.Params) -> optax.OptState:
        placed = self.layout.place(params)
        with self._explicit_axes(placed.mesh):
            state = self.tx.init(_reshard(on_devices(params), placed.state_specs))
        return _on_users_axes(state, placed.mesh)

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
        if _is_jitted():
            return method(*args, **extra_args)
        self.layout.check_concrete(like)
        with jax.disable_jit(False):
            return self._jitted[method](*args, **extra_args)

    def _update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Updated:
        placed = self.layout.place(updates if params is None else params)
        return self.update_on(placed, updates, state, params, **extra_args)

    def update_on(
        self,
        placed: Placed,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        **extra: Any,
    ) -> Updated:
        """As `update`, inside jit, with parameters where `placed` says."""
        like = updates if params is None else params
        checks.check_gradients(updates, params)
        facts.note(OnMeshes).append((self, placed))
        expected = self._typed_state(like, placed)
        checks.check_state(state, expected)
        typed = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(expected)]
        again = [] if params is None else placed.state_specs
        kinds = [*placed.memory_kinds, *map(_memory_kind, jax.tree.leaves(state))]
        with self._explicit_axes(placed.mesh):
            specs = [*placed.state_specs, *typed, *again]
            resharded = _reshard(on_devices((updates, state, params)), specs)
            extra = array_types.replicated(extra)
            updates, state = self.tx.update(*resharded, **extra)
            updates = _reshard(updates, placed.param_specs, self.gather_dtype)
            state = _reshard(state, typed)
        return _on_users_axes((updates, state), placed.mesh, kinds)

    def abstract(self, params: optax.Params) -> tuple[optax.Params, optax.OptState]:
        """Shapes, dtypes and shardings of the parameters and of the state."""
        params = checks.as_arrays("params", params)
        placed = self.layout.place(params)
        state = self._typed_state(params, placed)
        shapes = with_shardings(params, placed.shardings)
        return shapes, with_shardings(state, _shown(state, placed.mesh))

    def _typed_state(self, params: optax.Params, placed: Placed) -> optax.OptState:
        """The state's types; JAX remembers them, and a step does not trace `init`."""
        with self._explicit_axes(placed.mesh):
            return jax.eval_shape(
                self.tx.init, typed(params, placed, placed.state_specs)
            )

    @contextlib.contextmanager
    def _explicit_axes(self, mesh: Mesh) -> Iterator[None]:
        """Inside, types of arrays show how they are sharded."""
        if len(set(mesh.axis_types)) > 1:
            raise ValueError(
                f"a mesh whose axes {mesh.axis_names} are {mesh.axis_types}; expected "
                "Auto for all, or Explicit for all"
            )
        if array_types.surroundings().users_mesh is not None:
            raise ValueError(
                "on_mesh inside of on_mesh; expected one, around all other transforms"
            )
        known = {
            "users_mesh": jax.sharding.get_abstract_mesh(),
            "devices_per_host": self.devices_per_host(mesh),
        }
        on = jax.sharding.use_abstract_mesh(_explicit_mesh(mesh))
        with array_types.setting(**known), on:
            try:
                yield
            except Exception as error:
                _explain(error)
                raise


def typed(params: PyTree, placed: Placed, specs: Sequence[PartitionSpec]) -> PyTree:
    """Shapes of parameters, with specs in their types."""
    mesh = _explicit_mesh(placed.mesh)
    return with_shardings(params, [NamedSharding(mesh, spec) for spec in specs])


def with_shardings(tree: PyTree, shardings: Iterable[NamedSharding]) -> PyTree:
    """Shapes and dtypes of arrays, with a sharding for each leaf."""
    treedef: PyTreeDef
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    )


def typed_state(tx: optax.GradientTransformation, params: PyTree, on: Placed) -> PyTree:
    """Types of the state of any transform, one around `on_mesh` say, on its mesh."""
    with jax.sharding.use_abstract_mesh(_explicit_mesh(on.mesh)):
        return jax.eval_shape(tx.init, typed(params, on, on.param_specs))


def _outer_mesh(mesh: Mesh) -> AbstractMesh:
    """The mesh of the context if all its axes are Explicit, or else the user's."""
    context = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
    inside = all(kinds.get(name) == AxisType.Explicit for name in mesh.axis_names)
    return context if inside else mesh.abstract_mesh


def _explicit_mesh(mesh: Mesh) -> AbstractMesh:
    kinds = dict.fromkeys(mesh.axis_names, AxisType.Explicit)
    return _outer_mesh(mesh).update_axis_types(kinds)


def _shown(tree: PyTree, mesh: Mesh) -> list[NamedSharding]:
    """How the leaves are sharded, as their types show."""
    return [spelled(mesh, jax.typeof(x).sharding.spec) for x in jax.tree.leaves(tree)]


def _on_users_axes(
    tree: PyTree, mesh: Mesh, kinds: Sequence[str | None] | None = None
) -> PyTree:
    """Arrays on the user's kind of axes, sharded as their types show.

    They go to these kinds of memory, one for each leaf; None is a device's.
    """
    treedef: PyTreeDef
    leaves, treedef = jax.tree.flatten(tree)
    shardings, outer = _shown(leaves, mesh), _outer_mesh(mesh)
    if outer != _explicit_mesh(mesh):
        with jax.sharding.use_abstract_mesh(outer):
            leaves = jax.reshard(leaves, PartitionSpec())  # types say nothing again
    elif AxisType.Auto in mesh.axis_types:
        return tree  # in a user's own explicit_axes
    # The only way to name the devices that works on both kinds of axes.
    leaves = jax.jit(lambda x: x, out_shardings=shardings)(leaves)
    rows = zip(leaves, shardings, kinds or [None] * len(leaves), strict=True)
    return treedef.unflatten(
        jax.device_put(x, sharding.with_memory_kind(kind)) if kind else x
        for x, sharding, kind in rows
    )


def _memory_kind(x: Array) -> str | None:
    """Where the type shows that an array is, unless that is a device's memory."""
    on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return "pinned_host" if on_host else None


def on_devices(tree: PyTree) -> PyTree:
    """Arrays in the memory of devices."""
    to = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, to) if _memory_kind(x) else x, tree)


def _is_jitted() -> bool:
    """True under jit, where every new array is a tracer; not in an eager `jax.grad`."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _reshard(
    tree: PyTree, specs: Sequence[PartitionSpec], dtype: DTypeLike | None = None
) -> PyTree:
    """Reshard arrays to these specs; those that change are sent in `dtype`."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = []
    for x, spec in zip(leaves, specs, strict=True):
        old = jax.typeof(x).sharding
        before, after = (dividing(s, old.mesh.shape) for s in (old.spec, spec))
        # Without a dtype no cast: it would strip a weak type, on the wrong axes.
        travels = dtype is not None and before != after
        sent = x.astype(sent_dtype(x.dtype, dtype)) if travels else x
        moved.append(jax.reshard(sent, spec).astype(x.dtype))
    return jax.tree.unflatten(treedef, moved)


def _explain(error: Exception) -> None:
    """Say what to write instead, for two things that JAX rejects on Explicit axes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if type(error).__name__ == "ShardingTypeError":  # a type that JAX keeps to itself
        codes = (frame.f_code for frame in frames)
        calls = [x.co_qualname for x in codes if x.co_name in ("init_fn", "update_fn")]
        name = calls[-1].partition(".")[0] if calls else "a transform"
        raise ValueError(
            f"{name} inside on_mesh does something with sharded arrays that JAX "
            f"refuses on Explicit axes ({error}); expected it wrapped, as "
            f"jax_muon.on_auto_axes({name}(...)): XLA then chooses the sharding"
        ) from error
    # All that a transform gets is on Explicit axes, but within `on_auto_axes`. So an
    # array on Auto axes, such as `learning_rate` in `scale_by_learning_rate`, is none.
    for frame in itertools.takewhile(
        lambda frame: frame.f_code.co_filename != wrappers.__file__, frames
    ):
        module = str(frame.f_globals.get("__name__"))
        in_transform = module != __name__ and module.partition(".")[0] != "jax"
        for name, x in frame.f_locals.items() if in_transform else ():
            is_array = isinstance(x, jax.Array)
            if is_array and AxisType.Auto in jax.typeof(x).sharding.mesh.axis_types:
                raise ValueError(
                    f"the optimizer inside on_mesh uses {name!r}, an array that is no "
                    f"argument of its update ({error}); if it is a rate of "
                    "optax.inject_hyperparams, expected it inside: "
                    "on_mesh(optax.inject_hyperparams(...)(...), mesh)"
                ) from error
