"""The adapter: every form of a tree is the same matrices, and comes back as it was."""

import chex
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.base.trees import leaves_with_paths
from tests import trees
from tests.mesh import case
from tests.mesh.case import EXPLICIT, mesh_of

SHAPES = {
    "conv": (3, 2, 4, 6),
    "q": (8, 3, 4),
    "scan": {"o": (5, 2, 3, 4, 8)},
    "qkv": (8, 24),
    "0": {"k": (8, 6)},
    "turned": (6, 8),
    "bias": (6,),
}
RULES = {
    "conv": MuonDimensionNumbers((0, 1, 2), 3),
    "q": MuonDimensionNumbers(0, (1, 2)),
    "scan/o": MuonDimensionNumbers((2, 3), 4),
    "turned": MuonDimensionNumbers(1, 0),
    "qkv": "muon",
    "*k": "muon",
    "bias": "adamw",
}
SPLITS = {"qkv": jm.Split({"q": 12, "kv": 12}), "qkv/kv": jm.Split.heads(2)}
PARAMS = trees.normal(SHAPES)
MATRICES = jm.find_matrices(PARAMS, rules=RULES, splits=SPLITS)
INSIDE = {
    **{"conv": (24, 6), "q": (8, 12), "scan/o": (5, 2, 12, 8), "turned": (8, 6)},
    **{"qkv/q": (8, 12), "qkv/kv": (2, 8, 6), "0/k": (8, 6)},
}


def seeing(seen):
    def update(updates, params):
        trees_seen = (dict(leaves_with_paths(tree)) for tree in (updates, params))
        seen.extend(trees_seen)
        return updates

    return optax.stateless(update)


def test_what_is_inside_and_that_it_comes_back():
    params = {**PARAMS, "bias": optax.MaskedNode(), "none": None}
    tx = jm.as_matrices(seeing(seen := []), MATRICES)
    updates, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal(updates, params)
    for tree in seen:
        assert {path: x.shape for path, x in tree.items()} == INSIDE
    np.testing.assert_array_equal(seen[0]["turned"], PARAMS["turned"].T)
    np.testing.assert_array_equal(seen[0]["qkv/kv"][1], PARAMS["qkv"][:, 18:])
    assert seen[0]["0/k"] is PARAMS["0"]["k"]  # no operation at all


def boxed(tree):
    return jax.tree.map(lambda x: nn.Partitioned(x, names=(None,) * x.ndim), tree)


FORMS = {
    "linen": boxed,
    "frozen": freeze,
    "nnx": lambda tree: nnx.State(jax.tree.map(nnx.Param, tree)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tree(form):
    """The same updates, in the form of the gradients; inside there are no boxes."""
    scaled = optax.chain(jm.scale_by_normuon(), jm.hyperball(0.1))
    groups = {"muon": jm.as_matrices(scaled, MATRICES), "adamw": optax.sgd(1.0)}
    tx, wrapped = optax.multi_transform(groups, MATRICES.labels), FORMS[form](PARAMS)
    expected, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    found, boxed_state = tx.update(wrapped, tx.init(wrapped), wrapped)
    assert jax.tree.structure(found) == jax.tree.structure(wrapped)
    states = (x.inner_states["muon"].inner_state for x in (state, boxed_state))
    for one, other in ((found, expected), states):
        chex.assert_trees_all_equal(*map(jax.tree.leaves, (one, other)))


def test_some_layers_of_what_was_read():
    tx = jm.as_matrices(seeing(seen := []), MATRICES)
    some = {"scan": {"o": PARAMS["scan"]["o"][:2]}}
    updates, _ = tx.update(some, tx.init(some))
    chex.assert_trees_all_equal(updates, some)
    assert seen[0]["scan/o"].shape == (2, 2, 12, 8)


def test_state_is_mapped_as_parameters_are():
    """`optax.tree.map_params` finds it, since it has their structure."""
    tx = jm.muonh(0.1, matrices=MATRICES, adamw=optax.adam(1.0))
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    momentum, (_, sphere) = mapped.inner_states["muon"].inner_state
    before = state.inner_states["muon"].inner_state[1][1].radius
    for old, new in zip(*map(jax.tree.leaves, (before, sphere.radius)), strict=True):
        np.testing.assert_array_equal(new, old + 1)
    assert {float(x.max()) for x in jax.tree.leaves(momentum.mu)} == {1.0}


ON_MESH = {
    # Shape, dimension numbers, sharding; what is inside, and how it is sharded.
    "heads": ((32, 8, 4), (0, (1, 2)), P(None, "x"), (32, 32), P(None, "x")),
    "width of heads": ((32, 4, 8), (0, (1, 2)), P(None, None, "x"), (32, 32), P()),
    "both": ((32, 4, 8), (0, (1, 2)), P("y", None, "x"), (32, 32), P("y")),
    "experts": ((2, 8, 8, 9), (2, 3), P(None, "x"), (2, 8, 8, 9), P(None, "x")),
    "window": ((3, 3, 8, 16), ((0, 1, 2), 3), P(None, None, "x"), (72, 16), P()),
}


@pytest.mark.parametrize("name", ON_MESH)
def test_the_first_axis_of_each_side_stays_sharded(name):
    shape, numbers, spec, inside, expected = ON_MESH[name]
    mesh = mesh_of(4, 2, names=("x", "y"), kind=EXPLICIT)
    params = trees.normal({"w": shape})
    rules = {"w": MuonDimensionNumbers(*numbers)}
    tx = jm.as_matrices(seeing(seen := []), jm.find_matrices(params, rules=rules))
    placed = jax.device_put(params, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        updates = jax.jit(lambda x: tx.update(x, optax.EmptyState())[0])(placed)
    types = jax.typeof(seen[0]["w"])
    rank = len(inside)
    assert types.shape == inside
    assert (*types.sharding.spec,) == (*expected, *[None] * (rank - len(expected)))
    assert updates["w"].sharding.is_equivalent_to(placed["w"].sharding, len(shape))
    np.testing.assert_array_equal(updates["w"], params["w"])
    divided = jm.fsdp(params, mesh, rules, axes="x")["w"].spec
    axes = [axis for axis, entry in enumerate(divided) if entry]
    assert axes == [{"window": 3, "experts": 2}.get(name, 0)]


def test_a_chain_on_a_mesh_is_that_of_one_device():
    inside = optax.chain(jm.orthogonalize(jm.ExactPolar()), jm.scale_by_normuon())
    muon = optax.chain(jm.scale_by_momentum(), jm.as_matrices(inside, MATRICES))
    groups = {"muon": muon, "adamw": optax.adam(1.0)}
    tx = optax.multi_transform(groups, MATRICES.labels)
    on = jm.on_mesh(tx, mesh_of(2), divide="data", min_size=1)
    case.assert_verified(on, PARAMS)
