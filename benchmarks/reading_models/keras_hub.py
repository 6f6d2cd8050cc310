"""KerasHub's backbones, small, with an output layer behind each of their outputs."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
from keras_hub import models as hub  # isort: skip

from benchmarks.reading_models import (  # isort: skip
    BATCH,
    TOKENS,
    Model,
    any_loss,
    floats,
)

CLASSES = 7
TEXT = {"token_ids": TOKENS, "padding_mask": TOKENS}
SEGMENTS = {**TEXT, "segment_ids": TOKENS}
IMAGES = floats(BATCH, 64, 64, 3)


def shapes_of(variables):
    """The shapes of Keras's variables by path, which a number makes unique."""
    shapes = {}
    for v in variables:
        path = v.path if v.path not in shapes else f"{v.path}_{len(shapes)}"
        shapes[path] = jax.ShapeDtypeStruct(tuple(v.shape), jnp.dtype(v.dtype))
    return shapes


def model(make, inputs):
    """A loss of a backbone and one head for each of its floating-point outputs."""
    backbone = make()
    params = shapes_of(backbone.trainable_variables)
    order = list(params)
    rest = [*shapes_of(backbone.non_trainable_variables).values()]

    def outputs(params, rest, inputs):
        """By the name of their head."""
        variables = [params[path] for path in order]
        results, _ = backbone.stateless_call(variables, rest, inputs)
        return {
            f"output_{number}/head": x
            for number, x in enumerate(jax.tree.leaves(results))
            if jnp.issubdtype(x.dtype, jnp.floating)
        }

    def loss(params, rest, inputs):
        results = outputs(params, rest, inputs)
        return any_loss([x @ params[head] for head, x in results.items()])

    shapes = jax.eval_shape(outputs, params, rest, inputs)
    params |= {head: floats(x.shape[-1], CLASSES) for head, x in shapes.items()}
    return loss, params, (rest, inputs)


# --- answers --------------------------------------------------------------------------

COMMON = {
    r"^output_\d+/head$": "adamw",
    r"embeddings(_\d+)?$|position_embedding": "adamw",
    r"(gamma|beta|bias|scale|bias_table)$": "adamw",
}
LANGUAGE = {
    **COMMON,
    r"(query|key|value)(_dense)?/kernel": "ioo or ibo or io",
    r"(attention_)?output(_dense)?/kernel": "iio or io",
    r"router_dense|sparse_moe_block(_\d+)?/\w+_gate_dense/": "adamw",
    r"(experts|expert_bank)/\w*bias": "adamw",
    r"(experts|expert_bank)/": "bio",
    r"kernel$": "io",
}
IMAGE = {
    **COMMON,
    r"depthwise": "adamw",
    # The first kernel that sees pixels; its name says so but for ResNet's and others'.
    r"patch\w*/conv2d/kernel|patch_embedding/kernel": "iiio or adamw",
    r"(query|key|value)/kernel": "ioo or ibo or io",
    r"attention_output/kernel": "iio or io",
    r"kernel$": "iiio or io",
}
XLNET_ANSWERS = {
    r"attention_output/kernel": "oii",
    r"encoding/kernel": "ioo or ibo",
    r"segment_encoding|mask_emb": "adamw",
}
GEMMA_ANSWERS = {r"(query|key|value)/kernel": "bio or oio"}


# --- models ---------------------------------------------------------------------------

SMALL = {"vocabulary_size": 200, "num_layers": 2, "hidden_dim": 32}
GPT = {**SMALL, "num_heads": 4, "intermediate_dim": 64}
LLAMA = {
    **SMALL,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_dim": 48,
}
EXPERTS = {"head_dim": 8, "num_experts": 6, "moe_intermediate_dim": 40, "top_k": 2}
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
XCEPTION = {"stackwise_conv_filters": [[16, 24], [32, 32]]}


def _entry(name, inputs, answers, settings):
    cls = getattr(hub, f"{name}Backbone")
    return Model(lambda: model(lambda: cls(**settings), inputs), answers)


def _language(name, inputs=TEXT, answers=(), **settings):
    return _entry(name, inputs, {**dict(answers), **LANGUAGE}, settings)


def _image(name, **settings):
    return _entry(name, IMAGES, IMAGE, {"image_shape": (64, 64, 3), **settings})


MODELS = {
    "albert": _language("Albert", SEGMENTS, embedding_dim=24, **GPT),
    "gemma": _language("Gemma", TEXT, GEMMA_ANSWERS, head_dim=8, **LLAMA),
    "gpt_oss": _language("GptOss", num_experts=6, **LLAMA),
    "qwen3_moe": _language("Qwen3Moe", **EXPERTS, **LLAMA),
    "xlnet": _language("XLNet", SEGMENTS, XLNET_ANSWERS, **GPT),
    "swin": _image("SwinTransformer", patch_size=4, window_size=4, **SWIN),
    "xception": _image("Xception", stackwise_pooling=[True, False], **XCEPTION),
}
