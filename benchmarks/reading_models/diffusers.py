"""The models in Flax of Hugging Face's diffusers, with fewer channels."""

import jax
import jax.numpy as jnp
from diffusers import FlaxAutoencoderKL, FlaxControlNetModel, FlaxUNet2DConditionModel

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import floats, integers

BATCH, SIZE, TEXT = 2, 16, 48
SMALL = {
    "sample_size": SIZE,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": TEXT,
    "attention_head_dim": 4,
}
UNET = {**SMALL, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
NOISY = floats(BATCH, 4, SIZE, SIZE)
INPUTS = (NOISY, integers(BATCH), floats(BATCH, 7, TEXT))

ANSWERS = {r"kernel": "iiio or io"}
# The first convolution sees the noisy image, the last one is what the loss compares.
UNET_ANSWERS = {
    r"^conv_in/": "iiio or adamw",
    r"^conv_out/": "adamw",
    r"^time_embedding/linear_1/": "io or adamw",  # on sines of the time
    **ANSWERS,
}


def _shapes(module):
    return jax.eval_shape(lambda: module.init_weights(jax.random.key(0)))


def unet(**settings):
    """The noise that a U-Net predicts."""
    module = FlaxUNet2DConditionModel(**UNET, **settings)

    def loss(params, noisy, times, text):
        noise = module.apply({"params": params}, noisy, times, text).sample
        return jnp.mean((noise - noisy) ** 2)

    return loss, _shapes(module), INPUTS


def controlnet():
    """A ControlNet in front of a frozen U-Net, as it is trained."""
    frozen = FlaxUNet2DConditionModel(**UNET)
    module = FlaxControlNetModel(**SMALL)

    def loss(params, unet, noisy, times, text, image):
        down, middle = module.apply(
            {"params": params}, noisy, times, text, image, return_dict=False
        )
        noise = frozen.apply(
            {"params": unet},
            noisy,
            times,
            text,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample
        return jnp.mean((noise - noisy) ** 2)

    image = floats(BATCH, 3, 8 * SIZE, 8 * SIZE)
    return loss, _shapes(module), (_shapes(frozen), *INPUTS, image)


def autoencoder():
    """The error of a picture that a variational autoencoder encodes and decodes."""
    module = FlaxAutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=2 * SIZE,
    )

    def loss(params, images):
        decoded = module.apply({"params": params}, images).sample
        return jnp.mean((decoded - images) ** 2)

    return loss, _shapes(module), (floats(BATCH, 3, 2 * SIZE, 2 * SIZE),)


MODELS = {
    "unet": Model(unet, UNET_ANSWERS),
    "unet with linear projections": Model(
        lambda: unet(use_linear_projection=True), UNET_ANSWERS
    ),
    "controlnet": Model(
        controlnet,
        {
            r"controlnet_cond_embedding/conv_in": "iiio or adamw",
            **{key: UNET_ANSWERS[key] for key in UNET_ANSWERS if "conv_out" not in key},
        },
    ),
    "autoencoder": Model(
        autoencoder,
        {
            r"encoder/conv_in/": "iiio or adamw",
            r"decoder/conv_out/": "adamw",
            **ANSWERS,
        },
    ),
}
