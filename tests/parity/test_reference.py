"""The PyTorch references against what can be said without them.

Singular value decompositions, single steps worked out by hand, torch's own optimizers,
and identities between the recipes. The recorded trajectories are replayed by
`python -m parity.goldens`, since they are not part of the project.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from jax_muon import polar_express_coefficients
from parity import references
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
    MuonAdamW,
    MuonH,
    NorMuon,
    NorMuonH,
    Teon,
    newton_schulz,
    polar_express,
    replay,
    shape_scale,
    svd_polar,
)

torch.set_num_threads(1)
F64 = torch.float64
SHAPES = [(12, 12), (8, 20), (20, 8), (1, 9), (9, 1), (7, 13)]
ORDERS = ["nanochat", "jordan", "addmm"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """Standard normal entries, the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def gaussians(names: str, steps: int, *shape: int) -> list[references.Named]:
    """Gradients of each step by name."""
    seeds = iter(range(1, 1 + steps * len(names)))
    return [
        {n: gaussian(*shape, seed=next(seeds)) for n in names} for _ in range(steps)
    ]


def one_step(make, weights: list[torch.Tensor], grads: list) -> list[torch.Tensor]:
    """Weights after the first step of an optimizer."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    make(params).step()
    return [p.detach() for p in params]


def exact_polar(u: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """The SVD in the place of an iteration."""
    del steps
    return svd_polar(u.to(dtype))


def test_polar_express_constants_are_those_of_the_algorithm():
    """Ours, which tests/test_coefficients.py compares with the paper's definition."""
    np.testing.assert_allclose(POLAR_EXPRESS, polar_express_coefficients(5), rtol=1e-12)
    paper = polar_express_coefficients(8, cushion=0.02407327424182761, safety=0)
    np.testing.assert_allclose(POLAR_EXPRESS_PAPER[:6], paper[:6], rtol=1e-12)
    # Close to the limit the equations lose digits: [l, u] is narrower than 1e-4.
    np.testing.assert_allclose(POLAR_EXPRESS_PAPER, paper, rtol=1e-8)
    first, *_, last = POLAR_EXPRESS_PAPER_SAFE
    np.testing.assert_allclose(first, paper[0] / 1.01 ** np.array([1, 3, 5]))
    np.testing.assert_array_equal(last, POLAR_EXPRESS_PAPER[-1])


# ---- The polar factor


def on_singular_values(x, steps, coefficients, norm_factor, eps):
    """The same polynomials, applied to singular values that the SVD supplies."""
    u, s, vh = np.linalg.svd(x.numpy(), full_matrices=False)
    s = s / (norm_factor * np.linalg.norm(s) + eps)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_iterations_act_on_singular_values(shape, order):
    x = gaussian(*shape)
    for found, *expected in (
        (polar_express(x, dtype=F64, order=order), 5, POLAR_EXPRESS, 1.02, 1e-6),
        (newton_schulz(x, 6, dtype=F64, order=order), 6, NEWTON_SCHULZ, 1.0, 1e-7),
    ):
        wanted = on_singular_values(x, *expected)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_iteration_rounds_in_its_dtype(order, dtype):
    x = gaussian(3, 24, 16)  # a stack of tall matrices
    exact = polar_express(x, dtype=F64)
    rounded = polar_express(x, dtype=dtype, order=order)
    assert rounded.dtype == dtype
    error = ((rounded.double() - exact).norm() / exact.norm()).item()
    # Dividing by the norm leaves the smallest singular value at 1 / amplification; the
    # steps raise it to 1 together with its rounding error, and each adds its own.
    smallest = torch.linalg.svdvals(x)[:, -1]
    amplification = (torch.linalg.matrix_norm(x) / smallest).max().item()
    unit = torch.finfo(dtype).eps / 2
    assert unit / 4 < error < 5 * unit * amplification


# ---- nanochat


