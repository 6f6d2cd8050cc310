"""`python -m parity.goldens DIRECTORY` replays .npz recordings of public optimizers.

Errors, relative to the distance travelled: of the reference; ours; and the bar of ours,
in bfloat16 the error of the compiled reference, since recordings are eager.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import jax_muon as jm
from parity import compare, problems, references


def passes(path: Path) -> bool:
    """Print the line of a recording, and judge it; NaN does not pass."""
    data = np.load(path)
    meta = json.loads(str(data["meta"]))
    t, joint = np.arange(meta["steps"]), meta.get("teon_groups", [])
    start, end, *grads = (
        {key.partition("/")[2]: data[key] for key in data.files if key.startswith(x)}
        for x in ("param0/", f"param{len(t)}/", *(f"grad{n}/" for n in t))
    )
    rest, steps = meta.get("adamw", []), {"ns_steps": meta["ns_steps"]}
    if joint:
        recipe, joins = problems.RECIPES["teon"], {"q{i}": 2, "k{i}": 2}
        rates = {name: meta[name] for name in recipe.rates} | {"adamw_lr": 0.0}
        slower = steps | {"polar": references.compiled(references.paper_polar_express)}
    else:
        version = {1.02: "January", 1.01: "July"}[meta["polar_norm_factor"]]
        recipe, joins = problems.RECIPES[f"nanochat, {version}"], None
        rate = np.minimum(1.0, (t + 1) / 3) * np.where(t < 8, 1.0, 0.5)
        rates = {"lr": meta["muon_lr"] * rate, "adamw_lr": meta["adam_lr"] * rate}
        rates |= {"momentum": 0.85 + 0.1 * np.minimum(t / 6, 1), "beta2": meta["beta2"]}
        rates["weight_decay"] = meta["weight_decay"] * (1 - t / 20)
        slower = steps | {"make": references.CompiledNanochat}
    half = meta["orthogonalize_dtype"] == "bf16"
    dtype, limit = ("bfloat16", 1e-5) if half else ("float32", 1e-6)
    adamw = problems.ADAMW | {"weight_decay": meta.get("adam_weight_decay", 0.0)}
    given = start, grads, rates, getattr(torch, dtype), meta["muon"], joint, rest, adamw
    ends = [problems.trajectory(recipe, *given, **x)[-1] for x in (steps, slower)]
    first, last, *kernels = (problems.to_jax(x, rest) for x in (start, end, *grads))
    rules = dict.fromkeys(first, "muon") | dict.fromkeys(rest, "adamw")
    read = jm.find_matrices(first, rules=rules, joins=joins)
    tx = recipe.ours(rates, dtype, adamw, matrices=read, ns_steps=meta["ns_steps"])
    ours = compare.distance(compare.stepper(tx)(first, kernels)[-1], last, first)
    theirs, compiled = (compare.distance(x, end, start) for x in ends)
    bar = compiled if half else compare.BARS["float32"]
    passed = theirs <= limit and ours <= bar
    print(f"{path.stem:32} {theirs:8.1e} {ours:8.1e} {bar:8.1e} {passed}", flush=True)
    return passed


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [passes(path) for path in sorted(Path(sys.argv[1]).glob("*.npz"))]
    raise SystemExit(not (results and all(results)))
