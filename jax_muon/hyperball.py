"""Steps of a fixed angle: every matrix stays on the sphere of the norm it starts with.

The norms are sums over whole matrices, so that the piece works however parameters are
divided: three sums of squares and products, which do not wait for one another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import matrices as reading
from jax_muon import paths
from jax_muon.axes import MatrixAxes
from jax_muon.checks import (
    check_arrays,
    check_gradients,
    check_params,
    check_state,
    number,
    rate,
)
from jax_muon.dtypes import as_wide_as_params, in_dtype_of, positive, wide
from jax_muon.elementwise import (
    PathFactors,
    check_factors,
    rate_at,
)
from jax_muon.matrices import Matrices
from jax_muon.transforms import map_axes, sum_over


class HyperballState(NamedTuple):
    """State of `hyperball`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    # The parameters' shape with 1 in the axes of a matrix, at least float32; 0 for a
    # matrix that started at zero and has not reached its sphere.
    radius: optax.Updates


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    learning_rates: Mapping[str, float] | None = None,
    *,
    eps: float = 1e-10,
    matrices: Matrices | None = None,
) -> optax.GradientTransformation:
    r"""Move every matrix on the sphere of the Frobenius norm that it starts with.

    Stands last in a chain, instead of the learning rate. With :math:`R` the norm of a
    matrix at `init`, :math:`U` the direction that the chain gives, and
    :math:`n(X) = X / \|X\|_F`,

    .. math:: W \leftarrow R \, n(W - \eta R \, n(U))

    The step is :math:`\eta R` long, whatever the scale of the chain: shape factors,
    weight decay and learning rates in front of it have no effect. What stands behind
    it, such as `clip_qk` or the learning rates of a `Split`, leaves the sphere until
    the next step.

    A matrix that starts at zero has no sphere yet. Its radius is that of usual initial
    weights, :math:`R = \sqrt{\mathrm{out}}` (variance 1/in); it takes the plain step
    :math:`-\eta R \, n(U)` until its norm reaches :math:`R`, and stays on the sphere
    from then on. The example's model, whose projections back into the stream start at
    zero, then ends at a loss of 1.518 (width 64, 150 steps of `muonh`); where the same
    projections start with variance 1/in, as they would have to if zeros were refused,
    at 1.564; on the sphere of their first step, at 2.08.

    Args:
      learning_rate: :math:`\eta`, the step as a part of the norm: an angle in radians.
      learning_rates: path pattern to a factor of the learning rate, as in
        `scale_by_path`.
      eps: smallest norm of a direction; with a smaller one, as without a gradient, a
        matrix stays as it is.
      matrices: the reading passed in by `partition`, or `jax_muon.read(params)`; None
        treats every leaf as one matrix (in, out).

    Returns:
      An `optax.GradientTransformation` that needs the parameters at update, and gives
      updates at least as wide as they are. Its state is one float for each matrix.

    Raises:
      ValueError: a learning rate below 0, factors as `scale_by_path` refuses them, eps
        not above 0; at init, with path and shape, a parameter that is not a
        floating-point matrix; at update, params=None.

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

    References:
      Hyperball optimization, arXiv 2606.16899.
    """
    learning_rate = rate("learning_rate", learning_rate)
    learning_rates = {} if learning_rates is None else learning_rates
    check_factors("learning_rates", learning_rates)
    eps = number("eps", eps, "above 0")
    reading.check(matrices)
    factors = PathFactors(learning_rates)

    def init_fn(params: optax.Params) -> HyperballState:
        def norm(p: Array, axes: MatrixAxes) -> Array:
            return jnp.sqrt(sum_over(wide(p) ** 2, axes.matrix))

        check_arrays("params", params)
        # A box names the axes of the parameter, over which (1, 1) cannot be sharded.
        plain = paths.unbox(params)
        factors.check(plain)
        radius = map_axes(norm, matrices, plain)
        return HyperballState(jnp.zeros([], jnp.int32), radius)

    def update_fn(
        updates: optax.Updates,
        state: HyperballState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, HyperballState]:
        check_params("hyperball", params)
        check_gradients(updates, params)
        check_state("hyperball", state, HyperballState)
        now = rate_at(learning_rate, state.count)
        updates = as_wide_as_params(updates, params)
        plain = paths.unbox(updates)
        found = reading.of_tree(matrices, plain)
        radii, treedef = jax.tree.flatten(state.radius)
        moved = [
            _move(u, w, radius, found.axes(path), now * factors.of(path), eps)
            for (path, u), w, radius in zip(
                paths.leaves_with_paths(plain),
                jax.tree.leaves(params),
                radii,
                strict=True,
            )
        ]
        updates = jax.tree.unflatten(
            jax.tree.structure(updates), [update for update, _ in moved]
        )
        radius = jax.tree.unflatten(treedef, [radius for _, radius in moved])
        return updates, HyperballState(optax.safe_increment(state.count), radius)

    return optax.GradientTransformation(init_fn, update_fn)


def _move(
    u: Array, w: Array, radius: Array, axes: MatrixAxes, rate: Any, eps: float
) -> tuple[Array, Array]:
    """The update of one parameter, and the radii of its matrices after it."""
    _, fan_out = axes.fan(u.shape)
    target = jnp.where(radius > 0, radius, fan_out**0.5)
    wide_u, wide_w = wide(u), wide(w)
    uu, wu, ww = (
        sum_over(x, axes.matrix)
        for x in (wide_u * wide_u, wide_w * wide_u, wide_w * wide_w)
    )
    size = jnp.sqrt(uu)
    moves = size >= positive(eps, uu.dtype)
    step = in_dtype_of(uu, rate) * target / jnp.where(moves, size, 1)
    # |W - step U|, from sums that devices may add up at the same time.
    norm = jnp.sqrt(jnp.maximum(ww - 2 * step * wu + step * step * uu, 0))
    arrived = moves & ((radius > 0) | (norm >= target)) & (norm > 0)
    back = jnp.where(arrived, target / jnp.where(arrived, norm, 1), 1)
    # Not as a difference of weights, of which bfloat16 would leave nothing.
    update = jnp.where(moves, (back - 1) * wide_w - back * step * wide_u, 0)
    new = jnp.where(arrived, target, radius).astype(radius.dtype)
    return update.astype(u.dtype), new
