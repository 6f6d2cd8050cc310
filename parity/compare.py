"""Two trajectories, and how far apart they end.

Errors are relative to the distance that the reference travelled since the start, so
that a weight which hardly moves cannot hide an error in its movement.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from parity import problems
from parity.problems import Arrays, Recipe
from parity.references import (
    CompiledNanochat,
    Nanochat,
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
    tx: optax.GradientTransformation,
    dtype: str,
    names: Collection[str] = tuple(problems.SHAPES),
) -> Callable[[Sequence[Arrays]], list[Arrays]]:
    """The same for weights of `problems`, in PyTorch's names and orientation.

    "float64" runs in double precision, every other dtype in float32.
    """
    wide = "float64" if dtype == "float64" else "float32"
    run = stepper(tx)

    def cross(arrays: Arrays):
        kernels = problems.to_jax({name: arrays[name] for name in names})
        return {name: jnp.asarray(x, wide) for name, x in kernels.items()}

    def across(grads: Sequence[Arrays]) -> list[Arrays]:
        with jax.enable_x64(wide == "float64"):
            after = run(cross(problems.weights()), list(map(cross, grads)))
            return [problems.to_torch(jax.device_get(params)) for params in after]

    return across


# ---- Two ends


def distance(end: Mapping, reference: Mapping, start: Mapping) -> float:
    """The error over all parameters of the reference together.

    It is zero for equal ends, even if nothing moved.
    """

    def norm(a: Mapping, b: Mapping) -> float:
        """Norm of the difference, in float64."""
        off = [np.asarray(a[k], float) - np.asarray(b[k], float) for k in reference]
        return np.sqrt(sum(np.sum(x**2) for x in off))

    apart = norm(end, reference)
    with np.errstate(divide="ignore"):
        return float(apart / norm(reference, start)) if apart else 0.0


def worst(end: Mapping, reference: Mapping, start: Mapping) -> float:
    """The largest error of a single parameter; nan if one is."""
    errors = [distance(end, {k: x}, start) for k, x in reference.items()]
    return float(np.max(errors))


# ---- float64 and float32


def check(
    recipe: Recipe,
    kind: str,
    dtype: str,
    ours: Sequence[Arrays],
    grads: Sequence[Arrays],
    rates: dict,
) -> Check:
    """Compare our run with the reference; explain an error above the bar."""
    changes = problems.PAPERS.get((recipe.name, kind), {})
    start = problems.weights()

    def reference(precision: str) -> Arrays:
        given = recipe, grads, rates, getattr(torch, precision), tuple(ours[-1])
        return problems.reference_run(*given, **changes)[-1]

    theirs = reference(dtype)
    error, bar = worst(ours[-1], theirs, start), BARS[dtype]
    why = problems.EXPLAINED.get((recipe.name, kind), "")
    if error > bar and not why and dtype == "float32":
        exact = reference("float64")
        why = _rounding(*(worst(end, exact, start) for end in (ours[-1], theirs)))
    case = f"{recipe.name}, {kind}, {dtype}, {len(grads)} steps"
    return Check("trajectories", case, error, bar, why)


def _rounding(ours_exact: float, theirs_exact: float) -> str:
    """The reason, if PyTorch in float32 is about as far from float64 as we are."""
    if not ours_exact <= 2 * theirs_exact:
        return ""
    return (
        f"rounding that the problem amplifies: from PyTorch in float64, PyTorch in "
        f"float32 is {theirs_exact:.1e} away, ours {ours_exact:.1e}"
    )


# ---- bfloat16: how far PyTorch is from itself, and how far we are from it. Variants of
# the reference differ in rounding alone: "addmm" has each quintic step as two fused
# multiply-adds, as torch.optim.Muon does; "compiled" keeps sums in float32 for longer.
# Compiling takes a minute, so `parity.run` does it in another process.

# Two axes, since torch.optim.Muon takes no others.
NAMES = ("square.weight", "tall.weight", "wide.weight", "odd.weight", "pool.0.weight")
STEPS = 10
SPREAD = ("nanochat, January", "nanochat, July", "muon", "moonlight", "normuon")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Distances over NAMES together, relative to the distance travelled."""

    ours: float  # from ours to the reference
    variants: dict[str, float]  # from a variant of the reference to the reference
    ours_exact: float  # from ours to the reference in float64
    reference_exact: float  # from the reference to itself in float64


def torch_end(recipe: Recipe, dtype: str = "bfloat16", **settings: Any) -> Arrays:
    """Where the recipe's reference ends, with constant rates, on NAMES."""
    given = problems.gradients("gaussian", STEPS), problems.CONSTANT
    run = problems.reference_run(
        recipe, *given, getattr(torch, dtype), NAMES, **settings
    )
    return run[-1]


def our_end(tx: optax.GradientTransformation) -> Arrays:
    """Where an optimizer of ours, or of optax, ends with the same gradients."""
    run = runner(tx, "float32", (*NAMES, *problems.ADAMW_NAMES))
    return run(problems.gradients("gaussian", STEPS))[-1]


def compiled_ends() -> dict[str, Arrays]:
    """Where the compiled reference of every recipe ends."""
    ends = {}
    for name in SPREAD:
        recipe = problems.RECIPES[name]
        if recipe.reference is Nanochat:
            recipe = dataclasses.replace(recipe, reference=CompiledNanochat)
            ends[name] = torch_end(recipe)
        else:
            ends[name] = torch_end(recipe, polar=compiled(newton_schulz))
    return ends


def spread(name: str, compiled_end: Arrays | None = None) -> Spread:
    """Distances between ours, the reference and its variants; see `compiled_ends`."""
    recipe, start = problems.RECIPES[name], problems.weights()
    polar = polar_express if recipe.reference is Nanochat else newton_schulz
    eager, exact = torch_end(recipe), torch_end(recipe, "float64")
    ends = {
        "addmm": torch_end(recipe, polar=partial(polar, order="addmm")),
    }
    if compiled_end is not None:
        ends["compiled"] = compiled_end
    ours = our_end(recipe.ours(problems.CONSTANT, "bfloat16"))
    return Spread(
        distance(ours, eager, start),
        {key: distance(end, eager, start) for key, end in ends.items()},
        distance(ours, exact, start),
        distance(eager, exact, start),
    )
