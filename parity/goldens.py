"""Replay recorded trajectories of the public optimizers, by the references and by us.

    python -m parity.goldens DIRECTORY

Each .npz holds `param{t}/{name}` before step t, `grad{t}/{name}`, and `meta`, a JSON
string with the settings. Printed, relative to the distance travelled after all steps:
the error of the PyTorch reference; ours; our worst parameter; how many entries flipped
in a cautious mask, and our error over all others. Beside bfloat16 files stands how far
nanochat compiled is from nanochat eager, the recording: the spread within which
bfloat16 says something.

The exit status is 1 if the reference is above 1e-6 in float32 or 1e-5 in bfloat16, and
if we are above 2e-5 in float32 or above the spread in bfloat16. The recordings are not
part of this project.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity import compare, problems, weights
from parity.problems import Arrays
from parity.references import (
    AUGUST,
    JANUARY,
    MuonAdamW,
    Named,
    Teon,
    paper_polar_express,
    replay,
)
from parity.spread import CompiledMuonAdamW, compiled

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-5}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass
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


@dataclasses.dataclass(frozen=True)
class Row:
    """What is printed for one file."""

    reference: float
    limit: float  # of the reference
    error: float
    worst: float
    parameter: str  # the worst one
    flips: int
    unflipped: float
    spread: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it, or the reference, is above its bar; nan is."""
        bar = compare.BARS["float32"] if self.spread is None else self.spread
        return not (self.error <= bar and self.reference <= self.limit)


def our_teon(recording: Recording) -> optax.GradientTransformation:
    """`jm.teon` with the settings of the file."""
    meta = recording.meta
    joined = [name for group in meta["teon_groups"] for name in group]
    return jm.teon(
        meta["lr"],
        meta["momentum"],
        meta["weight_decay"],
        steps=meta["ns_steps"],
        dtype=_dtype(recording),
        matrices=functools.partial(
            jm.read,
            rules="muon",
            joins={name.rstrip("0123456789") + "{i}": 2 for name in joined},
        ),
    )


def our_nanochat(recording: Recording) -> optax.GradientTransformation:
    """`jm.nanochat` with the settings of the file."""
    meta = recording.meta
    _, (group, adamw), steps = nanochat_setup(recording)
    rates = {
        key: np.array([step[index][name] for step in steps], np.float32)
        for key, index, name in (
            ("lr", 0, "lr"),
            ("momentum", 0, "momentum"),
            ("weight_decay", 0, "weight_decay"),
            ("adamw_lr", 1, "lr"),
        )
    }
    rates = problems.jax_rates(rates, "float32")
    return jm.nanochat(
        rates["lr"],
        rates["momentum"],
        rates["weight_decay"],
        beta2=group["beta2"],
        steps=group["ns_steps"],
        edition="2026-08" if group["renormalize"] else "2026-01",
        adamw=optax.adamw(
            rates["adamw_lr"],
            *adamw["betas"],
            adamw["eps"],
            weight_decay=adamw["weight_decay"],
        ),
        dtype=_dtype(recording),
        matrices=lambda params: jm.read(
            params,
            rules={x: "muon" if x in meta["muon"] else "adamw" for x in params},
        ),
    )


def _dtype(recording: Recording) -> str:
    return {torch.float32: "float32", torch.bfloat16: "bfloat16"}[recording.dtype]


def ours(recording: Recording) -> list[Arrays]:
    """Parameters after every step of our recipe."""
    matrices = list(recording.meta["muon"])
    if "teon_groups" in recording.meta:
        tx = our_teon(recording)
        matrices += [name for group in recording.meta["teon_groups"] for name in group]
    else:
        tx = our_nanochat(recording)

    def cross(name: str, x: np.ndarray) -> np.ndarray:
        """Both ways: matrices are the transpose of each other."""
        return weights.kernel_to_flax(x, x.shape[::-1]) if name in matrices else x

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {k: jnp.asarray(cross(k, p.numpy())) for k, p in recording.start.items()}
    state, after = tx.init(params), []
    for named in recording.grads:
        grads = {k: jnp.asarray(cross(k, g.numpy())) for k, g in named.items()}
        params, state = step(params, state, grads)
        after.append({k: cross(k, np.asarray(p)) for k, p in params.items()})
    return after


