"""What shows only later whether a parameter is a matrix, and along which axes.

Of two parameters that multiply each other both are matrices, or one of them is like
data. Data may reach a product only after several turns of a loop, gates only after they
have multiplied something else, and keys after another product.
"""

import jax
import jax.numpy as jnp

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    EXPERTS,
    HIDDEN,
    LENGTH,
    WIDTH,
    attend,
    between,
    cross_entropy,
    floats,
    integers,
    rms,
    squared_error,
)

SQUARE = floats(WIDTH, WIDTH)
LAYER = {name: SQUARE for name in ("q", "k", "v", "o", "to_q", "to_k", "to_v", "to_o")}


@program({"inputs 0 1": "io", "queries": "adamw", "boxes": "head"})
def object_queries_of_one_image():
    """DETR for one image, under vmap: queries attend to each other without data."""

    def attention(x, y, q, k, v, o):
        q, k, v = ((z @ w).reshape(1, -1, 4, 6) for z, w in ((x, q), (y, k), (y, v)))
        return attend(q, k, v)[0] @ o

    def boxes(p, image):
        x, z = image @ p["inputs"], p["queries"]
        for layer in (p["0"], p["1"]):
            z = z + attention(rms(z), rms(z), *(layer[n] for n in "qkvo"))
            names = ("to_q", "to_k", "to_v", "to_o")
            z = z + attention(rms(z), x, *(layer[n] for n in names))
        return z @ p["boxes"]

    def loss(p, images, targets):
        return squared_error(jax.vmap(lambda x: boxes(p, x))(images), targets)

    params = {
        "inputs": floats(10, WIDTH),
        "queries": floats(9, WIDTH),
        **{"0": LAYER, "1": LAYER},
        "boxes": floats(WIDTH, 4),
    }
    return loss, params, (floats(BATCH, LENGTH, 10), floats(BATCH, 9, 4))


@program({"q k v": "io", "patterns": "adamw", "out": "head"})
def stored_patterns():
    """Hopfield pooling: the data looks at learned patterns, by their projections."""

    def loss(p, x, labels):
        keys, values = p["patterns"] @ p["k"], p["patterns"] @ p["v"]
        z = jax.nn.softmax(rms(x @ p["q"]) @ rms(keys).T) @ values
        return cross_entropy(jax.nn.relu(z) @ p["out"], labels)

    params = {
        "patterns": floats(30, 16),
        **{"q": floats(11, WIDTH), "k": floats(16, WIDTH), "v": floats(16, HIDDEN)},
        "out": floats(HIDDEN, 5),
    }
    return loss, params, (floats(BATCH, 11), integers(BATCH))


@between(
    {"lower upper": "io", "scales": "adamw", "left middle right": "io"},
    lower=SQUARE,
    upper=SQUARE,
    scales=floats(WIDTH),
    left=floats(WIDTH, 6),
    middle=floats(6, 6),
    right=floats(6, WIDTH),
)
def triangular_and_low_rank_factors(x, p):
    """A matrix as the product of two triangles, and one as that of three factors."""
    lower = jnp.tril(p["lower"], -1) + jnp.eye(WIDTH)
    upper = jnp.triu(p["upper"], 1) + jnp.diag(jnp.exp(p["scales"]))
    x = jnp.tanh(x @ (lower @ upper))
    return x @ (p["left"] @ p["middle"] @ p["right"])


@between(
    {"positions condition": "adamw", "project first second up": "io"},
    positions=floats(LENGTH, 9),
    project=floats(9, WIDTH),
    condition=floats(7),
    first=floats(7, HIDDEN),
    second=floats(HIDDEN, WIDTH),
    up=SQUARE,
)
def projected_positions_and_a_condition(x, p):
    """What is added to data, or scales it, was made of parameters alone."""
    x = x + p["positions"] @ p["project"]
    scale = jax.nn.silu(p["condition"] @ p["first"]) @ p["second"]
    return x + jax.nn.gelu(rms(x) @ p["up"]) * scale


