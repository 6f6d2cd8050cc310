"""What recipes are put together from: the parts that they have in common."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from jax_muon.checks import check_rate
from jax_muon.elementwise import check_decay, scale_by_path
from jax_muon.orthogonalize import Polar, orthogonalize
from jax_muon.partition import Group, partition
from jax_muon.reading.labels import ADAMW, MUON
from jax_muon.reading.matrices import Matrices, Reading

Pieces = list[optax.GradientTransformation]


def recipe(
    pieces: Callable[[Matrices], Pieces],
    adamw: optax.GradientTransformation,
    groups: Mapping[str, Group] | None,
    reading: Reading | None,
) -> optax.GradientTransformationExtraArgs:
    """The pieces for "muon", AdamW for "adamw", and the user's groups."""
    groups = {} if groups is None else groups
    if MUON in groups or ADAMW in groups:
        raise ValueError(
            f"groups has the labels {list(groups)}; expected others than {MUON!r} and "
            f"{ADAMW!r}, which the recipe holds itself"
        )
    pieces(Matrices({}))  # a rate out of range is an error now
    return partition(
        {MUON: lambda found: optax.chain(*pieces(found)), ADAMW: adamw, **groups},
        reading,
    )


def adamw_part(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """AdamW, whose numbers are checked at once."""
    check_rate("adamw_learning_rate", learning_rate)
    check_rate("adamw_weight_decay", weight_decay)
    check_decay("adamw_b1", betas[0])
    check_decay("adamw_b2", betas[1])
    check_rate("adamw_eps", eps)
    return optax.adamw(learning_rate, *betas, eps, weight_decay=weight_decay)


def decoupled_decay(
    weight_decay: optax.ScalarOrSchedule, mask: Any
) -> optax.GradientTransformation:
    """Decay of the matrices that `mask` names; see `weight_decay_mask`."""
    check_rate("weight_decay", weight_decay)
    return optax.add_decayed_weights(weight_decay, mask)


def polar_factor(
    own: Polar, polar: Polar | None, matrices: Matrices
) -> optax.GradientTransformation:
    """`orthogonalize` by the recipe's own polar factor, or by the user's.

    All recipes call it here, so that a test can patch one name for all.
    """
    return orthogonalize(first(polar, own), matrices=matrices)


def first(value: Any, otherwise: Any) -> Any:
    """The value, or what stands in for None."""
    return otherwise if value is None else value


def rates(
    learning_rate: optax.ScalarOrSchedule, learning_rates: Mapping[str, float] | None
) -> Pieces:
    """The learning rate, and factors of it for some matrices."""
    check_rate("learning_rate", learning_rate)
    factors = [scale_by_path(learning_rates)] if learning_rates else []
    return [*factors, optax.scale_by_learning_rate(learning_rate)]
