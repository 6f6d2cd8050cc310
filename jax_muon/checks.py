"""Errors for arguments that are wrong whatever the parameters are."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise a ValueError unless `value` is a Python integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(
            f"{name}={value!r}: valid is a Python integer, known while tracing; under "
            f"optax.inject_hyperparams name it in static_args=({name!r},)"
        )
    if value < least:
        raise ValueError(f"{name}={value}: valid is an integer of at least {least}")


def check_positive(name: str, value: Any) -> None:
    """Raise a ValueError unless a number that is known while tracing is above 0."""
    if not isinstance(value, jax.core.Tracer) and not value > 0:
        raise ValueError(f"{name}={value}: valid is a number above 0")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: valid are {', '.join(map(repr, choices))}")
