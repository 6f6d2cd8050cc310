"""What `observe` keeps, against NumPy, and that it changes nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from jax_muon.storage import random_bits


def model(rng):
    shapes = {"up": (6, 16), "down": (16, 6), "scan/mlp": (2, 6, 8), "wte": (9, 6)}
    return {
        k: jnp.asarray(rng.standard_normal(s), "float32") for k, s in shapes.items()
    }


def rms(*arrays):
    return np.sqrt(np.mean(np.concatenate([np.ravel(x) for x in arrays]) ** 2))


def singular_values(x):
    """Of every matrix of a stack, relative to its largest."""
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    return s.reshape(-1, s.shape[-1]) / s.max(-1).reshape(-1, 1)


def observed(state):
    return {k: float(v) for k, v in optax.tree.get(state, "observed").items()}


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_numbers_are_those_of_numpy(rng, dtype):
    params, inner = model(rng), jm.muon(0.1, dtype="float32", momentum_dtype=dtype)
    tx = jm.observe(inner)
    grads = jax.tree.map(lambda p: p[::-1] + 0.3, params)
    state, plain = tx.init(params), inner.init(params)
    update, inner_update = jax.jit(tx.update), jax.jit(inner.update)
    for step in range(40):
        updates, state = update(grads, state, params)
        expected, plain = inner_update(grads, plain, params)
        if step < 2:
            chex.assert_trees_all_close(updates, expected, atol=1e-6)
    matrices = [k for k in params if k != "wte"]
    got = observed(state)
    assert got["muon/update_rms"] == pytest.approx(
        rms(*(updates[k] for k in matrices)), rel=1e-5
    )
    assert got["adamw/weight_rms"] == pytest.approx(rms(params["wte"]), rel=1e-5)
    assert got["adamw/ratio"] == pytest.approx(
        got["adamw/update_rms"] / got["adamw/weight_rms"], rel=1e-5
    )
    toward = [np.ravel(updates[k] * params[k] < 0) for k in matrices]
    assert got["muon/towards_zero"] == pytest.approx(np.mean(np.concatenate(toward)))
    ranks, errors = [], []
    for key in matrices:
        ranks += list((singular_values(grads[key]) ** 2).sum(-1))
        axis = -1 if params[key].shape[-1] >= params[key].shape[-2] else -2
        like = jnp.sum(updates[key], axis=axis, keepdims=True)
        bits = random_bits(like, key, jnp.asarray(39)) >> 31
        us = np.asarray(updates[key], np.float64)
        us = us if axis == -1 else np.swapaxes(us, -1, -2)
        every = zip(us.reshape(-1, *us.shape[-2:]), bits.reshape(-1, 6), strict=True)
        for u, bit in every:
            signs = np.where(bit, 1.0, -1.0)
            y = u @ (u.T @ signs)
            errors.append(1 - (signs @ y) ** 2 / (len(signs) * (y @ y)))
    tolerance = 0.03 if dtype else 1e-3
    assert got["muon/stable_rank"] == pytest.approx(np.mean(ranks), rel=tolerance)
    assert got["muon/orthogonality_error"] == pytest.approx(
        np.sqrt(np.mean(errors)), rel=1e-3
    )
    assert not {"adamw/stable_rank", "skipped_steps", "clipped_heads"} & set(got)


def test_an_orthogonal_update_has_no_error_and_decay_is_seen(rng):
    params = model(rng)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape)), params)
    tx = jm.observe(jm.muon(polar=jm.ExactPolar()))
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert observed(state)["muon/orthogonality_error"] < 2e-3
    plain = jm.nanochat(weight_decay=0.0, dtype="float32")
    tx = jm.observe(jm.nanochat(weight_decay=0.5, dtype="float32"))
    direction, _ = jax.jit(plain.update)(grads, plain.init(params), params)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    decays = [direction[k] * params[k] < 0 for k in params if k != "wte"]
    share = np.mean(np.concatenate([np.ravel(x) for x in decays]))
    assert observed(state)["muon/towards_zero"] == pytest.approx(share)


def test_counts_of_guards_and_of_clipped_heads():
    params = {"attn": {name: jnp.eye(4) for name in "qkv"}}
    tx = optax.chain(jm.muon(dtype="float32"), jm.clip_qk(10.0))
    tx = jm.observe(jm.skip_nonfinite(tx))
    update, state = jax.jit(tx.update), tx.init(params)
    assert observed(state)["skipped_steps"] == observed(state)["clipped_heads"] == 0
    logits = {"attn": jnp.array([40.0, 5.0])}
    _, state = update(params, state, params, max_logits=logits)
    assert observed(state)["clipped_heads"] == 1
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    _, state = update(bad, state, params, max_logits=logits)
    got = observed(state)
    assert (got["skipped_steps"], got["muon/update_rms"]) == (1, 0)
    assert got["muon/towards_zero"] == 0  # nothing moves
    assert np.isfinite(list(got.values())).all()


def test_splits_and_zeros_and_multi_steps(rng):
    """Parts are matrices of their own; nothing that is zero makes a nan."""
    params = {"qkv": {"kernel": jnp.asarray(rng.standard_normal((6, 18)), "bfloat16")}}
    reading = jm.Reading(splits={"qkv/kernel": jm.Split(("q", "k", "v"))})
    tx = jm.observe(jm.normuon(reading=reading), reading)
    state = tx.init(params)
    assert set(state.largest) == {f"qkv/kernel/{part}" for part in "qkv"}
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, after = jax.jit(optax.MultiSteps(tx, 1).update)(
        zeros, optax.MultiSteps(tx, 1).init(params), zeros
    )
    assert np.isfinite(list(observed(after).values())).all()
    chex.assert_trees_all_equal_shapes_and_dtypes(after.inner_opt_state, state)


@pytest.mark.parametrize("spike", [1e20, 1e25])
def test_the_rank_is_back_after_a_momentum_without_one(rng, spike):
    """Its squares are infinite for a step, and the vector of the power method stays."""
    params = {"up": jnp.asarray(rng.standard_normal((6, 16)), "float32")}
    tx = jm.observe(optax.trace(0.5))  # which passes every scale on its way down
    update, state = jax.jit(tx.update), tx.init(params)
    for step in range(150):
        scale = spike if step == 1 else 1.0
        grads = jax.tree.map(lambda p, scale=scale: scale * p, params)
        _, state = update(grads, state, params)
        assert step != 1 or observed(state)["muon/stable_rank"] == 0
    expected = (singular_values(params["up"]) ** 2).sum()
    assert observed(state)["muon/stable_rank"] == pytest.approx(expected, rel=1e-3)


def test_an_observe_of_nothing():
    with pytest.raises(ValueError, match="None; expected an optax transform"):
        jm.observe(None)
    tx = jm.observe(optax.sgd(0.1))
    for params in ({}, {"count": jnp.zeros(3, "int32")}):
        with pytest.raises(ValueError, match="no parameters of floating point"):
            tx.init(params)
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="observe needs the parameters"):
        tx.update(params, tx.init(params))
