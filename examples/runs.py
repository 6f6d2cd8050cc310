"""The folder of a training run: its metrics, checkpoints and pictures.

A run may be killed at any moment and resumed from its last checkpoint. orbax writes a
checkpoint completely or not at all. The metrics of all steps up to a checkpoint are
written before it. When a run is resumed, metrics of later steps are dropped, since
those steps are repeated.
"""

import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from matplotlib.figure import Figure


@contextlib.contextmanager
def stoppable() -> Iterator[list[int]]:
    """Notes Ctrl-C, or a cluster's SIGTERM, in a list, so that no step is interrupted.

    The run then saves its state and ends. A second signal ends it at once.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        del frame
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_aside(path: pathlib.Path) -> None:
    """Makes room for a new run: renames an old runs/NAME to runs/NAME.1, .2, ..."""
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
        print(f"{path} was there: it is {aside} now")


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class Checkpoints:
    """The last two checkpoints of a run, written while it trains on."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, cleanup_tmp_directories=True
            ),
        )

    def save(self, step: int, params: Any, state: Any) -> None:
        """Starts to write a checkpoint, once the previous one is written."""
        saved = {"params": params, "opt_state": state}
        self.manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, params: Any, state: Any) -> tuple[int, Any, Any]:
        """The newest checkpoint's step, parameters and state; 0 and None without one.

        `params` and `state` are shapes, dtypes and shardings of what is wanted.
        """
        step = self.manager.latest_step()
        if step is None:
            return 0, None, None
        wanted = {"params": params, "opt_state": state}
        found = self.manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return step, found["params"], found["opt_state"]


class Metrics:
    """Writes metrics.jsonl, one line per step.

    The numbers stay on the device until they are flushed. Holding the newest ones back
    avoids waiting for steps that still run.
    """

    def __init__(self, path: pathlib.Path | None, last_step: int):
        self.path = path  # None in a process that writes nothing
        self.waiting: list[dict[str, Any]] = []
        if path is not None:
            kept = [record for record in read(path) if record["step"] <= last_step]
            write(path, "".join(json.dumps(record) + "\n" for record in kept))

    def add(self, step: int, **values: jax.Array) -> None:
        self.waiting.append({"step": step, **values})

    def flush(self, keep: int = 0) -> list[dict[str, Any]]:
        """Writes all but the last `keep` records, and returns those it wrote."""
        cut = max(0, len(self.waiting) - keep)
        ready, self.waiting = self.waiting[:cut], self.waiting[cut:]
        records = [
            {name: np.asarray(value).item() for name, value in record.items()}
            for record in ready
        ]
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        return records


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without a last line that a kill cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


Curve = tuple[list[int], list[float]]  # steps and values


def curve(records: list[dict[str, Any]], name: str) -> Curve:
    """One of the metrics, at the steps where it was measured."""
    found = [record for record in records if name in record]
    return [record["step"] for record in found], [record[name] for record in found]


def first_step_at(points: Curve, target: float) -> int | None:
    """The first measured step whose value is not above the target."""
    reached = (step for step, value in zip(*points, strict=True) if value <= target)
    return next(reached, None)


def draw(
    curves: dict[str, Curve],
    title: str,
    path: pathlib.Path,
    target: tuple[str, float] | None = None,
) -> None:
    """Draws loss curves, and a line at a loss that they have to reach."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, (steps, values) in curves.items():
        every_step = len(steps) > 1 and steps[1] - steps[0] == 1
        style = {"alpha": 0.5, "linewidth": 1} if every_step else {"marker": "."}
        axes.plot(steps, values, label=name, **style)
    if target:
        label, value = target
        axes.axhline(value, color="grey", linestyle="--", linewidth=1, label=label)
    axes.set(title=title, xlabel="step", ylabel="nats per character")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
