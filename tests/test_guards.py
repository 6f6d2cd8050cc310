"""Guards: the same decision on all devices, and nothing moved by a skipped step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jax_muon as jm
from tests.distributed import problems


def mesh_of(devices):
    return jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )


def test_skip_leaves_everything_as_it_was_and_counts():
    params, _ = problems.draw("mixed")
    tx = jm.skip_nonfinite(jm.nanochat(dtype="float32"))
    state = tx.init(params)
    update = jax.jit(tx.update)
    good = jax.tree.map(jnp.ones_like, params)
    _, state = update(good, state, params)
    for value in (jnp.nan, jnp.inf):
        bad = {**good, "h_0/q": good["h_0/q"].at[3, 4].set(value)}
        updates, new = update(bad, state, params)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
        chex.assert_trees_all_equal(new.inner_state, state.inner_state)
        assert new.skipped == state.skipped + 1
        state = new
    updates, state = update(good, state, params)
    chex.assert_tree_all_finite(updates)
    assert state.skipped == 2
    assert jnp.any(updates["h_0/q"] != 0)


def test_one_device_with_a_nan_makes_all_skip():
    params, weights = problems.draw("mixed")
    plain = problems.loss_of(weights)
    data = np.array(problems.batches(3))
    data[1, 9, 5] = np.nan  # one sample, on the third of four devices
    tx = jm.skip_nonfinite(
        jm.nanochat(dtype="float32", adamw_eps=1e-6, zero2_axis="data"), axis="data"
    )
    mesh = mesh_of(4)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(plain, tx, mesh, donate=False)
    first, state, _ = step(params, state, data[0])
    second, skipped, _ = step(first, state, data[1])
    chex.assert_trees_all_equal(second, first)
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    assert skipped.skipped == 1
    third, _, _ = step(second, skipped, data[2])
    plain_tx = jm.nanochat(dtype="float32", adamw_eps=1e-6)
    expected, _, _ = problems.single_device(plain_tx, plain, params, data[[0, 2]])
    assert problems.distance(third, expected, params) < 5e-6


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_is_optax_clip_on_one_device(max_norm):
    params, _ = problems.draw("mixed")
    updates, _ = jm.clip_by_global_norm(max_norm).update(params, optax.EmptyState())
    expected, _ = optax.clip_by_global_norm(max_norm).update(params, None)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("wrapper", [jm.zero2_matrices, jm.zero2_rows])
def test_clip_takes_the_norm_over_all_devices(devices, wrapper):
    """Inside a wrapper, over scattered gradients, some of them small and replicated."""
    params, weights = problems.draw("mixed")
    if wrapper is jm.zero2_matrices:
        params = {k: v for k, v in params.items() if v.ndim > 1}
        weights = {k: weights[k] for k in params}
    loss, data = problems.loss_of(weights), problems.batches(3)
    scale = optax.scale_by_learning_rate(0.1)
    plain = optax.chain(optax.clip_by_global_norm(1.0), scale)
    expected, _, _ = problems.single_device(plain, loss, params, data)
    clip = jm.clip_by_global_norm(1.0, axis="data")
    tx = wrapper(optax.chain(clip, scale), "data")
    mesh = mesh_of(devices)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(loss, tx, mesh, donate=False)
    result = params
    for batch in data:
        result, state, _ = step(result, state, batch)
    assert problems.distance(result, expected, params) < 5e-6


@pytest.mark.parametrize("devices", [None, 4])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_recipe_clips_the_norm_over_all_parameters(devices, max_norm):
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(5)
    settings = {"dtype": "float32", "adamw_eps": 1e-6}
    clip = optax.clip_by_global_norm(max_norm)
    plain = optax.chain(clip, jm.nanochat(**settings))
    expected, expected_state, _ = problems.single_device(plain, loss, params, data)
    if devices is None:
        tx = jm.nanochat(max_norm=max_norm, **settings)
        result, state, _ = problems.single_device(tx, loss, params, data)
    else:
        tx = jm.nanochat(max_norm=max_norm, zero2_axis="data", **settings)
        mesh = mesh_of(devices)
        result, state = params, jm.init_optimizer(tx, params, mesh)
        step = jm.make_train_step(loss, tx, mesh, donate=False)
        for batch in data:
            result, state, _ = step(result, state, batch)
        state = jm.to_portable(state)
    assert problems.distance(result, expected, params) < 5e-6
    chex.assert_trees_all_close(state, expected_state, rtol=1e-4, atol=1e-5)


def test_zero2_multi_transform_takes_wrappers_only():
    clip = jm.clip_by_global_norm(1.0, axis="data")
    with pytest.raises(ValueError, match=r"'muon'.*zero2_rows gives"):
        jm.zero2_multi_transform({"muon": jm.nesterov()}, jm.label_params, clip)


def test_clip_refuses_gradients_that_are_not_reduced():
    params, weights = problems.draw("one matrix only")
    tx = optax.chain(
        jm.clip_by_global_norm(1.0, axis="data"), jm.nanochat(zero2_axis="data")
    )
    mesh = mesh_of(4)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh)
    with pytest.raises(ValueError, match="max_norm=, or a place inside"):
        step(params, state, problems.batches(1)[0])
    with pytest.raises(ValueError, match="max_norm=0"):
        jm.clip_by_global_norm(0)
