"""Each piece: its mathematics against NumPy, and inside every wrapper of optax."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests import oracle
from tests.lowered import depths_on

exact_polar = jm.PolarExpress(dtype=None)

# Wide, tall, square, a stack.
SHAPES = {"a": (6, 9), "b": {"c": (9, 6), "d": (6, 6)}, "e": (2, 6, 9)}
is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
CONVOLUTION = MuonDimensionNumbers((0, 1, 2), 3)
LAST_TWO = MuonDimensionNumbers(-2, -1)
MATRICES = jm.read(
    jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, "float32"), SHAPES, is_leaf=is_shape
    ),
    rules={"e": LAST_TWO},
)


def of_matrices(piece, **settings):
    return functools.partial(piece, matrices=MATRICES, **settings)


PIECES = {
    "nesterov": jm.nesterov,
    "orthogonalize": of_matrices(jm.orthogonalize),
    "equilibrate_rows": of_matrices(jm.equilibrate_rows),
    "normalize_frobenius": of_matrices(jm.normalize_frobenius),
    "scale_by_normuon": of_matrices(jm.scale_by_normuon),
    "scale_by_normuon output": of_matrices(jm.scale_by_normuon, axis="output"),
    "scale_by_shape": of_matrices(jm.scale_by_shape),
    "add_cautious_decayed_weights": functools.partial(
        jm.add_cautious_decayed_weights, 0.1
    ),
}
every_piece = pytest.mark.parametrize("factory", PIECES.values(), ids=PIECES)


def trees(dtype=jnp.float32):
    """Parameters and gradients."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(shape):
        return jax.random.normal(next(keys), shape).astype(dtype)

    params = jax.tree.map(draw, SHAPES, is_leaf=is_shape)
    grads = jax.tree.map(draw, SHAPES, is_leaf=is_shape)
    return params, grads


def run(tx, params, grads, steps=3):
    """Updates of each step, with gradients that change."""
    state = tx.init(params)
    out = []
    for t in range(steps):
        scaled = jax.tree.map(lambda g, t=t: (g * (1 + t)).astype(g.dtype), grads)
        updates, state = tx.update(scaled, state, params)
        out.append(updates)
    return out, state


# --- mathematics ----------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [True, False])
def test_nesterov_ema(rng, x64, lookahead):
    g = rng.standard_normal((5, 4, 3))
    tx = jm.nesterov(lambda count: 0.8 + 0.01 * count, lookahead=lookahead)
    state, m = tx.init(jnp.zeros((4, 3))), np.zeros((4, 3))
    for t in range(5):
        mu = 0.8 + 0.01 * t
        m = m + (1 - mu) * (g[t] - m)
        updates, state = tx.update(jnp.asarray(g[t]), state)
        expected = g[t] + mu * (m - g[t]) if lookahead else m
        np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-12)
    assert state.count == 5


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_sum_at_constant_momentum_is_a_multiple_of_the_average(rng, x64, lookahead):
    g = jnp.asarray(rng.standard_normal((4, 4, 3)))
    tx = jm.nesterov(0.9, lookahead=lookahead)
    reference = optax.trace(0.9, nesterov=lookahead)
    state, reference_state = tx.init(g[0]), reference.init(g[0])
    for t in range(4):
        updates, state = tx.update(g[t], state)
        expected, reference_state = reference.update(g[t], reference_state)
        np.testing.assert_allclose(updates, 0.1 * expected, rtol=0, atol=1e-12)


def test_nesterov_of_one_gradient_stays_there():
    """mu M + (1 - mu) G would end 2e-7 away: in float32 the weights are not quite 1."""
    g = jnp.linspace(-1, 1, 50)
    tx = jm.nesterov(0.95)
    state = tx.init(g)._replace(mu=g)
    updates, state = tx.update(g, state)
    np.testing.assert_array_equal(updates, g)
    np.testing.assert_array_equal(state.mu, g)


def test_orthogonalize_is_the_polar_factor_of_each_leaf(x64):
    _, grads = trees(jnp.float64)
    updates, _ = jm.orthogonalize(exact_polar, matrices=MATRICES).update(
        grads, optax.EmptyState()
    )
    chex.assert_trees_all_close(updates, jax.tree.map(exact_polar, grads), atol=1e-12)


def test_orthogonalize_takes_any_callable(x64):
    _, grads = trees(jnp.float64)
    updates, _ = jm.orthogonalize(
        jm.ExactPolar(), max_stack=1, matrices=MATRICES
    ).update(grads, None)
    chex.assert_trees_all_close(
        updates, jax.tree.map(jm.ExactPolar(), grads), atol=1e-12
    )


