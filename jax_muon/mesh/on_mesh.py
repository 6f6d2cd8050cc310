"""Run an optimizer on a mesh, with state sharded more finely than the parameters.

Inside `on_mesh` all arrays are on Explicit mesh axes, so their types show how they are
sharded. Zeros, sums and means keep the sharding in their type, and `orthogonalize`
reads it there. So ZeRO-2 needs no code of its own: gradients and state are sharded over
mesh axes that replicate the parameters, and updates come out sharded like the
parameters.
"""

import dataclasses
import math
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon import checks, notes, paths
from jax_muon.mesh import specs as mesh_specs
from jax_muon.mesh.layout import Layout


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    specs: mesh_specs.Specs = None,
    divide: mesh_specs.AxisName = (),
    *,
    min_size: int = 1024,
    gather_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on a mesh, with gradients and state sharded further.

    Works in plain jit, on Auto and Explicit axes, with and without `jax.set_mesh`;
    eager calls are jitted. The updates equal those of one device, to rounding.

    Args:
      tx: any optax transform of global arrays: a recipe, or a chain around one.
      mesh: the mesh.
      specs: how parameters are sharded: a `PartitionSpec` or `NamedSharding` for all, a
        tree of them (a prefix will do), or a function of the path. None: as their types
        show, which on Auto axes is replicated.
      divide: mesh axes that replicate the parameters, over which gradients and state
        are sharded further (ZeRO-2), along the first axis of a leaf whose size they
        divide evenly. Leaves without such an axis stay replicated; `describe` shows
        them.
      min_size: leaves of fewer elements stay replicated too, and are all-reduced.
      gather_dtype: dtype in which updates are gathered; None for their own.

    Returns:
      A transform whose state has the same shapes as that of `tx`, so that a checkpoint
      can be restored on any mesh: see `abstract_state`.

    Raises:
      ValueError: `divide` names an axis that the mesh lacks; at init and update, with
        path and shape, specs that do not fit, or that use an axis of `divide`; state
        that does not belong to `tx` and these parameters.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> tx = jm.on_mesh(jm.nanochat(), mesh, divide="data")
      >>> state = jax.jit(tx.init)(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> updates["mlp"]["up"].shape
      (64, 256)

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """
    divided = mesh_specs.checked_axes("divide", divide, mesh)
    checks.float_dtype("gather_dtype", gather_dtype)
    layout = Layout(mesh, specs, divided, divided, min_size)
    return OnMesh(tx, layout, gather_dtype).transform()


class OnMesh:
    """An optimizer and its layout."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        layout: Layout,
        gather_dtype: jax.typing.DTypeLike | None = None,
    ) -> None:
        """Check the mesh; nothing is traced yet."""
        self.tx = checks.as_transform("tx", tx)
        self.layout = layout
        if len(set(layout.mesh.axis_types)) > 1:
            raise ValueError(
                f"a mesh whose axes {layout.mesh.axis_names} have the types "
                f"{layout.mesh.axis_types}; expected Auto for all, or Explicit for all"
            )
        self.gather_dtype = gather_dtype
        if AxisType.Auto in layout.mesh.axis_types:
            _check_not_injected(layout.mesh)
        # By shapes and specs of the parameters, so that a step does not trace `init`.
        self._known_state: dict[Any, Any] = {}
        self._jitted_update = jax.jit(self._update)

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """As one optax transform."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> Any:
        """State of these parameters, sharded further than they are."""
        checks.arrays("params", params)
        if not self._is_explicit():  # types of the state show nothing
            leaves = jax.tree.leaves(self.state_leaves(params), is_leaf=_is_state_leaf)
            sizes = self.layout.mesh.shape
            notes.note(
                "placed_state",
                whole=sum(leaf.bytes_over({}) for leaf in leaves),
                on_a_device=sum(leaf.bytes_over(sizes) for leaf in leaves),
            )
        if self._is_typed():
            return self._init(params)
        # Jitted inside a trace too: out_shardings name the devices.
        init = jax.jit(self._init, out_shardings=self.state_shardings(params))
        if _is_traced(params):
            return init(params)
        self.layout.check_concrete(params)
        with jax.disable_jit(False):
            return init(self._at_home(params))

    def _init(self, params: optax.Params) -> Any:
        return self._typed(self.tx.init, (self.layout.of_state(params),), params)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """Updates sharded like the parameters, and the new state."""
        if _is_traced((updates, state, params, extra_args)):
            # Under jit alone every new array is a tracer.
            if not self._is_explicit() and not _is_traced(jnp.zeros(())):
                raise ValueError(
                    "the update of on_mesh inside jax.grad, jax.jvp or jax.vmap that "
                    "is not jitted; expected jax.jit around it: jax.jit(jax.grad(f))"
                )
            return self._update(updates, state, params, **extra_args)
        self.layout.check_concrete(updates if params is None else params)
        with jax.disable_jit(False):
            return self._jitted_update(updates, state, params, **extra_args)

    def _update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        like = updates if params is None else params
        checks.gradients(updates, params)
        coarse, fine = self.layout.of_both(like)
        self._check_types(like, coarse)
        notes.note("on_mesh", layout=self.layout, params=like, coarse=coarse, fine=fine)
        arrays, others = mesh_specs.arrays_and_others(extra_args)

        def inner(updates: Any, state: Any, params: Any, arrays: Any) -> Any:
            return self.tx.update(updates, state, params, **others, **arrays)

        leaves = self.state_leaves(like, fine)
        checks.state(state, leaves)
        state_specs = jax.tree.map(lambda x: x.spec, leaves, is_leaf=_is_state_leaf)
        specs = (
            _like(fine, updates),
            state_specs,
            None if params is None else fine,
            jax.tree.map(lambda x: PartitionSpec(*[None] * jnp.ndim(x)), arrays),
        )
        updates, state = self._typed(inner, specs, updates, state, params, arrays)
        updates = self._place(updates, _like(coarse, updates), _like(fine, updates))
        return updates, self._place(state, state_specs)

    def state_leaves(self, params: optax.Params, specs: Any = None) -> Any:
        """Shape, dtype and spec of all state arrays, by an abstract init."""
        flat, treedef = jax.tree.flatten(params)
        specs = self.layout.of_state(params) if specs is None else specs
        key = (
            treedef,
            tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in flat),
            tuple(jax.tree.leaves(specs)),
        )
        if key not in self._known_state:
            seen: list[Any] = []

            def probe(params: optax.Params) -> Any:
                state = self.tx.init(params)
                seen.append(jax.tree.map(_state_leaf, state))
                return state

            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
            jax.eval_shape(
                lambda params: self._typed(probe, (specs,), params),
                jax.tree.unflatten(treedef, shapes),
            )
            (self._known_state[key],) = seen
        return self._known_state[key]

    def state_shardings(self, params: optax.Params) -> Any:
        """NamedShardings of the state."""
        return jax.tree.map(
            lambda leaf: self.sharding(leaf.spec),
            self.state_leaves(params),
            is_leaf=_is_state_leaf,
        )

    def _typed(self, function: Callable[..., Any], specs: Any, *args: Any) -> Any:
        """Call a function with arrays of these specs, on Explicit axes."""
        try:
            return self._on_explicit_axes(function, specs, *args)
        except Exception as error:
            _check_typed(error)
            raise

    def _on_explicit_axes(
        self, function: Callable[..., Any], specs: Any, *args: Any
    ) -> Any:
        mesh = self.layout.mesh
        mesh_specs.check_not_in_spmd_vmap(mesh.axis_names)
        if not self._is_explicit():
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return jax.sharding.explicit_axes(
                    function, axes=mesh.axis_names, in_sharding=specs
                )(*args)
        context = jax.sharding.get_abstract_mesh()
        here = context if not context.empty else mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(here):
            placed = jax.tree.map(
                lambda spec, x: jax.reshard(x, NamedSharding(here, spec)),
                specs,
                args,
            )
            return function(*placed)

    def _check_types(self, params: Any, specs: Any) -> None:
        """Raise a ValueError for types on Explicit axes that contradict the specs."""
        if AxisType.Explicit not in self.layout.mesh.axis_types:
            return
        pairs = zip(
            paths.leaves_with_paths(params),
            jax.tree.leaves(specs),
            strict=True,
        )
        for (path, leaf), spec in pairs:
            kind = jax.typeof(leaf)
            if kind.sharding.mesh.empty:
                continue
            own = mesh_specs.full_rank(
                kind.sharding.spec, path, leaf.shape, self.layout.mesh.shape
            )
            if own != spec:
                raise ValueError(
                    f"parameter {path!r} has the type {kind}, and specs say {spec}; "
                    "expected no specs with Explicit axes, whose types show them"
                )

    def _is_typed(self) -> bool:
        """Return True if all axes of the mesh are Explicit in the current trace."""
        context = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
        names = self.layout.mesh.axis_names
        return all(kinds.get(name) == AxisType.Explicit for name in names)

    def _is_explicit(self) -> bool:
        """Return True if types show shardings, on the user's mesh or in a trace."""
        return AxisType.Explicit in self.layout.mesh.axis_types or self._is_typed()

    def _place(self, tree: Any, specs: Any, before: Any = None) -> Any:
        """Reshard arrays to these specs, on the user's own kind of axes.

        Arrays whose specs were others `before` are sent in `gather_dtype`.
        """
        context, explicit = jax.sharding.get_abstract_mesh(), self._is_explicit()

        def place(spec: PartitionSpec, x: Any, own: PartitionSpec) -> Any:
            travels = own != spec
            sent = (
                x.astype(mesh_specs.wire_dtype(x.dtype, self.gather_dtype))
                if travels
                else x
            )
            if explicit:
                mesh = context if not context.empty else self.layout.mesh
                sent = jax.reshard(sent, NamedSharding(mesh, spec))
            else:
                sent = jax.lax.with_sharding_constraint(sent, self.sharding(spec))
            return sent.astype(x.dtype)

        before = specs if before is None else before
        return jax.tree.map(place, specs, tree, before)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding, spelled as JAX spells it for results of jit."""
        if AxisType.Auto in self.layout.mesh.axis_types:
            spec = mesh_specs.as_jit_writes(spec, self.layout.mesh.shape)
        return NamedSharding(self.layout.mesh, spec)

    def _at_home(self, params: optax.Params) -> Any:
        """Move the parameters to the mesh, if they are not there yet."""
        specs = self.layout.of_params(params)
        return jax.tree.map(
            lambda spec, x: jax.device_put(x, self.sharding(spec)),
            specs,
            params,
        )


def abstract_state(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> optax.OptState:
    """Shapes, dtypes and shardings of an optimizer's state, to restore a checkpoint.

    The global shapes of state arrays do not depend on the layout, so one layout can
    restore what another saved: give this to orbax as the target.

    Args:
      tx: the optimizer; on a mesh, `on_mesh(...)`, or a chain around it.
      params: the parameters, or their shapes.
      mesh: the mesh; None for one device.

    Returns:
      The state as `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      ValueError: an argument of another type, and what `tx` raises at init.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> tx = jm.on_mesh(jm.nanochat(), mesh, divide="data")
      >>> target = jm.abstract_state(tx, params, mesh)  # for orbax
      >>> all(x.sharding.mesh == mesh for x in jax.tree.leaves(target))
      True
    """
    checks.as_transform("tx", tx)
    checks.arrays("params", params)
    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            jax.eval_shape(tx.init, shapes),
        )
    specs = {
        path: found.spec
        for path, leaf in paths.leaves_with_paths(params)
        if (found := mesh_specs.own_sharding(leaf))
    }
    outer = OnMesh(tx, Layout(mesh, lambda path: specs.get(path)))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=outer.sharding(leaf.spec)
        ),
        outer.state_leaves(params),
        is_leaf=_is_state_leaf,
    )


@dataclasses.dataclass(frozen=True)
class _StateLeaf:
    """Shape, dtype and spec of one array of a state."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec

    def bytes_over(self, sizes: mesh_specs.Sizes) -> int:
        """Bytes of one device's shard, or of the whole array without mesh axes."""
        spec = self.spec if sizes else PartitionSpec()
        return (
            math.prod(mesh_specs.shard_shape(self.shape, spec, sizes))
            * self.dtype.itemsize
        )


def _state_leaf(x: Any) -> _StateLeaf:
    spec = jax.typeof(x).sharding.spec
    entries = [*spec, *[None] * (jnp.ndim(x) - len(spec))]
    return _StateLeaf(tuple(x.shape), x.dtype, PartitionSpec(*entries))


def _is_state_leaf(x: Any) -> bool:
    return isinstance(x, _StateLeaf)


def _like(specs: Any, tree: Any) -> Any:
    """The specs in the structure of a tree that has its leaves in boxes, or not."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(specs))


def _check_not_injected(mesh: Mesh) -> None:
    """Raise a ValueError for Auto axes inside `optax.inject_hyperparams`.

    Its numbers would be used here without being arguments, which JAX only rejects at
    the second step, when they are on the mesh.
    """
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_qualname.startswith("inject_hyperparams."):
            raise ValueError(
                f"on_mesh inside optax.inject_hyperparams, on a mesh {mesh.axis_names} "
                "with Auto axes; expected it outside: "
                "on_mesh(optax.inject_hyperparams(...)(...), mesh)"
            )


def _check_typed(error: Exception) -> None:
    """Name the transform that JAX rejects on Explicit axes, if that is the error."""
    if type(error).__name__ != "ShardingTypeError":
        return
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    calls = [x.co_qualname for x in frames if x.co_name in ("init_fn", "update_fn")]
    name = calls[-1].partition(".")[0] if calls else "a transform"
    raise ValueError(
        f"{name} inside on_mesh does something with sharded arrays that JAX refuses on "
        f"Explicit axes ({error}); expected it wrapped, as "
        f"jax_muon.on_auto_axes({name}(...)): XLA then chooses the sharding"
    ) from error


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
