"""Steps on a sphere: norms stay, and only directions count."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.reading import reader


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_stay_and_injected_rates_are_data(rng, dtype):
    """Big steps for long, scanned layers of norms that differ, a rate of zero."""
    sizes = np.array([1.0, 10.0, 100.0])[:, None, None]
    params = {"layers/w": jnp.asarray(rng.standard_normal((3, 8, 12)) * sizes, dtype)}
    tx = optax.inject_hyperparams(jm.muonh, static_args="matrices")(
        0.1, matrices=reader()
    )
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))

    def norms(params):
        return jnp.linalg.norm(params["layers/w"].astype("float32"), axis=(1, 2))

    state, start = tx.init(params), norms(params)
    for step in range(40):
        state.hyperparams["learning_rate"] = jnp.asarray(0.1 * (step < 39), dtype)
        noise = jax.random.normal(jax.random.key(step), (3, 8, 12), dtype)
        before = params
        updates, state = update({"layers/w": noise}, state, params)
        params = optax.apply_updates(params, updates)
    # Float32 rounds as long as it runs; the last step takes bfloat16's rounding back.
    narrow = dtype == "bfloat16"
    np.testing.assert_allclose(norms(params), start, rtol=3e-3 if narrow else 1e-6)
    chex.assert_trees_all_close(params, before, rtol=1e-2 if narrow else 1e-6)


def test_the_scale_of_the_chain_is_nothing_and_no_gradient_no_step(rng):
    w = jnp.asarray(rng.standard_normal((4, 6)), "float32")
    params = {"w": w, "still": w}
    grads = {"w": w[::-1], "still": jnp.zeros_like(w)}
    piece = jm.hyperball(0.2)
    one, _ = piece.update(grads, piece.init(params), params)
    scaled = optax.chain(optax.scale(1e6), piece)
    other, _ = scaled.update(grads, scaled.init(params), params)
    chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)
    assert jnp.linalg.norm(one["w"]) > 0.1 * jnp.linalg.norm(w)
    np.testing.assert_array_equal(one["still"], 0)
