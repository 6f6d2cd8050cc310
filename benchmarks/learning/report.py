"""Table and picture of the runs so far, and the settings that the example takes."""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from optimizers import BEST
from runs import write  # that of the example

from benchmarks.learning import pace, plan
from benchmarks.learning.grid import BASELINE, BEGINNINGS
from benchmarks.learning.records import Record, Records
from benchmarks.learning.training import VARIANTS, Point, embedding_factor

DATA = ("data", "context", "batch_size", "depth")
DOCS = pathlib.Path(__file__).parents[2] / "docs"
SIZES = ((300, 128), (1200, 128), (300, 256), (1200, 256))  # AdamW's steps, width


class MissingError(LookupError):
    """A run has not been made."""


class Lookup(NamedTuple):
    """Records that make no run, with which the plan tells what is there."""

    records: Records
    used: list[Record]

    def measure(self, point: Point) -> Record:
        """The record of a run, which has to be there."""
        if found := self.records.find(point):
            self.used.append(found)
            return found
        raise MissingError(str(point))

    def result(self, stage: Callable, *arguments: Any) -> Any:
        """What a stage of the plan finds, or None where runs of it are missing."""
        try:
            return stage(self, *arguments)
        except MissingError:
            return None


class Row(NamedTuple):
    """What came of an optimizer; None where runs are missing."""

    tries: int  # runs of the search
    best: Point
    found: Record  # the best run of the search
    runs: list[Record] | None  # over all steps, one of each seed
    length: int | None  # of the shortest run to the loss of the baseline
    length_of_one: int | None  # by one seed
    pace: float | None  # processor time of a step on one core, beside the baseline's


def rows(records: Records, steps: int, width: int) -> dict[str, Row]:
    """What came of every optimizer whose grid is done."""
    lookup, found = Lookup(records, []), {}
    for optimizer in BEGINNINGS:
        size = (optimizer, steps, width)
        before = len(lookup.used)
        best = lookup.result(plan.grid, *size)
        if best is None:
            continue
        tries = len(lookup.used) - before
        base = optimizer == BASELINE
        found[optimizer] = Row(
            tries,
            best,
            lookup.measure(best._replace(steps=plan.searched(optimizer, steps))),
            lookup.result(plan.seeds, *size),
            steps if base else lookup.result(plan.shortest, *size),
            steps if base else lookup.result(plan.shortest_of_one, *size),
            1.0 if base else pace.known(records, optimizer, width),
        )
    check_same(lookup.used, *DATA)
    check_same([row.found for row in found.values()], "width")
    check_same([run for row in found.values() for run in row.runs or []], "steps")
    return found


def check_same(records: list[Record], *names: str) -> None:
    """Raise a ValueError if runs that are compared differ in one of these."""
    for name in names:
        values = {json.dumps(record[name]): record["optimizer"] for record in records}
        if len(values) > 1:
            told = " and ".join(f"{value} of {who}" for value, who in values.items())
            raise ValueError(
                f"{name} of the runs that are compared differs, {told}; expected the "
                "same in all of them"
            )


def table(found: dict[str, Row], steps: int, short: bool = False) -> str:
    """A line for each optimizer, the fewest steps first."""
    lines = [
        cells(name, row, steps)
        for name, row in sorted(found.items(), key=lambda item: order(item[1]))
    ]
    titles = [title for title in lines[0] if not (short and title in LONG)]
    texts = [
        titles,
        ["---"] * len(titles),
        *([line[title] for title in titles] for line in lines),
    ]
    return "".join("| " + " | ".join(text) + " |\n" for text in texts)


LONG = (
    "tries", "matrices", "momentum", "decay", "head, embedding", "of its time",
)  # fmt: skip


def cells(name: str, row: Row, steps: int) -> dict[str, str]:
    """A line of the table, by the titles of its columns."""
    settings, length = row.best.settings, row.length or row.length_of_one
    momentum, decay = settings["momentum"], settings.get("weight_decay")
    head = settings["adamw_learning_rate"]
    of_time = f"{length * row.pace / steps:.2f}" if length and row.pace else "-"
    return {
        "": f"`{name}`",
        "tries": str(row.tries),
        "matrices": f"{settings['learning_rate']:g}",
        "momentum": " to ".join(map(str, momentum))
        if isinstance(momentum, list)
        else f"{momentum:g}",
        "decay": "-" if decay is None else f"{decay:g}",
        "head, embedding": f"{head:g}, {head * embedding_factor(row.best):g}",
        "best of the search": f"{plan.last(row.found):.4f} "
        f"({row.found['steps']} steps)",
        f"after {steps} steps": spread(row.runs) if row.runs else "-",
        "steps to AdamW's loss": "-"
        if not length
        else str(length) + ("" if row.length else ", one seed"),
        "of its steps": f"{length / steps:.2f}" if length else "-",
        "of its time": of_time,
    }