def nanochat_by_hand(w, grads, group, rates):
    """Full trajectory of one matrix in NumPy, with the SVD for the iteration."""
    m, n = w.shape
    axis = 1 if m >= n else 0
    momentum, v = np.zeros((m, n)), 0.0
    for g, changed in zip(grads, rates, strict=True):
        lr, mu, wd = changed["lr"], changed["momentum"], changed["weight_decay"]
        momentum = mu * momentum + (1 - mu) * g
        u = (1 - mu) * g + mu * momentum
        if group["row_equilibration"]:
            rows = np.sqrt((u**2).sum(1, keepdims=True))
            u = u / rows * np.sqrt((u**2).sum() / m)
        factor = group["norm_factor"]
        x = on_singular_values(torch.tensor(u), 5, POLAR_EXPRESS, factor, 1e-6)
        if group["renormalize"]:
            x = x * np.sqrt(min(m, n) / (x**2).sum())
        v = group["beta2"] * v + (1 - group["beta2"]) * (x**2).mean(axis, keepdims=True)
        y = x / np.sqrt(v)
        y = y * np.linalg.norm(x) / np.linalg.norm(y)
        lr = lr * max(1, m / n) ** 0.5
        w = w - lr * y - lr * wd * w * (y * w >= 0)
    return w


