"""Products of several kinds, parameters that meet others first, and no matrices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EMBED_AND_HEAD,
    HIDDEN,
    LENGTH,
    MODEL,
    NO_ROLES,
    TOKENS,
    UP_DOWN,
    VOCAB,
    WIDTH,
    attention,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    key,
    language_model,
    leaf,
    program,
    rms,
    squared_error,
    up_down,
    with_attention,
)

# --- tables and convolutions ----------------------------------------------------------


@program(
    integers(BATCH),
    integers(BATCH),
    floats(BATCH),
    users=leaf("embedding", 50, WIDTH),
    items=leaf("embedding", 60, WIDTH),
)
def matrix_factorization(p, user, item, rating):
    """The product of two rows that integers pick."""
    return squared_error((p["users"][user] * p["items"][item]).sum(-1), rating)


@program(TOKENS, **EMBED_AND_HEAD, **UP_DOWN)
def one_hot_embedding(p, ids):
    """The lookup is a product with a one-hot matrix."""
    x = jax.nn.one_hot(ids, VOCAB) @ p["emb"]
    return cross_entropy((x + up_down(x, p)) @ p["head"], ids)


@program(
    floats(BATCH, 8, 8, 3),
    stem=leaf("iiio or adamw", 3, 3, 3, WIDTH),
    depthwise=leaf("adamw", 3, 3, 1, WIDTH),
    pointwise=leaf("iiio", 1, 1, WIDTH, WIDTH),
    groups=leaf("adamw?", 3, 3, WIDTH // 4, WIDTH),
    transposed=leaf("ooio", 2, 2, WIDTH, 12),
    out=leaf("head", 3, 3, 12, 3),
)
def convolutions(p, images):
    """Plain, depthwise, pointwise, grouped, transposed without overlap, and a head."""
    x = jax.nn.relu(conv(images, p["stem"]))
    x = jax.nn.relu(conv(x, p["depthwise"], WIDTH))
    x = jax.nn.relu(conv(x, p["pointwise"]))
    x = jax.nn.relu(conv(x, p["groups"], 4))
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_transpose(
        x, p["transposed"], (2, 2), "VALID", dimension_numbers=numbers
    )
    return jnp.mean(conv(jax.nn.relu(x), p["out"]) ** 2)


@program(
    floats(BATCH, LENGTH, 2),
    integers(BATCH),
    stem=leaf("io or adamw", 2, WIDTH),
    conv=leaf("iio", 3, WIDTH, HIDDEN),
    head=leaf("head", HIDDEN, 10),
)
def convolution_by_patches(p, signal, labels):
    """Windows are gathered first, and a product follows."""
    x = jax.nn.relu(signal @ p["stem"])
    steps = jnp.arange(LENGTH - 2)[:, None] + jnp.arange(3)
    windows = x[:, steps]  # (batch, places, 3, width)
    x = jax.nn.relu(jnp.einsum("btwi,wio->bto", windows, p["conv"]))
    return cross_entropy(x.mean(1) @ p["head"], labels)


@program(
    floats(BATCH, 8, 8, 3),
    integers(BATCH, LENGTH),
    image={
        "stem": leaf("iiio", 3, 3, 3, 10),
        "conv": leaf("iiio", 3, 3, 10, 14),
        "project": leaf("head", 14, 12),
    },
    text={
        "emb": leaf("embedding", 50, WIDTH),
        "w": leaf("io", WIDTH, HIDDEN),
        "project": leaf("head", HIDDEN, 12),
    },
    temperature=leaf("adamw"),
)
def contrastive_images_and_texts(p, images, ids):
    """CLIP: the last products of two towers are compared with each other."""
    x = jax.nn.relu(conv(images, p["image"]["stem"]))
    x = jax.nn.relu(conv(x, p["image"]["conv"])).mean((1, 2))
    x = x @ p["image"]["project"]
    y = jax.nn.gelu(p["text"]["emb"][ids].mean(1) @ p["text"]["w"])
    y = y @ p["text"]["project"]
    x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    logits = jnp.exp(p["temperature"]) * x @ y.T
    labels = jnp.arange(BATCH)
    return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)


# --- LoRA -----------------------------------------------------------------------------

RANK = 4
LORA = {
    **UP_DOWN,
    "lora_a": leaf("io", WIDTH, RANK),
    "lora_b": leaf("io", RANK, HIDDEN),
}
# Adapters of two matrices that are not trained.
ADAPTERS = {
    "up": {"a": leaf("io", WIDTH, RANK), "b": leaf("io", RANK, HIDDEN)},
    "down": {"a": leaf("io", HIDDEN, RANK), "b": leaf("io", RANK, WIDTH)},
}
FROZEN = {
    "emb": floats(VOCAB, WIDTH),
    "up": floats(WIDTH, HIDDEN),
    "down": floats(HIDDEN, WIDTH),
    "head": floats(WIDTH, VOCAB),
}


@language_model(**LORA)
def lora_merged(x, p):
    """The product of the factors is added to the matrix."""
    return up_down(x, {**p, "up": p["up"] + 0.5 * p["lora_a"] @ p["lora_b"]})


@language_model(**LORA)
def lora_beside(x, p):
    """The factors multiply the data one after the other."""
    hidden = x @ p["up"] + x @ p["lora_a"] @ p["lora_b"]
    return jax.nn.gelu(hidden) @ p["down"]


@program(FROZEN, TOKENS, **ADAPTERS)
def lora_beside_frozen_matrices(adapters, frozen, ids):
    """Only the factors are trained; the model itself arrives as an argument."""

    def dense(x, name):
        a, b = adapters[name]["a"], adapters[name]["b"]
        return x @ frozen[name] + x @ a @ b

    x = frozen["emb"][ids]
    x = x + dense(jax.nn.gelu(dense(x, "up")), "down")
    return cross_entropy(x @ frozen["head"], ids)


@program(FROZEN, TOKENS, **ADAPTERS)
def lora_merged_into_frozen_matrices(adapters, frozen, ids):
    """The factors are merged into a matrix that arrives as an argument."""
    merged = {n: frozen[n] + p["a"] @ p["b"] for n, p in adapters.items()}
    x = frozen["emb"][ids]
    return cross_entropy((x + up_down(x, merged)) @ frozen["head"], ids)


@program(
    {"in": floats(3, 3, 3, WIDTH), "out": floats(3, 3, WIDTH, 3)},
    floats(BATCH, 8, 8, 3),
    first=leaf("iiio or adamw", 3, 3, 3, HIDDEN),
    last=leaf("iiio", 1, 1, HIDDEN, WIDTH),
)
def trained_convolutions_before_frozen_ones(p, frozen, images):
    """As in a ControlNet: the last trained product is not the last one."""
    x = conv(jax.nn.silu(conv(images, p["first"])), p["last"])
    noise = conv(jax.nn.silu(conv(images, frozen["in"]) + x), frozen["out"])
    return squared_error(noise, images)


@language_model(**LORA, magnitude=leaf("adamw", HIDDEN))
def dora(x, p):
    """LoRA, merged, with the norms of the columns as a vector."""
    up = p["up"] + p["lora_a"] @ p["lora_b"]
    up = p["magnitude"] * up / jnp.linalg.norm(up, axis=0, keepdims=True)
    return up_down(x, {**p, "up": up})


# --- masks, noise and norms of weights ------------------------------------------------


@program(
    {"up": floats(WIDTH, HIDDEN), "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), bool)},
    TOKENS,
    **MODEL,
    **UP_DOWN,
)
def masked_weights(p, masks, ids):
    """Pruning: one mask is a factor, the other one a choice."""
    up, down = p["up"] * masks["up"], jnp.where(masks["down"], p["down"], 0)
    return with_attention(up_down)({**p, "up": up, "down": down}, ids)


@program(key(), TOKENS, **MODEL, **UP_DOWN)
def noisy_weights(p, noise_key, ids):
    """Noise is added to all parameters before the model sees them."""
    p = jax.tree.map(lambda x: x + jax.random.normal(noise_key, x.shape), p)
    return with_attention(up_down)(p, ids)


@program(TOKENS, floats(1, HIDDEN), **MODEL, **UP_DOWN)
def spectral_norm_with_the_gradient_of_the_norm(p, ids, u):
    """A power iteration multiplies the matrix by a vector of state first."""
    v = u @ p["up"].T
    v = lax.stop_gradient(v / jnp.linalg.norm(v))
    after = v @ p["up"]
    norm = (after * lax.stop_gradient(after)).sum() ** 0.5
    return with_attention(up_down)({**p, "up": p["up"] / norm}, ids), after


@between(
    **UP_DOWN,
    shared=leaf("io", WIDTH, WIDTH),
    gains=leaf("adamw", 4, WIDTH),
)
def blocks_of_a_matrix_with_gains(x, p):
    """A scale for each block of rows, and multiplicative noise on a matrix."""
    shared = p["shared"].reshape(4, 6, WIDTH) * p["gains"][:, None]
    noise = jax.random.normal(jax.random.key(3), p["up"].shape)
    x = x + up_down(x, {**p, "up": p["up"] * (1 + 0.1 * noise)})
    return x @ shared.reshape(WIDTH, WIDTH)


@program(TOKENS, emb=EMBED_AND_HEAD["emb"], att=ATTENTION, up=leaf("io", WIDTH, HIDDEN))
def tied_embedding_and_mlp(p, ids):
    """The table is the head, transposed, and the MLP goes back by its own transpose."""
    x = p["emb"][ids]
    x = x + attention(x, p["att"])
    x = x + up_down(rms(x), {"up": p["up"], "down": p["up"].T})
    return cross_entropy(rms(x) @ p["emb"].T, ids)


# --- what multiplies data and is no matrix by convention ------------------------------


def normal(answer, *shape):
    """The mean and the scale of each weight."""
    return {"mean": leaf(answer, *shape), "rho": leaf("adamw", *shape)}


@program(
    key(),
    floats(BATCH, 9),
    integers(BATCH),
    first=normal("io", 9, WIDTH),
    last=normal("head", WIDTH, 5),
)
def bayes_by_backprop(p, random_key, x, labels):
    """Each weight is drawn from a normal distribution of its own."""
    keys = jax.random.split(random_key)
    for name, one in zip(("first", "last"), keys, strict=True):
        mean, rho = p[name]["mean"], p[name]["rho"]
        noise = jax.random.normal(one, mean.shape)
        x = jax.nn.relu(x) @ (mean + jax.nn.softplus(rho) * noise)
    complexity = sum(jnp.sum(q["mean"] ** 2 - q["rho"]) for q in p.values())
    return cross_entropy(x, labels) + 1e-3 * complexity


@program(
    floats(BATCH, 7),
    floats(BATCH, 3),
    w=leaf("io", 7, WIDTH),
    centers=leaf("adamw", 30, WIDTH),
    widths=leaf("adamw", 30),
    out=leaf("head", 30, 3),
)
def radial_basis_functions(p, x, y):
    """Distances to learned centers, by a product and two norms."""
    x = jnp.tanh(x @ p["w"])
    norms = (x**2).sum(-1, keepdims=True), (p["centers"] ** 2).sum(-1)
    squares = norms[0] + norms[1] - 2 * x @ p["centers"].T
    return squared_error(jnp.exp(-squares * p["widths"]) @ p["out"], y)


@program(
    floats(BATCH, 7),
    floats(BATCH, 3),
    w1=leaf("io", 7, WIDTH),
    w2=leaf("io", WIDTH, 6),
    inducing=leaf("adamw", 15, 6),
    mean=leaf("head", 15, 3),
    scale=leaf("adamw"),
)
def deep_kernel_with_inducing_points(p, x, y):
    """A sparse Gaussian process on the features of a network."""
    features = jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"])

    def kernel(a, b):
        squares = (a**2).sum(-1)[:, None] - 2 * a @ b.T + (b**2).sum(-1)[None]
        return jnp.exp(-0.5 * squares * jnp.exp(p["scale"]))

    inner = kernel(p["inducing"], p["inducing"]) + 1e-4 * jnp.eye(15)
    root = jnp.linalg.cholesky(inner)
    cross = kernel(features, p["inducing"])
    whitened = jax.scipy.linalg.solve_triangular(root, cross.T, lower=True)
    return squared_error(whitened.T @ p["mean"], y)


# --- kernels that hide what they compute ----------------------------------------------


@between(att=NO_ROLES, **UP_DOWN)
def attention_kernel_with_its_own_derivative(x, p):
    """A Pallas kernel between products, in a `custom_vjp`; it takes no parameter."""

    def kernel(q, k, v, o):
        o[...] = q[...] + k[...] + v[...]

    @jax.custom_vjp
    def flash(q, k, v):
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return pl.pallas_call(kernel, out_shape=out)(q, k, v)

    flash.defvjp(lambda q, k, v: (flash(q, k, v), None), lambda _, g: (g, g, g))

    att = p["att"]
    x = x + flash(x @ att["q"], x @ att["k"], x @ att["v"]) @ att["o"]
    return x + up_down(rms(x), p)


@language_model(**UP_DOWN)
def product_in_a_kernel(x, p):
    """A Pallas kernel takes a parameter, and its widths leave no choice."""

    def kernel(x, w, o):
        o[...] = x[...] @ w[...]

    def product(x, w):
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(kernel, out_shape=out)(x, w)

    hidden = product(x.reshape(-1, WIDTH), p["up"])
    return jax.nn.gelu(hidden).reshape(BATCH, LENGTH, HIDDEN) @ p["down"]
