"""Whole optimizers: trajectories against NumPy, composition, what optax asks for."""

import contextlib
import dataclasses
import functools
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
from jax_muon import contrib
from tests import oracle, trees
from tests.matrices import reader
from tests.recipes import NAMES, ON_SPHERES, RECIPES

CHEAP = jnp.tanh  # instead of a polar factor, which is slow to compile
every_recipe = pytest.mark.parametrize("name", RECIPES)


SHAPES = {  # TEON joins q and q
    "wte": (16, 6),
    "blocks": [{"q": (6, 6), "up": (6, 24)}, {"q": (6, 6), "down": (24, 6)}],
    "norm": {"scale": (6,)},
}
model = functools.partial(trees.normal, SHAPES)


# --- mathematics: the matrices of a recipe in NumPy, in PyTorch's orientation ---------

# TEON, which joins them, is in tests/parity and in tests/test_frozen.py.
BY_HAND = RECIPES | {
    "nanochat of 3 steps": functools.partial(RECIPES["nanochat"], ns_steps=3),
    "nanochat of March": functools.partial(RECIPES["nanochat"], version="2026-03"),
}
BY_HAND.pop("teon")


@pytest.mark.parametrize("name", BY_HAND)
def test_matrices_by_hand(x64, name):
    """Wide, tall, square, a row, a column, and one that starts at zero."""
    on_spheres = name in ON_SPHERES
    lr, momentum, decay = oracle.RATES
    rates = {"learning_rate": lr, "momentum": momentum, "weight_decay": decay}
    if on_spheres:
        rates = {"learning_rate": lambda t: 30 * lr(t), "momentum": momentum}
    tx = BY_HAND[name](**rates, matrices=reader(), dtype="float64")
    shapes = {"a": (5, 7), "b": (7, 5), "c": (6, 6), "row": (1, 4), "column": (4, 1)}
    start = trees.normal(shapes, 0, "float64") | {"zero": jnp.zeros((6, 4))}
    shapes |= {"zero": (6, 4)}
    noise = [trees.normal(shapes, seed, "float64") for seed in range(1, 9)]
    for each in noise:  # NorMuon lifts neurons whose updates are small
        each["row"] *= jnp.array([[1.0, 1.0, 1.0, 1e-5]])
    # One direction with it, so that the matrix gets away from zero.
    grads = jax.tree.map(lambda x: 3 * jnp.eye(*x.shape) + x, noise)
    _, params, _ = trees.run(tx, start, grads)
    for key, w in start.items():
        right, radii = (w.T, 0.0, 0.0, np.linalg.norm(w)), []
        for t, grad in enumerate(grads):
            right = oracle.step(name, t, grad[key].T, *right)
            radii.append(right[-1])
        np.testing.assert_allclose(params[key], right[0].T, rtol=0, atol=1e-12)
    if on_spheres:
        assert not radii[0] and radii[-1]  # the zero matrix reached its sphere


# --- gradients of any size ------------------------------------------------------------

MATRICES = {"0": {"q": (24, 16)}, "1": {"q": (24, 16)}, "row": (1, 9)}
WHOLE = MuonDimensionNumbers()  # a prefix of the tree


def sized(recipe, **settings):
    """The recipe, given the dtype of its iteration."""
    return lambda dtype: recipe(dtype=dtype, **settings)


# Without decay, which rounding switches on and off.
STILL = {name: {"weight_decay": 0.0} for name in RECIPES if name not in ON_SPHERES}
SIZED = {name: sized(recipe, **STILL.get(name, {})) for name, recipe in RECIPES.items()}
SIZED |= {
    "nanochat of March": sized(
        RECIPES["nanochat"], version="2026-03", weight_decay=0.0
    ),
    "contrib": lambda dtype: contrib.muon(0.02, muon_weight_dimension_numbers=WHOLE),
    "contrib, Schatten-4": lambda dtype: contrib.muon(
        0.02, muon_weight_dimension_numbers=WHOLE, preconditioning="schatten"
    ),
    "contrib, injected": lambda dtype: optax.inject_hyperparams(
        contrib.muon, static_args="muon_weight_dimension_numbers"
    )(0.02, muon_weight_dimension_numbers=WHOLE),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZED)
def test_a_gradient_of_any_size_takes_the_same_step(name, dtype):
    """Small ones too, as clipping makes of one matrix where another has a spike."""
    tx, grads = SIZED[name](dtype), trees.normal(MATRICES, 1)
    params, steps = trees.normal(MATRICES, 0, dtype), []
    step = jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0])
    for size in (1.0, 1e-5, 1e-8, 1e30):
        sized = jax.tree.map(lambda g, size=size: size / jnp.linalg.norm(g) * g, grads)
        steps.append(optax.tree.cast(step(optax.tree.cast(sized, dtype)), "float32"))
    # Below 2^-13 eps is 0.8 % of the norm, which the quintics raise to 9 %.
    assert all(trees.distance(x, steps[0]) < 0.12 for x in steps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZED)
