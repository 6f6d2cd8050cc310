"""KerasHub's backbones, small, with an output layer behind each of their outputs."""

from benchmarks.reading_models.keras import shapes_of  # before Keras: it names JAX

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
from keras_hub import models as hub  # isort: skip

from benchmarks.reading_models import Model  # isort: skip
from benchmarks.reading_models.shapes import (  # isort: skip
    any_loss,
    floats,
    integers,
)

BATCH, LENGTH, CLASSES = 2, 16, 7
TOKENS = integers(BATCH, LENGTH)
TEXT = {"token_ids": TOKENS, "padding_mask": TOKENS}
SEGMENTS = {**TEXT, "segment_ids": TOKENS}
TWO_TEXTS = {
    f"{side}_{name}": TOKENS for side in ("encoder", "decoder") for name in TEXT
}
IMAGES = floats(BATCH, 64, 64, 3)


def model(make, inputs):
    """A loss of a backbone and one head for each of its floating-point outputs."""
    backbone = make()
    params = shapes_of(backbone.trainable_variables)
    order = list(params)
    rest = [*shapes_of(backbone.non_trainable_variables).values()]

    def outputs(params, rest, inputs):
        variables = [params[path] for path in order]
        return jax.tree.leaves(backbone.stateless_call(variables, rest, inputs)[0])

    shapes = jax.eval_shape(outputs, params, rest, inputs)
    heads = [
        f"output_{number}/head"
        for number, x in enumerate(shapes)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    widths = [x.shape[-1] for x in shapes if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(params, rest, inputs):
        results = [
            x
            for x in outputs(params, rest, inputs)
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return any_loss(
            [x @ params[head] for x, head in zip(results, heads, strict=True)]
        )

    for head, width in zip(heads, widths, strict=True):
        params[head] = floats(width, CLASSES)
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


def _entry(cls, inputs, answers, **settings):
    return Model(lambda: model(lambda: cls(**settings), inputs), answers)


def _language(cls, inputs=TEXT, more=(), **settings):
    return _entry(cls, inputs, {**dict(more), **LANGUAGE}, **settings)


def _image(cls, more=(), inputs=IMAGES, **settings):
    return _entry(cls, inputs, {**dict(more), **IMAGE}, **settings)


MODELS = {
    "albert": _language(hub.AlbertBackbone, SEGMENTS, embedding_dim=24, **GPT),
    "bart": _language(hub.BartBackbone, TWO_TEXTS, **GPT),
    "bert": _language(hub.BertBackbone, SEGMENTS, **GPT),
    "bloom": _language(hub.BloomBackbone, **GPT),
    "deberta_v3": _language(hub.DebertaV3Backbone, max_sequence_length=16, **GPT),
    "distilbert": _language(hub.DistilBertBackbone, **GPT),
    "electra": _language(
        hub.ElectraBackbone,
        SEGMENTS,
        embedding_dim=24,
        **{"vocab_size" if key == "vocabulary_size" else key: GPT[key] for key in GPT},
    ),
    "esm": _language(hub.ESMBackbone, {"token_ids": TOKENS}, **GPT),
    "falcon": _language(
        hub.FalconBackbone,
        **{
            "num_attention_heads" if key == "num_heads" else key: GPT[key]
            for key in GPT
        },
    ),
    "f_net": _language(
        hub.FNetBackbone,
        {"token_ids": TOKENS, "segment_ids": TOKENS},
        **{key: GPT[key] for key in GPT if key != "num_heads"},
    ),
    "gemma": _language(
        hub.GemmaBackbone,
        more={r"(query|key|value)/kernel": "bio or oio"},
        head_dim=8,
        **LLAMA,
    ),
    "gpt2": _language(hub.GPT2Backbone, **GPT),
    "gpt_neo_x": _language(hub.GPTNeoXBackbone, **GPT),
    "gpt_oss": _language(hub.GptOssBackbone, num_experts=6, **LLAMA),
    "llama": _language(hub.LlamaBackbone, **LLAMA),
    "llama3": _language(hub.Llama3Backbone, **LLAMA),
    "mistral": _language(hub.MistralBackbone, **LLAMA),
    "mixtral": _language(hub.MixtralBackbone, num_experts=6, **LLAMA),
    "opt": _language(hub.OPTBackbone, **GPT),
    "phi3": _language(hub.Phi3Backbone, **LLAMA),
    "qwen": _language(hub.QwenBackbone, **LLAMA),
    "qwen3": _language(hub.Qwen3Backbone, head_dim=8, **LLAMA),
    "qwen_moe": _language(
        hub.QwenMoeBackbone,
        num_experts=6,
        moe_intermediate_dim=40,
        shared_expert_intermediate_dim=56,
        top_k=2,
        **LLAMA,
    ),
    "qwen3_moe": _language(
        hub.Qwen3MoeBackbone,
        num_experts=6,
        moe_intermediate_dim=40,
        top_k=2,
        head_dim=8,
        **LLAMA,
    ),
    "roberta": _language(hub.RobertaBackbone, **GPT),
    "roformer_v2": _language(
        hub.RoformerV2Backbone,
        {"token_ids": TOKENS, "segment_ids": TOKENS},
        head_size=8,
        **GPT,
    ),
    "rwkv7": _language(
        hub.RWKV7Backbone,
        more={
            r"^head/kernel": "io or adamw",  # there is one more behind it
            r"TIME_MIX/r_k$": "adamw",
            r"TIME_MIX/[agvw]\d$": "io",
        },
        hidden_size=64,
        head_size=32,
        num_layers=2,
        vocabulary_size=200,
        intermediate_dim=96,
        gate_lora=8,
        mv_lora=8,
        aaa_lora=8,
        decay_lora=8,
    ),
    "t5": _language(hub.T5Backbone, TWO_TEXTS, **GPT),
    "whisper": _language(
        hub.WhisperBackbone,
        {
            "encoder_features": floats(BATCH, 32, 80),
            "decoder_token_ids": TOKENS,
            "decoder_padding_mask": TOKENS,
        },
        more={r"conv_layer_1/kernel": "iio or adamw", r"conv_layer_2/kernel": "iio"},
        max_encoder_sequence_length=32,
        **GPT,
    ),
    "xlm_roberta": _language(hub.XLMRobertaBackbone, **GPT),
    "xlnet": _language(
        hub.XLNetBackbone,
        SEGMENTS,
        more={
            r"attention_output/kernel": "oii",
            r"encoding/kernel": "ioo or ibo",
            r"segment_encoding|mask_emb": "adamw",
        },
        **GPT,
    ),
    "dense_net": _image(
        hub.DenseNetBackbone,
        stackwise_num_repeats=[2, 2],
        image_shape=(64, 64, 3),
    ),
    "dinov2": _image(
        hub.DINOV2Backbone,
        inputs={"images": IMAGES},
        patch_size=8,
        num_layers=2,
        hidden_dim=32,
        num_heads=4,
        intermediate_dim=64,
        num_register_tokens=2,
        image_shape=(64, 64, 3),
        position_embedding_shape=(64, 64, 3),
    ),
    "deit": _image(
        hub.DeiTBackbone,
        image_shape=(64, 64, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
    ),
    "mit": _image(
        hub.MiTBackbone,
        layerwise_depths=[2, 2],
        image_shape=(64, 64, 3),
        hidden_dims=[16, 32],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[8, 4],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
    ),
    "resnet": _image(
        hub.ResNetBackbone,
        input_conv_filters=[16],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 96],
        stackwise_num_blocks=[2, 2],
        stackwise_num_strides=[1, 2],
        block_type="bottleneck_block",
        image_shape=(64, 64, 3),
    ),
    "swin": _image(
        hub.SwinTransformerBackbone,
        image_shape=(64, 64, 3),
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "vgg": _image(
        hub.VGGBackbone,
        stackwise_num_repeats=[1, 2],
        stackwise_num_filters=[16, 32],
        image_shape=(64, 64, 3),
    ),
    "vit": _image(
        hub.ViTBackbone,
        image_shape=(64, 64, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
    ),
    "vit_det": _image(
        hub.ViTDetBackbone,
        hidden_size=32,
        num_layers=2,
        intermediate_dim=64,
        num_heads=4,
        global_attention_layer_indices=[1],
        image_shape=(64, 64, 3),
        patch_size=8,
        window_size=4,
        num_output_channels=24,
    ),
    "xception": _image(
        hub.XceptionBackbone,
        stackwise_conv_filters=[[16, 24], [32, 32]],
        stackwise_pooling=[True, False],
        image_shape=(64, 64, 3),
    ),
}
