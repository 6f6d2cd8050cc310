"""Parameters of known models as shapes: nothing is allocated.

One leaf a layer, as Flax modules without scan hold them. The token embedding is padded
to a multiple of 128 rows and the head is its own, as nanochat has both; there are no
biases, norm scales or positions, which are small and go to AdamW.
"""

from typing import Any

import jax

# Layers and width.
_GPT2 = {"gpt2-124m": (12, 768), "gpt2-350m": (24, 1024)}
MODELS = tuple(_GPT2)

_VOCABULARY = 50304


def model_parameters(model: str, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """The parameters of a model in `MODELS`, as a tree of `jax.ShapeDtypeStruct`."""
    layers, width = _GPT2[model]

    def kernel(fan_in: int, fan_out: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((fan_in, fan_out), dtype)

    def block() -> dict[str, jax.ShapeDtypeStruct]:
        square = {name: kernel(width, width) for name in ("q", "k", "v", "out")}
        return square | {
            "up": kernel(width, 4 * width),
            "down": kernel(4 * width, width),
        }

    return {
        "wte": kernel(_VOCABULARY, width),
        "blocks": {f"{layer:02}": block() for layer in range(layers)},
        "lm_head": kernel(_VOCABULARY, width),
    }