def test_after_one_gradient_1300_steps_of_zeros_are_finite(name, dtype):
    """As for an expert without tokens: squares of its momentum underflow on the way."""
    tx = SIZED[name](dtype)
    params, grads = (trees.normal(MATRICES, seed, dtype) for seed in (0, 1))

    def finite(tree):
        return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()

    def step(state, share):  # of the gradient
        given = jax.tree.map(lambda g: share.astype(g.dtype) * g, grads)
        updates, state = tx.update(given, state, params)
        return state, finite((updates, state))

    shares = jnp.zeros(1301).at[0].set(1)
    state, all_finite = jax.jit(lambda state: jax.lax.scan(step, state, shares))(
        tx.init(params)
    )
    assert all_finite.all()
    assert optax.tree.norm(optax.tree.get_all_with_path(state, "mu")[0][1]) < 1e-28


# --- what optax asks of an optimizer; convergence is in tests/outside/test_optax.py ---


def freezing(read):
    """The reading with `scale` in a group of its own."""

    def with_frozen(params):
        found = read(params)
        path = "norm/scale"
        frozen = dataclasses.replace(found[path], label="frozen")
        return dataclasses.replace(found, parameters={**found, path: frozen})

    return with_frozen


@every_recipe
def test_every_recipe_passes_its_arguments_on(name):
    seen = []

    class Polar(list):
        """One that counts as False, as it is empty."""

        def __call__(self, x):
            seen.append(x.shape)
            return x

    tx = RECIPES[name](
        polar=Polar(),
        mu_dtype="bfloat16",
        adamw=optax.contrib.prodigy(0.1),
        groups={"frozen": optax.set_to_zero()},
        matrices=freezing(RECIPES[name].keywords["matrices"]),
    )
    params = model()
    state = jax.eval_shape(tx.init, params)
    jax.eval_shape(tx.update, params, state, params)
    assert seen
    mu = state.inner_states["muon"].inner_state[0].mu
    assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.dtype(jnp.bfloat16)}
    of_rest = state.inner_states["adamw"].inner_state
    assert optax.tree.get(of_rest, "exp_avg")["wte"].shape == (16, 6)
    assert "frozen" in state.inner_states


@pytest.mark.parametrize(
    ("name", "narrow"), [("nanochat", jnp.bfloat16), ("muonh", jnp.float16)]
)
def test_narrow_gradients_are_widened_before_anything_is_computed(name, narrow):
    """As float32 gradients of the same values: decay and steps lose no bits."""
    decay = {} if name in ON_SPHERES else {"weight_decay": 0.3}
    adamw = jm.adamw(0.1, weight_decay=0.2)
    tx = RECIPES[name](polar=CHEAP, adamw=adamw, **decay)
    params, update = model(), jax.jit(tx.update)
    grads = model(0, narrow)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    results = [update(given, tx.init(params), params) for given in (grads, wide)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*results)
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-9)
    params = model(0, narrow)  # and wide gradients stay wide
    updates, _ = jax.eval_shape(tx.update, wide, tx.init(params), params)
    chex.assert_trees_all_equal_dtypes(updates, wide)


def described(recipe):
    """The text about each argument in a recipe's help."""
    args = inspect.getdoc(recipe).partition("Args:\n")[2].partition("\n\n")[0]
    pairs = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", args, re.M)
    return {name: " ".join(text.split()) for name, text in pairs}


@pytest.mark.parametrize("name", NAMES)
def test_help(name):
    """It describes every argument where it stands, and a shared one as others do."""
    recipe = getattr(jm, name)
    signature = inspect.signature(recipe)
    assert " at 0x" not in str(signature) and len(str(signature)) < 1000
    texts, others = described(recipe), described(jm.muon)
    assert [*texts] == [*signature.parameters]
    for argument in ("adamw", "ns_steps", "dtype", "polar", "mu_dtype", "groups"):
        assert texts[argument] == others[argument]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(jm.moonlight, (0.2, 0.2)), (jm.nanochat, (64**-0.5, 4**-0.5))],
)
def test_first_steps_of_lora(recipe, expected):
    """Root mean squares of both factors; docs/parameters.md has those of moonlight."""
    params = trees.normal({"lora_a": (64, 4), "lora_b": (4, 96)})
    matrices = {"?*": "muon"}
    tx = recipe(1.0, matrices=matrices, weight_decay=0.0, polar=jm.ExactPolar())
    updates, _ = tx.update(params, tx.init(params), params)
    found = [float(jnp.sqrt(jnp.mean(updates[name] ** 2))) for name in params]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_recipe
