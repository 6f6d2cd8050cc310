"""Polar factors as objects: what they accept, and that they are values."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from jax_muon.polar import coefficients
from tests import oracle

POLARS = [jm.NewtonSchulz, jm.ExactPolar]


# --- values ---------------------------------------------------------------------------


def test_equal_settings_are_equal():
    make = jm.NewtonSchulz
    polar = make()
    for same in (
        make(np.int64(5)),
        make(dtype=np.dtype("bfloat16")),
        make(dtype=jnp.bfloat16),
        make(norm_factor=np.float64(polar.norm_factor), eps=np.float64(polar.eps)),
        copy.deepcopy(polar),
        pickle.loads(pickle.dumps(polar)),
    ):
        assert same == polar
        assert hash(same) == hash(polar)
        assert repr(same.dtype) == "'bfloat16'"
    for other in (
        make(4),
        make(eps=1.0),
        make(dtype="float32"),
        make(norm="schatten4"),
    ):
        assert other != polar
    assert type(make(eps=jnp.asarray(0.5)).eps) is float


def test_coefficients_are_normal():
    triple = (2, -1.5, 0.5)
    a = jm.NewtonSchulz(2, coefficients=np.array([triple, triple, triple]))
    for same in ([list(triple)] * 3, jnp.array(triple)):
        b = jm.NewtonSchulz(2, coefficients=same)
        assert a == b
        assert hash(a) == hash(b)
    assert a.coefficients == (triple, triple)


def test_polar_express_hands_all_settings_on():
    assert jm.PolarExpress() == jm.NewtonSchulz(
        coefficients=jm.polar_express_coefficients(5), norm_factor=1.02, eps=1e-6
    )
    table = jm.polar_express_coefficients(6, lower=2e-3)
    margins = {"norm_factor": 1.02, "eps": 1e-6}
    for more in ({"dtype": "float32", "form": "gram"}, {"symmetric": "kernel"}):
        assert jm.PolarExpress(6, lower=2e-3, norm="schatten4", **more) == (
            jm.NewtonSchulz(coefficients=table, norm="schatten4", **margins, **more)
        )


# --- under transformations ------------------------------------------------------------


@pytest.mark.parametrize("make", POLARS)
def test_equal_objects_share_a_trace(rng, make):
    x = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
    run = jax.jit(lambda polar, x: polar(x), static_argnums=0)
    np.testing.assert_array_equal(run(make(), x), make()(x))
    run(make(), x)
    assert run._cache_size() == 1


def test_a_traced_number_of_steps_says_what_to_do():
    """As `optax.inject_hyperparams` makes one of every number."""
    with pytest.raises(ValueError, match=r"steps=.*static_args=\('steps',\)"):
        jax.jit(lambda steps: jm.NewtonSchulz(steps)(jnp.eye(3)))(2)


# --- tables ---------------------------------------------------------------------------

JORDAN = coefficients.NEWTON_SCHULZ
# Five cubics, arXiv 2606.00371: singular values above 7e-3 end in 0.77 .. 1.3.
CUBICS = [
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
]
# DeepSeek-V4's technical report: Jordan's quintic until singular values are near 1,
# then two steps that bring them to 1.
TEN = 8 * [JORDAN] + 2 * [(2.0, -1.5, 0.5)]
TABLES = [
    JORDAN,
    coefficients.nanochat(5),
    coefficients.polar_express_paper(8),
    CUBICS,
    TEN,
]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_tables_equal_the_oracle(rng, x64, table, form):
    x = rng.standard_normal((9, 14))
    polar = jm.NewtonSchulz(coefficients=table, dtype="float64", form=form)
    assert polar.steps == len(polar.coefficients)
    expected = oracle.polar(x, polar.coefficients, 1.0, 1e-7)
    np.testing.assert_allclose(polar(jnp.asarray(x)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "dots"), [("standard", 10), ("gram", 13)])
def test_cubics_compute_no_square(form, dots):
    """Two products a step; in the Gram form all but five of those of quintics."""

    def count(coefficients):
        polar = jm.NewtonSchulz(coefficients=coefficients, dtype="float32", form=form)
        compiled = jax.jit(polar).lower(jnp.zeros((40, 70))).compile()
        return len(re.findall(r" = \S+ (?:dot|custom-call)\(", compiled.as_text()))

    assert count(CUBICS) == dots
    assert count(JORDAN) == dots + 5


# --- errors ---------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"norm_factor": x}, f"norm_factor={x!r}; expected a finite number above 0")
            for x in (0, -1.0, NAN, float("inf"), None, "1.0", True, [1.0])
        ),
        ({"eps": 0.0}, "eps=0.0; expected a finite number above 0"),
        *(
            ({"steps": x}, f"steps={x!r}; expected a Python integer of at least 1")
            for x in (0, -3, 5.0, True, "5", NAN, jnp.asarray(5))
        ),
        *(
            ({"norm": x}, f"norm={x!r}; expected one of 'frobenius', 'schatten4'")
            for x in ("l2", None, 1, ["frobenius"], np.zeros(2))
        ),
        ({"form": "grm"}, "form='grm'; expected one of 'auto', 'standard', 'gram'"),
        ({"symmetric": True}, "symmetric=True; expected one of 'plain', 'kernel'"),
        *(
            ({"dtype": x}, f"dtype={x!r}; expected bfloat16, float32 or float64")
            for x in ("int8", "float16", "float8_e4m3fn", jnp.int32, "f4,f4", None)
        ),
        ({"form": "gram"}, "reach 28; expected dtype=float32, or form='standard'"),
        (
            {"symmetric": "kernel", "dtype": "float32"},
            "symmetric='kernel' with dtype=float32; expected dtype=bfloat16, or",
        ),
    ],
    ids=str,
)
def test_settings_of_an_iteration(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jm.NewtonSchulz(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficients": (2, 0, -1)}, "a and b not 0"),
        ({"coefficients": [(2, -1.5, 0.5), (0, 2.5, -1.5)]}, "a and b not 0"),
        ({"coefficients": (2, np.nan, 1)}, "nan"),
        ({"coefficients": [(1, 2, 3)] * 2, "steps": 3}, "steps=3; .* from 1 to 2"),
        ({"coefficients": "jordan"}, "coefficients='jordan'; expected one "),
        ({"coefficients": [(1.0, 2.0)]}, r"=\[\(1.0, 2.0\)\]; expected one"),
        ({"coefficients": []}, "expected one"),
        ({"coefficients": None}, "coefficients=None"),
        ({"coefficients": [("a", 1, 2)]}, "expected one"),
        ({"coefficients": [(1, 2, 3), (1, 2)]}, "expected one"),
    ],
    ids=str,
)
def test_coefficients_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        jm.NewtonSchulz(**settings)


@pytest.mark.parametrize("make", [jm.PolarExpress, jm.ExactPolar])
def test_arrays_that_are_no_matrices(make):
    for x, word in (
        (jnp.zeros(4), r"shape \(4,\); expected an array"),
        (jnp.zeros((4, 4), int), "dtype int32; expected real"),
        (jnp.zeros((4, 4), complex), "dtype complex64; expected real"),
    ):
        with pytest.raises(ValueError, match=word):
            make()(x)


def test_dtypes_of_arrays():
    x, make = jnp.eye(4), jm.NewtonSchulz
    with pytest.warns(UserWarning, match="jax_enable_x64"):  # JAX's own
        make(dtype="float64")(x)
    half = make(dtype="float32")(x.astype(jnp.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, make(dtype="float32")(x), atol=2e-3)
