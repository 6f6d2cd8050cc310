"""Parameters of known models as shapes, and their FLOPs: nothing is allocated.

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
Shapes = dict[str, Any]  # a tree of jax.ShapeDtypeStruct


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
    "llama-7b-32k": Llama(32, 4096, 1024, 14336, 32000),
    "llama-8b": Llama(32, 4096, 1024, 14336, 128256),
    "llama-70b": Llama(80, 8192, 1024, 28672, 128256),
    "experts-7b": Llama(16, 2048, 2048, 1024, 50304, experts=64),
    "llama-tiny": Llama(2, 128, 64, 256, 64),  # for tests
    "experts-tiny": Llama(2, 128, 128, 64, 64, experts=8),
}


def llama_parameters(model: str, dtype: jax.typing.DTypeLike) -> Shapes:
    """The parameters of a model in `LLAMAS`, one leaf for all layers."""
    sizes = LLAMAS[model]
    layers, width, inner = (sizes.layers,), sizes.width, sizes.inner
    many = (*layers, sizes.experts) if sizes.experts else layers
    mlp: Shapes = {
        "gate": (*many, width, inner),
        "up": (*many, width, inner),
        "down": (*many, inner, width),
    }
    if sizes.experts:
        mlp = {"router": (*layers, width, sizes.experts), "experts": mlp}
    block = {
        "q": (*layers, width, width),
        "k": (*layers, width, sizes.key_width),
        "v": (*layers, width, sizes.key_width),
        "out": (*layers, width, width),
        **mlp,
    }
    return _model(block, (sizes.vocabulary, width), dtype)


def deepseek_v3(
    dtype: jax.typing.DTypeLike, dense: int = 3, sparse: int = 58
) -> Shapes:
    """The parameters of DeepSeek-V3 (arXiv 2412.19437), without multi-token prediction.

    Layers with an MLP, and layers with a shared expert and 256 others.
    """
    width, heads, head, positions = 7168, 128, 128, 64

    def attention(layers: int) -> Shapes:
        return {
            "q_down": (layers, width, 1536),
            "q_up": (layers, 1536, heads * (head + positions)),
            "kv_down": (layers, width, 512 + positions),
            "kv_up": (layers, 512, heads * 2 * head),
            "out": (layers, heads * head, width),
        }

    def mlp(*many: int, inner: int) -> Shapes:
        sides = (width, inner), (width, inner), (inner, width)
        names = ("gate", "up", "down")
        return {k: (*many, *x) for k, x in zip(names, sides, strict=True)}

    blocks = attention(sparse) | {
        "router": (sparse, width, 256),
        "shared": mlp(sparse, inner=2048),
        "experts": mlp(sparse, 256, inner=2048),
    }
    tree = _model(blocks, (129280, width), dtype)
    first = _model(attention(dense) | mlp(dense, inner=18432), (1, 1), dtype)
    return tree | {"dense": first["blocks"]}


def model_parameters(
    model: str, dtype: jax.typing.DTypeLike, *, scanned: bool = False
) -> Shapes:
    """The parameters of a model in `MODELS`."""
    layers, width, vocabulary = _MODELS[model]
    block = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block |= {"up": (width, 4 * width), "down": (4 * width, width)}
    if scanned:
        blocks: Shapes = {name: (layers, *shape) for name, shape in block.items()}
    else:
        blocks = {f"{layer:02}": block for layer in range(layers)}
    return _model(blocks, (vocabulary, width), dtype)


def _model(blocks: Shapes, table: tuple[int, int], dtype: Any) -> Shapes:
    """A tree of shapes, with embedding and head of one size."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        {"wte": table, "blocks": blocks, "lm_head": table},
        is_leaf=lambda x: isinstance(x, tuple),
    )
