"""Modules of Equinox, which keep their matrices (out, in)."""

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import (
    BATCH,
    LENGTH,
    VOCAB,
    WIDTH,
    cross_entropy,
    floats,
    integers,
)

TOKENS, LABELS = integers(BATCH, LENGTH), integers(BATCH)


def model(make, inputs, labels, call=lambda module, x: module(x)):
    """A loss of a module, mapped over a batch; `call` says how it is called."""
    module = eqx.filter_eval_shape(make, jax.random.key(0))
    is_param = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    params, static = eqx.partition(module, is_param)

    def loss(params, inputs, labels):
        module = eqx.combine(params, static)
        return cross_entropy(jax.vmap(lambda x: call(module, x))(inputs), labels)

    return loss, params, (inputs, labels)


class Transformer(eqx.Module):
    """One layer of attention and two recurrent cells behind it."""

    table: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    gru: eqx.nn.GRUCell
    lstm: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.table = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.gru = eqx.nn.GRUCell(WIDTH, WIDTH, key=keys[2])
        self.lstm = eqx.nn.LSTMCell(WIDTH, WIDTH, key=keys[3])
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[4])

    def __call__(self, ids):
        x = jax.vmap(self.table)(ids)
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)

        def step(carry, x):
            gru, lstm = carry
            gru = self.gru(x, gru)
            lstm = self.lstm(gru, lstm)
            return (gru, lstm), lstm[0]

        zeros = jnp.zeros(WIDTH)
        _, y = jax.lax.scan(step, (zeros, (zeros, zeros)), x)
        return jax.vmap(self.head)(y)


class Stacked(eqx.Module):
    """MLPs that `filter_vmap` makes and a scan applies."""

    table: jax.Array
    layers: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.table = jnp.zeros((VOCAB, WIDTH))
        self.layers = eqx.filter_vmap(lambda k: eqx.nn.MLP(WIDTH, WIDTH, 40, 1, key=k))(
            keys
        )
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=key)

    def __call__(self, ids):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, layer):
            return x + jax.vmap(eqx.combine(layer, static))(x), None

        x, _ = jax.lax.scan(body, self.table[ids], arrays)
        return jax.vmap(self.head)(x)


def mlp(key):
    """Equinox's own MLP."""
    return eqx.nn.MLP(7, 5, WIDTH, 2, key=key)


def shared(key):
    """Layers that share one matrix, by `eqx.nn.Shared`."""
    keys = jax.random.split(key, 2)
    table = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
    head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[1])
    middle = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
    return eqx.nn.Shared(
        Tied(table, middle, head),
        where=lambda m: m.head.weight,
        get=lambda m: m.table.weight,
    )


class Tied(eqx.Module):
    """A table that is the head as well."""

    table: eqx.nn.Embedding
    middle: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, ids):
        x = jax.vmap(self.table)(ids)
        return jax.vmap(self.head)(jax.nn.gelu(jax.vmap(self.middle)(x)))


def convolutional(key):
    """Two convolutions, one of them transposed, and a head."""
    keys = jax.random.split(key, 4)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(8, 12, 3, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.ConvTranspose2d(12, 10, 3, key=keys[2]),
            eqx.nn.Lambda(lambda x: jax.nn.relu(x).mean((1, 2))),
            eqx.nn.Linear(10, 5, key=keys[3]),
        ]
    )


TEXT = {r"table|^head": "adamw", r"bias": "adamw", r"weight": "oi"}

MODELS = {
    "mlp": Model(
        lambda: model(mlp, floats(BATCH, 7), LABELS),
        {r"layers/2": "adamw", r"layers/0/weight": "oi or adamw", r"weight": "oi"},
    ),
    "transformer": Model(lambda: model(Transformer, TOKENS, TOKENS), TEXT),
    "stacked": Model(lambda: model(Stacked, TOKENS, TOKENS), TEXT, {r"^layers/": (0,)}),
    "convolutional": Model(
        lambda: model(convolutional, floats(BATCH, 3, 8, 8), LABELS),
        {
            r"layers/0/weight": "oiii or adamw",
            r"layers/6/weight": "adamw",
            r"weight": "oiii",
            r"bias": "adamw",
        },
    ),
    "shared": Model(
        lambda: model(shared, TOKENS, TOKENS, lambda module, x: module()(x)),
        {r"table": "adamw", r"weight": "oi"},
    ),
}
