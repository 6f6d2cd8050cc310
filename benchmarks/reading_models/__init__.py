"""Models of many packages, with the right reading of every parameter.

A module here is a framework: its `MODELS` has a `Model` by name. Each builds the model
as its package does, without values, and a loss of it; its answers were written from the
package's code and not from what a reader said. `python -m benchmarks.reading_models`
reads all of them by their losses; `benchmarks/NOTES_reading.md` has the result.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The module of each framework, and the folder of outside/ whose environment it needs;
# None: that of `make test`.
FRAMEWORKS: Mapping[str, str | None] = {
    "flax": None,
    "transformers": "transformers",
    "maxtext": "maxtext",
    "levanter": "levanter",
    "tunix": "tunix",
    "keras_hub": "keras_hub",
}

Build = Callable[[], tuple[Callable[..., Any], Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of a model, and the right reading of its parameters.

    Attributes:
      build: returns the loss, the parameters and the other arguments, as shapes.
      answers: from regular expressions to answers in the notation of `tests.programs`.
        The first that is found in a path decides. Of several choices those with as many
        letters as the parameter has axes count. Arrays with fewer than two axes that
        are longer than 1 need no answer: they are "adamw".
      stacked: from regular expressions to the axes that scans or `vmap` take, which
        the answers leave out. The first that is found in a path decides.
    """

    build: Build
    answers: Mapping[str, str]
    stacked: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def answer(self, path: str, shape: Sequence[int]) -> str:
        """The right reading of a parameter, with the axes that the answers leave out.

        Raises:
          ValueError: no answer fits.
        """
        layers = _first(self.stacked, path) or ()
        inner = [axis for axis in range(len(shape)) if axis not in layers]
        if sum(shape[axis] > 1 for axis in inner) < 2:
            return "adamw"
        text = _first(self.answers, path)
        if text is None:
            raise ValueError(f"no answer for {path!r} {tuple(shape)}")
        mark = "?" if text.endswith("?") else ""
        text, _, _ = text.removesuffix("?").partition(", ")  # and its role
        choices = []
        for choice in text.split(" or "):
            if not {*choice} <= {*"bio"}:
                choices.append(choice)
            elif len(choice) == len(inner):
                letters = dict(zip(inner, choice, strict=True))
                whole = [letters.get(axis, "b") for axis in range(len(shape))]
                choices.append("".join(whole))
        if not choices:
            raise ValueError(f"answer {text!r} for {path!r} {tuple(shape)}")
        return " or ".join(choices) + mark


def _first(table: Mapping[str, Any], path: str) -> Any:
    """The value of the first expression that is found in the path, or None."""
    return next((value for key, value in table.items() if re.search(key, path)), None)