def order(row: Row) -> tuple[float, float]:
    """Fewest steps first, then the lowest loss of the search."""
    return row.length or row.length_of_one or math.inf, plan.last(row.found)


def spread(runs: list[Record]) -> str:
    """The mean of the last losses and how far the seeds lie from it."""
    losses = [plan.last(run) for run in runs]
    middle = statistics.fmean(losses)
    return f"{middle:.4f} ± {max(abs(loss - middle) for loss in losses):.4f}"


def draw(records: Records, found: dict[str, Row], steps: int, path: pathlib.Path):
    """Loss in the shortest runs, and at the end of runs by their length, with bands."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    during, by_length = figure.subplots(1, 2)
    for name, row in found.items():
        whole = by_steps(records.all(name), row.best)
        color = f"C{list(BEGINNINGS).index(name)}"
        if row.length in whole:
            runs = whole[row.length]
            band(during, name, [run["validation_losses"] for run in runs], color=color)
        if whole and name != BASELINE:
            ends = [
                [[n, plan.last(runs[i])] for n, runs in whole.items()]
                for i in range(len(plan.SEEDS))
            ]
            band(by_length, name, ends, marker=".", color=color)
    if (baseline := found.get(BASELINE)) and baseline.runs:
        target = plan.mean(baseline.runs)
        label = f"AdamW after {steps} steps"
        by_length.axhline(
            target, color="grey", linestyle="--", linewidth=1, label=label
        )
    during.set(title=f"Shortest runs to AdamW's loss after {steps}", xlabel="step")
    by_length.set(title="Last validation loss of whole runs", xlabel="steps of the run")
    for axes in (during, by_length):
        axes.set(ylabel="nats per character")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120)


def by_steps(records: list[Record], best: Point) -> dict[int, list[Record]]:
    """The runs with the best settings of which there are all seeds, by length."""
    found: dict[int, dict[int, Record]] = {}
    for record in records:
        if (record["settings"], record["width"]) == (best.settings, best.width):
            found.setdefault(record["steps"], {})[record["seed"]] = record
    return {
        steps: [by_seed[seed] for seed in plan.SEEDS]
        for steps, by_seed in sorted(found.items())
        if set(by_seed) >= set(plan.SEEDS)
    }


def band(axes: Any, name: str, curves: list[list[list[float]]], **style: Any) -> None:
    """The mean of curves, and between the lowest and the highest of them a band."""
    steps = [step for step, _ in curves[0]]
    values = list(
        zip(*([value for _, value in curve] for curve in curves), strict=True)
    )
    (line,) = axes.plot(steps, list(map(statistics.fmean, values)), label=name, **style)
    axes.fill_between(
        steps,
        list(map(min, values)),
        list(map(max, values)),
        color=line.get_color(),
        alpha=0.25,
        linewidth=0,
    )


def variants_table(found: dict[str, list[Record]]) -> str:
    """A line for an optimizer, and for each of its variants beside it."""
    name, *_ = found
    base = [plan.last(run) for run in found[name]]
    lines = [
        f"| | after {found[name][0]['steps']} steps | beside `{name}`, by seed |",
        "|---|---|---|",
    ]
    for name, runs in found.items():
        apart = [plan.last(run) - loss for run, loss in zip(runs, base, strict=True)]
        shown = ", ".join(f"{x:+.4f}" for x in apart) if any(apart) else "-"
        lines.append(f"| `{name}` | {spread(runs)} | {shown} |")
    return "".join(line + "\n" for line in lines)


def fill(path: pathlib.Path, name: str, text: str) -> None:
    """Puts a table behind the comment of its name in a page that has one."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    mark = f"<!-- {name} -->"
    if mark in page:
        old = re.escape(mark) + r"\n\n(\|.*\n)*"
        write(path, re.sub(old, lambda _: f"{mark}\n\n{text}", page))


def write_all(records: Records, docs: pathlib.Path = DOCS, best: pathlib.Path = BEST):
    """Writes and prints what is there, of every size that has an optimizer's grid."""
    for steps, width in SIZES:
        if not (found := rows(records, steps, width)):
            continue
        name = f"learning_{steps}_{width}"
        text = table(found, steps)
        print(f"AdamW's steps: {steps}, width: {width}\n\n{text}")
        fill(docs / "rates.md", name, text)
        fill(docs.parent / "README.md", name, table(found, steps, short=True))
        draw(records, found, steps, docs / f"{name}.png")
        if (steps, width) == SIZES[0]:
            for optimizer in found.keys() & VARIANTS.keys():
                tried = Lookup(records, []).result(
                    plan.variants, optimizer, steps, width
                )
                if tried is not None:
                    fill(docs / "rates.md", "variants", variants_table(tried))
            settings = json.loads(best.read_text()) if best.exists() else BEGINNINGS
            settings = settings | {name: r.best.settings for name, r in found.items()}
            write(best, json.dumps(settings, indent=1) + "\n")
