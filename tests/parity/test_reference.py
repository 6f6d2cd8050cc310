"""The PyTorch references: polar factors in every order, and torch.optim.Muon.

`test_parity.py` compares the other references with our recipes, and
`tests/test_recipes.py` those with NumPy, so a wrong reference turns a trajectory red.
The recorded trajectories are replayed by `python -m parity.goldens`, since they are not
part of the project.
"""

from functools import partial

import numpy as np
import pytest
import torch

from parity.references import (
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    TORCH,
    TORCH_MATCH_RMS,
    Muon,
    newton_schulz,
    polar_express,
    replay,
)
from tests import oracle

torch.set_num_threads(1)
F64 = torch.float64
SHAPES = [(12, 12), (8, 20), (20, 8), (1, 9), (9, 1), (7, 13)]
ORDERS = ["nanochat", "jordan", "addmm"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """Standard normal entries, the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def gaussians(count: int, *shape: int) -> list[torch.Tensor]:
    return [gaussian(*shape, seed=1 + seed) for seed in range(count)]


def run(make, w, grads, **settings) -> torch.Tensor:
    """A weight after steps with these gradients."""
    group = {"make": make, "params": ["w"], **settings}
    return replay({"w": w}, [group], [{"w": grad} for grad in grads])[-1]["w"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_iterations_act_on_singular_values(shape, order):
    x = gaussian(*shape)
    for found, *expected in (
        (polar_express(x, dtype=F64, order=order), POLAR_EXPRESS, 1.02, 1e-6),
        (newton_schulz(x, 6, dtype=F64, order=order), 6 * NEWTON_SCHULZ, 1.0, 1e-7),
    ):
        wanted = oracle.polar(x.numpy(), *expected)
        np.testing.assert_allclose(found, wanted, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("preset", "rule"),
    [(TORCH, "original"), (TORCH_MATCH_RMS, "match_rms_adamw")],
    ids=["original", "match_rms"],
)
def test_torch_preset_is_torch_optim_muon(shape, preset, rule):
    start = gaussian(*shape, dtype=torch.float32)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = (
        run(make, start, gaussians(5, *shape), **settings)
        for make in (
            partial(Muon, **preset),
            partial(torch.optim.Muon, adjust_lr_fn=rule),
        )
    )
    # torch takes the polar factor in bfloat16 only; the same sums round alike.
    assert (ours - theirs).norm() / (theirs - start).norm() < 1e-6
