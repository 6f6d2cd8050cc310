"""Optax pieces that work element by element: decay, and factors by path.

They see no matrices and work with any sharding. Every rate is a float, an array or an
optax schedule.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import checks, dtypes, paths


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale parameters by factors of their own: a learning rate for each pattern.

    Args:
      factors: path pattern to factor; see `read` for patterns. The first that matches
        counts. A parameter that none matches is left alone.

    Returns:
      An `optax.GradientTransformation` without state. Updates keep their dtype.

    Raises:
      ValueError: a factor that is not a finite number of at least 0; at init, with all
        paths, a pattern that matches no parameter.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> updates = {"embed": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = jm.scale_by_path({"embed*": 16.0})
      >>> tx.update(updates, tx.init(updates))[0]["embed"].tolist()
      [16.0, 16.0]
    """
    check_factors("factors", factors)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        check_factors_match(factors, params)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params

        def scale(key_path: tuple[Any, ...], u: Array) -> Array:
            factor = factor_of(factors, paths.path_string(key_path))
            return u if factor == 1 else (dtypes.wide(u) * factor).astype(u.dtype)

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(init_fn, update_fn)


class AddCautiousDecayedWeightsState(NamedTuple):
    """State of `add_cautious_decayed_weights`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    r"""Add decayed weights where the step moves the weight towards zero anyway.

    The update :math:`U` becomes :math:`U + \lambda W [U W \ge 0]`, elementwise. It goes
    before the learning rate, like `optax.add_decayed_weights`.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule of it.
      mask: which parameters decay, as in `optax.masked`; None for all.

    Returns:
      An `optax.GradientTransformation` that needs the parameters at update. Updates
      that are narrower than their parameters get the parameters' dtype.

    Raises:
      ValueError: weight_decay below 0; at update, params=None.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> params, updates = jnp.array([2.0, -2.0]), jnp.array([1.0, 1.0])
      >>> tx = jm.add_cautious_decayed_weights(0.5)
      >>> tx.update(updates, tx.init(params), params)[0].tolist()
      [2.0, 1.0]

    References:
      Cautious weight decay, arXiv 2510.12402.
    """
    weight_decay = checks.rate("weight_decay", weight_decay)
    check_mask("mask", mask)

    def init_fn(params: optax.Params) -> AddCautiousDecayedWeightsState:
        del params
        return AddCautiousDecayedWeightsState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AddCautiousDecayedWeightsState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, AddCautiousDecayedWeightsState]:
        checks.params("add_cautious_decayed_weights", params)
        now = rate_at(weight_decay, state.count)

        def decay(u: Array, w: Array) -> Array:
            wide_u = dtypes.wide(u)
            wide_w = w.astype(wide_u.dtype)
            decayed = dtypes.in_dtype_of(wide_w, now) * wide_w
            decayed = jnp.where(wide_u * wide_w >= 0, decayed, 0)
            return (wide_u + decayed).astype(u.dtype)

        updates = dtypes.as_wide_as_params(updates, params)
        count = optax.safe_increment(state.count)
        return (
            jax.tree.map(decay, updates, params),
            AddCautiousDecayedWeightsState(count),
        )

    tx = optax.GradientTransformation(init_fn, update_fn)
    return tx if mask is None else optax.masked(tx, mask)


def check_mask(name: str, mask: Any) -> None:
    """Raise a ValueError for strings in a mask, which would count as True."""
    for path, leaf in [] if paths.is_function(mask) else paths.leaves_with_paths(mask):
        checks.flag(f"{name} at {path!r}" if path else name, leaf)


def check_factors(name: str, factors: Any) -> None:
    """Raise a ValueError unless path patterns map to factors of a learning rate."""
    checks.mapping(
        name,
        factors,
        "a mapping of path patterns to factors",
        lambda where, x: checks.number(where, x, "of at least 0", traced=False),
    )


def check_factors_match(factors: Mapping[str, float], params: optax.Params) -> None:
    """Raise a ValueError, with all paths, for a pattern that matches none."""
    names = [path for path, _ in paths.leaves_with_paths(params)]
    paths.check_patterns_match("factors of the learning rate", factors, names)


def factor_of(factors: Mapping[str, float], path: str) -> float:
    """The factor of the first pattern that matches a path, or 1."""
    return next((f for p, f in factors.items() if paths.matches(p, path)), 1.0)


def rate_at(rate: optax.ScalarOrSchedule, count: Array) -> Any:
    """The value of a number or a schedule at this step."""
    return rate(count) if callable(rate) else rate
