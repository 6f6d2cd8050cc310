"""Momentum, in the parameters' dtype or in fewer bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import paths
from jax_muon.checks import (
    check_alike,
    check_arrays,
    check_flag,
    check_gradients,
    check_state,
    rate,
)
from jax_muon.dtypes import as_wide_as_params, in_dtype_of, wide
from jax_muon.elementwise import rate_at
from jax_muon.storage import Quantized, storage


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

    The look-ahead :math:`U`, which is :math:`G + \mu (M - G)`, takes the step of the
    average once more.

    Muon is often written with a sum, :math:`M \leftarrow \mu M + G`. At constant
    momentum the sum is the average times :math:`1 / (1 - \mu)`, and a polar factor
    does not depend on that. Under a schedule of the momentum the two differ: use
    `optax.trace(mu, nesterov=True)` for the sum.

    Args:
      decay: momentum in [0, 1), or a schedule of it.
      lookahead: False gives M itself: plain momentum.
      bias_correction: in step t, :math:`(1 - \mu) G / (1 - \mu^t) + \mu M / (1 -
        \mu^{t+1})` instead, as in `optax.contrib.muon`; without look-ahead :math:`M /
        (1 - \mu^t)`. It changes the direction of the first hundred steps or so.
      accumulator_dtype: of M between steps; it is computed in at least float32, and the
        updates of a step come from M before it is rounded. None: the dtype of the
        parameters, rounded to nearest; "float32" or "float64"; "bfloat16", rounded
        stochastically; "int8", rounded stochastically to 255 even steps, with one
        float32 scale for each row, the last axis of a parameter.

    Returns:
      An `optax.GradientTransformation` for arrays of any shape. Its updates have the
      dtype of the gradients, or that of the parameters if these are passed to update
      and are wider.

    Raises:
      ValueError: decay outside [0, 1), or any other dtype; at update, with the path,
        gradients whose shapes differ from M's, and a state of another transform.

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
    decay = rate("decay", decay, "in [0, 1)")
    check_flag("lookahead", lookahead)
    check_flag("bias_correction", bias_correction)
    kept = storage("accumulator_dtype (momentum_dtype of a recipe)", accumulator_dtype)
    kind = QuantizedNesterovState if isinstance(kept, Quantized) else NesterovState

    def init_fn(params: optax.Params) -> Any:
        check_arrays("params", params)
        return kind(jnp.zeros([], jnp.int32), *kept.zeros(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, Any]:
        check_gradients(updates, params)
        check_state("nesterov", state, kind)
        check_alike("gradient", updates, "momentum", state.mu)
        updates = as_wide_as_params(updates, params)
        count, *trees = state
        mu = rate_at(decay, count)

        def step(g: Array, m: Array) -> tuple[Array, Array]:
            """The update and the new momentum, both in at least float32."""
            part = in_dtype_of(m, mu)
            m = m + (1 - part) * (g - m)
            if not bias_correction:
                return (m + (1 - part) * (g - m) if lookahead else m), m
            # An average that starts at zero has weights that add up to these.
            now, next_step = (1 - part ** in_dtype_of(m, count + i) for i in (1, 2))
            if not lookahead:
                return m / now, m
            return (1 - part) / now * g + part / next_step * m, m

        given, stored = [], []
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        for (path, g), old in zip(
            paths.leaves_with_paths(updates), columns, strict=True
        ):
            update, m = step(wide(g), kept.read(*old))
            given.append(update.astype(g.dtype))
            stored.append(kept.store(m, old, path, count))
        new = [
            jax.tree.unflatten(
                jax.tree.structure(tree), [arrays[i] for arrays in stored]
            )
            for i, tree in enumerate(trees)
        ]
        updates = jax.tree.unflatten(jax.tree.structure(updates), given)
        return updates, kind(optax.safe_increment(count), *new)

    return optax.GradientTransformation(init_fn, update_fn)
