"""Do learning rates transfer? The best one by width and depth, and what activations do.

    python -m benchmarks.transfer                            all runs, hours of them
    python -m benchmarks.transfer --optimizers muon --widths 64 128 256 --depths 2
    python -m benchmarks.transfer --report                   table and picture

Short runs of the example's model, 100 steps of 8 windows of 64 characters, at five
rates of the matrices for every shape rule, recipe and size. AdamW's rate for the
embedding and the head goes with width^-0.5, as nanochat has it, and is not searched.

Every run also measures activations after 0, 1, 10 and 100 steps on one batch (the
coordinate check of arXiv 2203.03466): where a rule transfers, what a block adds to the
stream and the logits are as large in a wide model as in a narrow one.

Records are kept as those of `benchmarks.learning`: nothing that is there is run again.
"""

import argparse
import functools
import math
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt import norm
from matplotlib.figure import Figure

from benchmarks.learning import training
from benchmarks.learning.plan import last
from benchmarks.learning.records import Record, Records
from benchmarks.learning.report import fill
from benchmarks.learning.training import Point, Settings

FOLDER = pathlib.Path("benchmarks/results/transfer")
DOCS = pathlib.Path("docs")
STEPS, CONTEXT, BATCH_SIZE = 100, 64, 8
AT = (0, 1, 10, 100)  # steps after which activations are measured
ACROSS = 4  # optimizers beside each other in the picture
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 8)

MIDDLES = {  # the rates in the middle of each sweep
    "adamw": 0.004,
    "muon": 0.04,
    "muon-sqrt_ratio": 0.04,
    "muon-rms_0.2": 0.02,
    "muon-none": 0.04,
    "normuon": 0.02,
    "nanochat": 0.04,
    "muonh": 0.04,
}


def settings(rate: float, width: int) -> Settings:
    """Momentum is the same for all, and nothing decays."""
    return {
        "learning_rate": rate,
        "adamw_learning_rate": round(0.01 * (128 / width) ** 0.5, 6),
        "momentum": 0.9,
        "weight_decay": 0.0,
    }


def points(optimizer: str, width: int, depth: int) -> list[Point]:
    """A sweep."""
    rates = [round(MIDDLES[optimizer] * factor, 6) for factor in FACTORS]
    return [
        Point(
            optimizer,
            settings(rate, width),
            steps=STEPS,
            width=width,
            depth=depth,
            context=CONTEXT,
            batch_size=BATCH_SIZE,
        )
        for rate in rates
    ]


def make(point: Point) -> Record:
    """The record of a run, with the activations on the way."""
    text = training.data()
    windows = text.validation_batches(point.batch_size, point.context)[0]
    seen = {}

    def look(done: int, params: Any) -> None:
        if done in AT:
            found = activations(params, windows, point.width, point.depth)
            seen[str(done)] = {name: float(value) for name, value in found.items()}

    return training.train(point, look) | {"activations": seen}


