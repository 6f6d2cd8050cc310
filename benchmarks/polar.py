"""Orthogonalization alone: time against error, and where which form is faster.

    python -m benchmarks.polar                    both parts, shapes that suit a CPU
    python -m benchmarks.polar --shapes 8192x8192 --forms
    python -m benchmarks.polar --json FILE

Two parts. First, every way to orthogonalize on stacks with given spectra: milliseconds
for a matrix, and the distance to the polar factor in float64,
||Y - U V^T||_F / ||U V^T||_F. Second, the times of both forms and of bfloat16 alone, by
shape: what `form="auto"` goes by.
"""

import argparse
import dataclasses
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
from benchmarks import program

SPECTRA: dict[str, Callable[[int], np.ndarray] | None] = {
    "Gaussian": None,
    "1/k": lambda m: 1 / np.arange(1.0, m + 1),
    "1/k²": lambda m: 1 / np.arange(1.0, m + 1) ** 2,
    "rank m/4": lambda m: (np.arange(m) < m // 4).astype(float),
}
SHAPES = ((768, 3072),)
FORMS = tuple(
    (m, int(m * aspect))
    for m, aspects in (
        (256, (1, 1.5, 2, 4, 8, 16)),
        (512, (1, 1.5, 2, 4, 8)),
        (768, (1, 1.5, 2, 4)),
        (1024, (1, 1.5, 2)),
    )
    for aspect in aspects
)
STACK_BYTES = 2**25  # of float32: several matrices, unless they are large
DEFAULT = "Polar Express, 5 steps"
Polar = Callable[[Any], Any]
Cases = dict[str, tuple[np.ndarray, np.ndarray]]  # a matrix, and its polar factor


def ways() -> dict[str, Polar]:
    """All that is compared: how many steps of what, the dtype, and the form."""
    # From a lower bound that is fitted to the Schatten-4 norm: benchmarks/NOTES.md.
    schatten: Any = {"norm": "schatten4", "lower": 5e-3}
    families = {
        "Newton-Schulz, 5 steps": jm.NewtonSchulz(),
        "Polar Express, 4 steps, Schatten-4": jm.PolarExpress(4, **schatten),
        DEFAULT: jm.PolarExpress(),
        "Polar Express, 5 steps, Schatten-4": jm.PolarExpress(**schatten),
        "Polar Express, 8 steps": jm.PolarExpress(8),
    }
    kinds = {
        "bfloat16, standard": {"dtype": "bfloat16", "form": "standard"},
        "float32, standard": {"dtype": "float32", "form": "standard"},
        "float32, gram": {"dtype": "float32", "form": "gram"},
    }
    if jax.default_backend() == "gpu":
        kinds["bfloat16, kernels"] = {"dtype": "bfloat16", "symmetric": "kernel"}
    return {
        f"{family}, {kind}": dataclasses.replace(polar, **settings)
        for family, polar in families.items()
        for kind, settings in kinds.items()
    }


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


def known_cases(m: int, n: int) -> Cases:
    """A matrix of every spectrum, and its polar factor in float64."""
    drawn = {kind: matrices(kind, m, n, 1) for kind in SPECTRA}
    return {kind: (x, polar_factor(x)) for kind, x in drawn.items()}


def errors(polar: Polar, cases: Cases) -> dict[str, float]:
    """The distance to the polar factor, by spectrum."""
    run = jax.jit(polar)
    return {
        kind: relative(run(jnp.asarray(x, jnp.float32)), expected)
        for kind, (x, expected) in cases.items()
    }


def rounding(y: Any, x: np.ndarray) -> float:
    """How far Y is from the five quintics of X (..., m, n) in float64, relatively."""
    exact = x.astype(np.float64)
    exact /= 1.02 * np.linalg.norm(exact, axis=(-2, -1), keepdims=True) + 1e-6
    for a, b, c in jm.polar_express_coefficients(5):
        gram = exact @ exact.swapaxes(-1, -2)
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    return relative(y, exact)


def relative(y: Any, exact: np.ndarray) -> float:
    """The size of the difference beside that of the exact result."""
    apart = np.asarray(y, np.float64) - exact
    return float(np.linalg.norm(apart) / np.linalg.norm(exact))


def timed(
    polars: list[Polar],
    x: Any,
    rounds: int,
    *,
    options: dict[str, Any] | None = None,
) -> list[float]:
    """The median seconds of each for a matrix of the stack, in runs that alternate.

    Its input is donated, as it is a temporary in an optimizer. `options` are XLA's.
    """

    def timer(polar: Polar) -> Callable[[], float]:
        lowered = jax.jit(polar, donate_argnums=(0,)).lower(x)
        compiled = lowered.compile(compiler_options=options)

        def run() -> float:
            y = jax.block_until_ready(jnp.array(x))
            began = time.perf_counter()
            jax.block_until_ready(compiled(y))
            return (time.perf_counter() - began) / len(x)

        return run

    times = program.in_turn([timer(polar) for polar in polars], rounds + 1)
    return [statistics.median(own[1:]) for own in times]


def measure(
    m: int, n: int, rounds: int, chosen: dict[str, Polar], cases: Cases
) -> list[dict[str, Any]]:
    """Time of ways on one shape, and their errors on cases of that shape."""
    stack = max(1, min(8, STACK_BYTES // (4 * m * n)))
    x = jax.random.normal(jax.random.key(0), (stack, m, n))
    times = timed([*chosen.values()], x, rounds)
    return [
        {"shape": [m, n], "way": way, "seconds": taken, "errors": errors(polar, cases)}
        for (way, polar), taken in zip(chosen.items(), times, strict=True)
    ]


def shape_of(text: str) -> tuple[int, int]:
    """M x N of the command line, with m <= n."""
    try:
        m, n = sorted(int(word) for word in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected MxN, such as 768x3072"
        ) from None
    return m, n


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.polar", __doc__)
    add = parser.add_argument
    add("--shapes", type=shape_of, nargs="*", default=SHAPES, help="of the first part")
    add("--forms", type=shape_of, nargs="*", default=FORMS, help="of the second part")
    add("--rounds", type=int, default=2)
    add("--json", type=pathlib.Path, help="file to save results in")
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    result = program.describe("benchmarks.polar", words)
    print(f"{result['device']}, {result['cores']} cores, {result['versions']}\n")
    program.print_head("m x n", "way", "ms", *SPECTRA)
    result["rows"] = []
    forms = {
        name: way
        for name, way in ways().items()
        if DEFAULT in name and "Schatten" not in name
    }
    parts = [(shape, ways(), known_cases(*shape)) for shape in args.shapes]
    parts += [(shape, forms, {}) for shape in args.forms]
    for (m, n), chosen, cases in parts:
        for row in measure(m, n, args.rounds, chosen, cases):
            found = row["errors"].values()
            program.print_row(f"{m} x {n}", row["way"], 1e3 * row["seconds"], *found)
            result["rows"].append(row)
    if args.json is not None:
        program.save(result, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
