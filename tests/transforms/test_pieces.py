"""Each piece alone: what `test_recipes.py` does not see, and what optax asks of it.

The mathematics of whole chains in NumPy is there; that of schedules is in parity.
"""

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
from jax_muon.matrices.joins import map_stacks
from jax_muon.transforms.scaling import ADJUST_LR
from tests import trees
from tests.matrices import STACKS, reader
from tests.recipes import RECIPES

# Wide, a stack of tall ones, and stacks of stacks.
SHAPES = {"a": (6, 9), "b": {"e": (2, 9, 6)}, "f": (3, 2, 4, 5)}

WINDOW = MuonDimensionNumbers((0, 1, 2), 3)
WINDOWS = jm.find_matrices(trees.normal(SHAPES), rules={"f": WINDOW, "*": STACKS})

OF_MATRICES = {
    "orthogonalize": jm.orthogonalize,
    "equilibrate_rows": jm.equilibrate_rows,
    "normalize_frobenius": jm.normalize_frobenius,
    "scale_by_normuon": jm.scale_by_normuon,
    "scale_by_normuon output": functools.partial(jm.scale_by_normuon, axis="output"),
    "scale_by_shape": jm.scale_by_shape,
    "hyperball": functools.partial(jm.hyperball, optax.linear_schedule(0.5, 0.1, 3)),
}
PIECES = {
    **OF_MATRICES,
    "scale_by_momentum": functools.partial(
        jm.scale_by_momentum, optax.linear_schedule(0.5, 0.9, 3)
    ),
    "add_cautious_decayed_weights": functools.partial(
        jm.add_cautious_decayed_weights, 0.1
    ),
}
every_piece = pytest.mark.parametrize("factory", PIECES.values(), ids=PIECES)


# --- mathematics ----------------------------------------------------------------------


def test_nesterov_of_one_gradient_stays_there():
    """mu M + (1 - mu) G would end 2e-7 away: in float32 the weights are not quite 1."""
    g, tx = jnp.linspace(-1, 1, 50), jm.scale_by_momentum(0.95)
    updates, state = tx.update(g, tx.init(g)._replace(mu=g))
    chex.assert_trees_all_equal((updates, state.mu), (g, g))
    tx = jm.scale_by_momentum(0.95, nesterov=False, bias_correction=True)
    for updates in trees.run(tx, g, [g, g])[0]:
        np.testing.assert_allclose(updates, g, rtol=1e-5)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_matrices_of_an_array_are_scaled_apart(name):
    """By what each does to single ones, which recipes show in tests/test_recipes.py."""
    shapes = {"wide": (2, 6, 9), "tall": (1, 2, 9, 6)}
    params, grads = (trees.normal(shapes, seed) for seed in (0, 1))

    def singles(tree):
        stacks = {path: x.reshape(2, *x.shape[-2:]) for path, x in tree.items()}
        return {f"{path}/{i}": stacks[path][i] for path in stacks for i in range(2)}

    (found,), *_ = trees.run(OF_MATRICES[name](), params, [grads])
    (apart,), *_ = trees.run(OF_MATRICES[name](), singles(params), [singles(grads)])
    chex.assert_trees_all_close(singles(found), apart, rtol=1e-5, atol=1e-6)


def test_scales_of_rows_leave_boxes():
    """The axis names of a box would shard the axis of length one of the scale."""
    tx = jm.scale_by_momentum(mu_dtype="int8")
    plain = trees.normal({"w": (6, 9)})
    boxed = {"w": nn.Partitioned(plain["w"], names=("x", None))}
    (expected,), _, expected_state = trees.run(tx, plain, [plain])
    (updates,), _, state = trees.run(tx, boxed, [boxed])
    assert jax.tree.structure(state[-1]) == jax.tree.structure(plain)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (state, expected_state)))
    assert jax.tree.structure(updates) == jax.tree.structure(boxed)
    np.testing.assert_array_equal(updates["w"].value, expected["w"])


SMALLEST = {"equilibrate_rows": 1e-12, "normalize_frobenius": 1e-6, "hyperball": 1e-10}


@pytest.mark.parametrize("name", SMALLEST)
def test_norms_that_nothing_is_divided_by(name):
    """Above the smallest norm, the size of a direction does not matter; below it does.

    Every row of equilibrated matrices gets the root mean square of their norms.
    """
    tx, smallest, norms = OF_MATRICES[name](), SMALLEST[name], []
    params = {"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
    unit = jnp.array([[0.0, 0.6], [0.8, 0.0]])
    for size in (1.0, 5 * smallest, smallest / 20):
        (updates,), *_ = trees.run(tx, params, [{"w": size * unit}])
        scale = size if name == "equilibrate_rows" else 1.0
        norms.append(float(jnp.linalg.norm(updates["w"])) / scale)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] < 0.1 * norms[0]


