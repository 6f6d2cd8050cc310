"""Read parameters from a function of them: the loss, or the model's `apply`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_muon import jaxprs, paths
from jax_muon.axes import Parameter
from jax_muon.reading.computation import (  # noqa: F401
    decide,
    loops,
    products,
)
from jax_muon.reading.computation.follow import Follower
from jax_muon.reading.computation.values import Factor, Value


def follow(function: Callable[..., Any], params: Any, *args: Any) -> Follower:
    """The uses of every parameter in `function(params, *args)`; nothing is computed."""
    leaves = dict(paths.leaves_with_paths(params))
    jaxpr, count = jaxprs.trace(function, params, *args)
    follower = Follower({path: tuple(x.shape) for path, x in leaves.items()})
    values = [_of_leaf(path, shape) for path, shape in follower.shapes.items()]
    for i, v in enumerate(jaxpr.invars[len(values) :], len(values)):
        # Arrays that the function closes over are the data of one without arguments.
        values.append(_given(v.aval, is_data=i < count or not args))
    follower.run(jaxpr, values)
    decide.find_experts(follower)
    return follower


def read_uses(function: Callable[..., Any], params: Any, *args: Any) -> list[Parameter]:
    """How `function(params, *args)` uses each parameter."""
    follower = follow(function, params, *args)
    return decide.agreeing(
        [
            decide.parameter(path, leaf, follower)
            for path, leaf in paths.leaves_with_paths(params)
        ]
    )


def _of_leaf(path: str, shape: tuple[int, ...]) -> Value:
    sides = tuple((Factor(a, 1, n),) if n > 1 else () for a, n in enumerate(shape))
    return Value(leaves={path: sides})


def _given(aval: Any, is_data: bool) -> Value:
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or (
        aval.dtype == jnp.uint32 and aval.shape == (2,)
    )
    frozen = aval.ndim > 1 and bool(jnp.issubdtype(aval.dtype, jnp.inexact))
    return Value(data=is_data and not is_key, frozen=frozen)
