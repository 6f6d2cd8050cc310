"""How many steps each optimizer needs: every one at its best, on the example's model.

    python -m benchmarks.learning --optimizers muon   repeats its runs
    python -m benchmarks.learning --report            tables and pictures

The measure is that of speed runs: the length of the shortest run, with a schedule of
its own, that ends at or below AdamW's loss after 300 steps, as the mean of three seeds.
Every optimizer has the same model, initial weights, batches, shape of the schedules and
number of tries in the search for its settings. benchmarks/results/learning/ has a line
for every run of that search, and its result in best.json; benchmarks/NOTES.md describes
the search.
"""

import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from gpt import GPT
from matplotlib.figure import Figure
from optimizers import OPTIMIZERS, Rates, schedules, with_embedding_factor
from runs import read
from text import Text, read_text

import jax_muon as jm
from benchmarks import program

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/learning"
BASELINE = "adamw"
SIZES = ((300, 128), (1200, 128), (300, 256))  # AdamW's steps, width
SEEDS = (0, 1, 2)
FILES = ("pace", "best")
EVERY = 20  # steps between two evaluations, at least
FACTOR = "embedding_factor"  # a setting; 1 by default
LOSS = "validation_loss"  # of a record, at the end
Settings = dict[str, float | list[float]]
Record = dict[str, Any]


class Point(NamedTuple):
    """The description of a run: everything that its losses depend on."""

    optimizer: str
    settings: Settings
    seed: int = 0
    steps: int = 300
    width: int = 128
    depth: int = 4
    context: int = 128
    batch_size: int = 16


# ---- One run


