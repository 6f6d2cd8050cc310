"""Momentum, in the parameters' dtype or in fewer bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.checks import (
    check_alike,
    check_arrays,
    check_choice,
    check_flag,
    check_gradients,
    check_state,
    rate,
)
from jax_muon.dtypes import as_wide_as_params, in_dtype_of, wide
from jax_muon.elementwise import between, limited, rate_at
from jax_muon.notes import is_listening, note
from jax_muon.reading import paths
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
    accumulation: str = "ema",
    lookahead: bool = True,
    bias_correction: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Momentum with Nesterov's look-ahead.

    With gradient :math:`G`, momentum :math:`M` and decay :math:`\mu`, "ema" is
    :math:`M \leftarrow M + (1 - \mu)(G - M)` and gives :math:`G + \mu (M - G)`;
    "sum" is :math:`M \leftarrow \mu M + G` and gives :math:`G + \mu M`.

    The momentum may be stored in fewer bits than it is computed with. What a step gives
    comes from the momentum before it is rounded.

    Args:
      decay: momentum in [0, 1), or a schedule of it.
      accumulation: "ema" (nanochat, torch.optim.Muon) or "sum" (SGD).
      lookahead: False gives M itself: plain momentum.
      bias_correction: in step t, :math:`(1 - \mu) G / (1 - \mu^t) + \mu M / (1 -
        \mu^{t+1})` instead, as in `optax.contrib.muon`; without look-ahead :math:`M /
        (1 - \mu^t)`. It changes the direction of the first hundred steps or so.
      accumulator_dtype: of M. None: the dtype of the parameters, rounded to nearest;
        "float32" or "float64"; "bfloat16", rounded stochastically; "int8", rounded
        stochastically to 255 even steps, with one scale, a float32, for each row, which
        is the last axis of a parameter as it is held.

    Returns:
      An `optax.GradientTransformation` for arrays of any shape. Its updates have the
      dtype of the gradients, or that of the parameters where these are given at update
      and are wider. What a dtype cannot hold, such as a sum of gradients of 2e38,
      becomes its largest number.

    Raises:
      ValueError: decay outside [0, 1), an unknown accumulation, bias correction of a
        sum, any other dtype; at update, with the path, gradients of other shapes than
        M, and a state of another transform.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; momentum of Muon
      in eight bits: arXiv 2509.23106; Dozat, Incorporating Nesterov momentum into Adam,
      2016, for the bias correction.
    """
    decay = rate("decay", decay, "in [0, 1)")
    check_choice("accumulation", accumulation, ("ema", "sum"))
    check_flag("lookahead", lookahead)
    check_flag("bias_correction", bias_correction)
    if bias_correction and accumulation == "sum":
        raise ValueError(
            "bias_correction=True with accumulation='sum'; expected 'ema', of which a "
            "new run underestimates the average"
        )
    kept = storage("accumulator_dtype (momentum_dtype of a recipe)", accumulator_dtype)
    kind = QuantizedNesterovState if isinstance(kept, Quantized) else NesterovState

    def init_fn(params: optax.Params) -> Any:
        check_arrays("params", params)
        if is_listening():
            own = [path for path, _ in paths.leaves_with_paths(params)]
            note("momentum", paths=own, accumulation=accumulation, decay=decay)
        return kind(jnp.zeros([], jnp.int32), *kept.zeros(params))

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, Any]:
        check_gradients(updates, params)
        check_state("nesterov", state, kind)
        check_alike("gradient", updates, "momentum", state.mu)
        updates = as_wide_as_params(updates, params)
        count, *trees = state
        mu_t = rate_at(decay, count)

        def accumulate(g: Array, m: Array) -> Array:
            part = in_dtype_of(m, mu_t)
            if accumulation == "ema":
                return between(m, wide(g), 1 - part)
            return part * m + wide(g)

        def look_ahead(g: Array, m: Array) -> Array:
            part = in_dtype_of(m, mu_t)
            if bias_correction:
                now, then = (_weight(mu_t, count + steps, m.dtype) for steps in (1, 2))
                if not lookahead:
                    return m / now
                return (1 - part) / now * wide(g) + part / then * m
            if not lookahead:
                return m
            if accumulation == "ema":
                return between(wide(g), m, part)
            return wide(g) + part * m

        def held(x: Array, dtype: Any, g: Array) -> Array:
            # What lies between two numbers of a dtype is one of that.
            average = accumulation == "ema" and not bias_correction
            return x if average and x.dtype == dtype else limited(x, dtype, g)

        given, stored = [], []
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        for (path, g), old in zip(
            paths.leaves_with_paths(updates), columns, strict=True
        ):
            m = held(accumulate(g, kept.read(*old)), old[0].dtype, g)
            given.append(held(look_ahead(g, m), g.dtype, g).astype(g.dtype))
            stored.append(kept.store(m, old, path, count))
        trees = [
            jax.tree.unflatten(jax.tree.structure(tree), [parts[i] for parts in stored])
            for i, tree in enumerate(trees)
        ]
        updates = jax.tree.unflatten(jax.tree.structure(updates), given)
        return updates, kind(optax.safe_increment(count), *trees)

    return optax.GradientTransformation(init_fn, update_fn)


def _weight(decay: Any, steps: Array, dtype: Any) -> Array:
    """The sum of the weights in an average, started at zero, of so many steps."""
    return 1 - jnp.asarray(decay, dtype) ** steps.astype(dtype)