def test_rows_beside_very_large_ones_are_equilibrated():
    """The smallest norm is in the units in which no square overflows."""
    u = {"w": jnp.array([[1e20, 0.0], [0.0, 1e8]])}
    (updates,), *_ = trees.run(jm.equilibrate_rows(), u, [u])
    np.testing.assert_allclose(jnp.diag(updates["w"]), 1e20 / 2**0.5, rtol=1e-5)


# Factors of matrices (4, 16) and (16, 4), each (in, out), by the rule of sizes.
FACTORS = {
    None: (1.0, 1.0),
    "original": (2.0, 1.0),
    "match_rms_adamw": (0.8, 0.8),
    "spectral_norm": (2.0, 0.5),
}


@pytest.mark.parametrize("rule", ADJUST_LR)
def test_rules_of_sizes(rule):
    """Each has its factors above, and is named where users look for it."""
    for shape, factor in zip(((4, 16), (16, 4)), FACTORS[rule], strict=True):
        updates, _ = jm.scale_by_shape(rule).update(jnp.ones(shape), ())
        np.testing.assert_allclose(updates, factor, rtol=1e-6)
    name = "None" if rule is None else f'"{rule}"'
    assert name in jm.scale_by_shape.__doc__ and name in jm.muon.__doc__


def test_rules_of_users():
    """Of a shape; and for paths: the first pattern that matches counts."""
    updates, _ = jm.scale_by_shape(lambda m, n: m + n).update(jnp.ones((4, 16)), ())
    np.testing.assert_allclose(updates, 20.0, rtol=1e-6)
    updates = {path: jnp.ones(()) for path in ("a/w", "b/w", "b/v")}
    tx = jm.scale_by_path({"b/w": 0.5, "b": 3.0})
    (scaled,), *_ = trees.run(tx, updates, [updates])
    assert scaled == {"a/w": 1.0, "b/w": 0.5, "b/v": 3.0}


