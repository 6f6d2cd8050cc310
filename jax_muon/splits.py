"""Splits: which parameters hold several matrices, and how they are divided.

A kernel with query, key and value side by side is three matrices: each has its own
polar factor, its own NorMuon means, its own scale. `parts` runs a transform on them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_muon import checks, trees


@dataclasses.dataclass(frozen=True)
class Split:
    """How one axis of a parameter is divided.

    Attributes:
      parts: names of equal parts, `("query", "key", "value")`; names with their widths,
        `{"query": 768, "key": 256, "value": 256}`; or a number of equal parts, such as
        heads, which become a batch: one part with an axis in front of the last two.
      axis: of the parameter; the default is the last, the outputs of a kernel.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> params = {"attn": {"qkv": jnp.ones((4, 12))}}
      >>> splits = {"qkv": jm.Split(("query", "key", "value"))}
      >>> matrices = jm.read(params, rules={"*": "muon"}, splits=splits)
      >>> tx = jm.nanochat(matrices=matrices)
      >>> lines = str(jm.describe(tx, params)).splitlines()
      >>> [line.split()[0] for line in lines[1:4]]
      ['attn/qkv/query', 'attn/qkv/key', 'attn/qkv/value']
    """

    parts: int | Sequence[str] | Mapping[str, int]
    axis: int = -1

    def __post_init__(self) -> None:
        expected = "a number of at least 1, names, each once, or names with widths"
        if isinstance(self.parts, int):
            checks.count("parts", self.parts)
        elif (
            not isinstance(self.parts, (Mapping, Sequence))
            or not self.parts
            or len({*self.parts}) < len(self.parts)
        ):
            checks.refuse("parts", self.parts, expected)
        elif isinstance(self.parts, Mapping):
            checks.mapping("parts", self.parts, expected, checks.count)

    def fitted(self, path: str, shape: tuple[int, ...]) -> "Fitted":
        """The same for one parameter; a ValueError if the axis or parts do not fit."""
        where = f"splits: parameter {path!r} of shape {shape}"
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where} has no axis {self.axis}; expected {-len(shape)} to "
                f"{len(shape) - 1}"
            )
        parts, size = self.parts, shape[self.axis]
        if not isinstance(parts, (int, Mapping)):
            parts = dict.fromkeys(parts, size // len(parts))
        if size % parts if isinstance(parts, int) else sum(parts.values()) != size:
            raise ValueError(
                f"{where}: axis {self.axis} of size {size} does not divide into "
                f"parts={self.parts!r}; expected widths with the sum {size}, or equal "
                "parts whose number divides it"
            )
        return Fitted(parts, self.axis % len(shape))


@dataclasses.dataclass(frozen=True)
class Fitted(Split):
    """A split of one parameter: a width for each name, and an axis of at least 0."""

    parts: int | Mapping[str, int]


# Path pattern to split. Patterns apply in order, also to parts of parts.
Splits = Mapping[str, Split]


def check(splits: Any) -> None:
    """Raise a ValueError unless splits are a mapping of path patterns to Split."""
    checks.mapping(
        "splits",
        splits,
        "a mapping of path patterns to Split",
        lambda where, x: checks.kind(where, x, Split, "a jax_muon.Split"),
    )


def fit(pattern: str, split: Split, params: Any) -> dict[str, Fitted]:
    """The split of every parameter that the pattern matches, by path."""
    leaves = trees.leaves_with_paths(params)
    trees.check_patterns_match("splits", [pattern], [path for path, _ in leaves])
    return {
        path: split.fitted(path, tuple(x.shape))
        for path, x in leaves
        if trees.matches(pattern, path)
    }


def batch_axis(ndim: int) -> int:
    """Where equal parts of an array become a batch: in front of (in, out)."""
    return max(ndim - 2, 0)
