"""The time of a whole optimizer step, ours and others', in runs that alternate.

    python -m benchmarks.step                                 6x384 and GPT-2 124M
    python -m benchmarks.step --models gpt2-350m --rounds 3
    python -m benchmarks.step --pairs optax --json benchmarks/results

Each pair runs ours, theirs, ours, theirs, ..., each in a separate process; the
ratio is the median over rounds. Beside it are the seconds, the temporaries and the
time to compile. `benchmarks/NOTES.md` says what the columns mean. A file of results
that is there already keeps its other pairs.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import machine
from benchmarks.flops import least_flops, nominal_flops
from benchmarks.parameters import MODELS

SIZES = ("6x384", "gpt2-124m")
FLOOR_BAR = 1.25  # of float32 steps; a fifth for what is not a product
ROUNDS = {"6x384": 9, "gpt2-124m": 2}


@dataclasses.dataclass(frozen=True)
class Contender:
    """What runs, and how."""

    name: str
    layout: str = "scanned"
    dtype: str = "float32"
    malloc: str = "default"
    cublas: bool = False  # instead of the Triton products that XLA would try
    in_train_step: bool = True  # compiled there too, for its temporaries

    def __str__(self) -> str:
        words = [self.name, self.dtype]
        if not self.name.startswith("torch"):
            words.append(self.layout)
        if self.malloc == "tuned":
            words.append("tuned malloc")
        if self.cublas:
            words.append("cuBLASLt")
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Ours and theirs, and the largest ratio of their times that we want, by model.

    With `floor_bars` the goal is in units of ours: the least time of its products.
    """

    ours: Contender
    theirs: Contender
    bars: dict[str, float] = dataclasses.field(default_factory=dict)
    floor_bars: dict[str, float] = dataclasses.field(default_factory=dict)
    quick: bool = True  # part of `make bench`
    gpu_bar: float | None = None
    gpu_only: bool = False

    def is_quick(self, model: str) -> bool:
        """Whether it is run unless all are asked for: of known models, with a bar."""
        has_bar = model in self.bars or model in self.floor_bars
        return self.quick and (has_bar or model not in SIZES)

    @property
    def names(self) -> tuple[str, str]:
        """The two names in the table and in files."""
        return str(self.ours), str(self.theirs)


def pairs() -> list[Pair]:
    """All that is compared."""
    gpt2 = "gpt2-124m"
    ours, stacked16 = Contender("nanochat"), Contender("nanochat", dtype="bfloat16")
    leaves = Contender("nanochat", "separate")
    leaves16 = Contender("nanochat", "separate", "bfloat16")
    both = {gpt2: 1.0, "6x384": 1.0}
    reference = Contender("torch-nanochat", dtype="bfloat16")
    tuned = dataclasses.replace(reference, malloc="tuned")
    torch_muon = Contender("torch-muon", dtype="bfloat16")
    recipes = ("muon", "moonlight", "normuon")
    return [
        Pair(ours, Contender("optax"), floor_bars={gpt2: FLOOR_BAR}),
        Pair(leaves, Contender("optax", "separate"), floor_bars={gpt2: FLOOR_BAR}),
        # What users of either would run on a card: optax in JAX's default precision.
        *(
            Pair(
                mine,
                Contender("optax", mine.layout, "default"),
                gpu_bar=0.5,
                gpu_only=True,
            )
            for mine in (stacked16, leaves16)
        ),
        Pair(ours, Contender("optax-scan"), {gpt2: 0.75}),
        Pair(stacked16, tuned, {gpt2: 0.9, "6x384": 1.0}, gpu_bar=0.9),
        Pair(stacked16, reference, quick=False, gpu_bar=0.9),
        Pair(stacked16, torch_muon, both),
        Pair(leaves, ours, {gpt2: 1.15}),
        Pair(leaves16, stacked16, {gpt2: 1.15}, quick=False),
        Pair(ours, Contender("torch-nanochat"), quick=False),
        Pair(ours, Contender("torch-nanochat", malloc="tuned"), quick=False),
        Pair(dataclasses.replace(stacked16, cublas=True), stacked16, gpu_only=True),
        *(Pair(Contender(name), ours, quick=False) for name in (*recipes, "adamw")),
        *(
            Pair(Contender(name, dtype="bfloat16"), stacked16, quick=False)
            for name in recipes
        ),
    ]


