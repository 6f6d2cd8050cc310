"""The problems that both sides solve: recipes, shapes, gradients, rates.

The full product of recipes, shapes, dtypes, gradients and rates is covered so:
- All shapes are parameters of one tree, so every run has every shape, with pools of
  several matrices, transposed members and pools of one, beside AdamW's parameters.
- Every recipe meets every gradient in float64 and in float32, 10 steps, moving rates.
- Constant rates, given as floats, are a run of their own: float32, Gaussian, 10 steps.
- bfloat16, where PyTorch differs from itself: five recipes, five shapes, Gaussian
  gradients, constant rates, 10 steps (`compare.spread`).

Shapes, weights and gradients are PyTorch's, (out, in), in NumPy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from parity.references import (
    JANUARY,
    JORDAN,
    JULY,
    MOONLIGHT,
    Muon,
    MuonH,
    Nanochat,
    NorMuon,
    Teon,
    replay,
)

Arrays = dict[str, np.ndarray]  # by PyTorch's names

# ---- Shapes

SHAPES: dict[str, tuple[int, ...]] = {
    "square.weight": (24, 24),
    "tall.weight": (40, 16),
    "wide.weight": (16, 40),
    "row.weight": (1, 33),
    "column.weight": (29, 1),
    "odd.weight": (7, 13),
    "conv.weight": (8, 3, 3, 3),
    "attn.query.weight": (24, 20),  # to 4 heads of 6
    "attn.out.weight": (20, 24),  # from 4 heads of 6
    "pool.0.weight": (12, 18),
    "pool.1.weight": (12, 18),
    "pool.2.weight": (18, 12),  # the same pool, transposed
    "embed.weight": (11, 8),
    "norm.bias": (9,),
}
ADAMW_NAMES = ("embed.weight", "norm.bias")
MATRIX_NAMES = tuple(name for name in SHAPES if name not in ADAMW_NAMES)

# ---- Orientation: the one place where it changes. The window of a convolution keeps
# its order, (out, in, h, w) and (h, w, in, out), and gradients cross as weights do.

_HEADS = {"attn.query.weight": (20, 4, 6), "attn.out.weight": (4, 6, 20)}


def to_jax(arrays: Arrays, rest: Collection[str] = ADAMW_NAMES) -> Arrays:
    """PyTorch's parameters, or their gradients, as kernels (in, out) of Flax."""

    def kernel(name: str, x: np.ndarray) -> np.ndarray:
        if x.ndim > 2:
            return np.moveaxis(x, (0, 1), (-1, -2))
        return x.T.reshape(_HEADS.get(name, x.shape[::-1]))

    return {k: x if k in rest else kernel(k, x) for k, x in arrays.items()}


def to_torch(arrays: Arrays) -> Arrays:
    """The inverse."""

    def weight(name: str, x: np.ndarray) -> np.ndarray:
        shape = SHAPES[name]
        if len(shape) > 2:
            return np.moveaxis(x, (-1, -2), (0, 1))
        return x.reshape(shape[::-1]).T

    return {k: x if k in ADAMW_NAMES else weight(k, x) for k, x in arrays.items()}


def weights() -> Arrays:
    """Where every run starts: normal entries of variance 1 / in, as models have."""
    random = np.random.default_rng(0)
    return {
        name: rounded(random.standard_normal(shape) / math.sqrt(math.prod(shape[1:])))
        for name, shape in SHAPES.items()
    }


def rounded(x: np.ndarray) -> np.ndarray:
    """Float64 that float32 holds exactly, so that runs in both start from the same."""
    return x.astype(np.float32).astype(np.float64)


# ---- Gradients: of a matrix (m, n) at some step, from a generator; `fixed` is the same
# generator at every step, for what a run of gradients has in common


