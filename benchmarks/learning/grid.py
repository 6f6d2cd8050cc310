"""The settings that are tried: the same number for every optimizer.

A full product would be too many runs, so the search goes along one setting after
another, from where it is best so far. It begins at the best of an earlier grid of
eight runs each, over both rates at 150 steps; what that had not, begins at the values
of its nearest relative.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.learning.training import Settings

BASELINE = "adamw"


class Line(NamedTuple):
    """Two values of one setting that are tried beside the present one."""

    name: str
    factors: tuple[float, ...] = ()  # of the present value
    values: tuple[float, ...] = ()  # or the first two of these that it is not

    def beside(self, here: float | list[float]) -> list[float]:
        values = self.values or [round(here * factor, 6) for factor in self.factors]
        return [value for value in values if value != here][:2]


LINES = (
    Line("learning_rate", factors=(0.5, 2.0)),
    Line("momentum", values=(0.8, 0.9, 0.95)),
    Line("adamw_learning_rate", factors=(0.5, 2.0)),
    Line("weight_decay", factors=(0.0, 3.0)),
)
RUNS = 1 + 2 * len(LINES)

BEGINNINGS: dict[str, Settings] = {
    name: {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "adamw_learning_rate": adamw_learning_rate,
        "weight_decay": 0.1,
    }
    for name, learning_rate, momentum, adamw_learning_rate in (
        ("adamw", 0.004, 0.9, 0.02),
        ("nanochat", 0.04, [0.85, 0.95], 0.01),
        ("nanochat-august", 0.04, [0.85, 0.95], 0.01),
        ("muon", 0.04, 0.95, 0.02),
        ("normuon", 0.01, 0.95, 0.02),
        ("moonlight", 0.01, 0.95, 0.02),
        ("teon", 0.04, 0.95, 0.02),
    )
}


def search(beginning: Settings, loss: Callable[[Settings], float]) -> Settings:
    """The best settings, and every setting that is tried passes through `loss`."""
    best, lowest = beginning, loss(beginning)
    for line in LINES:
        for value in line.beside(best[line.name]):
            tried = best | {line.name: value}
            found = loss(tried)
            if found < lowest:
                best, lowest = tried, found
    return best
