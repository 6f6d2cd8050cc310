"""Steps of a fixed angle: every matrix keeps the Frobenius norm that it starts with."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.base import checks, dtypes, trees
from jax_muon.matrices.matrices import check_matrices

_SMALLEST = 1e-10  # a direction of this norm does not move a matrix


class HyperballState(NamedTuple):
    """State of `hyperball`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    # (..., 1, 1), at least float32; 0 for a matrix that started at zero and has not
    # reached its sphere.
    radius: optax.Updates


def hyperball(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    r"""Move every matrix on the sphere of the Frobenius norm that it starts with.

    Hyperball optimization, arXiv 2606.16899. It goes last in a chain, instead of the
    learning rate. With :math:`R` the norm of a matrix at `init`, :math:`U` the
    direction that the chain gives, and :math:`n(X) = X / \|X\|_F`,

    .. math:: W \leftarrow R \, n(W - \eta R \, n(U))

    Transforms after it, such as `clip_qk`, take matrices off the sphere; the next step
    brings them back. A matrix that starts at zero takes the plain step
    :math:`-\eta R \, n(U)` until its norm reaches :math:`R = \sqrt{\mathrm{out}}`, as
    usual initial weights have (variance 1/in). A matrix does not change if the norm of
    its direction is at most 1e-10; NaN in the direction is NaN in the weights.

    Args:
      learning_rate: :math:`\eta`, the step relative to the norm: an angle in radians.

    Raises:
      ValueError: at init, with path and shape, a parameter that is not a floating-point
        matrix; at update, params=None.

    Examples:
      >>> params = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> tx = hyperball(0.1)
      >>> grads = {"w": jnp.array([[0.0, 7.0], [0.0, 0.0]])}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> moved = optax.apply_updates(params, updates)["w"]
      >>> [[round(float(x), 3) for x in row] for row in moved]
      [[2.985, -0.498], [0.0, 3.98]]
      >>> round(float(jnp.linalg.norm(moved)), 5)
      5.0
    """
    learning_rate = checks.as_rate("learning_rate", learning_rate)

    def init_fn(params: optax.Params) -> HyperballState:
        check_matrices(params)
        radius = jax.tree.map(lambda p: jnp.sqrt(_sum(dtypes.wide(p) ** 2)), params)
        return HyperballState(jnp.zeros([], jnp.int32), radius)

    def update_fn(
        updates: optax.Updates,
        state: HyperballState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, HyperballState]:
        checks.check_params("hyperball", params)
        rate = checks.rate_at(learning_rate, state.count)
        updates = trees.as_wide_as_params(updates, params)
        move = functools.partial(_move, rate=rate)
        moved = jax.tree.map(move, updates, params, state.radius)
        updates, radius = (
            jax.tree.map(lambda _, pair, i=i: pair[i], updates, moved) for i in (0, 1)
        )
        return updates, HyperballState(optax.safe_increment(state.count), radius)

    return optax.GradientTransformation(init_fn, update_fn)


def _move(
    u: Array, w: Array, radius: Array, rate: float | Array
) -> tuple[Array, Array]:
    """The update of one parameter, and the radii of its matrices after it."""
    target = jnp.where(radius > 0, radius, u.shape[-1] ** 0.5)
    wide_u, wide_w = dtypes.wide(u), dtypes.wide(w)
    uu, wu, ww = map(_sum, (wide_u * wide_u, wide_w * wide_u, wide_w * wide_w))
    size = dtypes.root(uu)
    moves = ~(size <= _SMALLEST)  # a NaN shows in the weights, as everywhere
    step = dtypes.in_dtype_of(uu, rate) * target / jnp.where(moves, size, 1)
    # |W - step U|, from sums that devices may add up at the same time.
    norm = dtypes.root(jnp.maximum(ww - 2 * step * wu + step * step * uu, 0))
    arrived = moves & ((radius > 0) | (norm >= target)) & (norm > 0)
    back = jnp.where(arrived, target / jnp.where(arrived, norm, 1), 1)
    # A difference of weights would lose everything to rounding in bfloat16.
    update = jnp.where(moves, (back - 1) * wide_w - back * step * wide_u, 0)
    new = jnp.where(arrived, target, radius).astype(radius.dtype)
    return update.astype(u.dtype), new


def _sum(x: Array) -> Array:
    return jnp.sum(x, (-2, -1), keepdims=True)
