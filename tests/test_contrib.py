"""`jax_muon.contrib.muon` beside `optax.contrib.muon`.

optax's own tests of its optimizer run on it in tests/outside/test_optax.py.
"""

import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon import contrib, on_mesh
from tests import trees
from tests.mesh.case import mesh_of

SHAPES = {
    **{"embed": (20, 12), "wide": (12, 32), "tall": (32, 12), "square": (16, 16)},
    **{"stack": (3, 8, 12), "conv": (3, 3, 4, 8), "bias": (12,)},
}
NUMBERS = {
    **{"embed": None, "wide": MuonDimensionNumbers(), "bias": None},
    **{"tall": MuonDimensionNumbers(1, 0), "square": MuonDimensionNumbers()},
    **{"stack": MuonDimensionNumbers(1, 2), "conv": MuonDimensionNumbers((0, 1, 2), 3)},
}
DECAYS = {name: name != "tall" for name in SHAPES}
SETTINGS = {
    "defaults": {},
    "no nesterov": {"nesterov": False},
    "three steps": {"ns_steps": 3},
    "dion's coefficients": {"ns_coeffs": "dion"},
    "a quintic in an array, six steps": {
        "ns_coeffs": np.array([2.0, -1.5, 0.5], np.float32),
        "ns_steps": 6,
    },
    "a quintic without a cubic term": {"ns_coeffs": (1.25, 0.0, -0.25)},
    "consistent RMS": {"consistent_rms": 0.2},
    "decay with a mask": {
        **{"weight_decay": 0.1, "weight_decay_mask": DECAYS},
        "adam_weight_decay": 0.01,
    },
    "Schatten-4 norm": {"preconditioning": "schatten"},
    "dimension numbers, schedules": {
        "learning_rate": optax.linear_schedule(0.05, 0.01, 20),
        "muon_weight_dimension_numbers": lambda params: NUMBERS,
        **{"adam_learning_rate": 0.01, "adam_b1": 0.8, "adam_b2": 0.95},
        **{"eps": 1e-6, "beta": 0.9},
    },
}
two_axes = pytest.mark.filterwarnings("ignore:without muon_weight_dimension_numbers")


# Small, so that rounding of the parameters is that of what they travel.
START = trees.normal(SHAPES, 0, "float32", 0.1)


def end(tx, steps=20):
    grads = [trees.normal(SHAPES, seed) for seed in range(1, steps + 1)]
    return trees.run(tx, START, grads)[1]


@two_axes
@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_steps_are_those_of_optax(name):
    """Elements agree to 2e-6 after moving by up to 0.4, in steps of 0.02.

    The iteration raises rounding: optax in float32 is as far from itself in float64.
    """
    settings = {"learning_rate": 0.02} | SETTINGS[name]
    if "preconditioning" in settings and "preconditioning" not in arguments(
        optax.contrib.muon
    ):
        pytest.skip("optax has it since 0.2.8")
    ours, theirs = (end(f(**settings)) for f in (contrib.muon, optax.contrib.muon))
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=2e-6)


def arguments(function):
    return {
        name: (x.kind, x.default)
        for name, x in inspect.signature(function).parameters.items()
    }


def test_the_signature_is_that_of_optax():
    ours, theirs = arguments(contrib.muon), arguments(optax.contrib.muon)
    assert {name: ours[name] for name in theirs} == theirs
    assert [x for x in ours if x in theirs] == [*theirs]
    if "preconditioning" in theirs:
        assert [*ours] == [*theirs]


@two_axes
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_may_be_injected(name):
    """On one device, where every number becomes an array."""
    static = ["muon_weight_dimension_numbers"]
    static += ["ns_steps"] * (name in ("defaults", "dion's coefficients"))
    inject = optax.inject_hyperparams(contrib.muon, static_args=static)
    settings = {"learning_rate": 0.02} | SETTINGS[name]
    expected = end(contrib.muon(**settings), 3)
    found = end(inject(**settings), 3)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@two_axes
def test_injected_in_float16():
    """There optax's eps of 1e-8 is 0, and a zero gradient gives zeros all the same."""
    params = {"w": jnp.ones((4, 6), jnp.float16)}
    tx = optax.inject_hyperparams(contrib.muon)(0.02)
    updates, _ = tx.update(
        jax.tree.map(jnp.zeros_like, params), tx.init(params), params
    )
    assert not updates["w"].any()


@two_axes
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit])
def test_a_number_of_steps_that_a_table_cannot_check(wrapped):
    """Three of five quintics are an error; injected, the number is not known."""
    tx = optax.inject_hyperparams(contrib.muon)(0.02, ns_coeffs="dion", ns_steps=3)
    with pytest.raises(ValueError, match=re.escape("static_args=('ns_steps',)")):
        wrapped(tx.init)(START)
    with pytest.raises(ValueError, match="ns_steps=3; expected at least 5"):
        contrib.muon(0.02, ns_coeffs="dion", ns_steps=3).init(START)


