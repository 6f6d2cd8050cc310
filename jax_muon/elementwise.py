"""Optax pieces that work element by element: decay, factors by path.

Pieces that are given the parameters at update widen gradients that are narrower to the
parameters' dtype, and otherwise keep the dtype of the updates. Every rate takes a
float, an array or an optax schedule. They see no matrices, and work however parameters
are divided.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import paths
from jax_muon.checks import (
    check_arrays,
    check_flag,
    check_gradients,
    check_mapping,
    check_params,
    check_state,
    number,
    rate,
)
from jax_muon.dtypes import as_wide_as_params, in_dtype_of, wide


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale parameters by factors of their own: a learning rate for each pattern.

    Args:
      factors: path pattern to factor; see `read` for patterns. The first that
        matches counts, and a parameter that none matches is left alone.

    Returns:
      An `optax.GradientTransformation` without state.

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
    found = PathFactors(factors)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        check_arrays("params", params)
        found.check(params)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        check_gradients(updates, params)

        def scale(key_path: tuple[Any, ...], u: Array) -> Array:
            factor = found.of(paths.path_string(key_path))
            return u if factor == 1 else (wide(u) * factor).astype(u.dtype)

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(init_fn, update_fn)


class PathFactors:
    """Factors of the learning rate by path pattern, as `scale_by_path` takes them."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        """Take factors that `check_factors` has seen."""
        self._factors = factors

    def check(self, params: optax.Params) -> None:
        """Raise a ValueError, with all paths, for a pattern that matches none."""
        names = [path for path, _ in paths.leaves_with_paths(params)]
        paths.check_patterns_match("factors of the learning rate", self._factors, names)

    def of(self, path: str) -> float:
        """The factor of the first pattern that matches, or 1."""
        found = (f for p, f in self._factors.items() if paths.matches(p, path))
        return next(found, 1.0)


class AddCautiousDecayedWeightsState(NamedTuple):
    """State of `add_cautious_decayed_weights`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    r"""Add decayed weights where the step moves the weight towards zero anyway.

    The update :math:`U` becomes :math:`U + \lambda W [U W \ge 0]`, elementwise. Stands
    before the learning rate, as `optax.add_decayed_weights`.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule of it.
      mask: as in `optax.masked`: which parameters to decay; None for all.

    Returns:
      An `optax.GradientTransformation` that needs the parameters at update, and gives
      updates at least as wide as they are.

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
    weight_decay = rate("weight_decay", weight_decay)
    check_mask("mask", mask)

    def init_fn(params: optax.Params) -> AddCautiousDecayedWeightsState:
        del params
        return AddCautiousDecayedWeightsState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AddCautiousDecayedWeightsState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, AddCautiousDecayedWeightsState]:
        check_params("add_cautious_decayed_weights", params)
        check_state(
            "add_cautious_decayed_weights", state, AddCautiousDecayedWeightsState
        )
        check_gradients(updates, params)
        now = rate_at(weight_decay, state.count)

        def decay(u: Array, w: Array) -> Array:
            wide_u = wide(u)
            wide_w = w.astype(wide_u.dtype)
            decayed = in_dtype_of(wide_w, now) * wide_w
            decayed = jnp.where(wide_u * wide_w >= 0, decayed, 0)
            return (wide_u + decayed).astype(u.dtype)

        updates = jax.tree.map(decay, as_wide_as_params(updates, params), params)
        return updates, AddCautiousDecayedWeightsState(
            optax.safe_increment(state.count)
        )

    tx = optax.GradientTransformation(init_fn, update_fn)
    return tx if mask is None else optax.masked(tx, mask)


def check_factors(name: str, factors: Any) -> None:
    """Refuse what is not a mapping of path patterns to factors of a learning rate."""
    check_mapping(
        name,
        factors,
        "a mapping of path patterns to factors",
        lambda where, factor: number(where, factor, "of at least 0", traced=False),
    )


def check_mask(name: str, mask: Any) -> None:
    """Refuse what `optax.masked` cannot take: neither None, booleans nor a function."""
    for path, leaf in [] if paths.is_function(mask) else paths.leaves_with_paths(mask):
        check_flag(f"{name} at {path!r}" if path else name, leaf)


def rate_at(rate: optax.ScalarOrSchedule, count: Array) -> Any:
    """The value at this step of a float or a schedule."""
    return rate(count) if callable(rate) else rate
