"""Whether a parameter is read rightly, by answers that were written down by hand.

An answer is `expect` of a leaf: the label ("muon", "adamw" or "either") and, if that is
not "adamw", the axes as `batch`, `in` and `out`, with further good readings in `also`;
`"knowable": false` marks leaves that nothing decides. Axes of size 1 are not compared:
they change no matrix.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_muon.axes import Parameter

RIGHT, REFUSED, WRONG, UNKNOWABLE = "right", "refused", "wrong", "unknowable"


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
