"""State that is not like parameters has the same bits or numbers in every layout."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.mesh import layouts, problems
from tests.mesh.layouts import AUTO, EXPLICIT


def whole_numbers(seed):
    """Gradients of "mixed" whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    shapes = problems.PROBLEMS["mixed"].items()
    return {k: rng.integers(-9, 10, s).astype("float32") for k, s in shapes}


def assert_rows_are_together(state):
    for whole, scale in zip(*map(jax.tree.leaves, state[1:]), strict=True):
        pieces = (x.sharding.shard_shape(x.shape) for x in (whole, scale))
        rows, scales = (piece[:-1] for piece in pieces)
        assert rows == scales


# Rows whole and divided, over the axis of a stack, state divided over replicas besides.
JOURNEYS = [
    ("int8", AUTO, ["HSDP", None]),
    ("int8", EXPLICIT, ["columns of FSDP"]),
    ("bfloat16", AUTO, ["FSDP x TP"]),
]


@pytest.mark.parametrize(("dtype", "kind", "journey"), JOURNEYS)
def test_momentum_travels_bit_for_bit(dtype, kind, journey):
    """Two steps in each layout give what all of them give on one device."""
    tx = jm.nesterov(0.5, accumulator_dtype=dtype)
    params, _ = problems.draw("mixed")
    state = expected = tx.init(params)
    for leg, where in enumerate(journey):
        mesh, on, place = None, tx, lambda tree: tree
        if where is not None:
            layout = layouts.layout(where, kind)
            mesh, on, place = layout.mesh, layout.on(tx), layout.place
        placed = place(params)
        target = jm.abstract_state(on, placed, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, target)
        state = jax.device_put(jax.device_get(state), shardings)
        for seed in (2 * leg, 2 * leg + 1):
            grads = whole_numbers(seed)
            _, expected = jax.jit(tx.update)(grads, expected, params)
            _, state = jax.jit(on.update)(place(grads), state, placed)
        chex.assert_trees_all_equal(state, expected, strict=True)
        if dtype == "int8":
            assert_rows_are_together(state)


def test_a_train_step_with_int8_momentum():
    """Gradients that are exact make momentum so: what is left is orthogonalization."""
    weights = whole_numbers(0)

    def loss(params, batch):
        slopes = {k: jnp.mean(batch) * weights[k] for k in params}
        return sum(jnp.sum(slopes[k] * params[k]) for k in params)

    tx = layouts.recipe("muon", momentum_dtype="int8")
    start, _ = problems.draw("mixed")
    data = np.random.default_rng(1).integers(-4, 5, (4, 16, 8)).astype("float32")
    expected, state, _ = problems.single_device(tx, loss, start, data)
    mesh = layouts.mesh_of(8)
    step = jm.make_train_step(loss, tx, mesh, min_size=1)
    params, got, _ = layouts.train_step_run(step, start, data)
    assert problems.distance(params, expected, start) < 5e-6
    for name in ("mu", "scale"):
        one, other = (
            getattr(s.inner_states["muon"].inner_state[0], name) for s in (got, state)
        )
        chex.assert_trees_all_equal(one, other, strict=True)


def test_a_snapshot_is_that_of_one_device():
    tx = optax.chain(jm.nanochat(), optax.snapshot("update_norm", optax.tree.norm))
    on = layouts.layout("ZeRO-2 x FSDP x TP").on(tx)
    found = layouts.assert_verified(on, problems.draw("mixed")[0])
    assert any("update_norm" in path for path in found.differences)


def test_parameters_of_a_weak_type():
    """`jnp.full(shape, 0.5)` has one, which a cast would strip."""
    params = {"mlp": jnp.full((64, 64), 0.5)}
    tx = jm.on_mesh(jm.nanochat(), layouts.mesh_of(8), divide="data")
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["mlp"].dtype == "float32"
