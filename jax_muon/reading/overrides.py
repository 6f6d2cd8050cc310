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
_Entries = Sequence[tuple[str, str | MuonDimensionNumbers | None, bool]]


def apply(rules: Rules, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user says, or else as they were read.

    Raises:
      ValueError: with the path, for a value that is neither a label nor dimension
        numbers; a pattern or path that no parameter has; a parameter that a tree of
        rules leaves out; and dimension numbers that do not fit, that come with the
        label "adamw", or that apply to no matrix.
    """
    by_path = {parameter.path: parameter for parameter in parameters}
    rules = {} if rules is None else rules
    values = dict(paths.leaves_with_paths(rules, is_leaf=_is_value))
    for where, value in values.items():
        if not _is_value(value):
            raise ValueError(
                f"rules at {where!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    if isinstance(rules, Mapping) and all(
        isinstance(key, str) and _is_value(value) for key, value in rules.items()
    ):
        paths.check_patterns_match("rules", rules, list(by_path))
        rules_of = {path: _by_pattern(rules, path, by_path) for path in by_path}
    else:
        paths.check_known("rules", values, by_path)
        rules_of = {path: _by_prefix(values, path) for path in by_path}
    ruled = {
        path: _ruled(parameter, rules_of[path]) for path, parameter in by_path.items()
    }
    covered: dict[str, list[str]] = {}
    for path, matching in rules_of.items():
        for where, value, _ in matching:
            if isinstance(value, MuonDimensionNumbers):
                covered.setdefault(where, []).append(path)
    for where, names in covered.items():
        if all(ruled[path].label == ADAMW for path in names):
            raise ValueError(
                f"rules at {where!r}: {values[where]} for parameters that all have the "
                f"label {ADAMW!r}: {', '.join(names)}; expected the path of a "
                f"parameter, which makes it a matrix, or a rule with the label {MUON!r}"
            )
    return ruled


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _by_pattern(rules: Mapping[str, Any], path: str, names: Container[str]) -> _Entries:
    """By patterns; the path of a parameter means that one alone."""
    matching = []
    for pattern, value in rules.items():
        if pattern == path:
            matching.append((pattern, value, True))
        elif pattern not in names and paths.matches(pattern, path):
            # A last `*` means whatever is in a module.
            is_exact = paths.slashed(pattern).split("/")[-1] != "*" and paths.ends_with(
                pattern, path
            )
            matching.append((pattern, value, is_exact))
    return matching


def _by_prefix(values: Mapping[str, Any], path: str) -> _Entries:
    prefix = paths.nearest_prefix(values, path)
    if prefix is None:
        raise ValueError(
            f"rules leave out parameter {path!r}; expected a tree with a value for "
            "each parameter, or a mapping of path patterns"
        )
    return [(prefix, values[prefix], prefix == path)]


def _ruled(parameter: Parameter, matching: _Entries) -> Parameter:
    """A parameter by the first label and the first dimension numbers that mean it."""
    labels = [
        x or ADAMW for _, x, _ in matching if not isinstance(x, MuonDimensionNumbers)
    ]
    numbers = [
        (x, is_exact)
        for _, x, is_exact in matching
        if isinstance(x, MuonDimensionNumbers)
    ]
    label = next(iter(labels), None)
    spec, is_exact = next(iter(numbers), (None, False))
    if label == ADAMW and is_exact:
        raise ValueError(
            f"rules give parameter {parameter.path!r} of shape {parameter.shape} the "
            f"label {label!r} and the dimension numbers {spec}; expected one of them"
        )
    shape, dtype = parameter.shape, parameter.dtype
    axes, reason, doubt = parameter.axes, parameter.reason, parameter.doubt
    scanned = parameter.scanned
    if label not in (None, parameter.label):
        reason = "by your rules"
    label = label or (MUON if is_exact else parameter.label)
    if spec is not None and label != ADAMW:
        axes, doubt = matrix_axes.leaf_axes(parameter.path, shape, dtype, spec), None
        reason, scanned = "dimension numbers", scanned or axes.batch
    if axes is None:
        doubt = doubt or matrix_axes.not_a_matrix(shape, dtype)
    return dataclasses.replace(
        parameter, label=label, axes=axes, reason=reason, doubt=doubt, scanned=scanned
    )
