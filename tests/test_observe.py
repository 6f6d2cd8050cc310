"""What `observe` keeps, against NumPy, and that it changes nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.reading import reader


def model(rng):
    shapes = {"up": (6, 16), "down": (16, 6), "scan/mlp": (2, 6, 8), "wte": (9, 6)}
    return {
        k: jnp.asarray(rng.standard_normal(s), "float32") for k, s in shapes.items()
    }


def rms(*arrays):
    return np.sqrt(np.mean(np.concatenate([np.ravel(x) for x in arrays]) ** 2))


def observed(state):
    return {k: float(v) for k, v in optax.tree.get(state, "observed").items()}


def test_numbers_are_those_of_numpy(rng):
    params, inner = model(rng), jm.muon(0.1, dtype="float32")
    tx = jm.observe(inner)
    grads = jax.tree.map(lambda p: p[::-1] + 0.3, params)
    state, plain = tx.init(params), inner.init(params)
    update, inner_update = jax.jit(tx.update), jax.jit(inner.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        expected, plain = inner_update(grads, plain, params)
        chex.assert_trees_all_close(updates, expected, atol=1e-6)
    numbers = {}
    for label, keys in {
        "muon": [k for k in params if k != "wte"],
        "adamw": ["wte"],
    }.items():
        update_rms, weight_rms = (
            rms(*(tree[k] for k in keys)) for tree in (updates, params)
        )
        towards = [np.ravel(updates[k] * params[k] < 0) for k in keys]
        numbers |= {
            f"{label}/update_rms": update_rms,
            f"{label}/weight_rms": weight_rms,
            f"{label}/ratio": update_rms / weight_rms,
            f"{label}/towards_zero": np.mean(np.concatenate(towards)),
        }
    assert observed(state) == pytest.approx(numbers, rel=1e-5)


def test_a_skipped_step_moves_nothing():
    params = {"attn": {name: jnp.eye(4) for name in "qkv"}}
    tx = optax.chain(jm.muon(dtype="float32"), jm.clip_qk(10.0))
    tx = jm.observe(jm.skip_nonfinite(tx))
    update, state = jax.jit(tx.update), tx.init(params)
    logits = {"attn": jnp.array([40.0, 5.0])}
    _, state = update(params, state, params, max_logits=logits)
    assert optax.tree.get(state, "clipped") == 1
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    _, state = update(bad, state, params, max_logits=logits)
    got = observed(state)
    assert optax.tree.get(state, "skipped") == 1
    assert got["muon/update_rms"] == got["muon/towards_zero"] == 0
    assert np.isfinite(list(got.values())).all()


def test_labels_and_splits_and_zeros_and_multi_steps(rng):
    """Groups go by the labels of the reading; nothing that is zero makes a nan."""
    params = {"qkv": {"kernel": jnp.asarray(rng.standard_normal((6, 18)), "bfloat16")}}
    splits = {"qkv/kernel": jm.Split(("q", "k", "v"))}
    matrices = reader(rules={"qkv": "mine"}, splits=splits)
    tx = jm.observe(
        jm.normuon(matrices=matrices, groups={"mine": optax.sgd(0.1)}), matrices
    )
    state = tx.init(params)
    assert all(name.startswith("mine/") for name in observed(state))
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, after = jax.jit(optax.MultiSteps(tx, 1).update)(
        zeros, optax.MultiSteps(tx, 1).init(params), zeros
    )
    assert np.isfinite(list(observed(after).values())).all()
    chex.assert_trees_all_equal_shapes_and_dtypes(after.inner_opt_state, state)


def test_an_observe_of_nothing():
    with pytest.raises(ValueError, match="None; expected an optax transform"):
        jm.observe(None)
    tx = jm.observe(optax.sgd(0.1))
    assert tx.init({"count": jnp.zeros(3, "int32")}).observed == {}
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="observe needs the parameters"):
        tx.update(params, tx.init(params))