def train(point: Point) -> list[tuple[int, float]]:
    """Steps and validation losses of a run, to its end.

    Runs of one optimizer and size share a compiled step, which takes the rates of the
    step as arguments.
    """
    text = data()
    params = nnx.state(model(point.width, point.depth, point.seed), nnx.Param)
    factor = float(point.settings.get(FACTOR, 1.0))  # type: ignore[arg-type]
    init, step, evaluate = functions(point.optimizer, point.width, point.depth, factor)
    state = init(params, next(rates_of(point)))
    validation = text.validation_batches(point.batch_size, point.context)
    every = max(EVERY, point.steps // 15)
    losses = []
    for done, rates in enumerate(rates_of(point), start=1):
        batch = text.batch(point.seed, done, point.batch_size, point.context)
        params, state = step(params, state, batch, rates)
        if done % every == 0 or done == point.steps:
            losses.append((done, float(evaluate(params, validation))))
    return losses


@functools.cache
def data() -> Text:
    """The text of the example."""
    return read_text(None, Point("", {}).context)


def rates_of(point: Point) -> Iterator[Rates]:
    """The rates of every step."""
    changing = {name: x for name, x in point.settings.items() if name != FACTOR}
    rates: Any = schedules(point.steps, **changing)  # type: ignore[arg-type]
    done = np.arange(point.steps)
    columns = [
        np.broadcast_to(rate(done) if callable(rate) else rate, done.shape)
        for rate in rates
    ]
    yield from map(Rates, *(np.asarray(column, np.float32) for column in columns))


@functools.cache
def functions(optimizer: str, width: int, depth: int, factor: float = 1.0) -> Any:
    """Compiled: the first state, a step, and the mean loss of batches."""
    graph, params = nnx.split(nnx.eval_shape(lambda: model(width, depth, 0)))

    def loss(params: Any, windows: Any) -> Any:  # windows: (16, 129)
        return nnx.merge(graph, params).loss(windows)

    matrices = jm.read(params, loss, data().batch(0, 1, 1, 128))

    def transform(rates: Rates) -> Any:
        return with_embedding_factor(OPTIMIZERS[optimizer](rates, matrices), factor)

    return *program.training(loss, transform), mean_loss(loss)


def mean_loss(loss: Any) -> Any:
    """Compiled: the mean loss of batches, (8, 16, 129)."""

    def evaluate(params: Any, batches: Any) -> Any:
        return jax.lax.map(lambda windows: loss(params, windows), batches).mean()

    return jax.jit(evaluate)


def model(width: int, depth: int, seed: int) -> GPT:
    """The example's model for the text's vocabulary."""
    return GPT(len(data().vocabulary), width, depth, rngs=nnx.Rngs(seed))


# ---- The records


class Row(NamedTuple):
    """The results of an optimizer at one size."""

    best: Record  # the best run of the search
    by_length: dict[int, list[Record]]  # runs with these settings, one of each seed
    pace: float | None  # processor time of a step on one core, beside AdamW's

    def length(self, target: float) -> int | None:
        """Length of the shortest runs whose mean loss is at or below the target."""
        return next((n for n, x in self.by_length.items() if mean(x) <= target), None)


def rows(folder: pathlib.Path, steps: int, width: int) -> dict[str, Row]:
    """The results of every optimizer that was searched at a size."""
    paces, best = (json.loads((folder / f"{x}.json").read_text()) for x in FILES)
    found = {}
    for optimizer, won in best[f"{steps} steps, width {width}"].items():
        runs: dict[int, dict[int, Record]] = {}
        for record in read(folder / f"{optimizer}.jsonl"):
            if record["width"] == width and record["settings"] == won["settings"]:
                runs.setdefault(record["steps"], {})[record["seed"]] = record
        by_length = {
            length: [by_seed[seed] for seed in SEEDS]
            for length, by_seed in sorted(runs.items())
            if set(by_seed) >= set(SEEDS)
        }
        is_baseline = optimizer == BASELINE
        pace = paces.get(f"{optimizer}, width {width}", {}).get("ratio")
        searched = runs[steps if is_baseline else steps // 2][0]
        found[optimizer] = Row(searched, by_length, 1.0 if is_baseline else pace)
    return found


def mean(records: list[Record]) -> float:
    """The mean of the last validation losses."""
    return statistics.fmean(record[LOSS] for record in records)


# ---- Tables and pictures


def table(found: dict[str, Row], steps: int) -> str:
    """A line for each optimizer, the fewest steps first."""
    target = mean(found[BASELINE].by_length[steps])
    ordered = sorted(
        found.items(),
        key=lambda item: (item[1].length(target) or steps, item[1].best[LOSS]),
    )
    titles = (
        *("", "matrices", "momentum", "decay", "head, embedding"),
        *(f"after {steps} steps", "steps to AdamW's loss", "of its steps"),
        "of its time",
    )
    return program.markdown(
        [titles, *(cells(name, row, steps, target) for name, row in ordered)]
    )


def cells(name: str, row: Row, steps: int, target: float) -> list[str]:
    """A line of the table."""
    settings, length = row.best["settings"], row.length(target)
    momentum, decay = settings["momentum"], settings.get("weight_decay")
    rise = isinstance(momentum, list)
    head = settings["adamw_learning_rate"]
    runs = row.by_length.get(steps)
    share = length / steps if length else None
    return [
        f"`{name}`",
        f"{settings['learning_rate']:g}",
        " to ".join(map(str, momentum)) if rise else f"{momentum:g}",
        "-" if decay is None else f"{decay:g}",
        f"{head:g}, {head * settings.get(FACTOR, 1.0):g}",
        spread(runs) if runs else "-",
        str(length or "-"),
        f"{share:.2f}" if share else "-",
        f"{share * row.pace:.2f}" if share and row.pace else "-",
    ]


def spread(runs: list[Record]) -> str:
    """The mean of the last losses, and how far from it the seeds end."""
    middle = mean(runs)
    return f"{middle:.4f} ± {max(abs(run[LOSS] - middle) for run in runs):.4f}"


# Of the curves that a picture is about; all others are grey.
COLORS = {BASELINE: "0.2", "nanochat": "C0", "muon": "C2", "moonlight": "C1"}


def draw(found: dict[str, Row], steps: int, path: pathlib.Path) -> None:
    """Loss in the shortest runs, and at the end of runs by their length, with bands."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    during, by_length = figure.subplots(1, 2)
    target = mean(found[BASELINE].by_length[steps])
    # Greys first, below the others.
    for name, row in sorted(found.items(), key=lambda item: item[0] in COLORS):
        color, shown_as = COLORS.get(name, "0.75"), name if name in COLORS else "others"
        if length := row.length(target):
            curves = [run["validation_losses"] for run in row.by_length[length]]
            band(during, shown_as, curves, color=color)
        if row.by_length and name != BASELINE:
            ends = [
                [[n, runs[seed][LOSS]] for n, runs in row.by_length.items()]
                for seed in SEEDS
            ]
            band(by_length, shown_as, ends, marker=".", color=color)
    label = f"AdamW after {steps} steps"
    dashed = {"color": COLORS[BASELINE], "linestyle": "--", "linewidth": 1}
    by_length.axhline(target, label=label, **dashed)
    during.set(title=f"Shortest runs to AdamW's loss after {steps}", xlabel="step")
    by_length.set(title="Last validation loss of whole runs", xlabel="steps of the run")
    for axes in (during, by_length):
        axes.set(ylabel="nats per character")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    lines = {x.get_label(): x for axes in (during, by_length) for x in axes.lines}
    shown = [lines[x] for x in (*COLORS, "others", label) if x in lines]
    figure.legend(handles=shown, ncols=len(shown), loc="outside lower center")
    figure.savefig(path, dpi=120)


def band(axes: Any, name: str, curves: list[list[list[float]]], **style: Any) -> None:
    """The mean of curves, and a band between the lowest and the highest of them."""
    steps = [step for step, _ in curves[0]]
    values = np.array([[value for _, value in curve] for curve in curves])
    (line,) = axes.plot(steps, values.mean(0), label=name, **style)
    ends = values.min(0), values.max(0)
    axes.fill_between(steps, *ends, color=line.get_color(), alpha=0.25, linewidth=0)


def report(folder: pathlib.Path, root: pathlib.Path) -> None:
    """Print the tables, fill them into docs/rates.md, and draw the pictures."""
    page = root / "docs" / "rates.md"
    for steps, width in SIZES:
        found, name = rows(folder, steps, width), f"learning_{steps}_{width}"
        text = table(found, steps)
        print(f"AdamW's steps: {steps}, width: {width}\n\n{text}")
        program.fill(page, name, text)
        draw(found, steps, root / "docs" / f"{name}.png")


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.learning", __doc__)
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--steps", type=int, help="default: the length of the shortest run on record")
    add("--report", action="store_true")
    args = parser.parse_args(words)
    if args.report:
        report(RESULTS, ROOT)
        return
    steps, width = SIZES[0]
    found = rows(RESULTS, steps, width)
    target = mean(found[BASELINE].by_length[steps])
    program.print_head("optimizer", "steps", "losses", "on record", "AdamW's")
    for optimizer in args.optimizers:
        row = found[optimizer]
        length = args.steps or row.length(target) or steps
        point = Point(optimizer, row.best["settings"], steps=length, width=width)
        losses = [train(point._replace(seed=seed))[-1][1] for seed in SEEDS]
        before = [run[LOSS] for run in row.by_length.get(length, [])]
        shown = (", ".join(f"{x:.4f}" for x in each) for each in (losses, before))
        program.print_row(optimizer, length, *shown, target)


if __name__ == "__main__":
    main(sys.argv[1:])
