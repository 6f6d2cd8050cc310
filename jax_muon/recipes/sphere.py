"""Muon whose matrices keep their norms: steps of a fixed angle (Hyperball)."""

from collections.abc import Mapping

import jax
import optax

from jax_muon.hyperball import hyperball
from jax_muon.momentum import nesterov
from jax_muon.orthogonalize import Polar
from jax_muon.partition import Group
from jax_muon.polar.factors import NewtonSchulz
from jax_muon.reading.matrices import Matrices, Reading
from jax_muon.recipes.common import Pieces, adamw_part, checked, polar_factor, recipe
from jax_muon.transforms import scale_by_normuon


@checked
def muonh(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    *,
    steps: int = 5,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonH: Jordan's Muon with sum momentum, in steps of a fixed angle.

    Matrices neither grow nor decay, so that there is no weight decay and no factor for
    their shapes.

    Args:
      learning_rate: of the matrices, as a part of their norm; see `hyperball`, also for
        matrices that start at zero. A first guess is the root of learning rate times
        weight decay of `muon`. For all arguments that are not listed here see the top
        of `jax_muon.recipes`.
      momentum: Nesterov momentum in [0, 1), as a sum.

    References:
      Hyperball optimization, arXiv 2606.16899.
    """
    own = NewtonSchulz(steps, dtype=dtype)

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(momentum, accumulation="sum", accumulator_dtype=momentum_dtype),
            polar_factor(own, polar, matrices),
            hyperball(learning_rate, learning_rates, matrices=matrices),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)


@checked
def normuonh(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    lookahead: bool = False,
    steps: int = 5,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    polar: Polar | None = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    learning_rates: Mapping[str, float] | None = None,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    groups: Mapping[str, Group] | None = None,
    reading: Reading | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuonH: the direction of `normuon`, in steps of a fixed angle.

    Args:
      learning_rate: of the matrices, as a part of their norm; see `hyperball`, also for
        matrices that start at zero. For all arguments that are not listed here see the
        top of `jax_muon.recipes`.
      momentum: in [0, 1), as an exponential average.
      beta2: decay of the mean squares, in [0, 1).
      lookahead: whether to use Nesterov's look-ahead, which NorMuon's paper does not.

    References:
      Hyperball optimization, arXiv 2606.16899; NorMuon, arXiv 2510.05491.
    """
    own = NewtonSchulz(steps, dtype=dtype)

    def pieces(matrices: Matrices) -> Pieces:
        return [
            nesterov(momentum, lookahead=lookahead, accumulator_dtype=momentum_dtype),
            polar_factor(own, polar, matrices),
            scale_by_normuon(beta2, axis="output", eps=1e-16, matrices=matrices),
            hyperball(learning_rate, learning_rates, matrices=matrices),
        ]

    betas = (adamw_b1, adamw_b2)
    adamw = adamw_part(adamw_learning_rate, betas, adamw_eps, adamw_weight_decay)
    return recipe(pieces, adamw, groups, reading)
