"""Two trajectories, and how far apart they are.

Errors are relative to the distance that the reference travelled since the start, so
that a weight which hardly moves cannot hide an error in its movement.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from parity import problems, weights
from parity.problems import Arrays, Recipe

BARS = {"float64": 1e-11, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    section: str
    case: str
    error: float
    bar: float
    why: str = ""  # why an error above the bar is not a defect, with the number

    @property
    def state(self) -> str:
        """Within the bar, explained, or FAIL."""
        if self.error <= self.bar:
            return "within"
        return "explained" if self.why else "FAIL"


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a parameter ended from the reference."""

    error: float  # ||W - ref|| / ||ref - W_0||
    flips: int = 0  # entries whose cautious mask differed at some step
    unflipped: float = 0.0  # the error over all other entries


def runner(
    tx: optax.GradientTransformation, dtype: str
) -> Callable[[Sequence[Arrays]], list[Arrays]]:
    """A function from gradients at each step to parameters after it, compiled once.

    Args:
        tx: the optimizer.
        dtype: "float64" runs in double precision, everything else in float32.

    Returns:
        A function; its arguments and results have PyTorch's names and orientation.
    """
    wide = "float64" if dtype == "float64" else "float32"

    def cross(arrays: Arrays):
        tree = weights.to_flax(arrays, problems.FLAX_SHAPES)
        return jax.tree.map(lambda x: jnp.asarray(x, wide), tree)

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    def run(grads: Sequence[Arrays]) -> list[Arrays]:
        with jax.enable_x64(wide == "float64"):
            params = cross(problems.weights())
            state = tx.init(params)
            after = []
            for grad in grads:
                params, state = step(params, state, cross(grad))
                after.append(weights.to_torch(params, problems.SHAPES))
        return after

    return run


def difference(
    ours: np.ndarray,
    reference: np.ndarray,
    start: np.ndarray,
    flipped: np.ndarray | None = None,
) -> Difference:
    """Compare one parameter, in float64; equal ends agree though nothing moved."""
    off = np.asarray(ours, np.float64) - reference
    moved = np.asarray(reference, np.float64) - start
    distance = np.linalg.norm(moved)
    if not np.any(off):
        return Difference(0.0)
    if distance == 0 or not np.all(np.isfinite(off)):
        return Difference(math.inf, unflipped=math.inf)
    flipped = np.zeros(off.shape, bool) if flipped is None else flipped
    return Difference(
        float(np.linalg.norm(off) / distance),
        int(np.count_nonzero(flipped)),
        float(np.linalg.norm(off[~flipped]) / distance),
    )


def flipped_entries(
    ours: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    start: np.ndarray,
    lr: Sequence[float],
    weight_decay: Sequence[float],
) -> np.ndarray:
    """Entries where one side decayed the weight at some step and the other did not.

    Read off the trajectories of one matrix, (out, in) or a convolution's, alone: at
    such a step the two differ by the whole decay, lr' wd W, up to rounding; without a
    flip by rounding only.
    """
    m, n = start.shape[0], math.prod(start.shape[1:])
    flipped = np.zeros(start.shape, bool)
    before = before_ref = start.astype(np.float64)
    for a, b, rate, wd in zip(ours, reference, lr, weight_decay, strict=True):
        after, after_ref = a.astype(np.float64), b.astype(np.float64)
        apart = np.abs((after - before) - (after_ref - before_ref))
        rate = rate * max(1.0, m / n) ** 0.5
        decay = rate * wd * np.abs(before_ref)
        flipped |= (apart > 0.5 * decay) & (apart < 1.5 * decay) & (decay > 1e-6 * rate)
        before, before_ref = after, after_ref
    return flipped


