"""How far polar factors are from exact ones, by spectrum and dtype.

    python -m benchmarks.polar_errors
    python -m benchmarks.polar_errors --old FOLDER

The second puts a checkout beside this one. A number is the norm of the error of
`PolarExpress` as a share of the result's, the geometric mean over five matrices
(64, 160) and their transposes. "Exact" are the same quintics in 80 bits, since an SVD
in float64 is no more exact than the iteration itself.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

DTYPES = ("bfloat16", "float32", "float64")
KINDS = (
    *("gaussian", "1/k", "1/k^2", "rank m/4 + 1e-2", "rank m/4 + 1e-3", "rank m/4"),
    *("rank 10", "rank 1", "geometric to 1e-3", "geometric to 1e-6"),
    *("5 of 100 times", "sparse rows", "2 huge entries", "t(1.5) entries"),
)
SEEDS = 5


def of_spectrum(kind: str, seed: int = 0, m: int = 64, n: int = 160) -> np.ndarray:
    """A matrix (m, n) of float64, of one of `KINDS`."""
    rng = np.random.default_rng(seed)
    y, k = rng.standard_normal((m, n)), np.arange(1, m + 1)
    noise = 0.0
    match kind.split():
        case ["sparse", _]:
            return np.where(rng.random((m, 1)) < 0.9, 1e-4, 1) * y
        case ["2", *_]:
            y[0, 0], y[3, 5] = 1e4, -3e4
            return y
        case ["t(1.5)", _]:
            return rng.standard_t(1.5, (m, n))
        case ["gaussian"]:
            return y
        case ["rank", "m/4", *more]:
            s, noise = 1.0 * (k <= m // 4), float(more[1]) if more else 0.0
        case ["rank", rank]:
            s = 1.0 * (k <= int(rank))
        case ["geometric", _, last]:
            s = float(last) ** ((k - 1) / (m - 1))
        case ["5", *_]:
            s = (rng.random(m) + 0.1) * np.where(k <= 5, 100, 1)
        case [power]:
            s = {"1/k": 1 / k, "1/k^2": 1 / k**2}[power]
    u, _, vt = np.linalg.svd(y, full_matrices=False)
    return (u * s) @ vt + noise * rng.standard_normal((m, n)) / (4 * n) ** 0.5


@functools.cache
def exact(kind: str, seed: int) -> np.ndarray:
    """Five steps of the Polar Express in 80 bits, on a processor that has them."""
    from jax_muon.polar.coefficients import polar_express_coefficients

    y = of_spectrum(kind, seed).astype(np.longdouble)
    y /= np.longdouble(1.02) * np.sqrt(np.sum(y * y)) + np.longdouble(1e-6)
    for a, b, c in polar_express_coefficients(5):
        r = y @ y.T
        y = a * y + (b * r + c * (r @ r)) @ y
    return y


def error(kind: str, dtype: str) -> float:
    """The mean described at the top."""
    import jax
    import jax.numpy as jnp

    import jax_muon as jm

    logarithms = []
    with jax.enable_x64(True):
        for seed in range(SEEDS):
            x, expected = of_spectrum(kind, seed), exact(kind, seed)
            polar = jm.PolarExpress(dtype=dtype)
            for y in (polar(jnp.asarray(x)), polar(jnp.asarray(x.T)).T):
                away = np.linalg.norm((np.asarray(y) - expected).astype(np.float64))
                logarithms.append(np.log(away / np.linalg.norm(expected.astype(float))))
    return float(np.exp(np.mean(logarithms)))


def errors_of(
    checkout: pathlib.Path, kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The errors by kind and dtype of the package in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        package = checkout.resolve() / "jax_muon"
        (pathlib.Path(folder) / "jax_muon").symlink_to(package)
        paths = os.pathsep.join([folder, str(pathlib.Path(__file__).parents[1])])
        command = [sys.executable, "-m", "benchmarks.polar_errors", "--serve", *kinds]
        own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": paths}
        done = subprocess.run(
            command, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout)


def main(words: list[str]) -> None:
    """The command."""
    import jax

    from benchmarks import program
    from benchmarks.step import folder

    parser = program.parser("benchmarks.polar_errors", __doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--old", type=folder, help="a checkout to compare with")
    args = parser.parse_args(words)
    jax.config.update("jax_platforms", "cpu")
    before = errors_of(args.old, args.kinds) if args.old else {}
    beside = ("{}, before", "{}, now", "ratio") if before else ("{}",)
    program.print_head(
        "spectrum", *(title.format(dtype) for dtype in DTYPES for title in beside)
    )
    for kind in args.kinds:
        cells: list[str | float] = [kind]
        for dtype in DTYPES:
            now = error(kind, dtype)
            old = before[kind][dtype] if before else now
            cells += [old, now, f"{now / old:.2f}"] if before else [now]
        program.print_row(*cells)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:  # as `errors_of` starts it
        found = {x: {dtype: error(x, dtype) for dtype in DTYPES} for x in sys.argv[2:]}
        print(json.dumps(found))
    else:
        main(sys.argv[1:])
