"""`jax_muon.adamw`: optax's numbers, also where float16 parameters have no eps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests import trees
from tests.recipes import RECIPES

SHAPES = {"wte": (8, 16), "up": (16, 32), "bias": (32,)}
RULES = {"wte": "adamw", "?*": "muon"}


def falling(count):
    return 0.1 / (1 + count)


@pytest.mark.parametrize("decay", [0.0, 0.1, falling], ids=["none", "0.1", "falling"])
def test_float32_has_the_numbers_of_optax(decay):
    """Bit for bit, eager and with a mask."""
    start, *grads = (trees.normal(SHAPES, seed) for seed in range(4))
    mask = {"wte": True, "up": False, "bias": True}
    rates = optax.linear_schedule(0.1, 0.01, 3), 0.8, 0.95, 1e-10
    ours = jm.adamw(*rates, decay, mask=mask, mu_dtype="bfloat16")
    theirs = optax.adamw(*rates, weight_decay=decay, mask=mask, mu_dtype="bfloat16")
    ends = [trees.run(tx, start, grads)[1] for tx in (ours, theirs)]
    chex.assert_trees_all_equal(*ends)


def zero(_):
    return jax.tree.map(jnp.zeros_like, trees.normal(SHAPES))


def unused_rows(seed):
    """A batch that looks up the first row alone."""
    grads = trees.normal(SHAPES, seed, "float32", 1e-3)
    return grads | {"wte": grads["wte"].at[1:].set(0.0)}


def recipe(name):
    """A recipe with `adamw`, computed in float32."""
    given = {"matrices": RULES, "dtype": "float32", "mu_dtype": "float32"}
    adamw = jm.adamw(1e-2, 0.8, 0.95, 1e-10, weight_decay=0.0)
    return RECIPES[name](learning_rate=0.02, adamw=adamw, **given)


def ends(name, gradient):
    """Parameters after 20 steps: of float32, float16, and that with a residual.

    And how many steps of float16 were skipped.
    """
    start = trees.normal(SHAPES, 0, "float16")
    grads = [gradient(seed) for seed in range(1, 21)]
    narrow = [optax.tree.cast(x, "float16") for x in grads]
    wide = [optax.tree.cast(x, "float32") for x in narrow]
    tx = recipe(name)
    _, expected, _ = trees.run(tx, optax.tree.cast(start, "float32"), wide)
    _, found, state = trees.run(jm.skip_nonfinite(tx), start, narrow)
    _, kept, _ = trees.run(jm.keep_residual(tx), start, narrow)
    return expected, found, kept, int(state.skipped)


@pytest.mark.parametrize("gradient", [zero, unused_rows])
@pytest.mark.parametrize("name", ["nanochat", "muon", "moonlight", "normuon", "muonh"])
def test_float16_parameters(name, gradient):
    """Finite, with no step skipped, and within float16's rounding of float32.

    A number has 11 bits: 20 steps may each round by 2^-11 of it. With a residual of 8
    bits more the end is float32's, rounded once.
    """
    expected, found, kept, skipped = ends(name, gradient)
    assert skipped == 0
    for path, x in expected.items():
        assert found[path].dtype == kept[path].dtype == "float16"
        size = np.abs(x) + 0.05
        assert np.max(np.abs(found[path] - x) / size) < 20 * 2**-11, path
        assert np.max(np.abs(kept[path] - x) / size) < 2 * 2**-11, path


def test_another_transform_for_float16_parameters_is_a_warning():
    params = trees.normal(SHAPES, 0, "float16")
    tx = RECIPES["nanochat"](adamw=optax.adamw(1e-3), matrices=RULES)
    with pytest.warns(
        UserWarning, match=r"'adamw' keeps '.*mu.*' in float16.*jax_muon"
    ):
        tx.init(params)
    jm.keep_residual(tx).init(params)
    RECIPES["nanochat"](adamw=optax.sgd(1e-3), matrices=RULES).init(params)
