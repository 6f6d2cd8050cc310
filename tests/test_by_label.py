"""Labels: in `optax.multi_transform`, from functions, and for masks of weight decay."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
import jax_muon.types
from examples import nanochat_schedules
from jax_muon.recipes import VERSIONS
from tests import trees
from tests.matrices import reader
from tests.recipes import ON_SPHERES, RECIPES

SHAPES = {"wte": (16, 6), "up": {"kernel": (6, 24), "bias": (24,)}, "down": (24, 6)}
RULES = {"wte": "adamw", "?*": "muon"}
ADAMW = jm.adamw(1e-2)


def steps(tx):
    start, *grads = (trees.normal(SHAPES, seed) for seed in range(3))
    return trees.run(tx, start, grads)[1]


POLAR = jm.NewtonSchulz(dtype="float32")


def chain(matrices):
    """That of `jax_muon.muon` without decay."""
    on_matrices = optax.chain(
        jm.orthogonalize(POLAR),
        jm.scale_by_shape("original"),
        optax.scale_by_learning_rate(0.02),
    )
    return optax.chain(
        jm.scale_by_momentum(0.95), jm.as_matrices(on_matrices, matrices)
    )


# --- a chain in optax.multi_transform -------------------------------------------------


@pytest.mark.parametrize("by", ["the whole reading", "a function of the part"])
@pytest.mark.parametrize("splits", [None, {"up/kernel": jm.Split(("a", "b"))}])
def test_a_chain_in_multi_transform(by, splits):
    """The same as the recipe, bit for bit."""
    params = trees.normal(SHAPES)
    whole = jm.find_matrices(params, rules=RULES, splits=splits)
    part = functools.partial(jm.find_matrices, rules={"?*": "muon"}, splits=splits)
    matrices = whole if by == "the whole reading" else part
    tx = optax.multi_transform({"muon": chain(matrices), "adamw": ADAMW}, whole.labels)
    recipe = jm.muon(0.02, adamw=ADAMW, polar=POLAR, matrices=whole)
    chex.assert_trees_all_equal(steps(tx), steps(recipe))


# --- what matrices= takes -------------------------------------------------------------


def by_rank(value):
    """A function of the parameters that returns a tree, as optax takes it."""
    return lambda params: {
        "wte": None if isinstance(value, MuonDimensionNumbers) else "adamw",
        "up": {"kernel": value, "bias": None},
        "down": value,
    }


@pytest.mark.parametrize("value", ["muon", MuonDimensionNumbers()], ids=str)
def test_functions_that_return_labels_or_dimension_numbers(value):
    make = functools.partial(jm.muon, 0.02, adamw=ADAMW, dtype="float32")
    found, expected = (steps(make(matrices=x)) for x in (by_rank(value), RULES))
    chex.assert_trees_all_equal(found, expected)
    by_rules = make(matrices=lambda params: RULES)
    chex.assert_trees_all_equal(steps(by_rules), expected)


def test_readings_can_be_hashed():
    """Equal ones are equal static arguments."""
    read = reader(RULES, splits={"up/kernel": jm.Split({"a": 8, "b": 16})})
    one, two = (read(trees.normal(SHAPES, seed)) for seed in (0, 1))
    assert one is not two and {one: 1}[two] == 1
    other = reader(RULES)(trees.normal(SHAPES))
    assert hash(other) != hash(one)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def count(matrices):
        traced.append(matrices)
        return len(matrices)

    assert count(one) == count(two) == 4 and len(traced) == 1


def test_types_that_are_returned():
    matrices = jm.find_matrices(trees.normal(SHAPES), rules=RULES)
    assert isinstance(matrices["down"], jax_muon.types.Parameter)
    assert isinstance(matrices["down"].axes, jax_muon.types.MatrixAxes)
    described = jm.describe(optax.sgd(0.1), trees.normal(SHAPES))
    assert isinstance(described, jax_muon.types.Description)
    tx = jm.on_mesh(optax.sgd(0.1), jax.make_mesh((1,), "x"))
    step = jm.make_train_step(lambda *x: 0.0, tx)
    assert isinstance(step, jax_muon.types.TrainStep)


# --- masks of weight decay ------------------------------------------------------------

MASKS = {
    "a tree": {"wte": True, "up": {"kernel": False, "bias": True}, "down": True},
    "a prefix": {"wte": True, "up": False, "down": True},
    "a function": lambda params: jax.tree.map(lambda x: x.shape != (6, 24), params),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [x for x in RECIPES if x not in {*ON_SPHERES, "teon"}])
def test_masks_are_about_whole_parameters(name, mask):
    """Parts of a kernel that is split follow its entry; others decay as without."""
    splits = {"up/kernel": jm.Split(("a", "b")), "up/kernel/a": jm.Split.heads(2)}
    read = reader(RULES, splits=splits)
    make = functools.partial(RECIPES[name], matrices=read, polar=jnp.tanh)
    decayed, still = (steps(make(weight_decay=x)) for x in (0.5, 0.0))
    found = steps(make(weight_decay=0.5, weight_decay_mask=MASKS[mask]))
    np.testing.assert_array_equal(found["up"]["kernel"], still["up"]["kernel"])
    np.testing.assert_array_equal(found["down"], decayed["down"])
    assert trees.distance(still["up"]["kernel"], decayed["up"]["kernel"]) > 1e-4
    assert trees.distance(still["down"], decayed["down"]) > 1e-4


def test_a_mask_of_all_parameters_where_others_are_absent():
    """In multi_transform a recipe sees some parameters; no entry is one too many."""
    mask = jax.tree.map(lambda shape: True, SHAPES, is_leaf=lambda x: type(x) is tuple)
    labels = {"wte": "adamw", "up": "adamw", "down": "muon"}
    recipe = jm.muon(0.1, matrices={"down": "muon"}, weight_decay_mask=mask)
    tx = optax.multi_transform({"muon": recipe, "adamw": ADAMW}, labels)
    assert steps(tx)["down"].shape == (24, 6)


# --- nanochat's schedules -------------------------------------------------------------


@pytest.mark.parametrize("steps", [1000, 3001])
def test_schedules_are_those_of_nanochats_trainer(steps):
    """Its functions, by hand, at every step."""
    down = steps - round(0.65 * steps)
    momentum = {
        "2026-01": lambda t: 0.85 + 0.1 * min(t / 300, 1),
        "2026-07": lambda t: (
            0.85 + 0.12 * t / 400
            if t < 400
            else 0.97 - 0.07 * max(t - down, 0) / (steps - down)
        ),
    }
    decay = {
        "2026-01": lambda t: 0.2 * (1 - t / steps),
        "2026-07": lambda t: 0.1 * (1 + np.cos(np.pi * t / steps)),
    }
    momentum["2026-03"], decay["2026-03"] = momentum["2026-07"], decay["2026-07"]

    def rate(t):
        left = min((steps - t) / (steps - down), 1)
        return min((t + 1) / 40, left + 0.05 * (1 - left))

    t = jnp.arange(steps)
    for version in VERSIONS:
        for found, expected in (
            (nanochat_schedules.learning_rate(1.0, steps), rate),
            (nanochat_schedules.momentum(steps, version), momentum[version]),
            (nanochat_schedules.weight_decay(0.2, steps, version), decay[version]),
        ):
            by_hand = [expected(int(i)) for i in t]
            np.testing.assert_allclose(jax.vmap(found)(t), by_hand, atol=1e-6)


def test_nanochats_optimizer_of_july():
    """First steps of 1/40 of the rates: in elements for AdamW, in the norm for Muon."""
    params = trees.normal(
        {"wte": (32, 16), "lm_head": (16, 32), "up": (16, 16), "b": (16,)}
    )
    rules = {"wte": "embedding", "lm_head": "head", "up": "muon"}
    tx = nanochat_schedules.july_2026(1000, 192, rules)
    updates, _ = tx.update(
        params, tx.init(params), jax.tree.map(jnp.zeros_like, params)
    )
    for name, rate in (("wte", 0.3 * 2), ("lm_head", 0.008 * 2), ("b", 0.005)):
        np.testing.assert_allclose(jnp.abs(updates[name]), rate / 40, rtol=1e-4)
    assert float(jnp.linalg.norm(updates["up"])) == pytest.approx(
        0.02 / 40 * 4, rel=0.3
    )
