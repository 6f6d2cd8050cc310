"""Rules of the user: labels and dimension numbers of parameters."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon import trees
from jax_muon.matrices import ADAMW, MUON, Parameter, leaf_axes, not_a_matrix

# Path pattern to a label or dimension numbers; or a tree of these, whose paths are the
# patterns. None means AdamW, as in optax.
Rules = Any


def apply(rules: Rules, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user says, or else as they were read."""
    by_path = {parameter.path: parameter for parameter in parameters}
    is_flat = isinstance(rules, Mapping) and all(map(_is_value, rules.values()))
    if rules is None or (is_flat and all(isinstance(key, str) for key in rules)):
        values = dict(rules or {})
    else:
        flat = trees.leaves_with_paths(rules, is_leaf=_is_value)
        values = {path or "*": value for path, value in flat}
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
    matching = {path: _matching(values, path, by_path) for path in by_path}
    ruled = {path: _ruled(x, values, matching[path]) for path, x in by_path.items()}
    for where in filter(lambda where: _means_matrices(values[where]), values):
        named = [path for path in by_path if where in matching[path]]
        if named and all(ruled[path].label == ADAMW for path in named):
            raise ValueError(
                f"rules at {where!r}: {values[where]} for parameters that all have the "
                f"label {ADAMW!r}: {', '.join(named)}; expected the whole path of a "
                "parameter, or a pattern of matrices, before rules with other labels"
            )
    return ruled


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _means_matrices(x: Any) -> bool:
    return x == MUON or isinstance(x, MuonDimensionNumbers)


def _matching(
    patterns: Iterable[str], path: str, names: Container[str]
) -> dict[str, bool]:
    """The patterns that match a path; True if they mean it, not a module around it.

    The path of a parameter means that one alone. A last `*` means what is in a module.
    """
    return {
        pattern: not trees.slashed(f"/{pattern}").endswith("/*")
        and trees.ends_with(pattern, path)
        for pattern in patterns
        if pattern == path or (pattern not in names and trees.matches(pattern, path))
    }


def _ruled(
    parameter: Parameter, values: Mapping[str, Any], matching: Mapping[str, bool]
) -> Parameter:
    """A parameter by the first label and the first dimension numbers that mean it.

    "muon" and dimension numbers pass over a vector, unless its whole path is given.
    """
    path, shape, dtype = parameter.path, parameter.shape, parameter.dtype
    problem, rules = not_a_matrix(shape, dtype), [*matching]
    if parameter.axes is None and (problem or parameter.role == "vector"):
        rules = [x for x in rules if x == path or not _means_matrices(values[x])]
    numbers = [x for x in rules if isinstance(values[x], MuonDimensionNumbers)]
    labels = [values[x] or ADAMW for x in rules if x not in numbers]
    spec = values[numbers[0]] if numbers else None
    is_exact = bool(numbers) and matching[numbers[0]]
    label = labels[0] if labels else MUON if is_exact else parameter.label
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
