"""flowjax: `fit_to_data` with its Adam, and with the same Adam for all but matrices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data
from flowjax.train.losses import MaximumLikelihoodLoss

import jax_muon as jm

RATE = 5e-3


def two_moons(rng, n=2000):
    angle, side = rng.uniform(0, np.pi, n), rng.integers(0, 2, n)
    sign = 1 - 2 * side
    x = np.stack([sign * np.cos(angle) + side, sign * np.sin(angle) + 0.5 * side], 1)
    return jnp.asarray(x + 0.1 * rng.standard_normal((n, 2)), jnp.float32)


def test_a_flow_of_two_moons(rng):
    """Masked kernels are matrices; as in other flows, Muon gains nothing here."""
    data, key = two_moons(rng), jax.random.key(0)
    flow = masked_autoregressive_flow(
        key, base_dist=Normal(jnp.zeros(2)), flow_layers=4, nn_width=32
    )
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )
    loss = MaximumLikelihoodLoss()
    matrices = jm.find_matrices(
        params, lambda p, x: loss(p, static, x, key=key), data[:100]
    )
    kernels = [x for x in matrices.values() if x.label == "muon"]
    assert kernels and all("weight" in x.path for x in kernels)
    adam = optax.adam(RATE)
    muon = jm.muon(0.01, adamw=adam, dtype="float32", matrices=matrices)
    ends = {}
    for name, optimizer in (("adam", adam), ("muon", muon)):
        _, losses = fit_to_data(
            key,
            flow,
            data,
            optimizer=optimizer,
            max_epochs=30,
            max_patience=30,
            show_progress=False,
        )
        ends[name] = min(losses["val"])
    print(ends)
    assert ends["muon"] < losses["val"][0] - 0.2
    assert ends["muon"] < ends["adam"] + 0.1
