"""KerasHub's backbones, small, with an output layer behind each of their outputs."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
from keras_hub import models as hub  # isort: skip

from benchmarks.reading_models import Model  # isort: skip
from benchmarks.reading_models.shapes import any_loss, floats, integers  # isort: skip

BATCH, LENGTH, CLASSES = 2, 16, 7
TOKENS = integers(BATCH, LENGTH)
TEXT = {"token_ids": TOKENS, "padding_mask": TOKENS}
SEGMENTS = {**TEXT, "segment_ids": TOKENS}
TWO_TEXTS = {
    f"{side}_{name}": TOKENS for side in ("encoder", "decoder") for name in TEXT
}
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
    r"embeddings(_\d+)?$|rel_embedding|position_embedding|pos_embed": "adamw",
    r"rel_pos_[hw]$|_tokens?$": "adamw",
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

GPT = {
    "vocabulary_size": 200,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
LLAMA = {
    "vocabulary_size": 200,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}
EXPERTS = {"num_experts": 6, "moe_intermediate_dim": 40, "top_k": 2}
RWKV = {
    "hidden_size": 64,
    "head_size": 32,
    "num_layers": 2,
    "vocabulary_size": 200,
    "intermediate_dim": 96,
    **dict.fromkeys(("gate_lora", "mv_lora", "aaa_lora", "decay_lora"), 8),
}
RWKV_ANSWERS = {
    r"^head/kernel": "io or adamw",  # there is one more behind it
    r"TIME_MIX/r_k$": "adamw",
    r"TIME_MIX/[agvw]\d$": "io",
}
XLNET_ANSWERS = {
    r"attention_output/kernel": "oii",
    r"encoding/kernel": "ioo or ibo",
    r"segment_encoding|mask_emb": "adamw",
}
GEMMA_ANSWERS = {r"(query|key|value)/kernel": "bio or oio"}
SOUND_ANSWERS = {r"conv_layer_1/kernel": "iio or adamw", r"conv_layer_2/kernel": "iio"}
SOUND = {
    "encoder_features": floats(BATCH, 32, 80),
    "decoder_token_ids": TOKENS,
    "decoder_padding_mask": TOKENS,
}


def _entry(name, inputs, answers, settings):
    cls = getattr(hub, f"{name}Backbone")
    return Model(lambda: model(lambda: cls(**settings), inputs), answers)


def _language(name, inputs=TEXT, answers=(), **settings):
    return _entry(name, inputs, {**dict(answers), **LANGUAGE}, settings)


def _image(name, inputs=IMAGES, **settings):
    return _entry(name, inputs, IMAGE, {"image_shape": (64, 64, 3), **settings})


MODELS = {
    "albert": _language("Albert", SEGMENTS, embedding_dim=24, **GPT),
    "deberta_v3": _language("DebertaV3", max_sequence_length=16, **GPT),
    "gemma": _language("Gemma", TEXT, GEMMA_ANSWERS, head_dim=8, **LLAMA),
    "gpt_oss": _language("GptOss", num_experts=6, **LLAMA),
    "mixtral": _language("Mixtral", num_experts=6, **LLAMA),
    "qwen3_moe": _language("Qwen3Moe", head_dim=8, **EXPERTS, **LLAMA),
    "rwkv7": _language("RWKV7", TEXT, RWKV_ANSWERS, **RWKV),
    "t5": _language("T5", TWO_TEXTS, **GPT),
    "whisper": _language(
        "Whisper", SOUND, SOUND_ANSWERS, max_encoder_sequence_length=32, **GPT
    ),
    "xlnet": _language("XLNet", SEGMENTS, XLNET_ANSWERS, **GPT),
    "mit": _image(
        "MiT",
        layerwise_depths=[2, 2],
        hidden_dims=[16, 32],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[8, 4],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
    ),
    "swin": _image(
        "SwinTransformer",
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "vit_det": _image(
        "ViTDet",
        hidden_size=32,
        num_layers=2,
        intermediate_dim=64,
        num_heads=4,
        global_attention_layer_indices=[1],
        patch_size=8,
        window_size=4,
        num_output_channels=24,
    ),
    "xception": _image(
        "Xception",
        stackwise_conv_filters=[[16, 24], [32, 32]],
        stackwise_pooling=[True, False],
    ),
}
