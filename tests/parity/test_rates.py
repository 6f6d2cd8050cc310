"""The conversion table of docs/rates.md: equal first updates.

Float64, but for torch.optim.Muon, which orthogonalizes in bfloat16.
"""

import pathlib

import jax
import numpy as np
import optax
import pytest
import torch

import jax_muon as jm
from parity.references import AUGUST, JANUARY, JORDAN_SUM, MOONLIGHT, Muon, Nanochat
from tests import trees

LR = 0.01
SAME = {"dtype": "float64", "adamw": optax.set_to_zero()}
SAME |= {"matrices": {"kernel": "muon"}}


def by_torch(make):
    """What an optimizer of PyTorch adds to a matrix (in, out)."""

    def update(w, g):
        p = torch.nn.Parameter(torch.tensor(w.T.copy()))
        p.grad = torch.tensor(g.T.copy())
        make(p).step()
        return p.detach().numpy().T - w

    return update


def by_optax(make):
    """What the transform make(in, out) adds to a matrix."""

    @jax.jit
    def update(w, g):
        tx, w = make(*w.shape), {"kernel": w}
        return tx.update({"kernel": g}, tx.init(w), w)[0]["kernel"]

    return update


def reference(make=Muon, **settings):
    settings = {"lr": LR, "weight_decay": 0.0} | settings
    return by_torch(lambda p: make([p], **settings))


def optax_muon(**more):
    dimensions = {"kernel": optax.contrib.MuonDimensionNumbers(0, 1)}
    more |= {"muon_weight_dimension_numbers": dimensions}
    return by_optax(lambda m, n: optax.contrib.muon(LR, **more))


def of_matrices(recipe=jm.muon, **more):
    return lambda m, n: recipe(LR, **SAME, **more)


STILL, WIDE = {"weight_decay": 0.0}, {"dtype": torch.float64}
RMS, RATIO = {"consistent_rms": 0.2}, {"shape_rule": "sqrt_ratio"}
MUON, MOONLIGHTS = of_matrices(), of_matrices(jm.moonlight, **STILL)
JANUARYS = of_matrices(jm.nanochat, **STILL)
AUGUSTS = of_matrices(jm.nanochat, edition="2026-08", **STILL)
# What the table's first column says: their update, ours at a rate for (in, out), and
# how far apart they may be, as a part of the norm: 1e-6 where an eps stands beside
# another norm, since momentum is a sum in the one and an average in the other.
ROWS = {
    "torch.optim.Muon(lr)": (reference(torch.optim.Muon), MUON, 2e-2),
    'torch.optim.Muon(lr, adjust_lr_fn="match_rms_adamw")': (
        reference(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        MOONLIGHTS,
        2e-2,
    ),
    "Muon(lr) of Keller Jordan": (reference(**JORDAN_SUM, **WIDE), MUON, 1e-6),
    "Moonlight's Muon(lr)": (reference(**MOONLIGHT, **WIDE), MOONLIGHTS, 1e-6),
    "nanochat's matrix_lr": (reference(Nanochat, **JANUARY, **WIDE), JANUARYS, 1e-11),
    "nanochat's matrix_lr, August 2026": (
        reference(Nanochat, **AUGUST, **WIDE),
        AUGUSTS,
        1e-11,
    ),
    "optax.contrib.muon(lr)": (optax_muon(), MUON, 1e-6),
    "optax.contrib.muon(lr, consistent_rms=0.2)": (optax_muon(**RMS), MOONLIGHTS, 1e-6),
    "jm.moonlight(lr)": (
        by_optax(MOONLIGHTS),
        lambda m, n: jm.muon(0.2 * m**0.5 * LR, **SAME),
        1e-6,
    ),
    'jm.muon(lr, shape_rule="sqrt_ratio")': (
        by_optax(of_matrices(**RATIO)),
        lambda m, n: jm.muon(LR * min(1, n / m) ** 0.5, **SAME),
        1e-11,
    ),
}


@pytest.fixture
def problems(rng):
    """Weights as they start, of the norm that variance 1 / in has, and gradients."""
    pairs = [rng.normal(size=(2, *shape)) for shape in ((16, 40), (40, 16))]
    return [(w * w.shape[1] ** 0.5 / np.linalg.norm(w), g) for w, g in pairs]


@pytest.mark.parametrize("row", ROWS)
def test_a_rate_that_is_taken_over_gives_the_same_first_update(row, problems, x64):
    theirs, ours, tolerance = ROWS[row]
    for w, g in problems:
        assert trees.distance(by_optax(ours)(w, g), theirs(w, g)) < tolerance


def test_normalized_recipes_step_as_far_as_those_that_they_come_from(problems, x64):
    """NorMuon moves entries by other amounts; a sphere takes the radial part away."""

    def norms(recipe, **more):
        update = by_optax(
            lambda m, n: recipe(LR, polar=jm.ExactPolar(), **SAME, **more)
        )
        return [np.linalg.norm(update(w, g)) for w, g in problems]

    plain, moonlight = norms(jm.muon), norms(jm.moonlight, weight_decay=0.0)
    np.testing.assert_allclose(norms(jm.nanochat, weight_decay=0.0), plain)
    np.testing.assert_allclose(norms(jm.normuon, weight_decay=0.0), moonlight)
    np.testing.assert_allclose(norms(jm.muonh), plain, rtol=1e-2)


def test_the_docs_have_these_rows():
    path = pathlib.Path(__file__).parents[2] / "docs" / "rates.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    first = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    assert set(ROWS) <= {cell.strip("`") for cell in first}
