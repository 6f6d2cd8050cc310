"""Momentum, in the parameters' dtype or in fewer bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import checks, dtypes
from jax_muon.accumulators import Quantized, accumulator
from jax_muon.leaves import rate_at, step_leaves


class NesterovState(NamedTuple):
    """State of `nesterov`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates


class QuantizedNesterovState(NamedTuple):
    """State of `nesterov` with `accumulator_dtype="int8"`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates  # int8
    scale: optax.Updates  # parameters' shape with 1 in the last axis, at least float32


def nesterov(
    decay: optax.ScalarOrSchedule = 0.95,
    *,
    lookahead: bool = True,
    bias_correction: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""An exponential average of the gradients, with Nesterov's look-ahead.

    With gradient :math:`G`, momentum :math:`M` and decay :math:`\mu`,

    .. math::
       M \leftarrow M + (1 - \mu)(G - M), \qquad U = M + (1 - \mu)(G - M)

    :math:`U`, which is :math:`G + \mu (M - G)`, moves the average a second time towards
    the same gradient.

    Muon is often written with a sum, :math:`M \leftarrow \mu M + G`. At constant
    momentum the sum is the average times :math:`1 / (1 - \mu)`, and a polar factor
    does not depend on that. Under a schedule of the momentum the two differ: use
    `optax.trace(mu, nesterov=True)` for the sum.

    Args:
      decay: momentum in [0, 1), or a schedule of it.
      lookahead: False returns M itself: plain momentum.
      bias_correction: return :math:`(1 - \mu) G / (1 - \mu^t) + \mu M / (1 -
        \mu^{t+1})` in step t, as in `optax.contrib.muon`, or :math:`M / (1 - \mu^t)`
        without look-ahead. It changes the direction of about the first hundred steps.
      accumulator_dtype: dtype of M between steps. M is computed in at least float32,
        and the updates come from M before it is rounded. None: the dtype of the
        parameters, rounded to nearest; "float32" or "float64"; "bfloat16", rounded
        stochastically; "int8", rounded stochastically to 255 even steps, with one
        float32 scale per row (the last axis of a parameter).

    Returns:
      An `optax.GradientTransformation` for arrays of any shape. Its updates have the
      dtype of the gradients, or of the parameters if update is given wider ones.

    Raises:
      ValueError: decay outside [0, 1), or any other dtype; at update, with the path, a
        gradient whose momentum is missing or would be broadcast.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> grads = jnp.array([1.0, -4.0])
      >>> tx = jm.nesterov(0.5)
      >>> tx.update(grads, tx.init(grads))[0].tolist()
      [0.75, -3.0]

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; momentum of Muon
      in eight bits: arXiv 2509.23106; Dozat, Incorporating Nesterov momentum into Adam,
      2016, for the bias correction.
    """
    decay = checks.rate("decay (momentum of a recipe)", decay, "in [0, 1)")
    checks.flag("lookahead", lookahead)
    checks.flag("bias_correction", bias_correction)
    name = "accumulator_dtype (momentum_dtype of a recipe)"
    stored = accumulator(name, accumulator_dtype)
    kind = QuantizedNesterovState if isinstance(stored, Quantized) else NesterovState

    def init_fn(params: optax.Params) -> Any:
        return kind(jnp.zeros([], jnp.int32), *stored.zeros(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, Any]:
        count, *trees = state
        mu = rate_at(decay, count)

        def step(path: str, g: Array, *old: Array) -> tuple[Array, ...]:
            wide_g, m = dtypes.wide(g), stored.read(*old)
            part = dtypes.in_dtype_of(m, mu)
            m = m + (1 - part) * (wide_g - m)
            if not bias_correction:
                u = m + (1 - part) * (wide_g - m) if lookahead else m
            else:
                # An average that starts at zero has weights that add up to these.
                now, next_step = (
                    1 - part ** dtypes.in_dtype_of(m, count + i) for i in (1, 2)
                )
                u = m / now
                if lookahead:
                    u = (1 - part) / now * wide_g + part / next_step * m
            return u.astype(g.dtype), *stored.store(m, old, path, count)

        updates = dtypes.as_wide_as_params(updates, params)
        updates, *trees = step_leaves(step, updates, *trees)
        return updates, kind(optax.safe_increment(count), *trees)

    return optax.GradientTransformation(init_fn, update_fn)
