"""How long a step of an optimizer takes beside one of AdamW, in turn in one process."""

import datetime
import json
import pathlib
import statistics
import time
from typing import Any

import jax
from runs import write  # that of the example

from benchmarks import machine
from benchmarks.learning.grid import BASELINE, BEGINNINGS
from benchmarks.learning.records import Records, alone
from benchmarks.learning.training import Point, beginning, data, functions, rates_of

ROUNDS, STEPS = 7, 4
NAME = "pace.json"


def pace(records: Records, optimizer: str, steps: int, width: int) -> float:
    """The ratio, measured where it is not on record.

    Args:
        records: in whose folder it is kept.
        optimizer: which.
        steps: of AdamW; the ratio does not depend on it.
        width: of the model.
    """
    del steps
    if (ratio := known(records, optimizer, width)) is not None:
        return ratio
    found = measure(optimizer, width) | {"command": records.command}
    path = records.folder / NAME
    with alone(records.folder / ".locks" / NAME):
        kept = read(path) | {key(optimizer, width): found}
        write(path, json.dumps(kept, indent=1) + "\n")
    return found["ratio"]


def known(records: Records, optimizer: str, width: int) -> float | None:
    """The ratio, where it is on record."""
    found = read(records.folder / NAME).get(key(optimizer, width))
    return None if found is None else found["ratio"]


def key(optimizer: str, width: int) -> str:
    """Under which it is on record."""
    return f"{optimizer}, width {width}"


def read(path: pathlib.Path) -> dict[str, Any]:
    """What is on record."""
    return json.loads(path.read_text()) if path.exists() else {}


def measure(optimizer: str, width: int) -> dict[str, Any]:
    """Processor seconds of a step, the medians of rounds in turn, and of the ratio."""
    runs = {name: Run(name, width) for name in (optimizer, BASELINE)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            taken[name].append(run.seconds())
    ratios = [
        ours / theirs
        for ours, theirs in zip(taken[optimizer], taken[BASELINE], strict=True)
    ]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "seconds": round(statistics.median(taken[optimizer]), 4),
        "baseline_seconds": round(statistics.median(taken[BASELINE]), 4),
        "date": datetime.date.today().isoformat(),
        "device": machine.device_name(),
        "jax": machine.version("jax"),
    }


class Run:
    """A run that goes on by a few steps at a time."""

    def __init__(self, optimizer: str, width: int):
        point = Point(optimizer, BEGINNINGS[optimizer], width=width)
        self.state = beginning(point)
        self.step, _ = functions(optimizer, width, point.depth)
        self.rates = next(rates_of(point))
        self.batch = data().batch(0, 1, point.batch_size, point.context)
        self.seconds()  # which compiles

    def seconds(self) -> float:
        """Of processor time, for a step."""
        began = time.process_time()
        for _ in range(STEPS):
            *state, _ = self.step(*self.state, self.batch, self.rates)
            self.state = jax.block_until_ready(tuple(state))
        return (time.process_time() - began) / STEPS
