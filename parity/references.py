"""PyTorch references: the Muon family from its equations, in the plainest way.

Every matrix is a PyTorch weight, (out, in) = (m, n). All is computed in the dtype of
the parameters, except the polar iteration. `torch.optim.AdamW` has the other leaves.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch._dynamo
from torch import Tensor

Named = dict[str, Tensor]  # by parameter name


def replay(
    params: Named,
    groups: Sequence[dict],
    grads: Sequence[Named],
    rates: Sequence[Sequence[dict]] | None = None,
) -> list[Named]:
    """The parameters after each step, on copies of `params`.

    A group has the names of its parameters under "params", the optimizer's class under
    "make", and its settings; `rates` are those that change, by step and group.
    """
    params = {k: torch.nn.Parameter(v.clone()) for k, v in params.items()}
    optimizers = []
    for group in groups:
        settings = {**group, "params": [params[name] for name in group["params"]]}
        optimizers.append(settings.pop("make")([settings]))
    after = []
    for step, grad in enumerate(grads):
        for name, p in params.items():
            p.grad = grad[name].to(p.dtype, copy=True)
        for index, optimizer in enumerate(optimizers):
            optimizer.param_groups[0].update(rates[step][index] if rates else {})
            optimizer.step()
        after.append({k: p.detach().clone() for k, p in params.items()})
    return after


# ---- Polar factors. An odd quintic acts on singular values alone, so a few that drive
# [l, 1] to 1 give U V^T of X = U S V^T by matrix products.

Coefficients = Sequence[tuple[float, float, float]]  # one (a, b, c) for each step

# Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932, Algorithm 1.
# Singular values from 1e-3, 5 steps, cushion 0.02, safety 0.02: nanochat's table.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# With cushion 0.02407327424182761 and without safety: the table that the paper prints.
POLAR_EXPRESS_PAPER: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542204, -2.947849916737912, 0.5448431082926606),
    (3.948690853482289, -2.908902115962943, 0.5518191394370123),
    (3.3184196573706037, -2.4884880243148757, 0.5100489401237204),
    (2.3006520199548186, -1.6689039845747504, 0.4188073119525674),
    (1.8913014077873995, -1.2679958271945901, 0.3768040894852499),
    (1.875001480814373, -1.2500016453218594, 0.3750001645084104),
    (1.875, -1.25, 0.375),
)

# Each step but the last with a smaller argument, p(x / 1.01): rounding may carry a
# singular value past the end that a step was made for, where its quintic grows fast.
POLAR_EXPRESS_PAPER_SAFE: Coefficients = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS_PAPER[:-1]),
    POLAR_EXPRESS_PAPER[-1],
)

# K. Jordan, "Muon", 2024: one quintic for all steps.
NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),)


def as_stack(x: Tensor) -> Tensor:
    """View (out, ...) as (1, out, rest): products of stacks round as nanochat's do."""
    return x.view(1, x.shape[0], -1)


def polar_express(
    x: Tensor,
    steps: int = 5,
    *,
    coefficients: Coefficients = POLAR_EXPRESS,
    norm_factor: float = 1.02,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
    order: Literal["nanochat", "jordan", "addmm"] = "nanochat",
) -> Tensor:
    """Polar factor of each matrix by quintic steps, rounding in `dtype` throughout.

    X_0 = X / (norm_factor ||X||_F + eps); then for each (a, b, c)
    X <- a X + (b A + c A^2) X with A = X X^T (wide or square), or
    X <- a X + X (b A + c A^2) with A = X^T X (tall), A being the smaller Gram matrix.
    Steps past the end of `coefficients` repeat its last entry.

    `order` is where bfloat16 rounds: "nanochat" forms c (A A); "jordan" turns a tall
    matrix wide first and forms (c A) A; "addmm" turns it, too, and rounds each sum of
    the step once, as torch.optim.Muon does.

    Source: arXiv 2505.16932, Algorithm 1.
    """
    if order != "nanochat" and x.shape[-2] > x.shape[-1]:
        given = {"norm_factor": norm_factor, "eps": eps, "dtype": dtype, "order": order}
        return polar_express(x.mT, steps, coefficients=coefficients, **given).mT
    x = x.to(dtype)
    norm = torch.linalg.matrix_norm(x, keepdim=True)  # (..., 1, 1), Frobenius
    x = x / (norm * norm_factor + eps)
    tall = x.shape[-2] > x.shape[-1]
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = x.mT @ x if tall else x @ x.mT  # (..., k, k), k = min(m, n)
        if order == "addmm":
            shape, k = x.shape, gram.shape[-1]
            x, gram = x.reshape(-1, *shape[-2:]), gram.reshape(-1, k, k)
            poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, poly, x, beta=a).reshape(shape)
        else:
            square = (c * gram) @ gram if order == "jordan" else c * (gram @ gram)
            poly = b * gram + square
            x = a * x + (x @ poly if tall else poly @ x)
    return x


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    *,
    dtype: torch.dtype = torch.bfloat16,
    order: Literal["nanochat", "jordan", "addmm"] = "jordan",
) -> Tensor:
    """Jordan's Newton-Schulz: `polar_express` with his constants, eps 1e-7.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers", 2024.
    """
    given = {"norm_factor": 1.0, "eps": 1e-7, "dtype": dtype, "order": order}
    return polar_express(x, steps, coefficients=NEWTON_SCHULZ, **given)


