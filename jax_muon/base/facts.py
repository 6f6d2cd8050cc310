"""Facts that transforms record while they are traced, for tools and layouts.

A module records in a class of its own, such as `Residuals`, a dict by path of a
parameter: `facts.record(Residuals)["up"] = "int16"`. Who imports that class reads
`recorded[Residuals]`. Outside of `recording`, as in a training run, facts are dropped.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from jaxtyping import PyTree

T = TypeVar("T")


class Facts:
    """What the modules recorded about one optimizer: one object of each class."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self._by_class: dict[type, object] = {}

    def __getitem__(self, kind: type[T]) -> T:
        found = self._by_class.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found


_recorded: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "jax_muon_facts", default=None
)


def record(kind: type[T]) -> T:
    """The object of a class to add to; outside of `recording` nobody reads it."""
    facts = _recorded.get()
    return kind() if facts is None else facts[kind]


@contextlib.contextmanager
def recording() -> Iterator[Facts]:
    """Facts that transforms record inside the `with` block.

    If one is traced twice, the later facts replace the earlier ones.
    """
    facts = Facts()
    token = _recorded.set(facts)
    try:
        yield facts
    finally:
        _recorded.reset(token)


def eval_shape(function: Callable[..., PyTree], *args: PyTree) -> tuple[PyTree, Facts]:
    """As `jax.eval_shape`, with the facts that the function records."""
    with recording() as facts:
        # A new function: JAX has no trace of it in its cache, which would record none.
        shapes = jax.eval_shape(lambda *args: function(*args), *args)
    return shapes, facts
