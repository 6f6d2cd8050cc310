"""What a loss in `jax_muon.make_train_step` needs besides samples.

    JAX_NUM_CPU_DEVICES=8 python examples/step_inputs.py

A step gives the loss each device's part of the batch, and everything after it whole.
Here are class weights and a teacher, keys for dropout, and BatchNorm's statistics. Each
loss has the same value on one device.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

import jax_muon as jm

CLASSES, WIDTH, SAMPLES = 16, 128, 16
key = jax.random.key(0)
images = jax.random.normal(key, (SAMPLES, 64))
labels = jax.random.randint(key, (SAMPLES,), 0, CLASSES)
student = {
    "up": jax.random.normal(key, (64, WIDTH)) / 8,
    "head": jnp.zeros((WIDTH, CLASSES)),
}
teacher = jax.tree.map(lambda x: x + 0.1, student)
weights = jnp.linspace(0.5, 1.5, CLASSES)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def logits(params, x):
    """A network with one hidden layer."""
    return jax.nn.relu(x @ params["up"]) @ params["head"]


def distill(params, batch, weights, teacher):
    """Class weights and a teacher are whole on every device."""
    x, labels = batch
    y = logits(params, x)
    soft = optax.softmax_cross_entropy(y, jax.nn.softmax(logits(teacher, x)))
    return jnp.mean(cross_entropy(y, labels) * weights[labels]) + jnp.mean(soft)


def with_dropout(params, batch):
    """A key for each sample: it drops the same activations on every mesh."""
    x, labels, keys = batch
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (WIDTH,)))(keys)
    hidden = jnp.where(keep, jax.nn.relu(x @ params["up"]) / 0.9, 0)
    return cross_entropy(hidden @ params["head"], labels).mean()


def batch_norm(mesh):
    """Weights, statistics and loss of a model whose BatchNorm sees all samples."""
    model = nnx.Sequential(
        nnx.Linear(64, WIDTH, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(WIDTH, axis_name=mesh.axis_names, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0)),
    )
    graph, params, statistics = nnx.split(model, nnx.Param, ...)

    def loss(params, batch, statistics):
        x, labels = batch
        model = nnx.merge(graph, params, statistics)
        value = cross_entropy(model(x), labels).mean()
        return value, nnx.state(model, nnx.BatchStat)

    return params, statistics, loss


def main(devices, steps=3):
    """Train with each of them; returns the last metrics of each."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)

    def optimizer(params, loss, *args):
        matrices = jm.find_matrices(params, loss, *args)
        recipe = jm.nanochat(0.02, adamw=optax.adamw(3e-3), matrices=matrices)
        return jm.on_mesh(recipe, mesh, divide="data")

    batch, last = (images, labels), {}

    tx = optimizer(student, distill, batch, weights, teacher)
    step = jm.make_train_step(distill, tx)
    params, state = step.init(student)
    for _ in range(steps):
        params, state, last["distill"] = step(params, state, batch, weights, teacher)

    keys = jax.random.split(key, SAMPLES)
    step = jm.make_train_step(
        with_dropout, optimizer(student, with_dropout, (*batch, keys))
    )
    params, state = step.init(student)
    for number in range(steps):
        keys = jax.random.split(jax.random.fold_in(key, number), SAMPLES)
        params, state, last["dropout"] = step(params, state, (*batch, keys))

    params, statistics, loss = batch_norm(mesh)
    tx = optimizer(params, loss, batch, statistics)
    step = jm.make_train_step(loss, tx, has_aux=True)
    params, state = step.init(params)
    for _ in range(steps):
        params, state, last["batch_norm"] = step(params, state, batch, statistics)
        statistics = last["batch_norm"]["aux"]
    return last


if __name__ == "__main__":
    for name, metrics in main(jax.devices()).items():
        print(f"{name}: loss {metrics['loss']:.4f}")
