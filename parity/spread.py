"""bfloat16: how far PyTorch is from itself, and how far we are from it.

In bfloat16 every way to write the same step rounds otherwise. The variants here are the
reference itself, changed in nothing but rounding:
- addmm: each quintic step as two fused multiply-adds, as torch.optim.Muon does;
- transposed: the polar factor of the transpose, transposed back;
- compiled: the step through torch.compile, which keeps sums in float32 for longer.

Compiling takes a minute, so `parity.run` does it in another process.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch._dynamo

from parity import compare, problems, references
from parity.problems import Arrays, Recipe
from parity.references import groups_over, newton_schulz, polar_express

NAMES = ("square.weight", "tall.weight", "wide.weight")
STEPS = 10
RECIPES = ("nanochat, January", "nanochat, August", "muon", "moonlight", "normuon")


def transposed(polar: Callable) -> Callable:
    """The same polar factor, computed on the transpose."""
    return lambda x, *args, **settings: polar(x.mT, *args, **settings).mT


def plain_polar(recipe: Recipe) -> Callable:
    """The function that the recipe's reference takes its polar factor with."""
    return polar_express if recipe.name.startswith("nanochat") else newton_schulz


def variants(recipe: Recipe) -> dict[str, Callable]:
    """Polar functions that differ from the reference's in rounding alone."""
    polar = plain_polar(recipe)
    return {"addmm": partial(polar, order="addmm"), "transposed": transposed(polar)}


def distance(a: list[Arrays], b: list[Arrays]) -> float:
    """How far a ended from b, relative to how far b travelled, over NAMES together."""
    start = problems.weights()
    apart = sum(np.sum((a[-1][k].astype(float) - b[-1][k]) ** 2) for k in NAMES)
    moved = sum(np.sum((b[-1][k].astype(float) - start[k]) ** 2) for k in NAMES)
    return float(np.sqrt(apart / moved))


# ---- Compiled


@functools.cache
def compiled(function: Callable) -> Callable:
    """The function through torch.compile, once for each shape."""
    torch._dynamo.config.recompile_limit = 64  # shapes; 8 by default
    return torch.compile(function, dynamic=False, fullgraph=True)


class CompiledMuonAdamW(references.MuonAdamW):
    """`MuonAdamW` whose matrices go through a compiled update.

    Rates are tensors there, as in nanochat: each new number would compile again.
    """

    def _muon(self, p, group):
        w, state = references.as_stack(p), self.state[p]
        if not state:
            state.update(references.muon_state(w))
        rates = ("lr", "momentum", "weight_decay", "beta2")
        as_tensors = {k: torch.tensor(group[k], dtype=torch.float32) for k in rates}
        settings = {k: v for k, v in group.items() if k not in ("params", "kind")}
        compiled(references.muon_update)(
            w,
            references.as_stack(p.grad),
            state["momentum"],
            state["second_moment"],
            {**settings, **as_tensors},
        )


def compiled_run(recipe: Recipe, grads: list[Arrays]) -> list[Arrays]:
    """The matrices of NAMES through the compiled reference, bfloat16."""
    settings: dict = {**recipe.settings, "dtype": torch.bfloat16}
    if recipe.name.startswith("nanochat"):
        settings["kind"] = "muon"
        make: Callable = CompiledMuonAdamW
    else:
        make = recipe.reference
        settings["polar"] = compiled(plain_polar(recipe))
    params = {
        name: torch.nn.Parameter(torch.from_numpy(problems.weights()[name]).float())
        for name in NAMES
    }
    optimizer = make(groups_over(params, [{"params": NAMES, **settings}]))
    after = []
    for grad in grads:
        for rate in recipe.rates:
            optimizer.param_groups[0][rate] = problems.CONSTANT[rate]
        for name, p in params.items():
            p.grad = torch.from_numpy(grad[name]).float()
        optimizer.step()
        after.append({k: p.detach().numpy().copy() for k, p in params.items()})
    return after


def compiled_ends() -> dict[str, Arrays]:
    """Where the compiled reference of every recipe ends."""
    grads = problems.gradients("gaussian", STEPS)
    return {name: compiled_run(problems.RECIPES[name], grads)[-1] for name in RECIPES}


# ---- The comparison


@dataclasses.dataclass(frozen=True)
class Spread:
    """Distances in bfloat16, relative to the distance travelled."""

    recipe: str
    ours: float  # from ours to the reference
    variants: dict[str, float]  # from a variant of the reference to the reference
    ours_exact: float  # from ours to the reference in float64
    reference_exact: float  # from the reference to itself in float64


def measure(name: str, compiled_end: Arrays | None = None) -> Spread:
    """Ours, the reference and its variants, 10 steps with constant rates.

    Args:
        name: of the recipe.
        compiled_end: where `compiled_ends` says that the compiled reference ended.
    """
    recipe, rates = problems.RECIPES[name], problems.CONSTANT
    grads = problems.gradients("gaussian", STEPS)

    def reference(dtype: torch.dtype = torch.bfloat16, **settings) -> list[Arrays]:
        return problems.reference_run(recipe, grads, rates, dtype, **settings)

    eager, exact = reference(), reference(torch.float64)
    ends = {key: reference(polar=polar) for key, polar in variants(recipe).items()}
    if compiled_end is not None:
        ends["compiled"] = [compiled_end]
    ours = compare.runner(recipe.ours(rates, "bfloat16"), "bfloat16")(grads)
    return Spread(
        name,
        distance(ours, eager),
        {key: distance(end, eager) for key, end in ends.items()},
        distance(ours, exact),
        distance(eager, exact),
    )
