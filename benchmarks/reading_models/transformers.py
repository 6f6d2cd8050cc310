"""The models in Flax of Hugging Face's transformers, with two layers each."""

import importlib

import jax
import jax.numpy as jnp
import transformers as hf

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import any_loss, floats, integers, zeros

TOKENS, IMAGES = integers(2, 16), floats(2, 224, 224, 3)
RNGS = ("params", "dropout", "gumbel", "indices", "droppath")


def model(family, head, config, inputs, outputs=None):
    """A loss of a linen module of transformers.

    Args:
      family: the part of the names of its classes that its configuration has too.
      head: the rest of the name of the linen class, without "Flax" and "Module".
      config: arguments of the configuration.
      inputs: positional arguments of its call; shapes become arguments of the loss.
      outputs: from what it returns to what the loss depends on; None for its logits.
    """
    config = getattr(hf, f"{family}Config")(**config)
    kind = config.model_type
    flax_module = importlib.import_module(
        f"transformers.models.{kind}.modeling_flax_{kind}"
    )
    if kind in ("t5", "longt5"):
        flax_module.jnp = _Numpy()
    linen = getattr(flax_module, f"Flax{family}{head}Module")(config, dtype=jnp.float32)
    rngs = {name: jax.random.key(n) for n, name in enumerate(RNGS)}
    variables = jax.eval_shape(lambda: linen.init(rngs, *map(zeros, inputs)))
    params = variables.pop("params")

    def loss(params, rest, *inputs):
        variables = {"params": params, **rest}
        result = linen.apply(variables, *inputs, rngs=rngs)
        return any_loss(outputs(result) if outputs else result.logits)

    return loss, params, (variables, *inputs)


class _Numpy:
    """`jax.numpy`, whose `clip` has the argument `a_max` that T5 gives."""

    @staticmethod
    def clip(x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)

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
# The middle convolution of a block has groups.
GROUPS = {r"layer/1/convolution": "adamw?", **CONVOLUTIONS}
PROJECTIONS = {r"(visual|text)_projection": "head", **VISION}
GLOBAL = {r"global_relative": "adamw", **TEXT}
SPEECH = {r"conv1/": "iio or adamw", r"conv2/": "iio", **TEXT}
SOUND = {
    r"masked_spec_embed|codevectors": "adamw",
    r"project_(hid|q)/|weight_proj": "io or adamw",
    r"conv_layers/0/": "iio or adamw",
    r"conv_layers/": "iio",
    r"weight_v": "adamw?",
    r"kernel$": "io",
}


# --- models ---------------------------------------------------------------------------


def _entry(family, head, answers, inputs, outputs=None, **config):
    return Model(lambda: model(family, head, config, inputs, outputs), answers)


def _both(result):
    return result[0], result[1]


POSITIONS = (TOKENS,) * 3
FOUR = (TOKENS,) * 4
BERT = (*FOUR, None)
SMALL_IMAGES = (floats(2, 64, 64, 3),)
TWO = {"num_hidden_layers": 2}
BOTH = {"encoder_layers": 2, "decoder_layers": 2}
GENERATION, CAUSAL = "ForConditionalGeneration", "ForCausalLM"
PRETRAINING, IMAGE_CLASS = "ForPreTraining", "ForImageClassification"

MODELS = {
    "albert": _entry("Albert", PRETRAINING, FACTORED, FOUR, _both, **TWO),
    "beit": _entry(
        *("Beit", IMAGE_CLASS, VISION, (IMAGES,)),
        use_relative_position_bias=True,
        use_shared_relative_position_bias=False,
        **TWO,
    ),
    "bert": _entry("Bert", PRETRAINING, TEXT, BERT, _both, **TWO),
    "big_bird": _entry(
        *("BigBird", PRETRAINING, TEXT, ((integers(2, 128),) * 4 + (None,)), _both),
        block_size=8,
        num_random_blocks=1,
        attention_type="block_sparse",
        **TWO,
    ),
    "clip": _entry(
        *("CLIP", "", PROJECTIONS, (TOKENS, IMAGES, TOKENS, TOKENS)),
        outputs=lambda x: (x.logits_per_image, x.logits_per_text),
        text_config=TWO,
        vision_config=TWO,
    ),
    "gemma": _entry(
        "Gemma", CAUSAL, TEXT, POSITIONS, max_position_embeddings=1024, **TWO
    ),
    "gpt2": _entry("GPT2", "LMHead", OUT_IN, POSITIONS, n_layer=2),
    "gptj": _entry(
        *("GPTJ", CAUSAL, TEXT, POSITIONS),
        n_layer=2,
        n_embd=256,
        n_head=8,
        rotary_dim=16,
    ),
    "longt5": _entry(
        *("LongT5", GENERATION, GLOBAL, FOUR),
        num_layers=2,
        encoder_attention_type="transient-global",
        local_radius=3,
        global_block_size=4,
    ),
    "regnet": _entry("RegNet", IMAGE_CLASS, GROUPS, SMALL_IMAGES, depths=[1, 2, 1, 1]),
    "roformer": _entry(
        *("RoFormer", "ForMaskedLM", TEXT, (*POSITIONS, None)),
        embedding_size=768,
        rotary_value=False,
        **TWO,
    ),
    "t5_gated_untied": _entry(
        *("T5", GENERATION, TEXT, FOUR),
        num_layers=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "wav2vec2": _entry(
        *("Wav2Vec2", PRETRAINING, SOUND, (floats(2, 4000),)),
        outputs=lambda x: jnp.sum(x[0] * x[1], -1, keepdims=True),
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        **TWO,
    ),
    "whisper": _entry(
        "Whisper", GENERATION, SPEECH, (floats(2, 80, 3000), *POSITIONS), **BOTH
    ),
}
