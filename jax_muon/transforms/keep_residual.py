"""Keep in the state what rounding to 16-bit parameters drops.

The step of a parameter is often smaller than half the distance between two numbers of
bfloat16. The state keeps what rounding loses, a few bits for each element, and the
optimizer updates the sum of parameter and residual.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32, Int

from jax_muon.base import checks, facts, trees
from jax_muon.base.trees import map_leaves


class Residuals(dict[str, str]):
    """The dtype of a residual, such as "int16", by path: recorded for `describe`."""


class KeepResidualState(NamedTuple):
    """State of `keep_residual`."""

    # Integers, shaped like the parameters; MaskedNode for those not of 16-bit floats.
    residual: optax.Params
    inner_state: optax.OptState  # of float32 parameters


def keep_residual(
    tx: optax.GradientTransformation, dtype: jax.typing.DTypeLike = "int8"
) -> optax.GradientTransformationExtraArgs:
    """Update bfloat16 or float16 parameters by steps that they are too narrow for.

    As FlashOptim does, arXiv 2602.23349. The optimizer sees float32 parameters,
    residual included, and keeps the state that these need; a recipe's `mu_dtype`
    makes its momentum narrower. Whatever changes updates must be inside, such as a
    chain; `on_mesh`, `make_train_step`, `optax.MultiSteps` and `skip_nonfinite` may
    also be outside.

    A residual counts in units of 1/128 of half the distance to the next 16-bit number,
    rounded to nearest, so steps below 2^-17 of an element are lost, with "int16" below
    2^-24. A step that halves or doubles an element, or moves it across zero, is rounded
    to the parameters' precision. Parameters of other dtypes have no residual;
    `describe` lists them.

    Args:
      tx: the optimizer, such as a recipe.
      dtype: of the residual, "int8", or "int16" for units 256 times finer.

    Raises:
      ValueError: another dtype; at update, no parameters, a state that has no residual,
        or one of other parameters.

    Examples:
      >>> params = jnp.ones(2, "bfloat16")
      >>> tx = jm.keep_residual(optax.sgd(0.001))  # half a distance is 0.0039
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(-params, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params[0]), round(float(params[0]) + int(state.residual[0]) / 2**15, 3)
      (1.0078125, 1.01)
    """
    tx = checks.as_transform("tx", tx)
    name = jnp.dtype(dtype).name
    checks.check_choice("dtype", name, ("int8", "int16"))

    def init_fn(params: optax.Params) -> KeepResidualState:
        params = checks.as_arrays("params", params)
        residual = jax.tree.map(
            lambda p: jnp.zeros_like(p, name) if _is_narrow(p) else optax.MaskedNode(),
            params,
        )
        widened = jax.tree.map(
            lambda p: p.astype(jnp.float32) if _is_narrow(p) else p, params
        )
        return KeepResidualState(residual, tx.init(widened))

    def update_fn(
        updates: optax.Updates,
        state: KeepResidualState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, KeepResidualState]:
        checks.check_params("keep_residual", params)
        expected = (
            "a KeepResidualState; for a run without residual it is "
            "tx.init(params)._replace(inner_state=state)"
        )
        checks.check_kind("state", state, KeepResidualState, expected)
        old = dict(trees.leaves_with_paths(state.residual))
        leaves = dict(trees.leaves_with_paths(params))
        narrow = {path: p for path, p in leaves.items() if _is_narrow(p)}
        like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, name), narrow)
        checks.check_alike("residual", old, "parameter of 16 bits", like)
        facts.record(Residuals).update(dict.fromkeys(old, name))

        def whole(path: str, p: Array) -> Array:
            return _whole(p, old[path]) if path in old else p

        wholes = map_leaves(whole, params)
        updates = trees.as_wide_as_params(updates, wholes)
        updates, inner = tx.update(updates, state.inner_state, wholes, **extra_args)
        new = {}

        def split(path: str, u: Array) -> Array:
            if path not in old:
                return u
            u, new[path] = _split(leaves[path], old[path], u)
            return u

        updates = map_leaves(split, updates)
        residual = map_leaves(lambda path, _: new[path], state.residual)
        return updates, KeepResidualState(residual, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_narrow(p: Array) -> bool:
    return p.dtype in (jnp.bfloat16, jnp.float16)


def _whole(p: Float[Array, "..."], r: Int[Array, "..."]) -> Float32[Array, "..."]:
    """A parameter with its residual. All of it fits in float32, except int16's last."""
    return p.astype(jnp.float32) + r.astype(jnp.float32) * _unit(p, r.dtype)


def _split(
    p: Float[Array, "..."], r: Int[Array, "..."], u: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """The update in the dtype of p, and what p plus that update drops of the whole."""
    target = _whole(p, r) + u.astype(jnp.float32)
    wide = p.astype(jnp.float32)
    # Of p and a target between half and twice p the difference is exact.
    step = _rounded(_rounded(target, p.dtype) - wide, p.dtype)
    after = _rounded(wide + step, p.dtype)
    most = jnp.iinfo(r.dtype).max
    dropped = (target - after) / _unit(after.astype(p.dtype), r.dtype)
    dropped = jnp.where(jnp.isnan(dropped), 0, jnp.round(dropped))  # inf - inf
    return step.astype(p.dtype), jnp.clip(dropped, -most, most).astype(r.dtype)


def _unit(p: Float[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """What one of a residual counts: a power of two, finite also where p is not."""
    info = jnp.finfo(p.dtype)
    bits = jax.lax.bitcast_convert_type(p.astype(jnp.float32), jnp.uint32)
    power = jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    # Floats that are not normal are evenly spaced. Far below 2^-100 a unit would not
    # be a normal float32, and XLA takes those for zero on CPUs.
    power = jnp.clip(power, max(2.0**info.minexp, 2.0**-100), 2.0 ** (info.maxexp - 1))
    return power * 2.0 ** (-info.nmant - jnp.iinfo(dtype).bits)


def _rounded(x: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """x rounded to a 16-bit dtype, in float32.

    XLA drops the rounding of a cast there and back where it may compute more exactly.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype == jnp.bfloat16:
        return rounded
    # reduce_precision takes numbers that are not normal for zero.
    even = jnp.round(x * 2.0**24) * 2.0**-24
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, even, rounded)
