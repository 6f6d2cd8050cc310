"""Where each recipe's best learning rate is, as a multiple of AdamW's.

    git clone --depth 1 --branch v0.12.7 https://github.com/google/flax
    python -m benchmarks.rates flax/examples      run what is not on record yet
    python -m benchmarks.rates --report           the tables of docs/rates.md

The models are those of Flax's examples lm1b, gemma and seq2seq; see `flax_examples`.
The question is that of a user whose AdamW works: embeddings, heads and vectors keep
AdamW with its best rate, and only the rate of the matrices is searched, in factors of
two. benchmarks/results/rates.jsonl has a line for every run, and rates.json what
follows from them.
"""

import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from runs import read

from benchmarks import program
from benchmarks.flax_examples import BASELINE, EXAMPLES, WIDTH, WIDTHS, train

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SEEDS = (0, 1, 2)
SEEDS_OF_WIDTHS = SEEDS[:2]
ONE_RATE = "moonlight, one rate"  # its AdamW has the rate of the matrices
WIDE = (BASELINE, "nanochat", "moonlight")
FIRST = {  # where the search begins: the power of two
    BASELINE: -8,
    "nanochat": -5,
    "moonlight": -7,
    ONE_RATE: -7,
    "muon": -5,
    "normuon": -7,
    "muonh": -5,
}


# ---- The search


class Runs:
    """The runs on record, and those that are still to be made."""

    def __init__(self, path: pathlib.Path, folder: pathlib.Path | None = None):
        self.path, self.folder = path, folder
        self.losses = {
            (x["example"], x["optimizer"], x["seed"], x["rate"]): x["loss"]
            for x in read(path)
        }

    def loss(self, example: str, optimizer: str, seed: int, rate: float) -> float:
        """The loss of a run, from the record if it has one."""
        case = example, optimizer, seed, rate
        if case not in self.losses:
            if self.folder is None:
                raise ValueError(f"{case} is not on record; expected the examples")
            rest = rate if optimizer == BASELINE else self.rest(example)
            loss = train(self.folder, example, optimizer, rate, rest, seed)
            record = dict(
                zip(("example", "optimizer", "seed", "rate"), case, strict=True),
                rest=rest,
                loss=loss,
            )
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            program.print_row(*record.values())
            self.losses[case] = loss
        return self.losses[case]

    def rest(self, example: str) -> float:
        """AdamW's best rate, the median of the seeds, which the rest then keeps."""
        return statistics.median(self.best(example, BASELINE, seed) for seed in SEEDS)

    def best(self, example: str, optimizer: str, seed: int) -> float:
        """The best of the powers of two; its neighbours have been run too."""
        if seed == SEEDS[0]:
            best, factors = 2.0 ** FIRST[optimizer], [4.0, 2.0]
        else:
            best, factors = self.best(example, optimizer, SEEDS[0]), [2.0]
        for factor in factors:
            middle = None
            while middle != best:
                middle = best
                best = min(
                    (middle, middle / factor, middle * factor),
                    key=functools.partial(self.loss, example, optimizer, seed),
                )
        return best

    def multiple(self, example: str, optimizer: str, seed: int) -> float:
        """The best rate beside AdamW's, both from parabolas in the power of two."""
        ours, adamw = (
            lowest(self, example, name, seed) for name in (optimizer, BASELINE)
        )
        return ours / adamw


def lowest(runs: Runs, example: str, optimizer: str, seed: int) -> float:
    """Where a parabola through the best run and its neighbours is lowest."""
    best = runs.best(example, optimizer, seed)
    low, middle, high = (
        runs.loss(example, optimizer, seed, best * factor) for factor in (0.5, 1, 2)
    )
    return best * 2.0 ** ((low - high) / (2 * (low - 2 * middle + high)))


# ---- What follows from the runs

# What makes updates as large as AdamW's: 1, or 0.2 * 128**0.5 rounded to the grid.
EQUAL_SIZE = {"moonlight": 1, ONE_RATE: 1, "normuon": 1, "nanochat": 2, "muon": 2}
ANGLES = ("muonh",)  # its rate is no length, and starts at a fixed value


