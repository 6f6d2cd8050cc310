"""What a user says about parameters: labels and dimension numbers."""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon import paths
from jax_muon.reading.roles import ADAMW, MUON

# Path pattern to a label or dimension numbers; or a tree of them (a prefix will do).
# None means AdamW, as in optax.
Rules = Any


@dataclasses.dataclass(frozen=True)
class Override:
    """What the rules say of one parameter."""

    label: str | None = None
    numbers: MuonDimensionNumbers | None = None
    exact: bool = False  # the numbers name this parameter and not a module around it


def lookup(rules: Rules, names: Sequence[str]) -> Callable[[str], Override]:
    """Find what the rules say of a parameter.

    Args:
      rules: what the user gave.
      names: the paths of all parameters.

    Raises:
      ValueError: with the path, for a value that is neither a label nor dimension
        numbers; a pattern or path that no parameter has; and, when it is looked up, a
        parameter that a tree of rules leaves out.
    """
    if rules is None:
        return lambda path: Override()
    flat = paths.leaves_with_paths(rules, is_leaf=_is_value)
    for path, value in flat:
        if not _is_value(value):
            raise ValueError(
                f"rules at {path!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    if _is_patterns(rules, names):
        paths.check_patterns_match("rules", rules, list(names))
        return lambda path: _by_pattern(rules, path, names)
    by_path = dict(flat)
    paths.check_known("rules", by_path, names)

    def find(path: str) -> Override:
        prefix = paths.nearest_prefix(by_path, path)
        if prefix is None:
            raise ValueError(
                f"rules leave out parameter {path!r}; expected a tree with a value for "
                "each parameter, or a mapping of path patterns"
            )
        value = by_path[prefix]
        if isinstance(value, MuonDimensionNumbers):
            return Override(None, value, prefix == path)
        return Override(value or ADAMW)

    return find


def check_used(rules: Rules, labels: Mapping[str, str]) -> None:
    """Raise a ValueError for dimension numbers that apply to no matrix."""
    for where, value in paths.leaves_with_paths(rules, is_leaf=_is_value):
        covered = [path for path in labels if _names(where, path, labels)]
        numbers = isinstance(value, MuonDimensionNumbers)
        if numbers and covered and all(labels[path] == ADAMW for path in covered):
            raise ValueError(
                f"rules at {where!r}: {value} for parameters that all have the label "
                f"{ADAMW!r}: {', '.join(covered)}; expected the path of a parameter, "
                f"which makes it a matrix, or a rule with the label {MUON!r}"
            )


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _is_patterns(rules: Rules, names: Sequence[str]) -> bool:
    """True for a flat mapping, unless it names every parameter: that is a tree."""
    flat = isinstance(rules, Mapping) and all(
        isinstance(k, str) and _is_value(v) for k, v in rules.items()
    )
    return flat and not {*rules} >= {*names}


def _names(pattern: str, path: str, names: Container[str]) -> bool:
    """True if a pattern means a parameter; the path of one means that one alone."""
    return pattern == path if pattern in names else paths.matches(pattern, path)


def _by_pattern(rules: Mapping[str, Any], path: str, names: Container[str]) -> Override:
    """The first label and the first dimension numbers whose patterns match."""
    label, numbers, exact = None, None, False
    for pattern, value in rules.items():
        if not _names(pattern, path, names):
            continue
        if isinstance(value, MuonDimensionNumbers):
            if numbers is None:
                numbers, exact = value, paths.names_leaf(pattern, path)
        elif label is None:
            label = value or ADAMW
    return Override(label, numbers, exact)
