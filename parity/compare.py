"""Two trajectories, and how far apart they are.

Errors are relative to the distance that the reference travelled since the start, so
that a weight which hardly moves cannot hide an error in its movement.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from parity import problems, weights
from parity.problems import Arrays, Recipe
from parity.references import (
    CompiledMuonAdamW,
    compiled,
    newton_schulz,
    polar_express,
)

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
        """Within the bar, explained, or FAIL; nan fails."""
        if self.error <= self.bar:
            return "within"
        return "explained" if self.why else "FAIL"


# ---- Our side


def stepper(tx: optax.GradientTransformation) -> Callable[[Any, Sequence[Any]], list]:
    """A function from parameters and gradients to parameters after each step.

    The step is compiled once.
    """

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    def run(params: Any, grads: Sequence[Any]) -> list:
        state, after = tx.init(params), []
        for grad in grads:
            params, state = step(params, state, grad)
            after.append(params)
        return after

    return run


def runner(
    tx: optax.GradientTransformation, dtype: str
) -> Callable[[Sequence[Arrays]], list[Arrays]]:
    """The same for the weights of `problems`, in PyTorch's names and orientation.

    "float64" runs in double precision, every other dtype in float32.
    """
    wide = "float64" if dtype == "float64" else "float32"
    run = stepper(tx)

    def cross(arrays: Arrays):
        tree = weights.to_flax(arrays, problems.FLAX_SHAPES)
        return jax.tree.map(lambda x: jnp.asarray(x, wide), tree)

    def across(grads: Sequence[Arrays]) -> list[Arrays]:
        with jax.enable_x64(wide == "float64"):
            after = run(cross(problems.weights()), list(map(cross, grads)))
            return [weights.to_torch(params, problems.SHAPES) for params in after]

    return across


# ---- Two ends


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a parameter ended from the reference."""

    error: float  # ||W - ref|| / ||ref - W_0||
    flips: int = 0  # entries whose cautious mask differed at some step
    unflipped: float = 0.0  # the error over all other entries


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


def distance(end: Any, reference: Any, start: Any) -> float:
    """The error over the parameters of the reference together, by name."""

    def square(a: Any, b: Any) -> float:
        """In float64."""
        off = (np.asarray(a[k], float) - np.asarray(b[k], float) for k in reference)
        return sum(np.sum(x**2) for x in off)

    return float(np.sqrt(square(end, reference) / square(reference, start)))


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
    """Compare the end of two trajectories, parameter by parameter."""
    lr, decay = (
        [problems.rate_at(rates, rate, step) for step in range(len(ours))]
        for rate in ("lr", "weight_decay")
    )
    result = {}
    for name, start in problems.weights().items():
        start = start.astype(dtype)
        flipped = None
        if recipe.cautious and name in problems.MATRIX_NAMES:
            both = ([after[name] for after in run] for run in (ours, reference))
            flipped = flipped_entries(*both, start, lr, decay)
        result[name] = difference(ours[-1][name], reference[-1][name], start, flipped)
    return result


def worst(found: dict[str, Difference], measure: str = "error") -> float:
    """The largest of one measure over all parameters."""
    return max(getattr(d, measure) for d in found.values())


# ---- float64 and float32


def check(
    recipe: Recipe,
    kind: str,
    dtype: str,
    ours: Sequence[Arrays],
    grads: Sequence[Arrays],
    rates: dict,
) -> Check:
    """Compare our run with the reference; explain an error above the bar.

    Args:
        recipe: whose reference is run.
        kind: of the gradients.
        dtype: "float64" or "float32".
        ours: parameters after every step.
        grads: the gradients of each step.
        rates: the rates of each step.
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
                *(
                    worst(differences(recipe, x, exact, rates, dtype), "unflipped")
                    for x in (ours, theirs)
                )
            )
    case = f"{recipe.name}, {kind}, {dtype}, {len(grads)} steps"
    return Check("trajectories", case, error, bar, why)


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


# ---- bfloat16, where each way to write a step rounds otherwise: how far PyTorch
# is from itself, and how far we are from it. The variants are the reference, changed in
# nothing but rounding:
# - addmm: each quintic step as two fused multiply-adds, as torch.optim.Muon does;
# - transposed: the polar factor of the transpose, transposed back;
# - compiled: the step through torch.compile, which keeps sums in float32 for longer.
#   Compiling takes a minute, so `parity.run` does it in another process.

NAMES = ("square.weight", "tall.weight", "wide.weight")
SPREAD_STEPS = 10
SPREAD = ("nanochat, January", "nanochat, August", "muon", "moonlight", "normuon")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Distances in bfloat16 over NAMES together, relative to the distance travelled."""

    ours: float  # from ours to the reference
    variants: dict[str, float]  # from a variant of the reference to the reference
    ours_exact: float  # from ours to the reference in float64
    reference_exact: float  # from the reference to itself in float64


def transposed(polar: Callable) -> Callable:
    """The same polar factor, computed on the transpose."""
    return lambda x, *args, **settings: polar(x.mT, *args, **settings).mT


def plain_polar(recipe: Recipe) -> Callable:
    """The function that the recipe's reference takes its polar factor with."""
    return polar_express if recipe.cautious else newton_schulz


def _low_run(recipe: Recipe, dtype: torch.dtype = torch.bfloat16, **settings) -> Arrays:
    grads, rates = problems.gradients("gaussian", SPREAD_STEPS), problems.CONSTANT
    after = problems.reference_run(recipe, grads, rates, dtype, NAMES, **settings)
    return after[-1]


def compiled_ends() -> dict[str, Arrays]:
    """Where the compiled reference of every recipe ends."""
    ends = {}
    for name in SPREAD:
        recipe = problems.RECIPES[name]
        if recipe.cautious:
            recipe = dataclasses.replace(recipe, reference=CompiledMuonAdamW)
            ends[name] = _low_run(recipe, kind="muon")
        else:
            ends[name] = _low_run(recipe, polar=compiled(plain_polar(recipe)))
    return ends


def spread(name: str, compiled_end: Arrays | None = None) -> Spread:
    """Ours, the reference and its variants, 10 steps with constant rates.

    Args:
        name: of the recipe.
        compiled_end: where `compiled_ends` says that the compiled reference ended.
    """
    recipe, start = problems.RECIPES[name], problems.weights()
    polar = plain_polar(recipe)
    eager, exact = _low_run(recipe), _low_run(recipe, torch.float64)
    ends = {
        "addmm": _low_run(recipe, polar=partial(polar, order="addmm")),
        "transposed": _low_run(recipe, polar=transposed(polar)),
    }
    if compiled_end is not None:
        ends["compiled"] = compiled_end
    grads = problems.gradients("gaussian", SPREAD_STEPS)
    ours = runner(recipe.ours(problems.CONSTANT, "bfloat16"), "bfloat16")(grads)[-1]
    return Spread(
        distance(ours, eager, start),
        {key: distance(end, eager, start) for key, end in ends.items()},
        distance(ours, exact, start),
        distance(eager, exact, start),
    )
