"""Orthogonalization alone: time against error, and where which form is faster.

    python -m benchmarks.polar                    both parts, shapes that suit a CPU
    python -m benchmarks.polar --shapes 8192x8192 --forms 8192x8192
    python -m benchmarks.polar --json benchmarks/results

Two parts. First, every way to orthogonalize on stacks with given spectra: seconds for a
matrix, and the distance to the polar factor in float64, ||Y - U V^T||_F / ||U V^T||_F;
drawn with the Pareto front. Second, the Gram form's time over the standard form's, by
shape: what `form="auto"` goes by.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_muon as jm
from benchmarks import machine

SPECTRA: dict[str, Callable[[int], np.ndarray] | None] = {
    "Gaussian": None,
    "1/k": lambda m: 1 / np.arange(1.0, m + 1),
    "1/k²": lambda m: 1 / np.arange(1.0, m + 1) ** 2,
    "rank m/4": lambda m: (np.arange(m) < m // 4).astype(float),
}
SHAPES = ("768x3072",)
FORMS = tuple(
    f"{m}x{int(m * aspect)}"
    for m, aspects in (
        (256, (1, 1.5, 2, 4, 8, 16)),
        (512, (1, 1.5, 2, 4, 8)),
        (768, (1, 1.5, 2, 4)),
        (1024, (1, 1.5, 2)),
    )
    for aspect in aspects
)
STACK_BYTES = 2**25  # of float32: several matrices, unless they are large
# Four steps from a lower bound fitted to the Schatten-4 norm: see benchmarks/NOTES.md.
FOUR_STEPS = {"steps": 4, "norm": "schatten4", "lower": 5e-3}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to orthogonalize."""

    family: str  # of one color
    dtype: str  # of one marker
    form: str
    function: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.family}, {self.dtype}, {self.form}"


def ways() -> list[Way]:
    """All that is compared."""
    families = {
        "Newton-Schulz, 5 steps": jm.NewtonSchulz(),
        "Polar Express, 4 steps, Schatten-4": jm.PolarExpress(**FOUR_STEPS),
        "Polar Express, 5 steps": jm.PolarExpress(),
        "Polar Express, 5 steps, Schatten-4": jm.PolarExpress(
            norm="schatten4", lower=5e-3
        ),
        "Polar Express, 8 steps": jm.PolarExpress(8),
    }
    kinds = {
        ("bfloat16", "standard"): {"dtype": "bfloat16", "form": "standard"},
        ("float32", "standard"): {"dtype": "float32", "form": "standard"},
        ("float32", "gram"): {"dtype": "float32", "form": "gram"},
    }
    if jax.default_backend() == "gpu":
        kinds["bfloat16", "kernels"] = {"dtype": "bfloat16", "symmetric": "kernel"}
    return [
        Way(family, *kind, dataclasses.replace(polar, **settings))
        for family, polar in families.items()
        for kind, settings in kinds.items()
    ]


def matrices(kind: str, m: int, n: int, count: int, seed: int = 0) -> np.ndarray:
    """A stack (count, m, n) with the singular values of one kind, float64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, m, n))
    make = SPECTRA[kind]
    if make is None:
        return x
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return (u * make(m)) @ vt


def polar_factor(x: np.ndarray) -> np.ndarray:
    """U V^T over the singular values that float64 can tell from zero."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    keep = s > 1e-12 * s[..., :1]
    return (u * keep[..., None, :]) @ vt


def rounding(y: Any, x: np.ndarray) -> float:
    """How far Y is from the five quintics of X (..., m, n) in float64, relatively."""
    exact = x.astype(np.float64)
    exact /= 1.02 * np.linalg.norm(exact, axis=(-2, -1), keepdims=True) + 1e-6
    for a, b, c in jm.polar_express_coefficients(5):
        gram = exact @ exact.swapaxes(-1, -2)
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    apart = np.asarray(y, np.float64) - exact
    return float(np.linalg.norm(apart) / np.linalg.norm(exact))


