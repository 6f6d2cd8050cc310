"""penzai: its trainer with their Adam, and with the same Adam for all but matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models import simple_mlp
from penzai.toolshed import basic_training

import jax_muon as jm

RATE = 3e-3


def mean_squares(model, x, y):
    return jnp.mean((model(x) - y).unwrap("batch", "features") ** 2)


def loss_fn(model, state, rng, x, y):
    """As their trainer calls it."""
    del rng
    loss = mean_squares(model, x, y)
    return loss, state, {"loss": loss}


def make():
    return simple_mlp.MLP.from_config(jax.random.key(0), [8, 64, 64, 4])


def train(optimizer, x, y):
    """The losses of 60 steps."""
    trainer = basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(1),
        model=make(),
        optimizer_def=optimizer,
        loss_fn=loss_fn,
    )
    return [float(trainer.step(x=x, y=y)["loss"]) for _ in range(60)]


def test_its_trainer(rng):
    """Its parameters are named arrays in variables, which the loss reads, too."""
    inputs = rng.standard_normal((64, 8)).astype("float32")
    outputs = np.sin(inputs @ rng.standard_normal((8, 4))).astype("float32")
    x, y = (
        pz.nx.wrap(jnp.asarray(z)).tag("batch", "features") for z in (inputs, outputs)
    )
    model, params = pz.unbind_params(make(), freeze=True)
    matrices = jm.find_matrices(
        params, lambda p, x, y: mean_squares(pz.bind_variables(model, p), x, y), x, y
    )
    labels = [parameter.label for parameter in matrices.values()]
    assert labels == ["muon", "adamw", "muon", "adamw", "adamw", "adamw"]
    adam = optax.adam(RATE)
    muon = jm.muon(0.02, adamw=adam, dtype="float32", matrices=matrices)
    ends = {name: train(tx, x, y) for name, tx in (("adam", adam), ("muon", muon))}
    print({name: (losses[0], losses[-1]) for name, losses in ends.items()})
    assert ends["muon"][-1] < ends["adam"][-1]
