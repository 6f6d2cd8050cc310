"""Rules of the user: labels and dimension numbers of parameters."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon import trees
from jax_muon.matrices import ADAMW, MUON, Parameter, leaf_axes, not_a_matrix

# Path pattern to a label or dimension numbers; or a tree of these, whose paths are the
# patterns. None means AdamW, as in optax.
Rules = Any
# The rules that mean one parameter, in order: the pattern, its value, and True if it
# names the parameter itself and not a module around it.
_Entries = Sequence[tuple[str, str | MuonDimensionNumbers | None, bool]]


def apply(rules: Rules, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user says, or else as they were read."""
    by_path = {parameter.path: parameter for parameter in parameters}
    is_flat = isinstance(rules, Mapping) and all(map(_is_value, rules.values()))
    if rules is None or (is_flat and all(isinstance(key, str) for key in rules)):
        values = dict(rules or {})
    else:
        values = dict(trees.leaves_with_paths(rules, is_leaf=_is_value))
    for where, value in values.items():
        if isinstance(value, str) and " or " in value:
            raise ValueError(f"rules at {where!r}: {value!r}; expected one of the two")
        if not _is_value(value):
            raise ValueError(
                f"rules at {where!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    patterns = [pattern for pattern in values if pattern not in by_path]
    trees.check_patterns_match("rules", patterns, list(by_path))
    rules_of = {path: _matching(values, path, by_path) for path in by_path}
    ruled = {
        path: _ruled(parameter, rules_of[path]) for path, parameter in by_path.items()
    }
    covered: dict[str, list[str]] = {}
    for path, matching in rules_of.items():
        for where, *_ in matching:
            covered.setdefault(where, []).append(path)
    for where, value in values.items():
        named = covered.get(where, []) if _means_matrices(value) else []
        if named and all(ruled[path].label == ADAMW for path in named):
            expected = (
                "a pattern of matrices, before other rules for them"
                if value == MUON
                else "the path of a parameter, which makes it a matrix, or a rule with "
                f"the label {MUON!r}"
            )
            raise ValueError(
                f"rules at {where!r}: {value} for parameters that all have the "
                f"label {ADAMW!r}: {', '.join(named)}; expected {expected}"
            )
    return ruled


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _means_matrices(x: Any) -> bool:
    return x == MUON or isinstance(x, MuonDimensionNumbers)


def _matching(rules: Mapping[str, Any], path: str, names: Container[str]) -> _Entries:
    """The rules that mean a parameter; the path of a parameter means that one alone."""
    matching = []
    for pattern, value in rules.items():
        if pattern == path:
            matching.append((pattern, value, True))
        elif pattern not in names and trees.matches(pattern, path):
            # A last `*` means whatever is in a module.
            is_exact = trees.slashed(pattern).split("/")[-1] != "*" and trees.ends_with(
                pattern, path
            )
            matching.append((pattern, value, is_exact))
    return matching


def _ruled(parameter: Parameter, matching: _Entries) -> Parameter:
    """A parameter by the first label and the first dimension numbers that mean it.

    "muon" and dimension numbers pass over a vector, unless its whole path is given.
    """
    path, shape, dtype = parameter.path, parameter.shape, parameter.dtype
    problem = not_a_matrix(shape, dtype)
    if parameter.axes is None and (problem or parameter.role == "vector"):
        matching = [x for x in matching if x[0] == path or not _means_matrices(x[1])]
    numbers = [x for x in matching if isinstance(x[1], MuonDimensionNumbers)]
    labels = [x or ADAMW for _, x, _ in matching if isinstance(x, str | None)]
    _, spec, is_exact = next(iter(numbers), ("", None, False))
    label = next(iter(labels), MUON if is_exact else parameter.label)
    if label == ADAMW and is_exact:
        raise ValueError(
            f"rules give parameter {path!r} of shape {shape} the label {label!r} and "
            f"the dimension numbers {spec}; expected one of them"
        )
    axes, scanned, role = parameter.axes, parameter.scanned, parameter.role
    reason, doubt = parameter.reason, parameter.doubt
    if labels and label != parameter.label:
        reason = "by your rules"
    if spec is not None and label != ADAMW:
        axes = leaf_axes(path, shape, dtype, spec)
        reason, scanned = "dimension numbers", scanned or axes.batch
    elif labels and axes is None and (label == MUON or (doubt and label != ADAMW)):
        doubt = "nothing shows which of its axes are batch, in and out"
        if problem or len(shape) == 2:
            axes = leaf_axes(path, shape, dtype, MuonDimensionNumbers(0, 1))
            reason = "by your rules: (in, out)"
    if axes is not None and axes != parameter.axes:
        doubt, role = None, "kernel" if role in ("-", "unknown") else role
    said: dict[str, Any] = {"label": label, "reason": reason, "doubt": doubt}
    return dataclasses.replace(parameter, role=role, axes=axes, scanned=scanned, **said)
