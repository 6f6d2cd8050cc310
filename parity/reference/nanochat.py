"""nanochat's MuonAdamW: Muon for the matrices, AdamW for the rest, in one optimizer.

One Muon step of one matrix, in the order of `muon_update`:
1. Nesterov momentum (EMA form).
2. Rows equilibrated, in the later version only (MuonEq, arXiv 2603.28254).
3. Polar factor by Polar Express (arXiv 2505.16932).
4. Frobenius norm renewed, in the later version only (Muon+, arXiv 2602.21545).
5. Second moments of rows or columns (NorMuon, arXiv 2510.05491).
6. Cautious weight decay, shape-scaled learning rate, step.

`JANUARY` and `AUGUST` hold what tells the two versions apart. nanochat stacks matrices
of one shape; every line is per matrix, so here one follows another. The functions take
leading batch axes all the same, for distributed.py, which owns stacks.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parity.reference.polar import as_stack, polar_express

JANUARY = {"norm_factor": 1.02, "row_equilibration": False, "renormalize": False}
AUGUST = {"norm_factor": 1.01, "row_equilibration": True, "renormalize": True}

MUON_DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "ns_steps": 5,
    "polar": polar_express,  # or a variant of it, to see what rounding does
    "dtype": torch.bfloat16,  # of the polar iteration
    **JANUARY,
}
ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.8, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
}


def rate(value: float | Tensor, like: Tensor) -> Tensor:
    """Round a rate to the dtype of what it multiplies, as eager nanochat does.

    The sums and products of rates round there too. In float32 that is the last bit, but
    in bfloat16 1 - beta2 is 0.0508 instead of 0.05, and lr is off by up to 0.2 %.
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
    frobenius = wide.norm(dim=(-2, -1), keepdim=True)  # (..., 1, 1)
    target = frobenius / math.sqrt(u.shape[-2])
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


def muon_update(
    w: Tensor, grad: Tensor, momentum: Tensor, second_moment: Tensor, group: dict
) -> None:
    """One Muon step of w (..., m, n) and its state, in place. Phases: the file's."""
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


def muon_state(w: Tensor) -> dict[str, Tensor]:
    """Zero momentum and second moments for w (..., m, n)."""
    m, n = w.shape[-2:]
    return {
        "momentum": torch.zeros_like(w),
        "second_moment": torch.zeros_like(w.sum(reduced_dim(m, n), keepdim=True)),
    }


def adamw_update(
    w: Tensor, grad: Tensor, mean: Tensor, square: Tensor, count: int, group: dict
) -> None:
    """One AdamW step of w, any shape, and its moments, in place; count is 1 at first.

    W <- W (1 - lr wd) - lr mhat / (sqrt(vhat) + eps), both moments bias-corrected.
    Source: Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2.
    """
    lr, decay = rate(group["lr"], w), rate(group["weight_decay"], w)
    beta1, beta2 = (rate(beta, w) for beta in group["betas"])
    w.mul_(1 - lr * decay)
    mean.lerp_(grad, 1 - beta1)
    square.lerp_(grad.square(), 1 - beta2)
    mean_hat = mean / (1 - beta1**count)
    square_hat = square / (1 - beta2**count)
    w.sub_(lr * mean_hat / (square_hat.sqrt() + group["eps"]))


def adamw_state(w: Tensor) -> dict[str, Tensor]:
    """Zero first and second moments for w."""
    return {"mean": torch.zeros_like(w), "square": torch.zeros_like(w)}


def complete_groups(groups: Iterable[dict]) -> list[dict]:
    """Fill in the defaults of each group's kind, and refuse what belongs to neither."""
    completed = []
    for group in groups:
        defaults = {"muon": MUON_DEFAULTS, "adamw": ADAMW_DEFAULTS}[group["kind"]]
        unknown = group.keys() - defaults.keys() - {"kind", "params"}
        if unknown:
            raise ValueError(
                f"kind={group['kind']!r} has no {sorted(unknown)}; it has "
                f"{sorted(defaults)}"
            )
        completed.append({**defaults, **group})
    return completed


class MuonAdamW(torch.optim.Optimizer):
    """nanochat's optimizer on one process.

    Args:
        groups: dicts with "params", "kind" ("muon" or "adamw") and whatever differs
            from MUON_DEFAULTS or ADAMW_DEFAULTS. Every rate in `param_groups` may be
            changed before any step.
    """

    def __init__(self, groups: Iterable[dict]):
        """See the class."""
        super().__init__(complete_groups(groups), defaults={})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its `grad`."""
        for group in self.param_groups:
            for p in group["params"]:
                if group["kind"] == "muon":
                    self._muon(p, group)
                else:
                    self._adamw(p, group)

    def _muon(self, p: Tensor, group: dict) -> None:
        w, state = as_stack(p), self.state[p]
        if not state:
            state.update(muon_state(w))
        muon_update(
            w, as_stack(p.grad), state["momentum"], state["second_moment"], group
        )

    def _adamw(self, p: Tensor, group: dict) -> None:
        state = self.state[p]
        if not state:
            state.update(adamw_state(p), count=0)
        state["count"] += 1
        adamw_update(p, p.grad, state["mean"], state["square"], state["count"], group)
