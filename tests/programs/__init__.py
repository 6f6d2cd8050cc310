"""Small programs in plain JAX, with the right reading of every parameter.

Each program is a loss in one of the styles in which people write models: a form of
experts, of attention, of layers, of products between parameters. `PROGRAMS` has all of
them by name. A test reads each by its loss and compares every leaf with the answer in
its decorator, which was written from the code and not from what the reader said:

    @program({"emb": "embedding", "up": "bio", "down": "bio or adamw"})

Most programs are a few lines of a language model: `parts.between` and
`parts.language_model` register a function of x and the parameters alone.

A key names a leaf or a folder that it is in, or several with spaces between them; the
longest that fits decides. A value is

- one letter an axis, b(atch), i(n) or o(ut), of a matrix that Muon gets, with its role
  after a comma if the loss shows more than a product ("ioo, query"). Axes of size 1 are
  not compared;
- "embedding", "head", "router" or "unused": AdamW gets it, and this is its role;
- "adamw": AdamW gets it;
- several with " or " between them: any of them is right;
- with a "?" at the end: the loss does not determine it, so another answer is no error.

`benchmarks.reading_models` has the same for the models of other packages.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.reading import answer_for
from jax_muon.trees import leaves_with_paths

ROLES = (
    *("embedding", "head", "router", "unused"),
    *("query", "key", "value", "out"),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss with its parameters.

    Attributes:
      name: the function that builds it.
      loss: a function of the parameters and `args`.
      params: a tree of `jax.ShapeDtypeStruct`.
      args: the other arguments, as shapes or arrays.
      answers: the right reading of each leaf by path, as the values of the decorator.
    """

    name: str
    loss: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    answers: Mapping[str, str]

    @property
    def roles(self) -> dict[str, str]:
        """The roles that the answers name, by path."""
        last = {path: text.split(", ")[-1] for path, text in self.answers.items()}
        return {path: role for path, role in last.items() if role in ROLES}


_BUILDERS: dict[str, Callable[[], Program]] = {}


def program(answers: Mapping[str, str]) -> Callable[[Callable[[], Any]], Any]:
    """Register a function that returns `loss, params, args`."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Program:
            loss, params, args = build()
            paths = [path for path, _ in leaves_with_paths(params)]
            found = {path: answer_for(path, answers) for path in paths}
            return Program(build.__name__, loss, params, args, found)

        assert build.__name__ not in _BUILDERS, build.__name__
        _BUILDERS[build.__name__] = functools.cache(make)
        return build

    return register


MODULES = (
    "attention",
    "choices",
    "conventions",
    "experts",
    "gradients",
    "later",
    "layers",
    "losses",
    "made_inside",
    "products",
    "recurrent",
    "smaller",
    "trees",
)
for _module in MODULES:
    importlib.import_module(f"tests.programs.{_module}")
PROGRAMS: Mapping[str, Callable[[], Program]] = _BUILDERS
