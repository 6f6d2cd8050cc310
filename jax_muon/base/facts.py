"""Facts that transforms record while they are traced, for tools and layouts.

A transform adds to `facts.note()`. Outside of `recording`, as in a training run, its
facts are dropped.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass
class Facts:
    """The transforms of one optimizer, mostly by the path of a parameter."""

    # The `Parameter` of each leaf that was read; and the same, but with its parts for
    # one that is split.
    leaves: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    # How many matrices are orthogonalized as one; the factor of `scale_by_shape`; the
    # dtype that `keep_residual` keeps.
    joined: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    residuals: dict[str, str] = field(default_factory=dict)
    # Whether polar factors of (m, n), m <= n, take the kernels for Hopper GPUs.
    kernels: dict[tuple[int, int], bool] = field(default_factory=dict)
    # Plans, by the paths of their parameters, and sizes of mesh axes by name.
    pools: dict[tuple[str, ...], Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    on_mesh: list[Any] = field(default_factory=list)


_recorded: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "jax_muon_facts", default=None
)


def note() -> Facts:
    """The record that a transform adds to; a second trace replaces earlier facts."""
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
