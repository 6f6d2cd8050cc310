"""Facts that transforms record while traced, for `describe`.

Without a listener, as in a training run, `note` does nothing.
"""

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

Notes = dict[str, dict[Any, Any]]  # by kind, then by path or another key

_listener: contextvars.ContextVar[Notes | None] = contextvars.ContextVar(
    "jax_muon_notes", default=None
)


def note(kind: str, facts: Mapping[Any, Any]) -> None:
    """Record facts; one with the same key, as from a second trace, is replaced."""
    notes = _listener.get()
    if notes is not None:
        notes[kind].update(facts)


@contextlib.contextmanager
def listening() -> Iterator[Notes]:
    """Record facts inside the `with` block."""
    notes: Notes = collections.defaultdict(dict)
    token = _listener.set(notes)
    try:
        yield notes
    finally:
        _listener.reset(token)


def traced(function: Callable[..., Any], *args: Any) -> tuple[Any, Notes]:
    """Shapes of a function's results, and the facts that it records while traced.

    The arguments are arrays, or their shapes.
    """
    with listening() as notes:
        # A new function, so that JAX traces it.
        shapes = jax.eval_shape(lambda *args: function(*args), *args)
    return shapes, notes
