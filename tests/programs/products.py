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
    TOKENS,
    UP_DOWN,
    VOCAB,
    WIDTH,
    Leaf,
    attention,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    key,
    language_model,
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
    users=Leaf("embedding", 50, WIDTH),
    items=Leaf("embedding", 60, WIDTH),
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
    stem=Leaf("iiio or adamw", 3, 3, 3, WIDTH),
    depthwise=Leaf("adamw", 3, 3, 1, WIDTH),
    pointwise=Leaf("iiio", 1, 1, WIDTH, WIDTH),
    groups=Leaf("adamw?", 3, 3, WIDTH // 4, WIDTH),
    transposed=Leaf("ooio", 2, 2, WIDTH, 12),
    out=Leaf("head", 3, 3, 12, 3),
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
    floats(BATCH, 9),
    integers(BATCH, LENGTH),
    image={"w": Leaf("io", 9, HIDDEN), "project": Leaf("head", HIDDEN, 12)},
    text={"emb": Leaf("embedding", 50, WIDTH), "project": Leaf("head", WIDTH, 12)},
    temperature=Leaf("adamw"),
)
def contrastive_images_and_texts(p, images, ids):
    """CLIP: the last products of two towers are compared with each other."""
    x = jax.nn.relu(images @ p["image"]["w"]) @ p["image"]["project"]
    y = p["text"]["emb"][ids].mean(1) @ p["text"]["project"]
    x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    logits = jnp.exp(p["temperature"]) * x @ y.T
    labels = jnp.arange(BATCH)
    return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)


# --- LoRA -----------------------------------------------------------------------------

RANK = 4
# Adapters of two matrices, which may be trained as well.
ADAPTERS = {
    "up": {"a": Leaf("io", WIDTH, RANK), "b": Leaf("io", RANK, HIDDEN)},
    "down": {"a": Leaf("io", HIDDEN, RANK), "b": Leaf("io", RANK, WIDTH)},
}
FROZEN = {
    "emb": floats(VOCAB, WIDTH),
    "up": floats(WIDTH, HIDDEN),
    "down": floats(HIDDEN, WIDTH),
    "head": floats(WIDTH, VOCAB),
}


@language_model(**UP_DOWN, lora=ADAPTERS["up"])
def lora_beside(x, p):
    """The factors multiply the data one after the other."""
    hidden = x @ p["up"] + x @ p["lora"]["a"] @ p["lora"]["b"]
    return jax.nn.gelu(hidden) @ p["down"]


@program(FROZEN, TOKENS, **ADAPTERS)
def lora_merged_into_frozen_matrices(adapters, frozen, ids):
    """The factors are merged into a matrix that arrives as an argument."""
    merged = {n: frozen[n] + p["a"] @ p["b"] for n, p in adapters.items()}
    x = frozen["emb"][ids]
    return cross_entropy((x + up_down(x, merged)) @ frozen["head"], ids)


@program(
    {"in": floats(3, 3, 3, WIDTH), "out": floats(3, 3, WIDTH, 3)},
    floats(BATCH, 8, 8, 3),
    first=Leaf("iiio or adamw", 3, 3, 3, HIDDEN),
    last=Leaf("iiio", 1, 1, HIDDEN, WIDTH),
)
def trained_convolutions_before_frozen_ones(p, frozen, images):
    """As in a ControlNet: the last trained product is not the last one."""
    x = conv(jax.nn.silu(conv(images, p["first"])), p["last"])
    noise = conv(jax.nn.silu(conv(images, frozen["in"]) + x), frozen["out"])
    return squared_error(noise, images)


@language_model(**UP_DOWN, lora=ADAPTERS["up"], magnitude=Leaf("adamw", HIDDEN))
def dora(x, p):
    """LoRA, merged, with the norms of the columns as a vector."""
    up = p["up"] + p["lora"]["a"] @ p["lora"]["b"]
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


@program(TOKENS, floats(1, HIDDEN), **MODEL, **UP_DOWN)
def spectral_norm_with_the_gradient_of_the_norm(p, ids, u):
    """A power iteration multiplies the matrix by a vector of state first."""
    v = u @ p["up"].T
    v = lax.stop_gradient(v / jnp.linalg.norm(v))
    after = v @ p["up"]
    norm = (after * lax.stop_gradient(after)).sum() ** 0.5
    return with_attention(up_down)({**p, "up": p["up"] / norm}, ids), after


@language_model(**UP_DOWN)
def spectral_norm_with_its_vector_closed_over(x, p):
    """Nothing but the matrix and a constant makes the number that scales it."""
    v = lax.stop_gradient(jnp.ones((1, HIDDEN)) @ p["up"].T)
    v = v / jnp.linalg.norm(v)
    u = lax.stop_gradient(v @ p["up"])
    norm = (v @ p["up"] @ (u / jnp.linalg.norm(u)).T)[0, 0]
    return up_down(x, {**p, "up": p["up"] / norm})


@between(
    **UP_DOWN,
    shared=Leaf("io", WIDTH, WIDTH),
    gains=Leaf("adamw", 4, WIDTH),
)
def blocks_of_a_matrix_with_gains(x, p):
    """A scale for each block of rows, and multiplicative noise on a matrix."""
    shared = p["shared"].reshape(4, 6, WIDTH) * p["gains"][:, None]
    noise = jax.random.normal(jax.random.key(3), p["up"].shape)
    x = x + up_down(x, {**p, "up": p["up"] * (1 + 0.1 * noise)})
    return x @ shared.reshape(WIDTH, WIDTH)


@program(
    TOKENS,
    emb=EMBED_AND_HEAD["emb"],
    att=ATTENTION,
    up=UP_DOWN["up"],
    old_head=Leaf("unused", WIDTH, VOCAB),
)
def tied_embedding_and_mlp(p, ids):
    """The table is the head, transposed, and the MLP goes back by its own transpose."""
    x = p["emb"][ids]
    x = x + attention(x, p["att"])
    x = x + up_down(rms(x), {"up": p["up"], "down": p["up"].T})
    return cross_entropy(rms(x) @ p["emb"].T, ids)


@between(
    skew=Leaf("io or oi", WIDTH, WIDTH),
    blocks=Leaf("bio or boi", 4, 6, 6),
    flow=Leaf("io", WIDTH, WIDTH),
    back=Leaf("oi", WIDTH, WIDTH),
)
def orthogonal_and_inverted_matrices(x, p):
    """Cayley's map makes rotations; a flow solves by one matrix and inverts another."""

    def cayley(w):
        a, one = w - w.mT, jnp.eye(w.shape[-1])
        return jnp.linalg.solve(one + a, one - a)

    x = x + jnp.tanh(x @ cayley(p["skew"]))
    groups = x.reshape(BATCH, LENGTH, 4, 6)
    turned = jnp.einsum("btgi,gij->btgj", groups, cayley(p["blocks"]))
    x = jnp.tanh(turned.reshape(x.shape))
    x = jnp.tanh(jax.vmap(jax.vmap(lambda x: jnp.linalg.solve(p["flow"], x)))(x))
    return x + jnp.tanh(x @ jnp.linalg.inv(p["back"]))


# --- what multiplies data and is no matrix by convention ------------------------------


def normal(answer, *shape):
    """The mean and the scale of each weight."""
    return {"mean": Leaf(answer, *shape), "rho": Leaf("adamw", *shape)}


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
    w1=Leaf("io", 7, WIDTH),
    w2=Leaf("io", WIDTH, 6),
    inducing=Leaf("adamw", 15, 6),
    mean=Leaf("head", 15, 3),
    scale=Leaf("adamw"),
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
