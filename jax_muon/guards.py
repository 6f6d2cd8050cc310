"""Guards around an optimizer that decide once for all devices.

optax's own decide on what one device sees: inside shard_map, `optax.apply_if_finite`
skips on some devices and not on others, and `optax.clip_by_global_norm` takes the norm
of the local part, both without an error.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.checks import check_positive
from jax_muon.mesh.axes import AxisName, axis_names, varying_axes
from jax_muon.mesh.owned import is_owned
from jax_muon.polar.products import wide


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    skipped: Array  # shape=(), dtype=int32
    inner_state: optax.OptState


def skip_nonfinite(
    inner: optax.GradientTransformation, *, axis: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Skip a step whose gradients or updates are not all finite, on every device.

    A skipped step leaves parameters, momentum and counts as they were, and is counted.

    Args:
      inner: the optimizer, such as a recipe.
      axis: inside shard_map, the mesh axes over which gradients differ: if any device
        has a gradient that is not finite, all skip. None elsewhere.

    Returns:
      An `optax.GradientTransformation`; its state counts skipped steps in `skipped`.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros([], jnp.int32), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: SkipNonfiniteState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        new_updates, new_inner = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        finite = _all_finite((updates, new_updates))
        if axis is not None:
            names = tuple(n for n in axis_names(axis) if n in varying_axes(finite))
            finite = jax.lax.pmin(finite, names) if names else finite
        good = finite > 0

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(good, new, old)

        kept = jax.tree.map(choose, new_inner, state.inner_state)
        zeros = jax.tree.map(jnp.zeros_like, new_updates)
        skipped = jnp.where(good, state.skipped, optax.safe_increment(state.skipped))
        return jax.tree.map(choose, new_updates, zeros), SkipNonfiniteState(
            skipped, kept
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _all_finite(tree: Any) -> Array:
    """1 if every element is finite, else 0, as an int32 that can be reduced."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    good = jnp.asarray(True)
    for one in finite:
        good = good & one
    return good.astype(jnp.int32)


def clip_by_global_norm(
    max_norm: float, *, axis: AxisName | None = None
) -> optax.GradientTransformation:
    """Scale gradients down so that their global norm is at most `max_norm`.

    Args:
      max_norm: largest norm over all leaves, above 0.
      axis: the mesh axes that ZeRO-2 divides gradients over. The transform then stands
        where gradients have been reduced: as `before` of `zero2_multi_transform`, for
        the norm over all parameters (a recipe's `max_norm=` puts it there), or inside
        one wrapper, for the norm over that wrapper's. None outside shard_map.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: max_norm not above 0; while tracing, local gradients that are not
        reduced yet, whose norm is not that of the mean gradient.
    """
    check_positive("max_norm", max_norm)

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        nodes = jax.tree.leaves(updates, is_leaf=is_owned)
        if axis is not None and not all(map(is_owned, nodes)):
            raise ValueError(
                "clip_by_global_norm: these gradients have not been reduced yet, so "
                "their norm is not that of the mean gradient; valid with an axis are a "
                "recipe's max_norm=, or a place inside zero2_matrices, zero2_rows or "
                "zero2_multi_transform"
            )
        divided = jnp.zeros([])
        whole = jnp.zeros([])
        for leaf in jax.tree.leaves(updates):
            squares = jnp.sum(jnp.square(wide(leaf)))
            if axis is not None and varying_axes(leaf):
                divided = divided + squares
            else:
                whole = whole + squares
        if axis is not None and varying_axes(divided):
            divided = jax.lax.psum(divided, axis_names(axis))
        norm = jnp.sqrt(divided + whole)
        factor = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
