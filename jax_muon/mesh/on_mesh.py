"""Run an optimizer on a mesh, with state sharded more finely than the parameters.

Inside `on_mesh` all arrays are on Explicit mesh axes. Zeros, sums and means keep the
sharding that their types show, and `orthogonalize` reads it there. So ZeRO-2 needs no
code of its own: gradients and state come in sharded over more mesh axes than the
parameters, and updates go out sharded like these.
"""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.base import array_types, checks, facts
from jax_muon.base.dtypes import wire_dtype
from jax_muon.base.specs import AxisName, checked_axes, dividing
from jax_muon.mesh.layout import Layout, Specs, axes_of_layers


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    specs: Specs = None,
    divide: AxisName = (),
    *,
    min_size: int = 1024,
    gather_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on a mesh, with gradients and state sharded further.

    Works in plain jit, on Auto and Explicit axes, with and without `jax.set_mesh`;
    eager calls are jitted. The updates equal those of one device, to rounding.

    Args:
      tx: any optax transform of global arrays: a recipe, or a chain around one.
      mesh: a mesh whose axes are all Auto or all Explicit.
      specs: how parameters are sharded: a `PartitionSpec` or `NamedSharding` for all, a
        tree of them (a prefix will do), or a function of the parameters that returns
        one of these. None: as their types show, which on Auto axes is replicated.
      divide: mesh axes that shard gradients and state further (ZeRO-2, arXiv
        1910.02054), along the first axis of a leaf that they divide evenly; an axis of
        layers comes last. Leaves without one stay as in `specs`; `describe` shows them.
      min_size: leaves of fewer elements are not divided; their gradients are summed.
      gather_dtype: dtype in which updates are gathered; None for their own.

    Returns:
      A transform whose state has the same shapes as that of `tx`, so that a checkpoint
      can be restored on any mesh: see `abstract_state`.

    Raises:
      ValueError: a mesh with both Auto and Explicit axes; `divide` names an axis that
        the mesh lacks; at init and update, with path and shape, specs that do not fit;
        state that does not belong to `tx` and these parameters.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> tx = jm.nanochat(0.02, matrices={"*": "muon"})
      >>> tx = jm.on_mesh(tx, mesh, divide="data")
      >>> state = jax.jit(tx.init)(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> updates["mlp"]["up"].shape
      (64, 256)
    """
    divided = checked_axes("divide", divide, mesh)
    checks.float_dtype("gather_dtype", gather_dtype)
    layout = Layout(mesh, specs, divided, min_size, axes_of_layers(tx))
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
        if len(set(layout.mesh.axis_types)) > 1:
            raise ValueError(
                f"a mesh whose axes {layout.mesh.axis_names} have the types "
                f"{layout.mesh.axis_types}; expected Auto for all, or Explicit for all"
            )
        self.tx = checks.as_transform("tx", tx)
        self.layout, self.gather_dtype = layout, gather_dtype
        self._jitted_init = jax.jit(self._init)
        self._jitted_update = jax.jit(self._update)

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """As one optax transform; its methods lead `verify` back to this."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> Any:
        """State of these parameters, sharded further than they are."""
        params = checks.arrays("params", params)
        if _is_jitted():
            return self._init(params)
        self.layout.check_concrete(params)
        with jax.disable_jit(False):
            return self._jitted_init(params)

    def _init(self, params: optax.Params) -> Any:
        _, _, of_state = self.layout.of_leaves(params)
        with self._explicit_axes():
            state = self.tx.init(_reshard(params, of_state))
        return self._on_users_axes(state)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """Updates sharded like the parameters, and the new state."""
        if _is_jitted():
            return self._update(updates, state, params, **extra_args)
        self.layout.check_concrete(updates if params is None else params)
        with jax.disable_jit(False):
            return self._jitted_update(updates, state, params, **extra_args)

    def _update(self, updates: Any, state: Any, params: Any, **extra_args: Any) -> Any:
        like = updates if params is None else params
        checks.gradients(updates, params)
        names, of_params, of_state = self.layout.of_leaves(like)
        facts.note().on_mesh.append((self, names, of_params, of_state))
        expected = self._typed_state(like, of_state)
        checks.state(state, expected)
        typed = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(expected)]
        again = [] if params is None else of_state
        with self._explicit_axes():
            specs = [*of_state, *typed, *again]
            resharded = _reshard((updates, state, params), specs)
            extra_args = array_types.replicated(extra_args)
            updates, state = self.tx.update(*resharded, **extra_args)
            updates = _reshard(updates, of_params, self.gather_dtype)
            state = _reshard(state, typed)
        return self._on_users_axes((updates, state))

    def abstract(self, params: optax.Params) -> tuple[Any, Any]:
        """Shapes, dtypes and shardings of the parameters and of the state."""
        params = checks.arrays("params", params)

        def abstract(x: Any) -> Any:
            sharding = self._sharding(jax.typeof(x).sharding.spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        _, of_params, of_state = self.layout.of_leaves(params)
        typed = self._typed(params, of_params), self._typed_state(params, of_state)
        return jax.tree.map(abstract, typed)

    def _typed(self, params: optax.Params, specs: Sequence[PartitionSpec]) -> Any:
        """Shapes of parameters, with specs in their types."""
        leaves, treedef = jax.tree.flatten(params)
        mesh = self._explicit_mesh()
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return jax.tree.unflatten(treedef, shapes)

    def _typed_state(self, params: Any, of_state: Sequence[PartitionSpec]) -> Any:
        """The state's types; JAX remembers them, and a step does not trace `init`."""
        with self._explicit_axes():
            return jax.eval_shape(self.tx.init, self._typed(params, of_state))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding, spelled as JAX spells it for results of jit.

        P("a", None) and P("a") are different specs to JAX, which would compile again.
        """
        mesh = self.layout.mesh
        if AxisType.Auto in mesh.axis_types:
            spec = dividing(spec, mesh.shape)
            while spec and spec[-1] is None:
                spec = PartitionSpec(*spec[:-1])
        return NamedSharding(mesh, spec)

    @contextlib.contextmanager
    def _explicit_axes(self) -> Iterator[None]:
        """Inside, types of arrays show how they are sharded."""
        with array_types.on_explicit_axes(self._explicit_mesh(), 8):
            try:
                yield
            except Exception as error:
                _explain(error)
                raise

    def _outer_mesh(self) -> AbstractMesh:
        """The mesh of the context if all its axes are Explicit, or else the user's."""
        context = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
        names = self.layout.mesh.axis_names
        inside = all(kinds.get(name) == AxisType.Explicit for name in names)
        return context if inside else self.layout.mesh.abstract_mesh

    def _explicit_mesh(self) -> AbstractMesh:
        kinds = dict.fromkeys(self.layout.mesh.axis_names, AxisType.Explicit)
        return self._outer_mesh().update_axis_types(kinds)

    def _on_users_axes(self, tree: Any) -> Any:
        """Arrays on the user's kind of axes, sharded as their types show."""
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
        outer = self._outer_mesh()
        if outer != self._explicit_mesh():
            with jax.sharding.use_abstract_mesh(outer):
                tree = jax.reshard(tree, PartitionSpec())  # types say nothing again
        elif AxisType.Auto in self.layout.mesh.axis_types:
            return tree  # in `on_mesh` or a user's own explicit_axes
        # The only way to name the devices that works on both kinds of axes.
        shardings = jax.tree.map(self._sharding, specs)
        return jax.jit(lambda x: x, out_shardings=shardings)(tree)


def abstract_state(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> optax.OptState:
    """Shapes, dtypes and shardings of an optimizer's state, to restore a checkpoint.

    Global shapes do not depend on the layout, so one layout can restore what another
    saved: give these `jax.ShapeDtypeStruct`s to orbax as the target.

    Args:
      tx: the optimizer; on a mesh, `on_mesh(...)`, or a chain around it.
      params: the parameters, or their shapes.
      mesh: the mesh; None for one device.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> tx = jm.nanochat(0.02, matrices={"*": "muon"})
      >>> tx = jm.on_mesh(tx, mesh, divide="data")
      >>> target = jm.abstract_state(tx, params, mesh)  # for orbax
      >>> all(x.sharding.mesh == mesh for x in jax.tree.leaves(target))
      True
    """
    if mesh is None:
        alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone),
            jax.eval_shape(tx.init, params),
        )
    specs = jax.tree.map(array_types.own_sharding, params)
    return OnMesh(tx, Layout(mesh, specs)).abstract(params)[1]