def test_orthogonalize_reads_dimension_numbers(rng, x64):
    """A convolution kernel (kh, kw, in, out) is one matrix (kh kw in, out)."""
    kernel = jnp.asarray(rng.standard_normal((3, 3, 4, 5)))
    tx = jm.orthogonalize(jm.ExactPolar(), matrices=jm.read(kernel, rules=CONVOLUTION))
    updates, _ = tx.update(kernel, tx.init(kernel))
    expected = jm.ExactPolar()(kernel.reshape(36, 5)).reshape(3, 3, 4, 5)
    np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        # (6, 9), (9, 6) and (2, 6, 9) share one stack of 4; (6, 6) has its own.
        ("cuda", [1, 4]),
        ("cpu", [1, 1, 1, 2]),
    ],
)
def test_orthogonalize_pools(platform, expected):
    _, grads = trees()

    def update(grads):
        return jm.orthogonalize(jnp.tan, matrices=MATRICES).update(grads, None)[0]

    assert sorted(depths_on(platform, update, grads)) == expected


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 5), (5, 1)])
def test_equilibrate_rows(rng, x64, shape):
    g = rng.standard_normal(shape)
    tx = jm.equilibrate_rows()
    updates, _ = tx.update(jnp.asarray(g), None)
    np.testing.assert_allclose(updates, oracle.equilibrate_rows(g.T).T, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 5, 3)])
def test_normalize_frobenius(rng, x64, shape):
    g = jnp.asarray(rng.standard_normal(shape))
    matrices = jm.read(g, rules=LAST_TWO)
    updates, _ = jm.normalize_frobenius(matrices=matrices).update(g, None)
    norms = jnp.linalg.norm(updates, axis=(-2, -1))
    np.testing.assert_allclose(norms, min(shape[-2:]) ** 0.5, atol=1e-12)
    updates, _ = jm.normalize_frobenius(0.2, matrices=matrices).update(g, None)
    np.testing.assert_allclose(
        jnp.sqrt(jnp.mean(updates**2, axis=(-2, -1))), 0.2, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1)])
@pytest.mark.parametrize("axis", ["longer", "output"])
def test_normuon(rng, x64, shape, axis):
    tx = jm.scale_by_normuon(lambda count: 0.9 - 0.1 * count, axis=axis)
    fan_in, fan_out = shape
    per_output = axis == "output" or fan_out >= fan_in
    state, v = tx.init(jnp.zeros(shape)), 0.0
    assert state.nu.shape == ((1, fan_out) if per_output else (fan_in, 1))
    for t in range(3):
        x = rng.standard_normal(shape)
        # In PyTorch's (out, in), dim 1 is averaged for one mean an output.
        expected, v = oracle.normuon(x.T, v, 0.9 - 0.1 * t, 1 if per_output else 0)
        updates, state = tx.update(jnp.asarray(x), state)
        np.testing.assert_allclose(updates, expected.T, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.nu, v.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("numbers", "axis", "shape", "expected"),
    [
        (CONVOLUTION, "output", (3, 3, 4, 5), (1, 1, 1, 5)),
        (LAST_TWO, "longer", (3, 4, 6), (3, 1, 6)),
    ],
)
def test_normuon_state_follows_the_parameter_axes(numbers, axis, shape, expected):
    """nu has the rank of the parameter, with 1 where it is averaged."""
    x = jnp.zeros(shape)
    tx = jm.scale_by_normuon(axis=axis, matrices=jm.read(x, rules=numbers))
    assert tx.init(x).nu.shape == expected


def test_normuon_state_leaves_boxes(rng):
    """The axis names of a box would shard the axes of length one of the state."""
    updates = {"w": jnp.asarray(rng.standard_normal((6, 9)))}
    boxed = {"w": nn.Partitioned(updates["w"], ("model", None))}
    tx = jm.scale_by_normuon(0.9)
    expected, expected_state = run(tx, updates, updates)
    new, state = run(tx, boxed, boxed)
    chex.assert_trees_all_equal(state, expected_state)
    for one, plain in zip(new, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(boxed)
        np.testing.assert_array_equal(one["w"].value, plain["w"])


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("max_ratio", 2.0),
        ("rms_0.2", 0.2 * 4),
        ("spectral", 4.0),
        ("sqrt_ratio", 2.0),
        ("none", 1.0),
        (lambda fan_in, fan_out: fan_in + fan_out, 20.0),
    ],
)
def test_scale_by_shape(rule, factor):
    x = jnp.ones((3, 4, 16))
    matrices = jm.read(x, rules=LAST_TWO)
    updates, _ = jm.scale_by_shape(rule, matrices=matrices).update(x, None)
    np.testing.assert_allclose(updates, factor, rtol=1e-6)
    if rule == "max_ratio":  # in > out: no factor
        updates, _ = jm.scale_by_shape().update(x[0].T, None)
        np.testing.assert_array_equal(updates, 1)


