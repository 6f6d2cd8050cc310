"""Singular values of the momentum in a GPT's training, and the steps that they need.

    python -m benchmarks.spectra --target 0.3

trains the model of `examples/train_gpt.py` with `jax_muon.nanochat`, takes what
`orthogonalize` gets at one step, matrix by matrix, and prints the cheapest polar factor
that brings it within the target: ||Y - U V^T||_F / ||U V^T||_F. For a run of your own,
call `suggest` with its momentum, one matrix after another: `mu` of the state of
`nesterov`, times `scale` where it is int8. Late layers may need more steps than early
ones, so a label for each group of layers may pay: call it once for each group.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt import GPT
from jaxtyping import Float
from optimizers import best_rates, make_optimizer
from text import read_text

import jax_muon as jm
from benchmarks import program

# Lower bounds that are tried: singular values of a momentum spread over three decades.
LOWERS = (1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2)
MAX_STEPS = 8
QUANTILES = (0.25, 0.5, 0.75)  # of the singular values beside the largest
TABLES = ("jordan", "you", "cans", "cubic5", "deepseek")


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The cheapest polar factor that brings some matrices near enough.

    Errors are distances to the exact polar factor, relative to it: where Y has the
    singular values y, the root mean square of y - 1.
    """

    polar: Any  # with these steps and lower bound, for `polar=` of a recipe
    lower: float | None  # of the Polar Express; None for a published table
    products: int  # matrix products that it takes: three a quintic, two a cubic
    predicted: float  # mean error in exact arithmetic, by the singular values
    worst: float  # the largest of these errors
    measured: float  # mean error of `polar` on the matrices themselves, in its dtype


def predicted(polar: Any, s: Float[np.ndarray, " m"]) -> float:
    """The error of a polar factor in exact arithmetic, by the singular values."""
    power = {"frobenius": 2, "schatten4": 4}[polar.norm]
    size = float(polar.norm_factor) * np.linalg.norm(s, power)
    after, nonzero = s / (size + float(polar.eps)), s > 0
    for a, b, c in polar.coefficients:
        after = a * after + b * after**3 + c * after**5
    return float(np.linalg.norm(after - nonzero) / np.linalg.norm(nonzero))


def measured(polar: Any, x: np.ndarray, factor: np.ndarray) -> float:
    """The error of a polar factor as it is computed."""
    y = np.asarray(polar(jnp.asarray(x)).astype(jnp.float32), np.float64)
    return float(np.linalg.norm(y - factor) / np.linalg.norm(factor))


def decomposed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Singular values, 0 where they are rounding alone, and the polar factor."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = np.where(s > max(x.shape) * np.finfo(np.float32).eps * s.max(), s, 0)
    return s, (u * (s > 0)) @ vt


def suggest(
    matrices: Sequence[np.ndarray], target: float, dtype: Any = "bfloat16"
) -> Suggestion:
    """The polar factor with the fewest products whose mean error is at most a target.

    Tried are `PolarExpress` with up to 8 steps, lower bounds from 1e-3 to 0.2 and both
    norms, and `NewtonSchulz` with the published tables.

    Args:
      matrices: the momentum, each (m, n); those that are zero are left out.
      target: the error to reach, between 0 and 1. nanochat's five steps end at 0.28 on
        the momentum of the example's model.
      dtype: of the iteration that is suggested and measured; None for that of a matrix.

    Raises:
      ValueError: nothing that is tried reaches the target, or all matrices are zero.
    """
    given = [np.asarray(x) for x in matrices if np.any(x)]
    if not given:
        raise ValueError("the matrices are all zero; expected momentum of some steps")
    values, factors = zip(*map(decomposed, given), strict=True)
    found = []
    for lower, polar in _candidates(dtype):
        errors = [predicted(polar, s) for s in values]
        products = sum(3 if c else 2 for _, _, c in polar.coefficients)
        found.append((products, float(np.mean(errors)), max(errors), lower, polar))
    enough = [one for one in found if one[1] <= target]
    if not enough:
        products, error, _, _, polar = min(found, key=lambda one: one[1])
        raise ValueError(
            f"target={target} is not reached; expected at least {error:.2g}, which "
            f"{polar} reaches in {products} products"
        )
    products, error, worst, lower, polar = min(enough, key=lambda one: one[:2])
    real = [measured(polar, x, y) for x, y in zip(given, factors, strict=True)]
    return Suggestion(polar, lower, products, error, worst, float(np.mean(real)))


def _candidates(dtype: Any) -> list[tuple[float | None, Any]]:
    express = [
        (lower, jm.PolarExpress(steps, lower=lower, norm=norm, dtype=dtype))
        for norm in ("frobenius", "schatten4")
        for steps in range(1, MAX_STEPS + 1)
        for lower in LOWERS
    ]
    tables = [(None, jm.NewtonSchulz(coefficients=t, dtype=dtype)) for t in TABLES]
    return [*express, *tables]


def momentum(steps: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What `orthogonalize` gets after some steps of training, by parameter."""
    text = read_text(None, 128)
    model = GPT(len(text.vocabulary), width, 4, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    tx = make_optimizer("nanochat", steps, **best_rates("nanochat"))
    average = jm.nesterov(0.95)

    @jax.jit
    def step(params: Any, state: Any, windows: Any) -> Any:
        state, seen = state
        grads = jax.grad(lambda p: nnx.merge(graph, p).loss(windows))(params)
        updates, state = tx.update(grads, state, params)
        found, seen = average.update(grads, seen)
        return optax.apply_updates(params, updates), (state, seen), found

    read = jm.read(params)
    state = jax.jit(lambda p: (tx.init(p), average.init(p)))(params)
    for count in range(1, steps + 1):
        windows = text.batch(seed, count, 16, 128)
        params, state, found = step(params, state, windows)
    return {
        path: np.asarray(leaf)
        for (path, parameter), leaf in zip(
            read.items(), jax.tree.leaves(found), strict=True
        )
        if parameter.label == "muon"
    }


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.spectra", __doc__)
    parser.add_argument("--target", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args(words)
    found = momentum(args.steps, args.width)
    program.print_head("matrix", "shape", *(f"{q} of values below" for q in QUANTILES))
    for path, x in found.items():
        s = np.linalg.svd(x, compute_uv=False)
        relative = np.quantile(s / max(s[0], 1e-300), QUANTILES)
        program.print_row(path, x.shape, *(f"{q:.1e}" for q in relative))
    print(suggest(list(found.values()), args.target))


if __name__ == "__main__":
    main(sys.argv[1:])
