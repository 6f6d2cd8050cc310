"""Runs the whole suite, prints its tables, and writes the report with its pictures.

    python -m parity.run                  report.md, error.png, loss.png in parity/
    python -m parity.run --out FOLDER     somewhere else

Exit status 1 if a comparison is above its bar and not explained. What torch.compile and
PyTorch's training need runs in a second process, beside JAX in this one.
"""

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from pathlib import Path

import torch

from parity import (
    compare,
    gpt,
    pictures,
    pieces,
    problems,
    report,
    spread,
    third_parties,
)
from parity.compare import Check
from parity.report import Results

TRAINING = ("nanochat, January", "nanochat, August", "muon", "moonlight", "normuon")


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; see the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(argv)
    began = time.monotonic()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")  # JAX's threads do not survive fork
    with concurrent.futures.ProcessPoolExecutor(
        1, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as other:
        compiled = other.submit(spread.compiled_ends)
        compiled_muon = other.submit(third_parties.compiled_end)
        losses = {name: other.submit(gpt.reference_losses, name) for name in TRAINING}
        results = Results()
        for section in (run_pieces, run_trajectories, run_constant):
            section(results)
            note(f"{section.__name__}: done", began)
        flax = {name: gpt.train_flax(problems.RECIPES[name]) for name in TRAINING}
        note("training in Flax: done", began)
        run_third_parties(results, compiled_muon.result())
        note("third parties: done", began)
        run_spread(results, compiled.result())
        run_training(results, flax, {k: f.result() for k, f in losses.items()})
    results.seconds = time.monotonic() - began

    options.out.mkdir(parents=True, exist_ok=True)
    pictures.errors(results, options.out / "error.png")
    pictures.losses(results, options.out / "loss.png")
    text = report.render(results)
    (options.out / "report.md").write_text(text)
    print(text)
    return int(any(check.state == "FAIL" for check in results.checks))


def note(text: str, began: float) -> None:
    """Progress, apart from the tables."""
    print(f"[{time.monotonic() - began:3.0f} s] {text}", file=sys.stderr, flush=True)


def run_pieces(results: Results) -> None:
    """Every piece alone."""
    for piece in pieces.PIECES:
        for dtype in compare.BARS:
            ours = pieces.runner(piece, dtype)
            by_kind = {k: pieces.error(piece, k, dtype, ours) for k in piece.inputs}
            kind = max(by_kind, key=lambda k: by_kind[k][0])
            error, name = by_kind[kind]
            bar, why = compare.BARS[dtype], ""
            if error > bar and dtype == "float32":
                why = pieces.rounding(piece, kind, ours)
            case = f"{piece.name}, {kind}, {dtype}, {name}"
            results.checks.append(Check("pieces", case, error, bar, why))
            results.pieces[piece.name, dtype] = (results.checks[-1], kind)


def run_trajectories(results: Results) -> None:
    """Every recipe, dtype and kind of gradient, with moving rates."""
    for recipe in problems.RECIPES.values():
        for dtype in compare.BARS:
            rates = problems.MOVING
            run = compare.runner(
                recipe.ours(problems.jax_rates(rates, dtype), dtype), dtype
            )
            for kind in problems.GRADIENTS:
                steps = problems.STEPS if kind in problems.LONG else 10
                grads = problems.gradients(kind, steps)
                ours = run(grads)
                check, found = compare.check(
                    recipe, kind, dtype, ours[:10], grads[:10], rates
                )
                results.checks.append(check)
                results.trajectories[recipe.name, kind, dtype] = (check, found)
                if kind in problems.LONG:
                    results.curves[recipe.name, kind, dtype] = curve(
                        recipe, ours, grads, rates, dtype
                    )


def curve(recipe, ours, grads, rates, dtype) -> list[float]:
    """The largest error over all shapes after every step."""
    theirs = problems.reference_run(recipe, grads, rates, getattr(torch, dtype))
    start = problems.weights()
    return [
        max(
            compare.difference(a[name], b[name], start[name]).error
            for name in problems.SHAPES
        )
        for a, b in zip(ours, theirs, strict=True)
    ]


def run_constant(results: Results) -> None:
    """Every recipe in float32 with rates that are floats."""
    for recipe in problems.RECIPES.values():
        grads = problems.gradients("gaussian", 10)
        ours = compare.runner(recipe.ours(problems.CONSTANT, "float32"), "float32")
        check, _ = compare.check(
            recipe, "gaussian", "float32", ours(grads), grads, problems.CONSTANT
        )
        results.checks.append(check)
        results.constant[recipe.name] = check.error


def run_third_parties(results: Results, compiled_end: dict) -> None:
    """Other people's packages."""
    for package in third_parties.packages():
        found = third_parties.compare(package, compiled_end)
        results.third_parties.append(found)
        if package.same_mathematics:
            low = package.dtype == "bfloat16"
            bar = found.spread if low else compare.BARS[package.dtype]
            results.checks.append(Check("third parties", package.name, found.ours, bar))


def run_spread(results: Results, compiled: dict) -> None:
    """bfloat16."""
    for name in spread.RECIPES:
        found = spread.measure(name, compiled[name])
        results.spreads.append(found)
        bar = max(found.variants.values())
        results.checks.append(Check("bfloat16", name, found.ours, bar))


def run_training(results: Results, flax: dict, losses: dict) -> None:
    """The GPT on both sides."""
    for name in TRAINING:
        plain, transposed = losses[name]
        found = gpt.Training(name, flax[name], plain, transposed)
        results.trainings.append(found)
        results.checks.append(Check("training", name, found.apart, gpt.BAR))


if __name__ == "__main__":
    raise SystemExit(main())
