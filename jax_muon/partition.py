"""`optax.partition` with one reading of the tree: a transform for every label."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

import jax
import optax

from jax_muon import checks, paths
from jax_muon import matrices as reading
from jax_muon.elementwise import as_wide_as_params
from jax_muon.matrices import Matrices
from jax_muon.mesh.specs import bytes_by_path
from jax_muon.notes import is_listening, note
from jax_muon.reading import names
from jax_muon.reading.vocabulary import ADAMW, MUON
from jax_muon.splits import Parts, with_splits

# An optax transform, or a function that gives one for the matrices of its group.
Group: TypeAlias = (
    optax.GradientTransformation | Callable[[Matrices], optax.GradientTransformation]
)
# How parameters are read: the value itself, or a function of the tree that gives one.
Reader: TypeAlias = Matrices | Callable[[Any], Matrices] | None


def partition(
    groups: Mapping[str, Group], matrices: Reader = None
) -> optax.GradientTransformationExtraArgs:
    """Put an optimizer together by the labels of one reading of the tree.

    Args:
      groups: label to an optax transform, or to a function that gives one for the
        `Matrices` of its parameters, to be passed on to the pieces.
      matrices: `jax_muon.read(params)`, or a function of the tree that returns such a
        value, for optimizers that are built before there are parameters. None: `read`.

    Returns:
      A transform with the state of `optax.partition`. Gradients that are narrower than
      their parameters, such as bfloat16 for float32, are widened first, so that updates
      have the dtype of the parameters.

    Raises:
      ValueError: no groups, or a group that is neither a transform nor a function; at
        init and update, with path and shape, a parameter whose label has no group, one
        in a group of matrices that is not a matrix, a label of your own that no
        parameter has, parameters other than those that were read, and what `read`
        raises.

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
    if not check_groups(groups):
        checks.refuse("groups", groups, "at least one")
    check_reader(matrices)
    read_tree = reading.read if matrices is None else matrices
    functions = [x for x, group in groups.items() if not _is_transform(group)]

    def build(tree: Any) -> optax.GradientTransformationExtraArgs:
        found = read_tree if isinstance(read_tree, Matrices) else read_tree(tree)
        found = _of_tree(found, tree, groups)
        labels = found.labels(tree)
        if not found.splits:
            return _for_tree(found, labels)
        parts = Parts.of(tree, found.splits)
        of_parts = dataclasses.replace(found, parameters=parts.read(found), splits={})
        return with_splits(_for_tree(of_parts, parts.spread(labels)), found.splits)

    def _for_tree(
        found: Matrices, labels: Any
    ) -> optax.GradientTransformationExtraArgs:
        joined = found.group(functions)
        note("matrices", all=found, joined=joined)
        transforms = {
            label: _made(label, group, joined.group([label]))
            for label, group in groups.items()
        }
        # A function, since a tree of labels may be callable: an equinox module.
        tx = optax.partition(transforms, lambda params: labels)

        def init_fn(params: optax.Params) -> Any:
            state = tx.init(params)
            _note_state(state, labels, params)
            return state

        return optax.GradientTransformationExtraArgs(init_fn, tx.update)

    def init_fn(params: optax.Params) -> Any:
        checks.check_arrays("params", params)
        if not isinstance(read_tree, Matrices):
            _check_carried_names(read_tree, params)
        return build(params).init(params)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        checks.check_gradients(updates, params)
        checks.check_state("partition", state, optax.transforms.PartitionState)
        if set(state.inner_states) != set(groups):
            raise ValueError(
                f"the state has the groups {sorted(state.inner_states)}; expected "
                f"{sorted(groups)}, as init returns it"
            )
        updates = as_wide_as_params(updates, params)
        tx = build(updates)
        try:
            given, new = tx.update(updates, state, params, **extra_args)
        except (AttributeError, TypeError, ValueError):  # optax's words, maybe
            right = jax.eval_shape(tx.init, updates if params is None else params)
            checks.check_state_structure(state, right)
            checks.check_state_shapes(state, right)
            raise
        structure: Any = jax.tree.structure(state)
        if structure == jax.tree.structure(new):
            checks.check_state_shapes(state, new)  # foreign transforms may broadcast
        checks.check_alike("update", given, "gradient", updates)
        return given, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_groups(groups: Any) -> Mapping[str, Group]:
    """Raise a ValueError unless every group is a transform or a function."""

    def check(name: str, group: Any) -> None:
        if not _is_transform(group) and not callable(group):
            checks.refuse(name, group, "an optax transform, or a function of Matrices")

    checks.check_mapping("groups", groups, "a mapping of label to transform", check)
    return groups


