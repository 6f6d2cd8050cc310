"""The models in Flax of Hugging Face's transformers, with two layers each."""

import importlib

import jax
import jax.numpy as jnp
import transformers as hf

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import any_loss, floats, integers, zeros

TOKENS, IMAGES = integers(2, 16), floats(2, 224, 224, 3)
RNGS = ("params", "dropout", "gumbel", "indices", "droppath")


def _clip(x, a_min=None, a_max=None, clip=jnp.clip):
    """`jnp.clip` with the argument `a_max`, which T5 gives and JAX no longer takes."""
    return clip(x, a_min, a_max)


def model(module, name, config, *inputs, outputs=None, **settings):
    """A loss of a linen module of transformers.

    Args:
      module: of transformers.models.
      name: of the linen class in it, without "Flax" and "Module".
      config: of the model.
      *inputs: positional arguments of its call; shapes become arguments of the loss.
      outputs: from what it returns to what the loss depends on; None for its logits.
      **settings: further arguments of its call.
    """
    flax_module = importlib.import_module(
        f"transformers.models.{module}.modeling_flax_{module}"
    )
    if module in ("t5", "longt5"):
        flax_module.jnp = _Numpy()
    linen = getattr(flax_module, f"Flax{name}Module")(config, dtype=jnp.float32)
    rngs = {name: jax.random.key(n) for n, name in enumerate(RNGS)}
    variables = jax.eval_shape(
        lambda: linen.init(rngs, *map(zeros, inputs), **settings)
    )
    params = variables.pop("params")

    def loss(params, rest, *inputs):
        variables = {"params": params, **rest}
        result = linen.apply(variables, *inputs, rngs=rngs, **settings)
        return any_loss(outputs(result) if outputs else result.logits)

    return loss, params, (variables, *inputs)


class _Numpy:
    """`jax.numpy` with the old `clip`."""

    clip = staticmethod(_clip)

    def __getattr__(self, name):
        return getattr(jnp, name)


# --- answers --------------------------------------------------------------------------

TEXT = {
    r"embed(ding)?s?(_tokens|_positions)?/|_embeddings?/|wt?[pt]e/": "adamw",
    r"shared/|relative_attention_bias": "adamw",
    r"lm_head|classifier|predictions/decoder|seq_relationship|score/": "adamw",
    r"discriminator_predictions/dense_prediction": "adamw",
    r"kernel$": "io",
}
# ALBERT's and ELECTRA's small embeddings meet a product before the first layer.
FACTORED = {r"embedding_hidden_mapping_in|embeddings_project": "io or adamw", **TEXT}
OUT_IN = {r"c_attn|c_proj|c_fc": "oi", **TEXT}
VISION = {
    r"cls_token|mask_token|position_embedding|relative_position_bias": "adamw",
    r"patch_embedding": "iiio or adamw",
    r"lambda": "adamw",
    **TEXT,
}
CONVOLUTIONS = {
    r"^classifier": "adamw",
    r"embedder": "iiio or adamw",
    r"attention/.*kernel": "iiio",
    r"kernel$": "iiio",
}


# --- models ---------------------------------------------------------------------------


def _pretraining(result):
    return result[0], result[1]


BERT = (TOKENS, TOKENS, TOKENS, TOKENS, None)
ENCODER_DECODER = (TOKENS,) * 6
POSITIONS = (TOKENS, TOKENS, TOKENS)
TWO = {"num_hidden_layers": 2}
BOTH = {"encoder_layers": 2, "decoder_layers": 2}
SMALL_GPT_J = {"n_layer": 2, "n_embd": 256, "n_head": 8, "rotary_dim": 16}

