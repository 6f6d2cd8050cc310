"""Muon that evens out neurons by their running mean squares (NorMuon)."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jax_muon.elementwise import add_cautious_decayed_weights
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
from jax_muon.transforms import (
    equilibrate_rows,
    normalize_frobenius,
    scale_by_normuon,
    scale_by_shape,
)


@checked
def nanochat(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    steps: int = 5,
    norm_factor: float = 1.02,
    row_equilibration: bool = False,
    renormalize: bool = False,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    weight_decay_mask: Any = None,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.8,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-10,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonAdamW of nanochat: Nesterov, Polar Express, NorMuon, cautious weight decay.

    The step of January 2026 by default; that of August 2026 with
    `row_equilibration=True, renormalize=True, norm_factor=1.01, beta2=0.9`.

    Args:
      learning_rate: of the matrices, before the factor max(1, out/in)^0.5. For all
        arguments that are not listed here see the top of `jax_muon.recipes`.
      momentum: Nesterov momentum in [0, 1), as an exponential average.
      weight_decay: cautious, times the learning rate and the factor of the shape.
      beta2: decay of NorMuon's mean squares, in [0, 1).
      steps: of the Polar Express: the first of its five quintics, or all of a longer
        table.
      norm_factor: margin of its first normalization.
      row_equilibration: whether to equilibrate the rows before it (MuonEq).
      renormalize: whether to set the Frobenius norm after it (Muon+).

    References:
      https://github.com/karpathy/nanochat; Polar Express arXiv 2505.16932; NorMuon
      arXiv 2510.05491; MuonEq arXiv 2603.28254; Muon+ arXiv 2602.21545.
    """
    own = NewtonSchulz(
        steps,
        coefficients="nanochat",
        norm_factor=norm_factor,
        eps=1e-6,
        dtype=dtype,
    )

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(momentum, accumulator_dtype=momentum_dtype),
            *([equilibrate_rows(matrices=matrices)] if row_equilibration else []),
            polar_factor(own, polar, matrices),
            *([normalize_frobenius(matrices=matrices)] if renormalize else []),
            scale_by_normuon(beta2, matrices=matrices),
            add_cautious_decayed_weights(weight_decay, weight_decay_mask),
            scale_by_shape(matrices=matrices),
            *rates(learning_rate, learning_rates),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)


@checked
def normuon(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    lookahead: bool = False,
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
    """NorMuon as in its paper: per output neuron, updates with root mean square 0.2.

    Args:
      learning_rate: of the matrices, before the factor 0.2 (in out)^0.5 / ||update||_F.
        For all arguments that are not listed here see the top of `jax_muon.recipes`.
      momentum: in [0, 1), as an exponential average.
      weight_decay: decoupled, times the learning rate alone.
      beta2: decay of the mean squares, in [0, 1).
      lookahead: whether to use Nesterov's look-ahead, which the paper does not.

    References:
      NorMuon, arXiv 2510.05491, Algorithm 1.
    """
    own = NewtonSchulz(steps, dtype=dtype)

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(momentum, lookahead=lookahead, accumulator_dtype=momentum_dtype),
            polar_factor(own, polar, matrices),
            # The paper adds 1e-8 to the root; here the root is at least 1e-8. The
            # default, 1e-5, would hold back neurons whose first updates are small.
            scale_by_normuon(beta2, axis="output", eps=1e-16, matrices=matrices),
            normalize_frobenius(0.2, matrices=matrices),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            *rates(learning_rate, learning_rates),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)