def test_cautious_decay():
    u = jnp.array([1.0, -1.0, 1.0, -1.0, 0.0])
    w = jnp.array([2.0, 2.0, -2.0, -2.0, 2.0])
    tx = jm.add_cautious_decayed_weights(lambda count: 0.1 * (count + 1))
    (first, second), *_ = trees.run(tx, w, [u, u])
    np.testing.assert_allclose(first, [1.2, -1.0, 1.0, -1.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(second, [1.64, -1.0, 1.0, -1.64, 0.44], rtol=1e-6)


@pytest.mark.parametrize("make", [jm.add_cautious_decayed_weights, jm.adamw])
def test_a_mask_may_be_a_function_of_the_parameters(make):
    """It says what a tree says: here, that vectors do not decay."""
    rates = {"learning_rate": 0.1} if make is jm.adamw else {}
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}

    def by_shape(tree):
        return {name: x.ndim > 1 for name, x in tree.items()}

    ends = [
        trees.run(make(**rates, weight_decay=0.5, mask=mask), params, [params])[1]
        for mask in (by_shape, by_shape(params), None)
    ]
    chex.assert_trees_all_equal(*ends[:2])
    assert (ends[0]["b"] != ends[2]["b"]).all() and (ends[0]["w"] == ends[2]["w"]).all()


SEEING = ("scale_by_momentum", "add_cautious_decayed_weights")
SEEING = {name: PIECES[name]() for name in SEEING} | {"hyperball": jm.hyperball(0.1)}


@pytest.mark.parametrize("name", SEEING)
def test_pieces_that_see_the_parameters_are_as_wide_as_they(name):
    tx, params = SEEING[name], {"w": jnp.full((2, 3), 1 + 2**-12), "frozen": None}
    narrow = {"w": jnp.ones((2, 3), jnp.bfloat16), "frozen": None}
    updates, _ = tx.update(narrow, tx.init(params), params)
    wide, _ = tx.update({**narrow, "w": jnp.ones((2, 3))}, tx.init(params), params)
    chex.assert_trees_all_equal(updates, wide)
    assert updates["w"].dtype == jnp.float32
    if name == "scale_by_momentum":  # which need not see them
        updates, state = tx.update(narrow, tx.init(params))
        assert (updates["w"].dtype, state.mu["w"].dtype) == ("bfloat16", "float32")


def test_matrices_of_stacks_and_windows_come_back_as_they_were():
    """`view` is (batch, in, out) in C order; axes may be anywhere, and negative."""
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    rules = {"w": MuonDimensionNumbers((-1, 0), 2)}
    axes = jm.find_matrices({"w": jnp.asarray(x, "float32")}, rules=rules).axes("w")
    view = axes.view(x)
    np.testing.assert_array_equal(view, np.einsum("abcd->bdac", x).reshape(3, 10, 4))
    np.testing.assert_array_equal(axes.undo(view, x), x)


def test_single_matrices_of_a_shape_share_a_stack():
    """And a batch of several is not copied."""
    batches, taken = trees.normal([(k, 2, 3) for k in (1, 2, 1, 2)]), []
    doubled = map_stacks(lambda x: taken.append(x.shape) or 2 * x, batches)
    chex.assert_trees_all_equal(doubled, [2 * x for x in batches])
    assert taken == 3 * [(2, 2, 3)]


# --- hyperball: norms stay, and only directions count ---------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 5e-4)])
def test_norms_stay(dtype, rtol):
    """Big steps for long, of scanned layers whose norms differ; then a rate of zero."""
    sizes = np.array([1.0, 10.0, 100.0])[:, None, None]
    start = (trees.normal((3, 8, 12)) * sizes).astype(dtype)
    noise = [{"layers/w": trees.normal((3, 8, 12), seed, dtype)} for seed in range(40)]
    tx = RECIPES["muonh"](
        learning_rate=lambda count: 0.1 * (count < 39), matrices=reader()
    )
    updates, params, _ = trees.run(tx, {"layers/w": start}, noise)
    # Float32 rounds as long as it runs; the last step takes bfloat16's rounding back.
    (end,), (last,) = params.values(), updates[-1].values()
    start, end, last = (np.asarray(x, np.float32) for x in (start, end, last))
    before, after = (np.linalg.norm(x, axis=(1, 2)) for x in (start, end))
    np.testing.assert_allclose(after, before, rtol=rtol)
    np.testing.assert_allclose(end - last, end, rtol=rtol)


def test_without_a_gradient_a_matrix_stays_on_its_sphere():
    """As one that was never moved; the other one of the tree is turned."""
    w = trees.normal((4, 6))
    params, grads = {"w": w, "still": w}, {"w": w[::-1], "still": 0 * w}
    (updates,), *_ = trees.run(jm.hyperball(0.2), params, [grads])
    assert jnp.linalg.norm(updates["w"]) > 0.1 * jnp.linalg.norm(w)
    np.testing.assert_array_equal(updates["still"], 0)


# --- what optax asks of a transform ---------------------------------------------------


@every_piece
def test_empty_trees_and_none_leaves(factory):
    tx = factory()
    assert tx.update({}, tx.init({}), {})[0] == {}
    params = {"a": jnp.ones((2, 3)), "b": None}
    assert tx.update(params, tx.init(params), params)[0]["b"] is None


@pytest.mark.parametrize("factory", OF_MATRICES.values(), ids=OF_MATRICES)
def test_not_one_matrix_is_an_error_that_says_what_to_pass(factory):
    for leaf in (jnp.zeros(3), jnp.zeros((2, 2), int), jnp.zeros((2, 0))):
        expected = r"'block/w' .* use the piece within jax_muon\.as_matrices"
        with pytest.raises(ValueError, match=expected):
            factory().init({"block": {"w": leaf}})


STRICT = {
    **PIECES,
    "a recipe": lambda: RECIPES["nanochat"](
        learning_rate=lambda count: 0.1 / (1 + count.astype("float32")),
        adamw=optax.sgd(1.0),
        matrices=jm.find_matrices(trees.normal(SHAPES), rules=STACKS),
    ),
    "as_matrices": lambda: jm.as_matrices(jm.scale_by_normuon(), WINDOWS),
    "bias_correction": lambda: jm.scale_by_momentum(bias_correction=True),
    "skip_nonfinite": lambda: jm.skip_nonfinite(PIECES["scale_by_shape"]()),
    "splits": lambda: jm.with_splits(optax.sgd(0.1), {"a": jm.Split(("q", "k", "v"))}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", STRICT)
def test_dtypes_are_stable_and_promoted_by_us_alone(name, dtype):
    """A state that changed its dtype, or became weakly typed, would be traced anew."""
    params, grads = (trees.normal(SHAPES, seed, dtype) for seed in (0, 1))
    with jax.numpy_dtype_promotion("strict"):
        tx = STRICT[name]()
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(tx.update, grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, grads)
    assert new_state == state


def test_a_mask_where_there_are_no_parameters():
    """As in a group that optax.multi_transform gives nothing."""
    recipe = jm.moonlight(0.02, matrices={"?*": "muon"}, weight_decay_mask={"w": True})
    assert recipe.update({}, recipe.init({}), {})[0] == {}
