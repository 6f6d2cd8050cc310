"""Skip steps that are not finite: inside shard_map, too, on all devices or on none."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.base import checks, trees
from jax_muon.base.array_types import check_same_everywhere


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    skipped: Array  # shape=(), dtype=int32
    inner_state: optax.OptState


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Skip a step whose gradients, updates or new state are not all finite.

    A skipped step changes neither parameters nor state, and is counted in `skipped` of
    the state. The new state matters, since a finite gradient of 2e19 makes AdamW's
    second moment infinite for good; elements that were not finite before do not count.

    Args:
      inner: the optimizer, such as a recipe.

    Raises:
      ValueError: at update, inside shard_map, gradients that differ between devices.

    Examples:
      >>> params = jnp.ones(2)
      >>> tx = jm.skip_nonfinite(optax.sgd(0.5))
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), state, params)
      >>> updates.tolist(), int(state.skipped)
      ([0.0, 0.0], 1)
    """
    inner = checks.as_transform("inner", inner)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros([], jnp.int32), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: SkipNonfiniteState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        check_same_everywhere("skip_nonfinite", trees.leaves_with_paths(updates))
        new_updates, new_inner = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        # `optax.contrib.reduce_on_plateau` begins with an infinite best value.
        states = jax.tree.map(
            lambda new, old: _finite(new) | ~_finite(old), new_inner, state.inner_state
        )
        steps = jax.tree.map(_finite, (updates, new_updates))
        finite = [jnp.all(x) for x in jax.tree.leaves((steps, states))]
        good = functools.reduce(jnp.logical_and, finite, jnp.asarray(True))
        skipped = jnp.where(good, state.skipped, optax.safe_increment(state.skipped))
        kept = optax.tree.where(good, new_inner, state.inner_state)
        zeros = optax.tree.zeros_like(new_updates)
        new_updates = optax.tree.where(good, new_updates, zeros)
        return new_updates, SkipNonfiniteState(skipped, kept)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _finite(x: Array) -> Array:
    """Which elements are finite: all of them unless x is floating-point."""
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jnp.isfinite(x) if inexact else jnp.asarray(True)
