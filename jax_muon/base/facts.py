"""Facts that transforms record while they are traced, for tools and layouts.

Outside of `recording`, as in a training run, `record` does nothing.
"""

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jax_muon.base import array_types

Facts = dict[str, dict[Any, Any]]  # by kind, then by path or another key

_recorded: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "jax_muon_traced_facts", default=None
)


def record(kind: str, facts: Mapping[Any, Any]) -> None:
    """Keep facts; one with the same key, as from a second trace, is replaced."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded[kind].update(facts)


@contextlib.contextmanager
def recording() -> Iterator[Facts]:
    """Facts that are recorded inside the `with` block."""
    facts: Facts = collections.defaultdict(dict)
    with array_types.setting(_recorded, facts):
        yield facts


def trace(function: Callable[..., Any], *args: Any) -> tuple[Any, Facts]:
    """Shapes of a function's results, and the facts that it records.

    The arguments are arrays, or their shapes.
    """
    with recording() as facts:
        # A new function, so that JAX traces it.
        shapes = jax.eval_shape(lambda *args: function(*args), *args)
    return shapes, facts
