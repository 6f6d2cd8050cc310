"""Facts that transforms record while they are traced, for tools and layouts.

A transform adds to `facts.note()`. Outside of `recording`, as in a training run, nobody
reads what it adds.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

_EMPTY: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Facts:
    """What the transforms of one optimizer do; by the path of a parameter, mostly."""

    leaves: dict[str, Any] = _EMPTY  # the `Parameter` of each leaf that was read
    parameters: dict[str, Any] = _EMPTY  # the same, or its parts if it is split
    joined: dict[str, int] = _EMPTY  # matrices that are orthogonalized as one
    scales: dict[str, float] = _EMPTY  # factors of `scale_by_shape`
    residuals: dict[str, str] = _EMPTY  # dtypes of `keep_residual`
    default_rates: dict[str, Any] = _EMPTY  # of a recipe's own AdamW, by label
    pools: dict[tuple[str, ...], Any] = _EMPTY  # plans, by the paths that they are of
    sizes: dict[str, int] = _EMPTY  # of mesh axes, by name
    on_mesh: list[Any] = dataclasses.field(default_factory=list)  # its `Placed`


_recorded: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "jax_muon_facts", default=None
)


def note() -> Facts:
    """Where a transform adds what it does; a second trace replaces what was there."""
    return _recorded.get() or Facts()


@contextlib.contextmanager
def recording() -> Iterator[Facts]:
    """Facts that are noted inside the `with` block."""
    facts = Facts()
    token = _recorded.set(facts)
    try:
        yield facts
    finally:
        _recorded.reset(token)


def trace(function: Callable[..., Any], *args: Any) -> tuple[Any, Facts]:
    """Shapes of a function's results, and the facts that it records.

    The arguments are arrays, or their shapes.
    """
    with recording() as facts:
        # A new function, so that JAX traces it.
        shapes = jax.eval_shape(lambda *args: function(*args), *args)
    return shapes, facts