def test_cautious_decay():
    u = jnp.array([1.0, -1.0, 1.0, -1.0, 0.0])
    w = jnp.array([2.0, 2.0, -2.0, -2.0, 2.0])
    tx = jm.add_cautious_decayed_weights(lambda count: 0.1 * (count + 1))
    updates, state = tx.update(u, tx.init(w), w)
    np.testing.assert_allclose(updates, [1.2, -1.0, 1.0, -1.2, 0.2], rtol=1e-6)
    updates, _ = tx.update(u, state, w)
    np.testing.assert_allclose(updates, [1.4, -1.0, 1.0, -1.4, 0.4], rtol=1e-6)


@pytest.mark.parametrize(
    "factory",
    [jm.nesterov, functools.partial(jm.add_cautious_decayed_weights, 0.1)],
    ids=["nesterov", "decay"],
)
def test_pieces_that_see_the_parameters_are_as_wide_as_they(factory):
    tx, params = factory(), {"w": jnp.full((2, 3), 1 + 2**-12), "frozen": None}
    narrow = {"w": jnp.ones((2, 3), jnp.bfloat16), "frozen": None}
    updates, _ = tx.update(narrow, tx.init(params), params)
    wide, _ = tx.update({**narrow, "w": jnp.ones((2, 3))}, tx.init(params), params)
    chex.assert_trees_all_equal(updates, wide)
    assert updates["w"].dtype == jnp.float32


def test_without_parameters_momentum_keeps_the_dtype_of_the_gradients():
    tx, grads = jm.nesterov(), jnp.ones(3, jnp.bfloat16)
    updates, state = tx.update(grads, tx.init(jnp.ones(3)))
    assert updates.dtype == jnp.bfloat16
    assert state.mu.dtype == jnp.float32


def test_cautious_decay_mask():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = jm.add_cautious_decayed_weights(0.5, mask={"a": True, "b": False})
    updates, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal(updates, {"a": jnp.full(2, 1.5), "b": jnp.ones(2)})


# --- what optax asks of a transform ---------------------------------------------------


@every_piece
def test_alone_jitted_and_without_recompiling(factory):
    params, grads = trees()
    tx = factory()
    state = jax.jit(tx.init)(params)
    chex.assert_trees_all_equal(state, tx.init(params))
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    for _ in range(3):
        updates, state = update(grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_tree_all_finite(updates)
    eager, _ = run(tx, params, grads, steps=1)
    chex.assert_tree_all_finite(eager)


@every_piece
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_keeps_dtypes_of_updates_and_state(factory, dtype):
    params, grads = trees(dtype)
    tx = factory()
    state = tx.init(params)
    updates, new_state = tx.update(grads, state, params)
    chex.assert_trees_all_equal_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


@every_piece
def test_chain_and_extra_args(factory):
    params, grads = trees()
    tx = optax.chain(factory(), optax.scale_by_learning_rate(0.5))
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params, value=1.0, unknown=None)
    (alone, *_), _ = run(factory(), params, grads)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda u: -0.5 * u, alone))


@every_piece
def test_partition_and_masked(factory):
    """Leaves of another label are passed over, and given back unchanged."""
    params, grads = trees()
    labels = {"a": "x", "b": "y", "e": "x"}
    tx = optax.multi_transform({"x": factory(), "y": optax.identity()}, labels)
    (updates, *_), _ = run(tx, params, grads)
    picked = {"a": params["a"], "e": params["e"]}, {"a": grads["a"], "e": grads["e"]}
    (alone, *_), _ = run(factory(), *picked)
    chex.assert_trees_all_close(updates, {**alone, "b": grads["b"]}, atol=1e-6)
    tx = optax.masked(factory(), {"a": True, "b": False, "e": True})
    (updates, *_), _ = run(tx, params, grads)
    chex.assert_trees_all_close(updates, {**alone, "b": grads["b"]}, atol=1e-6)


