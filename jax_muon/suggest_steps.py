"""How many steps the momentum of a run needs, from its singular values.

A tool for the host, between runs: it decomposes matrices in float64 with NumPy, and is
not part of a training step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jax_muon.checks import check_arrays, check_count, check_float_dtype, number
from jax_muon.observe import float_parts, read_parts
from jax_muon.polar.coefficients import Coefficients, evaluate
from jax_muon.polar.factors import NewtonSchulz, PolarExpress
from jax_muon.reading.bare import check_reading
from jax_muon.reading.labels import ADAMW
from jax_muon.reading.matrices import Matrices, Reading

# Lower bounds that are tried: singular values of a momentum spread over three decades.
LOWERS = (1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2)
MAX_STEPS = 8
_TABLES = ("jordan", "you", "cans", "cubic5", "deepseek")


@dataclasses.dataclass(frozen=True)
class SuggestedSteps:
    """The cheapest polar factor that brings the matrices of one label near enough.

    Errors are distances to the exact polar factor, relative to it: where Y has the
    singular values y, the root mean square of y - 1.

    Attributes:
      polar: with these steps and lower bound, for `polar=` of a recipe.
      products: matrix products that it takes: three a quintic, two a cubic.
      predicted: error in exact arithmetic, by the singular values; mean over matrices.
      worst: the largest of these errors.
      measured: error of `polar` on the matrices themselves, in its dtype; the mean.
      matrices: how many were decomposed.
    """

    polar: PolarExpress | NewtonSchulz
    products: int
    predicted: float
    worst: float
    measured: float
    matrices: int


def suggest_steps(
    momentum: Any,
    target: float,
    *,
    reading: Reading | None = None,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    most: int = 16,
) -> dict[str, SuggestedSteps]:
    """The steps and lower bound that reach an error on the momentum that a run has.

    Of `PolarExpress` with up to 8 steps, lower bounds from 1e-3 to 0.2 and both norms,
    and of `NewtonSchulz` with the published tables, the one with the fewest matrix
    products whose predicted error is at most `target`; among those with as many, the
    one with the smallest error. Small singular values decide: late layers and late
    steps may need more than others, so that a label for each group of layers may pay.

    Args:
      momentum: a tree of matrices as parameters are held, such as `mu` of the state of
        `nesterov`, times `scale` where it is int8. Parameters that are labelled "adamw"
        are left out, as are matrices that are zero; with other labels all have to be
        matrices.
      target: the error to reach, between 0 and 1. On the momentum of the example's
        model nanochat's five steps end at 0.28, mean over matrices and steps.
      reading: how parameters are read; its labels make the groups.
      dtype: of the iteration that is suggested and measured; None for the momentum's.
      most: matrices of a label that are decomposed, evenly spread over all.

    Returns:
      A suggestion for each label.

    Raises:
      ValueError: a target outside (0, 1), or one that nothing tried reaches for
        the matrices of a label; no matrices that are not zero, or, with the path, one
        that is not finite; most below 1.

    Examples:
      >>> momentum = {"up": jnp.diag(jnp.linspace(0.2, 1.0, 16))}
      >>> found = suggest_steps(momentum, 0.05, dtype="float32")["muon"]
      >>> found.polar.steps, found.products, found.measured < 0.05
      (2, 6, True)

    References:
      The Polar Express, arXiv 2505.16932; Spectral Scaling Laws of Muon, arXiv
      2606.04058.
    """
    check_arrays("momentum", momentum)
    target = number("target", target, "in (0, 1)", traced=False)
    check_reading("reading", reading)
    check_float_dtype("dtype", dtype)
    check_count("most", most)
    reading = Reading() if reading is None else reading
    groups = _groups(
        read_parts(reading, momentum), float_parts(reading, momentum), reading
    )
    if not groups:
        raise ValueError(
            "momentum has no matrices of floating point other than zeros; expected at "
            "least one, such as mu of a state after some steps"
        )
    return {
        label: _suggest(label, _spread(group, most), target, dtype)
        for label, group in groups.items()
    }


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A matrix (m, n), m <= n, its singular values and its polar factor."""

    x: Float[np.ndarray, "m n"]
    s: Float[np.ndarray, " m"]
    there: Float[np.ndarray, " m"]  # 1, or 0 for values that are rounding alone
    factor: Float[np.ndarray, "m n"]

    @classmethod
    def of(cls, x: np.ndarray) -> "_Matrix":
        x = x if x.shape[0] <= x.shape[1] else x.T
        u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        cutoff = max(x.shape) * np.finfo(np.float32).eps * s.max()
        there = (s > cutoff).astype(np.float64)
        return cls(x, s, there, (u * there) @ vt)

    def predicted(self, polar: PolarExpress | NewtonSchulz) -> float:
        """The error of a polar factor in exact arithmetic."""
        power = {"frobenius": 2, "schatten4": 4}[polar.norm]
        size = float(polar.norm_factor) * np.linalg.norm(self.s, power)
        after = evaluate(polar.table(), self.s / (size + float(polar.eps)))
        return float(np.linalg.norm(after - self.there) / np.linalg.norm(self.there))

    def measured(self, polar: PolarExpress | NewtonSchulz) -> float:
        """The error of what a polar factor makes of the matrix."""
        y = np.asarray(polar(jnp.asarray(self.x)).astype(jnp.float32), np.float64)
        return float(np.linalg.norm(y - self.factor) / np.linalg.norm(self.factor))


