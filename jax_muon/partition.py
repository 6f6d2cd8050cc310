"""`optax.partition` with one reading of the tree: a transform for every label."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jax_muon.base import checks, trees
from jax_muon.base.facts import note
from jax_muon.matrices.find import Reader, reader
from jax_muon.matrices.matrices import ADAMW, MUON, Matrices
from jax_muon.matrices.splits import read_parts, with_splits
from jax_muon.transforms.adamw import warn_of_float16

# An optax transform, or a function that returns one for the matrices of its group.
Group: TypeAlias = (
    optax.GradientTransformation | Callable[[Matrices], optax.GradientTransformation]
)


def partition(
    groups: Mapping[str, Group], matrices: Reader
) -> optax.GradientTransformationExtraArgs:
    """Combine transforms by the labels of one reading of the tree.

    Args:
      groups: label to an optax transform, or to a function that returns one for the
        `Matrices` of its parameters, to pass on to the pieces.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "*": "muon"}, or a tree of labels or of
        `optax.contrib.MuonDimensionNumbers`; or, for an optimizer that is built before
        the parameters, a function of their shapes that returns one of these.

    Returns:
      A transform with the state of `optax.partition`. Gradients that are narrower than
      their parameters are widened first.

    Raises:
      ValueError: a group is neither a transform nor a function.
      ValueError: at init, no parameter has the label of a group, unless it is "muon" or
        "adamw".
      ValueError: at init and update, a label has no group, or a group of matrices has
        a parameter that is none; the message has its path.
      ValueError: gradients or state have other shapes than the parameters.
      ValueError: raised by `find_matrices`.
      KeyError: a parameter that was not read.
      UserWarning: at init, no parameter is a matrix, or a transform keeps its state in
        float16.

    Examples:
      >>> def muon(matrices):
      ...     return optax.chain(
      ...         jm.orthogonalize(jm.ExactPolar(), matrices=matrices),
      ...         optax.scale_by_learning_rate(0.5),
      ...     )
      >>> groups = {"muon": muon, "adamw": optax.sgd(1.0)}
      >>> tx = partition(groups, matrices={"mlp": "muon"})
      >>> params = {"mlp": 3 * jnp.eye(2), "bias": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["mlp"].tolist(), updates["bias"].tolist()
      ([[-0.5, -0.0], [-0.0, -0.5]], [-1.0, -1.0])
    """
    for label, group in groups.items():
        check = checks.check_no_factory if callable(group) else checks.as_transform
        check(f"groups[{label!r}]", group)
    read_tree = reader(matrices)

    def build(
        tree: optax.Params, whole: Matrices
    ) -> optax.GradientTransformationExtraArgs:
        labelled = _restricted(whole, tree)
        _check_groups(labelled, groups)
        note().leaves.update(labelled)
        parts = read_parts(labelled, labelled.splits)
        apart = dataclasses.replace(labelled, parameters=parts, splits={})
        return with_splits(_for_tree(apart, groups), labelled.splits)

    def init_fn(params: optax.Params) -> optax.OptState:
        params = checks.as_arrays("params", params)
        whole = read_tree(params)
        state = build(params, whole).init(params)
        labels = {parameter.label for parameter in whole.values()}
        if labels == {ADAMW} and MUON in groups:
            warnings.warn(
                f"no parameter is a matrix: all have the label {ADAMW!r}, and get the "
                f"optimizer that is adamw= of a recipe{checks.vector_hint(params)}",
                stacklevel=2,
            )
        unused = groups.keys() - labels - {MUON, ADAMW}
        if labels and unused:
            expected = f"those of parameters, {', '.join(sorted(labels))}"
            checks.refuse("labels of groups", sorted(unused), expected)
        for label, group in groups.items():
            if not callable(group):
                warn_of_float16(label, state.inner_states[label])
        return state

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        params = checks.as_arrays("params", params)
        checks.check_gradients(updates, params)
        updates = trees.as_wide_as_params(updates, params)
        tx = build(updates, read_tree(updates))
        try:
            stepped, new = tx.update(updates, state, params, **extra_args)
        except (AttributeError, KeyError, TypeError, ValueError):
            right = jax.eval_shape(tx.init, updates if params is None else params)
            checks.check_state(state, right)
            checks.check_no_dicts(state, right)
            raise
        checks.check_state(state, new)  # transforms may broadcast one of another shape
        checks.check_alike("update", stepped, "gradient", updates)
        return stepped, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def built_for_each_tree(
    build: Callable[[optax.Params], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """The transform that a function makes of the parameters, or of their gradients.

    It is made again for each trace of init and update.
    """
    return optax.GradientTransformationExtraArgs(
        lambda params: build(params).init(params),
        lambda updates, *args, **extra: build(updates).update(updates, *args, **extra),
    )


def _restricted(whole: Matrices, tree: optax.Params) -> Matrices:
    """The reading of a tree, which may be a part of the `whole` tree that was read."""
    parameters = {}
    for path, leaf in trees.leaves_with_paths(tree):
        parameter, shape = whole[path], tuple(leaf.shape)
        parameters[path] = dataclasses.replace(parameter, shape=shape)
        where = f"parameter {path!r} of shape {shape}"
        if not parameter.fits(shape):
            raise ValueError(
                f"{where} was read with {parameter.shape}; expected "
                "jax_muon.find_matrices of these parameters"
            )
        dtype = parameter.dtype
        # Floats of 8 bits hold no second moment.
        trainable = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 16
        if parameter.label == ADAMW and not trainable:
            raise ValueError(
                f"{where} has dtype {dtype}, which AdamW cannot train; "
                "expected another label, such as 'frozen' with optax.set_to_zero()"
            )
    return dataclasses.replace(whole, parameters=parameters)


def _check_groups(matrices: Matrices, groups: Mapping[str, Group]) -> None:
    """Every parameter needs a transform for its label."""
    lacking = [x for x in matrices.values() if x.label not in groups]
    if lacking:
        label = lacking[0].label
        paths = [x.path for x in lacking if x.label == label]
        some, more = ", ".join(paths[:20]), len(paths) - 20
        some += f" and {more} more" if more > 0 else ""
        how = "jax_muon.adamw(3e-3), as adamw= of a recipe or in groups"
        how = how if label == ADAMW else f"one in groups, or one of {[*groups]}"
        raise ValueError(
            f"no transform for the label {label!r} of {some}; expected {how}"
        )


def _for_tree(
    matrices: Matrices, groups: Mapping[str, Group]
) -> optax.GradientTransformationExtraArgs:
    """The transforms of the groups, on the leaves with their labels."""
    note().parameters.update(matrices)
    transforms = {}
    for label, group in groups.items():
        if callable(group):
            members = {path: x for path, x in matrices.items() if x.label == label}
            group = group(dataclasses.replace(matrices, parameters=members))
        transforms[label] = checks.as_transform(f"groups[{label!r}](matrices)", group)
    return optax.partition(transforms, matrices.labels)
