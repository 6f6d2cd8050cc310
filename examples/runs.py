"""The folder of a training run: its metrics, checkpoints and pictures.

A run may be killed at any moment and go on from its last checkpoint. Checkpoints appear
whole or not at all (orbax sees to that). The metrics of every step before a checkpoint
are in the file before the checkpoint is; those of later steps are dropped when the run
goes on, since these steps are taken again.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from matplotlib.figure import Figure


def set_aside(folder: pathlib.Path) -> None:
    """Makes place for a new run: renames an old runs/NAME to runs/NAME.1, .2, ..."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"{folder} was there: it is {aside} now")


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
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        """Returns the last step and its state, or 0 and None.

        Args:
            abstract: shapes, dtypes and places of the state.

        Raises:
            ValueError: the checkpoint's parameters are those of another model.
        """
        step = self.manager.latest_step()
        if step is None:
            return 0, None
        saved = shapes(self.manager.item_metadata(step)["params"])
        wanted = shapes(abstract["params"])
        for path in sorted(saved | wanted):
            if saved.get(path) != wanted.get(path):
                raise ValueError(
                    f"{self.folder / str(step)} is of another model: {path} is "
                    f"{saved.get(path, 'missing')} there and "
                    f"{wanted.get(path, 'missing')} in this one. Valid are the --width "
                    f"and --depth that the run began with, or another --name"
                )
        return step, self.manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self.manager.close()  # waits for what is being written


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """{"blocks/0/attn/q/kernel": (128, 128), ...}"""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name.removesuffix("/value")] = tuple(leaf.shape)
    return found


class Metrics:
    """metrics.jsonl, one line a step.

    The numbers stay on the device until they are flushed. Who keeps the newest ones
    back does not wait for steps that still run.
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
    """The records of metrics.jsonl, less a last line that a kill cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


Curve = tuple[list[int], list[float]]  # steps and values


def curve(records: list[dict[str, Any]], name: str) -> Curve:
    """One of the metrics, at the steps at which it was measured."""
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
    """Draws curves of loss, and where each first comes down to a target."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, values = points
        every_step = len(steps) > 1 and steps[1] - steps[0] == 1
        style = {"alpha": 0.5, "linewidth": 1} if every_step else {"marker": "."}
        (line,) = axes.plot(steps, values, label=name, **style)
        step = first_step_at(points, target[1]) if target else None
        if step is not None:
            value = values[steps.index(step)]
            axes.plot(step, value, "o", color=line.get_color())
            axes.annotate(
                f"step {step}",
                (step, value),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                color=line.get_color(),
            )
    if target:
        label, value = target
        axes.axhline(value, color="grey", linestyle="--", linewidth=1, label=label)
    axes.set(title=title, xlabel="step", ylabel="nats per character")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
