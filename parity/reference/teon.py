"""TEON: the same weight of neighbouring blocks, orthogonalized as one matrix.

K matrices of one shape (m, n) are laid side by side along `in`, (m, K n); the polar
factor of the whole is taken and cut into K again. With K = 1 this is Muon, so the
unjoined matrices (out_proj, the MLP, a last block without a partner) are groups of one.

Source: TEON, arXiv 2601.23261, with K = 2 for Q, K and V.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch

from parity.reference.muon import accumulate, decayed_step, shape_scale
from parity.reference.polar import POLAR_EXPRESS_PAPER_SAFE, as_stack, polar_express

paper_polar_express = partial(
    polar_express,
    coefficients=POLAR_EXPRESS_PAPER_SAFE,
    norm_factor=1.01,
    eps=1e-7,
    order="jordan",
)


class Teon(torch.optim.Optimizer):
    """EMA momentum without Nesterov, joint polar factor, scale (m / n)^0.5, decay.

    Args:
        groups: dicts with "params" and whatever differs from `DEFAULTS`. The matrices
            of a group with joint=True become one; m and n of the scale are those of a
            single matrix.
        settings: what differs from `DEFAULTS` for all groups.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "polar": paper_polar_express,
        "ns_steps": 5,
        "dtype": torch.bfloat16,
        "nesterov": False,
        "scale": "sqrt_ratio",
        "joint": False,
    }

    def __init__(self, groups: Iterable[dict], **settings: Any):
        """See the class."""
        super().__init__(groups, {**self.DEFAULTS, **settings})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its `grad`."""
        for group in self.param_groups:
            params = group["params"]
            for joined in [params] if group["joint"] else [[p] for p in params]:
                self._update(joined, group)

    def _update(self, params: list[torch.Tensor], group: dict) -> None:
        directions = []  # K of (1, m, n)
        for p in params:
            w, state = as_stack(p), self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(w)
            directions.append(
                accumulate(
                    as_stack(p.grad),
                    state["momentum"],
                    group["momentum"],
                    "ema",
                    group["nesterov"],
                )
            )
        m, n = directions[0].shape[-2:]
        joint = torch.cat(directions, dim=-1)  # (1, m, K n)
        x = group["polar"](joint, group["ns_steps"], dtype=group["dtype"])
        scale = shape_scale(group["scale"], m, n)
        for p, part in zip(params, x.split(n, dim=-1), strict=True):
            w = as_stack(p)
            decayed_step(w, part.to(w.dtype), group["lr"], scale, group["weight_decay"])
