"""Muon on matrices of neighbouring layers, orthogonalized as one (TEON)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jax_muon.momentum import nesterov
from jax_muon.orthogonalize import Polar
from jax_muon.partition import Group
from jax_muon.polar.factors import NewtonSchulz
from jax_muon.reading.matrices import Matrices, Reading
from jax_muon.recipes.common import (
    Pieces,
    adamw_part,
    checked,
    polar_factor,
    rates,
    recipe,
)
from jax_muon.transforms import scale_by_shape


@checked
def teon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    lookahead: bool = False,
    shape_rule: str | Callable[[int, int], float] = "sqrt_ratio",
    steps: int = 5,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    weight_decay_mask: Any = None,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """TEON: queries, keys and values of neighbouring layers orthogonalized as one.

    The scale is that of the single matrix; all other matrices are ordinary Muon, and so
    is a last layer without a partner.

    Args:
      learning_rate: of the matrices, before the factor (out/in)^0.5. For all arguments
        that are not listed here see the top of `jax_muon.recipes`.
      momentum: in [0, 1), as an exponential average.
      weight_decay: decoupled, times the learning rate alone.
      lookahead: whether to use Nesterov's look-ahead, which the paper does not.
      shape_rule: see `scale_by_shape`.
      steps: of the Polar Express with the coefficients of its paper.
      reading: without `joins`, it joins queries, keys and values two by two.

    Raises:
      ValueError: at init, a model without numbered or scanned layers to join.

    References:
      TEON, arXiv 2601.23261.
    """
    own = NewtonSchulz(
        steps,
        coefficients="polar_express_paper",
        norm_factor=1.01,
        dtype=dtype,
    )
    reading = Reading() if reading is None else reading
    if reading.joins is None:
        reading = dataclasses.replace(reading, joins=2)

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(momentum, lookahead=lookahead, accumulator_dtype=momentum_dtype),
            polar_factor(own, polar, matrices),
            scale_by_shape(shape_rule, matrices=matrices),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            *rates(learning_rate, learning_rates),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)
