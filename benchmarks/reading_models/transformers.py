"""The models in Flax of Hugging Face's transformers, with two layers each."""

import importlib

import jax
import jax.numpy as jnp
import transformers as hf

from benchmarks.reading_models import TOKENS, Model, any_loss, floats, integers, zeros

RNGS = ("params", "dropout", "indices", "droppath")


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
    r"shared/|relative_attention_bias|global_relative": "adamw",
    r"lm_head|classifier|predictions/decoder|seq_relationship|score/": "adamw",
    r"kernel$": "io",
}
# ALBERT's small embeddings meet a product before the first layer.
FACTORED = {r"embedding_hidden_mapping_in": "io or adamw", **TEXT}
OUT_IN = {r"c_attn|c_proj|c_fc": "oi", **TEXT}
CLIP = {
    r"(visual|text)_projection": "head",
    r"patch_embedding": "iiio or adamw",
    **TEXT,
}
CONVOLUTIONS = {
    r"layer/1/convolution": "adamw?",  # the middle one of a block has groups
    r"^classifier": "adamw",
    r"embedder": "iiio or adamw",
    r"kernel$": "iiio",
}
SPEECH = {r"conv1/": "iio or adamw", r"conv2/": "iio", **TEXT}


# --- models ---------------------------------------------------------------------------


def _entry(family, head, answers, inputs, outputs=None, **config):
    return Model(lambda: model(family, head, config, inputs, outputs), answers)


def _both(result):
    return result[0], result[1]


def _logits_of_both(result):
    return result.logits_per_image, result.logits_per_text


POSITIONS = (TOKENS,) * 3
FOUR = (TOKENS,) * 4
LONG = ((integers(2, 128),) * 4) + (None,)
TWO = {"num_hidden_layers": 2}
SPARSE = {"block_size": 8, "num_random_blocks": 1, "attention_type": "block_sparse"}
GLOBAL = {"encoder_attention_type": "transient-global", "global_block_size": 4}
UNTIED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BOTH = {"encoder_layers": 2, "decoder_layers": 2}
PRETRAINING, GENERATION = "ForPreTraining", "ForConditionalGeneration"

MODELS = {
    "albert": _entry("Albert", PRETRAINING, FACTORED, FOUR, _both, **TWO),
    "big_bird": _entry("BigBird", PRETRAINING, TEXT, LONG, _both, **SPARSE, **TWO),
    "clip": _entry(
        *("CLIP", "", CLIP, (TOKENS, floats(2, 224, 224, 3), TOKENS, TOKENS)),
        outputs=_logits_of_both,
        text_config=TWO,
        vision_config=TWO,
    ),
    "gpt2": _entry("GPT2", "LMHead", OUT_IN, POSITIONS, n_layer=2),
    "longt5": _entry(
        "LongT5", GENERATION, TEXT, FOUR, num_layers=2, local_radius=3, **GLOBAL
    ),
    "regnet": _entry(
        *("RegNet", "ForImageClassification", CONVOLUTIONS, (floats(2, 64, 64, 3),)),
        depths=[1, 2, 1, 1],
    ),
    "t5_gated_untied": _entry("T5", GENERATION, TEXT, FOUR, num_layers=2, **UNTIED),
    "whisper": _entry(
        "Whisper", GENERATION, SPEECH, (floats(2, 80, 3000), *POSITIONS), **BOTH
    ),
}
