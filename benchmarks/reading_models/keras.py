"""Layers of Keras 3 in models of a few lines, by `stateless_call`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
from keras import layers

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import cross_entropy, integers

BATCH, LENGTH, VOCAB, WIDTH = 2, 16, 96, 24


def shapes_of(variables):
    """The shapes of Keras's variables by path, which a number makes unique."""
    shapes = {}
    for v in variables:
        path = v.path if v.path not in shapes else f"{v.path}_{len(shapes)}"
        shapes[path] = jax.ShapeDtypeStruct(tuple(v.shape), jnp.dtype(v.dtype))
    return shapes


def model(make, labels):
    """A loss of a functional model; it gets its inputs' shapes, one image or text."""
    keras.utils.clear_session(free_memory=False)
    module = make()
    params = shapes_of(module.trainable_variables)
    order = list(params)  # JAX sorts dicts
    rest = [*shapes_of(module.non_trainable_variables).values()]
    inputs = jax.ShapeDtypeStruct(
        (BATCH, *module.inputs[0].shape[1:]), module.inputs[0].dtype
    )

    def loss(params, rest, inputs, labels):
        variables = [params[path] for path in order]
        logits, _ = module.stateless_call(variables, rest, inputs)
        return cross_entropy(logits, labels)

    return loss, params, (rest, inputs, labels)


def transformer():
    """Two blocks before their norms."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH, name="tokens")(ids)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 6)(h, h)])
        h = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(h)])
    return keras.Model(ids, layers.Dense(VOCAB, name="logits")(x))


def grouped_queries():
    """Grouped-query attention and a product by einsum."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH, name="tokens")(ids)
    x = layers.Add()([x, layers.GroupQueryAttention(6, 4, 2)(x, x)])
    einsum = layers.EinsumDense("abc,cd->abd", output_shape=(None, 30), bias_axes="d")
    x = layers.ReLU()(einsum(x))
    return keras.Model(ids, layers.Dense(VOCAB, name="logits")(x))


def recurrent():
    """Three cells, one of them in both directions."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH, name="tokens")(ids)
    x = layers.Bidirectional(layers.LSTM(WIDTH, return_sequences=True))(x)
    x = layers.GRU(20, return_sequences=True)(x)
    x = layers.SimpleRNN(18, return_sequences=True)(x)
    return keras.Model(ids, layers.Dense(VOCAB, name="logits")(x))


def convolutional():
    """Plain, depthwise, pointwise, separable and transposed convolutions."""
    images = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", name="stem")(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.DepthwiseConv2D(3, name="depthwise")(x)
    x = layers.ReLU()(layers.Conv2D(12, 1, name="pointwise")(x))
    x = layers.ReLU()(layers.SeparableConv2D(14, 3, name="separable")(x))
    x = layers.ReLU()(layers.Conv2DTranspose(10, 2, strides=2, name="transposed")(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(5, name="logits")(x))


def volume():
    """Convolutions in one and three dimensions."""
    frames = keras.Input((4, 8, 8, 3))
    x = layers.ReLU()(layers.Conv3D(8, (2, 3, 3), name="stem")(frames))
    x = layers.ReLU()(layers.Conv3D(12, (2, 3, 3), name="conv3d")(x))
    x = layers.Reshape((-1, 12))(x)
    x = layers.ReLU()(layers.Conv1D(10, 3, name="conv1d")(x))
    x = layers.GlobalMaxPooling1D()(x)
    return keras.Model(frames, layers.Dense(5, name="logits")(x))


TEXT = {
    r"tokens|logits": "adamw",
    r"(query|key|value)/kernel": "ioo or ibo",
    r"attention_output/kernel": "iio",
    r"bias": "adamw",
    r"kernel": "io",
}
IMAGE = {
    r"logits": "adamw",
    r"stem": "iiio or iiiio or adamw",
    r"depthwise": "adamw",
    r"transposed/kernel": "oooi",
    r"kernel": "iiiio or iiio or iio",
}
TOKENS, LABELS = integers(BATCH, LENGTH), integers(BATCH)

MODELS = {
    "transformer": Model(lambda: model(transformer, TOKENS), TEXT),
    "grouped queries": Model(lambda: model(grouped_queries, TOKENS), TEXT),
    "recurrent": Model(lambda: model(recurrent, TOKENS), TEXT),
    "convolutional": Model(lambda: model(convolutional, LABELS), IMAGE),
    "volume": Model(lambda: model(volume, LABELS), IMAGE),
}
