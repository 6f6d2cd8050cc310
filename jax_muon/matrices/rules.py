"""The user's rules: labels and dimension numbers, by path patterns or in a tree."""

import collections
import itertools
import sys
import warnings
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from jax_muon.base import checks, trees
from jax_muon.matrices.matrices import ADAMW, MUON, Parameter, leaf_axes, not_a_matrix

# One rule: a label, or which axes are in and out. None means "adamw", as in optax.
Rule: TypeAlias = str | MuonDimensionNumbers | None
# Rules by path pattern; or a tree of them like the parameters, or a prefix of one.
Rules: TypeAlias = Mapping[str, Rule] | PyTree[Rule]

BY_RULES = "by your rules"  # the reason for a label
_IN_OUT = f"{BY_RULES}: (in, out)"  # of two axes, by "muon"
_BY_STAR = f"{_IN_OUT}, only by '*'"  # which says nothing of this parameter
ONE_ROW = "one row or column"
_OPEN = "nothing shows which of its axes are batch, in and out"


def apply_rules(rules: Rules, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by path, as the user's rules change them.

    The first label and the first dimension numbers that match a parameter count, so
    {"blocks/0": "slow", "blocks": MuonDimensionNumbers(1, 0)} makes blocks/0/up a
    matrix (out, in) with the label "slow".
    """
    by_path = {parameter.path: parameter for parameter in parameters}
    values, is_tree = _by_place(rules)
    ruled: dict[str, Parameter] = {}
    by_pattern: list[Parameter] = []  # matrices (in, out) by less than their full path
    matched: dict[str, list[str]] = {where: [] for where in values}
    # Which rules decide for the parameters that one matches: it, or others before it.
    deciding: dict[str, set[str]] = {where: set() for where in values}
    for path, parameter in by_path.items():
        if is_tree:
            prefix = trees.nearest_prefix(values, path)
            matching = [] if prefix is None else [prefix]
        else:
            matching = [x for x in values if _is_at(x, path, by_path)]
        for where in matching:
            matched[where].append(path)
        applying = _applying(parameter, {x: values[x] for x in matching})
        ruled[path] = _ruled(parameter, applying)
        is_in_out = ruled[path].reason.startswith(_IN_OUT)
        if is_in_out and ruled[path].label == MUON and path not in applying:
            by_pattern.append(ruled[path])
        for kind in _labels_and_numbers(applying):
            for where in kind:
                deciding[where].add(kind[0])
    for where, value in values.items():
        paths = ", ".join(map(_in_words, matched[where]))
        if not matched[where] and isinstance(rules, list | tuple):
            expected = f"patterns with labels, such as {{'embed': {ADAMW!r}}}"
            checks.refuse("rules", rules, expected)
        if by_path and not matched[where] and not (is_tree and value is None):
            raise ValueError(
                f"rules: {where!r} matches no parameter; expected a path or a pattern "
                f"of these: {', '.join(map(_in_words, by_path))}"
            )
        # {"*": "muon", "head": "adamw"}: head gets its label from "*".
        label = value or ADAMW
        others = [x for x in deciding[where] if (values[x] or ADAMW) != label]
        if others and where not in deciding[where]:
            raise ValueError(
                f"rules at {where!r}: {value} never applies, since the rule at "
                f"{min(others)!r} comes first and matches {paths} as well; write "
                "the narrower rule first"
            )
        is_matrix = matched[where] and _means_matrices(value)
        if is_matrix and all(ruled[x].label == ADAMW for x in matched[where]):
            raise ValueError(
                f"rules at {where!r}: {value} for parameters that all have the "
                f"label {ADAMW!r}: {paths}; use the whole path of a parameter, or "
                "a pattern of matrices, before rules with other labels"
            )
    _check_stacked_vectors(by_pattern, ruled.values())
    return ruled


def _check_stacked_vectors(
    by_pattern: Sequence[Parameter], parameters: Collection[Parameter]
) -> None:
    """Refuse (4, 16) as a matrix beside (4, 16, 64), whose 4 is a batch.

    Norm gains and biases of stacked layers or experts look like this. They count as
    beside if they share a module with the stack, or the stack is in no module.
    """
    # {"params": {...}}: a module of all parameters says nothing.
    modules = zip(*(x.path.split("/")[:-1] for x in parameters), strict=False)
    depth = len([*itertools.takewhile(lambda names: len({*names}) == 1, modules)])

    def outermost(x: Parameter) -> str:
        return next(iter(x.path.split("/")[depth:-1]), "")

    sizes = collections.defaultdict[str, set[int]](set)  # of batches, by module
    for x in parameters:
        if x.axes is not None and x.label != ADAMW:
            sizes[outermost(x)].update(x.shape[axis] for axis in x.axes.batch)
    stacked = [x for x in by_pattern if {*x.shape} & (sizes[outermost(x)] | sizes[""])]
    if stacked:
        lines = [f"    {x.path!r}: '{ADAMW} or {MUON}',  # {x.shape}" for x in stacked]
        raise ValueError(
            f"{len(stacked)} parameters of two axes may be vectors of stacked layers "
            "or experts, since one axis has the size of a batch axis of the dimension "
            "numbers beside them; use one of two rules for each, before the pattern "
            "that made it a matrix: {\n" + "\n".join(lines) + "\n}"
        )


def warn_of_labels(parameters: Collection[Parameter], tree: PyTree) -> None:
    """Warn of matrices that nothing but a label describes; for `init`.

    Of (8, 64) that only "*" made a matrix, which learned positions may be, and of an
    `equinox.Module`, whose weights are (out, in).
    """
    found = [x for x in parameters if x.label == MUON and x.reason.startswith(_IN_OUT)]
    if paths := ", ".join(x.path for x in found if x.reason == _BY_STAR):
        warnings.warn(
            f"only the pattern '*' makes matrices (in, out) of {paths}. Positions, "
            "embeddings and heads may be among them: "
            "jax_muon.find_matrices(params, loss_fn, batch) shows which; or use "
            f"narrower patterns, such as 'layers/*/kernel': {MUON!r}, or full paths",
            stacklevel=3,
        )
    equinox = sys.modules.get("equinox")
    if found and equinox and _has(equinox.Module, tree):
        warnings.warn(
            f"the label {MUON!r} means (in, out), and the layers of an equinox.Module "
            f"have weights (out, in): {', '.join(x.path for x in found)}; use "
            "jax_muon.find_matrices(model, loss_fn, batch), which reads the loss, or "
            "optax.contrib.MuonDimensionNumbers(1, 0) under their full paths",
            stacklevel=3,
        )


def _has(kind: type, tree: PyTree) -> bool:
    """True if a node of a tree has this type."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) for x in nodes)


def _in_words(path: str) -> str:
    return path or "a tree that is one array, as inside optax.flatten"


def _by_place(rules: Rules) -> tuple[dict[str, Rule], bool]:
    """Each rule by its pattern, or by its path in a tree; and True for a tree."""
    flat = isinstance(rules, Mapping) and all(map(_is_rule, rules.values()))
    is_tree = not (rules is None or (flat and all(isinstance(x, str) for x in rules)))
    leaves = trees.leaves_with_paths(rules, is_leaf=_is_rule) if is_tree else rules
    values: dict[str, Rule] = dict(leaves or {})
    for where, value in values.items():
        if isinstance(value, str) and " or " in value:
            raise ValueError(f"rules at {where!r}: {value!r}; expected one of the two")
        if not _is_rule(value):
            raise ValueError(
                f"rules at {where!r}: {value!r}; expected a label, None for {ADAMW!r}, "
                "or optax.contrib.MuonDimensionNumbers"
            )
    return values, is_tree


def _is_rule(x: object) -> bool:
    return x is None or isinstance(x, str | MuonDimensionNumbers)


def _is_at(pattern: str, path: str, paths: Container[str]) -> bool:
    """True if a pattern matches; the whole path of a parameter means that one alone."""
    return pattern == path or (pattern not in paths and trees.matches(pattern, path))


def _means_matrices(x: Rule) -> bool:
    return x == MUON or isinstance(x, MuonDimensionNumbers)


def _names(pattern: str, path: str) -> bool:
    """True if a pattern means the parameter itself, and not a module around it.

    For blocks/0/up/kernel: True for "kernel" and "up/k*", False for "up" and "up/*".
    """
    last = trees.slashed(f"/{pattern}").rpartition("/")[2]
    return last != "*" and trees.ends_with(pattern, path)


def _applying(parameter: Parameter, rules: dict[str, Rule]) -> dict[str, Rule]:
    """The rules without those that pass over a vector.

    "muon" and dimension numbers do, unless its whole path is given: {"*": "muon"} and
    {"norm": "muon"} skip norm/scale, {"norm/scale": "muon"} does not. Over one row or
    column only "muon" passes.
    """
    path, problem = parameter.path, not_a_matrix(parameter.shape, parameter.dtype)
    if parameter.axes is None and (problem or parameter.role == "vector"):
        is_row = parameter.reason == ONE_ROW
        rules = {
            x: value
            for x, value in rules.items()
            if x == path or not (value == MUON if is_row else _means_matrices(value))
        }
    return rules


def _labels_and_numbers(rules: Mapping[str, Rule]) -> tuple[list[str], list[str]]:
    """Where the labels are among the rules, and where the dimension numbers."""
    numbers = [x for x in rules if isinstance(rules[x], MuonDimensionNumbers)]
    return [x for x in rules if x not in numbers], numbers


def _ruled(parameter: Parameter, rules: Mapping[str, Rule]) -> Parameter:
    """A parameter with the first label and the first dimension numbers of the rules."""
    path, shape, dtype = parameter.path, parameter.shape, parameter.dtype
    problem = not_a_matrix(shape, dtype)
    labels, numbers = _labels_and_numbers(rules)
    spec = rules[numbers[0]] if numbers else None
    is_named = bool(numbers) and _names(numbers[0], path)
    is_row = bool(numbers) and parameter.reason == ONE_ROW
    label = MUON if is_named or is_row else parameter.label
    label = (rules[labels[0]] or ADAMW) if labels else label
    if label == ADAMW and is_named:
        raise ValueError(
            f"rules give parameter {path!r} of shape {shape} the label {label!r} and "
            f"the dimension numbers {spec}; expected one of them"
        )
    new = replace(parameter, label=label)
    if labels and (label != parameter.label or parameter.role == "unused"):
        new = replace(new, reason=BY_RULES)
    is_unread = new.axes is None and (label == MUON or new.doubt is not None)
    if spec is not None and label != ADAMW:
        axes = leaf_axes(path, shape, dtype, spec)
        scanned = parameter.scanned or axes.batch
        new = replace(new, axes=axes, scanned=scanned, reason="dimension numbers")
    elif labels and is_unread and label != ADAMW:
        # A label says (in, out) of (64, 32), but of (12, 64, 32) not what the batch is.
        new = replace(new, doubt=_OPEN)
        if problem or len(shape) == 2:
            axes = leaf_axes(path, shape, dtype, MuonDimensionNumbers(0, 1))
            reason = _BY_STAR if labels[0] in ("*", "") else _IN_OUT
            new = replace(new, axes=axes, reason=reason)
    if new.axes is not None and new.axes != parameter.axes:
        role = "kernel" if new.role in ("-", "unknown") else new.role
        new = replace(new, role=role, doubt=None)
    return new
