"""Steps on a sphere: trajectories against NumPy, norms, matrices that start at zero."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from jax_muon.polar.coefficients import NEWTON_SCHULZ
from tests import oracle


@pytest.mark.parametrize("name", ["muonh", "normuonh"])
def test_trajectories_by_hand(rng, x64, name):
    """A wide and a tall matrix, and one that starts at zero and reaches its sphere."""
    rate, momentum = lambda t: 0.6 / (1 + t), lambda t: 0.85 + 0.01 * t
    tx = getattr(jm, name)(rate, momentum, dtype="float64")
    start = {
        "wide": rng.standard_normal((5, 7)),
        "tall": rng.standard_normal((7, 5)),
        "zero": np.zeros((6, 4)),
    }
    params = jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    theirs = {k: (w.T, 0.0, 0.0, np.linalg.norm(w)) for k, w in start.items()}
    inside = []
    for t in range(8):
        # One direction with some noise, so that the matrix gets away from zero.
        grads = {k: 3 * np.eye(*w.shape) for k, w in start.items()}
        grads = {k: g + rng.standard_normal(g.shape) for k, g in grads.items()}
        for key, (w, m, v, radius) in theirs.items():
            g, mu = grads[key].T, momentum(t)
            m = mu * m + (1 - mu) * g
            u = mu * m + (1 - mu) * g if name == "muonh" else m
            x = oracle.polar(u, [NEWTON_SCHULZ] * 5, 1.0, 1e-7)
            if name == "normuonh":
                x, v = oracle.normuon(x, v, 0.95, axis=1, eps=1e-16)
            w, radius = oracle.hyperball(w, x, rate(t), radius)
            theirs[key] = (w, m, v, radius)
        inside.append(not theirs["zero"][-1])
        updates, state = tx.update(jax.tree.map(jnp.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)
        for key, w in params.items():
            np.testing.assert_allclose(w, theirs[key][0].T, rtol=0, atol=1e-12)
    assert inside[0] and not inside[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_stay_and_injected_rates_are_data(rng, dtype):
    """Big steps for long, scanned layers of norms that differ, a rate of zero."""
    sizes = np.array([1.0, 10.0, 100.0])[:, None, None]
    params = {"layers": {"w": jnp.asarray(rng.standard_normal((3, 8, 12)) * sizes)}}
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    tx = optax.inject_hyperparams(jm.muonh, static_args=("steps",))(0.1)
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))

    def norms(params):
        return jnp.linalg.norm(params["layers"]["w"].astype("float32"), axis=(1, 2))

    state, start, before = tx.init(params), norms(params), params
    for step in range(40):
        state.hyperparams["learning_rate"] = jnp.asarray(0.1 * (step < 39), dtype)
        key = jax.random.key(step)
        draw = functools.partial(jax.random.normal, key, dtype=dtype)
        grads = jax.tree.map(lambda p, draw=draw: draw(p.shape), params)
        before = params
        updates, new = update(grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        params, state = optax.apply_updates(params, updates), new
    # Float32 rounds as long as it runs; the last step takes bfloat16's rounding back.
    np.testing.assert_allclose(
        norms(params), start, rtol=3e-3 if "b" in dtype else 1e-6
    )
    chex.assert_trees_all_close(params, before, rtol=1e-2 if "b" in dtype else 1e-6)


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


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-0.1,), "learning_rate=-0.1; expected a finite number of at least 0"),
        ((0.1,), "hyperball needs the parameters"),
    ],
)
def test_bad_input(arguments, match):
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=match):
        tx = jm.hyperball(*arguments)
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"'b' of shape \(3,\)"):
        jm.hyperball(0.1).init({"b": jnp.ones(3)})
    with pytest.raises(ValueError, match="eps=0; expected a finite number above 0"):
        jm.hyperball(0.1, eps=0)


def test_parameters_in_another_order():
    """Weights and radii belong to an update by path; other names are an error."""
    small, large = jnp.ones((2, 3)), 9 * jnp.ones((2, 3))
    tx, params = jm.hyperball(0.1), {"a": small, "b": large}
    state = tx.init(params)
    turned = {"b": large, "a": small}
    one, _ = tx.update(params, state, turned)
    chex.assert_trees_all_equal(one, tx.update(params, state, params)[0])
    with pytest.raises(ValueError, match=r"b|c"):
        tx.update(params, state, {"b": small, "c": large})
