"""Optimizer steps in PyTorch that `benchmarks.step` times.

Matrices are separate parameters (out, in), on the CPU or, where asked for, on the GPU.
"""

import time
from typing import Any

import jax
import torch

from benchmarks.parameters import model_parameters
from parity.spread import CompiledMuonAdamW

NAMES = ("torch-nanochat", "torch-muon")


class TorchContender:
    """An optimizer and the parameters that it steps."""

    def __init__(self, name: str, model: str, dtype: str, device: str):
        """Do the first step, which compiles.

        Args:
          name: "torch-nanochat", the parity suite's reference under torch.compile, or
            "torch-muon", torch.optim.Muon with fused AdamW.
          model: one of `benchmarks.parameters.MODELS`.
          dtype: of the polar iteration; torch.optim.Muon knows only bfloat16.
          device: "cpu" or "cuda".
        """
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        groups: dict[str, list[torch.nn.Parameter]] = {"muon": [], "adamw": []}
        leaves = jax.tree_util.tree_leaves_with_path(model_parameters(model, "float32"))
        for path, leaf in leaves:
            drawn = [
                torch.randn(leaf.shape[::-1], generator=generator, device=device)
                for _ in range(2)
            ]
            p = torch.nn.Parameter(0.02 * drawn[0])
            p.grad = 0.02 * drawn[1]
            groups["muon" if path[0].key == "blocks" else "adamw"].append(p)
        self.optimizers: list[Any] = []
        if name == "torch-nanochat":
            muon = {"kind": "muon", "dtype": getattr(torch, dtype)}
            pair = [
                {"params": groups["muon"], **muon},
                {"params": groups["adamw"], "kind": "adamw"},
            ]
            self.optimizers.append(CompiledMuonAdamW(pair))
        elif name == "torch-muon":
            self.optimizers.append(
                torch.optim.Muon(groups["muon"], lr=0.02, weight_decay=0.1)
            )
            self.optimizers.append(
                torch.optim.AdamW(groups["adamw"], lr=3e-4, fused=True)
            )
        else:
            raise ValueError(f"contender {name!r}; expected one of {', '.join(NAMES)}")
        self.info = {"compile_s": self.step()}

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def peak_bytes(self) -> int | None:
        """The most of a GPU's memory that was allocated so far."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None
