"""optax's own tests of contributed optimizers, with our recipes as its Muon.

They come from the installed optax. Each case looks `optax.contrib.muon` up when it runs
and finds one of our recipes instead. What optax's Muon alone has to do is tested where
it is ours: axes by dimension numbers in `reading/test_overrides.py`, norms in `polar/`,
its bias correction in `parity/`.
"""

import jax
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, _common_test

import jax_muon as jm
from tests.recipes import ON_SPHERES, RECIPES

# optax's trees are mostly vectors.
pytestmark = pytest.mark.filterwarnings("ignore:no parameter is a matrix")


def given(case):
    """The parameters of a test as text."""
    return getattr(getattr(_common_test.ContribTest, case), "__x_params_repr__", "")


NAMES = [name for name in dir(_common_test.ContribTest) if name.startswith("test_")]
CASES = [name for name in NAMES if "opt_name='muon'" in given(name)]
assert len(CASES) >= 11  # as many as optax 0.2.6 has
# Of a recipe that keeps the norm of a matrix, and lets a zero one grow.
NOT_ON_SPHERES = ("_setup_matrix_parabola", "_setup_mixed_tensor_target")


def factory(name):
    """The recipe as optax's Muon: matrices of two axes, no decay, one rate for all."""
    decay = {} if name in ON_SPHERES else {"weight_decay": 0.0}

    def read(params):
        """As optax does: every parameter of two axes is a matrix (in, out)."""
        rules = jax.tree.map(
            lambda p: MuonDimensionNumbers() if p.ndim == 2 else None, params
        )
        return jm.read(params, rules=rules, joins={})

    def make(learning_rate: optax.ScalarOrSchedule):
        adamw = optax.adam(learning_rate)
        return RECIPES[name](learning_rate, **decay, adamw=adamw, matrices=read)

    return make


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_common(monkeypatch, recipe, case):
    if recipe in ON_SPHERES and any(x in given(case) for x in NOT_ON_SPHERES):
        pytest.skip("the norms of its matrices stay")
    monkeypatch.setattr(_common_test.contrib, "muon", factory(recipe))
    _common_test.ContribTest(case).debug()  # which raises errors
