"""Rules of the user: labels and dimension numbers of parameters."""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon import axes as matrix_axes
from jax_muon import paths
from jax_muon.reading.decide import Parameter
from jax_muon.reading.vocabulary import ADAMW, MUON

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
    by_path = dict(paths.leaves_with_paths(rules, is_leaf=_is_value))
    for path, value in by_path.items():
        if not _is_value(value):
            raise ValueError(
                f"rules at {path!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    # A flat mapping has patterns, unless it names every parameter: that is a tree.
    flat = isinstance(rules, Mapping) and all(
        isinstance(key, str) and _is_value(value) for key, value in rules.items()
    )
    if flat and not {*rules} >= {*names}:
        paths.check_patterns_match("rules", rules, list(names))
        return lambda path: _by_pattern(rules, path, names)
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


def apply(given: Override, found: Parameter) -> Parameter:
    """A parameter as the user says, or else as it was read.

    Raises:
      ValueError: with path and shape, for dimension numbers that do not fit, or that
        come with the label "adamw".
    """
    leaf = (found.path, found.shape, found.dtype)
    label, numbers = given.label, given.numbers
    axes, reason, doubt = found.axes, found.reason, found.doubt
    if label == ADAMW and given.exact:
        raise ValueError(
            f"rules give parameter {found.path!r} of shape {found.shape} the label "
            f"{label!r} and the dimension numbers {numbers}; expected one of them"
        )
    if label not in (None, found.label):
        reason = "by your rules"
    if label is None:
        label = MUON if given.exact else found.label
    if numbers is not None and label != ADAMW:
        axes, doubt = matrix_axes.leaf_axes(*leaf, numbers), None
        reason = "dimension numbers"
    if axes is None:
        doubt = doubt or matrix_axes.not_a_matrix(*leaf)
    return dataclasses.replace(
        found, label=label, axes=axes, reason=reason, doubt=doubt
    )


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


def _names(pattern: str, path: str, names: Container[str]) -> bool:
    """True if a pattern means a parameter; the path of one means that one alone."""
    return pattern == path if pattern in names else paths.matches(pattern, path)


def _by_pattern(rules: Mapping[str, Any], path: str, names: Container[str]) -> Override:
    """The first label and the first dimension numbers whose patterns match."""
    found = Override()
    for pattern, value in rules.items():
        if not _names(pattern, path, names):
            continue
        if not isinstance(value, MuonDimensionNumbers):
            found = dataclasses.replace(found, label=found.label or value or ADAMW)
        elif found.numbers is None:
            exact = paths.names_leaf(pattern, path)
            found = dataclasses.replace(found, numbers=value, exact=exact)
    return found
