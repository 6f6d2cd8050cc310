"""What a run found, as text in Markdown."""

import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterable

from parity import compare, gpt, pieces, problems, third_parties
from parity.compare import Check, Difference
from parity.gpt import Training
from parity.spread import Spread
from parity.third_parties import Result

VERSIONS = ("jax", "optax", "flax", "numpy", "torch")


@dataclasses.dataclass
class Results:
    """Everything that a run measures; keys are (recipe, kind of gradient, dtype)."""

    checks: list[Check] = dataclasses.field(default_factory=list)
    # (piece, dtype) -> the largest error, and the kind of gradient that has it
    pieces: dict[tuple[str, str], tuple[Check, str]] = dataclasses.field(
        default_factory=dict
    )
    trajectories: dict[tuple[str, str, str], tuple[Check, dict[str, Difference]]] = (
        dataclasses.field(default_factory=dict)
    )
    curves: dict[tuple[str, str, str], list[float]] = dataclasses.field(
        default_factory=dict
    )
    constant: dict[str, float] = dataclasses.field(default_factory=dict)
    third_parties: list[Result] = dataclasses.field(default_factory=list)
    spreads: list[Spread] = dataclasses.field(default_factory=list)
    trainings: list[Training] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def render(results: Results) -> str:
    """The whole report."""
    sections = (
        _head,
        _pieces,
        _trajectories,
        _shapes,
        _steps,
        _explained,
        _bfloat16,
        _third_parties,
        _training,
        _limits,
    )
    return "\n\n".join(section(results) for section in sections) + "\n"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose columns line up in plain text, too."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def line(row: list[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = [
        "-" * width if i == 0 else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def number(x: float | None) -> str:
    """Two digits, or a dash for what there is none of."""
    if x is None:
        return "-"
    return "0" if x == 0 else f"{x:.1e}"


def marked(check: Check) -> str:
    """A number with a star where it is explained below, FAIL where it is not."""
    return (
        number(check.error)
        + {"within": "", "explained": " *", "FAIL": " FAIL"}[check.state]
    )


def _head(results: Results) -> str:
    states = [check.state for check in results.checks]
    today = datetime.datetime.now(datetime.UTC).date()
    versions = ", ".join(f"{v} {importlib.metadata.version(v)}" for v in VERSIONS)
    return f"""# jax_muon beside PyTorch

`make parity`, {today}, {results.seconds:.0f} s on {os.cpu_count()} cores
({platform.machine()}); Python {platform.python_version()},
{versions}.

**{len(states)} comparisons: {states.count("within")} within their bar, \
{states.count("explained")} above it and explained, {states.count("FAIL")} failed.**

The PyTorch references in `parity/reference` are written from the papers' equations.
They reproduce recorded trajectories of the public optimizers to 1e-6 in float32
(`python -m parity.reference.goldens DIRECTORY`), and so do the recipes here to 2e-5
(`python -m parity.goldens DIRECTORY`); the recordings are not part of this project.

Errors are `||W - ref|| / ||ref - W_0||`: relative to the distance that the reference
travelled since the start, for each parameter by itself; tables show the largest over
all shapes. Bars: float64 {compare.BARS["float64"]:g}, float32
{compare.BARS["float32"]:g} after 10 steps. A star marks a number above its bar that is
explained below. Which recipes meet which shapes, gradients and rates, and how that
covers the product of them all, is said in `parity/problems.py`."""


def _pieces(results: Results) -> str:
    rows = []
    for piece in pieces.PIECES:
        found = [results.pieces[piece.name, dtype] for dtype in compare.BARS]
        numbers = [marked(check) for check, _ in found]
        rows.append([f"`{piece.name}`", *numbers, found[-1][1].replace("_", " ")])
    return f"""## Each piece alone

Largest error of the output over {len(pieces.MATRICES)} shapes and all gradients that
suit the piece, relative to the size of the output, at the third of three updates; and
the gradients that float32 has it with.

{table(["piece", "float64", "float32", "with"], rows)}"""


