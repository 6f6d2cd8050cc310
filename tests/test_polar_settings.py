"""Polar factors as objects: what they accept, that they are values and pytrees."""

import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

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
    assert a.table() == (triple, triple)
    one = jm.NewtonSchulz(2, coefficients=jnp.array(triple))
    assert one.coefficients == triple
    assert one.table() == a.table()


def test_exact_polar_is_one_value():
    assert jm.ExactPolar() == jm.ExactPolar()
    assert hash(jm.ExactPolar()) == hash(jm.ExactPolar())


# --- pytrees --------------------------------------------------------------------------


@pytest.mark.parametrize("make", POLARS)
def test_pytree_of_numbers(make):
    """Rebuilding runs no check: JAX puts anything in the place of leaves."""
    polar = make()
    leaves, treedef = jax.tree.flatten(polar)
    assert len(leaves) == (0 if make is jm.ExactPolar else 2)
    assert jax.tree.unflatten(treedef, leaves) == polar
    for placeholder in (None, object(), "x", -1.0, float("nan")):
        rebuilt = jax.tree.unflatten(treedef, [placeholder] * len(leaves))
        assert type(rebuilt) is make
        for field in dataclasses.fields(polar):
            assert hasattr(rebuilt, field.name)
    assert hash(treedef) == hash(jax.tree.structure(make()))
    names = [str(path) for path, _ in jax.tree.leaves_with_path(polar)]
    assert all(re.search("norm_factor|eps", name) for name in names)


@pytest.mark.parametrize("make", POLARS)
def test_as_an_argument_of_jit(rng, make):
    x = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
    run = jax.jit(lambda polar, x: polar(x))
    np.testing.assert_array_equal(run(make(), x), make()(x))
    if make is not jm.ExactPolar:
        found = run(make(eps=10.0), x)  # no new trace
        np.testing.assert_array_equal(found, make(eps=10.0)(x))
        assert run._cache_size() == 1


@pytest.mark.parametrize("make", POLARS)
def test_jit_keeps_its_methods(make):
    """It copies the `__dict__` of what it wraps; PolarExpress has a setting `lower`."""
    jitted = jax.jit(make(), donate_argnums=(0,))
    assert jitted.lower(jnp.ones((3, 4))).compile() is not None


@pytest.mark.parametrize("make", ITERATIONS)
def test_traced_settings_as_a_branch(make):
    """JAX keeps traces of branches by the functions: these must be hashable."""
    x = jnp.eye(4, 6)

    @jax.jit
    def run(eps, x):
        first, second = make(eps=eps), make(eps=2 * eps)
        assert first != second
        assert first == dataclasses.replace(first)
        return jax.lax.cond(eps > 1, first, second, x)

    np.testing.assert_array_equal(run(2.0, x), make(eps=2.0)(x))
    np.testing.assert_array_equal(run(0.5, x), make(eps=1.0)(x))