def _is_jitted() -> bool:
    """True under jit, where every new array is a tracer; not in an eager `jax.grad`."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _reshard(tree: Any, specs: Sequence[PartitionSpec], dtype: Any = None) -> Any:
    """Reshard arrays to these specs; those that change are sent in `dtype`."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = []
    for x, spec in zip(leaves, specs, strict=True):
        old = jax.typeof(x).sharding
        before, after = (dividing(s, old.mesh.shape) for s in (old.spec, spec))
        # Without a dtype no cast: it would strip a weak type, on the wrong axes.
        travels = dtype is not None and before != after
        sent = x.astype(wire_dtype(x.dtype, dtype)) if travels else x
        moved.append(jax.reshard(sent, spec).astype(x.dtype))
    return jax.tree.unflatten(treedef, moved)


def _explain(error: Exception) -> None:
    """Say what to write instead, for two things that JAX rejects on Explicit axes."""
    if type(error).__name__ == "ShardingTypeError":
        frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        calls = [x.co_qualname for x in frames if x.co_name in ("init_fn", "update_fn")]
        name = calls[-1].partition(".")[0] if calls else "a transform"
        raise ValueError(
            f"{name} inside on_mesh does something with sharded arrays that JAX "
            f"refuses on Explicit axes ({error}); expected it wrapped, as "
            f"jax_muon.on_auto_axes({name}(...)): XLA then chooses the sharding"
        ) from error
    if "should match the aval mesh" in str(error):
        raise ValueError(
            "the optimizer inside on_mesh uses an array that is no argument of its "
            f"update ({error}); if it is a rate of optax.inject_hyperparams, expected "
            "it inside: on_mesh(optax.inject_hyperparams(...)(...), mesh)"
        ) from error
