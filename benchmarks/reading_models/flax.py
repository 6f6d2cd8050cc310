"""Modules of Flax, linen and NNX, in models of a few lines."""

import flax.linen as nn
import jax
from flax import nnx

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import (
    BATCH,
    LENGTH,
    VOCAB,
    WIDTH,
    cross_entropy,
    floats,
    integers,
    shapes_of,
    zeros,
)

TOKENS, IMAGES = integers(BATCH, LENGTH), floats(BATCH, 8, 8, 3)
ATTENTION = {
    r"(query|key|value)/kernel": "ioo or ibo",
    r"out/kernel": "iio",
    r"(query|key|value|out)/bias": "adamw",
}
TEXT = {r"^head/": "adamw", r"^Embed_0|^embed/": "adamw", **ATTENTION, "kernel": "io"}


def linen(module, x, labels):
    """A loss of a linen module; what it keeps beside parameters is an argument."""
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda: module.init(rngs, zeros(x)))
    params = variables.pop("params")

    def loss(params, rest, x, labels):
        logits, _ = module.apply(
            {"params": params, **rest},
            x,
            rngs={"dropout": jax.random.key(1)},
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, labels)

    return loss, params, (variables, x, labels)


def nnx_model(make, x, labels):
    """A loss of an NNX module, jitted."""
    graph, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(pure, rest, x, labels):
        nnx.replace_by_pure_dict(params, pure)
        model = nnx.merge(graph, params, rest)
        return cross_entropy(nnx.jit(lambda model, x: model(x))(model, x), labels)

    pure = shapes_of(nnx.to_pure_dict(params))
    return loss, pure, (shapes_of(rest), x, labels)


# --- linen ----------------------------------------------------------------------------


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH)(ids)
        for _ in range(2):
            attention = nn.MultiHeadDotProductAttention(
                4, dropout_rate=0.1, deterministic=False
            )
            x = x + attention(nn.LayerNorm()(x))
            hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dense(WIDTH)(hidden)
        return nn.Dense(VOCAB, name="head")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x))), None


class Scanned(nn.Module):
    axis: int

    @nn.compact
    def __call__(self, ids):
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = layers(name="layers")(nn.Embed(VOCAB, WIDTH)(ids), None)
        return nn.Dense(VOCAB, name="head")(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH)(ids)
        for cell in (
            nn.OptimizedLSTMCell,
            nn.LSTMCell,
            nn.GRUCell,
            nn.MGUCell,
            nn.SimpleCell,
        ):
            x = nn.RNN(cell(WIDTH))(x)
        return nn.Dense(VOCAB, name="head")(x)


class ConvolutionalLSTM(nn.Module):
    @nn.compact
    def __call__(self, x):  # frames (batch, time, 8, 8, 3)
        x = nn.RNN(nn.ConvLSTMCell(12, (3, 3)))(x)
        return nn.Dense(5, name="head")(x.mean((1, 2, 3)))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), name="stem")(x))
        x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=8, name="depthwise")(x))
        x = nn.Conv(16, (1, 1), name="pointwise")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.relu(nn.Conv(16, (3, 3), feature_group_count=4, name="groups")(x))
        x = nn.relu(nn.ConvLocal(6, (2, 2), padding="VALID", name="local")(x))
        x = nn.ConvTranspose(12, (2, 2), (2, 2), padding="VALID", name="transposed")(x)
        x = nn.relu(x)
        x = nn.ConvTranspose(10, (3, 3), transpose_kernel=True, name="flipped")(x)
        x = nn.GroupNorm(2)(nn.relu(x)).reshape(x.shape[0], -1, 10).mean(1)
        x = nn.relu(nn.WeightNorm(nn.Dense(20), name="normed")(x))
        return nn.Dense(5, name="head")(x)


class GeneralProducts(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH)(ids)
        y = nn.Einsum((WIDTH, 4, 6), "btd,dhk->bthk", name="einsum")(x)
        y = nn.DenseGeneral(WIDTH, axis=(-2, -1), name="general")(nn.relu(y))
        x = x + nn.Dense(WIDTH)(nn.relu(y))
        x = x + nn.DenseGeneral(LENGTH, axis=1, name="tokens")(x).swapaxes(1, 2)
        return nn.Dense(VOCAB, name="head")(x)


