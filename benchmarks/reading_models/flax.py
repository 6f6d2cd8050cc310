"""Modules of Flax, linen and NNX, each between a first layer and a head."""

from functools import partial

import flax.linen as nn
import jax
from flax import nnx

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import (
    BATCH,
    LENGTH,
    VOCAB,
    WIDTH,
    any_loss,
    floats,
    integers,
    nnx_model,
    zeros,
)

TOKENS, IMAGES = integers(BATCH, LENGTH), floats(BATCH, 8, 8, 3)
IO = {"kernel": "io"}
ENDS = {r"^head/|embedding$|bias$": "adamw", r"^first/": "iiio or adamw"}
HEADS = {r"(query|key|value)/": "ioo or ibo", r"out/": "iio", "kernel": "io"}


class Linen(nn.Module):
    """A module between others."""

    first: nn.Module
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        x = self.inner(nn.relu(self.first(x)))
        return nn.Dense(VOCAB, name="head")(nn.relu(x))


class Block(nn.Module):
    """A layer of a scan."""

    @nn.compact
    def __call__(self, x, _):
        attention = nn.MultiHeadDotProductAttention(
            4, dropout_rate=0.1, deterministic=False
        )
        x = x + attention(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden), None


class Scanned(nn.Module):
    """Layers stacked along an axis."""

    axis: int

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return layers(name="layers")(x, None)[0]


class NnxBlock(nnx.Module):
    """A layer of a scan."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class NnxScanned(nnx.Module):
    """Layers stacked by `nnx.vmap`."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock))(rngs)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(lambda x, layer: layer(x))(x, self.layers)


class Nnx(nnx.Module):
    """A module between others."""

    def __init__(self, make, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.inner = make(rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, ids):
        return self.head(nnx.relu(self.inner(self.embed(ids))))


def linen_model(first, inner, x):
    """A loss of a linen module; what it keeps beside parameters is an argument."""
    module = Linen(first, inner)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda: module.init(rngs, zeros(x)))
    params = variables.pop("params")

    def loss(params, rest, x):
        given = {"params": params, **rest}
        logits, _ = module.apply(given, x, rngs=rngs, mutable=["batch_stats"])
        return any_loss(logits)

    return loss, params, (variables, x)


def _nnx(make, answers):
    def build():
        module = nnx.eval_shape(lambda: Nnx(make, nnx.Rngs(0)))
        jitted = nnx.jit(lambda model, x: model(x))
        return nnx_model(module, lambda model, x: any_loss(jitted(model, x)), TOKENS)

    return Model(build, ENDS | answers, {"layers/": (0,)})


def _text(inner, answers, **stacked):
    build = partial(linen_model, nn.Embed(VOCAB, WIDTH), inner, TOKENS)
    return Model(build, ENDS | answers, {f"{k}/": axes for k, axes in stacked.items()})


def _image(inner, answer):
    build = partial(linen_model, nn.Conv(8, (3, 3)), inner, IMAGES)
    return Model(build, ENDS | {"kernel": answer})


def _cell(cell, width, rngs):
    return nnx.RNN(cell(width, width, rngs=rngs), rngs=rngs)


HEADED = nn.Einsum((WIDTH, 4, 6), "btd,dhk->bthk")
BACK = nn.DenseGeneral(WIDTH, axis=(-2, -1))
MODELS = {
    "linen scan, axis 0": _text(Scanned(0), HEADS, layers=(0,)),
    "linen scan, axis 1": _text(Scanned(1), HEADS, layers=(1,)),
    "linen OptimizedLSTMCell": _text(nn.RNN(nn.OptimizedLSTMCell(WIDTH)), IO),
    "linen LSTMCell": _text(nn.RNN(nn.LSTMCell(WIDTH)), IO),
    "linen GRUCell": _text(nn.RNN(nn.GRUCell(WIDTH)), IO),
    "linen MGUCell": _text(nn.RNN(nn.MGUCell(WIDTH)), IO),
    "linen SimpleCell": _text(nn.RNN(nn.SimpleCell(WIDTH)), IO),
    "linen Einsum and DenseGeneral": _text(
        nn.Sequential([HEADED, nn.relu, BACK]),
        {"layers_0/kernel": "ioo or ibo", "layers_2/kernel": "iio"},
    ),
    "linen DenseGeneral of tokens": _text(nn.DenseGeneral(WIDTH, axis=1), IO),
    "linen WeightNorm": _text(nn.WeightNorm(nn.Dense(20)), IO),
    "linen depthwise": _image(nn.Conv(8, (3, 3), feature_group_count=8), "adamw"),
    "linen groups": _image(nn.Conv(16, (3, 3), feature_group_count=4), "adamw?"),
    "linen pointwise": _image(
        nn.Sequential([nn.Conv(16, (1, 1)), nn.BatchNorm(False)]), "iiio"
    ),
    "linen ConvLocal": _image(nn.ConvLocal(6, (2, 2), padding="VALID"), "bbio"),
    # Stride and window are equal: no overlap.
    "linen ConvTranspose": _image(
        nn.ConvTranspose(12, (2, 2), (2, 2), padding="VALID"), "ooio or iiio"
    ),
    "linen ConvTranspose, flipped": _image(
        nn.ConvTranspose(10, (3, 3), transpose_kernel=True), "iioi"
    ),
    "nnx scan": _nnx(NnxScanned, HEADS),
    "nnx LoRALinear": _nnx(
        partial(nnx.LoRALinear, WIDTH, WIDTH, lora_rank=2), {"lora|kernel": "io"}
    ),
    "nnx OptimizedLSTMCell": _nnx(partial(_cell, nnx.OptimizedLSTMCell, WIDTH), IO),
    "nnx GRUCell": _nnx(partial(_cell, nnx.GRUCell, WIDTH), IO),
}
