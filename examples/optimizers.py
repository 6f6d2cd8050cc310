"""The optimizers that train_gpt.py can be asked for, with their rates and schedules.

The embedding and the head always have the same AdamW, with a separate learning rate.
Only the optimizer of the blocks' matrices differs, so a comparison compares just that.
"""

import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

import jax_muon as jm

BEST = pathlib.Path(__file__).with_name("best.json")


class Rates(NamedTuple):
    """Rates of a run, each a number or a function of the steps done."""

    learning_rate: optax.ScalarOrSchedule  # of the matrices
    adamw_learning_rate: optax.ScalarOrSchedule  # of the embedding and the head
    momentum: optax.ScalarOrSchedule
    weight_decay: optax.ScalarOrSchedule


RATES = (*Rates._fields, "embedding_factor")  # what `make_optimizer` takes


def adamw(rates: Rates, matrices: jm.Matrices) -> optax.GradientTransformation:
    learning_rate, _, b1, weight_decay = rates
    muon = optax.adamw(learning_rate, b1, 0.95, weight_decay=weight_decay)
    return jm.partition({"muon": muon, "adamw": of_the_rest(rates)}, matrices)


def of_the_rest(rates: Rates) -> optax.GradientTransformation:
    """nanochat's AdamW, for the embedding and the head."""
    return optax.adamw(rates.adamw_learning_rate, 0.8, 0.95, 1e-10, weight_decay=0.0)


def recipe(
    function: Callable, *, decays: bool = True, **own
) -> Callable[..., optax.GradientTransformation]:
    """A recipe of jax_muon, in float32, with the AdamW that all share."""

    def make(rates: Rates, matrices: jm.Matrices) -> optax.GradientTransformation:
        decay = {"weight_decay": rates.weight_decay} if decays else {}
        return function(
            rates.learning_rate,
            rates.momentum,
            **decay,
            **own,
            adamw=of_the_rest(rates),
            matrices=matrices,
            dtype="float32",
        )

    return make


WITHOUT_DECAY = ("muonh",)  # it keeps the norms of weights
OPTIMIZERS = {
    "nanochat": recipe(jm.nanochat),
    "nanochat-july": recipe(jm.nanochat, version="2026-07"),
    "muon": recipe(jm.muon),
    "normuon": recipe(jm.normuon),
    "moonlight": recipe(jm.moonlight),
    "teon": recipe(jm.teon),
    **{name: recipe(getattr(jm, name), decays=False) for name in WITHOUT_DECAY},
    "adamw": adamw,
}


def best_rates(name: str) -> dict[str, float | list[float]]:
    """The best settings found for `schedules`; see docs/rates.md."""
    return json.loads(BEST.read_text())[name]


def make_optimizer(
    name: str,
    steps: int,
    matrices: jm.Matrices,
    *,
    qk_clip: float | None = None,
    embedding_factor: float = 1.0,
    **rates,
) -> optax.GradientTransformation:
    """The optimizer for a run of `steps` steps; see `schedules` for its rates.

    With `qk_clip`, heads whose attention logits exceed it are scaled down.
    """
    if name in WITHOUT_DECAY and rates.get("weight_decay"):
        raise ValueError(
            f"weight_decay={rates['weight_decay']}: {name} keeps the norms of weights; "
            "expected none"
        )
    tx = OPTIMIZERS[name](schedules(steps, **rates), matrices)
    tx = with_embedding_factor(tx, embedding_factor)
    return tx if qk_clip is None else optax.chain(tx, jm.clip_qk(qk_clip))


def with_embedding_factor(
    tx: optax.GradientTransformation, factor: float
) -> optax.GradientTransformation:
    """Multiply the learning rate of the embedding by a factor."""
    return optax.chain(tx, jm.scale_by_path({"embed*": factor}))


def schedules(
    steps: int,
    *,
    learning_rate: float,
    adamw_learning_rate: float,
    momentum: float | list[float],
    weight_decay: float = 0.0,
) -> Rates:
    """The schedules of a run, the same for all optimizers.

    Args:
        steps: length of the run.
        learning_rate: the highest of the matrices.
        adamw_learning_rate: the highest of the embedding and the head.
        momentum: constant, or the first and last of nanochat's rise over 300 steps, or
            half of a shorter run; not for "adamw".
        weight_decay: the first; it falls to zero. "muonh" has none.
    """
    if isinstance(momentum, list):
        momentum = optax.linear_schedule(*momentum, min(300, steps // 2))
    return Rates(
        trapezoid(learning_rate, steps),
        trapezoid(adamw_learning_rate, steps),
        momentum,
        optax.linear_schedule(weight_decay, 0.0, steps),
    )


def trapezoid(peak: float, steps: int) -> optax.Schedule:
    """Up in a fiftieth of the run, level, and down to zero in the second half."""
    up, down = max(1, steps // 50), steps / 2
    return lambda done: (
        peak * jnp.clip(jnp.minimum((done + 1) / up, (steps - done) / down), 0, 1)
    )