# ---- Muon, NorMuon, both on a sphere, TEON: matrices only. Weight decay is decoupled,
# W <- W (1 - lr wd), and comes before the step; the shape factor scales the step alone.

JORDAN = {"accumulation": "ema", "nesterov": True, "scale": "max_ratio"}
JORDAN_SUM = {**JORDAN, "accumulation": "sum"}  # as first published
MOONLIGHT = {"accumulation": "sum", "nesterov": True, "scale": "rms_0.2"}
# torch.optim.Muon, adjust_lr_fn "original" and "match_rms_adamw".
TORCH = {**JORDAN, "polar": partial(newton_schulz, order="addmm")}
TORCH_MATCH_RMS = {**TORCH, "scale": "rms_0.2"}


def shape_scale(rule: str, m: int, n: int) -> float:
    """Factor on the polar factor of an (out, in) = (m, n) matrix.

    "max_ratio": max(1, m / n)^0.5, Jordan. "rms_0.2": 0.2 max(m, n)^0.5, Moonlight
    (arXiv 2502.16982, section 2.2). "sqrt_ratio": (m / n)^0.5, TEON.
    """
    return {
        "max_ratio": math.sqrt(max(1.0, m / n)),
        "rms_0.2": 0.2 * math.sqrt(max(m, n)),
        "sqrt_ratio": math.sqrt(m / n),
    }[rule]


def decayed_step(w: Tensor, x: Tensor, lr: float, scale: float, decay: float) -> None:
    """W <- W (1 - lr wd) - lr scale X, in place."""
    w.mul_(1 - lr * decay)
    w.sub_(lr * scale * x)


