"""`keras.optimizers.Muon` on JAX is `jm.moonlight`."""

import numpy as np
import optax
import pytest

import jax_muon as jm
from tests import pages, trees


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    """With JAX behind it, which it reads from the environment when it is imported."""
    home = str(tmp_path_factory.mktemp("keras"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", home)
        import keras

        yield keras


def test_the_step_of_the_page(keras, rng, as_users_write):
    """docs/frameworks.md: a Keras model in a training loop of one's own."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(24, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    x = rng.standard_normal((32, 6)).astype(np.float32)
    y = np.sin(x[:, :1])
    page = pages.run("Keras", model=model, x=x, y=y)
    params, losses = page["params"], [float(page["value"])]
    state = page["tx"].init(params)
    for _ in range(20):
        params, state, loss = page["step"](params, state, x, y)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 4
    for v in model.trainable_variables:
        v.assign(params[v.path])
    loss = float(page["loss_fn"](params, x, y))
    assert np.mean((np.asarray(model(x)) - y) ** 2) == pytest.approx(loss, rel=1e-5)


def test_trajectory(keras):
    """Tall, wide and square matrices, an embedding and a bias, for twenty steps."""
    shapes = {"tall": (24, 6), "wide": (6, 24), "square": (12, 12)}
    shapes |= {"embedding": (10, 6), "bias": (6,)}
    rate, decay = 0.02, 0.1
    start, *grads = (trees.normal(shapes, seed) for seed in range(21))
    theirs = {name: keras.Variable(x, name=name) for name, x in start.items()}
    optimizer = keras.optimizers.Muon(
        rate, adam_weight_decay=decay, weight_decay=decay, epsilon=1e-12
    )
    for grad in grads:
        optimizer.apply([grad[k] for k in theirs], list(theirs.values()))
    adamw = optax.adamw(rate, 0.9, 0.999, 1e-12, weight_decay=decay)
    given = {"adamw": adamw, "matrices": {"embedding": "adamw", "?*": "muon"}}
    tx = jm.moonlight(rate, weight_decay=decay, dtype="float32", **given)
    _, ours, _ = trees.run(tx, start, grads)
    for name, x in start.items():
        moved = ours[name] - x
        assert trees.distance(theirs[name].value - x, moved) < 2e-5, name
