"""brax: its PPO trains inside `jax.pmap`, on one device and on several."""

import brax.training.agents.ppo.train as ppo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brax import envs
from brax.training.acme import running_statistics
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo.losses import PPONetworkParams

import jax_muon as jm

adam = optax.adam
ENVIRONMENT = envs.get_environment("fast")
NETWORKS = []  # as brax makes them, before its optimizer


def networks(*args, **settings):
    NETWORKS[:] = [ppo_networks.make_ppo_networks(*args, **settings)]
    return NETWORKS[0]


def read(params):
    """By both networks, whose outputs the loss depends on."""
    (network,) = NETWORKS
    size = ENVIRONMENT.observation_size
    normalizer = running_statistics.init_state(jax.ShapeDtypeStruct((size,), "float32"))

    def outputs(params, observations):
        policy = network.policy_network.apply(normalizer, params.policy, observations)
        value = network.value_network.apply(normalizer, params.value, observations)
        return policy, value

    return jm.find_matrices(params, outputs, jax.ShapeDtypeStruct((4, size), "float32"))


def muon(learning_rate):
    """Without decay: brax does not pass the parameters to the update."""
    return jm.muon(
        learning_rate,
        matrices=read,
        adamw=adam(learning_rate),
        adjust_lr_fn="match_rms_adamw",
        dtype="float32",
    )


def replicated(tree, devices):
    """What brax 0.14.2 calls `jax.device_put_replicated`, which JAX 0.10 lacks."""
    stack = lambda x: jnp.stack(len(devices) * [jnp.asarray(x)])  # noqa: E731
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    return jax.device_put(jax.tree.map(stack, tree), sharding)


def train(devices):
    """The parameters that brax's PPO ends with; it asserts that replicas are equal."""
    _, params, _ = ppo.train(
        ENVIRONMENT,
        num_timesteps=2**12,
        episode_length=32,
        num_envs=16,
        batch_size=16,
        unroll_length=4,
        num_minibatches=4,
        num_updates_per_batch=2,
        num_evals=2,
        num_eval_envs=4,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        normalize_observations=True,
        network_factory=networks,
        max_devices_per_host=devices,
    )
    return params


@pytest.mark.parametrize("devices", [1, 4])
def test_ppo(devices, monkeypatch):
    """On one device nothing need be said; on several `on_replicas` says it."""
    monkeypatch.setattr(jax, "device_put_replicated", replicated, raising=False)
    if devices > 1:
        monkeypatch.setattr(ppo.optax, "adam", muon)
        with pytest.raises(ValueError, match=r"inside jax.pmap.*jax_muon.on_replicas"):
            train(devices)
    used = []

    def on_replicas(learning_rate):
        used.append(learning_rate)
        tx = muon(learning_rate)
        return jm.on_replicas(tx) if devices > 1 else tx

    monkeypatch.setattr(ppo.optax, "adam", on_replicas)
    params = train(devices)
    assert used == [3e-3]
    leaves = jax.tree.leaves(params[1:])
    assert all(np.isfinite(x).all() for x in leaves)
    kernels = [x for x in leaves if x.ndim == 2]
    matrices = read(PPONetworkParams(*params[1:])).values()
    assert sum(x.label == "muon" for x in matrices) == len(kernels) - 2 == 9