def test_inject_hyperparams(name):
    """All numbers are data, and no default is static; only functions must be."""
    recipe, params = RECIPES[name], model()
    inject = optax.inject_hyperparams(recipe, static_args=("polar", "matrices"))
    jax.eval_shape(inject().init, params)
    tx = inject(learning_rate=optax.constant_schedule(0.5), polar=CHEAP)
    state = tx.init(params)
    numbers = {"momentum": 0.5, "weight_decay": 0.3, "beta2": 0.7}
    numbers = {k: x for k, x in numbers.items() if k in state.hyperparams}
    state.hyperparams.update({k: jnp.asarray(x) for k, x in numbers.items()})
    plain = recipe(learning_rate=0.5, **numbers, polar=CHEAP)
    expected_state = plain.init(params)
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    for seed in (1, 2):
        grads = model(seed)
        updates, state = update(grads, state, params)
        expected, expected_state = plain_update(grads, expected_state, params)
        chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-6)


def test_trees_without_matrices():
    """As in fine-tuning of a few parameters: AdamW has all of them, with a warning."""
    tx = RECIPES["nanochat"](adamw=optax.sgd(0.5))
    for params in ({"b": jnp.ones(3)}, {"w": jnp.ones((0, 4))}, jnp.ones(3), {}):
        said = "no parameter is a matrix: all .*adamw= of a recipe"
        is_dict = isinstance(params, dict)
        said += "$" if is_dict else ".*one vector, .*: unflatten before"
        warns = pytest.warns(UserWarning, match=said)
        with warns if jax.tree.leaves(params) else contextlib.nullcontext():
            state = tx.init(params)
        updates, _ = tx.update(params, state, params)
        chex.assert_trees_all_close(updates, jax.tree.map(lambda p: -0.5 * p, params))


# --- groups and labels ----------------------------------------------------------------


def test_empty_parameters():
    params = trees.normal({"w": (2, 3), "none": (0, 3), "stack": (0, 2, 2)})
    tx = RECIPES["nanochat"](polar=CHEAP, matrices={"w": "muon"})
    updates, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


def test_groups_of_the_user_and_one_reading():
    """Two rates for matrices, a frozen bias; the tree is read once a trace."""
    shapes = {"early": (4, 6), "late": (3, 4, 2, 3), "frozen": (6,), "bias": (3,)}
    params, grads, seen = trees.normal(shapes), trees.normal(shapes, 1), []

    def read(params):
        seen.append(1)
        by_heads = MuonDimensionNumbers(1, (2, 3))
        rules = {"early": "early", "frozen": "frozen", "late": by_heads}
        return jm.find_matrices(params, rules=rules)

    early = jm.as_matrices(jm.orthogonalize(jm.ExactPolar()), {"early": "muon"})
    groups = {"early": optax.chain(early, optax.scale(-0.25))}
    tx = jm.muon(
        0.5,
        matrices=read,
        adamw=optax.sgd(1.0),
        groups=groups | {"frozen": optax.set_to_zero()},
        polar=jm.ExactPolar(),
        adjust_lr_fn=None,
    )
    state = jax.jit(tx.init)(params)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    assert len(seen) == 2
    norms = [jnp.linalg.norm(updates[name]) for name in ("early", "late")]
    # (4, 6), and three of (4, 6).
    np.testing.assert_allclose(norms, [0.25 * 4**0.5, 0.5 * 12**0.5], rtol=1e-5)
    np.testing.assert_array_equal(updates["frozen"], 0)
    np.testing.assert_array_equal(updates["bias"], -grads["bias"])


@every_recipe
def test_a_zero_gradient_can_be_differentiated(name):
    """As in meta-learning, and in the first step of LoRA: 0 instead of NaN."""
    tx, params = RECIPES[name](dtype="float32"), trees.normal(SHAPES, 0)

    def moved(grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(x) for x in jax.tree.leaves(updates["blocks"]))

    slopes = jax.jit(jax.grad(moved))(jax.tree.map(jnp.zeros_like, params))["blocks"]
    assert {float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(slopes)} == {0.0}


@pytest.mark.parametrize("name", ["muon", "nanochat", "normuon", "moonlight"])
def test_without_decay_an_update_needs_no_parameters(name):
    still = {"weight_decay": 0.0, "adamw": jm.adamw(0.1, weight_decay=0.0)}
    params, tx = model(), RECIPES[name](**still, polar=CHEAP)
    with_params = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal(tx.update(params, tx.init(params)), with_params)
    tx = RECIPES[name](weight_decay=0.1)
    with pytest.raises(ValueError, match=r"unless it is 0\.0, needs the parameters"):
        tx.update(params, tx.init(params))
