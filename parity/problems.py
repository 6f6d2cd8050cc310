"""The problems that both sides solve: recipes, shapes, gradients, rates.

The full product of recipes, shapes, dtypes, gradients, rates and lengths has more than
4000 runs. It is covered so:
- All shapes are parameters of one tree, so every run has every shape, with pools of
  several matrices, transposed members and pools of one, beside AdamW's parameters.
- Every recipe meets every gradient in float64 and in float32, 10 steps, moving rates.
- Gaussian and low-rank gradients go on to 200 steps, looked at after each.
- Constant rates, given as floats, are a run of their own: float32, Gaussian, 10 steps.
- bfloat16 has a file of its own (`spread.py`), since there PyTorch differs from itself:
  five recipes, three shapes, Gaussian gradients, constant rates, 10 steps.

Shapes, weights and gradients are PyTorch's, (out, in), in NumPy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity.references import (
    AUGUST,
    JANUARY,
    JORDAN,
    JORDAN_SUM,
    MOONLIGHT,
    Muon,
    MuonAdamW,
    MuonH,
    NorMuon,
    NorMuonH,
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

_FLAX = {
    "conv": {"kernel": (3, 3, 3, 8)},
    "attn": {"query": {"kernel": (20, 4, 6)}, "out": {"kernel": (4, 6, 20)}},
    "pool": {
        "0": {"kernel": (18, 12)},
        "1": {"kernel": (18, 12)},
        "2": {"kernel": (12, 18)},
    },
    "embed": {"embedding": (11, 8)},
    "norm": {"bias": (9,)},
    **{
        name: {"kernel": SHAPES[f"{name}.weight"][::-1]}
        for name in ("square", "tall", "wide", "row", "column", "odd")
    },
}
FLAX_SHAPES = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
    _FLAX,
    is_leaf=lambda x: isinstance(x, tuple),
)


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


def gaussian(m, n, random, fixed):
    """Standard normal entries."""
    del fixed
    return random.standard_normal((m, n))


def low_rank(m, n, random, fixed):
    """A quarter of the full rank, one column space at all steps, and 1 % noise."""
    rank = max(1, min(m, n) // 4)
    columns = fixed.standard_normal((m, rank))
    noise = 0.01 * random.standard_normal((m, n))
    return columns @ random.standard_normal((rank, n)) + noise


def exact_low_rank(m, n, random, fixed):
    """`low_rank` without the noise: singular values at rounding level.

    The polar iteration raises them by 1000, and where they point is up to rounding.
    """
    rank = max(1, min(m, n) // 4)
    return fixed.standard_normal((m, rank)) @ random.standard_normal((rank, n))


def ill_conditioned(m, n, random, fixed):
    """Singular values from 1 to 1e-6, in directions that change with the step."""
    del fixed
    left, _ = np.linalg.qr(random.standard_normal((m, min(m, n))))
    right, _ = np.linalg.qr(random.standard_normal((n, min(m, n))))
    return left * np.logspace(0, -6, min(m, n)) @ right.T


def zero(m, n, random, fixed):
    """No gradient: only the decay moves the weights."""
    del random, fixed
    return np.zeros((m, n))


def tiny(m, n, random, fixed):
    """Gaussian times 1e-30, below every eps."""
    return 1e-30 * gaussian(m, n, random, fixed)


def sparse(m, n, random, fixed):
    """Every second row zero at every step, and half of the other entries at random."""
    del fixed
    grad = random.standard_normal((m, n)) * (random.random((m, n)) < 0.5)
    grad[1::2] = 0
    return grad


GRADIENTS: dict[str, Callable[..., np.ndarray]] = {
    f.__name__: f
    for f in (
        gaussian,
        low_rank,
        exact_low_rank,
        ill_conditioned,
        zero,
        tiny,
        sparse,
    )
}
LONG = ("gaussian", "low_rank")  # these run for 200 steps


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

STEPS = 200
_step = np.arange(STEPS)
CONSTANT: dict[str, float] = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.1,
    "beta2": 0.95,
    "adamw_lr": 0.01,
}
MOVING: dict[str, np.ndarray] = {
    "lr": 0.02 * np.minimum((_step + 1) / 5, (STEPS - _step) / STEPS),
    "momentum": 0.85 + 0.1 * np.minimum(_step / 8, 1),
    "weight_decay": 0.1 * (1 - _step / STEPS),
    "beta2": 0.9 + 0.05 * np.minimum(_step / 10, 1),
    "adamw_lr": 0.01 * np.minimum((_step + 1) / 4, (STEPS - _step) / STEPS),
}
RATES = {"constant": CONSTANT, "moving": MOVING}


def rate_at(rates: dict, name: str, step: int) -> float:
    """The value of one rate at one step, for PyTorch."""
    return float(np.broadcast_to(rates[name], STEPS)[step])


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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One optimizer on both sides."""

    name: str
    # (rates, dtype of the polar iteration, **changed arguments) -> transform
    ours: Callable[..., optax.GradientTransformation]
    # the reference's optimizer for matrices, with group settings beside the rates
    reference: Callable[[list[dict]], torch.optim.Optimizer]
    settings: dict[str, Any]
    rates: tuple[str, ...]  # names that the reference's group takes
    cautious: bool = False  # whether a sign decides over the decay
    joint: tuple[str, ...] = ()  # matrices that the reference takes as one


