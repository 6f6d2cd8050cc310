"""Emerging-Optimizers: its coefficients, polar factors and trajectories against ours.

Conventions that differ, beside the names: its weights are (out, in), its momentum is an
average and without Nesterov by default, its default iteration is J. You's in bfloat16,
and its hyperball takes the norm of the weights before each step for the radius, where
ours keeps the norm at `init`, which is equal up to rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import (
    AdaptiveMuon,
    Muon,
    MuonHyperball,
    muon_utils,
)
from emerging_optimizers.utils import fp32_matmul_precision

import jax_muon as jm
from jax_muon.polar.coefficients import NEWTON_SCHULZ, polar_express_paper
from outside.coefficients import YOU

# Its name of a table, ours, and how many steps are compared. From the ninth step on it
# repeats the eighth of the Polar Express; ours continues the sequence.
TABLES = [
    ("simple", NEWTON_SCHULZ, 7),
    ("quintic", YOU, 5),
    ("polar_express", polar_express_paper(8), 8),
]
SHAPES = [(24, 24), (16, 40), (40, 16), (3, 12, 20)]
LR, MOMENTUM, STEPS = 0.02, 0.9, 6


def distance(ours, theirs):
    """Frobenius distance, relative to theirs."""
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def our_polar(table, steps, dtype="float32"):
    return jm.NewtonSchulz(steps, coefficients=table, dtype=dtype)


def quintics(name, steps):
    last = name in ("polar_express", "cans", "deepseekv4")
    return list(
        muon_utils.get_coefficient_iterator(
            steps,
            muon_utils._COEFFICIENT_SETS[name],
            "repeat_last" if last else "cycle",
        )
    )


@pytest.mark.parametrize(("theirs", "ours", "steps"), TABLES)
def test_coefficients(theirs, ours, steps):
    """Theirs have four digits, some of them cut off and not rounded."""
    found = our_polar(ours, steps).coefficients
    np.testing.assert_allclose(found, quintics(theirs, steps), rtol=0, atol=1.01e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "steps"),
    [("simple", 5), ("aol", 4), ("cans", 5), ("deepseekv4", 10), ("polar_express", 12)],
)
def test_polar_factors(name, steps, shape, rng):
    """Float32, whose roundings of 6e-8 grow by at most a few hundred times."""
    x = rng.standard_normal(shape).astype(np.float32)
    with fp32_matmul_precision("highest"):
        expected = muon_utils.newton_schulz(torch.from_numpy(x), steps, name).numpy()
    polar = our_polar(quintics(name, steps), steps)
    assert distance(np.asarray(jax.jit(polar)(x)), expected) < 3e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polar_factors_in_bfloat16(shape, rng):
    """Its precision "medium": both are as far from float32 as from each other."""
    x = rng.standard_normal(shape).astype(np.float32)
    with fp32_matmul_precision("medium"):
        expected = muon_utils.newton_schulz(torch.from_numpy(x), 5, "quintic").numpy()
    found, exact = (
        np.asarray(jax.jit(our_polar(YOU, 5, dtype))(x))
        for dtype in ("bfloat16", "float32")
    )
    assert distance(found, expected) < 2 * distance(expected, exact) < 0.04


def chain(*pieces):
    """For matrices (in, out), with the iteration in float32."""
    return optax.chain(
        jm.scale_by_momentum(MOMENTUM, nesterov=False),
        jm.orthogonalize(our_polar(YOU, 5)),
        *pieces,
    )


def scaled(rule, factor=1.0):
    return chain(jm.scale_by_shape(rule), optax.scale(-LR * factor))


OPTIMIZERS = {
    "hyperball": (MuonHyperball, {"weight_decay": 0.0}, chain(jm.hyperball(LR))),
    "muonh": (
        MuonHyperball,
        {"weight_decay": 0.0, "nesterov": True},
        jm.muonh(
            LR, momentum=MOMENTUM, polar=our_polar(YOU, 5), matrices={"?*": "muon"}
        ),
    ),
    "shape_scaling": (
        Muon,
        {"weight_decay": 0.0, "scale_mode": "shape_scaling"},
        scaled("original"),
    ),
    "unit_rms_norm": (
        Muon,
        {"weight_decay": 0.0, "scale_mode": "unit_rms_norm"},
        scaled("spectral_norm"),
    ),
    "spectral": (Muon, {"weight_decay": 0.0}, scaled("match_rms_adamw", 5.0)),
    "moonlight": (
        Muon,
        {"weight_decay": 0.1, "extra_scale_factor": 0.2, "nesterov": True},
        jm.moonlight(
            LR, momentum=MOMENTUM, polar=our_polar(YOU, 5), matrices={"?*": "muon"}
        ),
    ),
    "normuon": (
        AdaptiveMuon,
        {"weight_decay": 0.0, "moment2_method": "normuon", "scale_mode": "spectral"},
        chain(
            jm.scale_by_normuon(0.95, eps=1e-8),
            jm.scale_by_shape("match_rms_adamw"),
            optax.scale(-LR * 5),
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectories(name, rng):
    """Six steps in float32, to 1e-5 of the distance travelled."""
    optimizer, settings, tx = OPTIMIZERS[name]
    start = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {
            "up": (12, 40),
            "down": (40, 12),
            "square": (20, 20),
        }.items()
    }
    theirs = {k: torch.nn.Parameter(torch.tensor(w.T.copy())) for k, w in start.items()}
    their = optimizer(
        list(theirs.values()), LR, MOMENTUM, fp32_matmul_prec="highest", **settings
    )
    params = jax.tree.map(jnp.asarray, start)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(STEPS):
        grads = {
            k: rng.standard_normal(w.shape).astype(np.float32) for k, w in start.items()
        }
        for key, weight in theirs.items():
            weight.grad = torch.tensor(grads[key].T.copy())
        their.step()
        updates, state = update(jax.tree.map(jnp.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)
    for key, weight in theirs.items():
        end = weight.detach().numpy().T
        moved = np.linalg.norm(end - start[key])
        assert np.linalg.norm(np.asarray(params[key]) - end) < 1e-5 * moved, key


def test_zero_matrices():
    """It refuses one, ours moves it until it reaches its sphere."""
    with pytest.raises(ValueError, match="non-zero norm"):
        MuonHyperball([torch.nn.Parameter(torch.zeros(4, 6))])
    tx, params = jm.muonh(0.5, matrices={"?*": "muon"}), {"up": jnp.zeros((6, 4))}
    updates, _ = tx.update({"up": jnp.ones((6, 4))}, tx.init(params), params)
    assert float(optax.tree.norm(updates)) == pytest.approx(0.5 * 4**0.5, rel=1e-2)