@functools.partial(jax.jit, static_argnums=(2, 3))
def activations(params: Any, windows: Any, width: int, depth: int) -> dict[str, Any]:
    """Root mean squares: of the stream, what blocks add to it on average, logits."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: training.model(width, depth, 0)))
    model = nnx.merge(graph, params)
    x = norm(model.embed(windows[:, :-1]))
    added = []
    for block in model.blocks:
        before, (x, _) = x, block(x)
        added.append(rms(x - before))
    return {
        "blocks": jnp.mean(jnp.array(added)),
        "stream": rms(x),
        "logits": rms(model.lm_head(norm(x))),
    }


def rms(x: jax.Array) -> jax.Array:
    """The root mean square of all entries."""
    return jnp.sqrt(jnp.mean(x**2))


def best_rate(sweep: list[Record]) -> float | None:
    """Where a parabola through the best run and its neighbours is lowest.

    Its axes are the logarithm of the rate and the loss. None where the best run is at
    an end of the sweep, or beside one that was stopped.
    """
    losses = [last(record) for record in sweep]
    i = int(np.argmin(losses))
    if not 0 < i < len(sweep) - 1:
        return None
    low, best, high = losses[i - 1 : i + 2]
    if not math.isfinite(low + high) or low + high == 2 * best:
        return None
    ratio = math.log(FACTORS[i + 1] / FACTORS[i])
    shift = ratio * (low - high) / (low + high - 2 * best) / 2
    return sweep[i]["settings"]["learning_rate"] * math.exp(shift)


def exponent(by_size: dict[int, float]) -> float | None:
    """The slope of the best rate over the size, both as logarithms."""
    if len(by_size) < 2:
        return None
    x, y = np.log(list(by_size)), np.log(list(by_size.values()))
    return float(np.polyfit(x, y, 1)[0])


def sweeps(records: Records) -> Iterator[tuple[str, int, int, list[Record]]]:
    """All sweeps that are whole."""
    for optimizer in MIDDLES:
        for depth in DEPTHS:
            for width in WIDTHS:
                found = [records.find(p) for p in points(optimizer, width, depth)]
                if all(found):
                    yield optimizer, width, depth, [r for r in found if r]


def table(records: Records) -> str:
    """Best rates by width, and what activations do at the middle rate."""
    lines = [
        "| | depth | best rate by width | slope | blocks add, by width | logits |",
        "|---|---|---|---|---|---|",
    ]
    for (optimizer, depth), by_width in grouped(records).items():
        best = {width: best_rate(sweep) for width, sweep in by_width.items()}
        known = {width: rate for width, rate in best.items() if rate is not None}
        slope = exponent(known)
        middle = {w: at(sweep, STEPS) for w, sweep in by_width.items()}
        cells = [
            f"`{optimizer}`",
            str(depth),
            ", ".join(f"{w}: {r:.3g}" if r else f"{w}: -" for w, r in best.items()),
            "-" if slope is None else f"{slope:+.2f}",
            ", ".join(f"{w}: {seen['blocks']:.2f}" for w, seen in middle.items()),
            ", ".join(f"{w}: {seen['logits']:.1f}" for w, seen in middle.items()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def grouped(records: Records) -> dict[tuple[str, int], dict[int, list[Record]]]:
    """The whole sweeps by optimizer and depth, then by width."""
    found: dict[tuple[str, int], dict[int, list[Record]]] = {}
    for optimizer, width, depth, sweep in sweeps(records):
        found.setdefault((optimizer, depth), {})[width] = sweep
    return found


def at(sweep: list[Record], step: int) -> dict[str, float]:
    """The activations after some steps at the middle rate."""
    return sweep[len(sweep) // 2]["activations"][str(step)]


def draw(records: Records, path: pathlib.Path) -> None:
    """Loss by rate, and what blocks add by width, for every optimizer."""
    found = {name: g for (name, depth), g in grouped(records).items() if depth == 2}
    rows = max(1, -(-len(found) // ACROSS))
    figure = Figure(figsize=(3 * ACROSS, 5.4 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, ACROSS, squeeze=False)
    for place, (optimizer, by_width) in enumerate(found.items()):
        row, column = divmod(place, ACROSS)
        by_rate, check = axes[2 * row : 2 * row + 2, column]
        for width, sweep in by_width.items():
            rates = [record["settings"]["learning_rate"] for record in sweep]
            by_rate.plot(rates, list(map(last, sweep)), ".-", label=f"width {width}")
        for step in AT[2:]:  # the first moves no block: the head was zero
            values = [at(sweep, step)["blocks"] for sweep in by_width.values()]
            check.plot(list(by_width), values, ".-", label=f"after {step}")
        by_rate.set(title=optimizer, xscale="log", xlabel="learning rate")
        check.set(xscale="log", yscale="log", ylim=(0.1, 100), xlabel="width")
        for axis, ticks in ((by_rate, rates), (check, list(by_width))):
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
    for row in range(rows):
        axes[2 * row, 0].set(ylabel="nats per character")
        axes[2 * row + 1, 0].set(ylabel="RMS that a block adds")
    for place in range(len(found), rows * ACROSS):
        row, column = divmod(place, ACROSS)
        axes[2 * row, column].set_axis_off()
        axes[2 * row + 1, column].set_axis_off()
    figure.savefig(path, dpi=110)


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=MIDDLES, default=list(MIDDLES))
    add("--widths", nargs="+", type=int, choices=WIDTHS, default=WIDTHS)
    add("--depths", nargs="+", type=int, choices=DEPTHS, default=DEPTHS)
    add("--results", type=pathlib.Path, default=FOLDER, metavar="FOLDER")
    add("--docs", type=pathlib.Path, default=DOCS, metavar="FOLDER")
    add("--report", action="store_true", help="table and picture of the runs so far")
    args = parser.parse_args(words)
    command = shlex.join(["python", "-m", "benchmarks.transfer", *words])
    records = Records(args.results, command, make)
    if args.report:
        print(table(records))
        fill(args.docs / "rates.md", "transfer", table(records))
        draw(records, args.docs / "transfer.png")
        return
    for depth in args.depths:
        for width in args.widths:
            for optimizer in args.optimizers:
                for point in points(optimizer, width, depth):
                    records.measure(point)


if __name__ == "__main__":
    main(sys.argv[1:])
