"""How the parameters of real models are read: right, refused or wrong.

    python -m benchmarks.reading FOLDER

A folder holds one file `MODEL.json` a model: `{"params": [{"path", "shape", "dtype",
"expect"}]}`, where `expect` has the label ("muon", "adamw" or "either") and,
if that is not "adamw", the axes as `batch`, `in` and `out`, with further good readings
in `also`; `"knowable": false` marks leaves that nothing in the tree decides. Axes of
size 1 are not compared: they change no matrix. A model has one line, and each wrong or
refused kind of leaf one line below it. The exit status is 1 if a knowable leaf is
wrong.
"""

import argparse
import collections
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax_muon.axes import Parameter
from jax_muon.reading.names.read import read_leaves
from jax_muon.reading.names.tree import Leaf

RIGHT, REFUSED, WRONG, UNKNOWABLE = "right", "refused", "wrong", "unknowable"


# Layer numbers: `layers/3/mlp`, `Dense_0/kernel`.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?=/|$)|(?<=_)\d+(?=/)")


def main(arguments: list[str] | None = None) -> int:
    """Score all models of a folder and print the lines; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args(arguments).folder
    total: collections.Counter[str] = collections.Counter()
    files = sorted(folder.glob("*.json"))
    for file in files:
        params = json.loads(file.read_text())["params"]
        counts, kinds = score(params)
        total += counts
        print(f"{file.stem:42s} {line(counts)}")
        for kind, count in kinds.items():
            print(f"  {count:4d} x {kind}")
    print(f"TOTAL of {len(files)} models: {line(total)}")
    return 1 if total[WRONG] else 0


def line(counts: collections.Counter[str]) -> str:
    """The counts of one model, or of all, in words."""
    leaves = sum(counts.values())
    share = 100 / max(leaves, 1)
    text = (
        f"{leaves} leaves, {counts[RIGHT]} right, {counts[REFUSED]} refused "
        f"({counts[REFUSED] * share:.1f} %), {counts[WRONG]} wrong"
    )
    unknowable = counts[UNKNOWABLE]
    return f"{text}, {unknowable} wrong but not knowable" if unknowable else text


def score(
    params: list[dict[str, Any]],
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """How many leaves of a model are read how, and the kinds that are not right."""
    reads = read_leaves(leaves_of(params))
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for param, read in zip(params, reads, strict=True):
        outcome, text = judge(param, read)
        counts[outcome] += 1
        if outcome != RIGHT:
            kind = _NUMBER.sub("N", param["path"])
            kinds[f"{outcome} {kind} {tuple(param['shape'])}: {text}"] += 1
    return counts, kinds


def leaves_of(params: list[dict[str, Any]]) -> list[Leaf]:
    """The leaves of a model as the reading takes them."""
    return [
        Leaf(param["path"], tuple(param["shape"]), param["dtype"]) for param in params
    ]


def judge(param: dict[str, Any], read: Parameter) -> tuple[str, str]:
    """What a reading is, against the right answer, and both of them as text."""
    expect, shape = param["expect"], param["shape"]
    answers = [one for one in (expect, *expect.get("also", ())) if "in" in one]
    good = [_sides(one, shape) for one in answers]
    shown = " or ".join(_show(one, shape) for one in good)
    right = f"right is {expect['label']} {shown}".rstrip()
    if read.doubt is not None:
        return REFUSED, f"{right} ({read.role})"
    mine = f"{read.role}, {read.label}"
    is_right = expect["label"] in ("either", read.label)
    if is_right and read.label == "muon" and good:
        assert read.axes is not None
        axes = {
            "batch": read.axes.batch,
            "in": read.axes.reduction,
            "out": read.axes.output,
        }
        is_right = _sides(axes, shape) in good
        mine += f" {_show(_sides(axes, shape), shape)}"
    if is_right:
        return RIGHT, ""
    wrong = WRONG if expect.get("knowable", True) else UNKNOWABLE
    return wrong, f"{mine}; {right} ({read.reason})"


def answer_for(path: str, answers: Mapping[str, str]) -> str:
    """The answer in `tests.programs`' notation for the leaf at a path.

    Args:
      path: of the leaf.
      answers: from paths or folders, several of them with spaces between, to answers.
        The longest that fits decides.

    Raises:
      KeyError: no answer fits.
    """
    by_name = {name: answers[key] for key in answers for name in key.split()}
    while path not in by_name and "/" in path:
        path = path.rpartition("/")[0]
    return by_name[path]


def expectation(answer: str, shape: Sequence[int]) -> dict[str, Any]:
    """An answer in `tests.programs`' notation as `expect` of a fixture.

    Raises:
      ValueError: an answer has another number of axes than the shape.
    """
    labels, axes = set(), []
    axes_or_role, _, _ = answer.removesuffix("?").partition(", ")
    for choice in axes_or_role.split(" or "):
        if choice in ("adamw", "embedding", "head", "router", "unused"):
            labels.add("adamw")
            continue
        if len(choice) != len(shape) or not {*choice} <= {*"bio"}:
            raise ValueError(f"answer {answer!r} for an array {tuple(shape)}")
        labels.add("muon")
        axes.append(
            {
                side: [axis for axis, one in enumerate(choice) if one == side[0]]
                for side in ("batch", "in", "out")
            }
        )
    expect: dict[str, Any] = {"label": "either" if len(labels) > 1 else labels.pop()}
    if axes:
        expect |= axes[0]
        expect["also"] = axes[1:]
    if answer.endswith("?"):
        expect["knowable"] = False
    return expect


def _sides(axes: Any, shape: list[int]) -> tuple[frozenset[int], ...]:
    return tuple(
        frozenset(axis for axis in axes[side] if shape[axis] != 1)
        for side in ("batch", "in", "out")
    )


def _show(sides: tuple[frozenset[int], ...], shape: list[int]) -> str:
    """One letter an axis: b(atch), i(n), o(ut), and a dot for size 1."""
    letters = zip("bio", sides, strict=True)
    by_axis = {axis: letter for letter, axes in letters for axis in axes}
    return "".join(by_axis.get(axis, ".") for axis in range(len(shape)))


if __name__ == "__main__":
    sys.exit(main())
