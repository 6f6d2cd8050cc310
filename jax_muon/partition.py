"""Optimizers put together by label, for a tree that is read once, as a whole."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax

from jax_muon.checks import (
    check_alike,
    check_arrays,
    check_gradients,
    check_mapping,
    check_state,
    check_state_shapes,
    check_state_structure,
    check_trained,
    refuse,
)
from jax_muon.dtypes import as_wide_as_params
from jax_muon.mesh.specs import bytes_by_path
from jax_muon.notes import is_collecting_doubts, is_listening, note
from jax_muon.reading import paths
from jax_muon.reading.bare import check_reading
from jax_muon.reading.labels import ADAMW, MUON
from jax_muon.reading.matrices import Matrices, Parameter, Reading
from jax_muon.splits import Parts, with_splits

# An optax transform, or a function that gives one for the matrices of its group.
Group: TypeAlias = (
    optax.GradientTransformation | Callable[[Matrices], optax.GradientTransformation]
)


def partition(
    groups: Mapping[str, Group], reading: Reading | None = None
) -> optax.GradientTransformationExtraArgs:
    """`optax.partition` with one reading of the tree: a transform for every label.

    A group's value is an optax transform, for parameters that need no reading, or a
    function of `Matrices`, which says how the parameters of that group are read and is
    handed on to the pieces. Several groups may be matrices.

    The optimizer is put together for the tree at hand, since a parameter's label and
    axes depend on what stands beside it. Both depend on paths and shapes alone, so that
    they are the same at every step.

    Args:
      groups: label to transform, or to a function of `Matrices` that gives one.
      reading: labels, dimension numbers, splits and joins; None reads all parameters by
        path and shape.

    Returns:
      A transform whose state is that of `optax.partition`. Gradients that are narrower
      than their parameters, such as bfloat16 for float32, are widened before anything
      is computed with them, so that updates have the dtype of the parameters; without
      parameters at update they keep their own.

    Raises:
      ValueError: no groups, or one that is neither a transform nor a function; at init
        and update, with path and shape, a label without a group, in a group of matrices
        a parameter that is not one, a label of the user's own whose group is a function
        and which no parameter has, and what `Reading.read` raises.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> def muon(matrices):
      ...     return optax.chain(
      ...         jm.orthogonalize(jm.ExactPolar(), matrices=matrices),
      ...         optax.scale_by_learning_rate(0.5),
      ...     )
      >>> tx = partition({"muon": muon, "adamw": optax.sgd(1.0)})
      >>> params = {"mlp": 3 * jnp.eye(2), "bias": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["mlp"].tolist(), updates["bias"].tolist()
      ([[-0.5, -0.0], [-0.0, -0.5]], [-1.0, -1.0])
    """
    check_reading("reading", reading)
    reading = Reading() if reading is None else reading
    if not check_groups(groups):
        refuse("groups", groups, "at least one")
    functions = [
        label
        for label, group in groups.items()
        if not isinstance(group, optax.GradientTransformation)
    ]

    def build(
        tree: Any, *, warn: bool = False
    ) -> optax.GradientTransformationExtraArgs:
        matrices = reading.read(tree, tuple(groups))
        if doubts := matrices.doubts(functions):
            _tell_doubts(doubts, reading.strict, warn, list(groups))
            moved = {x.path: dataclasses.replace(x, label=ADAMW) for x in doubts}
            matrices = Matrices({**matrices, **moved})
        for path, parameter in matrices.items():
            if parameter.label == ADAMW:
                check_trained(path, parameter.dtype)
        if not reading.splits:
            return _for_tree(matrices, _label_tree(matrices, tree))
        parts = Parts.of(tree, reading.splits)
        labels = parts.spread(_label_tree(matrices, tree))
        return with_splits(_for_tree(parts.read(matrices), labels), reading.splits)

    def _for_tree(
        matrices: Matrices, labels: Any
    ) -> optax.GradientTransformationExtraArgs:
        joined = matrices.select(functions).with_joins(reading.joins)
        note("matrices", all=matrices, joined=joined)
        transforms = {}
        for label, group in groups.items():
            if isinstance(group, optax.GradientTransformation):
                transforms[label] = group
                continue
            own = joined.select([label])
            if matrices and not own and label not in (MUON, ADAMW):
                present = sorted({found.label for found in matrices.values()})
                raise ValueError(
                    f"the group {label!r} is a function of its matrices, and no "
                    f"parameter has that label; there are {', '.join(present)}; "
                    "expected labels or rules that name one, or an optax transform"
                )
            transforms[label] = group(own)
            if not isinstance(transforms[label], optax.GradientTransformation):
                raise ValueError(
                    f"the function of the group {label!r} gave {transforms[label]!r}; "
                    "expected an optax transform"
                )
        # A function, since a tree of labels may be callable: an equinox module.
        tx = optax.partition(transforms, lambda params: labels)

        def init_fn(params: optax.Params) -> Any:
            state = tx.init(params)
            _note_state(state, labels, params)
            return state

        return optax.GradientTransformationExtraArgs(init_fn, tx.update)

    def init_fn(params: optax.Params) -> Any:
        check_arrays("params", params)
        return build(params, warn=True).init(params)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        check_gradients(updates, params)
        check_state("partition", state, optax.transforms.PartitionState)
        if set(state.inner_states) != set(groups):
            raise ValueError(
                f"the state has the groups {sorted(state.inner_states)}; expected "
                f"{sorted(groups)}, as init gives it"
            )
        updates = as_wide_as_params(updates, params)
        tx = build(updates)
        try:
            given, new = tx.update(updates, state, params, **extra_args)
        except (AttributeError, TypeError, ValueError):  # in words of optax, maybe
            right = jax.eval_shape(tx.init, updates if params is None else params)
            check_state_structure(state, right)
            check_state_shapes(state, right)
            raise
        structure: Any = jax.tree.structure(state)
        if structure == jax.tree.structure(new):
            check_state_shapes(state, new)  # which foreign transforms broadcast
        check_alike("update", given, "gradient", updates)
        return given, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_groups(groups: Any) -> Mapping[str, Group]:
    """The groups, if each is an optax transform, or a function that may give one."""

    def check(name: str, group: Any) -> None:
        if not isinstance(group, optax.GradientTransformation) and not callable(group):
            refuse(name, group, "an optax transform, or a function of Matrices")

    check_mapping("groups", groups, "a mapping of label to transform", check)
    return groups


def _tell_doubts(
    doubts: Sequence[Parameter], strict: bool, warn: bool, groups: list[str]
) -> None:
    """Refuse parameters in doubt, or say that they go to AdamW."""
    note("doubts", doubts=doubts)
    if strict and not is_collecting_doubts():
        more = len(doubts) - 1
        hint = f"; jax_muon.check lists {more} more in doubt" if more else ""
        raise ValueError(f"{doubts[0].doubt}{hint}")
    if ADAMW not in groups:
        raise ValueError(
            f"strict=False gives parameters in doubt to {ADAMW!r}, and the groups are "
            f"{groups}; expected a group {ADAMW!r}"
        )
    if warn and not strict:
        for found in doubts:
            warnings.warn(f"{found.doubt}; it goes to {ADAMW!r}", stacklevel=2)


def _note_state(state: Any, labels: Any, params: Any) -> None:
    """Tell `describe` how many bytes of state each parameter has on a device."""
    if not is_listening():
        return
    total: dict[str, int] = {}
    for label, group in state.inner_states.items():
        own = jax.tree.map(
            lambda x, p, label=label: p if x == label else optax.MaskedNode(),
            labels,
            params,
        )
        total |= bytes_by_path(group.inner_state, own)
    note("state", bytes=total)


def _label_tree(matrices: Matrices, tree: Any) -> Any:
    """The label of every leaf; of a whole Flax box, which is then masked with it."""
    return jax.tree_util.tree_map_with_path(
        lambda key_path, _: matrices[paths.path_string(key_path)].label,
        tree,
        is_leaf=paths.is_box,
    )
