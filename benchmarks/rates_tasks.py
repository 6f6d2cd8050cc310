# ruff: noqa: E731
"""AdamW, and recipes at several first rates, on five small tasks of different kinds.

    python -m benchmarks.rates_tasks

AdamW's rate `lr` is searched in factors of two, with three seeds. Embeddings, heads and
vectors keep it while the rate of the matrices is tried. All other arguments are the
defaults. benchmarks/results/rates_tasks.json has every run; none is made twice.
"""

import collections
import json
import math
import statistics
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from gpt import GPT
from sklearn.datasets import load_digits, make_moons
from text import read_text

import jax_muon as jm
from benchmarks import program
from benchmarks.rates import RESULTS, SEEDS

PATH = RESULTS / "rates_tasks.json"
NEW = program.describe("benchmarks.rates_tasks", []) | {"tasks": {}}
SAVED = json.loads(PATH.read_text()) if PATH.exists() else NEW
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
FIELDS = ("unit", "width", "steps", "schedule")
Task = collections.namedtuple("Task", (*FIELDS, "loss", "batch", "validation", "init"))


class Net(linen.Module):
    """Layers of these widths, the last one linear, perhaps after convolutions."""

    widths: tuple[int, ...]
    activation: object = linen.gelu
    last: object = linen.initializers.lecun_normal()
    convolutions: int = 0

    @linen.compact
    def __call__(self, x):
        for _ in range(self.convolutions):
            x = self.activation(linen.Conv(32, (3, 3))(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1) if self.convolutions else x
        for width in self.widths[:-1]:
            x = self.activation(linen.Dense(width)(x))
        return linen.Dense(self.widths[-1], kernel_init=self.last)(x)


def rows_of(arrays, key, size):
    """A batch of random rows, with replacement."""
    rows = jax.random.randint(key, (size,), 0, len(arrays[0]))
    return tuple(jnp.asarray(x)[rows] for x in arrays)


def digits():
    """1500 images (64,) from 0 to 1 with labels, and 297 for validation."""
    order = np.random.default_rng(0).permutation(1797)
    images, labels = (x[order] for x in load_digits(return_X_y=True))
    images = (images / 16).astype("float32")
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def cnn():
    """Classify digits."""
    train, validation = digits()
    model = Net((32, 10), linen.relu, convolutions=2)

    def loss(params, batch):
        images = batch[0].reshape(-1, 8, 8, 1)
        return cross_entropy(model.apply(params, images), batch[1]).mean()

    batch = partial(rows_of, train, size=64)
    task = partial(Task, "nats", 32, 100, "constant", loss, batch, validation)
    return task(init=lambda key: model.init(key, jnp.ones((1, 8, 8, 1))))


def autoencoder():
    """Digits through 8 numbers."""
    (train, _), (validation, _) = digits()
    model = Net((128, 64, 8, 64, 128, 64))

    def loss(params, batch):
        return jnp.square(model.apply(params, batch[0]) - batch[0]).sum(-1).mean()

    batch, unit = partial(rows_of, (train,), size=64), "squared error per image"
    task = partial(Task, unit, 128, 600, "cosine", loss, batch, (validation,))
    return task(init=lambda key: model.init(key, jnp.ones((1, 64))))


def pinn():
    """Burgers' equation, u_t + u u_x = 0.01 / pi u_xx, u(0, x) = -sin(pi x)."""
    model = Net((32, 32, 32, 32, 1), jnp.tanh)

    def loss(params, batch):
        inside, start, ends = batch
        u = lambda t, x: model.apply(params, jnp.stack([t, x]))[0]

        def residual(t, x):
            slope = lambda x: jax.jvp(partial(u, t), (x,), (1.0,))
            (value, u_x), (_, u_xx) = jax.jvp(slope, (x,), (1.0,))
            _, u_t = jax.jvp(lambda t: u(t, x), (t,), (1.0,))
            return u_t + value * u_x - 0.01 / math.pi * u_xx

        inner = jax.vmap(residual)(*inside)
        first = jax.vmap(u)(jnp.zeros_like(start), start) + jnp.sin(jnp.pi * start)
        border = jax.vmap(u)(*ends)
        return sum(jnp.square(x).mean() for x in (inner, first, border))

    def batch(key, size=128):
        keys = jax.random.split(key, 4)
        t, later = (jax.random.uniform(k, (size,)) for k in keys[:2])
        x, start = (jax.random.uniform(k, (size,), minval=-1) for k in keys[2:])
        return (t, x), start, (later, jnp.where(jnp.arange(size) % 2, 1.0, -1.0))

    validation, unit = batch(jax.random.key(10), 2048), "mean squared residual"
    task = partial(Task, unit, 32, 2000, "cosine", loss, batch, validation)
    return task(init=lambda key: model.init(key, jnp.ones(2)))


def flow():
    """RealNVP of two moons: six affine couplings with hidden layers of 64."""
    moons = partial(make_moons, 4000, noise=0.05)
    train, validation = (moons(random_state=x)[0].astype("float32") for x in (0, 1))
    net = Net((64, 64, 2), linen.relu, linen.initializers.zeros)

    def init(key):
        keys = jax.random.split(key, 6)
        return {f"coupling_{i}": net.init(k, jnp.ones(1)) for i, k in enumerate(keys)}

    def loss(params, batch):
        (kept, moved), volume = jnp.split(batch[0], 2, axis=-1), 0.0
        for i in range(6):
            out = net.apply(params[f"coupling_{i}"], kept)
            scale, shift = 2 * jnp.tanh(out[:, :1]), out[:, 1:]
            kept, moved = moved * jnp.exp(scale) + shift, kept
            volume += scale
        squares = jnp.square(kept) + jnp.square(moved)
        return (squares / 2 + math.log(2 * math.pi) - volume).mean()

    batch = partial(rows_of, (train,), size=128)
    return Task("nats", 64, 1000, "constant", loss, batch, (validation,), init)


def gpt():
    """The model and the text of examples/train_gpt.py: two blocks, characters."""
    text = read_text(None, 64)
    model = lambda key: GPT(len(text.vocabulary), 128, 2, rngs=nnx.Rngs(key))
    graph = nnx.graphdef(nnx.eval_shape(model, jax.random.key(0)))
    loss = lambda params, batch: nnx.merge(graph, params).loss(batch)

    def batch(key):
        starts = jax.random.randint(key, (8,), 0, text.train.size - 64)
        return jnp.asarray(text.train)[starts[:, None] + jnp.arange(65)]

    validation, schedule = text.validation_batches(8, 64), "warm-up, cosine, clipping"
    task = partial(Task, "nats", 128, 150, schedule, loss, batch)
    return task(
        validation.reshape(-1, 65), lambda key: nnx.state(model(key), nnx.Param)
    )


TASKS = {"CNN": cnn, "autoencoder": autoencoder, "PINN": pinn, "flow": flow, "GPT": gpt}


@cache
def trainer(name, optimizer):
    """Compiled: the last loss of a run, by rate, rate of all else, and key."""
    task = TASKS[name]()
    example = jax.jit(task.init)(jax.random.key(0))
    matrices = jm.read(example, task.loss, task.batch(jax.random.key(0)))
    warm = task.steps // 10 * ("warm-up" in task.schedule)
    shape = optax.warmup_cosine_decay_schedule(float(not warm), 1, warm, task.steps)
    shape = optax.constant_schedule(1.0) if task.schedule == "constant" else shape

    def transform(*rates):
        rate, rest = (lambda count, x=x: x * shape(count) for x in rates)
        tx, kept = optax.adamw(rate), optax.adamw(rest)
        if optimizer != "adamw":
            recipe = getattr(jm, optimizer)
            tx = recipe(rate, adamw=kept, dtype="float32", matrices=matrices)
        clip = optax.clip_by_global_norm(1.0)
        return optax.chain(clip, tx) if "clipping" in task.schedule else tx

    @jax.jit
    def run(rate, rest, key):
        tx, (first, key) = transform(rate, rest), jax.random.split(key)

        def step(carry, key):
            params, state = carry
            grads = jax.grad(task.loss)(params, task.batch(key))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = task.init(first)
        keys = jax.random.split(key, task.steps)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
        return task.loss(params, task.validation)

    return run


def mean(name, optimizer, rate, seeds=SEEDS):
    """The mean loss of these seeds at a rate, from the record if it has them."""
    about = SAVED["tasks"][name]
    losses = about.setdefault(optimizer, {}).setdefault(f"{rate:.4g}", [])
    lr = rate if optimizer == "adamw" else about["lr"]
    for seed in seeds[len(losses) :]:
        loss = float(trainer(name, optimizer)(rate, lr, jax.random.key(seed)))
        losses.append(loss if math.isfinite(loss) else 1e9)
        program.save(SAVED, PATH)
        program.print_row(name, optimizer, rate, seed, losses[-1])
    return statistics.fmean(losses[: len(seeds)])


def search(name, optimizer, best):
    """The best rate of the first seed, then of the mean, between two worse ones."""
    for seeds in (SEEDS[:1], SEEDS):
        middle = None
        while middle != best:
            middle = best
            tried = (middle, middle / 2, middle * 2)
            best = min(tried, key=lambda x: mean(name, optimizer, x, seeds))
    return best


def main():
    """The command."""
    for name, make in TASKS.items():
        task = SAVED["tasks"].setdefault(name, {})
        task.update(zip(FIELDS, make(), strict=False))
        task["lr"] = search(name, "adamw", 0.0025)
        lr, width = task["lr"], task["width"]
        search(name, "nanochat", 0.02)
        for rate in (lr * width / 32, (lr * width) ** 0.5 / 40):
            mean(name, "nanochat", rate)
        for rate in (0.01, lr * (width / 32) ** 0.5, lr**0.5 / 8):
            mean(name, "moonlight", rate)


if __name__ == "__main__":
    main()