def differences(
    recipe: Recipe,
    ours: Sequence[Arrays],
    reference: Sequence[Arrays],
    rates: dict,
    dtype: str,
) -> dict[str, Difference]:
    """Compare the end of two trajectories, parameter by parameter.

    Args:
        recipe: says whether a cautious mask may flip.
        ours: parameters after every step.
        reference: the same of the reference.
        rates: the rates of both.
        dtype: flips are looked for in "float64" and "float32", where rounding is
            small enough.
    """
    rounded = np.float64 if dtype == "float64" else np.float32
    result = {}
    for name, start in problems.weights().items():
        start = start.astype(rounded)
        flipped = None
        if recipe.cautious and name in problems.MATRIX_NAMES and dtype in BARS:
            lr, decay = (
                [problems.rate_at(rates, rate, step) for step in range(len(ours))]
                for rate in ("lr", "weight_decay")
            )
            flipped = flipped_entries(
                [after[name] for after in ours],
                [after[name] for after in reference],
                start,
                lr,
                decay,
            )
        result[name] = difference(ours[-1][name], reference[-1][name], start, flipped)
    return result


def worst(found: dict[str, Difference], measure: str = "error") -> float:
    """The largest of one measure over all parameters."""
    return max(getattr(d, measure) for d in found.values())


def check(
    recipe: Recipe,
    kind: str,
    dtype: str,
    ours: Sequence[Arrays],
    grads: Sequence[Arrays],
    rates: dict,
) -> tuple[Check, dict[str, Difference]]:
    """Compare our run with the reference; explain an error above the bar.

    Args:
        recipe: whose reference is run.
        kind: of the gradients.
        dtype: "float64" or "float32".
        ours: parameters after every step.
        grads: the gradients of each step.
        rates: the rates of each step.

    Returns:
        The verdict, and the difference of each parameter.
    """
    changes = problems.REFERENCE_CHANGES.get((recipe.name, kind), {})

    def reference(precision: str) -> list[Arrays]:
        precision = getattr(torch, precision)
        return problems.reference_run(recipe, grads, rates, precision, **changes)

    theirs = reference(dtype)
    found = differences(recipe, ours, theirs, rates, dtype)
    error, bar, why = worst(found), BARS[dtype], ""
    if error > bar:
        why = _below_every_eps(recipe, kind, ours[-1], theirs[-1])
        why = why or _flips(found, bar)
        if not why and dtype == "float32":
            exact = reference("float64")
            why = _rounding(
                worst(differences(recipe, ours, exact, rates, dtype), "unflipped"),
                worst(differences(recipe, theirs, exact, rates, dtype), "unflipped"),
            )
    case = f"{recipe.name}, {kind}, {dtype}, {len(grads)} steps"
    return Check("trajectories", case, error, bar, why), found


def _below_every_eps(recipe: Recipe, kind: str, ours: Arrays, theirs: Arrays) -> str:
    """The reason in the table of problems, with the size of the difference."""
    why = problems.EXPLAINED.get((recipe.name, kind), "")
    if not why:
        return ""
    apart = max(
        float(np.sqrt(np.mean((ours[name].astype(float) - theirs[name]) ** 2)))
        for name in problems.MATRIX_NAMES
    )
    return f"{why}. The weights differ by {apart:.1e} at most (root mean square)"


def _flips(found: dict[str, Difference], bar: float) -> str:
    """The reason, if only entries with a flipped cautious mask are above the bar."""
    flips, unflipped = sum(d.flips for d in found.values()), worst(found, "unflipped")
    if not flips or unflipped > bar:
        return ""
    return (
        f"the sign of a near-zero in the cautious mask, in {flips} entries; "
        f"{unflipped:.1e} over all others"
    )


def _rounding(ours_exact: float, theirs_exact: float) -> str:
    """The reason, if PyTorch in float32 is about as far from float64 as we are."""
    if ours_exact > 2 * theirs_exact:
        return ""
    return (
        f"rounding that the problem amplifies: from PyTorch in float64, PyTorch in "
        f"float32 is {theirs_exact:.1e} away, ours {ours_exact:.1e}"
    )
