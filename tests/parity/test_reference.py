"""The PyTorch references against what can be said without them.

Singular value decompositions, steps worked out by hand, torch's own optimizers, and
identities between the recipes. The recorded trajectories are replayed by
`python -m parity.goldens`, since they are not part of the project.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from jax_muon import polar_express_coefficients
from parity.references import (
    AUGUST,
    JANUARY,
    JORDAN,
    JORDAN_SUM,
    MOONLIGHT,
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    POLAR_EXPRESS_PAPER,
    POLAR_EXPRESS_PAPER_SAFE,
    TORCH,
    TORCH_MATCH_RMS,
    Muon,
    MuonH,
    Nanochat,
    NorMuon,
    NorMuonH,
    Teon,
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


def run(make, w, grads, rates=None, **settings) -> list[torch.Tensor]:
    """A weight after each step, with the settings that change before it."""
    group = {"make": make, "params": ["w"], **settings}
    changes = rates and [[rate] for rate in rates]
    after = replay({"w": w}, [group], [{"w": grad} for grad in grads], changes)
    return [each["w"] for each in after]


def svd_polar(x: torch.Tensor) -> torch.Tensor:
    """Polar factor U V^T by the SVD, in the dtype of `x`, which is (..., m, n).

    Singular values at rounding level (below max(m, n) eps times the largest) count as
    zero, and their directions are left out, as every odd polynomial leaves them out:
    the polar factor of zero is zero.
    """
    u, s, vh = torch.linalg.svd(x, full_matrices=False)  # (m, k), (k), (k, n)
    cutoff = max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s.amax(-1, keepdim=True)
    return (u * (s > cutoff).unsqueeze(-2)) @ vh


def exact_polar(u: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """The SVD in the place of an iteration."""
    del steps
    return svd_polar(u.to(dtype))


EXACT = {"polar": exact_polar, "dtype": F64}


def test_polar_express_constants_are_those_of_the_algorithm():
    """Ours: tests/polar/test_coefficients.py compares them with the definition."""
    np.testing.assert_allclose(POLAR_EXPRESS, polar_express_coefficients(5), rtol=1e-12)
    paper = polar_express_coefficients(8, cushion=0.02407327424182761, safety=0)
    np.testing.assert_allclose(POLAR_EXPRESS_PAPER[:6], paper[:6], rtol=1e-12)
    # Close to the limit the equations lose digits: [l, u] is narrower than 1e-4.
    np.testing.assert_allclose(POLAR_EXPRESS_PAPER, paper, rtol=1e-8)
    first, *_, last = POLAR_EXPRESS_PAPER_SAFE
    np.testing.assert_allclose(first, paper[0] / 1.01 ** np.array([1, 3, 5]))
    np.testing.assert_array_equal(last, POLAR_EXPRESS_PAPER[-1])


# ---- The polar factor


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


LOW_RANK = gaussian(10, 3) @ gaussian(3, 6, seed=1)


@pytest.mark.parametrize("x", [*(gaussian(*s) for s in SHAPES), LOW_RANK])
def test_polar_express_converges_to_the_svd_polar_factor(x):
    """Which leaves out the null space."""
    exact = svd_polar(x)
    singular_values = torch.linalg.svdvals(exact)
    ones = (torch.arange(len(singular_values)) < torch.linalg.matrix_rank(x)).to(F64)
    torch.testing.assert_close(singular_values, ones)
    many = polar_express(x, 12, coefficients=POLAR_EXPRESS_PAPER, dtype=F64)
    atol = 1e-9 if x is LOW_RANK else 1e-12
    torch.testing.assert_close(many, exact, atol=atol, rtol=0)


# ---- nanochat


def nanochat_by_hand(w, grads, version, rates, beta2):
    """Full trajectory of one matrix in NumPy, with the SVD for the iteration."""
    m, n = w.shape
    axis = 1 if m >= n else 0
    momentum, v = np.zeros((m, n)), 0.0
    for g, changed in zip(grads, rates, strict=True):
        lr, mu, wd = changed["lr"], changed["momentum"], changed["weight_decay"]
        momentum = mu * momentum + (1 - mu) * g
        u = (1 - mu) * g + mu * momentum
        if version["row_equilibration"]:
            u = oracle.equilibrate_rows(u)
        x = oracle.polar(u, POLAR_EXPRESS, version["norm_factor"], 1e-6)
        if version["renormalize"]:
            x = x * np.sqrt(min(m, n) / (x**2).sum())
        y, v = oracle.normuon(x, v, beta2, axis)
        lr = lr * max(1, m / n) ** 0.5
        w = w - lr * y - lr * wd * w * (y * w >= 0)
    return w


@pytest.mark.parametrize("version", [JANUARY, AUGUST], ids=["january", "august"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nanochat_trajectory_by_hand(version, shape):
    w, grads = gaussian(*shape), gaussians(4, *shape)
    rates = [
        {
            "lr": 0.1 / (t + 1),
            "momentum": 0.8 + 0.05 * t,
            "weight_decay": 0.2 - 0.05 * t,
        }
        for t in range(4)
    ]
    after = run(Nanochat, w, grads, rates, dtype=F64, beta2=0.9, **version)
    expected = nanochat_by_hand(
        w.numpy(), [g.numpy() for g in grads], version, rates, 0.9
    )
    np.testing.assert_allclose(after[-1], expected, atol=1e-12)


# ---- Jordan, torch, Moonlight, NorMuon's paper


@pytest.mark.parametrize(
    ("preset", "factor"),
    [
        (JORDAN, math.sqrt(2)),  # max(1, 8 / 4)^0.5
        (JORDAN_SUM, math.sqrt(2)),
        (MOONLIGHT, 0.2 * math.sqrt(8)),
    ],
    ids=["jordan", "jordan-sum", "moonlight"],
)
def test_muon_single_step_by_hand(preset, factor):
    w, grad = gaussian(8, 4), gaussian(8, 4, seed=1)
    (after,) = run(Muon, w, [grad], lr=0.1, weight_decay=0.3, **EXACT, **preset)
    expected = w * (1 - 0.1 * 0.3) - 0.1 * factor * svd_polar(grad)
    torch.testing.assert_close(after, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("momenta", "equal"),
    [([0.9] * 5, True), ([0.85, 0.88, 0.91, 0.94, 0.95], False)],
)
def test_sum_and_ema_momentum_agree_only_while_momentum_is_constant(momenta, equal):
    rates = [{"momentum": mu} for mu in momenta]
    w, grads = gaussian(6, 10), gaussians(5, 6, 10)
    ema, total = (
        run(Muon, w, grads, rates, **EXACT, **preset)[-1]
        for preset in (JORDAN, JORDAN_SUM)
    )
    assert ((ema - total).norm() < 1e-12) == equal
    assert ((ema - total).norm() < 1e-3) == equal


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
        run(make, start, gaussians(5, *shape), **settings)[-1]
        for make in (
            partial(Muon, **preset),
            partial(torch.optim.Muon, adjust_lr_fn=rule),
        )
    )
    # torch takes the polar factor in bfloat16 only; the same sums round alike.
    assert (ours - theirs).norm() / (theirs - start).norm() < 1e-6


def test_normuon_paper_two_steps_by_hand():
    w, grads = gaussian(4, 6), gaussians(2, 4, 6)
    lr, mu, beta2, wd, eps = 0.1, 0.9, 0.8, 0.2, 1e-8
    settings = {"lr": lr, "momentum": mu, "beta2": beta2, "weight_decay": wd}
    after = run(NorMuon, w, grads, eps=eps, **settings, **EXACT)
    momentum, v, expected = 0.0, 0.0, w
    for grad, found in zip(grads, after, strict=True):
        momentum = mu * momentum + (1 - mu) * grad
        x = svd_polar(momentum)
        v = beta2 * v + (1 - beta2) * (x**2).mean(1, keepdim=True)  # rows, though wide
        y = x / (v.sqrt() + eps)
        step = lr * 0.2 * math.sqrt(24) * y / y.norm()
        expected = expected - lr * wd * expected - step
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)
        assert step.square().mean().sqrt() == pytest.approx(0.2 * lr)


# ---- Hyperball and TEON


@pytest.mark.parametrize("kind", [MuonH, NorMuonH])
def test_sphere_single_step_by_hand(kind):
    """The norm stays, and the step before it is put back is lr of it."""
    w, grad = gaussian(4, 6), gaussian(4, 6, seed=1)
    (after,) = run(kind, w, [grad], lr=0.25, **EXACT)
    u = svd_polar(grad)
    if kind is NorMuonH:
        u = u / u.square().mean(1, keepdim=True).sqrt()
    moved = w / w.norm() - 0.25 * u / u.norm()
    expected = w.norm() * moved / moved.norm()
    torch.testing.assert_close(after, expected, atol=1e-7, rtol=0)


def test_teon_takes_the_polar_factor_of_the_matrices_side_by_side():
    """And without a partner that of one matrix."""
    w, grads = ([gaussian(4, 6, seed=i) for i in pair] for pair in ((0, 1), (2, 3)))
    group = {"make": Teon, "lr": 0.1, "weight_decay": 0.5, **EXACT}
    start, grad = (dict(zip("ab", x, strict=True)) for x in (w, grads))
    joined = svd_polar(torch.cat(grads, dim=1)).split(6, dim=1)  # of (4, 12)
    for joint, polar in ((True, joined), (False, [svd_polar(g) for g in grads])):
        (after,) = replay(start, [{"params": "ab", "joint": joint, **group}], [grad])
        for name, found, x in zip("ab", after.values(), polar, strict=True):
            expected = start[name] * (1 - 0.1 * 0.5) - 0.1 * math.sqrt(4 / 6) * x
            torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


# ---- Every recipe: what must hold for all

RECIPES = {
    "january": partial(Nanochat, **JANUARY),
    "august": partial(Nanochat, **AUGUST),
    "jordan": partial(Muon, **JORDAN),
    "jordan-sum": partial(Muon, **JORDAN_SUM),
    "moonlight": partial(Muon, **MOONLIGHT),
    "normuon": NorMuon,
    "teon": partial(Teon, joint=True),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_gradient_only_decays(recipe):
    start, zero = gaussian(6, 4), torch.zeros(6, 4, dtype=F64)
    settings = {"lr": 0.1, "weight_decay": 0.5, "dtype": F64}
    (after,) = run(RECIPES[recipe], start, [zero], **settings)
    # nanochat scales the decay with the shape, too; X W = 0 counts as agreement.
    scale = math.sqrt(6 / 4) if recipe in ("january", "august") else 1.0
    expected = start * (1 - 0.1 * 0.5 * scale)
    torch.testing.assert_close(after, expected, atol=1e-15, rtol=0)
