"""Models of flaxdiff, small, that predict noise in images from text."""

import jax
import jax.numpy as jnp
from flaxdiff.models.simple_dit import SimpleDiT
from flaxdiff.models.simple_mmdit import SimpleMMDiT
from flaxdiff.models.simple_unet import Unet
from flaxdiff.models.simple_vit import SimpleUDiT, UViT
from flaxdiff.models.ssm_dit import HybridSSMAttentionDiT

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import floats, zeros

INPUTS = (floats(2, 32, 32, 3), floats(2), floats(2, 7, 48))
SMALL = {"patch_size": 8, "emb_features": 32, "num_layers": 2, "num_heads": 4}


def model(module):
    """The error of the noise that a module predicts."""
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(lambda: module.init(rngs, *map(zeros, INPUTS)))["params"]

    def loss(params, *inputs):
        noise = module.apply({"params": params}, *inputs, rngs=rngs)
        return jnp.mean((noise - inputs[0]) ** 2)

    return loss, params, INPUTS


ANSWERS = {
    r"pos_encoding|bias": "adamw",
    r"^patch_embed": "iiio or adamw",
    r"^final_proj": "adamw",
    r"ssm/.*/[BC]_(re|im)$": "adamw",  # complex matrices of state spaces
    r"to_[qkv]/kernel": "ioo or ibo",
    r"to_out_0/kernel": "iio",
    r"kernel": "iiio or io",
}
UNET_ANSWERS = {
    r"^ConvLayer_0/": "iiio or adamw",
    r"^ConvLayer_2/": "adamw",
    **ANSWERS,
}

MODELS = {
    "unet": Model(
        lambda: model(
            Unet(
                emb_features=32,
                feature_depths=(16, 32),
                attention_configs=(None, {"heads": 4}),
            )
        ),
        UNET_ANSWERS,
    ),
    "uvit": Model(lambda: model(UViT(**SMALL)), ANSWERS),
    "udit": Model(lambda: model(SimpleUDiT(**SMALL)), ANSWERS),
    "dit": Model(lambda: model(SimpleDiT(**SMALL)), ANSWERS),
    "mmdit": Model(lambda: model(SimpleMMDiT(**SMALL)), ANSWERS),
    "state spaces and attention": Model(
        lambda: model(HybridSSMAttentionDiT(**SMALL, ssm_attention_ratio="1:1")),
        ANSWERS,
    ),
}
