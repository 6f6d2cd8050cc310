"""Whether a parameter is read rightly, by answers that were written down by hand.

The notation of answers is that of `tests.programs`. Axes of size 1 are not compared:
they change no matrix.
"""

from collections.abc import Sequence

from jax_muon.matrices.matrices import Parameter

RIGHT, REFUSED, WRONG, OPEN = "right", "refused", "wrong", "open"
NO_MATRICES = ("adamw", "embedding", "head", "router", "unused")


def judge(answer: str, read: Parameter) -> tuple[str, str]:
    """What a reading is beside the right answer, and both of them as text.

    "open" is a reading other than an answer that the loss does not determine.

    Raises:
      ValueError: the answer has another number of axes than the parameter.
    """
    choices = answer.removesuffix("?").partition(", ")[0].split(" or ")
    matrices = [choice for choice in choices if choice not in NO_MATRICES]
    shape = read.shape
    if any(len(x) != len(shape) or not {*x} <= {*"bio"} for x in matrices):
        raise ValueError(f"answer {answer!r} for an array {tuple(shape)}")
    if read.doubt is not None:
        return REFUSED, f"right is {answer} ({read.role})"
    if read.label == "muon":
        assert read.axes is not None
        sides = zip(
            "bio", (read.axes.batch, read.axes.reduction, read.axes.output), strict=True
        )
        letters = {axis: letter for letter, axes in sides for axis in axes}
        found = "".join(letters[axis] for axis in range(len(shape)))
        good = [_visible(choice, shape) for choice in matrices]
        if _visible(found, shape) in good:
            return RIGHT, ""
        mine = f"{read.role}, muon {found}"
    elif len(matrices) < len(choices):
        return RIGHT, ""
    else:
        mine = f"{read.role}, {read.label}"
    outcome = OPEN if answer.endswith("?") else WRONG
    return outcome, f"{mine}; right is {answer} ({read.reason})"


def _visible(letters: str, shape: Sequence[int]) -> str:
    """One letter an axis, b(atch), i(n) or o(ut), and a dot for size 1."""
    pairs = zip(letters, shape, strict=True)
    return "".join("." if size == 1 else letter for letter, size in pairs)
