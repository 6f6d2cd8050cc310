"""Two wrappers for transforms, where types do not show how arrays are sharded."""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from jax_muon.base import checks
from jax_muon.base.array_types import arrays_and_others, is_explicit, setting


def on_auto_axes(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on Auto mesh axes, inside `on_mesh` or on Explicit axes.

    `on_mesh` makes all axes Explicit. There JAX rejects operations whose result it can
    give no sharding, such as dot products over sharded axes in `optax.contrib.prodigy`
    or selections in `optax.adaptive_grad_clip`. On Auto axes XLA chooses the sharding
    of intermediate arrays. Updates and state are sharded as they come in, and equal a
    single device's, to rounding. On one device it is `tx`.

    Args:
      tx: an optax transform, such as a group of `optax.multi_transform` or a member of
        a chain. Not one that orthogonalizes: `orthogonalize` needs the types.

    Examples:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> adaptive = jm.on_auto_axes(optax.adaptive_grad_clip(0.1))
      >>> muon = jm.nanochat(0.02, matrices={"mlp": "muon"})
      >>> tx = jm.on_mesh(optax.chain(adaptive, muon), mesh, divide="data")
      >>> params = {"mlp": {"up": jnp.ones((64, 256))}}
      >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
      >>> updates["mlp"]["up"].shape
      (64, 256)
    """
    tx = checks.as_transform("tx", tx)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        arrays, others = arrays_and_others(extra_args)

        def update(*args: PyTree) -> tuple[optax.Updates, optax.OptState]:
            updates, state, params, arrays = args
            return tx.update(updates, state, params, **others, **arrays)

        if any(map(is_explicit, jax.tree.leaves(updates))):
            specs = jax.tree.map(
                lambda x: jax.typeof(x).sharding.spec, (updates, state)
            )
            update = jax.sharding.auto_axes(update, out_sharding=specs)
        return update(updates, state, params, arrays)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def on_replicas(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer where every device has a replica of the model.

    Inside `jax.pmap`, and inside `jax.shard_map` with `check_vma=False`, types do not
    show whether an array is a whole parameter or a shard, so `orthogonalize` and
    `skip_nonfinite` refuse to run there. This wrapper declares that all are whole.
    Replicas stay equal only if they get equal gradients, for example from
    `jax.lax.pmean`. Every device orthogonalizes every matrix.

    Args:
      tx: an optax transform, such as a recipe or a chain around one.

    Examples:
      >>> muon = jm.muon(0.5, polar=jm.ExactPolar(), matrices={"mlp": "muon"})
      >>> tx = jm.on_replicas(muon)
      >>> def step(params, grads):
      ...     grads = jax.lax.pmean(grads, "devices")
      ...     return tx.update(grads, tx.init(params), params)[0]
      >>> params = {"mlp": jnp.stack(jax.device_count() * [jnp.eye(2)])}
      >>> updates = jax.pmap(step, axis_name="devices")(params, params)
      >>> float(updates["mlp"][0, 1, 1])
      -0.5
    """
    tx = checks.as_transform("tx", tx)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        with setting(trusted=True):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)
