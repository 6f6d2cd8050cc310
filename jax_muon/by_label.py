"""`optax.multi_transform` by the labels of a reading, for recipes: it checks both."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from jax_muon.base import checks, trees
from jax_muon.matrices.matrices import ADAMW, MUON, Matrices, Parameter
from jax_muon.matrices.resolve import Reading, check_reading, resolve
from jax_muon.transforms.adamw import warn_of_float16

Transforms = Mapping[str, optax.GradientTransformation]


def by_label(
    transforms: Callable[[Matrices, optax.Params], Transforms], matrices: Reading
) -> optax.GradientTransformationExtraArgs:
    """Transforms by label, which a function makes of a tree and how it is read.

    Gradients that are narrower than their parameters are widened first. Errors name the
    parameter or the array of state that does not fit.
    """
    check_reading("matrices", matrices)

    def build(
        tree: optax.Params,
    ) -> tuple[Matrices, optax.GradientTransformationExtraArgs]:
        read = resolve(matrices, tree)
        made = transforms(read, tree)
        _check_labels([read[path] for path, _ in trees.leaves_with_paths(tree)], made)
        return read, optax.multi_transform(made, read.labels)

    def init_fn(params: optax.Params) -> optax.OptState:
        params = checks.as_arrays("params", params)
        read, tx = build(params)
        state = tx.init(params)
        labels = {x.label for x in read.values()}
        if labels == {ADAMW}:
            warnings.warn(
                f"no parameter is a matrix: all have the label {ADAMW!r}, and get the "
                f"optimizer that is adamw= of a recipe{checks.vector_hint(params)}",
                stacklevel=2,
            )
        unused = state.inner_states.keys() - labels - {MUON, ADAMW}
        if labels and unused:
            expected = f"those of parameters, {', '.join(sorted(labels))}"
            checks.refuse("labels of groups", sorted(unused), expected)
        for label, inner in state.inner_states.items():
            if label != MUON:
                warn_of_float16(label, inner)
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
        _, tx = build(updates)
        return checks.checked_update(tx, updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_labels(parameters: Sequence[Parameter], transforms: Transforms) -> None:
    """Every parameter needs a transform for its label, which can train it."""
    for x in parameters:
        # Floats of 8 bits hold no second moment.
        floats = jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits >= 16
        if x.label == ADAMW and not floats:
            raise ValueError(
                f"parameter {x.path!r} of shape {x.shape} has dtype {x.dtype}, which "
                "AdamW cannot train; use another label, such as 'frozen' with "
                "optax.set_to_zero()"
            )
    lacking = [x for x in parameters if x.label not in transforms]
    if lacking:
        label = lacking[0].label
        paths = [x.path for x in lacking if x.label == label]
        some, more = ", ".join(paths[:20]), len(paths) - 20
        some += f" and {more} more" if more > 0 else ""
        how = "jax_muon.adamw(3e-3), as adamw= of a recipe or in groups"
        how = how if label == ADAMW else f"one in groups, or one of {[*transforms]}"
        raise ValueError(
            f"no transform for the label {label!r} of {some}; expected {how}"
        )
