"""Muon with one polar factor a matrix and a factor for its shape."""

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
    first,
    polar_factor,
    rates,
    recipe,
)
from jax_muon.transforms import scale_by_shape


@checked
def muon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    accumulation: str = "ema",
    lookahead: bool = True,
    bias_correction: bool = False,
    shape_rule: str | Callable[[int, int], float] = "max_ratio",
    steps: int = 5,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    weight_decay_mask: Any = None,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-10,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Jordan's Muon: Nesterov, Newton-Schulz, a factor for the shape, decoupled decay.

    With the defaults, the mathematics of torch.optim.Muon; `shape_rule="rms_0.2"` is
    its adjust_lr_fn="match_rms_adamw".

    Args:
      learning_rate: of the matrices, before the factor of the shape. For all arguments
        that are not listed here see the top of `jax_muon.recipes`.
      momentum: in [0, 1).
      weight_decay: decoupled, times the learning rate alone.
      accumulation: "ema" or "sum"; see `nesterov`.
      lookahead: Nesterov's; see `nesterov`.
      bias_correction: of the momentum, as in `optax.contrib.muon`; see `nesterov`.
      shape_rule: see `scale_by_shape`.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    own = NewtonSchulz(steps, dtype=dtype)

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(
                momentum,
                accumulation=accumulation,
                lookahead=lookahead,
                bias_correction=bias_correction,
                accumulator_dtype=momentum_dtype,
            ),
            polar_factor(own, polar, matrices),
            scale_by_shape(shape_rule, matrices=matrices),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            *rates(learning_rate, learning_rates),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)


@checked
def moonlight(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    steps: int = 5,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    weight_decay_mask: Any = None,
    adamw_learning_rate: optax.ScalarOrSchedule | None = None,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Moonlight's Muon: sum momentum, updates with AdamW's root mean square of 0.2.

    One learning rate and one weight decay serve matrices and AdamW alike.

    Args:
      learning_rate: of the matrices, before the factor 0.2 max(in, out)^0.5. For all
        arguments that are not listed here see the top of `jax_muon.recipes`.
      momentum: Nesterov momentum in [0, 1), as a sum.
      weight_decay: decoupled, times the learning rate alone.
      adamw_learning_rate: None for `learning_rate`.
      adamw_weight_decay: None for `weight_decay`.

    References:
      Liu et al., Muon is scalable for LLM training, arXiv 2502.16982.
    """
    return muon(
        learning_rate,
        momentum,
        weight_decay,
        accumulation="sum",
        shape_rule="rms_0.2",
        steps=steps,
        dtype=dtype,
        polar=polar,
        momentum_dtype=momentum_dtype,
        learning_rates=learning_rates,
        weight_decay_mask=weight_decay_mask,
        adamw_learning_rate=first(adamw_learning_rate, learning_rate),
        adamw_b1=adamw_b1,
        adamw_b2=adamw_b2,
        adamw_eps=adamw_eps,
        adamw_weight_decay=first(adamw_weight_decay, weight_decay),
        groups=groups,
        reading=reading,
    )
