"""Dimension numbers as users give them: one for all, patterns, a tree, or a function.

Numbers that name a parameter make it a matrix. Those for a module, or for the whole
model, say how the matrices in it are read, and leave its biases and norms alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from jax_muon.reading import paths
from jax_muon.reading.labels import ADAMW, MUON

# One for all parameters; path patterns to one each; a tree (or a prefix of one) of
# them; or a function of the parameters that gives such a tree. None, at any place,
# reads the parameter by its path, shape and neighbours.
DimensionNumbers = Any

# The numbers of a path, and whether they name exactly this parameter.
Lookup = Callable[[str], tuple[MuonDimensionNumbers | None, bool]]


def lookup(given: DimensionNumbers, tree: Any, names: Sequence[str]) -> Lookup:
    """Find the dimension numbers of every parameter.

    Args:
      given: what the user said.
      tree: the parameters, which a function is given.
      names: their paths.

    Raises:
      ValueError: for anything but dimension numbers, and for paths and patterns that no
        parameter has.
    """
    if _is_patterns(given):
        _check_numbers(given)
        paths.check_patterns_match("dimension_numbers", given, list(names))
        return lambda path: _by_pattern(given, path)
    flat = _flat(given(tree) if paths.is_function(given) else given)
    by_path = {path: numbers for path, numbers in flat if numbers is not None}
    _check_numbers(by_path)
    paths.check_known("dimension_numbers", by_path, names)
    return lambda path: (paths.find_prefix(by_path, path), path in by_path)


def check_used(given: DimensionNumbers, labels: Mapping[str, str]) -> None:
    """Raise a ValueError for numbers of a module in which nothing is a matrix."""
    if not _is_patterns(given):
        return
    for pattern in given:
        own = {pattern: given[pattern]}
        covered = [path for path in labels if _by_pattern(own, path)[0] is not None]
        if covered and all(labels[path] == ADAMW for path in covered):
            raise ValueError(
                f"dimension_numbers at {pattern!r}: every parameter there is labelled "
                f"{ADAMW!r}: {', '.join(covered)}; expected the path of a parameter, "
                f"which makes it a matrix, or labels that say {MUON!r}"
            )


def optax_labels(numbers: DimensionNumbers, params: Any) -> Any:
    """Labels by a tree of `optax.contrib.muon`: AdamW where it has None."""
    if numbers is None:  # optax's own default
        return jax.tree.map(lambda x: MUON if len(x.shape) == 2 else ADAMW, params)
    flat = _flat(numbers(params) if paths.is_function(numbers) else numbers)
    return {path: ADAMW if found is None else MUON for path, found in flat}


def optax_numbers(numbers: DimensionNumbers, params: Any) -> Any:
    """The same numbers as a tree; None at its root means all of two axes to optax."""
    if numbers is None:
        return MuonDimensionNumbers(0, 1)
    return numbers(params) if paths.is_function(numbers) else numbers


def _is_patterns(given: DimensionNumbers) -> bool:
    return (
        isinstance(given, Mapping)
        and bool(given)
        and all(isinstance(pattern, str) for pattern in given)
        and all(x is None or _is_numbers(x) for x in given.values())
    )


def _by_pattern(
    patterns: Mapping[str, MuonDimensionNumbers | None], path: str
) -> tuple[MuonDimensionNumbers | None, bool]:
    for pattern, numbers in patterns.items():
        if paths.matches(pattern, path):
            return numbers, numbers is not None and paths.names_leaf(pattern, path)
    return None, False


def _flat(tree: Any) -> list[tuple[str, Any]]:
    """Paths of numbers and of None, which otherwise is not a leaf."""
    return paths.leaves_with_paths(tree, is_leaf=lambda x: x is None or _is_numbers(x))


def _is_numbers(x: Any) -> bool:
    return isinstance(x, MuonDimensionNumbers)


def _check_numbers(by_path: Mapping[str, Any]) -> None:
    for path, numbers in by_path.items():
        if numbers is not None and not _is_numbers(numbers):
            raise ValueError(
                f"dimension_numbers at {path!r}: {numbers!r}; expected "
                "optax.contrib.MuonDimensionNumbers or None"
            )