def summary(runs: Runs, optimizer: str) -> dict[str, Any]:
    """The best rates of an optimizer, and its losses at three multiples of AdamW's."""
    multiples = {
        example: [runs.multiple(example, optimizer, seed) for seed in SEEDS]
        for example in EXAMPLES
    }
    every = [*itertools.chain(*multiples.values())]
    middle = statistics.geometric_mean(every)
    best_rates = {
        example: [lowest(runs, example, optimizer, seed) for seed in SEEDS]
        for example in EXAMPLES
    }
    of_rates = statistics.geometric_mean(itertools.chain(*best_rates.values()))
    start = power_of_two(of_rates if optimizer in ANGLES else middle)
    equal = EQUAL_SIZE.get(optimizer)

    def mean(rate: Callable[[str, int], float]) -> dict[str, float]:
        return {
            example: statistics.fmean(
                runs.loss(example, optimizer, seed, rate(example, seed))
                for seed in SEEDS
            )
            for example in EXAMPLES
        }

    return {
        "multiple": middle,
        "lowest": min(every),
        "highest": max(every),
        "multiples": multiples,
        "best_rates": best_rates,
        "start": start,
        "loss_at_best": mean(lambda example, seed: runs.best(example, optimizer, seed)),
        "loss_at_start": mean(
            lambda example, seed: (
                start if optimizer in ANGLES else start * runs.rest(example)
            )
        ),
        "loss_at_equal_size": equal
        and mean(lambda example, seed: equal * runs.rest(example)),
    }


def power_of_two(rate: float) -> float:
    """The nearest one."""
    return 2.0 ** round(math.log2(rate))


def calls(optimizer: str, start: float) -> str:
    """What a user writes."""
    name, _, one_rate = optimizer.partition(", ")
    rate = f"{start:.1g}" if optimizer in ANGLES else f"{start:g} * lr"
    return f"`jm.{name}({rate})`" if one_rate else f"`jm.{name}({rate}, adamw=adamw)`"


def starts(found: dict[str, Any]) -> str:
    """The table of first rates."""
    titles = ["start with", "best rate / `lr`", *EXAMPLES, "best rate"]
    rows = [titles]
    for optimizer, result in found.items():
        if optimizer == BASELINE:
            continue
        rates = [*itertools.chain(*result["best_rates"].values())]
        spread = f"{result['lowest']:.1f} to {result['highest']:.1f}"
        rows.append(
            [
                calls(optimizer, result["start"]),
                f"**{result['multiple']:.1f}** ({spread})",
                *(
                    f"{statistics.geometric_mean(each):.1f}"
                    for each in result["multiples"].values()
                ),
                f"{min(rates):.2g} to {max(rates):.2g}",
            ]
        )
    return program.markdown(rows)


def by_width(runs: Runs) -> dict[str, Any]:
    """Best rates of lm1b, and multiples of AdamW's, as means over the seeds."""
    return {
        str(width): {
            optimizer: {
                "best_rate": mean_of(lowest, runs, example, optimizer),
                "multiple": mean_of(Runs.multiple, runs, example, optimizer),
            }
            for optimizer in WIDE
        }
        for example, width in {"lm1b": WIDTH, **WIDTHS}.items()
    }


def mean_of(
    rate: Callable[[Runs, str, str, int], float],
    runs: Runs,
    example: str,
    optimizer: str,
) -> float:
    """The geometric mean over the seeds."""
    return statistics.geometric_mean(
        rate(runs, example, optimizer, seed) for seed in SEEDS_OF_WIDTHS
    )


def widths(found: dict[str, Any]) -> str:
    """The table of best rates by width."""
    rows = [["width", *(f"`{optimizer}`" for optimizer in WIDE)]]
    for width in sorted(found, key=int):
        cells = (
            f"{result['best_rate']:.2g}"
            + ("" if name == BASELINE else f", {result['multiple']:.1f} times AdamW's")
            for name, result in found[width].items()
        )
        rows.append([width, *cells])
    return program.markdown(rows)


def results(runs: Runs) -> dict[str, Any]:
    """What rates.json keeps."""
    optimizers = {optimizer: summary(runs, optimizer) for optimizer in FIRST}
    return {"optimizers": optimizers, "lm1b_by_width": by_width(runs)}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/rates.md by the names of their places."""
    optimizers = found["optimizers"]
    return {
        "starts": starts(optimizers),
        "widths": widths(found["lm1b_by_width"]),
    }


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.rates", __doc__)
    add = parser.add_argument
    add("folder", nargs="?", type=pathlib.Path, help="the examples of a clone of Flax")
    add("--report", action="store_true")
    args = parser.parse_args(words)
    runs = Runs(RESULTS / "rates.jsonl", args.folder)
    if args.folder:
        program.print_head("example", "optimizer", "seed", "rate", "rest", "loss")
    for seed in SEEDS:  # one seed of all gives a first answer
        for example in EXAMPLES:
            for optimizer in FIRST:
                runs.best(example, optimizer, seed)
    found = results(runs)
    if args.folder:
        about = program.describe("benchmarks.rates", ["flax/examples"])
        program.save(about | found, RESULTS / "rates.json")
    for name, table in tables(found).items():
        print(table)
        program.fill(ROOT / "docs" / "rates.md", name, table)


if __name__ == "__main__":
    main(sys.argv[1:])
