"""What transforms tell about themselves while they are traced, for `describe`.

Nobody listens in a training run: `note` then does nothing.
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
    """Tell a fact to whoever listens."""
    notes = _listener.get()
    if notes is not None:
        notes.append(Note(kind, facts))


def is_listening() -> bool:
    """Whether anybody listens, for facts that are work to find out."""
    return _listener.get() is not None


@contextlib.contextmanager
def listening() -> Iterator[list[Note]]:
    """Collect what is told inside the `with` block."""
    notes: list[Note] = []
    token = _listener.set(notes)
    try:
        yield notes
    finally:
        _listener.reset(token)
