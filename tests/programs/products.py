"""Parameters that meet other parameters, or state, before they meet the data."""

import jax
import jax.numpy as jnp
from jax import lax

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
    integers,
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


@program({"up down": "io"})
def lora_on_a_model_that_is_closed_over():
    """The frozen model is a constant of the loss; one adapter of two is merged."""
    shapes = {**EMBED_AND_HEAD, **UP_DOWN}
    frozen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def loss(adapters, ids):
        up, down = adapters["up"], adapters["down"]
        x = frozen["emb"][ids]
        hidden = jax.nn.gelu(x @ frozen["up"] + x @ up["a"] @ up["b"])
        x = x + hidden @ (frozen["down"] + down["a"] @ down["b"])
        return cross_entropy(x @ frozen["head"], ids)

    return loss, ADAPTERS, (TOKENS,)


@language_model(
    {**LORA_ANSWERS, "magnitude": "adamw"}, **UP_DOWN, **LORA, magnitude=floats(HIDDEN)
)
def dora(x, p):
    """LoRA, merged, with the norms of the columns as a vector."""
    up = p["up"] + p["lora_a"] @ p["lora_b"]
    up = p["magnitude"] * up / jnp.linalg.norm(up, axis=0, keepdims=True)
    return jax.nn.gelu(x @ up) @ p["down"]


# --- norms, masks, noise and quantization of weights ----------------------------------


@language_model(
    {"direction down": "io", "size": "adamw"},
    direction=UP_DOWN["up"],
    down=UP_DOWN["down"],
    size=floats(HIDDEN),
)
def weight_norm(x, p):
    """The matrix is a vector of sizes times normalized columns."""
    v = p["direction"]
    up = p["size"] * v / jnp.sqrt((v * v).sum(0))
    return jax.nn.gelu(x @ up) @ p["down"]


@program(MLP_ANSWERS)
def spectral_norm():
    """The matrix is divided by its norm, estimated with a vector from the state."""

    def loss(p, u, ids):
        def block(x, p):
            v = p["up"].T @ u
            v = v / jnp.linalg.norm(v)
            return jax.nn.gelu(x @ (p["up"] / (u @ p["up"] @ v))) @ p["down"]

        return model_with_attention(block)[0](p, ids)

    params = {**EMBED_AND_HEAD, "att": ATTENTION, **UP_DOWN}
    return loss, params, (floats(WIDTH), TOKENS)


@program({"stem": "iiio or adamw", "conv": "iiio", "head": "head"})
def weight_standardization():
    """Kernels of convolutions lose their mean and get variance one."""

    def standardized(w):
        return (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-5)

    def loss(p, images, labels):
        x = jax.nn.relu(conv(images, standardized(p["stem"])))
        x = jax.nn.relu(conv(x, standardized(p["conv"])))
        return cross_entropy(x.mean((1, 2)) @ p["head"], labels)

    params = {
        "stem": floats(3, 3, 3, WIDTH),
        "conv": floats(3, 3, WIDTH, HIDDEN),
        "head": floats(HIDDEN, 10),
    }
    return loss, params, (floats(BATCH, 8, 8, 3), integers(BATCH))


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


@language_model(MLP_ANSWERS, **UP_DOWN)
def quantized_straight_through(x, p):
    """Weights are rounded to int8 and back; the gradient passes the rounding."""

    def quantized(w):
        scale = jnp.abs(w).max(0) / 127
        rounded = jnp.round(w / scale).astype(jnp.int8).astype(w.dtype) * scale
        return w + lax.stop_gradient(rounded - w)

    return jax.nn.gelu(x @ quantized(p["up"])) @ quantized(p["down"])


