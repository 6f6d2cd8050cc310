"""`python -m parity.run` runs the whole suite, prints its tables, and writes report.md.

`python -m parity.run teon muonh` prints the trajectories of these recipes alone, in
about a minute. Exit status 1 if a comparison is above its bar and not explained.
torch.compile runs in a second process, beside JAX in this one.
"""

import concurrent.futures
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from parity import compare, problems, third_parties
from parity.compare import BARS, Check

VERSIONS = ("jax", "optax", "numpy", "torch")


def main(names: Sequence[str] = ()) -> int:
    """Run, print, write; see the file."""
    began = time.monotonic()
    torch.set_num_threads(1)
    if unknown := {*names} - {*problems.RECIPES}:
        raise SystemExit(f"{sorted(unknown)}; expected some of {[*problems.RECIPES]}")
    context = multiprocessing.get_context("spawn")  # JAX's threads do not survive fork
    checks: list[Check] = []
    if names:
        print(trajectories(checks, names), explained(checks), sep="\n\n")
        return failed(checks)
    sections = []
    pool = concurrent.futures.ProcessPoolExecutor
    with pool(1, context, torch.set_num_threads, (1,)) as other:
        compiled = other.submit(compare.compiled_ends)
        for make in (
            lambda checks: trajectories(checks, problems.RECIPES),
            lambda checks: bfloat16(checks, compiled.result()),
            lambda checks: packages(checks, compiled.result()["muon"]),
        ):
            sections.append(make(checks))
            title = sections[-1].partition("\n")[0]
            seconds = time.monotonic() - began
            print(f"[{seconds:3.0f} s] {title}: done", file=sys.stderr, flush=True)
    found = [head(checks, time.monotonic() - began), explained(checks), *sections]
    text = "\n\n".join([*found, LIMITS]) + "\n"
    Path(__file__).with_name("report.md").write_text(text)
    print(text)
    return failed(checks)


def failed(checks: list[Check]) -> int:
    """The exit status."""
    return int(any(check.state == "FAIL" for check in checks))


