"""Orthogonalization alone: time against error, in every form.

    python -m benchmarks.polar
    python -m benchmarks.polar --shapes 512x512 512x8192 --rounds 4

Every way to orthogonalize: milliseconds for a matrix of a stack, and the distance to
the polar factor in float64, ||Y - U V^T||_F / ||U V^T||_F, of matrices with given
spectra. `form="auto"` goes by these times.
"""

import argparse
import dataclasses
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
STACK_BYTES = 2**25  # of float32: several matrices, unless they are large
Polar = Callable[[Any], Any]


def ways() -> dict[str, Polar]:
    """All that is compared: how many steps of what, the dtype, and the form."""
    # From a lower bound that is fitted to the Schatten-4 norm: benchmarks/NOTES.md.
    schatten: Any = {"norm": "schatten4", "lower": 5e-3}
    families = {
        "Newton-Schulz, 5 steps": jm.NewtonSchulz(),
        "Polar Express, 4 steps, Schatten-4": jm.PolarExpress(4, **schatten),
        "Polar Express, 5 steps": jm.PolarExpress(),
        "Polar Express, 5 steps, Schatten-4": jm.PolarExpress(**schatten),
        "Polar Express, 8 steps": jm.PolarExpress(8),
    }
    kinds = {
        "bfloat16, standard": {"dtype": "bfloat16", "form": "standard"},
        "float32, standard": {"dtype": "float32", "form": "standard"},
        "float32, gram": {"dtype": "float32", "form": "gram"},
    }
    return {
        f"{family}, {kind}": dataclasses.replace(polar, **settings)
        for family, polar in families.items()
        for kind, settings in kinds.items()
    }


def matrices(kind: str, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A stack (1, m, n) with the singular values of one kind, and its polar factor.

    That is U V^T over the singular values that float64 can tell from zero.
    """
    x = np.random.default_rng(0).standard_normal((1, m, n))
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    if (make := SPECTRA[kind]) is not None:
        s = make(m)[None]
        x = (u * s) @ vt
    keep = s > 1e-12 * s[..., :1]
    return x, (u * keep[..., None, :]) @ vt


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


def measure(m: int, n: int, rounds: int) -> dict[str, list[float]]:
    """By way: seconds for a matrix of this shape, and the error for every spectrum."""
    stack = max(1, min(8, STACK_BYTES // (4 * m * n)))
    times = timed(
        [*ways().values()], jax.random.normal(jax.random.key(0), (stack, m, n)), rounds
    )
    known = [matrices(kind, m, n) for kind in SPECTRA]
    return {
        way: [
            seconds,
            *(relative(jax.jit(polar)(jnp.float32(x)), exact) for x, exact in known),
        ]
        for (way, polar), seconds in zip(ways().items(), times, strict=True)
    }


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
    add("--shapes", type=shape_of, nargs="+", default=[(768, 768), (768, 3072)])
    add("--rounds", type=int, default=2)
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    run = program.describe("benchmarks.polar", words)
    print(f"{run['device']}, {run['cores']} cores, {run['versions']}\n")
    program.print_head("m x n", "way", "ms", *SPECTRA)
    for m, n in args.shapes:
        for way, (seconds, *errors) in measure(m, n, args.rounds).items():
            program.print_row(f"{m} x {n}", way, 1e3 * seconds, *errors)


if __name__ == "__main__":
    main(sys.argv[1:])
