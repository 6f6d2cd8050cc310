"""Polar factors as objects: what they accept, and that they are values."""

import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from jax_muon.polar.coefficients import polar_express_coefficients


def test_equal_settings_are_equal():
    make = jm.NewtonSchulz
    polar = make()
    for same in (
        make(np.int64(5), dtype=np.dtype("bfloat16"), eps=np.float64(polar.eps)),
        copy.deepcopy(polar),
        pickle.loads(pickle.dumps(polar)),
    ):
        assert same == polar and hash(same) == hash(polar)
        assert repr(same.dtype) == "'bfloat16'"
    for other in (make(4), make(dtype="float32"), make(norm="schatten4")):
        assert other != polar
    assert type(make(eps=jnp.asarray(0.5)).eps) is float
    triple = (2, -1.5, 0.5)
    table = make(2, coefficients=np.array([triple, triple, triple]))
    assert table == make(2, coefficients=jnp.array(triple))
    assert table.coefficients == (triple, triple)


def test_polar_express_is_a_newton_schulz_with_its_own_name():
    """And hands all settings on."""
    margins = {"norm_factor": 1.02, "eps": 1e-6}
    table = polar_express_coefficients(6, lower_bound=2e-3)
    for more in ({"dtype": "float32", "form": "gram"}, {"kernels": True}):
        settings = {"norm": "schatten4"} | more
        express = jm.PolarExpress(6, lower_bound=2e-3, **settings)
        plain = jm.NewtonSchulz(coefficients=table, **margins, **settings)
        assert isinstance(express, jm.NewtonSchulz)
        found, same = vars(express), jm.PolarExpress(6, lower_bound=2e-3, **settings)
        assert found == vars(plain) | {"lower_bound": 2e-3} and express == same
        assert repr(express).startswith("PolarExpress(steps=6, norm_factor=1.02")
        fewer = dataclasses.replace(express, steps=3)
        assert fewer == jm.PolarExpress(3, lower_bound=2e-3, **settings)


def traced_steps():
    """As `optax.inject_hyperparams` makes an array of every number."""
    return jax.jit(lambda steps: jm.NewtonSchulz(steps)(jnp.eye(3)))(2)


# The words of an error, and the settings that raise it; limits of single numbers are
# in tests/base/test_checks.py.
SETTINGS = {
    "norm_factor=0; expected a finite number above 0": {"norm_factor": 0},
    "eps=0.0; expected a finite number above 0": {"eps": 0.0},
    "steps=0; expected a Python integer of at least 1": {"steps": 0},
    "norm='l2'; expected one of 'frobenius', 'schatten4'": {"norm": "l2"},
    "form='grm'; expected one of 'auto', 'standard', 'gram'": {"form": "grm"},
    "kernels='kernel'; expected None, True or False": {"kernels": "kernel"},
    "dtype='float16'; expected bfloat16, float32 or float64": {"dtype": "float16"},
    "reach 28; expected dtype=float32, or form='standard'": {"form": "gram"},
    "kernels=True with dtype=float32; expected dtype=bfloat16, or": {
        "kernels": True,
        "dtype": "float32",
    },
    "=(2, -1); expected one finite (a, b, c) or": {"coefficients": (2, -1)},
    "nan": {"coefficients": (2, np.nan, 1)},
    "coefficients='jordan'; expected one ": {"coefficients": "jordan"},
    "=[]; expected one": {"coefficients": []},
    "=[(1, 2, 3), (1, 2)]; expected one": {"coefficients": [(1, 2, 3), (1, 2)]},
    "from 1 to 2": {"coefficients": [(1, 2, 3)] * 2, "steps": 3},
}
WRONG = {
    words: lambda settings=settings: jm.NewtonSchulz(**settings)
    for words, settings in SETTINGS.items()
}
WRONG |= {
    "static_args=('steps',)": traced_steps,
    "shape (4,); expected an array": lambda: jm.PolarExpress()(jnp.zeros(4)),
    "dtype int32; expected real": lambda: jm.ExactPolar()(jnp.zeros((4, 4), int)),
    "lower_bound=0; expected a finite number in (0, 1]": lambda: jm.PolarExpress(
        lower_bound=0
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        WRONG[words]()


@pytest.mark.parametrize(
    ("given", "own"), [("float32", "float32"), ("float16", "float32")]
)
def test_without_a_dtype_it_is_that_of_the_matrices(given, own):
    x = jax.random.normal(jax.random.key(0), (4, 6)).astype(given)
    found, expected = (jm.NewtonSchulz(dtype=dtype)(x) for dtype in (None, own))
    np.testing.assert_array_equal(found, expected)
