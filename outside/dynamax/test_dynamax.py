"""dynamax: `fit_sgd` calls the update of an optimizer without parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from dynamax.linear_gaussian_ssm import LinearGaussianSSM
from dynamax.parameters import from_unconstrained, to_unconstrained

import jax_muon as jm

RATE = 1e-2


def test_a_linear_gaussian_model():
    """Recipes without decay end where their Adam ends; others say what is missing."""
    model, keys = LinearGaussianSSM(2, 6), jax.random.split(jax.random.key(0), 3)
    true, _ = model.initialize(keys[0], emission_weights=jnp.ones((6, 2)) * 0.5)
    _, emissions = model.sample(true, keys[1], 60)
    params, props = model.initialize(keys[2])

    def loss(free, emissions):
        return -model.marginal_log_prob(from_unconstrained(free, props), emissions)

    free = to_unconstrained(params, props)
    rules = {"dynamics/weights": "muon", "emissions/weights": "muon"}
    matrices = jm.find_matrices(free, loss, emissions, rules=rules)
    adam = optax.adam(RATE)

    def fit(optimizer):
        _, losses = model.fit_sgd(
            params, props, emissions, optimizer=optimizer, num_epochs=100
        )
        return losses

    with pytest.raises(ValueError, match=r"unless it is 0\.0, .*params=None"):
        fit(jm.nanochat(RATE, adamw=adam, matrices=matrices))
    muon = jm.muon(RATE, adamw=adam, dtype="float32", matrices=matrices)
    ends = {"adam": fit(adam), "muon": fit(muon)}
    print({name: (float(x[0]), float(x[-1])) for name, x in ends.items()})
    assert ends["muon"][-1] < ends["muon"][0]
    assert ends["muon"][-1] < ends["adam"][-1] + 0.1
