"""Weight decay where the step moves a weight towards zero anyway."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.base import checks, dtypes, trees


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformation:
    r"""Add decayed weights where the step moves the weight towards zero anyway.

    The update :math:`U` becomes :math:`U + \lambda W [U W \ge 0]`, elementwise (arXiv
    2510.12402). It goes before the learning rate, like `optax.add_decayed_weights`.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule of it.

    Raises:
      ValueError: at update, params=None, unless weight_decay is 0.

    Examples:
      >>> params, updates = jnp.array([2.0, -2.0]), jnp.array([1.0, 1.0])
      >>> tx = jm.add_cautious_decayed_weights(0.5)
      >>> tx.update(updates, tx.init(params), params)[0].tolist()
      [2.0, 1.0]
    """
    weight_decay = checks.rate("weight_decay", weight_decay)

    def init_fn(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: optax.ScaleByScheduleState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        updates = trees.as_wide_as_params(updates, params)
        new_state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        if isinstance(weight_decay, float) and weight_decay == 0:
            return updates, new_state
        checks.params("weight_decay, unless it is 0.0,", params)
        now = checks.rate_at(weight_decay, state.count)

        def decay(u: Array, w: Array) -> Array:
            wide_u = dtypes.wide(u)
            wide_w = w.astype(wide_u.dtype)
            decayed = dtypes.in_dtype_of(wide_w, now) * wide_w
            decayed = jnp.where(wide_u * wide_w >= 0, decayed, 0)
            return (wide_u + decayed).astype(u.dtype)

        return jax.tree.map(decay, updates, params), new_state

    return optax.GradientTransformation(init_fn, update_fn)
