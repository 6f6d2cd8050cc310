"""Rules of the user: labels and dimension numbers of parameters."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from jax_muon.base import trees
from jax_muon.matrices.matrices import ADAMW, MUON, Parameter, leaf_axes, not_a_matrix

# Path pattern to a label or dimension numbers; or a tree of these (a prefix will do).
# None means AdamW, as in optax.
Rules = Any

BY_RULES = "by your rules"  # the reason for a label


def apply_rules(rules: Rules, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user says, or else as they were read."""
    by_path = {parameter.path: parameter for parameter in parameters}
    flat = isinstance(rules, Mapping) and all(map(_is_value, rules.values()))
    is_tree = not (rules is None or (flat and all(isinstance(x, str) for x in rules)))
    leaves = trees.leaves_with_paths(rules, is_leaf=_is_value) if is_tree else rules
    values: dict[str, Any] = dict(leaves or {})
    for where, value in values.items():
        if isinstance(value, str) and " or " in value:
            raise ValueError(f"rules at {where!r}: {value!r}; expected one of the two")
        if not _is_value(value):
            raise ValueError(
                f"rules at {where!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    patterns = [pattern for pattern in values if pattern not in by_path]
    order = {pattern: number for number, pattern in enumerate(values)}
    ruled: dict[str, Parameter] = {}
    covered: dict[str, list[str]] = {pattern: [] for pattern in values}
    # The rules that decide for parameters of each, which may be others before it.
    first: dict[str, set[str]] = {pattern: set() for pattern in values}
    for path, parameter in by_path.items():
        if is_tree:
            prefix = trees.nearest_prefix(values, path)
            matching = [] if prefix is None else [prefix]
        else:
            matching = [path] * (path in values)  # which means this parameter alone
            matching += [x for x in patterns if trees.matches(x, path)]
            matching.sort(key=order.__getitem__)
        for pattern in matching:
            covered[pattern].append(path)
        of_path = _applying(parameter, {x: values[x] for x in matching})
        ruled[path] = _ruled(parameter, of_path)
        for kind in _labels_and_numbers(of_path):
            for pattern in kind:
                first[pattern].add(kind[0])
    for where, value in values.items():
        named = covered[where]
        if by_path and not named and not (is_tree and value is None):
            raise ValueError(
                f"rules: {where!r} matches no parameter; there are {', '.join(by_path)}"
            )
        others = sorted(
            x for x in first[where] if (values[x] or ADAMW) != (value or ADAMW)
        )
        if others and where not in first[where]:
            raise ValueError(
                f"rules at {where!r}: {value} never applies, since the rule at "
                f"{others[0]!r} comes first and matches {', '.join(named)} as well; "
                "expected the rule of fewer parameters first"
            )
        is_matrix = named and _means_matrices(value)
        if is_matrix and all(ruled[x].label == ADAMW for x in named):
            raise ValueError(
                f"rules at {where!r}: {value} for parameters that all have the "
                f"label {ADAMW!r}: {', '.join(named)}; expected the whole path of a "
                "parameter, or a pattern of matrices, before rules with other labels"
            )
    return ruled


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _means_matrices(x: Any) -> bool:
    return x == MUON or isinstance(x, MuonDimensionNumbers)


def _names(pattern: str, path: str) -> bool:
    """True if a pattern means the parameter itself, and not what is in a module."""
    last = trees.slashed(f"/{pattern}").rpartition("/")[2]
    return last != "*" and trees.ends_with(pattern, path)


def _applying(parameter: Parameter, rules: dict[str, Any]) -> dict[str, Any]:
    """The rules without those that pass over a vector.

    "muon" and dimension numbers do, unless its whole path is given.
    """
    path, problem = parameter.path, not_a_matrix(parameter.shape, parameter.dtype)
    if parameter.axes is None and (problem or parameter.role == "vector"):
        passed = {x for x in rules if x != path and _means_matrices(rules[x])}
        rules = {x: value for x, value in rules.items() if x not in passed}
    return rules


def _labels_and_numbers(rules: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The patterns of both kinds of rules, of each of which the first one counts."""
    numbers = [x for x in rules if isinstance(rules[x], MuonDimensionNumbers)]
    return [x for x in rules if x not in numbers], numbers


def _ruled(parameter: Parameter, rules: Mapping[str, Any]) -> Parameter:
    """A parameter by the first label and the first dimension numbers for it."""
    path, shape, dtype = parameter.path, parameter.shape, parameter.dtype
    problem = not_a_matrix(shape, dtype)
    labels, numbers = _labels_and_numbers(rules)
    spec = rules[numbers[0]] if numbers else None
    is_exact = bool(numbers) and _names(numbers[0], path)
    by_rule = rules[labels[0]] or ADAMW if labels else None
    label = by_rule or (MUON if is_exact else parameter.label)
    if label == ADAMW and is_exact:
        raise ValueError(
            f"rules give parameter {path!r} of shape {shape} the label {label!r} and "
            f"the dimension numbers {spec}; expected one of them"
        )
    axes, scanned, role = parameter.axes, parameter.scanned, parameter.role
    reason, doubt = parameter.reason, parameter.doubt
    if labels and (label != parameter.label or role == "unused"):
        reason = BY_RULES
    if spec is not None and label != ADAMW:
        axes = leaf_axes(path, shape, dtype, spec)
        reason, scanned = "dimension numbers", scanned or axes.batch
    elif labels and axes is None and (label == MUON or (doubt and label != ADAMW)):
        doubt = "nothing shows which of its axes are batch, in and out"
        if problem or len(shape) == 2:
            axes = leaf_axes(path, shape, dtype, MuonDimensionNumbers(0, 1))
            reason = f"{BY_RULES}: (in, out)"
    if axes is not None and axes != parameter.axes:
        doubt, role = None, "kernel" if role in ("-", "unknown") else role
    said: dict[str, Any] = {"label": label, "reason": reason, "doubt": doubt}
    return dataclasses.replace(parameter, role=role, axes=axes, scanned=scanned, **said)
