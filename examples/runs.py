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

    def restore(self, state: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the last step and its state, or 0 and the state that was given.

        Raises:
            ValueError: the checkpoint's parameters are those of another model.
        """
        step = self.manager.latest_step()
        if step is None:
            return 0, state
        saved = shapes(self.manager.item_metadata(step)["params"])
        wanted = shapes(state["params"])
        for path in sorted(saved | wanted):
            if saved.get(path) != wanted.get(path):
                raise ValueError(
                    f"{self.folder / str(step)} is of another model: {path} is "
                    f"{saved.get(path, 'missing')} there and "
                    f"{wanted.get(path, 'missing')} in this one. Valid are the --width "
                    f"and --depth that the run began with, or another --name"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return step, self.manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self.manager.close()  # waits for what is being written


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """{"blocks/0/attn/q/kernel": (128, 128), ...}"""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(
            "/value"
        ): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


class Metrics:
    """metrics.jsonl, one line a step.

    The numbers stay on the device until they are flushed, so that the host does not
    wait for each step; in normal running the newest ones are left for the next time.
    """

    def __init__(self, path: pathlib.Path, last_step: int):
        self.path = path
        self.waiting: list[dict[str, Any]] = []
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
        with self.path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return records


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, less a last line that a kill cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps and values of one metric, wherever it was measured."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def draw(
    curves: dict[str, tuple[list[int], list[float]]],
    title: str,
    path: pathlib.Path,
    target: float | None = None,
    label: str = "",
) -> None:
    """One line for each curve, and a dashed one at the target."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name)
    if target is not None:
        axes.axhline(target, color="grey", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
