"""In which order runs are made: a grid, then several seeds, then ever shorter runs."""

import math
import statistics
from collections.abc import Callable

from benchmarks.learning.grid import (
    BASELINE,
    BEGINNINGS,
    LONGER,
    WIDER,
    Line,
    lines,
    search,
)
from benchmarks.learning.records import Record, Records
from benchmarks.learning.training import VARIANTS, Point, Settings

SEEDS = (0, 1, 2)
# What is searched from nothing, by steps of AdamW and width; the search of a longer
# comparison, or of another width, goes on from what was found there.
SEARCHED = 300
WIDTH = 128


def grid(records: Records, optimizer: str, steps: int, width: int) -> Point:
    """The best run of a search at one seed, at its full length."""
    beginning, along = search_of(records, optimizer, steps, width)
    point = Point(optimizer, beginning, steps=searched(optimizer, steps), width=width)
    best = search(
        beginning,
        along,
        lambda settings: last(records.measure(point._replace(settings=settings))),
    )
    return point._replace(settings=best, steps=steps)


def search_of(
    records: Records, optimizer: str, steps: int, width: int
) -> tuple[Settings, tuple[Line, ...]]:
    """Where the search of a grid begins, and what it tries."""
    if steps > SEARCHED:
        nearer, along = grid(records, optimizer, SEARCHED, width), LONGER
    elif width != WIDTH:
        nearer, along = grid(records, optimizer, steps, WIDTH), WIDER
    else:
        return BEGINNINGS[optimizer], lines(optimizer)
    found = nearer.settings
    return found, tuple(line for line in along if line.name in found)


def searched(optimizer: str, steps: int) -> int:
    """The length of a search: half for all but AdamW, which is where they may end."""
    return steps if optimizer == BASELINE else steps // 2


def seeds(records: Records, optimizer: str, steps: int, width: int) -> list[Record]:
    """The best run of the grid at its full length, with several seeds."""
    best = grid(records, optimizer, steps, width)
    return [records.measure(best._replace(seed=seed)) for seed in SEEDS]


def shortest(records: Records, optimizer: str, steps: int, width: int) -> int | None:
    """The length of the shortest run that ends at or below AdamW's loss.

    It is found by one seed first, and from there by the mean of all.
    """
    near = shortest_of_one(records, optimizer, steps, width)
    return _shortest(records, optimizer, steps, width, SEEDS, near or steps)


def shortest_of_one(
    records: Records, optimizer: str, steps: int, width: int
) -> int | None:
    """The same by the first seed alone."""
    return _shortest(records, optimizer, steps, width, SEEDS[:1], steps // 2)


def _shortest(
    records: Records,
    optimizer: str,
    steps: int,
    width: int,
    of: tuple[int, ...],
    near: int,
) -> int | None:
    target = mean(seeds(records, BASELINE, steps, width))
    best = grid(records, optimizer, steps, width)
    grain = max(1, steps // 30)
    longest = (steps - 1) // grain * grain

    def reached(length: int) -> bool:
        points = [best._replace(steps=length, seed=seed) for seed in of]
        return mean([records.measure(point) for point in points]) <= target

    return bisect(reached, longest, grain, min(near, longest) // grain * grain)


def variants(
    records: Records, optimizer: str, steps: int, width: int
) -> dict[str, list[Record]]:
    """An optimizer and its variants, all with its settings, at the search's length."""
    best = grid(records, optimizer, steps, width)
    point = best._replace(steps=searched(optimizer, steps))
    return {
        name: [
            records.measure(point._replace(optimizer=name, seed=seed)) for seed in SEEDS
        ]
        for name in (optimizer, *VARIANTS.get(optimizer, ()))
    }


STAGES = {"grid": grid, "seeds": seeds, "shortest": shortest, "variants": variants}


def last(record: Record) -> float:
    """The last validation loss; infinite for a run that was stopped."""
    loss = record["validation_loss"]
    return math.inf if loss is None else loss


def mean(records: list[Record]) -> float:
    """The mean of the last validation losses."""
    return statistics.fmean(map(last, records))


def bisect(
    reached: Callable[[int], bool], longest: int, grain: int, near: int | None = None
) -> int | None:
    """The smallest multiple of `grain` at which `reached` holds, by bisection.

    Args:
        reached: false up to some length, and true from there on.
        longest: the largest length that is asked for, a multiple of `grain`.
        grain: how finely the length is found.
        near: a multiple of `grain` that is likely: one, two, four ... grains from it
            bound the bisection.

    Returns:
        The length, or None if it is above `longest`.

    Raises:
        ValueError: `longest` or `near` is not a positive multiple of `grain`.
    """
    for name, value in {"longest": longest, "near": near}.items():
        if value is not None and (grain < 1 or value < grain or value % grain):
            raise ValueError(
                f"{name}={value} and grain={grain}; expected positive whole numbers, "
                "the first a multiple of the second"
            )
    too_short, enough = 0, longest // grain + 1
    probe, stride = (too_short + enough) // 2 if near is None else near // grain, 1
    while enough - too_short > 1:
        if reached(probe * grain):
            enough = probe
        else:
            too_short = probe
        middle = (too_short + enough) // 2
        if near is None:
            probe = middle
        elif enough == probe:
            probe, stride = max(enough - stride, middle), 2 * stride
        else:
            probe, stride = min(too_short + stride, middle), 2 * stride
    return enough * grain if enough * grain <= longest else None
