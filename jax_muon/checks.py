"""Errors for arguments that are wrong whatever the parameters are."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def check_count(
    name: str, value: int, *, least: int = 1, most: int | None = None
) -> None:
    """Raise a ValueError unless `value` is a Python integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(
            f"{name}={value!r}; expected a Python integer, known while tracing; under "
            f"optax.inject_hyperparams name it in static_args=({name!r},)"
        )
    if value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value}; expected an integer {limits}")


def check_positive(name: str, value: Any) -> None:
    """Raise a ValueError unless a number that is known while tracing is above 0."""
    if not isinstance(value, jax.core.Tracer) and not value > 0:
        raise ValueError(f"{name}={value}; expected a number above 0")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ValueError unless a value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r}; expected one of {names}")


def checked_float(
    name: str, value: Any, expected: str, holds: Callable[[float], bool]
) -> float:
    """The number as a Python float, if it is finite and `holds` says yes.

    Args:
      name: of the argument.
      value: a Python or NumPy number, or a concrete JAX scalar.
      expected: what the error asks for.
      holds: the condition, which is asked of finite numbers alone.

    Raises:
      ValueError: for anything else, tracers and booleans among it.
    """
    try:
        wrong = isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value) > 0
        number = math.nan if wrong else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or not holds(number):
        hint = ""
        if isinstance(value, jax.core.Tracer):
            hint = (
                ", known while tracing; under optax.inject_hyperparams name it in "
                f"static_args=({name!r},)"
            )
        raise ValueError(f"{name}={value!r}; expected {expected}{hint}")
    return number


def as_transform(tx: Any) -> optax.GradientTransformationExtraArgs:
    """An optax transform that takes extra arguments, out of any that there are.

    An `optax.MultiSteps` is none by its type, and optax would drop its arguments.
    """
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"{tx!r}; expected an optax transform")
    return optax.with_extra_args_support(tx)


def check_rate(name: str, value: Any) -> None:
    """Raise a ValueError unless a rate is a schedule or a number of at least 0."""
    if callable(value) or isinstance(value, jax.core.Tracer):
        return
    checked_float(
        name, value, "a number of at least 0, or a schedule", lambda number: number >= 0
    )


def check_float_dtype(name: str, dtype: Any) -> None:
    """Raise a ValueError unless a dtype is None or one of real floating point."""
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(
            f"{name}={dtype!r}; expected a dtype of real floating point, or None"
        )
