"""The folder of a training run: its metrics, checkpoints and pictures.

A run may be killed at any moment and resumed from its last checkpoint. orbax writes a
checkpoint completely or not at all; if it was damaged later, the one before is used.
The metrics of all steps up to a checkpoint are written before it. When a run is
resumed, metrics of later steps are dropped, since those steps are repeated.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from layouts import in_any, once
from matplotlib.figure import Figure


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a folder until the run ends or its process dies.

    Raises:
        ValueError: another run holds the lock.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by {file.read()}; expected another --name, or to "
                "wait until that run has ended"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


class Stop:
    """Notes Ctrl-C, or a cluster's SIGTERM: the run saves its state and ends.

    A second signal ends it at once.
    """

    asked = False

    def __call__(self, number: int, frame: Any) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Signals set a flag, so that no step is interrupted halfway."""
    stop = Stop()
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
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


def parse_json(text: str, where: str) -> dict[str, Any]:
    """An object in JSON.

    Raises:
        ValueError: it is not one, or only the beginning of one.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is damaged: {error}; expected JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {text:.40}; expected an object in JSON")
    return found


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class OtherModelError(ValueError):
    """A checkpoint holds other parameters than those of this run."""


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
        """Starts to write a checkpoint, once the previous one is written.

        Raises:
            OSError: one of the two could not be written.
        """
        saved = {"params": params, "opt_state": state}
        with self._writing():
            self.manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, params: Any, state: Any) -> tuple[int, Any, Any]:
        """Restores the newest checkpoint that can be read.

        Damaged ones are renamed, with a warning.

        Args:
            params: shapes, dtypes and shardings of the parameters.
            state: the same for the optimizer's state.

        Returns:
            The step, parameters and state; 0, None and None without a checkpoint.

        Raises:
            OtherModelError: the checkpoint belongs to another model.
            ValueError: none of the checkpoints can be read.
        """
        errors: dict[int, Exception | None] = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            errors[step] = None
            try:
                found = self._read(step, {"params": params, "opt_state": state})
            except OtherModelError:
                raise
            except Exception as error:  # orbax has many kinds of them
                errors[step] = error
            if not in_any(errors[step] is not None):
                break
        else:
            if not errors:
                return 0, None, None
            raise ValueError(
                f"none of the checkpoints in {self.folder} can be read: "
                f"{sorted(errors)}; expected another --name, or a new run without "
                "--resume"
            ) from next(iter(errors.values()))
        del errors[step]
        for damaged, error in errors.items():
            path = self.folder / str(damaged)
            reason = str(error or "in another process").partition("\n")[0]
            print(f"warning: {path} is damaged and passed over for {step}: {reason}")
            once(set_aside, path)
        self.manager.reload()
        # A run that was killed between writing one and deleting another left three.
        for old in sorted(self.manager.all_steps())[:-2]:
            self.manager.delete(old)
        return step, found["params"], found["opt_state"]

    def _read(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        saved = shapes(self.manager.item_metadata(step)["params"])
        here = shapes(wanted["params"])
        for path in sorted(saved | here):
            if saved.get(path) != here.get(path):
                raise OtherModelError(
                    f"{self.folder / str(step)} is of another model: {path} is "
                    f"{saved.get(path, 'missing')} there and "
                    f"{here.get(path, 'missing')} in this one; expected the --width "
                    "and --depth that the run began with, or another --name"
                )
        return self.manager.restore(step, args=ocp.args.StandardRestore(wanted))

    def close(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
            OSError: it could not be written.
        """
        with self._writing():
            self.manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax has many kinds of them
            reason = str(error).partition("\n")[0]
            raise OSError(
                f"no checkpoint written to {self.folder}: {reason}"
            ) from error


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """{"blocks/0/attn/q/kernel": (128, 128), ...}"""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name.removesuffix("/value")] = tuple(leaf.shape)
    return found


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
    """The records of metrics.jsonl, without a last line that a kill cut short.

    Raises:
        ValueError: another line is damaged.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        parse_json(line, f"{path}, line {number},")
        for number, line in enumerate(lines, start=1)
        if line.endswith("\n")
    ]


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
    """Draws loss curves, and marks where each first reaches a target."""
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