# Labels of this file's tree, by the names above.
RULES = {"embed": "adamw", "norm": "adamw", "*": "muon"}
_ADAMW = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def _ours(
    factory: Callable, beta2: bool = False, decays: bool = True, **settings: Any
) -> Callable:
    def make(
        rates: dict[str, Any], dtype: str, **changed: Any
    ) -> optax.GradientTransformation:
        arguments = {
            "learning_rate": rates["lr"],
            "momentum": rates["momentum"],
            **({"weight_decay": rates["weight_decay"]} if decays else {}),
            "adamw": optax.adamw(
                rates["adamw_lr"], *_ADAMW["betas"], _ADAMW["eps"], weight_decay=0.0
            ),
            "matrices": functools.partial(jm.read, rules=RULES),
            "dtype": dtype,
            **({"beta2": rates["beta2"]} if beta2 else {}),
            **settings,
            **changed,
        }
        return factory(**arguments)

    return make


def _muon_of_a_sum(
    learning_rate: Any,
    momentum: Any,
    weight_decay: Any,
    *,
    dtype: str,
    matrices: Any,
    adamw: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon as first published, with a sum for its momentum."""
    trace = optax.inject_hyperparams(optax.trace, static_args=("nesterov",))

    def muon(found: jm.Matrices) -> optax.GradientTransformation:
        return optax.chain(
            trace(decay=momentum, nesterov=True),
            jm.orthogonalize(jm.NewtonSchulz(dtype=dtype), matrices=found),
            jm.scale_by_shape(matrices=found),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    return jm.partition({"muon": muon, "adamw": adamw}, matrices)


_MUON_RATES = ("lr", "momentum", "weight_decay")


def _nanochat(name: str, edition: str, version: dict) -> Recipe:
    return Recipe(
        name,
        _ours(jm.nanochat, beta2=True, edition=edition),
        lambda groups: MuonAdamW([{"kind": "muon", **group} for group in groups]),
        version,
        (*_MUON_RATES, "beta2"),
        cautious=True,
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _nanochat("nanochat, January", "2026-01", JANUARY),
        _nanochat("nanochat, August", "2026-08", AUGUST),
        Recipe("muon", _ours(jm.muon), Muon, JORDAN, _MUON_RATES),
        Recipe("muon, sum", _ours(_muon_of_a_sum), Muon, JORDAN_SUM, _MUON_RATES),
        Recipe(
            "muon, rms 0.2",
            _ours(jm.muon, shape_rule="rms_0.2"),
            Muon,
            {**JORDAN, "scale": "rms_0.2"},
            _MUON_RATES,
        ),
        # These two are published with a sum too. At constant momentum that is the same;
        # here momentum changes, so that the references take the average as well.
        Recipe(
            "moonlight",
            _ours(jm.moonlight),
            Muon,
            {**MOONLIGHT, "accumulation": "ema"},
            _MUON_RATES,
        ),
        Recipe(
            "normuon",
            _ours(jm.normuon, beta2=True),
            NorMuon,
            # The paper divides by sqrt(V) + eps, ours by sqrt(max(V, 1e-16)). As eps
            # goes to zero these agree wherever V > 1e-16, and where X and V are zero.
            {"eps": 1e-30},
            (*_MUON_RATES, "beta2"),
        ),
        Recipe(
            "muonh",
            _ours(jm.muonh, decays=False),
            MuonH,
            {"accumulation": "ema"},
            ("lr", "momentum"),
        ),
        Recipe(
            "normuonh",
            _ours(jm.normuonh, beta2=True, decays=False),
            NorMuonH,
            {"eps": 1e-30},  # as normuon's
            ("lr", "momentum", "beta2"),
        ),
        Recipe(
            "teon",
            _ours(
                jm.teon,
                matrices=functools.partial(jm.read, rules=RULES, joins={"pool/{i}": 2}),
            ),
            Teon,
            {},
            _MUON_RATES,
            joint=("pool.0.weight", "pool.1.weight"),
        ),
    )
}

# Where floors below the numbers differ by design, the reference takes what its paper
# has, and the report says why the two part.
REFERENCE_CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("normuon", "tiny"): {"eps": 1e-8},
    ("normuonh", "tiny"): {"eps": 1e-8},
}
EXPLAINED: dict[tuple[str, str], str] = {
    ("normuon", "tiny"): (
        "gradients of 1e-30 lie below every eps, and what is left of them depends on "
        "the floors: the reference divides X by sqrt(V) + 1e-8 and the outcome by its "
        "norm, at least 1e-10; ours divides X by sqrt(max(V, 1e-16)), keeps its norm, "
        "and divides that by at least 1e-6, so that only the decay is left"
    )
}

# ---- PyTorch's side


def reference_run(
    recipe: Recipe,
    grads: list[Arrays],
    rates: dict,
    dtype: torch.dtype,
    **settings: Any,
) -> list[Arrays]:
    """Parameters after every step of the reference.

    Args:
        recipe: whose reference runs on the matrices; `torch.optim.AdamW` has the rest.
        grads: for each step.
        rates: CONSTANT, MOVING, or the like.
        dtype: of the polar iteration. Parameters are float64 for float64, else float32.
        settings: what else differs in the reference's group, such as its "polar".
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def tensors(arrays: Arrays, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(arrays[name]).to(wide) for name in names}

    def run(make: Callable, names: tuple[str, ...], group: dict, changing: dict):
        single = tuple(name for name in names if name not in recipe.joint)
        groups = [{"params": single, **group}]
        if single != names:
            groups.append({"params": recipe.joint, "joint": True, **group})
        return replay(
            make,
            tensors(weights(), names),
            groups,
            [tensors(grad, names) for grad in grads],
            [
                [{key: rate_at(rates, rate, step) for key, rate in changing.items()}]
                * len(groups)
                for step in range(len(grads))
            ],
        )

    matrices = run(
        recipe.reference,
        MATRIX_NAMES,
        {**recipe.settings, "dtype": dtype, **settings},
        {rate: rate for rate in recipe.rates},
    )
    others = run(torch.optim.AdamW, ADAMW_NAMES, _ADAMW, {"lr": "adamw_lr"})
    return [
        {name: p.numpy() for name, p in (a | b).items()}
        for a, b in zip(matrices, others, strict=True)
    ]
