"""The optimizers that train_gpt.py can be asked for, with their rates and schedules.

All of them leave the embedding and the head to the same AdamW, with a learning rate of
its own. They differ in what happens to the matrices of the blocks, and so does "adamw":
a comparison is one of matrices alone.
"""

import json
import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import optax

import jax_muon as jm

GRID = pathlib.Path(__file__).with_name("grid.json")


class Rates(NamedTuple):
    """What changes during a run, each a function of the steps done."""

    learning_rate: optax.Schedule  # of the matrices
    adamw_learning_rate: optax.Schedule  # of the embedding and the head
    momentum: optax.Schedule
    weight_decay: optax.Schedule


def nanochat(rates: Rates) -> optax.GradientTransformation:
    return jm.nanochat(
        rates.learning_rate,
        rates.momentum,
        rates.weight_decay,
        adamw_learning_rate=rates.adamw_learning_rate,
        dtype="float32",
    )


def muon(rates: Rates) -> optax.GradientTransformation:
    return jm.muon(
        rates.learning_rate,
        adamw_learning_rate=rates.adamw_learning_rate,
        dtype="float32",
    )


def normuon(rates: Rates) -> optax.GradientTransformation:
    return jm.normuon(
        rates.learning_rate,
        adamw_learning_rate=rates.adamw_learning_rate,
        dtype="float32",
    )


def moonlight(rates: Rates) -> optax.GradientTransformation:
    return jm.moonlight(
        rates.learning_rate,
        adamw_learning_rate=rates.adamw_learning_rate,
        adamw_weight_decay=0.0,
        dtype="float32",
    )


def adamw(rates: Rates) -> optax.GradientTransformation:
    return jm.partition(
        {
            "muon": optax.adamw(rates.learning_rate, 0.9, 0.95, weight_decay=0.1),
            "adamw": optax.adamw(
                rates.adamw_learning_rate, 0.8, 0.95, 1e-10, weight_decay=0.0
            ),
        }
    )


OPTIMIZERS = {f.__name__: f for f in (nanochat, muon, normuon, moonlight, adamw)}


def best_rates(name: str) -> dict[str, float]:
    """The highest learning rates of a run, as grid.py found them."""
    best = json.loads(GRID.read_text())["best"][name]
    return {key: best[key] for key in ("learning_rate", "adamw_learning_rate")}


def make_optimizer(
    name: str,
    steps: int,
    *,
    learning_rate: float,
    adamw_learning_rate: float,
    qk_clip: float | None = None,
) -> optax.GradientTransformation:
    """The optimizer for a run of so many steps with these highest learning rates.

    With `qk_clip`, attention logits above that make their weights smaller.
    """
    tx = OPTIMIZERS[name](
        Rates(
            trapezoid(learning_rate, steps),
            trapezoid(adamw_learning_rate, steps),
            optax.linear_schedule(0.85, 0.95, min(300, steps // 2)),
            optax.linear_schedule(0.1, 0.0, steps),
        )
    )
    return tx if qk_clip is None else optax.chain(tx, jm.clip_qk(qk_clip))


def trapezoid(peak: float, steps: int) -> optax.Schedule:
    """Up in a fiftieth of the run, level, and down to zero in the second half."""
    up, down = max(1, steps // 50), steps / 2
    return lambda done: (
        peak * jnp.clip(jnp.minimum((done + 1) / up, (steps - done) / down), 0, 1)
    )