@pytest.mark.parametrize("version", [JANUARY, AUGUST], ids=["january", "august"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nanochat_trajectory_by_hand(version, shape):
    w, grads = {"w": gaussian(*shape)}, gaussians("w", 4, *shape)
    rates = [
        {
            "lr": 0.1 / (t + 1),
            "momentum": 0.8 + 0.05 * t,
            "weight_decay": 0.2 - 0.05 * t,
        }
        for t in range(4)
    ]
    group = {"kind": "muon", "params": ["w"], "dtype": F64, "beta2": 0.9, **version}
    after = replay(MuonAdamW, w, [group], grads, [[r] for r in rates])
    expected = nanochat_by_hand(
        w["w"].numpy(), [g["w"].numpy() for g in grads], group, rates
    )
    np.testing.assert_allclose(after[-1]["w"], expected, atol=1e-12)


def test_normuon_averages_over_the_longer_side():
    for shape, kept in [((6, 4), (6, 1)), ((4, 4), (4, 1)), ((4, 6), (1, 6))]:
        assert references.muon_state(torch.zeros(shape))["second_moment"].shape == kept


def test_cautious_decay_touches_only_entries_that_agree_with_the_update():
    w = torch.tensor([[1.0, 1.0, -1.0, 0.0]], dtype=F64)
    x = torch.tensor([[1.0, -1.0, 0.0, 1.0]], dtype=F64)
    half = torch.tensor(0.5, dtype=F64)
    references.cautious_step(w, x, half, half)
    # 1 - 0.5 - 0.25; 1 + 0.5, no decay; -1 + 0.25, a zero agrees; 0 - 0.5.
    assert w.tolist() == [[0.25, 1.5, -0.75, -0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_adamw_is_torch_adamw(dtype):
    start, grads = {"w": gaussian(40, dtype=dtype)}, gaussians("w", 9, 40)
    settings = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    group = {"kind": "adamw", "params": ["w"], **settings}
    ours, theirs = (
        replay(make, start, [group], grads)[-1]["w"]
        for make in (MuonAdamW, lambda g: torch.optim.AdamW(g[0]["params"], **settings))
    )
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_convolution_kernel_is_a_matrix():
    kernel, grad = gaussian(6, 3, 2, 2), gaussian(6, 3, 2, 2, seed=1)
    for_matrices = recipes(F64)["january"]
    (as_kernel,) = one_step(for_matrices, [kernel], [grad])
    (as_matrix,) = one_step(
        for_matrices, [kernel.reshape(6, 12)], [grad.reshape(6, 12)]
    )
    assert torch.equal(as_kernel.reshape(6, 12), as_matrix)


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
    settings = {"lr": 0.1, "weight_decay": 0.3, "polar": exact_polar, "dtype": F64}
    (after,) = one_step(lambda p: Muon(p, **settings, **preset), [w], [grad])
    expected = w * (1 - 0.1 * 0.3) - 0.1 * factor * svd_polar(grad)
    torch.testing.assert_close(after, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("momenta", "equal"),
    [([0.9] * 5, True), ([0.85, 0.88, 0.91, 0.94, 0.95], False)],
)
def test_sum_and_ema_momentum_agree_only_while_momentum_is_constant(momenta, equal):
    ema, total = (
        replay(
            lambda g, p=preset: Muon(g, dtype=F64, polar=exact_polar, **p),
            {"w": gaussian(6, 10)},
            [{"params": ["w"]}],
            gaussians("w", 5, 6, 10),
            [[{"momentum": mu}] for mu in momenta],
        )[-1]["w"]
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
    start = {"w": gaussian(*shape, dtype=torch.float32)}
    groups = [{"params": ["w"], "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}]
    ours, theirs = (
        replay(make, start, groups, gaussians("w", 5, *shape))[-1]["w"]
        for make in (
            partial(Muon, **preset),
            partial(torch.optim.Muon, adjust_lr_fn=rule),
        )
    )
    travelled = (theirs - start["w"]).norm()
    # torch takes the polar factor in bfloat16 only; the same sums round alike.
    assert (ours - theirs).norm() / travelled < 1e-6


def test_shape_rules():
    assert shape_scale("max_ratio", 9, 1) == 3
    assert shape_scale("max_ratio", 1, 9) == 1
    assert shape_scale("rms_0.2", 4, 100) == pytest.approx(2)
    assert shape_scale("sqrt_ratio", 1, 9) == pytest.approx(1 / 3)
    assert shape_scale("none", 5, 2) == 1


def test_normuon_paper_two_steps_by_hand():
    w, grads = gaussian(4, 6), gaussians("w", 2, 4, 6)
    lr, mu, beta2, wd, eps = 0.1, 0.9, 0.8, 0.2, 1e-8
    after = replay(
        partial(NorMuon, lr=lr, momentum=mu, beta2=beta2, polar=exact_polar),
        {"w": w},
        [{"params": ["w"], "weight_decay": wd, "eps": eps, "dtype": F64}],
        grads,
    )
    momentum, v, expected = 0.0, 0.0, w
    for t, grad in enumerate(grads):
        momentum = mu * momentum + (1 - mu) * grad["w"]
        x = svd_polar(momentum)
        v = beta2 * v + (1 - beta2) * (x**2).mean(1, keepdim=True)  # rows, though wide
        y = x / (v.sqrt() + eps)
        step = lr * 0.2 * math.sqrt(24) * y / y.norm()
        expected = expected - lr * wd * expected - step
        torch.testing.assert_close(after[t]["w"], expected, atol=1e-13, rtol=0)
        assert step.square().mean().sqrt() == pytest.approx(0.2 * lr)


# ---- Hyperball


@pytest.mark.parametrize("kind", [MuonH, NorMuonH])
def test_sphere_single_step_by_hand(kind):
    """The norm stays, and the step before it is put back is lr of it."""
    w, grad = gaussian(4, 6), gaussian(4, 6, seed=1)
    settings = {"lr": 0.25, "polar": exact_polar, "dtype": F64}
    (after,) = one_step(lambda p: kind(p, **settings), [w], [grad])
    u = svd_polar(grad)
    if kind is NorMuonH:
        u = u / u.square().mean(1, keepdim=True).sqrt()
    moved = w / w.norm() - 0.25 * u / u.norm()
    expected = w.norm() * moved / moved.norm()
    torch.testing.assert_close(after, expected, atol=1e-7, rtol=0)


# ---- TEON


def test_teon_takes_the_polar_factor_of_the_matrices_side_by_side():
    w, grads = ([gaussian(4, 6, seed=i) for i in pair] for pair in ((0, 1), (2, 3)))
    settings = {"lr": 0.1, "weight_decay": 0.5, "polar": exact_polar, "dtype": F64}
    after = one_step(
        lambda p: Teon([{"params": p, "joint": True}], **settings), w, grads
    )
    joint = svd_polar(torch.cat(grads, dim=1))  # (4, 12)
    for i, found in enumerate(after):
        step = 0.1 * math.sqrt(4 / 6) * joint[:, 6 * i : 6 * i + 6]
        expected = w[i] * (1 - 0.1 * 0.5) - step
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


def test_teon_without_a_partner_is_muon():
    start, grads = (
        {k: gaussian(6, 4, seed=ord(k)) for k in "ab"},
        gaussians("ab", 3, 6, 4),
    )
    settings = {"dtype": F64, "polar": Teon.DEFAULTS["polar"]}
    together, *others = (
        [{"params": ["a", "b"]}],
        [{"params": ["a"], "joint": True}, {"params": ["b"], "joint": True}],
        [{"params": ["a", "b"], "joint": True}],
    )
    muon = partial(Muon, nesterov=False, scale="sqrt_ratio", **settings)
    expected = replay(muon, start, together, grads)[-1]
    separate, alone, joint = (
        replay(partial(Teon, dtype=F64), start, groups, grads)[-1]
        for groups in (together, *others)
    )
    for found in (separate, alone):
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    assert (joint["a"] - expected["a"]).norm() > 1e-3


# ---- Every recipe: what must hold for all


def recipes(dtype: torch.dtype) -> dict:
    """Every recipe as a function of parameters."""

    def nanochat(version):
        group = {"kind": "muon", "dtype": dtype, **version}
        return lambda p: MuonAdamW([{"params": p, **group}])

    return {
        "january": nanochat(JANUARY),
        "august": nanochat(AUGUST),
        "jordan": partial(Muon, dtype=dtype, **JORDAN),
        "jordan-sum": partial(Muon, dtype=dtype, **JORDAN_SUM),
        "moonlight": partial(Muon, dtype=dtype, **MOONLIGHT),
        "normuon": partial(NorMuon, dtype=dtype),
        "teon": lambda p: Teon([{"params": p, "joint": True}], dtype=dtype),
    }


RECIPES = [*recipes(F64)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
def test_degenerate_gradients_stay_finite(recipe, dtype):
    rank_one = gaussian(8, 1) @ gaussian(1, 5)
    one_entry = torch.zeros(8, 5, dtype=F64)
    one_entry[3, 2] = 1.0
    tiny, zero = 1e-30 * gaussian(8, 5), torch.zeros(8, 5, dtype=F64)
    wide = F64 if dtype == F64 else torch.float32
    params = [torch.nn.Parameter(gaussian(8, 5, dtype=wide)) for _ in range(4)]
    optimizer = recipes(dtype)[recipe](params)
    for _ in range(3):
        for p, grad in zip(params, (rank_one, one_entry, tiny, zero), strict=True):
            p.grad = grad.to(wide, copy=True)
        optimizer.step()
    for p in params:
        assert p.dtype == wide
        assert p.isfinite().all()
    for state in optimizer.state.values():
        assert all(value.dtype == wide for value in state.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_gradient_only_decays(recipe):
    def with_decay(params):
        optimizer = recipes(F64)[recipe](params)
        (group,) = optimizer.param_groups
        group.update(lr=0.1, weight_decay=0.5)
        return optimizer

    start = gaussian(6, 4)
    (after,) = one_step(with_decay, [start], [torch.zeros(6, 4, dtype=F64)])
    # nanochat scales the decay with the shape, too; X W = 0 counts as agreement.
    scale = math.sqrt(6 / 4) if recipe in ("january", "august") else 1.0
    expected = start * (1 - 0.1 * 0.5 * scale)
    torch.testing.assert_close(after, expected, atol=1e-15, rtol=0)
