"""AdamW in at least float32, for the parameters that are not matrices."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax

from jax_muon.base import checks, dtypes, trees
from jax_muon.transforms.weight_decay import Mask, add_decayed_weights


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    *,
    mask: Mask = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""`optax.adamw`, computed and kept in at least float32.

    With gradient :math:`G`, moments :math:`M` and :math:`V`, and :math:`t` steps done,

    .. math::
       M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
       V \leftarrow \beta_2 V + (1 - \beta_2) G^2

       W \leftarrow W - \eta \left(\frac{M / (1 - \beta_1^t)}
       {\sqrt{V / (1 - \beta_2^t)} + \epsilon} + \lambda W\right)

    For float32 parameters it equals `optax.adamw`, bit for bit. There,
    moments have the dtype of the parameters: in float16 the default eps is 0, and a
    gradient of 0, as of a row that the batch does not look up, makes 0 / 0. Updates
    have the dtype of the gradients, or of the parameters if that is wider.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b1: :math:`\beta_1`, decay of the first moment.
      b2: :math:`\beta_2`, decay of the second moment.
      eps: :math:`\epsilon`, added to the root.
      weight_decay: :math:`\lambda`, times the learning rate; a number or a schedule.
      mask: which parameters decay: a tree of booleans with the paths of the parameters
        or of modules, or a function of the parameters that returns one; None for all.
      mu_dtype: dtype of the first moment; None for float32, or a wider dtype of the
        parameters.

    Raises:
      ValueError: at update, params=None, unless weight_decay is 0.

    Examples:
      >>> params = jnp.ones(2, "float16")
      >>> tx = jm.adamw(0.5, weight_decay=0.0)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([0, -3], "float16"), state, params)
      >>> updates.tolist(), updates.dtype, state[0].nu.dtype
      ([-0.0, 0.5], dtype('float16'), dtype('float32'))

    References:
      Decoupled weight decay, arXiv 1711.05101. nanochat of January 2026 uses b1=0.8,
      b2=0.95, eps=1e-10, weight_decay=0.0; examples/nanochat_schedules.py has July.
    """
    tx = optax.chain(
        optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(checks.as_rate("learning_rate", learning_rate)),
    )

    def init_fn(params: optax.Params) -> optax.OptState:
        return tx.init(jax.tree.map(dtypes.wide, params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        updates = trees.as_wide_as_params(updates, params)
        wide_updates, wide_params = jax.tree.map(dtypes.wide, (updates, params))
        new, state = tx.update(wide_updates, state, wide_params)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates), state

    return optax.GradientTransformation(init_fn, update_fn)


def warn_of_float16(label: str, state: optax.OptState) -> None:
    """Warn of a transform that keeps float16: mostly AdamW, NaN after a zero gradient.

    `label` names it, and `state` is its own.
    """
    for path, x in trees.leaves_with_paths(state):
        if x.dtype == jnp.float16:
            warnings.warn(
                f"the transform for {label!r} keeps {path!r} in float16, where AdamW's "
                "eps of 1e-8 is 0 and a gradient of 0 gives NaN; use jax_muon.adamw, "
                "or jax_muon.keep_residual(tx) around the optimizer",
                stacklevel=4,
            )
            return