def _suggest(
    label: str, group: Sequence[_Matrix], target: float, dtype: Any
) -> SuggestedSteps:
    """The cheapest candidate for the matrices of one label."""
    found = []
    for polar in _candidates(dtype):
        errors = [matrix.predicted(polar) for matrix in group]
        found.append((_products(polar.table()), float(np.mean(errors)), errors, polar))
    enough = [one for one in found if one[1] <= target]
    if not enough:
        products, error, _, polar = min(found, key=lambda one: one[1])
        raise ValueError(
            f"target={target} is not reached for the {len(group)} matrices with the "
            f"label {label!r}; expected at least {error:.2g}, which {polar} reaches in "
            f"{products} products"
        )
    products, error, errors, polar = min(enough, key=lambda one: one[:2])
    measured = float(np.mean([matrix.measured(polar) for matrix in group]))
    return SuggestedSteps(polar, products, error, max(errors), measured, len(group))


def _candidates(dtype: Any) -> list[PolarExpress | NewtonSchulz]:
    express = [
        PolarExpress(steps, lower=lower, norm=norm, dtype=dtype)
        for norm in ("frobenius", "schatten4")
        for steps in range(1, MAX_STEPS + 1)
        for lower in LOWERS
    ]
    return [*express, *(NewtonSchulz(coefficients=t, dtype=dtype) for t in _TABLES)]


def _products(table: Sequence[Coefficients]) -> int:
    """Matrix products of an iteration: without c there is no A A."""
    return sum(3 if c else 2 for _, _, c in table)


def _groups(
    matrices: Matrices, leaves: Mapping[str, Any], reading: Reading
) -> dict[str, list[np.ndarray]]:
    """Matrices that are not zero, joined as they are orthogonalized, by label."""
    labels = {matrices[path].label for path in leaves} - {ADAMW}
    groups: dict[str, list[np.ndarray]] = {}
    for label in sorted(labels):
        own = matrices.select([label])
        names = [path for path in own if path in leaves]
        for path in names:
            if not jnp.isfinite(leaves[path]).all():
                raise ValueError(
                    f"momentum at {path!r} has elements that are infinite or NaN; "
                    "expected finite ones"
                )
        blocks = own.with_joins(reading.joins).blocks(names)
        views = [own.axes(path).view(leaves[path]) for path in names]
        for block in blocks:
            stack = np.asarray(block.view(views))
            stack = stack.reshape(len(stack), -1, stack.shape[-1])
            groups.setdefault(label, []).extend(x for x in stack if x.any())
    return {label: group for label, group in groups.items() if group}


def _spread(group: Sequence[np.ndarray], most: int) -> list[_Matrix]:
    """Decompose at most `most` matrices, evenly spread."""
    at = np.linspace(0, len(group) - 1, min(most, len(group))).round().astype(int)
    return [_Matrix.of(group[i]) for i in at]
