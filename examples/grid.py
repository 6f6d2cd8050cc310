"""Chooses the learning rates that train_gpt.py uses, by a grid; writes grid.json.

    python examples/grid.py

Every optimizer gets the same number of runs, eight: four learning rates of the
matrices, at one of AdamW for the embedding and the head, and then four others of AdamW
at the best of those. Neighbours differ by a factor of two. Runs are shorter than the
default one, and have its schedules. Results that grid.json holds already are kept, so
that the grid goes on where it was stopped.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform

from optimizers import GRID, OPTIMIZERS
from runs import read, write
from train_gpt import main as train

STEPS = 150
LEARNING_RATES = {
    "nanochat": (0.02, 0.04, 0.08, 0.16),
    "adamw": (0.001, 0.002, 0.004, 0.008),
    "muon": (0.02, 0.04, 0.08, 0.16),
    "normuon": (0.005, 0.01, 0.02, 0.04),
    "moonlight": (0.005, 0.01, 0.02, 0.04),
}
FIRST_ADAMW, OTHER_ADAMW = 0.02, (0.005, 0.01, 0.04, 0.08)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default="runs/grid", metavar="FOLDER")
    runs = parser.parse_args(argv).runs
    results = json.loads(GRID.read_text())["results"] if GRID.exists() else []

    def measure(optimizer: str, rate: float, adamw_rate: float) -> None:
        point = {
            "optimizer": optimizer,
            "learning_rate": rate,
            "adamw_learning_rate": adamw_rate,
        }
        if any(point.items() <= result.items() for result in results):
            return
        name = f"{optimizer}-{rate}-{adamw_rate}"
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in point.items()]
        flags += [f"--steps={STEPS}", f"--evaluate-every={STEPS}"]
        train([*flags, f"--runs={runs}", f"--name={name}"])
        last = read(pathlib.Path(runs, name, "metrics.jsonl"))[-1]
        results.append(point | {"validation_loss": last["validation_loss"]})
        write(GRID, report(results))

    for optimizer, rates in LEARNING_RATES.items():
        for rate in rates:
            measure(optimizer, rate, FIRST_ADAMW)
        best = best_of(results, optimizer)["learning_rate"]
        for rate in OTHER_ADAMW:
            measure(optimizer, best, rate)


def best_of(results: list[dict], optimizer: str) -> dict:
    own = [result for result in results if result["optimizer"] == optimizer]
    return min(own, key=lambda result: result["validation_loss"])


def report(results: list[dict]) -> str:
    done = {result["optimizer"] for result in results}
    packages = ("jax_muon", "jax", "flax", "optax", "numpy")
    contents = {
        "command": "python examples/grid.py",
        "date": str(datetime.date.today()),
        "steps": STEPS,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "best": {o: best_of(results, o) for o in OPTIMIZERS if o in done},
        "results": results,
    }
    return json.dumps(contents, indent=1) + "\n"


if __name__ == "__main__":
    main()