def low_rank(m, n, random, fixed, noise=0.01):
    """A quarter of the full rank, one column space at all steps, and 1 % noise."""
    rank = max(1, min(m, n) // 4)
    columns = fixed.standard_normal((m, rank))
    noise = noise * random.standard_normal((m, n)) if noise else 0.0
    return columns @ random.standard_normal((rank, n)) + noise


def ill_conditioned(m, n, random, fixed):
    """Singular values from 1 to 1e-6, in directions that change with the step."""
    left, _ = np.linalg.qr(random.standard_normal((m, min(m, n))))
    right, _ = np.linalg.qr(random.standard_normal((n, min(m, n))))
    return left * np.logspace(0, -6, min(m, n)) @ right.T


def sparse(m, n, random, fixed):
    """Every second row zero at every step, and half of the other entries at random."""
    grad = random.standard_normal((m, n)) * (random.random((m, n)) < 0.5)
    grad[1::2] = 0
    return grad


GRADIENTS: dict[str, Callable[..., np.ndarray]] = {
    "gaussian": lambda m, n, random, fixed: random.standard_normal((m, n)),
    "low_rank": low_rank,
    # Singular values at rounding level: the polar iteration raises them by 1000, and
    # where they point is up to rounding.
    "exact_low_rank": functools.partial(low_rank, noise=0),
    "ill_conditioned": ill_conditioned,
    "zero": lambda m, n, random, fixed: np.zeros((m, n)),  # only the decay moves
    # Mean squares are then 1e-42, a subnormal number in float32: see `reference_run`.
    "tiny": lambda m, n, random, fixed: 1e-30 * random.standard_normal((m, n)),
    "sparse": sparse,
}


@functools.cache
def gradients(kind: str, steps: int) -> list[Arrays]:
    """Gradients of every parameter at each step; AdamW's are Gaussian throughout."""
    runs = []
    for step in range(steps):
        grads = {}
        for index, (name, shape) in enumerate(SHAPES.items()):
            random = np.random.default_rng([1, index, step])
            if name in ADAMW_NAMES:
                grads[name] = rounded(random.standard_normal(shape))
            else:
                fixed = np.random.default_rng([2, index])
                m, n = shape[0], math.prod(shape[1:])
                grad = GRADIENTS[kind](m, n, random, fixed)
                grads[name] = rounded(grad.reshape(shape))
        runs.append(grads)
    return runs


# ---- Rates

_STEPS = 200  # of the schedules; runs have ten
_step = np.arange(_STEPS)
CONSTANT: dict[str, float] = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.1,
    "beta2": 0.95,
    "adamw_lr": 0.01,
}
MOVING: dict[str, np.ndarray] = {
    "lr": 0.02 * np.minimum((_step + 1) / 5, (_STEPS - _step) / _STEPS),
    "momentum": 0.85 + 0.1 * np.minimum(_step / 8, 1),
    "weight_decay": 0.1 * (1 - _step / _STEPS),
    "beta2": 0.9 + 0.05 * np.minimum(_step / 10, 1),
    "adamw_lr": 0.01 * np.minimum((_step + 1) / 4, (_STEPS - _step) / _STEPS),
}


def rate_at(rate: Any, step: int) -> float:
    """The value of a rate at one step, for PyTorch."""
    return rate if isinstance(rate, float) else float(rate[step])


def jax_rates(rates: dict, dtype: str) -> dict[str, Any]:
    """The same rates for JAX: a float stays one, a table becomes a schedule.

    Tables are cast here: JAX caches constants by identity, and would give one that it
    has seen in float32 in the precision of float32 to a run in float64.
    """
    wide = "float64" if dtype == "float64" else "float32"
    return {
        name: rate if isinstance(rate, float) else _schedule(rate.astype(wide))
        for name, rate in rates.items()
    }


def _schedule(table: np.ndarray) -> optax.Schedule:
    return lambda count: jnp.asarray(table)[count]


# ---- Recipes

_RULES: dict[str, Any] = dict.fromkeys(ADAMW_NAMES, "adamw") | {
    "conv.weight": MuonDimensionNumbers((0, 1, 2), 3),
    "attn.query.weight": MuonDimensionNumbers(0, (1, 2)),
    "attn.out.weight": MuonDimensionNumbers((0, 1), 2),
}


def read(params: Any, **settings: Any) -> jm.Matrices:
    """How parameters of this file, which may lack some, are read."""
    rules = {name: rule for name, rule in _RULES.items() if name in params}
    labels = dict.fromkeys(params, "muon")  # by full paths: rows and columns too
    return jm.find_matrices(params, rules=labels | rules, **settings)


