"""The schedules of nanochat's trainer, for `momentum=` and `weight_decay=`.

https://github.com/karpathy/nanochat/blob/master/scripts/base_train.py
"""

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.recipes import VERSIONS


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
