"""The conversion table of docs/coming_from.md, and of our recipes: equal first updates.

Float64, but for torch.optim.Muon, which orthogonalizes in bfloat16. Rows whose later
updates are equal, too, are trajectories of `test_parity.py`.
"""

import pathlib

import jax
import numpy as np
import optax
import pytest
import torch

import jax_muon as jm
from parity.references import JORDAN_SUM, MOONLIGHT, Muon, replay
from tests import trees

LR = 0.01
SAME = {"dtype": "float64", "adamw": optax.set_to_zero()}
SAME |= {"matrices": {"kernel": "muon"}}
EXACT = SAME | {"dtype": None, "polar": jm.ExactPolar()}


def by_torch(make, **settings):
    """What an optimizer of PyTorch adds to a matrix (in, out)."""
    group = {"make": make, "params": ["w"], "lr": LR, "weight_decay": 0.0} | settings

    def update(w, g):
        start, grad = ({"w": torch.from_numpy(x.T)} for x in (w, g))
        return replay(start, [group], [grad])[-1]["w"].numpy().T - w

    return update


def by_optax(make):
    """What the transform make(in, out) adds to a matrix."""

    @jax.jit
    def update(w, g):
        tx, w = make(*w.shape), {"kernel": w}
        return tx.update({"kernel": g}, tx.init(w), w)[0]["kernel"]

    return update


def optax_muon(**more):
    dimensions = {"kernel": optax.contrib.MuonDimensionNumbers(0, 1)}
    more |= {"muon_weight_dimension_numbers": dimensions}
    return by_optax(lambda m, n: optax.contrib.muon(LR, **more))


def of_matrices(recipe=jm.muon, **more):
    return lambda m, n: recipe(LR, **SAME, **more)


STILL = {"weight_decay": 0.0}
WIDE, RATIO = {"dtype": torch.float64}, {"adjust_lr_fn": "spectral_norm"}
MUON, MOONLIGHTS = of_matrices(), of_matrices(jm.moonlight, **STILL)
# What the table's first column says: their update, ours at a rate for (in, out), and
# how far apart they may be, as a part of the norm: 1e-6 where an eps stands beside
# another norm, since momentum is a sum in the one and an average in the other.
ROWS = {
    "torch.optim.Muon(lr)": (by_torch(torch.optim.Muon), MUON, 2e-2),
    'torch.optim.Muon(lr, adjust_lr_fn="match_rms_adamw")': (
        by_torch(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        MOONLIGHTS,
        2e-2,
    ),
    "Muon(lr) of Keller Jordan": (by_torch(Muon, **JORDAN_SUM, **WIDE), MUON, 1e-6),
    "Moonlight's Muon(lr)": (by_torch(Muon, **MOONLIGHT, **WIDE), MOONLIGHTS, 1e-6),
    "optax.contrib.muon(lr)": (optax_muon(), MUON, 1e-6),
    "optax.contrib.muon(lr, consistent_rms=0.2)": (
        optax_muon(consistent_rms=0.2),
        MOONLIGHTS,
        1e-6,
    ),
    "jm.moonlight(lr)": (
        by_optax(MOONLIGHTS),
        lambda m, n: jm.muon(0.2 * m**0.5 * LR, **SAME),
        1e-6,
    ),
    'jm.muon(lr, adjust_lr_fn="spectral_norm")': (
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
        update = by_optax(lambda m, n: recipe(LR, **EXACT, **more))
        return [np.linalg.norm(update(w, g)) for w, g in problems]

    plain, moonlight = norms(jm.muon), norms(jm.moonlight, weight_decay=0.0)
    np.testing.assert_allclose(norms(jm.nanochat, weight_decay=0.0), plain)
    np.testing.assert_allclose(norms(jm.normuon, weight_decay=0.0), moonlight)
    np.testing.assert_allclose(norms(jm.muonh), plain, rtol=1e-2)


def test_the_docs_have_these_rows():
    path = pathlib.Path(__file__).parents[2] / "docs" / "coming_from.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    first = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    of_others = {row for row in ROWS if not row.startswith("jm.")}
    assert of_others <= {cell.strip("`") for cell in first}
