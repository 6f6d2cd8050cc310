"""Polar factors as objects: what they accept, and that they are values."""

import copy
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
        make(np.int64(5)),
        make(dtype=np.dtype("bfloat16")),
        make(norm_factor=np.float64(polar.norm_factor), eps=np.float64(polar.eps)),
        copy.deepcopy(polar),
        pickle.loads(pickle.dumps(polar)),
    ):
        assert same == polar and hash(same) == hash(polar)
        assert repr(same.dtype) == "'bfloat16'"
    for other in (
        make(4),
        make(eps=1.0),
        make(dtype="float32"),
        make(norm="schatten4"),
    ):
        assert other != polar
    assert type(make(eps=jnp.asarray(0.5)).eps) is float
    triple = (2, -1.5, 0.5)
    table = make(2, coefficients=np.array([triple, triple, triple]))
    assert table == make(2, coefficients=jnp.array(triple))
    assert table.coefficients == (triple, triple)


def test_polar_express_hands_all_settings_on():
    margins = {"norm_factor": 1.02, "eps": 1e-6}
    table = polar_express_coefficients(6, lower=2e-3)
    for more in ({"dtype": "float32", "form": "gram"}, {"symmetric": "kernel"}):
        assert jm.PolarExpress(6, lower=2e-3, norm="schatten4", **more) == (
            jm.NewtonSchulz(coefficients=table, norm="schatten4", **margins, **more)
        )


@pytest.mark.parametrize("make", [jm.NewtonSchulz, jm.ExactPolar])
def test_equal_objects_share_a_trace(make):
    run, x = jax.jit(lambda polar, x: polar(x), static_argnums=0), jnp.eye(5, 7)
    run(make(), x)
    run(make(), x)
    assert run._cache_size() == 1


def test_a_traced_number_of_steps_says_what_to_do():
    """As `optax.inject_hyperparams` makes one of every number."""
    with pytest.raises(ValueError, match=r"steps=.*static_args=\('steps',\)"):
        jax.jit(lambda steps: jm.NewtonSchulz(steps)(jnp.eye(3)))(2)


# The words of an error, and the settings that raise it.
WRONG = {
    "norm_factor=0; expected a finite number above 0": {"norm_factor": 0},
    "norm_factor=nan; expected": {"norm_factor": float("nan")},
    "norm_factor=True; expected": {"norm_factor": True},
    "norm_factor=[1.0]; expected": {"norm_factor": [1.0]},
    "eps=0.0; expected a finite number above 0": {"eps": 0.0},
    "steps=0; expected a Python integer of at least 1": {"steps": 0},
    "steps=5.0; expected": {"steps": 5.0},
    "steps=True; expected": {"steps": True},
    "steps=Array(5": {"steps": jnp.asarray(5)},
    "norm='l2'; expected one of 'frobenius', 'schatten4'": {"norm": "l2"},
    "norm=['frobenius']; expected": {"norm": ["frobenius"]},
    "form='grm'; expected one of 'auto', 'standard', 'gram'": {"form": "grm"},
    "symmetric=True; expected one of 'plain', 'kernel'": {"symmetric": True},
    "dtype='int8'; expected bfloat16, float32 or float64": {"dtype": "int8"},
    "dtype='float16'; expected": {"dtype": "float16"},
    "dtype=None; expected": {"dtype": None},
    "reach 28; expected dtype=float32, or form='standard'": {"form": "gram"},
    "symmetric='kernel' with dtype=float32; expected dtype=bfloat16, or": {
        "symmetric": "kernel",
        "dtype": "float32",
    },
    "=(2, 0, -1); expected": {"coefficients": (2, 0, -1)},
    "a and b not 0": {"coefficients": [(2, -1.5, 0.5), (0, 2.5, -1.5)]},
    "nan": {"coefficients": (2, np.nan, 1)},
    "from 1 to 2": {"coefficients": [(1, 2, 3)] * 2, "steps": 3},
    "coefficients='jordan'; expected one ": {"coefficients": "jordan"},
    "=[(1.0, 2.0)]; expected one": {"coefficients": [(1.0, 2.0)]},
    "=[]; expected one": {"coefficients": []},
    "=[(1, 2, 3), (1, 2)]; expected one": {"coefficients": [(1, 2, 3), (1, 2)]},
}


@pytest.mark.parametrize("words", WRONG)
def test_settings_of_an_iteration(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        jm.NewtonSchulz(**WRONG[words])


@pytest.mark.parametrize("make", [jm.PolarExpress, jm.ExactPolar])
def test_arrays_that_are_no_matrices(make):
    for x, word in (
        (jnp.zeros(4), r"shape \(4,\); expected an array"),
        (jnp.zeros((4, 4), int), "dtype int32; expected real"),
        (jnp.zeros((4, 4), complex), "dtype complex64; expected real"),
    ):
        with pytest.raises(ValueError, match=word):
            make()(x)


def test_dtypes_that_are_known_with_the_array():
    x, make = jnp.eye(4), jm.NewtonSchulz
    with pytest.warns(UserWarning, match="jax_enable_x64"):  # JAX's own
        make(dtype="float64")(x)
    half = make(dtype="float32")(x.astype(jnp.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, make(dtype="float32")(x), atol=2e-3)
