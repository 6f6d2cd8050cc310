"""Whole optimizers: trajectories against NumPy, composition, what optax asks for."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jax_muon as jm
from jax_muon.polar.coefficients import NEWTON_SCHULZ
from tests import oracle
from tests.reading import reader
from tests.recipes import ON_SPHERES, RECIPES

# A (6, 24) that is joined with itself, so that TEON joins something.
PAIRS = functools.partial(jm.teon, matrices=reader(joins={"blocks/{i}/up": 2}))
ALL = RECIPES | {"teon": PAIRS}
DECAYING = {name: recipe for name, recipe in ALL.items() if name not in ON_SPHERES}
every_recipe = pytest.mark.parametrize("recipe", DECAYING.values(), ids=DECAYING)


def model(dtype=jnp.float32):
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape).astype(dtype)

    return {
        "wte": normal(16, 6),
        "blocks": [{"q": normal(6, 6), "up": normal(6, 24)}, {"down": normal(24, 6)}],
        "norm": {"scale": normal(6)},
    }


def targets(params):
    return jax.tree.map(lambda p: 0.5 * p[::-1], params)


def loss(params):
    squares = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, TARGETS)
    return sum(jax.tree.leaves(squares))


TARGETS = targets(model())


# --- mathematics: the matrices of a recipe in NumPy, in PyTorch's orientation ---------


def step_nanochat(w, g, m, v, t, *, later):
    """One step of nanochat, in its order, with a schedule for every rate."""
    lr, mu, wd = 0.02 / (1 + t), 0.85 + 0.01 * t, 0.1 / (1 + t)
    beta2 = 0.9 if later else 0.95
    m = m + (1 - mu) * (g - m)
    u = g + mu * (m - g)
    if later:
        u = oracle.equilibrate_rows(u)
    table = jm.polar_express_coefficients(5)
    x = oracle.polar(u, table, 1.01 if later else 1.02, 1e-6)
    if later:
        x = x * min(x.shape) ** 0.5 / np.linalg.norm(x)
    out, fan_in = w.shape
    x, v = oracle.normuon(x, v, beta2, axis=1 if out >= fan_in else 0)
    lr = lr * max(1, out / fan_in) ** 0.5
    return w - lr * (x + wd * w * (x * w >= 0)), m, v


@pytest.mark.parametrize("later", [False, True], ids=["seed", "later"])
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)], ids=str)
def test_nanochat_matrices(rng, x64, later, shape):
    recipe = RECIPES["nanochat later" if later else "nanochat"]
    tx = recipe(
        lambda t: 0.02 / (1 + t),
        lambda t: 0.85 + 0.01 * t,
        lambda t: 0.1 / (1 + t),
        matrices=reader("muon"),  # rows too
        dtype="float64",
    )
    w = rng.standard_normal(shape)
    params = {"w": jnp.asarray(w)}
    state = tx.init(params)
    w, m, v = w.T, 0.0, 0.0
    for t in range(4):
        g = rng.standard_normal(shape)
        w, m, v = step_nanochat(w, g.T, m, v, t, later=later)
        updates, state = tx.update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], w.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["muon", "moonlight", "normuon"])
def test_other_recipes_matrices(rng, x64, name):
    shape = (5, 7)
    tx = RECIPES[name](0.02, 0.9, 0.1, dtype="float64")
    w = rng.standard_normal(shape)
    params = {"w": jnp.asarray(w)}
    state = tx.init(params)
    w, m, v = w.T, 0.0, 0.0
    for _ in range(4):
        g = rng.standard_normal(shape)
        m = 0.9 * m + 0.1 * g.T
        u = m if name == "normuon" else 0.1 * g.T + 0.9 * m
        x = oracle.polar(u, [NEWTON_SCHULZ] * 5, 1.0, 1e-7)
        if name == "normuon":
            x, v = oracle.normuon(x, v, 0.95, axis=1)
            x = x * 0.2 * x.size**0.5 / np.linalg.norm(x)
        scale = {"muon": (7 / 5) ** 0.5, "moonlight": 0.2 * 7**0.5, "normuon": 1.0}
        w = w - 0.02 * (scale[name] * x + 0.1 * w)
        updates, state = tx.update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], w.T, rtol=0, atol=1e-12)


OTHERS = {
    "adamw": optax.adamw(0.03, 0.7, 0.9, 1e-6, weight_decay=0.02),
    "lion": optax.lion(1e-3),
    "prodigy": optax.contrib.prodigy(0.1),
    "injected": optax.inject_hyperparams(optax.adamw)(0.03),
}


@pytest.mark.parametrize("other", OTHERS)
@every_recipe
def test_the_rest_gets_any_transform_of_optax(recipe, other):
    params = model()
    tx = recipe(adamw=(adamw := OTHERS[other]))
    grads = jax.grad(loss)(params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    rest = [{key: tree[key] for key in ("wte", "norm")} for tree in (params, grads)]
    expected, _ = adamw.update(rest[1], adamw.init(rest[0]), rest[0])
    for key in ("wte", "norm"):
        chex.assert_trees_all_close(updates[key], expected[key], rtol=1e-5)
    chex.assert_tree_all_finite(updates)
    assert jnp.max(jnp.abs(updates["blocks"][0]["q"])) > 1e-4


def test_nanochat_is_the_chain_that_the_docs_write():
    params = model()
    written = optax.multi_transform(
        {
            "muon": optax.chain(
                jm.nesterov(0.95),
                jm.orthogonalize(),
                jm.scale_by_normuon(0.95),
                jm.add_cautious_decayed_weights(0.1),
                jm.scale_by_shape(),
                optax.scale_by_learning_rate(0.02),
            ),
            "adamw": optax.adamw(3e-4, b1=0.8, b2=0.95, eps=1e-10, weight_decay=0.0),
        },
        jm.read(params).labels(params),
    )
    grads = jax.grad(loss)(params)
    expected, state = written.update(grads, written.init(params), params)
    tx = jm.nanochat()
    updates, tx_state = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, atol=1e-7)
    chex.assert_trees_all_equal_structs(state, tx_state)


def test_normuon_lifts_neurons_whose_first_updates_are_small():
    """Each neuron of (1, n) has one weight: the paper brings all to the same size."""
    params = {"w": jnp.zeros((1, 8))}
    grads = {"w": jnp.ones((1, 8)).at[0, 3].set(1e-5)}
    tx = jm.normuon(1.0, weight_decay=0.0, dtype="float32", matrices=reader("muon"))
    updates, _ = tx.update(grads, tx.init(params), params)
    # sqrt(V) + 1e-8 in the paper, where V is 0.05 times a mean square of (3.5e-6)^2
    np.testing.assert_allclose(updates["w"], -0.2 * np.ones((1, 8)), rtol=0.02)


def test_fewer_steps_are_the_first_of_five_quintics(rng, x64):
    params = {"w": jnp.asarray(rng.standard_normal((4, 6)))}
    tx = jm.nanochat(1.0, 0.0, 0.0, steps=3, dtype="float64")
    updates, _ = tx.update(params, tx.init(params), params)
    table = jm.polar_express_coefficients(5)[:3]
    x = oracle.polar(np.asarray(params["w"]).T, table, 1.02, 1e-6)
    x, _ = oracle.normuon(x, 0.0, 0.95, axis=1)
    np.testing.assert_allclose(updates["w"], -((6 / 4) ** 0.5) * x.T, atol=1e-12)


# --- what optax asks of an optimizer --------------------------------------------------


@every_recipe
def test_it_ends_at_the_minimum_and_nothing_recompiles(recipe):
    """Within 3e-2 of it, as optax asks of contributed optimizers."""
    rate = optax.linear_schedule(0.2, 0.0, 300)
    tx = recipe(rate, weight_decay=0.0, adamw=optax.adam(rate))
    params = model()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(300):
        params, state = step(params, state)
    chex.assert_trees_all_close(params, TARGETS, atol=3e-2, rtol=3e-2)


@every_recipe
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_and_state_are_stable(recipe, dtype):
    tx = recipe()
    params = model(dtype)
    state = tx.init(params)
    updates, new_state = jax.jit(tx.update)(params, state, params)
    chex.assert_trees_all_equal_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_widened_before_anything_is_computed(name, narrow):
    """As float32 gradients of the same values: decay and steps lose no bits."""
    decay = {} if name in ON_SPHERES else {"weight_decay": 0.3}
    tx = ALL[name](adamw=optax.adamw(0.1, weight_decay=0.2), **decay)
    params = model()
    grads = jax.tree.map(lambda p: p.astype(narrow), params)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    update = jax.jit(tx.update)
    updates, state = update(grads, tx.init(params), params)
    chex.assert_trees_all_equal_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))
    expected, expected_state = update(wide, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6, atol=1e-9)
    chex.assert_trees_all_close(state, expected_state, rtol=1e-6, atol=1e-9)


def test_wide_gradients_stay_wide():
    params = model(jnp.bfloat16)
    updates, _ = one_step(jm.nanochat(), params)
    chex.assert_trees_all_equal_dtypes(updates, model())


@every_recipe
def test_inject_hyperparams(recipe):
    """A learning rate as data; only the count of steps must stay static."""
    params = model()
    recipe = recipe.func if isinstance(recipe, functools.partial) else recipe
    tx = optax.inject_hyperparams(recipe, static_args=("steps",))(learning_rate=0.5)
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(params)
    for rate in (0.5, 0.125):
        state.hyperparams["learning_rate"] = jnp.asarray(rate)
        updates, _ = update(params, state, params)
        plain = recipe(rate)
        expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
        chex.assert_trees_all_close(
            updates["blocks"], expected["blocks"], rtol=1e-4, atol=1e-6
        )


def test_inject_hyperparams_without_static_args_says_what_to_do():
    tx = optax.inject_hyperparams(jm.nanochat)(learning_rate=0.5)
    with pytest.raises(ValueError, match=r"static_args=\('steps',\)"):
        tx.init(model())


@every_recipe
def test_multi_steps_apply_if_finite_and_map_params(recipe):
    params = model()
    tx = recipe()
    state = tx.init(params)
    chex.assert_trees_all_equal(optax.tree.map_params(tx, lambda v: v, state), state)
    wrapped = optax.MultiSteps(optax.apply_if_finite(tx, 3), every_k_schedule=2)
    state = wrapped.init(params)
    update = jax.jit(wrapped.update)
    for _ in range(2):
        updates, state = update(params, state, params)
    expected, _ = jax.jit(tx.update)(params, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, atol=1e-5, rtol=1e-3)


WITHOUT_MATRICES = {
    "a linear probe's bias": {"b": jnp.ones(3)},
    "prompts": {"prompt_embedding": jnp.ones((5, 4))},
    "a bare vector": jnp.ones(3),
    "nothing": {},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tree", WITHOUT_MATRICES)
def test_trees_without_matrices(name, tree):
    """As in fine-tuning of a few parameters: AdamW has all of them."""
    params = WITHOUT_MATRICES[tree]
    tx = ALL[name](adamw=optax.sgd(0.5))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda p: -0.5 * p, params))


def test_labels_that_leave_no_matrices():
    """A second recipe, for the embeddings of a model alone."""
    params = model()
    tx = jm.nanochat(adamw=optax.sgd(0.5), matrices=reader("adamw"))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.5 * g, grads))


def test_optax_flatten():
    """One vector, which has no matrices: AdamW for all, as optax documents it."""
    params = model()
    tx = optax.flatten(jm.nanochat(adamw=optax.sgd(0.5)))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.5 * g, grads))


# --- groups and labels ----------------------------------------------------------------


def test_groups_of_the_user():
    params = model()
    rules = {"wte": "embedding", "q": "frozen"}
    tx = jm.nanochat(
        matrices=reader(rules),
        groups={
            "embedding": optax.sgd(0.5),
            "frozen": optax.set_to_zero(),
        },
    )
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["wte"], -0.5)
    np.testing.assert_array_equal(updates["blocks"][0]["q"], 0)
    assert jnp.all(updates["blocks"][0]["up"] != 0)


def test_labels_do_not_change_how_a_neighbour_is_read():
    """query is (6, 8), whether or not Muon has out."""
    params = {
        "query": {"kernel": jnp.ones((6, 2, 4)), "bias": jnp.zeros((2, 4))},
        "out": {"kernel": jnp.ones((2, 4, 6)), "bias": jnp.zeros(6)},
    }
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(1), p.shape), params
    )
    results = []
    for rules in (None, {"out": "adamw"}):
        tx = jm.muon(matrices=reader(rules), dtype="float32")
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        results.append(updates["query"]["kernel"])
    np.testing.assert_array_equal(*results)


def test_a_fixed_tree_of_labels_in_another_form():
    """Labels of an nnx.State serve for the arrays that an update sees."""
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    labels = jm.read(state).labels(state)
    tx = jm.nanochat(matrices=reader(labels), dtype="float32")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = jnp.copy(model.kernel[...])
    optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 4)))))(model))
    assert jnp.any(model.kernel[...] != before)


def test_empty_parameters():
    params = {
        "w": jnp.ones((2, 3)),
        "none": jnp.ones((0, 3)),
        "stack": jnp.ones((0, 2, 2)),
    }
    tx = jm.nanochat(dtype="float32")
    updates, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    assert "0 x 3" in str(jm.describe(tx, params))


# --- what recipes take besides --------------------------------------------------------


def one_step(tx, params):
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params
    )
    return jax.jit(tx.update)(grads, tx.init(params), params)


def test_a_polar_factor_of_the_users():
    params = {"w": jnp.ones((4, 6))}
    settings = {"weight_decay": 0.0, "momentum": 0.0}
    updates, _ = one_step(jm.nanochat(1.0, polar=jm.ExactPolar(), **settings), params)
    np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), 4**0.5 * 1.5**0.5, 1e-5)


def test_learning_rates_of_some_matrices():
    params = {"a": {"w": jnp.ones((4, 6))}, "b": {"w": jnp.ones((4, 6))}}
    plain, _ = one_step(jm.muon(dtype="float32"), params)
    factors = jm.scale_by_path({"b/w": 0.5, "b": 3.0})
    scaled, _ = one_step(optax.chain(jm.muon(dtype="float32"), factors), params)
    np.testing.assert_array_equal(scaled["a"]["w"], plain["a"]["w"])
    np.testing.assert_array_equal(scaled["b"]["w"], 0.5 * plain["b"]["w"])


def test_a_mask_of_what_decays():
    params = {"a": jnp.ones((4, 6)), "b": jnp.ones((4, 6)), "norm": jnp.ones(6)}
    mask = {"a": True, "b": False, "norm": False}
    some, _ = one_step(jm.muon(weight_decay=0.5, weight_decay_mask=mask), params)
    none, _ = one_step(jm.muon(weight_decay=0.0), params)
    assert jnp.any(some["a"] != none["a"])
    np.testing.assert_array_equal(some["b"], none["b"])


def test_momentum_in_bfloat16():
    params = {"w": jnp.ones((4, 6)), "norm": jnp.ones(6)}
    _, state = one_step(jm.nanochat(momentum_dtype="bfloat16"), params)
    mu = state.inner_states["muon"].inner_state[0].mu["w"]
    assert mu.dtype == jnp.bfloat16
    assert state.inner_states["adamw"].inner_state[0].mu["norm"].dtype == jnp.float32


def test_several_groups_of_matrices_and_one_reading():
    """Each with rates of its own; the tree is read once a trace."""
    params = {
        "early": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)},
        "late": {"kernel": jnp.ones((3, 4, 2, 3)), "bias": jnp.ones((3, 2, 3))},
    }
    seen = []

    def read(params):
        seen.append(1)
        return jm.read(params, rules={"early/kernel": "early"})

    def group(rate):
        return lambda matrices: optax.chain(
            jm.nesterov(),
            jm.orthogonalize(jm.PolarExpress(dtype="float32"), matrices=matrices),
            jm.scale_by_shape(matrices=matrices),
            optax.scale_by_learning_rate(rate),
        )

    tx = jm.partition(
        {"muon": group(0.5), "early": group(0.25), "adamw": optax.sgd(1.0)}, read
    )
    state = jax.eval_shape(tx.init, params)
    assert len(seen) == 1
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert len(seen) == 2
    updates, _ = one_step(tx, params)
    norms = [jnp.linalg.norm(updates[k]["kernel"]) for k in ("early", "late")]
    # (4, 6) with factor 1.5^0.5, and three of (4, 6), read by the bias beside them.
    expected = [0.25 * 4**0.5 * 1.5**0.5, 0.5 * 12**0.5 * 1.5**0.5]
    np.testing.assert_allclose(norms, expected, rtol=0.15)


def test_axis_names_that_updates_lack_have_to_be_said():
    """Boxes that name (layers, in, out) where the shape suggests heads."""
    box = functools.partial(
        linen.LogicallyPartitioned, names=("embed", "layers", "mlp")
    )
    params = {"mlp": {"wi": {"kernel": box(jnp.ones((8, 2, 16)))}}}
    with pytest.raises(ValueError, match=r"'mlp/wi/kernel' .* carries.*=jax_muon.read"):
        jm.nanochat().init(params)
    tx = jm.nanochat(matrices=jm.read(params))
    assert jm.describe(tx, params).parameters[0].matrices == (2, 8, 16)
