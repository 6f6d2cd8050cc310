"""keep_residual: rounded parameters with their residual are what float32 would be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from jax_muon.transforms.keep_residual import _unit, _whole
from tests import trees
from tests.matrices import reader
from tests.recipes import RECIPES

BOTH = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def whole(params, residual):
    """Parameters with their residuals, in float64."""
    with_residual = jax.tree.map(_whole, params, residual)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), with_residual)


def every_number(dtype):
    """All finite numbers of 16 bits, and a row of them for each kind of gradient."""
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    rng, wide = np.random.default_rng(0), numbers.astype(np.float32)
    half = np.abs(wide) * jnp.finfo(dtype).eps / 2
    others, noise = rng.permutation(wide) / 2, rng.normal(size=wide.shape)
    kinds = [
        0 * wide,
        half * noise / 100,  # far below half a distance
        half * noise * 8,  # some distances
        wide * rng.uniform(-0.9, 2.9, size=wide.shape),  # across zero
        others,  # of any exponent
        wide / 2 - others,  # to any number
    ]
    grads = np.clip(kinds, -(2.0**127), 2.0**127).astype(np.float32)
    return np.tile(numbers, (len(kinds), 1)), jnp.asarray(grads)


@BOTH
@pytest.mark.parametrize("residual", ["int8", "int16"])
def test_bit_by_bit_for_every_number(dtype, residual):
    """In one program, and where apply_updates is another."""
    p, grads = every_number(dtype)
    tx = jm.keep_residual(optax.sgd(1.0), residual)
    state = tx.init(jnp.asarray(p))
    most = jnp.iinfo(residual).max
    bits = np.random.default_rng(1).integers(-most, most + 1, size=p.shape)
    state = state._replace(residual=jnp.asarray(bits, residual))

    @jax.jit
    def step(grads, state, p):
        updates, new = tx.update(grads, state, p)
        return updates, new.residual, optax.apply_updates(p, updates)

    updates, kept, after = step(grads, state, jnp.asarray(p))
    assert updates.dtype == after.dtype == p.dtype
    apart = optax.apply_updates(p, updates)
    np.testing.assert_array_equal(apart.view(jnp.uint16), after.view(jnp.uint16))

    # Half a unit, or almost a whole one at the end of its range; and 2^-8 of a step
    # that crosses zero, halves or doubles (2^-11 in float16).
    want = whole(jnp.asarray(p), state.residual) - np.asarray(grads, np.float64)
    finite = np.isfinite(np.asarray(after, np.float32))
    assert np.mean(finite) > 0.95
    error = np.abs(whole(after, kept) - want)
    allowed = 1.02 * np.asarray(_unit(after, residual), np.float64)
    allowed += np.abs(want) * 2.0**-24  # float32
    exact, size = p.astype(np.float64), np.abs(np.asarray(grads, np.float64))
    ratio = want / np.where(exact == 0, 1, exact)
    near = (ratio > 0.501) & (ratio < 1.99)
    allowed += np.where(near, 0, size * float(jnp.finfo(dtype).eps))
    assert np.all((error <= allowed)[finite])
    if (dtype, residual) != ("float16", "int16"):  # no gradient changes nothing
        still = finite[0] & (np.abs(want[0]) > 2.0**-90)
        np.testing.assert_array_equal(error[0][still], 0)


@BOTH
def test_what_is_not_finite_reaches_the_parameter_and_no_other(dtype):
    nan, inf = jnp.nan, jnp.inf
    p = jnp.asarray([1.0, 1.0, 1.0, inf, nan, 2.0], dtype)
    grads = jnp.asarray([nan, inf, -inf, 0.0, 0.0, 0.0])
    tx = jm.keep_residual(optax.sgd(1.0))
    updates, state = tx.update(grads, tx.init(p), p)
    got = optax.apply_updates(p, updates).astype(jnp.float32)
    np.testing.assert_array_equal(got[jnp.array([0, 1, 2, 5])], [nan, -inf, inf, 2])
    assert not np.isfinite(got[3:5]).any() and state.residual[5] == 0


# --- a run is float32's ---------------------------------------------------------------

SHAPES = {"wte": (30, 8), "0/qkv": (8, 24), "1/qkv": (8, 24), "up": (8, 16), "b": (8,)}
LABELS = {"wte": "adamw", "?*": "muon"}
QKV, PAIRS = {"qkv": jm.Split(("q", "k", "v"))}, {"{i}/qkv/q": 2, "{i}/qkv/k": 2}
JOINED = {"matrices": reader(LABELS, splits=QKV, joins=PAIRS)}
SPHERES = {"matrices": LABELS, "dtype": "float32", "adamw": optax.adam(1e-4)}
STILL = SPHERES | {"weight_decay": 0.0}
RUNS = {
    "joins": lambda keep: keep(RECIPES["teon"](learning_rate=1e-4, **STILL | JOINED)),
    "int8": lambda keep: keep(
        RECIPES["moonlight"](learning_rate=1e-3, mu_dtype="int8", **STILL)
    ),
    "on spheres": lambda keep: keep(RECIPES["muonh"](learning_rate=1e-3, **SPHERES)),
    "in MultiSteps": lambda keep: optax.MultiSteps(keep(optax.adam(1e-3)), 2),
    "around skip_nonfinite": lambda keep: keep(jm.skip_nonfinite(optax.adam(1e-4))),
}


def start(dtype):
    """Parameters far enough from zero that none comes near it."""
    drawn = trees.normal(SHAPES, 0, "bfloat16", 0.1)
    return jax.tree.map(lambda x: (x + jnp.sign(x)).astype(dtype), drawn)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_moves_as_in_float32(name):
    """To a unit for each step, where a bfloat16 alone stays behind."""
    steps, direction = 20, trees.normal(SHAPES)
    # In pairs of one mean: MultiSteps of optax 0.2.6 accumulates in bfloat16.
    noise = [trees.normal(SHAPES, 1 + i // 2) for i in range(steps)]
    grads = [optax.tree.cast(optax.tree.add(direction, x), "bfloat16") for x in noise]
    _, want, _ = trees.run(RUNS[name](lambda tx: tx), start("float32"), grads)
    tx = RUNS[name](jm.keep_residual)
    _, params, state = trees.run(tx, start("bfloat16"), grads)
    chex.assert_trees_all_equal_dtypes(params, start("bfloat16"))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))
    got = whole(params, optax.tree.get(state, "residual"))
    moved = max(np.abs(want[path] - start("float32")[path]).max() for path in want)
    assert moved > 2.0**-10
    # A unit is at most 2^-15 here, and half of one is lost in a step.
    chex.assert_trees_all_close(got, want, atol=steps * 2.0**-16, rtol=0)


# --- other dtypes, describe, errors ---------------------------------------------------


MIXED = {"up": jnp.ones((8, 16), "bfloat16"), "wide": jnp.ones((8, 16))}
MIXED |= {"ids": jnp.arange(3)}


def test_others_have_none_and_describe_shows_it():
    groups = {"frozen": optax.set_to_zero()}
    rules = {"wide": "muon", "up": "muon", "ids": "frozen"}
    plain = RECIPES["moonlight"](learning_rate=1e-3, groups=groups, matrices=rules)
    tx, grads = jm.keep_residual(plain), jax.tree.map(jnp.ones_like, MIXED)
    updates, _ = tx.update(grads, tx.init(MIXED), MIXED)
    expected, _ = plain.update(grads, plain.init(MIXED), MIXED)
    chex.assert_trees_all_equal(updates["wide"], expected["wide"])
    found = jm.describe(tx, MIXED)
    by_path = {leaf.parameter.path: leaf for leaf in found.parameters}
    kept = {path: leaf.residual for path, leaf in by_path.items()}
    assert kept == {"up": "int8", "wide": None, "ids": None}
    assert by_path["up"].bytes == 8 * 16 * 2
    assert by_path["up"].state_bytes == 8 * 16 * (4 + 1)  # momentum and residual
    said = "residuals in int8; without, not bfloat16 or float16: ids, wide"
    assert said in str(found)


def test_a_run_without_residual_goes_on_with_one():
    """In the way that the error names."""
    plain = RECIPES["moonlight"](
        learning_rate=1e-3, mu_dtype="float32", matrices=LABELS
    )
    params = start("bfloat16")
    _, old = plain.update(params, plain.init(params), params)
    tx = jm.keep_residual(plain)
    with pytest.raises(ValueError, match=r"_replace\(inner_state=state\)"):
        tx.update(params, old, params)
    _, new = tx.update(params, tx.init(params)._replace(inner_state=old), params)
    counts = optax.tree.get_all_with_path(new, "count")
    assert {int(count) for _, count in counts} == {2}

    other = params | {"up": jnp.ones((8, 16))}
    with pytest.raises(ValueError, match="residual 'up': int8 of shape"):
        tx.update(other, tx.init(params), other)
