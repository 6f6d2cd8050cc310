"""The settings that are tried: for no optimizer more than for AdamW.

A full product would be too many runs, so the search goes along one setting after
another, from where it is best so far. It begins at the best of an earlier grid of
eight runs each, over both rates at 150 steps; what is not in that grid begins at the
values of its nearest relative.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.learning.training import FACTOR, Settings

BASELINE = "adamw"


class Line(NamedTuple):
    """Two values of one setting that are tried beside the present one."""

    name: str
    factors: tuple[float, ...] = ()  # of the present value
    values: tuple[float, ...] = ()  # or the first two of these that it is not
    goes_on: bool = False  # by the same factor, while it gets better
    default: float = 0.0  # where the settings do not have it

    def beside(self, here: float | list[float]) -> list[float]:
        values = self.values or [round(here * factor, 6) for factor in self.factors]
        return [value for value in values if value != here][:2]


FIRST = (
    Line("learning_rate", factors=(0.5, 2.0)),
    Line("momentum", values=(0.8, 0.9, 0.95)),
    Line("adamw_learning_rate", factors=(0.5, 2.0)),
    Line("weight_decay", factors=(0.0, 3.0)),
)
EMBEDDING = Line(FACTOR, values=(4.0, 16.0), default=1.0)
WITHOUT_DECAY = (*FIRST[:-1], Line("learning_rate", factors=(0.7, 1.4)))
# A second look, for the baseline and those that it is worth the time for.
SECOND = (
    Line("momentum", values=(0.7, 0.85, 0.75)),
    Line("learning_rate", factors=(0.7, 1.4), goes_on=True),
)
# Of a longer run, from the best of a shorter one.
LONGER = (
    Line("learning_rate", factors=(0.5,)),
    Line("weight_decay", values=(0.1, 0.3)),
)
# Of another width, from the best of the width that was searched.
WIDER = (
    Line("learning_rate", factors=(0.7, 1.4), goes_on=True),
    Line("adamw_learning_rate", factors=(0.7, 1.4)),
)
LOOKED_AT_TWICE = ("adamw", "nanochat", "nanochat-august")

DECAY: Settings = {"weight_decay": 0.1}

BEGINNINGS: dict[str, Settings] = {
    name: {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "adamw_learning_rate": adamw_learning_rate,
    }
    | decay
    for name, learning_rate, momentum, adamw_learning_rate, decay in (
        ("adamw", 0.004, 0.9, 0.02, DECAY),
        ("nanochat", 0.04, [0.85, 0.95], 0.01, DECAY),
        ("nanochat-august", 0.04, [0.85, 0.95], 0.01, DECAY),
        ("muon", 0.04, 0.95, 0.02, DECAY),
        ("normuon", 0.01, 0.95, 0.02, DECAY),
        ("moonlight", 0.01, 0.95, 0.02, DECAY),
        ("teon", 0.04, 0.95, 0.02, DECAY),
        ("muonh", 0.04, 0.95, 0.02, {}),
        ("normuonh", 0.04, 0.95, 0.02, {}),
    )
}


def lines(optimizer: str) -> tuple[Line, ...]:
    """What is tried for an optimizer beside the beginning."""
    first = FIRST if "weight_decay" in BEGINNINGS[optimizer] else WITHOUT_DECAY
    second = SECOND if optimizer in LOOKED_AT_TWICE else ()
    return (*first, *second, EMBEDDING)


def search(
    beginning: Settings, along: tuple[Line, ...], loss: Callable[[Settings], float]
) -> Settings:
    """The best settings, and every setting that is tried passes through `loss`."""
    best = beginning
    lowest = loss(best)

    def better(name: str, value: float) -> bool:
        nonlocal best, lowest
        tried = best | {name: value}
        found = loss(tried)
        if found < lowest:
            best, lowest = tried, found
            return True
        return False

    for line in along:
        here = best.get(line.name, line.default)
        won = [value for value in line.beside(here) if better(line.name, value)]
        while line.goes_on and won:
            value = round(won[-1] * won[-1] / here, 6)
            here, won = won[-1], [value] if better(line.name, value) else []
    return best
