"""The parts that recipes have in common."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax

from jax_muon.checks import (
    check_alike,
    check_count,
    check_flag,
    check_function,
    number,
    rate,
)
from jax_muon.elementwise import check_factors, check_mask, scale_by_path
from jax_muon.orthogonalize import Polar, orthogonalize
from jax_muon.partition import Group, check_groups, partition
from jax_muon.polar.coefficients import MAX_STEPS
from jax_muon.polar.kernels import wider
from jax_muon.polar.products import least
from jax_muon.reading.bare import check_reading
from jax_muon.reading.labels import ADAMW, MUON
from jax_muon.reading.matrices import Matrices, Reading
from jax_muon.transforms import check_shape_rule

Pieces = list[optax.GradientTransformation]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_decay = functools.partial(rate, limits="in [0, 1)")

# By an argument's name, which means the same in all recipes: what refuses a wrong
# value, and for a number or a schedule gives it in its normal form. Other arguments are
# checked under the same name by what they go to.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "learning_rate": rate,
    "momentum": _decay,
    "weight_decay": rate,
    "beta2": _decay,
    "steps": functools.partial(check_count, most=MAX_STEPS),
    "row_equilibration": check_flag,
    "renormalize": check_flag,
    "shape_rule": check_shape_rule,
    "polar": lambda name, value: check_function(
        name, value, "a function of arrays (..., m, n) such as PolarExpress(), or None"
    ),
    "learning_rates": check_factors,
    "weight_decay_mask": check_mask,
    "adamw_learning_rate": rate,
    "adamw_b1": functools.partial(number, limits="in [0, 1)"),
    "adamw_b2": functools.partial(number, limits="in [0, 1)"),
    "adamw_eps": functools.partial(number, limits="of at least 0"),
    "adamw_weight_decay": rate,
    "reading": check_reading,
}


def checked(recipe: Callable[_P, _T]) -> Callable[_P, _T]:
    """A recipe whose arguments are checked before anything is made of them."""
    signature = inspect.signature(recipe)

    @functools.wraps(recipe)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            known = ", ".join(signature.parameters)
            raise TypeError(
                f"{recipe.__name__}() {error}; expected some of {known}"
            ) from None
        for name, value in bound.arguments.items():
            if name in _CHECKS and value is not signature.parameters[name].default:
                found = _CHECKS[name](name, value)
                bound.arguments[name] = value if found is None else found
        return recipe(*bound.args, **bound.kwargs)

    return call


def recipe(
    pieces: Callable[[Matrices], Pieces],
    adamw: optax.GradientTransformation,
    groups: Mapping[str, Group] | None,
    reading: Reading | None,
) -> optax.GradientTransformationExtraArgs:
    """The pieces for "muon", AdamW for "adamw", and the user's groups."""
    groups = check_groups({} if groups is None else groups)
    if MUON in groups or ADAMW in groups:
        raise ValueError(
            f"groups has the labels {list(groups)}; expected others than {MUON!r} and "
            f"{ADAMW!r}, which the recipe holds itself"
        )
    pieces(Matrices({}))  # a wrong setting of a piece is an error now
    return partition(
        {MUON: lambda found: optax.chain(*pieces(found)), ADAMW: adamw, **groups},
        reading,
    )


def adamw_part(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """AdamW; float16 is computed in float32, where eps and small squares are not 0."""
    eps = least(eps, wider(jnp.result_type(eps), jnp.float32))
    tx = optax.with_extra_args_support(
        optax.adamw(learning_rate, *betas, eps, weight_decay=weight_decay)
    )

    def raised(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.float16 else x, tree
        )

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        check_alike("gradient", updates, "first moment", optax.tree.get(state, "mu"))
        new, state = tx.update(raised(updates), state, raised(params), **extra_args)
        return jax.tree.map(
            lambda n, u: n.astype(u.dtype) if u.dtype == jnp.float16 else n,
            new,
            updates,
        ), state

    return optax.GradientTransformationExtraArgs(
        lambda params: tx.init(raised(params)), update_fn
    )


def polar_factor(
    own: Polar, polar: Polar | None, matrices: Matrices
) -> optax.GradientTransformation:
    """`orthogonalize` by the recipe's own polar factor, or by the user's.

    All recipes call it here, so that a test can patch one name for all.
    """
    return orthogonalize(first(polar, own), matrices=matrices)


def first(value: Any, otherwise: Any) -> Any:
    """The value, or what stands in for None."""
    return otherwise if value is None else value


def rates(
    learning_rate: optax.ScalarOrSchedule, learning_rates: Mapping[str, float] | None
) -> Pieces:
    """The learning rate, and factors of it for some matrices."""
    factors = [scale_by_path(learning_rates)] if learning_rates else []
    return [*factors, optax.scale_by_learning_rate(learning_rate)]