def _trajectories(results: Results) -> str:
    def of(dtype: str) -> str:
        return table(
            [dtype, *(kind.replace("_", " ") for kind in problems.GRADIENTS)],
            [
                [
                    name,
                    *(
                        marked(results.trajectories[name, kind, dtype][0])
                        for kind in problems.GRADIENTS
                    ),
                ]
                for name in problems.RECIPES
            ],
        )

    return f"""## Whole optimizers, 10 steps

Learning rate, momentum, decay and beta2 change at every step. Largest error over all
{len(problems.SHAPES)} parameters; columns are kinds of gradients.

{of("float64")}

{of("float32")}"""


def _shapes(results: Results) -> str:
    names = list(problems.SHAPES)

    def row(label: str, measure: str, dtype: str = "float32"):
        def largest(name: str) -> float:
            return max(
                getattr(
                    results.trajectories[recipe, "gaussian", dtype][1][name], measure
                )
                for recipe in problems.RECIPES
            )

        return label, largest

    columns = [
        row("error, float64", "error", "float64"),
        row("error, float32", "error"),
        row("worst element", "worst"),
        row("1 - cosine", "turned"),
    ]
    rows = [
        [
            name.removesuffix(".weight"),
            " x ".join(map(str, problems.SHAPES[name])),
            *(number(largest(name)) for _, largest in columns),
        ]
        for name in names
    ]
    return f"""## Shape by shape

Gaussian gradients, 10 steps, the largest over all recipes; shapes are PyTorch's
(out, in). The worst element is relative to the root mean square of the distance, the
cosine that of the two updates W - W_0; both in float32. `embed` and `norm.bias` are
AdamW's, compared with torch.optim.AdamW. Members of a pool are stacked by
`orthogonalize`, the last of them transposed.

{table(["parameter", "shape", *(label for label, _ in columns)], rows)}"""


def _steps(results: Results) -> str:
    def row(name: str):
        cells = []
        for dtype in compare.BARS:
            for kind in problems.LONG:
                curve = results.curves[name, kind, dtype]
                cells += [number(curve[step - 1]) for step in (1, 10, 200)]
        return [name, *cells, number(results.constant[name])]

    header = [
        f"{short} {step}"
        for short in ("f64 gauss", "f64 low", "f32 gauss", "f32 low")
        for step in (1, 10, 200)
    ]
    return f"""## 1, 10 and 200 steps

The same runs go on; the last column has constant rates, given as floats (float32,
Gaussian, 10 steps). After one step the distance is so short that the rounding of the
weights themselves counts, which is why bars are set at step 10. An entry that flips in
a cautious mask stays where it went: that makes the jumps of the nanochat recipes.

{table(["recipe", *header, "constant"], map(row, problems.RECIPES))}

![error against step](error.png)"""


def _explained(results: Results) -> str:
    def lines(state: str) -> str:
        return "\n".join(
            f"- {check.section}: {check.case}: **{check.error:.1e}**, bar "
            f"{check.bar:.1e}{': ' if check.why else ''}{check.why}."
            for check in results.checks
            if check.state == state
        )

    flips = [
        [recipe, kind.replace("_", " "), str(sum(d.flips for d in found.values()))]
        for (recipe, kind, dtype), (_, found) in results.trajectories.items()
        if dtype == "float32" and any(d.flips for d in found.values())
    ]
    return f"""## What is above its bar, and why

{lines("FAIL") or "Nothing failed."}

{lines("explained") or "Nothing had to be explained."}

The polar iteration raises small singular values by a factor of up to 8.16 x 4.04 x 3.89
x 3.29 x 2.35 = 990, and rounding errors with them: of a gradient of exactly low rank,
float32 sees a null space of 6e-8 that comes out as 6e-5. At the other end, a matrix of
one row or column has the singular value 1 / 1.02 at the start, where the slope of the
five quintics together is -175. In float64 the same cases are within the bar.

In "tiny", January, mean squares of 1e-42 are subnormal numbers in float32. PyTorch
keeps them; XLA takes them for zero, so the update is zero, and the cautious mask
(X W >= 0) lets the whole matrix decay instead of about half of it. In float64, which
has room for 1e-42, the two agree.

Entries whose cautious mask differed at some step, of {_entries()} in all, float32, 10
steps. The sign of a near-zero decides there whether a weight decays, and rounding
decides the sign:

{table(["recipe", "gradients", "entries"], flips)}"""


