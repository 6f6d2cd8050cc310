"""Moments that are put into a state: parts, counts, and what does not fit.

`tests/parity/test_takeover.py` goes on with whole runs of other optimizers.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.mesh.layouts import mesh_of
from tests.reading import reader

ONES = {"up": jnp.ones((4, 8))}


def momentum(state):
    """Of a recipe."""
    return state.inner_states["muon"].inner_state[0].mu


def moments_of(first, second):
    """Ones of these shapes."""
    return jm.Moments(
        1, *({p: np.ones(s) for p, s in x.items()} for x in (first, second))
    )


OF_UP = moments_of({"up": (4, 8)}, {})


@pytest.mark.parametrize("devices", [None, 2])
def test_parts_that_are_a_batch(devices):
    """Heads, say: the momentum has their batch axis, and is sharded as in init."""
    tx = jm.muon(matrices=reader(splits={"up": jm.Split(2, axis=0)}))
    if devices is not None:
        tx = jm.on_mesh(tx, mesh_of(devices), divide="data", min_size=1)
    mean = np.arange(32.0).reshape(4, 8)
    empty = tx.init(ONES)  # which JAX then remembers
    taken = jm.take_over(tx, ONES, jm.Moments(3, {"up": mean}))
    mu, like = (momentum(state)["up"] for state in (taken, empty))
    np.testing.assert_array_equal(mu, mean.reshape(2, 2, 8))
    assert mu.sharding == like.sharding
    assert mu.sharding.is_fully_replicated == (devices is None)


def test_momentum_in_few_bits_is_rounded_as_by_the_last_step():
    grads = {"up": jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)))}
    tx = jm.nesterov(0.75, accumulator_dtype="int8")
    _, state = tx.update(grads, tx.init(ONES), ONES)
    moments = jm.Moments(1, {"up": 0.25 * grads["up"]})
    taken = jm.take_over(tx, ONES, moments)
    np.testing.assert_array_equal(taken.mu["up"], state.mu["up"])


@pytest.mark.parametrize(
    ("wrap", "counter"),
    [
        (lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda n: 1.0)), "count"),
        (lambda tx: optax.conditionally_mask(tx, lambda n: n < 9), "step"),
        (lambda tx: optax.chain(optax.add_noise(0.1, 0.5, 0), tx), "count"),
        (lambda tx: optax.MultiSteps(tx, lambda step: 1 + step), "gradient_step"),
    ],
    ids=["schedule", "condition", "noise", "multi steps"],
)
def test_counts_of_steps(wrap, counter):
    params = ONES | {"b": jnp.ones(8)}
    moments = moments_of({"up": (4, 8), "b": (8,)}, {"b": (8,)})
    taken = jm.take_over(wrap(jm.nanochat()), params, moments)
    for name in {"count", counter}:
        counts = optax.tree.get_all_with_path(taken, name)
        assert counts
        assert all(count == 1 for _, count in counts)


def test_counts_of_injected_schedules():
    tx = optax.inject_hyperparams(jm.muon, static_args=("steps",))(lambda n: 0.1 + n)
    taken = jm.take_over(tx, ONES, OF_UP)
    _, state = tx.update(ONES, taken, ONES)
    assert taken.count == 1
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1.1)


def test_a_plateau_counts_from_zero():
    """It lowers the rate by the losses that it has seen itself, and their number."""
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=10)
    taken = jm.take_over(optax.chain(jm.muon(), plateau), ONES, OF_UP)
    assert taken[1] == plateau.init(ONES)


@pytest.mark.parametrize(
    ("other", "where"),
    {
        "ema": (optax.ema(0.9), r"\[1\].ema\['up'\] of shape \(4, 8\)"),
        "amsgrad": (optax.amsgrad(0.1), r"\[1\]\[0\].mu\['up'\]"),
        "masked": (
            optax.masked(optax.adafactor(0.1), {"up": True}),
            r"\[1\].inner_state",
        ),
    }.values(),
)
def test_moments_that_a_run_cannot_fill(other, where):
    with pytest.raises(ValueError, match=f"cannot fill state{where}.*; expected"):
        jm.take_over(optax.chain(jm.muon(), other), ONES, OF_UP)


@pytest.mark.parametrize("other", [optax.adamax, optax.contrib.adopt, optax.yogi])
@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, jm.skip_nonfinite, lambda tx: jm.on_mesh(tx, mesh_of(2))]
)
def test_states_of_adams_type_with_other_averages(other, wrap):
    """Their first step would be 63 times too long."""
    tx = wrap(jm.muon(adamw=optax.inject_hyperparams(other)(1e-3)))
    moments = moments_of({"up": (4, 8), "bias": (8,)}, {"bias": (8,)})
    with pytest.raises(ValueError, match=f"the state of scale_by_{other.__name__}, "):
        jm.take_over(tx, ONES | {"bias": jnp.ones(8)}, moments)


def test_momentum_of_scalars_cannot_be_filled_either():
    params = ONES | {"temperature": jnp.ones(())}
    tx = jm.muon(adamw=optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9))
    with pytest.raises(ValueError, match=r"trace\['temperature'\] of shape \(\)"):
        jm.take_over(tx, params, OF_UP)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {}, "moments.first has nothing for 'b'; it has nothing at all"),
        (
            {"up": (8, 4), "b": (8,)},
            {"b": (8,)},
            r"of 'up' has shape \(8, 4\), and the state \(4, 8\)",
        ),
        ({"up": (4, 8), "b": (8,)}, {}, "moments.second has nothing for 'b'"),
    ],
)
def test_a_run_that_is_not_of_these_parameters(first, second, words):
    params = ONES | {"b": jnp.ones(8)}
    with pytest.raises(ValueError, match=words):
        jm.take_over(jm.nanochat(), params, moments_of(first, second))


def test_means_over_another_axis():
    """Of a kernel with more inputs nanochat has means by input, normuon by output."""
    means = np.broadcast_to(np.arange(8.0)[:, None], (8, 4))
    moments = jm.Moments(1, {"down": np.ones((8, 4))}, means={"down": means})
    params = {"down": jnp.ones((8, 4))}
    jm.take_over(jm.nanochat(), params, moments)
    with pytest.raises(ValueError, match=r"means of 'down' differ .* shape \(1, 4\)"):
        jm.take_over(jm.normuon(), params, moments)


def test_a_state_without_a_count():
    with pytest.raises(ValueError, match=r"state: \[\]; expected one count"):
        jm.Moments.of(optax.sgd(0.1).init({"w": jnp.ones(2)}))
