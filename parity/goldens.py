"""Replay recorded trajectories of the public optimizers, by the references and by us.

    python -m parity.goldens DIRECTORY

Each .npz holds `param{t}/{name}` before step t, `grad{t}/{name}`, and `meta`, a JSON
string with the settings. Printed, relative to the distance travelled after all steps:
the error of the PyTorch reference; ours; our worst parameter. For bfloat16
files, also how far the compiled reference is from the recording, which is eager: ours
may be as far from it.

The exit status is 1 if the reference is above 1e-6 in float32 or 1e-5 in bfloat16, and
if we are above 2e-5 in float32 or above the spread in bfloat16. The recordings are not
part of this project.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity import compare, problems
from parity.problems import Arrays
from parity.references import (
    AUGUST,
    JANUARY,
    CompiledNanochat,
    Named,
    Nanochat,
    Teon,
    compiled,
    paper_polar_express,
    replay,
)

LIMITS = {"float32": 1e-6, "bfloat16": 1e-5}  # of the reference
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass
class Recording:
    """One file: parameters before, gradients at, and parameters after every step."""

    meta: dict
    start: Named
    grads: list[Named]
    after: list[Named]

    @property
    def dtype(self) -> str:
        """Dtype of the polar iteration."""
        return DTYPES[self.meta["orthogonalize_dtype"]]

    @property
    def joint(self) -> list[list[str]] | None:
        """The names that TEON takes together; None in a recording of nanochat."""
        return self.meta.get("teon_groups")


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


# ---- The settings of a file, for the reference and for us


def rates(meta: dict) -> dict[str, np.ndarray]:
    """nanochat's rates at every step: the schedule is what `meta["schedule"]` says."""
    t = np.arange(meta["steps"])
    multiplier = np.minimum(1.0, (t + 1) / 3) * np.where(t < 8, 1.0, 0.5)
    return {
        "lr": meta["muon_lr"] * multiplier,
        "momentum": 0.85 + 0.1 * np.minimum(t / 6, 1.0),
        "weight_decay": meta["weight_decay"] * (1 - t / 20),
        "adamw_lr": meta["adam_lr"] * multiplier,
    }


def edition(meta: dict) -> dict:
    """Which of nanochat's two versions was recorded."""
    versions = {v["norm_factor"]: v for v in (JANUARY, AUGUST)}
    return versions[meta["polar_norm_factor"]]


def reference(recording: Recording, *, through_compiler: bool = False) -> Named:
    """Where the reference ends, also through torch.compile."""
    meta, dtype = recording.meta, getattr(torch, recording.dtype)
    if recording.joint is not None:
        keys = ("lr", "momentum", "weight_decay", "ns_steps")
        muon = {"make": Teon, "dtype": dtype} | {key: meta[key] for key in keys}
        if through_compiler:
            muon["polar"] = compiled(paper_polar_express)
        groups = [{"params": names, "joint": True, **muon} for names in recording.joint]
        groups.append({"params": meta["muon"], **muon})
        changes = None
    else:
        muon = {"beta2": meta["beta2"], "ns_steps": meta["ns_steps"], "dtype": dtype}
        muon |= {"make": CompiledNanochat if through_compiler else Nanochat}
        adamw = {"betas": meta["adam_betas"], "eps": meta["adam_eps"]}
        adamw |= {"make": torch.optim.AdamW, "weight_decay": meta["adam_weight_decay"]}
        groups = [
            {"params": meta["muon"], **muon, **edition(meta)},
            {"params": meta["adamw"], **adamw},
        ]
        table = {name: rate.tolist() for name, rate in rates(meta).items()}
        adamw_lr = table.pop("adamw_lr")
        changes = [
            [{name: rate[t] for name, rate in table.items()}, {"lr": adamw_lr[t]}]
            for t in range(meta["steps"])
        ]
    groups = [group for group in groups if group["params"]]
    return replay(recording.start, groups, recording.grads, changes)[-1]


def our_transform(recording: Recording) -> optax.GradientTransformation:
    """Our recipe with the settings of the file."""
    meta = recording.meta
    common: dict[str, Any] = {"steps": meta["ns_steps"], "dtype": recording.dtype}
    if recording.joint is not None:
        joined = [name for group in recording.joint for name in group]
        joins = {name.rstrip("0123456789") + "{i}": 2 for name in joined}
        read = functools.partial(jm.read, rules="muon", joins=joins)
        given = meta["lr"], meta["momentum"], meta["weight_decay"]
        return jm.teon(*given, matrices=read, **common)
    rules = {path: label for label in ("muon", "adamw") for path in meta[label]}
    table = problems.jax_rates(rates(meta), "float32")
    adamw = optax.adamw(
        table["adamw_lr"],
        *meta["adam_betas"],
        meta["adam_eps"],
        weight_decay=meta["adam_weight_decay"],
    )
    return jm.nanochat(
        table["lr"],
        table["momentum"],
        table["weight_decay"],
        beta2=meta["beta2"],
        edition="2026-08" if edition(meta) is AUGUST else "2026-01",
        adamw=adamw,
        matrices=functools.partial(jm.read, rules=rules),
        **common,
    )


def ours(recording: Recording) -> Arrays:
    """Where our recipe ends."""
    matrices = {*recording.meta["muon"], *(n for g in recording.joint or [] for n in g)}

    def cross(arrays: dict) -> dict:
        """Both ways: matrices are the transpose of each other."""
        return {k: x.T if k in matrices else x for k, x in arrays.items()}

    def given(named: Named) -> dict:
        return cross({name: jnp.asarray(x.numpy()) for name, x in named.items()})

    run = compare.stepper(our_transform(recording))
    after = run(given(recording.start), [given(grad) for grad in recording.grads])
    return cross({name: np.asarray(p) for name, p in after[-1].items()})


# ---- The table


def row(name: str, recording: Recording) -> tuple[str, bool]:
    """A line of the table, and whether it passes; nan does not."""
    end, start, dtype = recording.after[-1], recording.start, recording.dtype
    mine = ours(recording)
    theirs = compare.distance(reference(recording), end, start)
    total = compare.distance(mine, end, start)
    by_name = {n: compare.distance(mine, {n: p}, start) for n, p in end.items()}
    worst = max(by_name, key=by_name.__getitem__)
    bar, spread = compare.BARS["float32"], "-"
    if dtype == "bfloat16":
        compiled_end = reference(recording, through_compiler=True)
        bar = compare.distance(compiled_end, end, start)
        spread = f"{bar:.1e}"
    passed = total <= bar and theirs <= LIMITS[dtype]
    text = f"{name:32} {theirs:8.1e} {total:8.1e} {spread:>8} {by_name[worst]:8.1e} "
    return text + worst + ("" if passed else "  FAIL"), passed


def main(directory: str) -> int:
    """Print the table for every .npz in the directory; 1 if a bar is passed."""
    torch.set_num_threads(1)
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise SystemExit(f"no .npz in {directory}")
    print(f"{'file':32} {'torch':>8} {'ours':>8} {'spread':>8} {'worst':>8}")
    passed = True
    for path in paths:
        line, right = row(path.stem, load(path))
        print(line, flush=True)
        passed &= right
    return int(not passed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m parity.goldens DIRECTORY")
    raise SystemExit(main(sys.argv[1]))
