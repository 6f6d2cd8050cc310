"""Muon as Jordan, PyTorch and Moonlight run it, NorMuon, and both on a sphere.

Matrices only; other parameters need an optimizer of their own. Weight decay is
decoupled, W <- W (1 - lr wd), and comes before the step; the shape factor scales the
step alone, not the decay. On a sphere there is neither.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from parity.reference.polar import as_stack, newton_schulz

JORDAN = {"accumulation": "ema", "nesterov": True, "scale": "max_ratio"}
JORDAN_SUM = {**JORDAN, "accumulation": "sum"}  # as first published
MOONLIGHT = {"accumulation": "sum", "nesterov": True, "scale": "rms_0.2"}
# torch.optim.Muon, adjust_lr_fn "original" and "match_rms_adamw".
TORCH = {**JORDAN, "polar": partial(newton_schulz, order="addmm")}
TORCH_MATCH_RMS = {**TORCH, "scale": "rms_0.2"}

Accumulation = Literal["ema", "sum"]
Scale = Literal["max_ratio", "rms_0.2", "sqrt_ratio", "none"]


def accumulate(
    grad: Tensor,
    momentum: Tensor,
    mu: float,
    accumulation: Accumulation,
    nesterov: bool,
) -> Tensor:
    """Update the momentum in place; return what is to be orthogonalized.

    "ema": M <- mu M + (1 - mu) G, Nesterov mu M + (1 - mu) G.
    "sum": M <- mu M + G, Nesterov mu M + G.
    With a constant mu the two differ by the factor 1 - mu, which the polar factor
    ignores; with a changing mu they are different optimizers.
    """
    weight = {"ema": 1 - mu, "sum": 1.0}[accumulation]
    momentum.mul_(mu).add_(grad, alpha=weight)
    return mu * momentum + weight * grad if nesterov else momentum.clone()


def shape_scale(rule: Scale, m: int, n: int) -> float:
    """Factor on the polar factor of an (out, in) = (m, n) matrix.

    "max_ratio": max(1, m / n)^0.5, Jordan. "rms_0.2": 0.2 max(m, n)^0.5, Moonlight
    (arXiv 2502.16982, section 2.2). "sqrt_ratio": (m / n)^0.5, TEON. "none": 1.
    """
    return {
        "max_ratio": math.sqrt(max(1.0, m / n)),
        "rms_0.2": 0.2 * math.sqrt(max(m, n)),
        "sqrt_ratio": math.sqrt(m / n),
        "none": 1.0,
    }[rule]


def decayed_step(w: Tensor, x: Tensor, lr: float, scale: float, decay: float) -> None:
    """W <- W (1 - lr wd) - lr scale X, in place."""
    w.mul_(1 - lr * decay)
    w.sub_(lr * scale * x)


class Muon(torch.optim.Optimizer):
    """Muon: momentum, polar factor, shape factor, decoupled decay.

    JORDAN, JORDAN_SUM, MOONLIGHT, TORCH and TORCH_MATCH_RMS hold the settings of each.

    Args:
        params: matrices or convolution kernels, or groups of them.
        settings: what differs from `DEFAULTS`; "polar" is called as
            polar(u, ns_steps, dtype=dtype) on a (1, m, n) stack.

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
        """See the class."""
        super().__init__(params, {**self.DEFAULTS, **settings})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its `grad`."""
        for group in self.param_groups:
            for p in group["params"]:
                self._update(as_stack(p), as_stack(p.grad), self.state[p], group)

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        x = self._orthogonalized(w, grad, state, group)
        scale = shape_scale(group["scale"], *w.shape[-2:])
        decayed_step(w, x, group["lr"], scale, group["weight_decay"])

    def _orthogonalized(
        self, w: Tensor, grad: Tensor, state: dict, group: dict
    ) -> Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(w)
        u = accumulate(
            grad,
            state["momentum"],
            group["momentum"],
            group["accumulation"],
            group["nesterov"],
        )
        return group["polar"](u, group["ns_steps"], dtype=group["dtype"]).to(w.dtype)


class NorMuon(Muon):
    """NorMuon as its paper states it: every output neuron has a second moment.

    v <- beta2 v + (1 - beta2) mean(X^2 over the row), Y = X / (sqrt(v) + eps), and the
    step lr 0.2 sqrt(m n) / ||Y||_F Y, whose root mean square is 0.2 lr. The norm is
    clamped at 1e-10, so that a zero gradient moves nothing.

    Source: Li et al., arXiv 2510.05491, Algorithm 1.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Muon.DEFAULTS,
        "nesterov": False,
        "scale": "none",
        "beta2": 0.95,
        "eps": 1e-8,
    }

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        y = self._normalized(w, grad, state, group)
        norm = torch.linalg.matrix_norm(y, keepdim=True).clamp_min(1e-10)
        m, n = w.shape[-2:]
        y = y * (0.2 * math.sqrt(m * n) / norm)
        decayed_step(w, y, group["lr"], 1.0, group["weight_decay"])

    def _normalized(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> Tensor:
        x = self._orthogonalized(w, grad, state, group)  # (1, m, n)
        if "second_moment" not in state:
            state["second_moment"] = torch.zeros_like(w[..., :1])  # (1, m, 1)
        v, beta2 = state["second_moment"], group["beta2"]
        v.mul_(beta2).add_(x.square().mean(-1, keepdim=True), alpha=1 - beta2)
        return x / (v.sqrt() + group["eps"])


def sphere_step(w: Tensor, u: Tensor, lr: float, state: dict) -> None:
    """W <- R n(W - lr R n(U)), in place; n(X) = X / ||X||_F, and R is ||W||_F at first.

    A W that starts at zero moves by -lr R n(U) with R = sqrt(m), as if its entries had
    the variance 1/n, until its norm reaches R. A U below 1e-10 moves nothing.

    Source: arXiv 2606.16899; what a zero W does is a choice of this project.
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
    """Muon with sum momentum on the sphere of `sphere_step`.

    Source: Hyperball, arXiv 2606.16899.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {**Muon.DEFAULTS, **JORDAN_SUM}

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        x = self._orthogonalized(w, grad, state, group)
        sphere_step(w, x, group["lr"], state)


class NorMuonH(NorMuon):
    """NorMuon's direction on the sphere of `sphere_step`.

    Source: Hyperball, arXiv 2606.16899.
    """

    def _update(self, w: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        y = self._normalized(w, grad, state, group)
        sphere_step(w, y, group["lr"], state)
