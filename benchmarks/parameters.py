"""Parameters of known models as shapes: nothing is allocated.

One leaf a layer, as Flax modules without scan hold them, or one leaf for all layers, as
scanned ones do. The token embedding is padded to a multiple of 128 rows and the head is
its own, as nanochat has both; there are no biases, norm scales or positions, which are
small and go to AdamW.
"""

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
