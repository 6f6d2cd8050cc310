"""nanochat's trainer: its schedules, and its optimizer as of July 3, 2026.

https://github.com/karpathy/nanochat/blob/master/scripts/base_train.py
"""

import jax.numpy as jnp
import optax
from jaxtyping import Array

import jax_muon as jm
from jax_muon.recipes import VERSIONS


def july_2026(
    num_steps: int, width: int, matrices: jm.Matrices
) -> optax.GradientTransformation:
    """For a model with an embedding `wte` and a head `lm_head`.

    Value embeddings have half the rate of `wte`, and decay of 0.01. All else that is no
    matrix gets AdamW as `resid_lambdas`; nanochat gives `x0` 0.5, 0.96, 0.95 and 0.

    Args:
        num_steps: of updates; inside `optax.MultiSteps` each has several batches.
        width: of the residual stream.
        matrices: what `jax_muon.find_matrices` returns for it, with the rules
            {"wte": "embedding", "lm_head": "head"}, or rules alone.
    """

    def adamw(
        peak: float, b1: float, b2: float, decay: float
    ) -> optax.GradientTransformation:
        rate = learning_rate(peak, num_steps)
        return jm.adamw(rate, b1=b1, b2=b2, eps=1e-10, weight_decay=decay)

    wide = (width / 768) ** -0.5
    return jm.nanochat(
        learning_rate(0.02, num_steps),
        matrices=matrices,
        groups={
            "embedding": adamw(0.3 * wide, 0.8, 0.995, 0.001),
            "head": adamw(0.008 * wide, 0.8, 0.96, 0.01),
        },
        adamw=adamw(0.005, 0.8, 0.95, 0.05),
        momentum=momentum(num_steps, "2026-07"),
        weight_decay=weight_decay(0.28, num_steps, "2026-07"),
        version="2026-07",
    )


def learning_rate(peak: float, num_steps: int) -> optax.Schedule:
    """A rate of July 2026: 40 steps up, level, and down to 5 % over the last 65 %.

    A run of fewer than 115 steps rises in the 35 % that are left.
    """
    down = round(0.65 * num_steps)
    warm = min(40, num_steps - down)
    up = optax.linear_schedule(peak / warm, peak, warm - 1)
    fall = optax.linear_schedule(peak, 0.05 * peak, down)
    parts = [up, optax.constant_schedule(peak), fall]
    return optax.join_schedules(parts, [warm - 1, num_steps - down])


def momentum(num_steps: int, version: str = "2026-01") -> optax.Schedule:
    """The momentum of nanochat's matrices, as a function of the step.

    "2026-01" rises linearly from 0.85 to 0.95 in 300 steps. "2026-03" and "2026-07",
    whose trainers agree since 2026-03-14, rise from 0.85 to 0.97 in 400 steps, and fall
    linearly to 0.90 over the last 65 % of the run, as its learning rate does.

    Args:
        num_steps: length of the run.
        version: as of `jax_muon.nanochat`.
    """
    _check(version)
    if version == "2026-01":
        return optax.linear_schedule(0.85, 0.95, 300)
    warmup, warmdown = 400, round(0.65 * num_steps)

    def schedule(step: Array) -> Array:
        rising = 0.85 + (0.97 - 0.85) * step / warmup
        done = jnp.maximum(step - (num_steps - warmdown), 0) / warmdown
        return jnp.where(step < warmup, rising, 0.97 + (0.90 - 0.97) * done)

    return schedule


def weight_decay(
    init_value: float, num_steps: int, version: str = "2026-01"
) -> optax.Schedule:
    """The weight decay of nanochat's matrices, which falls to zero.

    Linearly in "2026-01", and by half a cosine in "2026-03" and "2026-07".

    Args:
        init_value: of the first step. nanochat scales its option, 0.2 and later 0.28,
            by the depth or the number of tokens; pass what results.
        num_steps: length of the run.
        version: as of `jax_muon.nanochat`.
    """
    _check(version)
    if version == "2026-01":
        return optax.linear_schedule(init_value, 0.0, num_steps)
    return optax.cosine_decay_schedule(init_value, num_steps)


def _check(version: str) -> None:
    if version not in VERSIONS:
        raise ValueError(f"version={version!r}; expected one of {', '.join(VERSIONS)}")