@every_piece
def test_multi_steps(factory):
    params, grads = trees()
    tx = optax.MultiSteps(factory(), every_k_schedule=2)
    state = jax.jit(tx.init)(params)
    first, state = jax.jit(tx.update)(grads, state, params)
    chex.assert_trees_all_equal(first, jax.tree.map(jnp.zeros_like, grads))
    second, _ = jax.jit(tx.update)(grads, state, params)
    (alone, *_), _ = run(factory(), params, grads)
    chex.assert_trees_all_close(second, alone, atol=1e-5, rtol=1e-3)


@every_piece
def test_apply_if_finite(factory):
    params, grads = trees()
    tx = optax.apply_if_finite(factory(), max_consecutive_errors=3)
    state = tx.init(params)
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    updates, new_state = jax.jit(tx.update)(bad, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    chex.assert_trees_all_equal(new_state.inner_state, state.inner_state)
    updates, _ = jax.jit(tx.update)(grads, new_state, params)
    chex.assert_tree_all_finite(updates)


@every_piece
def test_tree_map_params(factory):
    params, grads = trees()
    tx = factory()
    state = tx.init(params)
    chex.assert_trees_all_equal(optax.tree.map_params(tx, lambda v: v, state), state)
    zeros = optax.tree.map_params(tx, jnp.zeros_like, run(tx, params, grads)[1])
    chex.assert_trees_all_equal(jax.tree.leaves(zeros)[1:], jax.tree.leaves(state)[1:])


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (jm.nesterov, "decay"),
        (PIECES["scale_by_normuon"], "decay"),
        (jm.add_cautious_decayed_weights, "weight_decay"),
    ],
)
def test_inject_hyperparams_changes_a_rate_without_recompiling(factory, name):
    params, grads = trees()
    tx = optax.inject_hyperparams(factory)(**{name: 0.5})
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(params)
    for rate in (0.5, 0.25):
        state.hyperparams[name] = jnp.asarray(rate)
        updates, _ = update(grads, state, params)
        plain = factory(rate)
        expected, _ = plain.update(grads, plain.init(params), params)
        chex.assert_trees_all_close(updates, expected, atol=1e-6)


@pytest.mark.parametrize(
    "factory",
    [jm.nesterov, PIECES["scale_by_normuon"], jm.add_cautious_decayed_weights],
)
def test_schedules_do_not_recompile(factory):
    params, grads = trees()
    tx = factory(optax.linear_schedule(0.5, 0.9, 3))
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(params)
    for _ in range(4):
        _, state = update(grads, state, params)
    assert state.count == 4


@every_piece
def test_empty_trees_and_none_leaves(factory):
    tx = factory()
    updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}
    params = {"a": jnp.ones((2, 3)), "b": None}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["b"] is None


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory",
    [
        jm.orthogonalize,
        jm.equilibrate_rows,
        jm.normalize_frobenius,
        jm.scale_by_normuon,
        jm.scale_by_shape,
    ],
)
@pytest.mark.parametrize(
    "leaf",
    [jnp.zeros(3), jnp.zeros(()), jnp.zeros((2, 2), int), jnp.zeros((2, 3, 4))],
    ids=lambda x: f"{x.dtype}{x.shape}",
)
def test_not_one_matrix_is_an_error_that_says_what_to_pass(factory, leaf):
    with pytest.raises(ValueError, match=r"'block/w' .* expected matrices=jax_muon\.r"):
        factory().init({"block": {"w": leaf}})


def orthogonalized(matrices):
    return optax.chain(
        jm.orthogonalize(jm.NewtonSchulz(form="standard"), matrices=matrices),
        optax.scale_by_learning_rate(lambda count: 0.1 / (1 + count.astype("float32"))),
    )


STRICT = {
    **PIECES,
    "partition": lambda: jm.partition(
        {"muon": orthogonalized, "adamw": optax.sgd(1.0)}
    ),
    "hyperball": lambda: jm.hyperball(
        lambda count: 0.1 / (1 + count.astype("float32")), matrices=MATRICES
    ),
    "bias_correction": lambda: jm.nesterov(bias_correction=True),
    "skip_nonfinite": lambda: jm.skip_nonfinite(PIECES["scale_by_shape"]()),
    "splits": lambda: jm.with_splits(optax.sgd(0.1), {"a": jm.Split(("q", "k", "v"))}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STRICT)
def test_without_promotion_of_dtypes_and_ranks(name, dtype):
    """Of what is ours: optax.adamw itself cannot be traced so with leaves."""
    params, grads = trees(dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        tx = STRICT[name]()
        state = jax.eval_shape(tx.init, params)
        updates, _ = jax.eval_shape(tx.update, grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, grads)


def test_cautious_decay_needs_params():
    tx = jm.add_cautious_decayed_weights(0.1)
    with pytest.raises(ValueError, match="params=None"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