class Worker:
    """A contender in its process."""

    def __init__(
        self, contender: Contender, model: str, device: str, timeout: float | None
    ):
        """Start it and wait until it is ready, at most `timeout` seconds."""
        settings = dataclasses.asdict(contender) | {"model": model, "device": device}
        settings.pop("malloc")
        environment = {**os.environ, "JAX_PLATFORMS": device}
        if contender.malloc == "tuned":
            environment |= machine.tuned_malloc()
        self.contender = contender
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            self.info = json.loads(self._line())
        finally:
            timer.cancel()

    def step(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None
        print("step", file=self.process.stdin, flush=True)
        return float(self._line())

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.contender} ended: see above")
        return line


@contextlib.contextmanager
def running(
    contender: Contender, model: str, device: str, timeout: float | None = None
) -> Iterator[Worker]:
    """A worker that is ended whatever happens."""
    worker = Worker(contender, model, device, timeout)
    try:
        yield worker
    finally:
        worker.stop()


def alternate(ours: Worker, theirs: Worker, rounds: int) -> dict[str, Any]:
    """Times of both in turn, and the ratio."""
    times = [(ours.step(), theirs.step()) for _ in range(rounds)]
    return {
        "ours_s": statistics.median(a for a, _ in times),
        "theirs_s": statistics.median(b for _, b in times),
        "ratio": statistics.median(a / b for a, b in times),
        "ratios": [a / b for a, b in times],
    }


def compare(
    model: str, chosen: list[Pair], rounds: int, device: str, peaks: dict[str, float]
) -> list[dict[str, Any]]:
    """All pairs on one model; ours stays up from one pair to the next."""
    results = []
    flops, least = nominal_flops(model), least_flops(model)
    by_ours: dict[Contender, list[Pair]] = {}
    for pair in chosen:
        by_ours.setdefault(pair.ours, []).append(pair)
    for ours, members in by_ours.items():
        with running(ours, model, device) as us:
            for pair in members:
                with running(pair.theirs, model, device) as them:
                    found = alternate(us, them, rounds)
                peak = peaks[f"{ours.dtype}_flops"]
                floor = least / peak
                bar = pair.gpu_bar if device == "cuda" else pair.bars.get(model)
                if device == "cpu" and model in pair.floor_bars:
                    bar = pair.floor_bars[model] * floor / found["theirs_s"]
                results.append(
                    {
                        "model": model,
                        "ours": str(ours),
                        "theirs": str(pair.theirs),
                        "bar": bar,
                        **found,
                        "nominal_flops": flops,
                        "nominal_share_of_peak": flops / found["ours_s"] / peak,
                        "floor_s": floor,
                        "of_floor": found["ours_s"] / floor,
                        "ours_info": us.info,
                        "theirs_info": them.info,
                    }
                )
                print(row(results[-1]), flush=True)
    return results


HEADER = (
    f"{'model':10} {'ours':28} {'theirs':40} {'ours s':>7} {'theirs':>7} {'ratio':>6} "
    f"{'bar':>5} {'of peak':>7} {'of floor':>8} {'compile s':>12} {'temporary MB':>14} "
    f"{'in a train step':>16}"
)


def row(result: dict[str, Any]) -> str:
    """A line of the table."""

    def both(key: str, unit: float, digits: int) -> str:
        values = [result[f"{side}_info"].get(key) for side in ("ours", "theirs")]
        words = ["-" if v is None else f"{v / unit:.{digits}f}" for v in values]
        return " / ".join(words)

    bar = "" if result["bar"] is None else f"{result['bar']:.2f}"
    return (
        f"{result['model']:10} {result['ours']:28} {result['theirs']:40} "
        f"{result['ours_s']:7.3f} {result['theirs_s']:7.3f} {result['ratio']:6.3f} "
        f"{bar:>5} {result['nominal_share_of_peak']:7.2f} {result['of_floor']:8.2f} "
        f"{both('compile_s', 1, 1):>12} {both('temporary_bytes', 1e6, 0):>14} "
        f"{both('train_step_temporary_bytes', 1e6, 0):>16}"
    )


