"""One run of the example's model on its text, and the record that it leaves."""

import datetime
import functools
import math
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from gpt import GPT
from optimizers import (
    OPTIMIZERS,
    Rates,
    recipe,
    schedules,
    with_embedding_factor,
)
from text import Text, read_text

import jax_muon as jm
from benchmarks import machine

EVALUATIONS = 15  # in a run, evenly,
EVERY = 20  # but at least so many steps apart
PACKAGES = ("jax_muon", "jax", "flax", "optax", "numpy")


def with_table(name: str) -> Callable[[Rates], optax.GradientTransformation]:
    """nanochat with a published table of coefficients instead of its own."""
    return recipe(
        jm.nanochat, polar=jm.NewtonSchulz(coefficients=name, dtype="float32")
    )


# The recipes, and Muon by each rule for the shape.
CONTENDERS = OPTIMIZERS | {
    f"muon-{rule}": recipe(jm.muon, shape_rule=rule)
    for rule in ("sqrt_ratio", "rms_0.2", "none")
}

# Optimizers with one thing changed.
VARIANTS = {
    "nanochat": {
        "nanochat-bfloat16-momentum": recipe(jm.nanochat, momentum_dtype="bfloat16"),
        "nanochat-int8-momentum": recipe(jm.nanochat, momentum_dtype="int8"),
        "nanochat-cubic5": with_table("cubic5"),
        "nanochat-jordan": with_table("jordan"),
        "nanochat-deepseek": with_table("deepseek"),
    }
}
CONTENDERS |= {name: make for of in VARIANTS.values() for name, make in of.items()}

FACTOR = "embedding_factor"  # a setting that is 1 where it is not there
Settings = dict[str, float | list[float]]


class Point(NamedTuple):
    """What a run is, and all that its losses depend on."""

    optimizer: str
    settings: Settings
    seed: int = 0
    steps: int = 300
    width: int = 128
    depth: int = 4
    context: int = 128
    batch_size: int = 16


def train(
    point: Point, look: Callable[[int, Any], None] = lambda done, params: None
) -> dict[str, Any]:
    """The record of a run: its losses, and what stopped it if it did not end.

    All runs of one optimizer and size share a compiled step, which takes the rates of
    the step as arguments.

    Args:
        point: what to run.
        look: is shown the parameters after every step, and at the beginning.
    """
    began = time.monotonic()
    text = data()
    params, state = beginning(point)
    step, evaluate = functions(
        point.optimizer, point.width, point.depth, embedding_factor(point)
    )
    validation = text.validation_batches(point.batch_size, point.context)
    hopeless = math.log(len(text.vocabulary))  # what a model that knows nothing has

    every = max(EVERY, point.steps // EVALUATIONS)
    losses, validation_losses, stopped = [], [], None
    look(0, params)
    for done, rates in enumerate(rates_of(point), start=1):
        batch = text.batch(point.seed, done, point.batch_size, point.context)
        params, state, loss = step(params, state, batch, rates)
        losses.append(float(loss))
        look(done, params)
        if done % every == 0 or done == point.steps:
            value = float(evaluate(params, validation))
            validation_losses.append([done, value])
            if not value < hopeless:
                stopped = f"hopeless: validation loss {value:.4g} after step {done}"
                break
    return point._asdict() | {
        "data": {"name": text.name, "sha256": text.sha256},
        "training_losses": [
            [end, float(np.mean(losses[max(0, end - 10) : end]))]
            for end in range(every, len(losses) + 1, every)
        ],
        "validation_losses": validation_losses,
        "validation_loss": None if stopped else validation_losses[-1][1],
        "stopped": stopped,
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.date.today().isoformat(),
        "device": machine.device_name(),
        "versions": {"python": platform.python_version()}
        | {name: machine.version(name) for name in PACKAGES},
    }


@functools.cache
def data() -> Text:
    """The text of the example."""
    return read_text(None, Point("", {}).context)


def rates_of(point: Point) -> Iterator[Rates]:
    """The rates of every step."""
    changing = {name: x for name, x in point.settings.items() if name != FACTOR}
    rates = schedules(point.steps, **changing)
    done = np.arange(point.steps)
    columns = [
        np.broadcast_to(rate(done) if callable(rate) else rate, done.shape)
        for rate in rates
    ]
    yield from map(Rates, *(np.asarray(column, np.float32) for column in columns))


def embedding_factor(point: Point) -> float:
    """AdamW's rate for the embedding beside that for the head."""
    return point.settings.get(FACTOR, 1.0)


@functools.cache
def functions(optimizer: str, width: int, depth: int, factor: float = 1.0):
    """A compiled step, and the compiled mean loss of batches."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: model(width, depth, 0)), nnx.Param)

    def loss(params, windows):  # windows: (16, 129)
        return nnx.merge(graph, params).loss(windows)

    def step(params, state, windows, rates):
        value, grads = jax.value_and_grad(loss)(params, windows)
        tx = with_embedding_factor(CONTENDERS[optimizer](rates), factor)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def evaluate(params, batches):  # batches: (8, 16, 129)
        return jax.lax.map(lambda windows: loss(params, windows), batches).mean()

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(evaluate)


def beginning(point: Point):
    """Parameters, the same for all optimizers, and the state of one."""
    params = nnx.state(model(point.width, point.depth, point.seed), nnx.Param)
    tx = CONTENDERS[point.optimizer](next(rates_of(point)))
    tx = with_embedding_factor(tx, embedding_factor(point))
    return params, jax.jit(tx.init)(params)


def model(width: int, depth: int, seed: int) -> GPT:
    """The example's model for the text's vocabulary."""
    return GPT(len(data().vocabulary), width, depth, rngs=nnx.Rngs(seed))