@two_axes
@pytest.mark.parametrize("norm", ["frobenius", "schatten"])
@pytest.mark.parametrize("size", [1e6, 1e12, 1e25, 3e37])
def test_injected_with_large_gradients(norm, size):
    """Their squares are infinite in float32; the update is that of small ones."""
    settings = {"learning_rate": 0.02, "preconditioning": norm, "eps": 1e-20}
    params = trees.normal({"w": (6, 8), "tall": (8, 6)})
    large = jax.tree.map(lambda x: (x * size).astype(x.dtype), params)
    tx = optax.inject_hyperparams(contrib.muon)(**settings)
    expected, _ = tx.update(params, tx.init(params), params)
    found, _ = tx.update(large, tx.init(params), params)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


@two_axes
def test_injected_on_a_mesh():
    """There, an error says which arguments to name."""
    inject = optax.inject_hyperparams
    mesh, params = mesh_of(4), trees.normal({"w": (16, 24)})
    tx = on_mesh(inject(contrib.muon)(0.02), mesh, divide="data", min_size=1)
    with pytest.raises(ValueError, match=re.escape('static_args=("ns_steps", "eps")')):
        jax.eval_shape(tx.update, params, tx.init(params), params)
    tx = inject(contrib.muon, static_args=("ns_steps", "eps"))(0.02)
    expected, _ = tx.update(params, tx.init(params), params)
    tx = on_mesh(tx, mesh, divide="data", min_size=1)
    updates, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)


def test_without_dimension_numbers_one_warning_lists_the_matrices():
    params = trees.normal(SHAPES)
    tx = contrib.muon(0.02)
    listed = "embed, square, tall, wide. Embeddings and heads may be among them"
    with pytest.warns(UserWarning, match=listed) as seen:
        state = tx.init(params)
    assert len(seen) == 1
    tx.update(params, state, params)  # without a warning
    contrib.muon(0.02, muon_weight_dimension_numbers=NUMBERS).init(params)


def test_the_warning_says_what_became_of_a_function_that_is_injected():
    """It is called with a count, of no axes, instead of the parameters."""

    def numbers(tree):
        return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim else None, tree)

    params = {"w": jnp.ones((4, 6))}
    static = "muon_weight_dimension_numbers"
    settings = {"learning_rate": 0.02, static: numbers}
    tx = optax.inject_hyperparams(contrib.muon)(**settings)
    with pytest.warns(UserWarning, match=re.escape(f"static_args=({static!r},)")):
        tx.init(params)
    optax.inject_hyperparams(contrib.muon, static_args=static)(**settings).init(params)


def test_a_run_may_go_on_with_the_recipe():
    """Its state is that of the call on the page, and the next updates are equal."""
    params, numbers = trees.normal(SHAPES), {"muon_weight_dimension_numbers": NUMBERS}
    tx = contrib.muon(0.02, weight_decay=0.1, **numbers)
    recipe = jm.muon(
        0.02,
        matrices=NUMBERS,
        weight_decay=0.1,
        bias_correction=True,
        polar=jm.NewtonSchulz(5, eps=1e-8, dtype="float32"),
        adamw=optax.adamw(0.02, weight_decay=0.0, nesterov=True),
    )
    state = tx.update(params, tx.init(params), params)[1]
    chex.assert_trees_all_equal(
        *(x.update(params, state, params) for x in (tx, recipe))
    )


MATRIX = {"w": jnp.ones((4, 6))}
REFUSED = {
    "preconditioning='aol'; expected 'frobenius' or 'schatten'": lambda: contrib.muon(
        0.1, preconditioning="aol"
    ),
    "adaptive=True; expected False": lambda: contrib.muon(0.1, adaptive=True),
    "ns_coeffs='jordan'; expected one of": lambda: contrib.muon(
        0.1, ns_coeffs="jordan"
    ),
    "eps=0.0; expected a finite number above 0": lambda: contrib.muon(
        0.1, eps=0.0
    ).init(MATRIX),
    "ns_steps=3; expected at least 5": lambda: contrib.muon(
        0.1, "dion", ns_steps=3
    ).init(MATRIX),
    "'w' of shape (4, 6): with dtype complex64 it cannot be": lambda: contrib.muon(
        0.1
    ).init({"w": jnp.ones((4, 6), "complex64")}),
    "the state is not one of this optimizer": lambda: contrib.muon(0.1).update(
        MATRIX, optax.contrib.muon(0.1).init(MATRIX), MATRIX
    ),
}


@two_axes
@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        REFUSED[words]()
