"""optax's own tests of contributed optimizers, with our recipes as its Muon.

They come from the installed optax. Each case looks `optax.contrib.muon` up when it runs
and finds one of our recipes instead.
"""

import jax
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, _common_test, _muon_test

import jax_muon as jm
from jax_muon import contrib
from tests.recipes import ON_SPHERES, RECIPES

# optax's trees are mostly vectors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:no parameter is a matrix"),
    pytest.mark.filterwarnings("ignore:without muon_weight_dimension_numbers"),
    pytest.mark.filterwarnings("ignore:the transform for 'adamw' keeps .* in float16"),
]


def methods(tests, words=""):
    """Names of tests, whose parameters have the words."""
    names = [name for name in dir(tests) if name.startswith("test_")]
    return [x for x in names if words in given(tests, x)]


def given(tests, name):
    """The parameters of a test as text."""
    return getattr(getattr(tests, name), "__x_params_repr__", "")


# --- what every optimizer has to do ---------------------------------------------------

CASES = methods(_common_test.ContribTest, "opt_name='muon'")
assert len(CASES) >= 11  # as many as optax 0.2.6 has
# Of a recipe that keeps the norm of a matrix, and lets a zero one grow.
NOT_ON_SPHERES = ("_setup_matrix_parabola", "_setup_mixed_tensor_target")


def by_rank(params):
    """As optax reads: every parameter of two axes is a matrix (in, out)."""
    return jax.tree.map(
        lambda p: MuonDimensionNumbers() if p.ndim == 2 else None, params
    )


def factory(name):
    """The recipe as optax's Muon: matrices of two axes, no decay, one rate for all."""
    decay = {} if name in ON_SPHERES else {"weight_decay": 0.0}

    def make(learning_rate: optax.ScalarOrSchedule):
        return RECIPES[name](
            learning_rate=learning_rate,
            **decay,
            adamw=optax.adam(learning_rate),
            matrices=lambda params: jm.find_matrices(
                params, rules=by_rank(params), joins={}
            ),
        )

    return make


@pytest.mark.parametrize("recipe", [*RECIPES, "contrib"])
@pytest.mark.parametrize("case", CASES)
def test_common(monkeypatch, recipe, case):
    words = given(_common_test.ContribTest, case)
    if recipe in ON_SPHERES and any(x in words for x in NOT_ON_SPHERES):
        pytest.skip("the norms of its matrices stay")
    muon = contrib.muon if recipe == "contrib" else factory(recipe)
    monkeypatch.setattr(_common_test.contrib, "muon", muon)
    _common_test.ContribTest(case).debug()  # which raises errors


# --- what optax's Muon has to do ------------------------------------------------------

NOT_OURS = {
    "test_reshape_inverse": "calls a function that is private to optax",
    "test_newton_schulz": "calls optax's function, also for complex matrices",
    "test_complex": "complex parameters go to AdamW here",
    "aol": "AOL's normalization is not here",
}


@pytest.mark.parametrize("case", methods(_muon_test.MuonTest))
def test_muon(monkeypatch, case):
    for words, reason in NOT_OURS.items():
        if words in case:
            pytest.skip(reason)
    monkeypatch.setattr(_muon_test._muon, "muon", contrib.muon)
    _muon_test.MuonTest(case).debug()
