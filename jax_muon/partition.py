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

# An optax transform, or a function that returns one for the matrices of its group.
Group: TypeAlias = (
    optax.GradientTransformation | Callable[[Matrices], optax.GradientTransformation]
)


def partition(
    groups: Mapping[str, Group], matrices: Reader = None
) -> optax.GradientTransformationExtraArgs:
    """Combine transforms by the labels of one reading of the tree.

    Args:
      groups: label to an optax transform, or to a function that returns one for the
        `Matrices` of its parameters, to pass on to the pieces.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; a function of the
        parameters' shapes that returns one, for optimizers that are built before
        them; or a mapping of path patterns to labels,
        such as {"embed": "adamw", "*": "muon"}. Without it a tree that may have
        matrices is an error.

    Returns:
      A transform with the state of `optax.partition`. Gradients that are narrower than
      their parameters are widened first.

    Raises:
      ValueError: a group is neither a transform nor a function.
      ValueError: at init and update, a label has no group, or a group of matrices has
        a parameter that is none; the message has its path and shape.
      ValueError: gradients or state have other shapes than the parameters.
      ValueError: raised by `find_matrices`.
      KeyError: a parameter that was not read.

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
        check = checks.no_factory if callable(group) else checks.as_transform
        check(f"groups[{label!r}]", group)
    read_tree = reader(matrices)

    def build(tree: Any, at_init: bool = False) -> Any:
        whole = read_tree(tree)
        labelled = _of_tree(whole, tree)
        if at_init and MUON in groups and {x.label for x in whole.values()} == {ADAMW}:
            warnings.warn(
                f"no parameter is a matrix: all have the label {ADAMW!r}, and get the "
                "optimizer that is adamw= of a recipe",
                stacklevel=2,
            )
        note().leaves.update(labelled)
        if not labelled.splits:
            return _for_tree(labelled, groups)
        parts = read_parts(labelled, labelled.splits)
        of_parts = dataclasses.replace(labelled, parameters=parts, splits={})
        return with_splits(_for_tree(of_parts, groups), labelled.splits)

    def init_fn(params: optax.Params) -> Any:
        params = checks.arrays("params", params)
        return build(params, at_init=True).init(params)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        params = None if params is None else checks.arrays("params", params)
        checks.gradients(updates, params)
        updates = trees.as_wide_as_params(updates, params)
        tx, like = build(updates), updates if params is None else params
        try:
            stepped, new = tx.update(updates, state, params, **extra_args)
        except (AttributeError, KeyError, TypeError, ValueError):
            checks.state(state, jax.eval_shape(tx.init, like))
            raise
        checks.state(state, new)  # transforms may broadcast one of another shape
        checks.alike("update", stepped, "gradient", updates)
        return stepped, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _of_tree(whole: Matrices, tree: Any) -> Matrices:
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


def _for_tree(
    matrices: Matrices, groups: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """The transforms of the groups, on the leaves with their labels."""
    note().parameters.update(matrices)
    transforms = {}
    for label, group in groups.items():
        if callable(group):
            of_group = {path: x for path, x in matrices.items() if x.label == label}
            group = group(dataclasses.replace(matrices, parameters=of_group))
        transforms[label] = checks.as_transform(f"groups[{label!r}](matrices)", group)
    return optax.partition(transforms, matrices.labels)