ADAMW = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_MUON = ("lr", "momentum", "weight_decay")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One optimizer on both sides."""

    name: str
    factory: Callable[..., optax.GradientTransformation]  # ours
    reference: Callable[..., torch.optim.Optimizer]  # for matrices
    settings: dict[str, Any]  # of the reference, beside the rates
    rates: tuple[str, ...] = _MUON  # names that both take
    joint: tuple[str, ...] = ()  # matrices that the reference takes as one

    def ours(
        self,
        rates: dict[str, Any],
        dtype: str,
        adamw: dict[str, Any] = ADAMW,
        **changed: Any,
    ) -> optax.GradientTransformation:
        """Our transform, for a dtype of the polar iteration; arguments may change."""
        rates = jax_rates(rates, dtype)
        given = {{"lr": "learning_rate"}.get(r, r): rates[r] for r in self.rates}
        betas, eps, decay = (adamw[key] for key in ("betas", "eps", "weight_decay"))
        rate = rates["adamw_lr"]
        given["adamw"] = optax.adamw(rate, *betas, eps, weight_decay=decay)
        return self.factory(**given | {"dtype": dtype, "matrices": read} | changed)


def _teon(*, matrices: Any, **settings: Any) -> optax.GradientTransformation:
    if matrices is read:
        matrices = functools.partial(read, joins={"pool.{i}.weight": 2})
    return jm.teon(matrices=matrices, **settings)


_january = functools.partial(jm.nanochat, version="2026-01")
_july = functools.partial(jm.nanochat, version="2026-07")
_rms = functools.partial(jm.muon, adjust_lr_fn="match_rms_adamw")
_RMS = {**JORDAN, "scale": "rms_0.2"}
# The paper divides by sqrt(V) + eps, ours by sqrt(max(V, 1e-16)). As eps goes to zero
# these agree wherever V > 1e-16, and where X and V are zero.
_NO_EPS = {"eps": 1e-30}
_EMA = {"accumulation": "ema"}  # published as a sum, which is 1 / (1 - mu) times it
_BETA2 = (*_MUON, "beta2")
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("nanochat, January", _january, Nanochat, JANUARY, _BETA2),
        Recipe("nanochat, July", _july, Nanochat, JULY, _BETA2),
        Recipe("muon", jm.muon, Muon, JORDAN),
        Recipe("muon, rms 0.2", _rms, Muon, _RMS),
        Recipe("moonlight", jm.moonlight, Muon, {**MOONLIGHT, **_EMA}),
        Recipe("normuon", jm.normuon, NorMuon, _NO_EPS, _BETA2),
        Recipe("muonh", jm.muonh, MuonH, _EMA, ("lr", "momentum")),
        Recipe("teon", _teon, Teon, {}, joint=("pool.0.weight", "pool.1.weight")),
    )
}

# Where the two differ by design in the smallest number that they divide by, the
# reference takes that of its paper, and the report explains the difference.
PAPERS: dict[tuple[str, str], dict[str, Any]] = {
    ("normuon", "tiny"): {"eps": 1e-8},
}
EXPLAINED: dict[tuple[str, str], str] = {
    ("normuon", "tiny"): (
        "gradients of 1e-30 are below every eps, and what is left of them depends on "
        "the floors: the reference divides X by sqrt(V) + 1e-8 and the outcome by its "
        "norm, at least 1e-10; ours divides X by sqrt(max(V, 1e-16)), keeps its norm, "
        "and divides that by at least 1e-6, so that only the decay is left"
    )
}

# ---- PyTorch's side


def trajectory(
    recipe: Recipe,
    start: Arrays,
    grads: list[Arrays],
    rates: dict,
    dtype: torch.dtype,
    single: list[str],
    joint: list[list[str]],
    rest: list[str],
    adamw: dict[str, Any] = ADAMW,
    **settings: Any,
) -> list[Arrays]:
    """Parameters after every step of the reference, whose subnormal numbers are zeros.

    XLA flushes them. NorMuon's update is then zero where PyTorch's is not, and the
    cautious mask lets the whole matrix decay instead of about half of it.

    The matrices `single` are orthogonalized alone, those of a group in `joint` as one;
    `rest` is for `torch.optim.AdamW`. `settings` are of the reference, such as "polar".
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(arrays[name]).to(wide) for name in start}

    matrices = {"make": recipe.reference, **recipe.settings, "dtype": dtype, **settings}
    groups = [{"params": single, **matrices}]
    groups += [{"params": names, "joint": True, **matrices} for names in joint]
    changing = [{rate: rate for rate in recipe.rates}] * len(groups)
    if rest:
        groups += [{"params": rest, "make": torch.optim.AdamW, **adamw}]
        changing += [{"lr": "adamw_lr"}]
    changes = [
        [
            {key: rate_at(rates[rate], step) for key, rate in of_group.items()}
            for of_group in changing
        ]
        for step in range(len(grads))
    ]
    torch.set_flush_denormal(True)
    try:
        after = replay(tensors(start), groups, [*map(tensors, grads)], changes)
    finally:
        torch.set_flush_denormal(False)
    return [{name: p.numpy() for name, p in each.items()} for each in after]


def reference_run(
    recipe: Recipe,
    grads: list[Arrays],
    rates: dict,
    dtype: torch.dtype,
    names: tuple[str, ...] = tuple(SHAPES),
    **settings: Any,
) -> list[Arrays]:
    """The same for the parameters of this file, or some of them."""
    start = {name: x for name, x in weights().items() if name in names}
    single, joint, rest = (
        [name for name in names if name in chosen]
        for chosen in ({*MATRIX_NAMES} - {*recipe.joint}, recipe.joint, ADAMW_NAMES)
    )
    of_joint = [joint] if joint else []
    given = recipe, start, grads, rates, dtype, single, of_joint, rest
    return trajectory(*given, **settings)
