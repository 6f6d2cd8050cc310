"""A wrapper for transforms, where types do not show how arrays are sharded."""

from typing import Any

import optax

from jax_muon.base import checks
from jax_muon.base.array_types import in_mesh_context


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
        with in_mesh_context(replicas=True):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)
