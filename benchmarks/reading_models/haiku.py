"""Modules and networks of haiku."""

import haiku as hk
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
    zeros,
)

TOKENS, LABELS = integers(BATCH, LENGTH), integers(BATCH)
IMAGES = floats(BATCH, 32, 32, 3)


def model(function, inputs, labels):
    """A loss of a function that calls haiku's modules."""
    transformed = hk.transform_with_state(function)
    key = jax.random.key(0)
    params, state = jax.eval_shape(lambda: transformed.init(key, zeros(inputs)))

    def loss(params, state, inputs, labels):
        logits, _ = transformed.apply(params, state, key, inputs)
        return cross_entropy(logits, labels)

    return loss, params, (state, inputs, labels)


def transformer(ids):
    """Two blocks with haiku's attention and MLPs."""
    x = hk.Embed(VOCAB, WIDTH)(ids)
    for _ in range(2):
        h = hk.LayerNorm(-1, True, True)(x)
        init = hk.initializers.VarianceScaling()
        x = x + hk.MultiHeadAttention(4, 6, w_init=init)(h, h, h)
        h = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.nets.MLP([4 * WIDTH, WIDTH])(h)
    return hk.Linear(VOCAB, name="head")(x)


def layers_stacked(ids):
    """`hk.layer_stack`: one block, whose parameters have an axis of layers."""

    def block(x):
        h = hk.LayerNorm(-1, True, True)(x)
        return x + hk.nets.MLP([4 * WIDTH, WIDTH])(h)

    x = hk.layer_stack(3)(block)(hk.Embed(VOCAB, WIDTH)(ids))
    return hk.Linear(VOCAB, name="head")(x)


def recurrent(ids):
    """Three cores, unrolled."""
    x = jnp.moveaxis(hk.Embed(VOCAB, WIDTH)(ids), 1, 0)
    core = hk.DeepRNN([hk.LSTM(WIDTH), hk.GRU(WIDTH), hk.VanillaRNN(WIDTH)])
    y, _ = hk.dynamic_unroll(core, x, core.initial_state(BATCH))
    return hk.Linear(VOCAB, name="head")(jnp.moveaxis(y, 0, 1))


def vector_quantizer(x):
    """Convolutions around a codebook, whose entries a state keeps."""
    h = jax.nn.relu(hk.Conv2D(8, 3, name="stem")(x))
    h = jax.nn.relu(hk.DepthwiseConv2D(1, 3, name="depthwise")(h))
    h = hk.Conv2D(12, 3, name="pre")(h)
    h = hk.nets.VectorQuantizer(12, 20, 0.25)(h, True)["quantize"]
    h = jax.nn.relu(hk.Conv2DTranspose(10, 3, name="transpose")(h))
    return hk.Linear(7, name="head")(h.mean((1, 2)))


def mobilenet(x):
    """MobileNet of version 1."""
    return hk.nets.MobileNetV1(num_classes=10)(x, is_training=True)


def resnet(x, depth):
    """A residual network of haiku's own."""
    return getattr(hk.nets, f"ResNet{depth}")(10)(x, is_training=True)


CONVOLUTIONS = {
    r"initial_conv|stem": "iiio or adamw",
    r"logits|head": "adamw",
    r"depthwise": "adamw",
    r"embeddings": "adamw",
    r"transpose/w": "iioi",
    r"/w$": "iiio",
}
TEXT = {r"^head|embed": "adamw", r"/w$|/w_[ih]$": "io"}

MODELS = {
    "transformer": Model(lambda: model(transformer, TOKENS, TOKENS), TEXT),
    "layer_stack": Model(
        lambda: model(layers_stacked, TOKENS, TOKENS), TEXT, {r"layer_stack": (0,)}
    ),
    "recurrent": Model(lambda: model(recurrent, TOKENS, TOKENS), TEXT),
    "vector quantizer": Model(
        lambda: model(vector_quantizer, floats(BATCH, 8, 8, 3), LABELS), CONVOLUTIONS
    ),
    "mobilenet": Model(
        lambda: model(mobilenet, IMAGES, LABELS),
        {
            r"mobilenet_v1/conv2_d/w|initial": "iiio or adamw",
            r"mobilenet_v1/(~/)?conv2_d/w": "iiio or adamw",
            **CONVOLUTIONS,
            r"linear/w|/w$": "iiio or io",
        },
    ),
    "resnet18": Model(
        lambda: model(lambda x: resnet(x, 18), IMAGES, LABELS), CONVOLUTIONS
    ),
    "resnet50": Model(
        lambda: model(lambda x: resnet(x, 50), IMAGES, LABELS), CONVOLUTIONS
    ),
}