def check_reader(matrices: Any) -> None:
    """Raise a ValueError for what is neither `Matrices`, a function nor None."""
    if not isinstance(matrices, Matrices | None) and not callable(matrices):
        checks.refuse(
            "matrices",
            matrices,
            "jax_muon.read(params), a function of the parameters that returns it, or "
            "None",
        )


def _of_tree(found: Any, tree: Any, groups: Mapping[str, Group]) -> Matrices:
    """The parameters of a tree, which may hide some that were read.

    Raises:
      ValueError: for a parameter that was not read, or of another shape, or without a
        group, and for a group of matrices without any.
    """
    if not isinstance(found, Matrices):
        raise ValueError(
            f"the function matrices= returned {found!r}; expected what jax_muon.read "
            "returns"
        )
    flat = paths.leaves_with_paths(tree)
    for path, leaf in flat:
        parameter = found[path]
        if parameter.shape != tuple(leaf.shape):
            raise ValueError(
                f"parameter {path!r} has shape {tuple(leaf.shape)}, and was read with "
                f"{parameter.shape}; expected jax_muon.read of these parameters"
            )
        if parameter.label not in groups:
            raise ValueError(
                f"parameter {path!r} of shape {parameter.shape} has the label "
                f"{parameter.label!r}; expected one of " + ", ".join(map(repr, groups))
            )
        if parameter.label == ADAMW:
            checks.check_trained(path, parameter.dtype)
    own = {path: found[path] for path, _ in flat}
    present = {parameter.label for parameter in own.values()}
    for label, group in groups.items():
        known = label in (MUON, ADAMW) or label in present or not flat
        if not known and not _is_transform(group):
            raise ValueError(
                f"the group {label!r} is a function of its matrices, and no parameter "
                f"has that label; there are {', '.join(sorted(present))}; expected "
                "rules that give it to one, or an optax transform"
            )
    return dataclasses.replace(found, parameters=own)


def _check_carried_names(read_tree: Callable[[Any], Matrices], params: Any) -> None:
    """Raise a ValueError if axis names that gradients lack change the reading."""
    bare = paths.unbox(params)
    if names.of_tree(bare) == names.of_tree(params):
        return
    boxed = read_tree(params)
    try:
        plain = read_tree(bare)
        changed = [
            path
            for path, found in boxed.items()
            if found.label != plain[path].label
            or (found.axes != plain[path].axes and found.label != ADAMW)
        ]
    except ValueError:  # ambiguous without names
        changed = [path for path, found in boxed.items() if found.names]
    if changed:
        raise ValueError(
            f"parameter {changed[0]!r} is read by the axis names that it carries, "
            f"{boxed[changed[0]].names}, and gradients carry none; expected the value: "
            "matrices=jax_muon.read(params)"
        )


def _made(label: str, group: Group, own: Matrices) -> optax.GradientTransformation:
    """The transform of a group."""
    if _is_transform(group):
        return group
    made = group(own)
    if not _is_transform(made):
        raise ValueError(
            f"the function of the group {label!r} returned {made!r}; expected an optax "
            "transform"
        )
    return made


def _is_transform(group: Any) -> TypeGuard[optax.GradientTransformation]:
    return isinstance(group, optax.GradientTransformation)


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