# ---- Words


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose columns line up in plain text, too."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def line(row: list[str]) -> str:
        padded = [c.rjust(w) for c, w in zip(row, widths, strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def number(x: float) -> str:
    """Two digits."""
    return "0" if x == 0 else f"{x:.1e}"


def marked(check: Check) -> str:
    """The error, with a star if it is explained, FAIL if not."""
    marks = {"within": "", "explained": " *", "FAIL": " FAIL"}
    return number(check.error) + marks[check.state]


def head(checks: list[Check], seconds: float) -> str:
    """Versions, the verdict, and how errors are measured."""
    states = [check.state for check in checks]
    today = datetime.datetime.now(datetime.UTC).date()
    versions = ", ".join(f"{v} {importlib.metadata.version(v)}" for v in VERSIONS)
    return f"""# jax_muon beside PyTorch

`make parity`, {today}, {seconds:.0f} s on {os.cpu_count()} cores
({platform.machine()}); Python {platform.python_version()}, {versions}.

**{len(states)} comparisons: {states.count("within")} within their bar, \
{states.count("explained")} above it and explained, {states.count("FAIL")} failed.**

The PyTorch references in `parity/references.py` are written from the papers' equations.
They reproduce recorded trajectories of the public optimizers to 1e-6 in float32, and so
do the recipes here to 2e-5 (`python -m parity.goldens DIRECTORY`); the recordings are
not part of this project. The recipes are compared with NumPy, too, in
`tests/test_recipes.py`.

Errors are `||W - ref|| / ||ref - W_0||`: relative to the distance that the reference
travelled since the start, for each parameter alone; tables show the largest over
all shapes. Bars: float64 {BARS["float64"]:g}, float32 {BARS["float32"]:g} after 10
steps. A star marks a number above its bar that is explained. Which recipes meet which
shapes, gradients and rates, and how that covers the product of them all, is said in
`parity/problems.py`."""


def explained(checks: list[Check]) -> str:
    """The comparisons above their bar, and why."""

    def lines(state: str) -> str:
        return "\n".join(
            f"- {check.section}: {check.case}: **{check.error:.1e}**, bar "
            f"{check.bar:.1e}{': ' if check.why else ''}{check.why}."
            for check in checks
            if check.state == state
        )

    return f"""## What is above its bar, and why

{lines("FAIL") or "Nothing failed."}

{lines("explained") or "Nothing had to be explained."}

The polar iteration raises small singular values by a factor of up to 8.16 x 4.04 x 3.89
x 3.29 x 2.35 = 990, and rounding errors with them: of a gradient of exactly low rank,
float32 sees a null space of 6e-8 that comes out as 6e-5. At the other end, a matrix of
one row or column has the singular value 1 / 1.02 at the start, where the slope of the
five quintics together is -175. In float64 the same cases are within the bar."""


# ---- Sections: each runs its comparisons, adds its checks, and returns its text


def trajectories(checks: list[Check], names: Iterable[str]) -> str:
    """Every dtype and kind of gradient."""
    tables = []
    for dtype in BARS:
        rows = []
        for recipe in (problems.RECIPES[name] for name in names):
            cases = [(kind, problems.MOVING) for kind in problems.GRADIENTS]
            if dtype == "float32":
                cases.append(("gaussian", problems.CONSTANT))
            for kind, rates in cases:
                grads = problems.gradients(kind, 10)
                ours = compare.runner(recipe.ours(rates, dtype), dtype)(grads)
                found = compare.check(recipe, kind, dtype, ours, grads, rates)
                checks.append(found)
            cells = [marked(check) for check in checks[-len(cases) :]]
            rows.append([recipe.name, *cells, *["-"] * (dtype == "float64")])
        header = [dtype, *problems.GRADIENTS, "constant rates"]
        tables.append(table([name.replace("_", " ") for name in header], rows))
    return f"""## Whole optimizers, 10 steps

Learning rate, momentum, decay and beta2 change at every step. Largest error over all
{len(problems.SHAPES)} parameters; columns are kinds of gradients, and Gaussian ones
with rates that are floats. XLA flushes subnormal numbers to zero, so PyTorch does here,
too.

{tables[0]}

{tables[1]}"""


def bfloat16(checks: list[Check], compiled: dict) -> str:
    """Our distance from the reference, beside the reference's own spread."""
    rows = []
    for name in compare.SPREAD:
        found = compare.spread(name, compiled[name])
        bar = max(found.variants.values())
        checks.append(Check("bfloat16", name, found.ours, bar))
        exact = found.ours_exact, found.reference_exact
        numbers = map(number, (*found.variants.values(), *exact))
        rows.append([name, marked(checks[-1]), *numbers])
    header = ["recipe", "ours", *found.variants, "ours, exact", "PyTorch, exact"]
    return f"""## bfloat16, beside PyTorch's own spread

Distance from the eager reference after 10 steps on {len(compare.NAMES)} matrices:
of ours, and of the reference itself where only its rounding changes (quintic steps as
fused multiply-adds, as torch.optim.Muon has them; through torch.compile). The bar is
the larger of these. The last two columns are the distance from the reference in
float64: ours rounds a sum once, and stays closer. Eager nanochat also rounds its rates
to bfloat16, so no port with rates in float32 can be equal to the last bit.

{table(header, rows)}"""


def packages(checks: list[Check], compiled_end: dict) -> str:
    """Other people's packages."""
    rows = []
    for package in third_parties.packages():
        ours, reference, spread = third_parties.compare(package, compiled_end)
        low, text = package.dtype == "bfloat16", number(ours)
        if package.same_mathematics:
            bar = spread if low else BARS[package.dtype]
            checks.append(Check("third parties", package.name, ours, bar))
            text = marked(checks[-1])
        numbers = text, number(reference), number(spread) if low else "-"
        rows.append([package.name, package.dtype, *numbers, package.remark])
    header = ["package", "dtype", "ours", "reference", "spread", "remark"]
    return f"""## Other people's packages

Distance from the package, {compare.STEPS} steps on {len(compare.NAMES)} matrices:
of ours; of the reference, which rounds in the order of the package; and, as the bar in
bfloat16, of the reference rounding otherwise. Where the reference is at 1e-3 instead of
1e-7, a few roundings in one matrix fall otherwise.

{table(header, rows)}

`optax.contrib.muon` corrects the bias of Nesterov's look-ahead as Dozat does for Adam:
it adds `b M / (1 - b^(t+2))` and `(1 - b) G / (1 - b^(t+1))`, t = 0 first, where
Jordan, nanochat and torch.optim.Muon add `b M` and `(1 - b) G`. A factor of both would
vanish in the polar factor; but the two differ at first, and become equal with time. The
first optax row has the size of that. In the row below it ours has the same correction;
without Nesterov the two agree as they are.

Not used: timm 1.0.31, which needs a torchvision for CUDA; dion, which is not on the
registry; heavyball 3.2.1, which in float32 and below rounds at random.
`make test-outside` compares emerging-optimizers."""


LIMITS = """## What this does not show

- Sharded and ZeRO-2 runs: `tests` compares those with one device.
- GPUs: everything here ran on a CPU."""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