def measure(recording: Recording) -> Row:
    """Compare our run with the recording."""
    after = ours(recording)
    is_teon = "teon_groups" in recording.meta
    steps = [] if is_teon else nanochat_setup(recording)[2]
    apart, unflipped, moved, flips = {}, 0.0, {}, 0
    for name, start in recording.start.items():
        reference = [p[name].numpy() for p in recording.after]
        off = after[-1][name].astype(np.float64) - reference[-1]
        flipped = np.zeros(off.shape, bool)
        if (
            steps
            and name in recording.meta["muon"]
            and recording.dtype == torch.float32
        ):
            flipped = compare.flipped_entries(
                [p[name] for p in after],
                reference,
                start.numpy(),
                [step[0]["lr"] for step in steps],
                [step[0]["weight_decay"] for step in steps],
            )
        flips += int(np.count_nonzero(flipped))
        apart[name] = np.sum(off**2)
        unflipped += np.sum(off[~flipped] ** 2)
        moved[name] = np.sum((reference[-1].astype(np.float64) - start.numpy()) ** 2)
    by_name = {name: float(np.sqrt(apart[name] / moved[name])) for name in apart}
    worst = max(by_name, key=by_name.__getitem__)
    distance = sum(moved.values())
    return Row(
        _error(recording, *setup(recording)),
        LIMITS[recording.dtype],
        float(np.sqrt(sum(apart.values()) / distance)),
        by_name[worst],
        worst,
        flips,
        float(np.sqrt(unflipped / distance)),
        _spread(recording) if recording.dtype == torch.bfloat16 else None,
    )


def setup(recording: Recording) -> tuple[Callable, list[dict], list | None]:
    """Optimizer, groups and rates of the reference."""
    is_teon = "teon_groups" in recording.meta
    return teon_setup(recording) if is_teon else nanochat_setup(recording)


def _spread(recording: Recording) -> float:
    """How far the reference ends from the recording when it is compiled."""
    make, groups, rates = setup(recording)
    if "teon_groups" in recording.meta:
        polar = compiled(paper_polar_express)
        groups = [{**group, "polar": polar} for group in groups]
    else:
        make = CompiledMuonAdamW
    return _error(recording, make, groups, rates)


def _error(recording: Recording, make: Callable, groups: list, rates: Any) -> float:
    """How far an optimizer of PyTorch ends from the recording."""
    end = replay(make, recording.start, groups, recording.grads, rates)[-1]
    apart = moved = 0.0
    for name, reference in recording.after[-1].items():
        apart += (end[name] - reference).double().square().sum().item()
        distance = reference - recording.start[name]
        moved += distance.double().square().sum().item()
    return (apart / moved) ** 0.5


def main(directory: str) -> int:
    """Print the table for every .npz in the directory; 1 if a bar is passed."""
    torch.set_num_threads(1)
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise SystemExit(f"no .npz in {directory}")
    print(
        f"{'file':32} {'torch':>8} {'ours':>8} {'worst':>8}  {'parameter':10} flips "
        f"{'without':>8} {'spread':>8}"
    )
    failed = False
    for path in paths:
        recording = load(path)
        row = measure(recording)
        failed |= row.failed
        spread = "-" if row.spread is None else f"{row.spread:.1e}"
        print(
            f"{path.stem:32} {row.reference:8.1e} {row.error:8.1e} {row.worst:8.1e}  "
            f"{row.parameter:10} {row.flips:5} {row.unflipped:8.1e} {spread:>8}"
            f"{'  FAIL' if row.failed else ''}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m parity.goldens DIRECTORY")
    raise SystemExit(main(sys.argv[1]))