MODELS = {
    "albert": Model(
        lambda: model(
            "albert",
            "AlbertForPreTraining",
            hf.AlbertConfig(**TWO),
            *(TOKENS,) * 4,
            outputs=_pretraining,
        ),
        FACTORED,
    ),
    "bart": Model(
        lambda: model(
            "bart",
            "BartForConditionalGeneration",
            hf.BartConfig(**BOTH),
            *ENCODER_DECODER,
        ),
        TEXT,
    ),
    "beit": Model(
        lambda: model(
            "beit",
            "BeitForImageClassification",
            hf.BeitConfig(
                **TWO,
                use_relative_position_bias=True,
                use_shared_relative_position_bias=False,
            ),
            IMAGES,
        ),
        VISION,
    ),
    "bert": Model(
        lambda: model(
            "bert",
            "BertForPreTraining",
            hf.BertConfig(**TWO),
            *BERT,
            outputs=_pretraining,
        ),
        TEXT,
    ),
    "bert_classifier": Model(
        lambda: model(
            "bert", "BertForSequenceClassification", hf.BertConfig(**TWO), *BERT
        ),
        TEXT,
    ),
    "bert_questions": Model(
        lambda: model(
            "bert",
            "BertForQuestionAnswering",
            hf.BertConfig(**TWO),
            *BERT,
            outputs=_pretraining,
        ),
        {r"qa_outputs": "adamw", **TEXT},
    ),
    "big_bird": Model(
        lambda: model(
            "big_bird",
            "BigBirdForPreTraining",
            hf.BigBirdConfig(
                **TWO,
                block_size=8,
                num_random_blocks=1,
                attention_type="block_sparse",
            ),
            *(integers(2, 128),) * 4,
            None,
            outputs=_pretraining,
        ),
        TEXT,
    ),
    "blenderbot": Model(
        lambda: model(
            "blenderbot",
            "BlenderbotForConditionalGeneration",
            hf.BlenderbotConfig(**BOTH),
            *ENCODER_DECODER,
        ),
        TEXT,
    ),
    "bloom": Model(
        lambda: model(
            "bloom",
            "BloomForCausalLM",
            hf.BloomConfig(n_layer=2, hidden_size=64, n_head=8),
            TOKENS,
            TOKENS,
        ),
        TEXT,
    ),
    "clip": Model(
        lambda: model(
            "clip",
            "CLIP",
            hf.CLIPConfig(text_config=TWO, vision_config=TWO),
            TOKENS,
            IMAGES,
            TOKENS,
            TOKENS,
            outputs=lambda x: (x.logits_per_image, x.logits_per_text),
        ),
        {r"(visual|text)_projection": "io or adamw", **VISION},
    ),
    "dinov2": Model(
        lambda: model(
            "dinov2",
            "Dinov2ForImageClassification",
            hf.Dinov2Config(**TWO, image_size=224, patch_size=14),
            IMAGES,
        ),
        VISION,
    ),
    "distilbert": Model(
        lambda: model(
            "distilbert",
            "DistilBertForSequenceClassification",
            hf.DistilBertConfig(n_layers=2),
            TOKENS,
            TOKENS,
        ),
        {r"pre_classifier": "io", **TEXT},
    ),
    "electra": Model(
        lambda: model(
            "electra", "ElectraForPreTraining", hf.ElectraConfig(**TWO), *BERT
        ),
        FACTORED,
    ),
    "gemma": Model(
        lambda: model(
            "gemma",
            "GemmaForCausalLM",
            hf.GemmaConfig(**TWO, max_position_embeddings=1024),
            *POSITIONS,
        ),
        TEXT,
    ),
    "gpt2": Model(
        lambda: model("gpt2", "GPT2LMHead", hf.GPT2Config(n_layer=2), *POSITIONS),
        OUT_IN,
    ),
    "gpt_neo": Model(
        lambda: model(
            "gpt_neo",
            "GPTNeoForCausalLM",
            hf.GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]),
            *POSITIONS,
        ),
        TEXT,
    ),
    "gptj": Model(
        lambda: model(
            "gptj", "GPTJForCausalLM", hf.GPTJConfig(**SMALL_GPT_J), *POSITIONS
        ),
        TEXT,
    ),
    "llama": Model(
        lambda: model("llama", "LlamaForCausalLM", hf.LlamaConfig(**TWO), *POSITIONS),
        TEXT,
    ),
    "longt5": Model(
        lambda: model(
            "longt5",
            "LongT5ForConditionalGeneration",
            hf.LongT5Config(
                num_layers=2,
                encoder_attention_type="transient-global",
                local_radius=3,
                global_block_size=4,
            ),
            *(TOKENS,) * 4,
        ),
        {r"global_relative": "adamw", **TEXT},
    ),
    "marian": Model(
        lambda: model("marian", "MarianMT", hf.MarianConfig(**BOTH), *ENCODER_DECODER),
        TEXT,
    ),
    "mbart": Model(
        lambda: model(
            "mbart",
            "MBartForConditionalGeneration",
            hf.MBartConfig(**BOTH),
            *ENCODER_DECODER,
        ),
        TEXT,
    ),
    "mistral": Model(
        lambda: model(
            "mistral",
            "MistralForCausalLM",
            hf.MistralConfig(**TWO, max_position_embeddings=512),
            *POSITIONS,
        ),
        TEXT,
    ),
    "opt": Model(
        lambda: model("opt", "OPTForCausalLM", hf.OPTConfig(**TWO), *POSITIONS), TEXT
    ),
    "pegasus": Model(
        lambda: model(
            "pegasus",
            "PegasusForConditionalGeneration",
            hf.PegasusConfig(**BOTH),
            *ENCODER_DECODER,
        ),
        TEXT,
    ),
    "regnet": Model(
        lambda: model(
            "regnet",
            "RegNetForImageClassification",
            hf.RegNetConfig(depths=[1, 2, 1, 1]),
            floats(2, 64, 64, 3),
        ),
        # The middle convolution of a block has groups.
        {r"layer/1/convolution": "adamw?", **CONVOLUTIONS},
    ),
    "resnet": Model(
        lambda: model(
            "resnet",
            "ResNetForImageClassification",
            hf.ResNetConfig(depths=[2, 1, 1, 1]),
            floats(2, 64, 64, 3),
        ),
        CONVOLUTIONS,
    ),
    "roberta": Model(
        lambda: model("roberta", "RobertaForMaskedLM", hf.RobertaConfig(**TWO), *BERT),
        {r"lm_head/dense": "io", **TEXT},
    ),
    "roformer": Model(
        lambda: model(
            "roformer",
            "RoFormerForMaskedLM",
            hf.RoFormerConfig(**TWO, embedding_size=768, rotary_value=False),
            *POSITIONS,
            None,
        ),
        TEXT,
    ),
    "t5": Model(
        lambda: model(
            "t5",
            "T5ForConditionalGeneration",
            hf.T5Config(num_layers=2),
            *(TOKENS,) * 4,
        ),
        TEXT,
    ),
    "t5_gated_untied": Model(
        lambda: model(
            "t5",
            "T5ForConditionalGeneration",
            hf.T5Config(
                num_layers=2,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
            ),
            *(TOKENS,) * 4,
        ),
        TEXT,
    ),
    "vit": Model(
        lambda: model("vit", "ViTForImageClassification", hf.ViTConfig(**TWO), IMAGES),
        VISION,
    ),
    "wav2vec2": Model(
        lambda: model(
            "wav2vec2",
            "Wav2Vec2ForPreTraining",
            hf.Wav2Vec2Config(
                **TWO, do_stable_layer_norm=True, feat_extract_norm="layer"
            ),
            floats(2, 4000),
            outputs=lambda x: jnp.sum(x[0] * x[1], -1, keepdims=True),
        ),
        {
            r"masked_spec_embed": "adamw",
            r"codevectors": "adamw",
            r"project_(hid|q)/|weight_proj": "io or adamw",
            r"conv_layers/0/": "iio or adamw",
            r"conv_layers/": "iio",
            r"weight_v": "adamw?",
            r"kernel$": "io",
        },
    ),
    "whisper": Model(
        lambda: model(
            "whisper",
            "WhisperForConditionalGeneration",
            hf.WhisperConfig(**BOTH),
            floats(2, 80, 3000),
            *POSITIONS,
        ),
        {r"conv1/": "iio or adamw", r"conv2/": "iio", **TEXT},
    ),
    "xglm": Model(
        lambda: model(
            "xglm",
            "XGLMForCausalLM",
            hf.XGLMConfig(num_layers=2, max_position_embeddings=64),
            *POSITIONS,
        ),
        TEXT,
    ),
}
