"""Modules of Flax, linen and NNX, each between a first layer and a head."""

from functools import partial

import flax.linen as nn
import jax
from flax import nnx

from benchmarks.reading_models import TOKENS, Model, any_loss, floats, nnx_model, zeros

VOCAB, WIDTH = 96, 24
IMAGES = floats(2, 8, 8, 3)
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

    return Model(build, ENDS | answers)


def _text(inner, answers, **stacked):
    build = partial(linen_model, nn.Embed(VOCAB, WIDTH), inner, TOKENS)
    return Model(build, ENDS | answers, {f"{k}/": axes for k, axes in stacked.items()})


def _image(answer, *inner):
    build = partial(linen_model, nn.Conv(8, (3, 3)), nn.Sequential(inner), IMAGES)
    return Model(build, ENDS | {"kernel": answer})


def _cell(rngs):
    cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
    return nnx.RNN(cell, rngs=rngs)


HEADED = nn.Einsum((WIDTH, 4, 6), "btd,dhk->bthk")
BACK = nn.DenseGeneral(WIDTH, axis=(-2, -1))
HEADED_ANSWERS = {"layers_0/kernel": "ioo or ibo", "layers_2/kernel": "iio"}
FLIPPED = nn.ConvTranspose(10, (3, 3), transpose_kernel=True)
PATCHES = nn.ConvTranspose(12, (2, 2), (2, 2), padding="VALID")  # without overlap
MODELS = {
    "linen scan, axis 0": _text(Scanned(0), HEADS, layers=(0,)),
    "linen scan, axis 1": _text(Scanned(1), HEADS, layers=(1,)),
    "linen OptimizedLSTMCell": _text(nn.RNN(nn.OptimizedLSTMCell(WIDTH)), IO),
    "linen GRUCell": _text(nn.RNN(nn.GRUCell(WIDTH)), IO),
    "linen DenseGeneral": _text(nn.Sequential([HEADED, nn.relu, BACK]), HEADED_ANSWERS),
    "linen WeightNorm": _text(nn.WeightNorm(nn.Dense(20)), IO),
    "linen depthwise": _image("adamw", nn.Conv(8, (3, 3), feature_group_count=8)),
    "linen groups": _image("adamw?", nn.Conv(16, (3, 3), feature_group_count=4)),
    "linen pointwise": _image("iiio", nn.Conv(16, (1, 1)), nn.BatchNorm(False)),
    "linen ConvLocal": _image("bbio", nn.ConvLocal(6, (2, 2), padding="VALID")),
    "linen ConvTranspose": _image("ooio or iiio", PATCHES),
    "linen ConvTranspose, flipped": _image("iioi", FLIPPED),
    "nnx LoRALinear": _nnx(
        partial(nnx.LoRALinear, WIDTH, WIDTH, lora_rank=2), {"lora|kernel": "io"}
    ),
    "nnx OptimizedLSTMCell": _nnx(_cell, IO),
}
