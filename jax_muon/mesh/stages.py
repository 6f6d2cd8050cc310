"""Run an optimizer on pipeline stages: one program for each mesh."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jax_muon import checks, jaxprs, notes, paths
from jax_muon.mesh.array_types import own_sharding
from jax_muon.mesh.on_mesh import on_mesh
from jax_muon.mesh.specs import AxisName

# Transforms that need the gradients of all stages at once, and optax's functions of
# whole trees, which others call.
_OF_ALL = (
    *("clip_by_global_norm", "normalize_by_update_norm", "apply_if_finite"),
    *("skip_nonfinite", "tree_norm", "tree_sum", "tree_vdot"),
)


def on_stages(
    tx: optax.GradientTransformation, divide: AxisName = (), *, donate: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on parameters of several meshes, such as pipeline stages.

    No JAX program takes arrays of disjoint meshes, so each mesh runs a program of
    `on_mesh(tx, mesh, specs, divide)`, with its parameters' mesh and specs. The
    programs run at the same time. Updates equal a single device's, to rounding.

    With several processes, each passes only the parameters and gradients on its own
    devices, and `optax.MaskedNode()` for all others.

    Args:
      tx: an optax transform, with `matrices=jax_muon.read(...)` of the whole model: a
        stage alone may be read differently. No part of it may need all gradients at
        once, as a global norm does: clip gradients before.
      divide: mesh axes over which gradients and state are sharded further, in every
        mesh; see `on_mesh`.
      donate: whether the update overwrites the state that it is given.

    Returns:
      A transform for calls outside of jit. Its state is a tuple with a state for each
      mesh, in the order in which the parameters name them. To restore one, give orbax
      the shapes and shardings of `init`'s arrays.

    Raises:
      ValueError: `tx` is not an optax transform; at init and update, with the path, a
        parameter that is not on a mesh, or that is traced; one that its stage reads
        otherwise than the whole model; matrices of several stages that are joined; a
        transform that needs the gradients of all stages; and what `on_mesh` raises.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jax_muon as jm
      >>> whole = {"0": {"up": jnp.eye(8)}, "1": {"up": jnp.eye(8)}}
      >>> devices = np.array(jax.devices()).reshape(2, -1)
      >>> spec = jax.sharding.PartitionSpec("data")
      >>> params = {
      ...     name: jax.device_put(
      ...         layer, jax.sharding.NamedSharding(Mesh(stage, ("data",)), spec)
      ...     )
      ...     for stage, (name, layer) in zip(devices, whole.items())
      ... }
      >>> tx = on_stages(jm.nanochat(matrices=jm.read(whole, rules={"*": "muon"})))
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates["1"]["up"].sharding.device_set == set(devices[1].tolist())
      True
    """
    tx = checks.as_transform("tx", tx)
    checks.flag("donate", donate)

    checked: set[Any] = set()

    @functools.cache
    def program(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]) -> Any:
        of_stage = on_mesh(tx, mesh, dict(specs), divide)
        update = jax.jit(of_stage.update, donate_argnums=(1,) if donate else ())
        return of_stage.init, update

    def init_fn(params: optax.Params) -> tuple[Any, ...]:
        _, whole = notes.traced(tx.init, _shapes(params))
        states = []
        for mesh, specs in _stages(params).items():
            part = _only(specs, params)
            _check_reading(notes.traced(tx.init, _shapes(part))[1], whole["parameters"])
            states.append(program(mesh, tuple(specs.items()))[0](part))
        return tuple(states)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        stages, states = _stages(updates if params is None else params), []
        results: dict[str, Any] = {}
        for (mesh, specs), old in zip(stages.items(), state, strict=True):
            key = mesh, tuple(specs.items())
            _, update = program(*key)
            args = _only(specs, updates), old, _only(specs, params)
            if key not in checked:
                _check_alone(update.trace(*args, **extra_args).jaxpr.jaxpr)
                checked.add(key)
            new, after = update(*args, **extra_args)
            results |= dict(paths.leaves_with_paths(new))
            states.append(after)
        leaves = [results[path] for path, _ in paths.leaves_with_paths(updates)]
        structure: Any = jax.tree.structure(updates)
        return jax.tree.unflatten(structure, leaves), tuple(states)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _shapes(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _stages(tree: Any) -> dict[Mesh, dict[str, PartitionSpec]]:
    """The meshes of a tree, in its order, with the specs of their arrays by path."""
    stages: dict[Mesh, dict[str, PartitionSpec]] = {}
    for path, x in paths.leaves_with_paths(tree):
        sharding = None if isinstance(x, jax.core.Tracer) else own_sharding(x)
        if sharding is None:
            raise ValueError(
                f"on_stages: parameter {path!r} has no mesh; expected calls outside of "
                "jit, with arrays placed by a jax.sharding.NamedSharding"
            )
        assert isinstance(sharding.mesh, Mesh)  # of a concrete array
        stages.setdefault(sharding.mesh, {})[path] = sharding.spec
    return stages


def _only(kept: Mapping[str, Any], tree: Any) -> Any:
    """The tree with the leaves of one stage."""
    return jax.tree_util.tree_map_with_path(
        lambda key_path, x: (
            x if paths.path_string(key_path) in kept else optax.MaskedNode()
        ),
        tree,
    )


def _check_reading(heard: notes.Notes, whole: Mapping[str, Any]) -> None:
    """Raise a ValueError if a stage alone means other matrices than the whole."""
    for path, parameter in heard["parameters"].items():
        if path in whole and not parameter.is_read_like(whole[path]):
            raise ValueError(
                f"on_stages: parameter {path!r} is read as {parameter.label!r} in its "
                f"stage ({parameter.reason}), and as {whole[path].label!r} in the "
                f"whole model ({whole[path].reason}); expected "
                "matrices=jax_muon.read(params, loss_fn, batch)"
            )
    for matrices in heard["matrices"].values():
        for join in matrices.joins or ():
            if 0 < len({*join.paths} & {*matrices}) < len(join.paths):
                raise ValueError(
                    f"on_stages: {', '.join(join.paths)} are joined, and not of one "
                    "stage; expected joins within stages"
                )


def _check_alone(program: Any) -> None:
    """Raise a ValueError if an update needs the gradients of other stages."""
    names = {function.partition(".")[0] for function in jaxprs.functions(program)}
    for name in _OF_ALL:
        if name in names:
            raise ValueError(
                f"on_stages: {name} would see one stage's gradients at a time; "
                "expected it outside, on all gradients"
            )