class Muon(torch.optim.Optimizer):
    """Muon: momentum, polar factor, shape factor, decoupled decay.

    Settings are what differs from `DEFAULTS`, as JORDAN, MOONLIGHT and others above;
    "polar" is called as polar(u, ns_steps, dtype=dtype) on a (1, m, n) stack.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers", 2024; for
    MOONLIGHT Liu et al., arXiv 2502.16982, equation 4 (with Nesterov, as they run it).
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "polar": newton_schulz,
        "ns_steps": 5,
        "dtype": torch.bfloat16,
        **JORDAN,
    }

    def __init__(self, params: Iterable, **settings: Any):
        super().__init__(params, {**self.DEFAULTS, **settings})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its `grad`."""
        for group in self.param_groups:
            for p in group["params"]:
                self._update(as_stack(p), as_stack(p.grad), self.state[p], group)

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        x = self._direction(w, grad, state, group)
        scale = shape_scale(group["scale"], *w.shape[-2:])
        decayed_step(w, x, group["lr"], scale, group["weight_decay"])

    def _direction(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> Tensor:
        u = self._accumulated(w, grad, state, group)
        return self._orthogonalized(u, group).to(w.dtype)

    def _accumulated(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> Tensor:
        """Update the momentum in place; return what is to be orthogonalized.

        "ema": M <- mu M + (1 - mu) G, Nesterov mu M + (1 - mu) G.
        "sum": M <- mu M + G, Nesterov mu M + G.
        """
        momentum = state.setdefault("momentum", torch.zeros_like(w))
        mu = group["momentum"]
        weight = {"ema": 1 - mu, "sum": 1.0}[group["accumulation"]]
        momentum.mul_(mu).add_(grad, alpha=weight)
        return mu * momentum + weight * grad if group["nesterov"] else momentum.clone()

    def _orthogonalized(self, u: Tensor, group: dict) -> Tensor:
        return group["polar"](u, group["ns_steps"], dtype=group["dtype"])


class NorMuon(Muon):
    """NorMuon, arXiv 2510.05491, Algorithm 1: every output neuron has a second moment.

    v <- beta2 v + (1 - beta2) mean(X^2 over the row), Y = X / (sqrt(v) + eps), and the
    step lr 0.2 sqrt(m n) / ||Y||_F Y. The norm is at least 1e-10.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Muon.DEFAULTS,
        "nesterov": False,
        "beta2": 0.95,
        "eps": 1e-8,
    }

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        y = self._direction(w, grad, state, group)
        norm = torch.linalg.matrix_norm(y, keepdim=True).clamp_min(1e-10)
        y = y * (0.2 * math.sqrt(w.shape[-2] * w.shape[-1]) / norm)
        decayed_step(w, y, group["lr"], 1.0, group["weight_decay"])

    def _direction(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> Tensor:
        x = super()._direction(w, grad, state, group)  # (1, m, n)
        v = state.setdefault("second_moment", torch.zeros_like(w[..., :1]))  # (1, m, 1)
        beta2 = group["beta2"]
        v.mul_(beta2).add_(x.square().mean(-1, keepdim=True), alpha=1 - beta2)
        return x / (v.sqrt() + group["eps"])


def sphere_step(w: Tensor, u: Tensor, lr: float, state: dict) -> None:
    """W <- R n(W - lr R n(U)), in place; n(X) = X / ||X||_F, and R is ||W||_F at first.

    Source: Hyperball, arXiv 2606.16899. A choice of this project: a W that starts at
    zero moves by -lr R n(U) with R = sqrt(m) until its norm reaches R.
    """
    norm = torch.linalg.matrix_norm
    if "radius" not in state:
        start = norm(w)
        state["inside"] = bool(start == 0)
        state["radius"] = math.sqrt(w.shape[-2]) if state["inside"] else start
    radius = state["radius"]
    if norm(u) < 1e-10:
        return
    w.sub_(lr * radius * u / norm(u))
    if state["inside"] and norm(w) < radius:
        return
    state["inside"] = False
    w.mul_(radius / norm(w))


class MuonH(Muon):
    """Muon with sum momentum on the sphere of `sphere_step`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {**Muon.DEFAULTS, **JORDAN_SUM}

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        sphere_step(w, self._direction(w, grad, state, group), group["lr"], state)


paper_polar_express = partial(
    polar_express,
    coefficients=POLAR_EXPRESS_PAPER_SAFE,
    norm_factor=1.01,
    eps=1e-7,
    order="jordan",
)


class Teon(Muon):
    """TEON: the matrices of a group with joint=True, side by side along `in`, as one.

    The polar factor of (m, K n) is taken and cut into K again; m and n of the scale are
    those of a single matrix. With K = 1 this is Muon.

    Source: arXiv 2601.23261, with K = 2 for Q, K and V of neighbouring blocks.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Muon.DEFAULTS,
        "polar": paper_polar_express,
        "nesterov": False,
        "scale": "sqrt_ratio",
        "joint": False,
    }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its `grad`."""
        for group in self.param_groups:
            params = group["params"]
            for joined in [params] if group["joint"] else [[p] for p in params]:
                ws = [as_stack(p) for p in joined]  # K of (1, m, n)
                us = [
                    self._accumulated(w, as_stack(p.grad), self.state[p], group)
                    for w, p in zip(ws, joined, strict=True)
                ]
                x = self._orthogonalized(torch.cat(us, dim=-1), group)  # (1, m, K n)
                m, n = ws[0].shape[-2:]
                scale = shape_scale(group["scale"], m, n)
                for w, part in zip(ws, x.split(n, dim=-1), strict=True):
                    part = part.to(w.dtype)
                    decayed_step(w, part, group["lr"], scale, group["weight_decay"])


# ---- nanochat's Muon, in its two versions.

JANUARY = {"norm_factor": 1.02, "row_equilibration": False, "renormalize": False}
JULY = {"norm_factor": 1.01, "row_equilibration": True, "renormalize": True}


def rate(value: float | Tensor, like: Tensor) -> Tensor:
    """Round a rate to the dtype of what it multiplies, as eager nanochat does.

    In bfloat16, 1 - beta2 is 0.0508 instead of 0.05, and lr is off by up to 0.2 %.
    """
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def at_least_float32(x: Tensor) -> Tensor:
    """Widen bfloat16 to float32; keep float32 and float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reduced_dim(m: int, n: int) -> int:
    """Axis that NorMuon averages over: the columns if m >= n, else the rows."""
    return -1 if m >= n else -2


def nesterov_ema(grad: Tensor, momentum: Tensor, mu: Tensor) -> Tensor:
    """M <- M + (1 - mu)(G - M), in place; returns G + mu (M - G)."""
    momentum.lerp_(grad, 1 - mu)
    return grad.lerp(momentum, mu)


def equilibrate_rows(u: Tensor) -> Tensor:
    """Scale each row of (..., m, n) to the same norm, ||U||_F / sqrt(m).

    That is the root mean square of the row norms, which are clamped at 1e-6.
    Source: MuonEq, arXiv 2603.28254.
    """
    wide = at_least_float32(u)
    row_norm = wide.norm(dim=-1, keepdim=True)  # (..., m, 1)
    target = wide.norm(dim=(-2, -1), keepdim=True) / math.sqrt(u.shape[-2])
    return u * (target / row_norm.clamp_min(1e-6)).to(u.dtype)


def renormalize(x: Tensor) -> Tensor:
    """Set the Frobenius norm of (..., m, n) to sqrt(min(m, n)), that of a polar factor.

    The norm is clamped at 1e-6. Source: Muon+, arXiv 2602.21545.
    """
    x = at_least_float32(x)
    norm = x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6)
    return x / norm * math.sqrt(min(x.shape[-2:]))


def normuon(x: Tensor, second_moment: Tensor, beta2: Tensor) -> Tensor:
    """Divide rows (or columns) by their root mean square over time; keep ||X||_F.

    V <- V + (1 - beta2)(mean(X^2) - V), in place; s = rsqrt(max(V, 1e-10));
    returns X s ||X||_F / max(||X s||_F, 1e-10). `second_moment` is (..., m, 1) or
    (..., 1, n). Source: arXiv 2510.05491, with nanochat's choice of axis and norm.
    """
    dim = reduced_dim(*x.shape[-2:])
    count = x.shape[dim]  # entries behind each mean
    mean_square = at_least_float32(x).square().mean(dim=dim, keepdim=True)
    # Both norms from the means, as nanochat does: sum over all = count * sum of means.
    norm = (mean_square.sum(dim=(-2, -1), keepdim=True) * count).sqrt()
    state_dtype = second_moment.dtype
    second_moment.lerp_(mean_square.to(state_dtype), (1 - beta2).to(state_dtype))
    scale = second_moment.clamp_min(1e-10).rsqrt()
    scaled_square = mean_square * count * scale.square()
    scaled_norm = scaled_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    return x * (scale * (norm / scaled_norm.clamp_min(1e-10))).to(x.dtype)


def cautious_step(w: Tensor, x: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
    """W <- W - lr X - lr wd W [X W >= 0], in place: decay only where both shrink W."""
    mask = (x * w) >= 0
    w.sub_(lr * x + lr * weight_decay * w * mask)


def nanochat_update(
    w: Tensor, grad: Tensor, momentum: Tensor, second_moment: Tensor, group: dict
) -> None:
    """One step of w (1, m, n) and its state, in place."""
    m, n = w.shape[-2:]
    u = nesterov_ema(grad, momentum, rate(group["momentum"], w)).to(group["dtype"])
    if group["row_equilibration"]:
        u = equilibrate_rows(u)
    x = group["polar"](
        u, group["ns_steps"], norm_factor=group["norm_factor"], dtype=group["dtype"]
    )
    if group["renormalize"]:
        x = renormalize(x)
    x = normuon(x, second_moment, rate(group["beta2"], x))
    lr = rate(group["lr"] * max(1.0, m / n) ** 0.5, x)
    cautious_step(w, x, lr, rate(group["weight_decay"], x))


class Nanochat(Muon):
    """nanochat's Muon on one process; its AdamW is that of PyTorch."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Muon.DEFAULTS,
        "polar": polar_express,
        "weight_decay": 0.1,
        "beta2": 0.95,
        **JANUARY,
    }
    _nanochat_update = staticmethod(nanochat_update)

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            means = w.sum(reduced_dim(*w.shape[-2:]), keepdim=True)
            state["momentum"] = torch.zeros_like(w)
            state["second_moment"] = torch.zeros_like(means)
        self._nanochat_update(w, grad, **state, group=group)


@functools.cache
def compiled(function: Callable) -> Callable:
    """The function through torch.compile, once for each shape."""
    torch._dynamo.config.recompile_limit = 64  # shapes; 8 by default
    return torch.compile(function, dynamic=False, fullgraph=True)


class CompiledNanochat(Nanochat):
    """`Nanochat` through a compiled update.

    Rates are tensors there, as in nanochat: each new number would compile again.
    """

    @staticmethod
    def _nanochat_update(
        w: Tensor, grad: Tensor, momentum: Tensor, second_moment: Tensor, group: dict
    ) -> None:
        settings = {k: v for k, v in group.items() if k != "params"}
        for rate in ("lr", "momentum", "weight_decay", "beta2"):
            settings[rate] = torch.tensor(group[rate], dtype=torch.float32)
        compiled(nanochat_update)(w, grad, momentum, second_moment, settings)
