"""Which rules of the reading do real models need?

    python -m benchmarks.ablation FOLDER...

Every rule of jax_muon/reading/names is removed in turn, and all models of the folders
(see `benchmarks.reading`) are read again. A rule is a function that answers a question
about a leaf with None or False if it does not apply; without it, the answer is always
None. The table has the number of leaves whose label or axes change (axes of size 1
change no matrix), and the smallest of their models.
"""

import argparse
import importlib
import json
import pathlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from benchmarks.reading import leaves_of
from jax_muon.reading.names.read import read_leaves
from jax_muon.reading.names.tree import Leaf

MODULES = ("tree", "layers", "roles", "shapes", "decide")
Readings = list[Any]


def main(arguments: list[str] | None = None) -> int:
    """Print the table, one row for each rule."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    folders = parser.parse_args(arguments).folders
    models = {
        file.stem: leaves_of(json.loads(file.read_text())["params"])
        for folder in folders
        for file in sorted(folder.glob("*.json"))
    }
    before = {name: readings(leaves) for name, leaves in models.items()}
    print(
        "| without the rule | leaves change | in models | such as |\n|---|---|---|---|"
    )
    for rule, function in rules():
        code, function.__code__ = function.__code__, _silent.__code__
        changed = {
            name: changes(leaves, before[name]) for name, leaves in models.items()
        }
        function.__code__ = code
        needed = [name for name, count in changed.items() if count]
        example = min(needed, key=lambda name: len(models[name]), default="-")
        total = sum(changed.values())
        print(f"| `{rule}` | {total} | {len(needed)} | {example} |", flush=True)
    return 0


def rules() -> Iterator[tuple[str, types.FunctionType]]:
    """All functions and methods that may answer None or False."""
    for name in MODULES:
        module = importlib.import_module(f"jax_muon.reading.names.{name}")
        classes = [x for x in vars(module).values() if isinstance(x, type)]
        for holder in (module, *classes):
            for value in vars(holder).values():
                function = getattr(value, "fget", getattr(value, "func", value))
                own = getattr(function, "__module__", None) == module.__name__
                if own and isinstance(function, types.FunctionType):
                    answer = function.__annotations__.get("return")
                    if answer is bool or type(None) in typing.get_args(answer):
                        yield f"{name}.{function.__qualname__}", function


def _silent(*args: Any, **options: Any) -> None:
    """The answer of a rule that is not there."""


def readings(leaves: list[Leaf]) -> Readings:
    """The label of each leaf, and the axes of each matrix."""
    found = []
    for one in read_leaves(leaves):
        is_matrix = one.axes is not None and one.label != "adamw"
        sides = (
            (one.axes.batch, one.axes.reduction, one.axes.output) if is_matrix else ()
        )
        axes = [{axis for axis in side if one.shape[axis] > 1} for side in sides]
        found.append((one.label, one.doubt is None, axes))
    return found


def changes(leaves: list[Leaf], before: Readings) -> int:
    """How many leaves are read otherwise: all of them if the reading fails."""
    try:
        after = readings(leaves)
    except Exception:  # whatever a rule guards against
        return len(leaves)
    return sum(x != y for x, y in zip(before, after, strict=True))


if __name__ == "__main__":
    sys.exit(main())
