"""Parameters that meet other parameters, or state, before they meet the data."""

import jax
import jax.numpy as jnp

from tests.programs import program
from tests.programs.parts import (
    ATTENTION,
    ATTENTION_ANSWERS,
    BATCH,
    EMBED_AND_HEAD,
    HIDDEN,
    MLP_ANSWERS,
    TOKENS,
    UP_DOWN,
    WIDTH,
    attention,
    conv,
    cross_entropy,
    floats,
    key,
    language_model,
    model_with_attention,
    rms,
    squared_error,
    up_down,
)

RANK = 4
LORA = {"lora_a": floats(WIDTH, RANK), "lora_b": floats(RANK, HIDDEN)}
LORA_ANSWERS = {**MLP_ANSWERS, "lora_a lora_b": "io"}
# Adapters of two matrices that are not trained.
ADAPTERS = {
    "up": {"a": floats(WIDTH, RANK), "b": floats(RANK, HIDDEN)},
    "down": {"a": floats(HIDDEN, RANK), "b": floats(RANK, WIDTH)},
}


# --- LoRA -----------------------------------------------------------------------------


@language_model(LORA_ANSWERS, **UP_DOWN, **LORA)
def lora_merged(x, p):
    """The product of the factors is added to the matrix."""
    up = p["up"] + 0.5 * p["lora_a"] @ p["lora_b"]
    return jax.nn.gelu(x @ up) @ p["down"]


@language_model(LORA_ANSWERS, **UP_DOWN, **LORA)
def lora_beside(x, p):
    """The factors multiply the data one after the other."""
    hidden = x @ p["up"] + x @ p["lora_a"] @ p["lora_b"]
    return jax.nn.gelu(hidden) @ p["down"]


@program({"up down": "io"})
def lora_beside_frozen_matrices():
    """Only the factors are trained; the model itself arrives as an argument."""

    def loss(adapters, frozen, ids):
        def dense(x, name):
            a, b = adapters[name]["a"], adapters[name]["b"]
            return x @ frozen[name] + x @ a @ b

        x = frozen["emb"][ids]
        x = x + dense(jax.nn.gelu(dense(x, "up")), "down")
        return cross_entropy(x @ frozen["head"], ids)

    return loss, ADAPTERS, ({**EMBED_AND_HEAD, **UP_DOWN}, TOKENS)


@program({"up down": "io"})
def lora_merged_into_frozen_matrices():
    """The factors are merged into a matrix that arrives as an argument."""

    def loss(adapters, frozen, ids):
        def dense(x, name):
            a, b = adapters[name]["a"], adapters[name]["b"]
            return x @ (frozen[name] + a @ b)

        x = frozen["emb"][ids]
        x = x + dense(jax.nn.gelu(dense(x, "up")), "down")
        return cross_entropy(x @ frozen["head"], ids)

    return loss, ADAPTERS, ({**EMBED_AND_HEAD, **UP_DOWN}, TOKENS)


@program({"first": "iiio or adamw", "last": "iiio"})
def trained_convolutions_before_frozen_ones():
    """As in a ControlNet: the last trained product is not the last one."""

    def loss(p, frozen, images):
        x = conv(jax.nn.silu(conv(images, p["first"])), p["last"])
        noise = conv(jax.nn.silu(conv(images, frozen["in"]) + x), frozen["out"])
        return squared_error(noise, images)

    trained = {"first": floats(3, 3, 3, HIDDEN), "last": floats(1, 1, HIDDEN, WIDTH)}
    frozen = {"in": floats(3, 3, 3, WIDTH), "out": floats(3, 3, WIDTH, 3)}
    return loss, trained, (frozen, floats(BATCH, 8, 8, 3))


@language_model(
    {**LORA_ANSWERS, "magnitude": "adamw"}, **UP_DOWN, **LORA, magnitude=floats(HIDDEN)
)
def dora(x, p):
    """LoRA, merged, with the norms of the columns as a vector."""
    up = p["up"] + p["lora_a"] @ p["lora_b"]
    up = p["magnitude"] * up / jnp.linalg.norm(up, axis=0, keepdims=True)
    return jax.nn.gelu(x @ up) @ p["down"]


# --- norms, masks, noise and quantization of weights ----------------------------------


@program(MLP_ANSWERS)
def masked_weights():
    """Pruning: one mask is a factor, the other one a choice."""

    def loss(p, masks, ids):
        def block(x, p):
            down = jnp.where(masks["down"], p["down"], 0)
            return jax.nn.gelu(x @ (p["up"] * masks["up"])) @ down

        return model_with_attention(block)[0](p, ids)

    masks = {
        "up": UP_DOWN["up"],
        "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), bool),
    }
    return loss, {**EMBED_AND_HEAD, "att": ATTENTION, **UP_DOWN}, (masks, TOKENS)


@program(MLP_ANSWERS)
def noisy_weights():
    """Noise is added to all parameters before the model sees them."""
    inner, params, _ = model_with_attention(up_down, **UP_DOWN)

    def loss(p, noise_key, ids):
        p = jax.tree.map(lambda x: x + jax.random.normal(noise_key, x.shape), p)
        return inner(p, ids)

    return loss, params, (key(), TOKENS)


# --- one array in two places, or two in one -------------------------------------------


@program({"emb": "embedding", **ATTENTION_ANSWERS, "up": "io"})
def tied_embedding_and_mlp():
    """The table is the head, transposed, and the MLP goes back by its own transpose."""

    def loss(p, ids):
        x = p["emb"][ids]
        x = x + attention(x, p["att"])
        x = x + jax.nn.gelu(rms(x) @ p["up"]) @ p["up"].T
        return cross_entropy(rms(x) @ p["emb"].T, ids)

    params = {"emb": EMBED_AND_HEAD["emb"], "att": ATTENTION, "up": UP_DOWN["up"]}
    return loss, params, (TOKENS,)


# --- one matrix in several products ---------------------------------------------------


@program(MLP_ANSWERS)
def spectral_norm_with_the_gradient_of_the_norm():
    """A power iteration multiplies the matrix by a vector of state first."""
    inner, params, args = model_with_attention(up_down, **UP_DOWN)

    def loss(p, ids, u):
        v = u @ p["up"].T
        v = jax.lax.stop_gradient(v / jnp.linalg.norm(v))
        after = v @ p["up"]
        norm = (after * jax.lax.stop_gradient(after)).sum() ** 0.5
        return inner({**p, "up": p["up"] / norm}, ids), after

    return loss, params, (*args, floats(1, HIDDEN))
