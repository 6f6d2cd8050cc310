"""In which dtype a step computes: as wide as its operands, and at least float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def wider(dtype: Any, other: Any) -> jnp.dtype:
    """`jnp.promote_types`, also under `jax_numpy_dtype_promotion="strict"`."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def wide(x: Array) -> Array:
    """x in at least float32, for sums, means and small differences."""
    return x.astype(wider(x.dtype, jnp.float32))


def in_dtype_of(x: Array, rate: Any) -> Any:
    """A rate that can be multiplied by x even where JAX promotes no dtypes."""
    return rate if isinstance(rate, float) else jnp.asarray(rate, x.dtype)


def positive(eps: Any, dtype: Any) -> Any:
    """An eps in a dtype, where it has to be above 0.

    `optax.inject_hyperparams` casts it to the dtype of the parameters, and 1e-10 is 0
    in float16.
    """
    tiny = float(jnp.finfo(dtype).tiny)
    if isinstance(eps, float):
        return max(eps, tiny)
    return jnp.maximum(jnp.asarray(eps, dtype), tiny)


def as_wide_as_params(updates: Any, params: Any) -> Any:
    """Updates in the dtype of their parameters, where that is the wider one.

    The steps of float32 parameters, and the decay that is added to them, would be
    rounded to 8 bits where gradients are bfloat16. Other dtypes stay as they are.
    """

    def widen(u: Any, p: Any) -> Any:
        if u is None or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (u, p)):
            return u
        return u.astype(p.dtype) if wider(u.dtype, p.dtype) == p.dtype else u

    if params is None:
        return updates
    return jax.tree.map(widen, updates, params, is_leaf=lambda x: x is None)
