"""ZeRO-2 on 4 devices takes the trajectory of the PyTorch reference.

Each device has gradients of its own; the reference gets their mean.
"""

import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity.references import MuonAdamW, replay
from tests.distributed import problems
from tests.distributed.layouts import mesh_of
from tests.reading import reader

RANKS, STEPS = 4, 10
SHAPES = {  # (out, in) for matrices, as PyTorch holds them
    **{f"square{i}": (12, 12) for i in range(5)},
    **{f"wide{i}": (8, 20) for i in range(3)},
    "tall": (20, 8),
    "table": (67, 24),
    "vector": (24,),
}
MATRICES = [name for name in SHAPES if name not in ("table", "vector")]


def flax(name, x):
    """A PyTorch array as Flax holds it: matrices are transposed."""
    return np.asarray(x).T if name in MATRICES else np.asarray(x)


def test_same_trajectory(rng):
    start = {k: 0.1 * rng.standard_normal(s) for k, s in SHAPES.items()}
    grads = [  # [rank][step]
        [{k: rng.standard_normal(s) for k, s in SHAPES.items()} for _ in range(STEPS)]
        for _ in range(RANKS)
    ]
    tensors = {k: torch.tensor(v, dtype=torch.float32) for k, v in start.items()}
    groups = [
        {"kind": "muon", "params": MATRICES, "lr": 0.02, "dtype": torch.float32},
        {"kind": "adamw", "params": ["table", "vector"], "lr": 0.01, "eps": 1e-6},
    ]
    rates = [
        [
            {"lr": 0.02 / (1 + t), "momentum": 0.85 + 0.01 * t},
            {"lr": 0.01 / (1 + t)},
        ]
        for t in range(STEPS)
    ]
    mean = [
        {k: torch.tensor(np.mean([g[t][k] for g in grads], 0)) for k in SHAPES}
        for t in range(STEPS)
    ]
    reference = replay(MuonAdamW, tensors, groups, mean, rates)[-1]

    def loss(params, batch):  # whose gradient is the batch: one sample for each rank
        return sum(jnp.sum(batch[k][0] * params[k]) for k in params)

    tx = jm.nanochat(
        lambda t: 0.02 / (1 + t),
        lambda t: 0.85 + 0.01 * t,
        0.1,
        adamw=optax.adamw(lambda t: 0.01 / (1 + t), 0.8, 0.95, 1e-6, weight_decay=0.0),
        dtype="float32",
        matrices=reader({k: "muon" if k in MATRICES else "adamw" for k in SHAPES}),
    )
    first = {k: jnp.asarray(flax(k, v), jnp.float32) for k, v in start.items()}
    step = jm.make_train_step(loss, tx, mesh_of(RANKS), min_size=100)
    params, state = step.init(first)
    for t in range(STEPS):
        batch = {
            k: jnp.asarray([flax(k, grads[rank][t][k]) for rank in range(RANKS)])
            for k in SHAPES
        }
        params, state, _ = step(params, state, batch)

    expected = {k: flax(k, v) for k, v in reference.items()}
    assert problems.distance(params, expected, first) < 2e-6
    for name in SHAPES:  # and each by itself
        one = [{name: tree[name]} for tree in (params, expected, first)]
        assert problems.distance(*one) < 2e-5, name
