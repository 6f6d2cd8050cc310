"""Rules of the user: labels and dimension numbers of parameters."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon import axes as matrix_axes
from jax_muon import paths
from jax_muon.axes import ADAMW, MUON, Parameter

# Path pattern to a label or dimension numbers; or a tree of them (a prefix will do).
# None means AdamW, as in optax.
Rules = Any
# The rules that mean one parameter, in order: where they are, their value, and True if
# they name the parameter itself and not a module around it.
_Said = Sequence[tuple[str, str | MuonDimensionNumbers | None, bool]]


def apply(rules: Rules, found: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user says, or else as they were read.

    Raises:
      ValueError: with the path, for a value that is neither a label nor dimension
        numbers; a pattern or path that no parameter has; a parameter that a tree of
        rules leaves out; and dimension numbers that do not fit, that come with the
        label "adamw", or that apply to no matrix.
    """
    by_path = {one.path: one for one in found}
    rules = {} if rules is None else rules
    given = dict(paths.leaves_with_paths(rules, is_leaf=_is_value))
    for where, value in given.items():
        if not _is_value(value):
            raise ValueError(
                f"rules at {where!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    if isinstance(rules, Mapping) and all(
        isinstance(key, str) and _is_value(value) for key, value in rules.items()
    ):
        paths.check_patterns_match("rules", rules, list(by_path))
        said = {path: _by_pattern(rules, path, by_path) for path in by_path}
    else:
        paths.check_known("rules", given, by_path)
        said = {path: _by_prefix(given, path) for path in by_path}
    ruled = {path: _ruled(one, said[path]) for path, one in by_path.items()}
    covered: dict[str, list[str]] = {}
    for path, own in said.items():
        for where, value, _ in own:
            if isinstance(value, MuonDimensionNumbers):
                covered.setdefault(where, []).append(path)
    for where, names in covered.items():
        if all(ruled[path].label == ADAMW for path in names):
            raise ValueError(
                f"rules at {where!r}: {given[where]} for parameters that all have the "
                f"label {ADAMW!r}: {', '.join(names)}; expected the path of a "
                f"parameter, which makes it a matrix, or a rule with the label {MUON!r}"
            )
    return ruled


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _by_pattern(rules: Mapping[str, Any], path: str, names: Container[str]) -> _Said:
    """By patterns; the path of a parameter means that one alone."""
    said = []
    for pattern, value in rules.items():
        if pattern == path:
            said.append((pattern, value, True))
        elif pattern not in names and paths.matches(pattern, path):
            # A last `*` means whatever is in a module.
            own = paths.slashed(pattern).split("/")[-1] != "*" and paths.ends_with(
                pattern, path
            )
            said.append((pattern, value, own))
    return said


def _by_prefix(given: Mapping[str, Any], path: str) -> _Said:
    prefix = paths.nearest_prefix(given, path)
    if prefix is None:
        raise ValueError(
            f"rules leave out parameter {path!r}; expected a tree with a value for "
            "each parameter, or a mapping of path patterns"
        )
    return [(prefix, given[prefix], prefix == path)]


def _ruled(found: Parameter, said: _Said) -> Parameter:
    """A parameter by the first label and the first dimension numbers that mean it."""
    labels = [x or ADAMW for _, x, _ in said if not isinstance(x, MuonDimensionNumbers)]
    numbers = [(x, own) for _, x, own in said if isinstance(x, MuonDimensionNumbers)]
    label, (spec, own) = next(iter(labels), None), next(iter(numbers), (None, False))
    if label == ADAMW and own:
        raise ValueError(
            f"rules give parameter {found.path!r} of shape {found.shape} the label "
            f"{label!r} and the dimension numbers {spec}; expected one of them"
        )
    leaf = (found.path, found.shape, found.dtype)
    axes, reason, doubt = found.axes, found.reason, found.doubt
    scanned = found.scanned
    if label not in (None, found.label):
        reason = "by your rules"
    label = label or (MUON if own else found.label)
    if spec is not None and label != ADAMW:
        axes, doubt = matrix_axes.leaf_axes(*leaf, spec), None
        reason, scanned = "dimension numbers", scanned or axes.batch
    if axes is None:
        doubt = doubt or matrix_axes.not_a_matrix(found.shape, found.dtype)
    changes: dict[str, Any] = {"label": label, "axes": axes, "reason": reason}
    return dataclasses.replace(found, doubt=doubt, scanned=scanned, **changes)