@language_model(MLP_ANSWERS, **UP_DOWN)
def int8_product(x, p):
    """Both sides are rounded to int8, and the product is scaled afterwards."""

    def dot(x, w):
        x_scale = jnp.abs(x).max(-1, keepdims=True) / 127
        w_scale = jnp.abs(w).max(0) / 127
        y = lax.dot_general(
            jnp.round(x / x_scale).astype(jnp.int8),
            jnp.round(w / w_scale).astype(jnp.int8),
            (((2,), (0,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        return y.astype(jnp.float32) * w_scale * x_scale

    return jax.nn.gelu(dot(x, p["up"])) @ p["down"]


@language_model({"up down": "io", "scale": "adamw"}, **UP_DOWN, scale=floats(1))
def float8_with_custom_vjp(x, p):
    """A product in float8 that has its own derivative, as fp8 libraries write it."""

    @jax.custom_vjp
    def dot(x, w, scale):
        x8, w8 = x.astype(jnp.float8_e4m3fn), (w / scale).astype(jnp.float8_e4m3fn)
        return (x8.astype(jnp.bfloat16) @ w8.astype(jnp.bfloat16)).astype(x.dtype)

    def forward(x, w, scale):
        return dot(x, w, scale), (x, w, scale)

    def backward(saved, g):
        x, w, scale = saved
        return g @ w.T, jnp.einsum("btd,btf->df", x, g), jnp.zeros_like(scale)

    dot.defvjp(forward, backward)
    hidden = dot(x, p["up"], p["scale"]) * p["scale"]
    return jax.nn.gelu(hidden) @ p["down"]


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


@language_model(
    {**MLP_ANSWERS, "factor_1 factor_2": "io"},
    **UP_DOWN,
    factor_1=floats(WIDTH, 8),
    factor_2=floats(8, WIDTH),
)
def factors_multiplied_first(x, p):
    """A low-rank layer whose two factors are multiplied before they meet the data."""
    hidden = jax.nn.gelu(x @ p["up"]) @ p["down"]
    return hidden @ (p["factor_1"] @ p["factor_2"])


@program({"table": "embedding", "project": "io or adamw", "mlp": "io", "head": "head"})
def factored_embedding_multiplied_first():
    """ALBERT's two factors of an embedding, multiplied before the lookup."""

    def loss(p, ids):
        x = (p["table"] @ p["project"])[ids]
        x = x + jax.nn.gelu(x @ p["mlp"]["up"]) @ p["mlp"]["down"]
        return cross_entropy(x @ p["head"], ids)

    params = {
        "table": floats(96, 8),
        "project": floats(8, WIDTH),
        "mlp": UP_DOWN,
        "head": EMBED_AND_HEAD["head"],
    }
    return loss, params, (TOKENS,)


@language_model(
    {"left right": "io?", "up down": "io"},
    **UP_DOWN,
    left=floats(4, 4),
    right=floats(6, 6),
)
def kronecker_factors(x, p):
    """A matrix that is the Kronecker product of two small ones."""
    hidden = jax.nn.gelu(x @ p["up"]) @ p["down"]
    return hidden @ jnp.kron(p["left"], p["right"])


@language_model(
    {"layer_scale temperature": "adamw", "gain up down": "io"},
    **UP_DOWN,
    gain=floats(WIDTH, WIDTH),
    layer_scale=floats(WIDTH),
    temperature=floats(),
)
def scales_and_a_matrix_of_gains(x, p):
    """A scale of a branch, a temperature, and a square matrix that is no vector."""
    hidden = jax.nn.gelu(x @ p["up"] * jnp.exp(p["temperature"])) @ p["down"]
    return (hidden @ p["gain"]) * p["layer_scale"]


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


@program({"outer inner": "io"})
def tied_autoencoder():
    """The decoder has the transposed matrices of the encoder."""

    def loss(p, x):
        code = jax.nn.relu(jax.nn.relu(x @ p["outer"]) @ p["inner"])
        y = jax.nn.relu(code @ p["inner"].T) @ p["outer"].T
        return squared_error(x, y)

    params = {"outer": floats(WIDTH, HIDDEN), "inner": floats(HIDDEN, RANK)}
    return loss, params, (floats(BATCH, WIDTH),)