@pytest.mark.parametrize("make", ITERATIONS)
def test_as_an_argument_of_shard_map(rng, x64, make):
    """The pieces of the factor, from summed Gram matrices, with traced settings."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(rng.standard_normal((2, 6, 40)))
    pieces, whole = PartitionSpec(None, None, "a"), PartitionSpec()

    @jax.jit
    def run(norm_factor, x):
        polar = make(norm_factor=norm_factor, dtype=None)
        return jax.shard_map(
            lambda polar, x: polar(x, axis_name=["a"]),
            mesh=mesh,
            in_specs=(whole, pieces),
            out_specs=pieces,
        )(polar, x)

    expected = make(norm_factor=1.5, dtype=None)(x)
    np.testing.assert_allclose(run(1.5, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", ITERATIONS)
def test_inject_hyperparams(rng, make):
    """It makes tracers of all floats; the numbers may be, the settings may not."""
    params = {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)}

    def factory(norm_factor, eps, steps=5):
        return jm.orthogonalize(make(steps, norm_factor=norm_factor, eps=eps))

    tx = optax.inject_hyperparams(factory, static_args=("steps",))(2.0, 0.5)
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(params, state)
    expected = make(norm_factor=2.0, eps=0.5)(params["w"].T).T
    np.testing.assert_allclose(updates["w"], expected, rtol=0, atol=2**-7)
    tx = optax.inject_hyperparams(factory)(2.0, 0.5)
    with pytest.raises(ValueError, match=r"static_args=\('steps',\)"):
        jax.jit(tx.update)(params, tx.init(params))


def test_a_traced_schedule_says_what_to_do():
    with pytest.raises(ValueError, match=r"lower=.*static_args=\('lower',\)"):
        jax.jit(lambda lower: jm.PolarExpress(lower=lower)(jnp.eye(3)))(0.1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_eps_that_is_zero_in_float16(dtype):
    """As `optax.inject_hyperparams` makes it: zero matrices still give zeros."""
    run = jax.jit(lambda x, eps: jm.PolarExpress(eps=eps, dtype=dtype)(x))
    y = run(jnp.zeros((2, 3, 5)), jnp.float16(1e-9))
    np.testing.assert_array_equal(y, 0)


# --- what a planner asks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("polar", "small", "large"),
    [
        (jm.PolarExpress(), 5, 5),
        (jm.PolarExpress(7, dtype="float32"), 7, 3),
        (jm.PolarExpress(7, dtype=None), 7, 3),
        (jm.PolarExpress(7, dtype="float32", form="standard"), 7, 7),
        (jm.NewtonSchulz(6, dtype="float32", form="gram"), 2, 2),
        (jm.PolarExpress(5, dtype="float16", form="gram"), 3, 3),
        (jm.PolarExpress(5, dtype="float16"), 5, 5),
        # Every a is 1e-6: X / s would leave the range after two steps.
        (jm.NewtonSchulz(6, coefficients=(1e-6, 1.0, 0.0), dtype=None), 6, 3),
        (jm.NewtonSchulz(None, coefficients="deepseek"), 10, 10),
        (jm.ExactPolar(), None, None),
    ],
)
def test_gram_sums(polar, small, large):
    assert polar.gram_sums(64, 640) == small
    assert polar.gram_sums(640, 6400) == large


def test_gram_sums_of_one_row():
    """It is computed in float32, whose Gram form takes one sum less."""
    assert jm.PolarExpress(5, dtype="float16", form="gram").gram_sums(1, 96) == 2


# --- published tables -----------------------------------------------------------------


@pytest.mark.parametrize("name", coefficients.TABLES)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_named_tables_equal_the_oracle(rng, x64, name, form):
    x = rng.standard_normal((9, 14))
    polar = jm.NewtonSchulz(None, coefficients=name, dtype="float64", form=form)
    assert polar.steps == len(polar.table())
    expected = oracle.polar(x, polar.table(), 1.0, 1e-7)
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
NOT_COUNTS = [0, -3, 1001, 5.0, True, "5", float("nan"), jnp.asarray(5)]
NOT_CHOICES = ["l2", None, 1, ["plain"], np.zeros(2)]
NOT_DTYPES = ["int8", "float8_e4m3fn", "bf16", 5, [], jnp.int32, "f4,f4"]


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
    text = re.escape(f"dtype={value!r}; expected bfloat16, float16, float32, float64")
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
        ({"form": "gram"}, "expected dtype=float16 or float32, or form="),
        ({"symmetric": "kernel", "dtype": "float32"}, "expected dtype=bfloat16"),
        ({"coefficients": (2, 0, -1)}, "b not 0"),
        ({"coefficients": (2, np.nan, 1)}, "nan"),
        ({"coefficients": (1e-40, 1, 1)}, "1e-6"),
        ({"coefficients": (1, 1e-7, 1)}, "c / b"),
        ({"coefficients": (1.5, 1e-4, -0.5), "dtype": "float16"}, "dtype=bfloat16"),
        ({"coefficients": (0.01, 1.0, -0.2), "dtype": "float16"}, "0.1 to 100"),
        ({"coefficients": [(1, 2, 3)] * 2, "steps": 3}, "steps=3 .* from 1 to 2"),
        ({"coefficients": "you", "steps": 6}, "steps=6 .*'you'.* from 1 to 5"),
        ({"coefficients": "kimi"}, "coefficients='kimi'; expected one of 'jordan', "),
        (
            {"coefficients": [(1.0, 2.0)]},
            r"of shape \(1, 2\); expected one \(",
        ),
        ({"coefficients": []}, "expected one"),
        ({"coefficients": None}, "coefficients=None"),
        ({"coefficients": [("a", 1, 2)]}, "of shape unknown"),
        ({"coefficients": [(1, 2, 3), (1, 2)]}, "of shape unknown"),
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
    with pytest.raises(ValueError, match="jax_enable_x64"):
        make(dtype="float64")(x)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        make(dtype=None)(x.astype(jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="form='gram'"):
        make(dtype=None, form="gram")(x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="symmetric='kernel'"):
        make(dtype=None, symmetric="kernel")(x)
    with pytest.raises(ValueError, match=r"eps is .*expected a finite number"):
        jax.jit(lambda eps: make(eps=eps)(x))(jnp.ones(3))
