"""Singular values of the momentum in a GPT's training, and what to make of them.

    python -m benchmarks.spectra --steps 300 --json benchmarks/results

trains the model of `examples/train_gpt.py` with `jax_muon.nanochat` and takes, at a few
steps, what `orthogonalize` gets, matrix by matrix. On it run the quintics of several
normalizations, numbers of steps and lower bounds, in float64. The error is the distance
to the polar factor, ||Y - U V^T||_F / ||U V^T||_F: where normalization is by a number,
the root mean square of (singular value - 1), and scalars are enough. That says which
lower bound to use with `norm="schatten4"` and one step less.

"aol" divides every row of X (m, n), m <= n, by the root of the sum of |X X^T| over that
row (Turbo-Muon, arXiv 2512.04632). Singular values then are at most 1 and nearer to it,
but they are those of another matrix, with another polar factor. "spectral" divides by
the largest singular value: what no division by a number can do better than.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax

import jax_muon as jm
from benchmarks import machine
from jax_muon.polar.coefficients import evaluate

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LOWERS = (1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05)
NORM_FACTOR = 1.02
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

# norm, steps, lower bound: what nanochat does, and what might replace it.
DEFAULT = ("frobenius", 5, 1e-3)
CANDIDATES = [DEFAULT] + [
    (norm, steps, lower)
    for norm in ("frobenius", "schatten4", "aol", "spectral")
    for steps in (4, 3)
    for lower in LOWERS
]


def after(s: np.ndarray, norm: str, steps: int, lower: float) -> np.ndarray:
    """Singular values after the Polar Express, in exact arithmetic."""
    power = {"frobenius": 2, "schatten4": 4, "spectral": np.inf}[norm]
    x = s / (NORM_FACTOR * np.linalg.norm(s, power))
    return evaluate(jm.polar_express_coefficients(steps, lower=lower), x)


def after_aol(x: np.ndarray, steps: int, lower: float) -> np.ndarray:
    """X (m, n), m <= n, with its rows normalized, after the Polar Express."""
    x = x / (NORM_FACTOR * np.sqrt(np.sum(np.abs(x @ x.T), axis=1, keepdims=True)))
    for a, b, c in jm.polar_express_coefficients(steps, lower=lower):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def error(record: dict[str, Any], candidate: tuple[str, int, float]) -> float:
    """The distance to the polar factor."""
    norm, steps, lower = candidate
    if norm == "aol":
        factor = record["polar_factor"]
        distance = after_aol(record["matrix"], steps, lower) - factor
        return float(np.linalg.norm(distance) / np.linalg.norm(factor))
    s = after(record["singular_values"], norm, steps, lower)
    return float(np.sqrt(np.mean((s - 1) ** 2)))


def record(steps: int, at: list[int], width: int, seed: int) -> list[dict[str, Any]]:
    """Train, and decompose the momentum at some steps."""
    sys.path.insert(0, str(EXAMPLES))
    from flax import nnx
    from gpt import GPT
    from optimizers import best_rates, make_optimizer
    from text import read_text

    text = read_text(None, 128)
    model = GPT(len(text.vocabulary), width, 4, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    tx = make_optimizer("nanochat", steps, **best_rates("nanochat"))
    labels = [found.label for found in jm.read(params).values()]
    momentum = jm.nesterov(0.95)

    @jax.jit
    def step(params: Any, state: Any, windows: Any) -> Any:
        state, seen = state
        grads = jax.grad(lambda p: nnx.merge(graph, p).loss(windows))(params)
        updates, state = tx.update(grads, state, params)
        matrices, seen = momentum.update(grads, seen)
        return optax.apply_updates(params, updates), (state, seen), matrices

    state = jax.jit(lambda p: (tx.init(p), momentum.init(p)))(params)
    records = []
    for count in range(1, steps + 1):
        windows = text.batch(seed, count, 16, 128)
        params, state, matrices = step(params, state, windows)
        if count not in at:
            continue
        leaves = jax.tree_util.tree_leaves_with_path(matrices)
        for (path, leaf), label in zip(leaves, labels, strict=True):
            if label == "muon":
                x = np.asarray(leaf, np.float64)
                x = x if x.shape[0] <= x.shape[1] else x.T
                u, s, vt = np.linalg.svd(x, full_matrices=False)
                if s.max() == 0:  # behind a projection that starts from zero
                    continue
                records.append(
                    {
                        "step": count,
                        "parameter": jax.tree_util.keystr(path),
                        "shape": list(leaf.shape),
                        "singular_values": s,
                        "matrix": x,
                        "polar_factor": u @ vt,
                    }
                )
        print(f"step {count}: {len(records)} spectra", flush=True)
    return records


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Each spectrum by quantiles and errors, and every candidate over all of them."""
    errors = {
        candidate: [error(r, candidate) for r in records] for candidate in CANDIDATES
    }
    candidates = [
        {
            "norm": norm,
            "steps": steps,
            "lower": lower,
            "mean": float(np.mean(errors[norm, steps, lower])),
            "worst": float(np.max(errors[norm, steps, lower])),
        }
        for norm, steps, lower in CANDIDATES
    ]
    chosen = min(
        (c for c in candidates if (c["norm"], c["steps"]) == ("schatten4", 4)),
        key=lambda c: c["mean"],
    )
    key = (chosen["norm"], chosen["steps"], chosen["lower"])
    spectra = []
    for index, r in enumerate(records):
        s = np.sort(r["singular_values"])
        spectra.append(
            {
                "step": r["step"],
                "parameter": r["parameter"],
                "shape": r["shape"],
                "of_the_largest": [
                    float(f"{q:.3g}") for q in np.quantile(s / s[-1], QUANTILES)
                ],
                "frobenius_5": round(errors[DEFAULT][index], 4),
                "chosen": round(errors[key][index], 4),
            }
        )
    return {
        "quantiles": QUANTILES,
        "candidates": candidates,
        "chosen": chosen,
        "better_with_chosen": float(
            np.mean(np.array(errors[key]) <= np.array(errors[DEFAULT]))
        ),
        "spectra": spectra,
    }


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spectra",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--at", type=int, nargs="+", default=[2, 10, 50, 150, 300])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=pathlib.Path, help="folder to save the result in"
    )
    args = parser.parse_args(words)
    records = record(args.steps, args.at, args.width, args.seed)
    result = machine.describe("benchmarks.spectra", words) | summarize(records)
    print(f"{'norm':10} steps  lower   mean error   worst")
    for c in sorted(result["candidates"], key=lambda c: (-c["steps"], c["mean"])):
        print(
            f"{c['norm']:10} {c['steps']:5}  {c['lower']:.3f}   {c['mean']:10.4f}"
            f"   {c['worst']:.4f}"
        )
    print("chosen:", result["chosen"], "better on", result["better_with_chosen"])
    if args.json is not None:
        path = args.json / f"spectra_gpt_{args.width}.json"
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
