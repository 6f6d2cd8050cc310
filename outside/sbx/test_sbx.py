"""sbx: PPO, which makes its optimizer inside `optax.inject_hyperparams`."""

import jax
import numpy as np
import optax
from sbx import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import jax_muon as jm


def make(learning_rate):
    """The optimizer of the actor and of the critic; both call their heads Dense_2."""
    return jm.muon(
        learning_rate,
        adamw=optax.adam(learning_rate, eps=1e-5),
        dtype="float32",
        matrices={"Dense_2": "adamw", "?*": "muon"},
    )


def test_ppo():
    """The rate is the one that its schedule injects; the pole stays up for longer."""
    model = PPO(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=lambda left: 1e-4 + 3e-3 * left,
        n_steps=512,
        batch_size=64,
        n_epochs=5,
        policy_kwargs={"optimizer_class": make},
        seed=0,
        device="cpu",
    )
    before = evaluate_policy(model, model.get_env(), n_eval_episodes=10)[0]
    start = jax.tree.map(np.asarray, model.policy.actor_state.params)
    model.learn(8 * 512)
    state = model.policy.actor_state
    rate = float(state.opt_state[1].hyperparams["learning_rate"])
    np.testing.assert_allclose(rate, 1e-4, rtol=1e-6)  # at the end
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start, state.params)
    assert all(x > 0 for x in jax.tree.leaves(moved))
    after = evaluate_policy(model, model.get_env(), n_eval_episodes=10)[0]
    print({"before": before, "after": after})
    assert after > 1.5 * before