def depth(m: int, n: int) -> int:
    """How many matrices of a shape a stack holds here."""
    return max(1, min(8, STACK_BYTES // (4 * m * n)))


def timed(
    functions: list[Callable[[Any], Any]],
    x: Any,
    rounds: int,
    *,
    options: dict[str, Any] | None = None,
) -> list[float]:
    """The median seconds of each for a matrix of the stack, in runs that alternate.

    Its input is donated, as it is a temporary in an optimizer. `options` are XLA's.
    """
    compiled = [
        jax.jit(f, donate_argnums=(0,)).lower(x).compile(compiler_options=options)
        for f in functions
    ]
    times: list[list[float]] = [[] for _ in functions]
    for index in range(rounds + 1):
        for function, found in zip(compiled, times, strict=True):
            y = jax.block_until_ready(jnp.array(x))
            began = time.perf_counter()
            jax.block_until_ready(function(y))
            if index > 0:
                found.append((time.perf_counter() - began) / len(x))
    return [statistics.median(found) for found in times]


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Indices of those that no other beats in both, by time."""
    front = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def errors(
    way: Way, cases: dict[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, float]:
    """The distance to the polar factor, by spectrum."""
    run = jax.jit(way.function)
    found = {}
    for kind, (x, expected) in cases.items():
        y = np.asarray(run(jnp.asarray(x, jnp.float32)), np.float64)
        found[kind] = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    return found


def known_cases(m: int, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A matrix of every spectrum, and its polar factor in float64."""
    drawn = {kind: matrices(kind, m, n, 1) for kind in SPECTRA}
    return {kind: (x, polar_factor(x)) for kind, x in drawn.items()}


def measure_ways(
    m: int,
    n: int,
    rounds: int,
    chosen: list[Way],
    cases: dict[str, tuple[np.ndarray, np.ndarray]],
) -> list[dict[str, Any]]:
    """Time and errors of ways on one shape, the errors on `known_cases`."""
    x = jax.random.normal(jax.random.key(0), (depth(m, n), m, n))
    times = timed([way.function for way in chosen], x, rounds)
    return [
        {
            "shape": [m, n],
            "family": way.family,
            "dtype": way.dtype,
            "form": way.form,
            "seconds": found,
            "errors": errors(way, cases),
        }
        for way, found in zip(chosen, times, strict=True)
    ]


def measure_forms(m: int, n: int, rounds: int) -> dict[str, Any]:
    """Five float32 steps in both forms, and five in bfloat16."""
    x = jax.random.normal(jax.random.key(0), (depth(m, n), m, n))
    kinds = (("float32", "standard"), ("float32", "gram"), ("bfloat16", "standard"))
    functions = [jm.PolarExpress(dtype=dtype, form=form) for dtype, form in kinds]
    standard, gram, bfloat16 = timed(functions, x, rounds)
    return {
        "shape": [m, n],
        "standard_s": standard,
        "gram_s": gram,
        "gram_to_standard": gram / standard,
        "bfloat16_s": bfloat16,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Time and errors, as text."""
    head = f"{'way':62} {'ms':>8}  " + "".join(f"{kind:>10}" for kind in SPECTRA)
    lines = []
    for r in found:
        if not lines or r["shape"] != lines[-1][0]:
            lines.append((r["shape"], f"\n{r['shape'][0]} x {r['shape'][1]}\n{head}"))
        name = f"{r['family']}, {r['dtype']}, {r['form']}"
        values = "".join(f"{r['errors'][kind]:10.1e}" for kind in SPECTRA)
        lines.append((r["shape"], f"{name:62} {1e3 * r['seconds']:8.2f}  {values}"))
    return "\n".join(text for _, text in lines)


def draw(found: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Time against error: a row for every shape, a column for every spectrum."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogFormatter

    shapes = sorted({tuple(r["shape"]) for r in found})
    families = list(dict.fromkeys(r["family"] for r in found))
    colors = dict(zip(families, plt.get_cmap("tab10").colors, strict=False))
    markers = {("bfloat16", "standard"): "s", ("float32", "standard"): "o"}
    markers |= {("float32", "gram"): "^", ("bfloat16", "kernels"): "D"}
    present = {(r["dtype"], r["form"]) for r in found}
    figure, axes = plt.subplots(
        len(shapes),
        len(SPECTRA),
        figsize=(3.2 * len(SPECTRA), 0.9 + 2.9 * len(shapes)),
        squeeze=False,
        sharey="col",
        sharex="row",
    )
    for shape, line in zip(shapes, axes, strict=True):
        rows = [r for r in found if tuple(r["shape"]) == shape]
        for kind, ax in zip(SPECTRA, line, strict=True):
            points = [(1e3 * r["seconds"], r["errors"][kind]) for r in rows]
            front = [points[i] for i in pareto(points)]
            ax.step(*zip(*front, strict=True), where="post", color="0.75", zorder=1)
            for r, (x, y) in zip(rows, points, strict=True):
                ax.scatter(
                    x,
                    y,
                    color=colors[r["family"]],
                    marker=markers[r["dtype"], r["form"]],
                    s=34,
                    zorder=2,
                )
            ax.set(xscale="log", yscale="log")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
            ax.set_title(f"{shape[0]} x {shape[1]}, {kind}", fontsize=9)
            ax.grid(alpha=0.25, which="both", linewidth=0.5)
            ax.tick_params(labelsize=7, which="both")
            if ax is line[0]:
                ax.set_ylabel("error", fontsize=8)
            if line is axes[-1]:
                ax.set_xlabel("ms for a matrix", fontsize=8)
    keys = [
        Line2D([], [], color=color, marker="o", linestyle="", label=family)
        for family, color in colors.items()
    ]
    keys += [
        Line2D([], [], color="0.3", marker=marker, linestyle="", label=", ".join(kind))
        for kind, marker in markers.items()
        if kind in present
    ]
    keys.append(Line2D([], [], color="0.75", label="no other is better in both"))
    figure.tight_layout(rect=(0, 0.75 / figure.get_figheight(), 1, 0.97))
    figure.legend(
        handles=keys, loc="lower center", ncols=5, fontsize=7.5, frameon=False
    )
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def shape_of(text: str) -> tuple[int, int]:
    """M x N of the command line, with m <= n."""
    try:
        m, n = sorted(int(word) for word in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected MxN, such as 768x3072"
        ) from None
    if m < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; expected sizes of at least 2")
    return m, n


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.polar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes, forms = ([shape_of(s) for s in given] for given in (SHAPES, FORMS))
    add = parser.add_argument
    add("--shapes", type=shape_of, nargs="*", default=shapes, help="of the first part")
    add("--forms", type=shape_of, nargs="*", default=forms, help="of the second part")
    add("--rounds", type=int, default=2)
    add("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")

    result = machine.describe("benchmarks.polar", words)
    print(f"{result['device']}, {result['cores']} cores, {result['versions']}")
    result["ways"] = []
    for m, n in args.shapes:
        found = measure_ways(m, n, args.rounds, ways(), known_cases(m, n))
        result["ways"] += found
        print(table(found), flush=True)
    result["forms"] = []
    for m, n in args.forms:
        r = measure_forms(m, n, args.rounds)
        result["forms"].append(r)
        print(
            f"{m} x {n}: standard {1e3 * r['standard_s']:.2f} ms, Gram "
            f"{1e3 * r['gram_s']:.2f} ms, ratio {r['gram_to_standard']:.2f}; bfloat16 "
            f"{1e3 * r['bfloat16_s']:.2f} ms",
            flush=True,
        )
    if args.json is not None:
        path = args.json / f"polar_{jax.default_backend()}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if result["ways"]:
            title = f"{result['device']}, {result['date']}"
            draw(result["ways"], title, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