@program({"w": "io", "prototypes": "adamw", "project": "io"})
def prototypes_times_a_matrix():
    """Learned prototypes, or a classifier in two factors: the loss is the same."""

    def loss(p, x, labels):
        prototypes = p["prototypes"] @ p["project"]
        return cross_entropy(jax.nn.relu(x @ p["w"]) @ prototypes.T, labels)

    params = {
        "w": floats(9, WIDTH),
        "prototypes": floats(12, 16),
        "project": floats(16, WIDTH),
    }
    return loss, params, (floats(BATCH, 9), integers(BATCH))


@program({"table": "embedding", "w": "io", "head": "head"})
def a_delay_line():
    """Tokens pass through a chain of states, and pick rows six turns later."""

    def loss(p, ids, y):
        def step(states, now):
            return (now, *states[:-1]), p["table"][states[-1]] @ p["w"]

        start = (jnp.zeros(BATCH, int),) * 6
        return squared_error(jax.lax.scan(step, start, ids)[1] @ p["head"], y)

    params = {
        "table": floats(50, WIDTH),
        "w": floats(WIDTH, HIDDEN),
        "head": floats(HIDDEN, 3),
    }
    return loss, params, (integers(LENGTH, BATCH), floats(LENGTH, BATCH, 3))


@between(
    {"to_latent to_q up o": "io", "queries": "adamw", "to_k": "io"},
    to_q=floats(WIDTH, 36),
    to_latent=floats(WIDTH, 14),
    up=floats(11, 48),
    o=SQUARE,
    queries=floats(3, WIDTH),
    to_k=SQUARE,
)
def latent_attention_and_pooling(x, p):
    """Some latents are keys at once, others after a matrix; then queries pool it."""
    shared = x @ p["to_latent"]
    q = (x @ p["to_q"]).reshape(BATCH, LENGTH, 4, 9)
    k, v = jnp.split(
        (rms(shared[..., 3:]) @ p["up"]).reshape(BATCH, LENGTH, 4, 12), 2, 3
    )
    scores = jnp.einsum("bthd,bshd->bhts", q[..., 3:], k)
    scores += jnp.einsum("bthd,bsd->bhts", q[..., :3], shared[..., :3])
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["o"]
    return jax.nn.softmax(p["queries"] @ (x @ p["to_k"]).swapaxes(1, 2)) @ x


@between(
    {"router": "io?", "up down": "bio", "layers": "io"},
    router=floats(WIDTH, EXPERTS),
    up=floats(EXPERTS, WIDTH, HIDDEN),
    down=floats(EXPERTS, HIDDEN, WIDTH),
    layers=[{"w": SQUARE}, {"w": SQUARE}],
)
def gates_first_and_stacked_layers(x, p):
    """Gates multiply hidden units before they are contracted; layers are stacked."""
    gates = jax.nn.softmax(x @ p["router"])
    h = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, p["up"]))
    x = x + jnp.einsum("bte,bteh,ehd->btd", gates, h, p["down"])
    layers = jax.tree.map(lambda *layers: jnp.stack(layers), *p["layers"])
    return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]), None), x, layers)[0]


@program({"emb": "embedding", "w": "io", "filters": "adamw"})
def sampled_rows_of_the_head():
    """The last matrix before rows of the table; filters are known by their spectra."""

    def loss(p, ids, sampled):
        x = p["emb"][ids]
        spectrum = jnp.fft.rfft(p["filters"], axis=0)[..., None, :] ** 2
        x = jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * spectrum.swapaxes(0, 1), axis=1)
        return cross_entropy((x @ p["w"])[:, -1] @ p["emb"][sampled].T, ids[:, 0])

    params = {"emb": floats(50, WIDTH), "w": SQUARE, "filters": floats(LENGTH, WIDTH)}
    return loss, params, (integers(BATCH, LENGTH), integers(7))


@between(
    {"q k v": "io", "segments": "adamw"},
    **{name: SQUARE for name in "qkv"},
    segments=floats(2, WIDTH),
)
def segments_under_a_mask(x, p):
    """XLNet: queries meet a table, and a mask follows the softmax."""
    q, k, v = (x @ p[name] for name in "qkv")
    same = jax.nn.one_hot((x[..., 0] > 0).astype(int), 2)
    scores = q @ k.swapaxes(1, 2) + (q @ p["segments"].T) @ same.swapaxes(1, 2)
    return (jax.nn.softmax(scores) * (x[:, None, :, 0] > 0)) @ v
