"""Replay recorded trajectories of the public optimizers with the references.

    python -m parity.reference.goldens DIRECTORY

Each .npz holds `param{t}/{name}` before step t, `grad{t}/{name}`, and `meta`, a JSON
string with the settings. Printed: the error at the end relative to the distance
travelled, ||W_T - ref|| / ||ref - W_0||, over all parameters and for the worst, and how
many parameters are equal to the last bit. Float32 above 1e-6 or bfloat16 above 1e-5
makes the exit status 1. The recordings are not part of this project.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from parity.reference.nanochat import AUGUST, JANUARY, MuonAdamW
from parity.reference.replay import Named, replay
from parity.reference.teon import Teon

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-5}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Recording:
    """One file: parameters before, gradients at, and parameters after every step."""

    meta: dict
    start: Named
    grads: list[Named]
    after: list[Named]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the polar iteration."""
        return DTYPES[self.meta["orthogonalize_dtype"]]


def load(path: Path) -> Recording:
    """Read one .npz."""
    with np.load(path) as data:
        meta = json.loads(str(data["meta"]))

        def named(prefix: str) -> Named:
            return {
                key.removeprefix(prefix): torch.from_numpy(data[key])
                for key in data.files
                if key.startswith(prefix)
            }

        params = [named(f"param{t}/") for t in range(meta["steps"] + 1)]
        grads = [named(f"grad{t}/") for t in range(meta["steps"])]
    return Recording(meta, params[0], grads, params[1:])


def nanochat_setup(recording: Recording) -> tuple[Callable, list[dict], list]:
    """Optimizer, groups and rates; the schedule is what `meta["schedule"]` says."""
    meta = recording.meta
    versions = {v["norm_factor"]: v for v in (JANUARY, AUGUST)}
    groups = [
        {
            "kind": "muon",
            "params": meta["muon"],
            "beta2": meta["beta2"],
            "ns_steps": meta["ns_steps"],
            "dtype": recording.dtype,
            **versions[meta["polar_norm_factor"]],
        },
        {
            "kind": "adamw",
            "params": meta["adamw"],
            "betas": meta["adam_betas"],
            "eps": meta["adam_eps"],
            "weight_decay": meta["adam_weight_decay"],
        },
    ]
    rates = []
    for t in range(meta["steps"]):
        multiplier = min(1.0, (t + 1) / 3) * (1.0 if t < 8 else 0.5)
        muon = {
            "lr": meta["muon_lr"] * multiplier,
            "momentum": 0.85 + 0.1 * min(t / 6, 1.0),
            "weight_decay": meta["weight_decay"] * (1 - t / 20),
        }
        rates.append([muon, {"lr": meta["adam_lr"] * multiplier}])
    return MuonAdamW, groups, rates


def teon_setup(recording: Recording) -> tuple[Callable, list[dict], None]:
    """Optimizer and groups; the rates are constant."""
    meta = recording.meta

    def make(groups: list[dict]) -> Teon:
        return Teon(
            groups,
            lr=meta["lr"],
            momentum=meta["momentum"],
            weight_decay=meta["weight_decay"],
            ns_steps=meta["ns_steps"],
            dtype=recording.dtype,
        )

    joint = [{"params": names, "joint": True} for names in meta["teon_groups"]]
    return make, [{"params": meta["muon"]}, *joint], None


def squared(x: torch.Tensor) -> float:
    """Sum of squares in float64, which the sums over parameters need."""
    return x.double().square().sum().item()


def errors(recording: Recording) -> dict[str, tuple[float, float]]:
    """For each parameter ||W_T - ref||^2 and ||ref - W_0||^2, both after all steps."""
    setup = teon_setup if "teon_groups" in recording.meta else nanochat_setup
    make, groups, rates = setup(recording)
    final = replay(make, recording.start, groups, recording.grads, rates)[-1]
    ref = recording.after[-1]
    return {
        k: (squared(final[k] - ref[k]), squared(ref[k] - recording.start[k]))
        for k in ref
    }


def main(directory: str) -> int:
    """Print the table for every .npz in the directory; 1 if a limit is passed."""
    torch.set_num_threads(1)
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise SystemExit(f"no .npz in {directory}")
    print(f"{'file':36} {'error':>8} {'worst':>8}  {'parameter':10} equal")
    worst_status = 0
    for path in paths:
        recording = load(path)
        by_name = errors(recording)
        error = sum(e for e, _ in by_name.values()) ** 0.5
        travelled = sum(d for _, d in by_name.values()) ** 0.5
        relative = {k: (e / d) ** 0.5 for k, (e, d) in by_name.items()}
        worst = max(relative, key=relative.__getitem__)
        equal = sum(e == 0 for e, _ in by_name.values())
        failed = not error / travelled <= LIMITS[recording.dtype]  # not: nan fails
        worst_status |= failed
        print(
            f"{path.stem:36} {error / travelled:8.1e} {relative[worst]:8.1e}  "
            f"{worst:10} {equal:2}/{len(by_name)}{'  FAIL' if failed else ''}"
        )
    return int(worst_status)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m parity.reference.goldens DIRECTORY")
    raise SystemExit(main(sys.argv[1]))
