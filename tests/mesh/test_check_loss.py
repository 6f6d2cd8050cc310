"""`TrainStep.check_loss`: which losses depend on the number of devices, and why."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_muon as jm
from tests.mesh.case import mesh_of
from tests.trees import normal

PARAMS = normal({"up": (12, 24), "down": (24, 8)}, size=0.3)
X, Y = normal([(32, 12), (32, 8)], 1)
KEY = jax.random.key(0)
AXES = ("data",)


def errors(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2, axis=-1)


def mean(params, batch):
    return errors(params, *batch).mean()


def masked(params, batch):
    x, y, mask = batch
    count = mask.sum()
    mean = (errors(params, x, y) * mask).sum() / jnp.maximum(count, 1)
    return mean, count


def summed(params, batch):
    return errors(params, *batch).sum()


def dropped(params, x, y, keep):
    return jnp.mean(((keep * (x @ params["up"])) @ params["down"] - y) ** 2)


def one_key(params, batch, key):
    x, y = batch
    return dropped(params, x, y, jax.random.bernoulli(key, 0.5, (len(x), 24)))


def key_each(params, batch):
    x, y, keys = batch
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (24,)))(keys)
    return dropped(params, x, y, keep)


def contrastive(params, batch, gather=False):
    u, v = batch[0] @ params["up"] @ params["down"], batch[1]
    labels = jnp.arange(len(u))
    if gather:
        v = jax.lax.all_gather(v, "data", tiled=True)
        labels += len(u) * jax.lax.axis_index("data")
    return optax.softmax_cross_entropy_with_integer_labels(u @ v.T, labels).mean()


def gathered(params, batch):
    return contrastive(params, batch, gather=True)


def batch_norm(axis_name):
    """Its loss, and the statistics among `others`."""
    norm = nnx.BatchNorm(24, axis_name=axis_name, rngs=nnx.Rngs(0))
    graph, weights, statistics = nnx.split(norm, nnx.Param, ...)

    def loss(params, batch, statistics):
        x, y = batch
        norm = nnx.merge(graph, weights, statistics)
        hidden = jax.nn.relu(norm(x @ params["up"]))
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    return loss, BATCH, (statistics,)


BATCH = (X, Y)
INTERACT, ONE_KEY, OTHER = "samples interact", "from one key", "number of devices"
MASKED = (X, Y, (jnp.arange(32) % 5 < jnp.arange(32) // 8).astype(float))
KEYS = (X, Y, jax.random.split(KEY, 32))
LOSSES = {  # the loss, its batch, others, settings, and what is wrong
    "mean": (mean, BATCH, (), {}, None),
    "masked mean": (masked, MASKED, (), {"weighted": True}, None),
    "in microbatches": (
        masked,
        MASKED,
        (),
        {"weighted": True, "microbatches": 2},
        None,
    ),
    "key each": (key_each, KEYS, (), {}, None),
    "one key": (one_key, BATCH, (KEY,), {}, ONE_KEY),
    "one raw key": (one_key, BATCH, (jax.random.PRNGKey(0),), {}, ONE_KEY),
    "batch norm": (*batch_norm(None), {}, INTERACT),
    "batch norm of all": (*batch_norm(AXES), {}, None),
    "contrastive": (contrastive, BATCH, (), {}, INTERACT),
    "contrastive of all": (gathered, BATCH, (), {}, None),
    "sum": (summed, BATCH, (), {}, OTHER),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_differs_between_devices(name):
    loss, batch, others, settings, wrong = LOSSES[name]
    tx = jm.on_mesh(optax.sgd(0.1), mesh_of(8), divide="data")
    step = jm.make_train_step(loss, tx, **settings)
    found = step.check_loss(PARAMS, batch, *others)
    if wrong is None:
        assert found == ()
    else:
        (text,) = found
        kinds = [x for x in (INTERACT, ONE_KEY) if x in text]
        assert kinds == ([] if wrong == OTHER else [wrong]) and "8 devices" in text