def draw(results: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """A bar for every pair: their time over ours, and where our goal is."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    models = sorted({r["model"] for r in results}, key=MODELS.index)
    counts = [sum(r["model"] == m for r in results) for m in models]
    figure, axes = plt.subplots(
        len(models),
        1,
        figsize=(9, 1.2 + 0.42 * len(results)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    for model, ax in zip(models, axes[:, 0], strict=True):
        rows = [r for r in results if r["model"] == model][::-1]
        places = range(len(rows))
        good = [r["bar"] is None or r["ratio"] <= r["bar"] for r in rows]
        colors = ["#4c78a8" if ok else "#e45756" for ok in good]
        ax.barh(places, [r["ratio"] for r in rows], color=colors, height=0.6)
        for place, r in zip(places, rows, strict=True):
            if r["bar"] is not None:
                ends = (place - 0.42, place + 0.42)
                ax.plot([r["bar"]] * 2, ends, color="black", linewidth=1.5)
            text = f" {r['ratio']:.2f}  ({r['ours_s']:.2f} s for {r['theirs_s']:.2f} s)"
            right = max(r["ratio"], r["bar"] or 0)
            ax.text(right, place, text, va="center", fontsize=8)
        labels = [f"{r['ours']}\nto {r['theirs']}" for r in rows]
        ax.set_yticks(list(places), labels, fontsize=8)
        top = max(max(r["ratio"], r["bar"] or 0) for r in rows)
        ax.set_xlim(0, 1.45 * top)
        ax.axvline(1, color="gray", linewidth=0.8, linestyle=":")
        ax.set_title(f"{model}: time of ours / time of theirs", fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}; black: goal, red: missed", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", choices=MODELS, nargs="+", default=SIZES)
    parser.add_argument(
        "--rounds", type=int, help="default: 9 for 6x384, 2 for gpt2-124m, else 3"
    )
    parser.add_argument("--pairs", help="all whose text has this word, and no others")
    parser.add_argument("--all", action="store_true", help="not only those with a bar")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    named = [
        pair
        for pair in pairs()
        if (args.pairs is None or args.pairs in " to ".join(pair.names))
        and (args.device == "cuda" or not pair.gpu_only)
    ]
    if not named:
        parser.error(f"--pairs {args.pairs}: no pair has it")
    if args.json is not None and not args.json.is_dir():
        parser.error(f"--json {args.json}; expected a folder that exists")

    # This process measures the peaks, and its workers share the card with it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_platforms", args.device)
    run = machine.describe("benchmarks.step", words)
    run["peaks"] = machine.peaks(1024 if args.device == "cpu" else 8192)
    print(f"{run['device']}, {run['cores']} cores, {run['versions']}")
    print(f"load average before: {run['load_before']:.1f}")
    for name, value in run["peaks"].items():
        print(f"{name}: {value / 1e9:.0f} G/s")
    print(HEADER)
    results = []
    for model in args.models:
        chosen = [p for p in named if args.all or args.pairs or p.is_quick(model)]
        rounds = args.rounds or ROUNDS.get(model, 3)
        found = compare(model, chosen, rounds, args.device, run["peaks"])
        results += [r | {"run": run} for r in found]
    if args.json is not None:
        save(results, args.json / f"step_{args.device}.json")


def save(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Write results, in place of older ones of the same pairs, and draw all of them."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    by_key = {(r["model"], r["ours"], r["theirs"]): r for r in (*old, *results)}
    rows = [
        by_key[model, *pair.names]
        for model in MODELS
        for pair in pairs()
        if (model, *pair.names) in by_key
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    run = rows[0]["run"]
    title = f"{run['device']}, {run['cores']} cores, {run['date']}"
    draw(rows, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
