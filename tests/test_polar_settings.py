"""Polar factors as objects: what they accept, and that they are values."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from jax_muon.polar import coefficients
from tests import oracle

ITERATIONS = [jm.PolarExpress, jm.NewtonSchulz]
POLARS = [*ITERATIONS, jm.ExactPolar]


# --- values ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", ITERATIONS)
def test_equal_settings_are_equal(make):
    polar = make()
    for same in (
        make(5),
        make(np.int64(5)),
        make(dtype=jnp.bfloat16),
        make(dtype=np.dtype("bfloat16")),
        make(norm_factor=np.float64(polar.norm_factor), eps=jnp.asarray(polar.eps)),
        copy.deepcopy(polar),
        pickle.loads(pickle.dumps(polar)),
    ):
        # A JAX scalar is a float32, whose nearest number is not quite the same.
        if same.eps == polar.eps:
            assert same == polar
            assert hash(same) == hash(polar)
        assert type(same.eps) is float
        assert repr(same.dtype) == "'bfloat16'"
    for other in (make(4), make(eps=1.0), make(dtype=None), make(norm="schatten4")):
        assert other != polar
    with pytest.raises(AttributeError):
        polar.eps = 1.0


def test_coefficients_are_normal():
    triple = (2, -1.5, 0.5)
    a = jm.NewtonSchulz(2, coefficients=np.array([triple, triple, triple]))
    b = jm.NewtonSchulz(2, coefficients=[list(triple)] * 3)
    assert a == b
    assert hash(a) == hash(b)
    assert a.coefficients == (triple, triple)
    one = jm.NewtonSchulz(2, coefficients=jnp.array(triple))
    assert one == a
    assert jm.PolarExpress() == jm.NewtonSchulz(
        coefficients=jm.polar_express_coefficients(5), norm_factor=1.02, eps=1e-6
    )


def test_exact_polar_is_one_value():
    assert jm.ExactPolar() == jm.ExactPolar()
    assert hash(jm.ExactPolar()) == hash(jm.ExactPolar())


# --- under transformations ------------------------------------------------------------


@pytest.mark.parametrize("make", POLARS)
def test_equal_objects_share_a_trace(rng, make):
    x = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
    run = jax.jit(lambda polar, x: polar(x), static_argnums=0)
    np.testing.assert_array_equal(run(make(), x), make()(x))
    run(make(), x)
    assert run._cache_size() == 1


@pytest.mark.parametrize("make", POLARS)
def test_jit_keeps_its_methods(make):
    """It copies the `__dict__` of what it wraps."""
    jitted = jax.jit(make(), donate_argnums=(0,))
    assert jitted.lower(jnp.ones((3, 4))).compile() is not None


@pytest.mark.parametrize("make", ITERATIONS)
def test_as_a_branch(make):
    """JAX keeps traces of branches by the functions: these must be hashable."""
    x = jnp.eye(4, 6)
    run = jax.jit(lambda p, x: jax.lax.cond(p, make(eps=1.0), make(eps=2.0), x))
    np.testing.assert_array_equal(run(True, x), make(eps=1.0)(x))
    np.testing.assert_array_equal(run(False, x), make(eps=2.0)(x))


@pytest.mark.parametrize("make", ITERATIONS)
@pytest.mark.parametrize("name", ["norm_factor", "eps", "steps"])
def test_a_traced_setting_says_what_to_do(make, name):
    """As `optax.inject_hyperparams` makes one of every number."""
    with pytest.raises(ValueError, match=rf"{name}=.*static_args=\('{name}',\)"):
        jax.jit(lambda value: make(**{name: value})(jnp.eye(3)))(2)


def test_inject_hyperparams(rng):
    params = {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)}

    def factory(scale, eps):
        polar = jm.PolarExpress(eps=eps)
        return optax.chain(jm.orthogonalize(polar), optax.scale(scale))

    tx = optax.inject_hyperparams(factory, static_args=("eps",))(2.0, 0.5)
    updates, _ = jax.jit(tx.update)(params, tx.init(params))
    expected = 2 * jm.PolarExpress(eps=0.5)(params["w"].T).T
    np.testing.assert_allclose(updates["w"], expected, rtol=0, atol=2**-6)


# --- published tables -----------------------------------------------------------------


@pytest.mark.parametrize("name", coefficients.TABLES)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_named_tables_equal_the_oracle(rng, x64, name, form):
    x = rng.standard_normal((9, 14))
    polar = jm.NewtonSchulz(None, coefficients=name, dtype="float64", form=form)
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

    assert count("cubic5") == dots
    assert count("jordan") == dots + 5


# --- errors ---------------------------------------------------------------------------

NOT_POSITIVE = [0, 0.0, -1.0, float("nan"), float("inf"), None, "1.0", True, [1.0]]
NOT_COUNTS = [0, -3, 5.0, True, "5", float("nan"), jnp.asarray(5)]
NOT_CHOICES = ["l2", None, 1, ["plain"], np.zeros(2)]
NOT_DTYPES = ["int8", "float16", "float8_e4m3fn", jnp.int32, "f4,f4"]


@pytest.mark.parametrize("make", ITERATIONS)
@pytest.mark.parametrize("value", NOT_POSITIVE, ids=repr)
@pytest.mark.parametrize("name", ["norm_factor", "eps"])
def test_numbers_that_are_not_positive(make, name, value):
    text = re.escape(f"{name}={value!r}; expected a finite number above 0")
    with pytest.raises(ValueError, match=text):
        make(**{name: value})


@pytest.mark.parametrize("make", ITERATIONS)
@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_steps_that_are_no_count(make, value):
    text = re.escape(f"steps={value!r}; expected a") + ".* integer"
    with pytest.raises(ValueError, match=text):
        make(value)


@pytest.mark.parametrize("make", ITERATIONS)
@pytest.mark.parametrize("value", NOT_CHOICES, ids=repr)
@pytest.mark.parametrize("name", ["norm", "form", "symmetric"])
def test_unknown_choices(make, name, value):
    text = re.escape(f"{name}={value!r}; expected one of '")
    with pytest.raises(ValueError, match=text):
        make(**{name: value})


@pytest.mark.parametrize("make", ITERATIONS)
@pytest.mark.parametrize("value", NOT_DTYPES, ids=repr)
def test_dtypes_of_no_iteration(make, value):
    text = re.escape(f"dtype={value!r}; expected bfloat16, float32, float64")
    with pytest.raises(ValueError, match=text):
        make(dtype=value)


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), -0.1, 1.5])
@pytest.mark.parametrize("name", ["lower", "cushion", "safety"])
def test_settings_of_the_schedule(name, value):
    text = re.escape(f"{name}={value!r}; expected a number in ")
    with pytest.raises(ValueError, match=text):
        jm.PolarExpress(**{name: value})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"form": "gram"}, "expected dtype=float32, or form="),
        ({"symmetric": "kernel", "dtype": "float32"}, "expected dtype=bfloat16"),
        ({"coefficients": (2, 0, -1)}, "b not 0"),
        ({"coefficients": (2, np.nan, 1)}, "nan"),
        ({"coefficients": [(1, 2, 3)] * 2, "steps": 3}, "steps=3 .* from 1 to 2"),
        ({"coefficients": "you", "steps": 6}, "steps=6 .*'you'.* from 1 to 5"),
        ({"coefficients": "kimi"}, "coefficients='kimi'; expected one of 'jordan', "),
        (
            {"coefficients": [(1.0, 2.0)]},
            r"coefficients=\[\(1.0, 2.0\)\]; expected one",
        ),
        ({"coefficients": []}, "expected one"),
        ({"coefficients": None}, "coefficients=None"),
        ({"coefficients": [("a", 1, 2)]}, "expected one"),
        ({"coefficients": [(1, 2, 3), (1, 2)]}, "expected one"),
    ],
)
def test_settings_that_do_not_fit(settings, word):
    with pytest.raises(ValueError, match=word):
        jm.NewtonSchulz(**settings)


@pytest.mark.parametrize("make", POLARS)
def test_arrays_that_are_no_matrices(make):
    for x, word in (
        (jnp.zeros(4), r"shape \(4,\); expected an array"),
        (jnp.zeros((4, 4), int), "dtype int32; expected real"),
        (jnp.zeros((4, 4), complex), "dtype complex64; expected real"),
    ):
        with pytest.raises(ValueError, match=word):
            make()(x)


@pytest.mark.parametrize("make", ITERATIONS)
def test_dtypes_that_are_known_with_the_array(make):
    x = jnp.eye(4)
    with pytest.warns(UserWarning, match="jax_enable_x64"):  # JAX's own
        make(dtype="float64")(x)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        make(dtype=None)(x.astype(jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="form='gram'"):
        make(dtype=None, form="gram")(x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="symmetric='kernel'"):
        make(dtype=None, symmetric="kernel")(x)
    half = make(dtype=None)(x.astype(jnp.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, make(dtype="float32")(x), atol=2e-3)
