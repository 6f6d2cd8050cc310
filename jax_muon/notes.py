"""Facts that transforms record while traced, for `describe`.

Without a listener, as in a training run, `note` does nothing.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple


class Note(NamedTuple):
    """One fact, as a transform knew it while it was traced."""

    kind: str
    facts: dict[str, Any]


_listener: contextvars.ContextVar[list[Note] | None] = contextvars.ContextVar(
    "jax_muon_notes", default=None
)


def note(kind: str, **facts: Any) -> None:
    """Record a fact."""
    notes = _listener.get()
    if notes is not None:
        notes.append(Note(kind, facts))


@contextlib.contextmanager
def listening() -> Iterator[list[Note]]:
    """Record facts inside the `with` block, in a list."""
    notes: list[Note] = []
    token = _listener.set(notes)
    try:
        yield notes
    finally:
        _listener.reset(token)