def _entries() -> int:
    return sum(math.prod(problems.SHAPES[name]) for name in problems.MATRIX_NAMES)


def _bfloat16(results: Results) -> str:
    keys = list(results.spreads[0].variants)
    rows = [
        [
            found.recipe,
            number(found.ours),
            *(number(found.variants[key]) for key in keys),
            number(found.ours_exact),
            number(found.reference_exact),
        ]
        for found in results.spreads
    ]
    header = ["recipe", "ours", *keys, "ours, exact", "PyTorch, exact"]
    return f"""## bfloat16, beside PyTorch's own spread

Distance from the eager reference after 10 steps, over a square, a tall and a wide
matrix: of ours, and of the reference itself where only its rounding changes (quintic
steps as fused multiply-adds, as torch.optim.Muon has them; on the transpose; through
torch.compile). The bar is the largest of these. The last two columns are the distance
from the reference in float64: ours rounds a sum once, and stays closer. Eager nanochat
also rounds its rates to bfloat16, where 1 - beta2 is 0.0508 instead of 0.05; so no
port with rates in float32 can be equal to the last bit.

{table(header, rows)}"""


def _third_parties(results: Results) -> str:
    rows = [
        [
            found.package.name,
            found.package.dtype,
            number(found.ours),
            number(found.reference),
            number(found.spread) if found.package.dtype == "bfloat16" else "-",
            found.package.remark or "-",
        ]
        for found in results.third_parties
    ]
    header = ["package", "dtype", "ours", "reference", "spread", "remark"]
    unused = "\n".join(f"- {name}: {why}." for name, why in third_parties.NOT_USED)
    return f"""## Other people's packages

Distance from the package, {third_parties.STEPS} steps on {len(third_parties.NAMES)} \
matrices: of ours; of the reference, which rounds in the order of
the package; and, as the bar in bfloat16, of the reference rounding otherwise. Where the
reference is at 1e-3 instead of 1e-7, a few roundings in one matrix fall otherwise.

{table(header, rows)}

`optax.contrib.muon` corrects the bias of Nesterov's look-ahead as Dozat does for Adam:
it adds `b M / (1 - b^(t+2))` and `(1 - b) G / (1 - b^(t+1))`, t = 0 first, where
Jordan, nanochat and torch.optim.Muon add `b M` and `(1 - b) G`. A factor of both would
vanish in the polar factor; but the two differ at first, and become equal with time. The
first optax row has the size of that. In the row below it, ours has that look-ahead in
the place of `nesterov`; without Nesterov the two agree as they are.

Not used:

{unused}"""


def _training(results: Results) -> str:
    rows = [
        [
            run.recipe,
            f"{run.torch[0]:.4f}",
            f"{run.torch[-1]:.4f}",
            f"{run.flax[-1]:.4f}",
            number(run.apart) + ("" if run.apart <= gpt.BAR else " FAIL"),
            number(run.spread),
        ]
        for run in results.trainings
    ]
    header = [
        "recipe",
        "first loss",
        "PyTorch, last",
        "Flax, last",
        "largest difference",
        "PyTorch from itself",
    ]
    return f"""## A whole training run

The GPT of `examples/gpt.py` in Flax NNX and its twin in `parity/gpt.py` in PyTorch,
from the same weights, on the same batches of real text: {gpt.STEPS} steps of
{gpt.BATCH} windows of {gpt.CONTEXT} characters, width {gpt.WIDTH}, {gpt.DEPTH} blocks,
float32, all rates moving. The bar is {gpt.BAR:g} at every step. "PyTorch from itself"
is another run of it, with the polar factor taken of the transpose.

{table(header, rows)}

![loss curves](loss.png)"""


def _limits(results: Results) -> str:
    del results
    return """## What this does not show

- Sharded and ZeRO-2 runs: `tests` compares those with one device.
- GPUs: everything here ran on a CPU."""