# --- NNX ------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class NnxTransformer(nnx.Module):
    """Blocks in a list, or stacked by `nnx.vmap` and scanned."""

    def __init__(self, rngs, scan):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.scan = scan
        if scan:
            stack = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=3)(stack)(rngs)
        else:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, ids):
        x = self.embed(ids)
        if self.scan:
            body = nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return self.head(body(x, self.blocks))
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.head(x)


class NnxLoraAndCells(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.LoRALinear(WIDTH, 40, lora_rank=2, rngs=rngs)
        self.down = nnx.Linear(40, WIDTH, rngs=rngs)
        lstm = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        self.lstm = nnx.RNN(lstm, rngs=rngs)
        self.gru = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = self.lstm(x + self.down(nnx.relu(self.up(x))))
        return self.head(self.gru(x))


class NnxConvolutions(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.conv = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.transposed = nnx.ConvTranspose(
            16, 12, (2, 2), (2, 2), padding="VALID", rngs=rngs
        )
        self.einsum = nnx.Einsum("bhwi,io->bhwo", (12, 20), (20,), rngs=rngs)
        self.head = nnx.Linear(20, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(nnx.relu(self.norm(self.stem(x)))))
        x = nnx.relu(self.einsum(nnx.relu(self.transposed(x))))
        return self.head(x.mean((1, 2)))


TRANSPOSED = "ooio or iiio"  # stride and window are equal: no overlap
LABELS = integers(BATCH)
LAYERS = {r"^layers/|^blocks/": (0,)}

MODELS = {
    "linen_encoder": Model(lambda: linen(Encoder(), TOKENS, TOKENS), TEXT),
    "linen_scan_axis_0": Model(lambda: linen(Scanned(0), TOKENS, TOKENS), TEXT, LAYERS),
    "linen_scan_axis_1": Model(
        lambda: linen(Scanned(1), TOKENS, TOKENS),
        TEXT,
        {r"^layers/": (1,)},
    ),
    "linen_recurrent": Model(lambda: linen(Recurrent(), TOKENS, TOKENS), TEXT),
    "linen_conv_lstm": Model(
        lambda: linen(ConvolutionalLSTM(), floats(BATCH, 4, 8, 8, 3), LABELS),
        {"^head": "adamw", "/ih/": "iiio or adamw", "/hh/": "iiio"},
    ),
    "linen_convolutions": Model(
        lambda: linen(Convolutions(), IMAGES, LABELS),
        {
            "^head": "adamw",
            "^stem": "iiio or adamw",
            "^depthwise": "adamw",
            "^groups": "adamw?",
            "^local/kernel": "bbio",
            "^local/bias": "adamw",
            "^transposed/kernel": TRANSPOSED,
            "^flipped/kernel": "iioi",
            "^pointwise": "iiio",
            "kernel": "io",
        },
    ),
    "linen_general_products": Model(
        lambda: linen(GeneralProducts(), TOKENS, TOKENS),
        {
            "^einsum/kernel": "ioo or ibo",
            "^einsum/bias": "adamw",
            "^general/kernel": "iio",
            **TEXT,
        },
    ),
    "nnx_transformer": Model(
        lambda: nnx_model(lambda: NnxTransformer(nnx.Rngs(0), False), TOKENS, TOKENS),
        TEXT,
    ),
    "nnx_scanned_transformer": Model(
        lambda: nnx_model(lambda: NnxTransformer(nnx.Rngs(0), True), TOKENS, TOKENS),
        TEXT,
        LAYERS,
    ),
    "nnx_lora_and_cells": Model(
        lambda: nnx_model(lambda: NnxLoraAndCells(nnx.Rngs(0)), TOKENS, TOKENS),
        {"^head": "adamw", "^embed": "adamw", "lora|kernel": "io"},
    ),
    "nnx_convolutions": Model(
        lambda: nnx_model(lambda: NnxConvolutions(nnx.Rngs(0)), IMAGES, LABELS),
        {
            "^head": "adamw",
            "^stem": "iiio or adamw",
            "^transposed": TRANSPOSED,
            "^conv": "iiio",
            "^einsum": "io",
        },
    ),
}
