"""The records of runs, a line of JSON each; nothing that is there is run again."""

import contextlib
import fcntl
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from runs import read, write  # those of the example

from benchmarks.learning.training import Point, data, train

Record = dict[str, Any]
FOLDER = pathlib.Path("benchmarks/results/learning")


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process has a file of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or its process dies
        yield


class Records:
    """A folder with a file for each optimizer."""

    def __init__(
        self,
        folder: pathlib.Path = FOLDER,
        command: str = "",
        make: Callable[[Any], Record] | None = None,
    ):
        self.folder, self.command, self.make = folder, command, make

    def path(self, optimizer: str) -> pathlib.Path:
        """The file with the runs of an optimizer."""
        return self.folder / f"{optimizer}.jsonl"

    def all(self, optimizer: str) -> list[Record]:
        """Every run of an optimizer."""
        return read(self.path(optimizer))

    def find(self, point: Point, sha256: str | None = None) -> Record | None:
        """The record of a run, if there is one; on this text, or on any."""
        wanted = point._asdict()
        for record in self.all(point.optimizer):
            same = all(record[key] == value for key, value in wanted.items())
            if same and sha256 in (None, record["data"]["sha256"]):
                return record
        return None

    def measure(self, point: Point) -> Record:
        """The record of a run, which is made if there is none."""
        if found := self.find(point, data().sha256):
            return found
        path = self.path(point.optimizer)
        text = json.dumps(point, sort_keys=True)
        run = hashlib.sha256(text.encode()).hexdigest()
        with alone(self.folder / ".locks" / run):
            if found := self.find(point, data().sha256):  # by another process
                return found
            record = (self.make or train)(point) | {"command": self.command}
            with alone(self.folder / ".locks" / point.optimizer):
                kept = "".join(json.dumps(r) + "\n" for r in self.all(point.optimizer))
                write(path, kept + json.dumps(record) + "\n")
        shown = record["stopped"] or f"{record['validation_loss']:.4f}"
        print(f"{point} {record['seconds']} s: {shown}", flush=True)
        return record
