"""Parameters of known models as shapes: nothing is allocated.

GPTs have one leaf per layer, as in Flax modules without scan, or one leaf for all
layers, as in scanned ones; Llamas only the latter. The token embedding of a GPT is
padded to a multiple of 128 rows, and the head is not tied to it, as in nanochat.
Biases, norm scales and positions are left out: they are small and go to AdamW.
"""

import dataclasses
from typing import Any

import jax

# Layers, width and rows of the embedding.
_MODELS = {
    "gpt2-124m": (12, 768, 50304),
    "gpt2-350m": (24, 1024, 50304),
    "gpt-1.3b": (24, 2048, 50304),
    "gpt-6.7b": (32, 4096, 50304),
    "6x384": (6, 384, 256),
    "tiny": (2, 32, 64),  # for tests
}
MODELS = tuple(_MODELS)


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of a model with grouped queries and a gated MLP, or experts instead."""

    layers: int
    width: int
    key_width: int  # of all heads of keys, or of values
    inner: int  # of the MLP, or of one expert
    vocabulary: int
    experts: int = 0


LLAMAS = {
    "llama-1.3b": Llama(24, 2048, 1024, 5632, 32000),
    "llama-7b": Llama(32, 4096, 1024, 14336, 32000),
    "experts-7b": Llama(16, 2048, 2048, 1024, 50304, experts=64),
    "llama-tiny": Llama(2, 128, 64, 256, 64),  # for tests
    "experts-tiny": Llama(2, 128, 128, 64, 64, experts=8),
}


def llama_parameters(model: str, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """The parameters of a model in `LLAMAS`, one leaf for all layers."""
    sizes = LLAMAS[model]
    width, inner = sizes.width, sizes.inner

    def kernel(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = (sizes.layers,)
    many = (*layers, sizes.experts) if sizes.experts else layers
    mlp = {
        "gate": kernel(*many, width, inner),
        "up": kernel(*many, width, inner),
        "down": kernel(*many, inner, width),
    }
    if sizes.experts:
        mlp = {"router": kernel(*layers, width, sizes.experts), "experts": mlp}
    return {
        "wte": kernel(sizes.vocabulary, width),
        "blocks": {
            "q": kernel(*layers, width, width),
            "k": kernel(*layers, width, sizes.key_width),
            "v": kernel(*layers, width, sizes.key_width),
            "out": kernel(*layers, width, width),
            **mlp,
        },
        "lm_head": kernel(sizes.vocabulary, width),
    }


def model_parameters(
    model: str, dtype: jax.typing.DTypeLike, *, scanned: bool = False
) -> dict[str, Any]:
    """The parameters of a model in `MODELS`, as a tree of `jax.ShapeDtypeStruct`."""
    layers, width, vocabulary = _MODELS[model]

    def kernel(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def block(*batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        square = {name: kernel(*batch, width, width) for name in ("q", "k", "v", "out")}
        return square | {
            "up": kernel(*batch, width, 4 * width),
            "down": kernel(*batch, 4 * width, width),
        }

    separate = {f"{layer:02}": block() for layer in range(layers)}
    return {
        "wte": kernel(vocabulary, width),
        "blocks": block(layers) if scanned else separate,
        "lm_head": kernel(vocabulary, width),
    }
