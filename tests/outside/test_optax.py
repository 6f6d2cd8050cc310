"""optax's own tests of contributed optimizers, with our recipes as its Muon.

They come from the installed optax. Each case looks `optax.contrib.muon` up when it runs
and finds one of our recipes instead.
"""

import jax
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, _common_test, _muon_test

import jax_muon as jm
from tests.recipes import ON_SPHERES, RECIPES

# optax's trees are mostly vectors.
pytestmark = pytest.mark.filterwarnings("ignore:no parameter is a matrix")


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


def is_rule(x):
    return x is None or isinstance(x, MuonDimensionNumbers)


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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_common(monkeypatch, recipe, case):
    words = given(_common_test.ContribTest, case)
    if recipe in ON_SPHERES and any(x in words for x in NOT_ON_SPHERES):
        pytest.skip("the norms of its matrices stay")
    monkeypatch.setattr(_common_test.contrib, "muon", factory(recipe))
    _common_test.ContribTest(case).debug()  # which raises errors


# --- what optax's Muon has to do ------------------------------------------------------

NOT_OURS = {
    "test_reshape_inverse": "calls a function that is private to optax",
    "test_newton_schulz": "calls optax's function, also for complex matrices",
    "test_complex": "complex parameters go to AdamW here",
    "aol": "AOL's normalization is not here",
}


def ours(
    learning_rate,
    *,
    weight_decay=0.0,
    preconditioning="frobenius",
    muon_weight_dimension_numbers=None,
):
    """`jm.muon` with the arguments of optax's."""

    def read(params):
        rules = muon_weight_dimension_numbers or by_rank
        rules = rules(params) if callable(rules) else rules
        # A value for each parameter, since a flat prefix would be path patterns.
        rules = jax.tree.broadcast(rules, params, is_leaf=is_rule)
        return jm.find_matrices(params, rules=rules)

    norm = {"frobenius": "frobenius", "schatten": "schatten4"}[preconditioning]
    return jm.muon(
        learning_rate,
        weight_decay=weight_decay,
        bias_correction=True,
        polar=jm.NewtonSchulz(norm=norm, eps=1e-8, dtype="float32"),
        adamw=optax.adamw(learning_rate, weight_decay=0.0, nesterov=True),
        matrices=read,
    )


@pytest.mark.parametrize("case", methods(_muon_test.MuonTest))
def test_muon(monkeypatch, case):
    for words, reason in NOT_OURS.items():
        if words in case:
            pytest.skip(reason)
    monkeypatch.setattr(_muon_test._muon, "muon", ours)
    _muon_test.MuonTest(case).debug()
