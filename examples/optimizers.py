"""The optimizers that train_gpt.py can be asked for, with their rates and schedules.

The embedding and the head always have the same AdamW, with a separate learning rate.
Only the optimizer of the blocks' matrices differs, so a comparison compares just that.
"""

import functools
import json
import pathlib

import optax
from minimal import trapezoid

import jax_muon as jm

BEST = pathlib.Path(__file__).with_name("best.json")
RECIPES = {
    "nanochat": jm.nanochat,
    "nanochat-july": functools.partial(jm.nanochat, version="2026-07"),
    "muon": jm.muon,
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
    "teon": jm.teon,
    "muonh": jm.muonh,
}
OPTIMIZERS = (*RECIPES, "adamw")
# What `make_optimizer` takes.
RATES = (
    "learning_rate", "adamw_learning_rate", "momentum", "weight_decay",
    "embedding_factor",
)  # fmt: skip


def best_rates(name: str) -> dict[str, float]:
    """The best settings found for `make_optimizer`; see docs/rates.md."""
    return json.loads(BEST.read_text())[name]


def make_optimizer(
    name: str,
    steps: int,
    matrices: jm.Matrices,
    *,
    learning_rate: float,
    adamw_learning_rate: float,
    momentum: float,
    weight_decay: float = 0.0,
    embedding_factor: float = 1.0,
    qk_clip: float | None = None,
) -> optax.GradientTransformation:
    """The optimizer for a run of `steps` steps, with the same schedules for all.

    Args:
        name: of `OPTIMIZERS`.
        steps: length of the run.
        matrices: which parameters are matrices.
        learning_rate: of the matrices, at its highest.
        adamw_learning_rate: of the embedding and the head, at its highest.
        momentum: of the matrices; b1 of "adamw".
        weight_decay: of the matrices in the first step; it falls to zero.
        embedding_factor: multiplies the learning rate of the embedding.
        qk_clip: scales down heads whose attention logits exceed it.

    Raises:
        ValueError: "muonh" with weight decay.
    """
    rate = trapezoid(learning_rate, steps)
    of_rest = trapezoid(adamw_learning_rate, steps)
    rest = optax.adamw(of_rest, 0.8, 0.95, 1e-10, weight_decay=0.0)
    decay = {"weight_decay": optax.linear_schedule(weight_decay, 0.0, steps)}
    if name == "muonh":
        if weight_decay:
            raise ValueError(
                f"weight_decay={weight_decay}: muonh keeps the norms of weights; "
                "expected none"
            )
        decay = {}
    if name == "adamw":
        groups = {"muon": optax.adamw(rate, momentum, 0.95, **decay), "adamw": rest}
        tx = optax.multi_transform(groups, matrices.labels)
    else:
        more = {"adamw": rest, "matrices": matrices, "dtype": "float32"}
        tx = RECIPES[name](rate, momentum=momentum, **decay, **more)
    tx = optax.chain(tx, jm.scale_by_path({"embed*": embedding_factor}))
    return tx if qk_clip is None else optax.chain(tx, jm.clip_qk(qk_clip))
