"""Models of images, fields, graphs, predictions and clicks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.parts import (
    BATCH,
    GAIN,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    SQUARE,
    UP_DOWN,
    WIDTH,
    Leaf,
    conv,
    cross_entropy,
    floats,
    integers,
    mlp,
    program,
    squared_error,
    up_down,
    widths,
)

NORM = {"scale": GAIN, "bias": GAIN}


def layer_norm(x, p):
    """LayerNorm with a scale and a bias."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def group_norm(x, scale):
    """Two groups of the channels of images (batch, height, width, channels)."""
    y, axes = x.reshape(*x.shape[:-1], 2, -1), (1, 2, 4)
    y = y - y.mean(axes, keepdims=True)
    y = y * lax.rsqrt(y.var(axes, keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale


def block(inside, outside):
    """The parameters of a residual block of a U-Net."""
    return {
        "g1": Leaf("adamw", inside),
        "c1": Leaf("iiio", 3, 3, inside, outside),
        "t": Leaf("io", 14, outside),
        "g2": Leaf("adamw", outside),
        "c2": Leaf("iiio", 3, 3, outside, outside),
        "skip": Leaf("io", inside, outside),
    }


@program(
    floats(BATCH, 8, 8, 3),
    integers(BATCH),
    patch=Leaf("io or adamw", 12, WIDTH),
    blocks=[
        {
            "norms": [NORM, NORM],
            "tokens": [Leaf("io", 16, 11), Leaf("io", 11, 16)],
            **UP_DOWN,
        }
    ]
    * 2,
    head=Leaf("head", WIDTH, 10),
    bias=Leaf("adamw", 10),
)
def mlp_mixer(p, images, labels):
    """Matrices along the tokens, and along the channels."""
    b = images.shape[0]
    patches = images.reshape(b, 4, 2, 4, 2, 3).swapaxes(2, 3).reshape(b, 16, 12)
    x = patches @ p["patch"]
    for w in p["blocks"]:
        y = layer_norm(x, w["norms"][0]).swapaxes(1, 2)
        x = x + (jax.nn.gelu(y @ w["tokens"][0]) @ w["tokens"][1]).swapaxes(1, 2)
        x = x + up_down(layer_norm(x, w["norms"][1]), w)
    return cross_entropy(x.mean(1) @ p["head"] + p["bias"], labels)


@program(
    floats(BATCH, 8, 8, 3),
    floats(BATCH),
    floats(BATCH, 8, 8, 3),
    time={"w1": Leaf("io", 10, 14), "b1": Leaf("adamw", 14), "w2": Leaf("io", 14, 14)},
    stem=Leaf("iiio or adamw", 3, 3, 3, 6),
    down=block(6, 8),
    mid=block(8, 10),
    q=Leaf("io", 10, 10),
    k=Leaf("io", 10, 10),
    v=Leaf("io", 10, 10),
    o=Leaf("io", 10, 10),
    up=block(18, 6),
    last={"g": Leaf("adamw", 6), "w": Leaf("head", 3, 3, 6, 3), "b": Leaf("adamw", 3)},
)
def unet_with_time(p, images, t, noise):
    """A diffusion U-Net: embeddings of the time, a skip connection, attention."""
    angle = t[:, None] * jnp.exp(-jnp.arange(5.0))
    e = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    e = jax.nn.silu(e @ p["time"]["w1"] + p["time"]["b1"]) @ p["time"]["w2"]

    def res(x, w):
        h = conv(jax.nn.silu(group_norm(x, w["g1"])), w["c1"])
        h = h + (jax.nn.silu(e) @ w["t"])[:, None, None]
        h = conv(jax.nn.silu(group_norm(h, w["g2"])), w["c2"])
        return x @ w["skip"] + h

    alpha = jnp.cos(t)[:, None, None, None]
    x = conv(images * alpha + noise * jnp.sqrt(1 - alpha**2), p["stem"])
    a = res(x, p["down"])
    h = lax.reduce_window(a, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    h = res(h, p["mid"])
    s = h.reshape(h.shape[0], -1, 10)
    q, k, v = s @ p["q"], s @ p["k"], s @ p["v"]
    s = s + jax.nn.softmax(q @ k.swapaxes(1, 2) / 3) @ v @ p["o"]
    h = jax.image.resize(s.reshape(h.shape), (h.shape[0], 8, 8, 10), "nearest")
    h = res(jnp.concatenate([h, a], -1), p["up"])
    h = jax.nn.silu(group_norm(h, p["last"]["g"]))
    return squared_error(conv(h, p["last"]["w"]) + p["last"]["b"], noise)


@program(
    floats(BATCH, LENGTH, 9),
    e1=Leaf("io or adamw", 9, HIDDEN),
    e2=Leaf("io", HIDDEN, 7),
    codes=Leaf("embedding", 20, 7),
    d1=Leaf("io", 7, HIDDEN),
    d2=Leaf("head", HIDDEN, 9),
)
def vq_vae(p, x):
    """The nearest code replaces each vector; gradients go straight through."""
    z = jax.nn.relu(x @ p["e1"]) @ p["e2"]
    squares = (z**2).sum(-1, keepdims=True) + (p["codes"] ** 2).sum(-1)
    q = p["codes"][jnp.argmin(squares - 2 * z @ p["codes"].T, -1)]
    commit = squared_error(z, lax.stop_gradient(q))
    commit += squared_error(q, lax.stop_gradient(z))
    q = z + lax.stop_gradient(q - z)
    return squared_error(jax.nn.relu(q @ p["d1"]) @ p["d2"], x) + commit


@program(
    floats(BATCH, 2),
    floats(BATCH),
    **widths(2, WIDTH, HIDDEN, 1, last="adamw"),
    b1=GAIN,
    b2=Leaf("adamw", HIDDEN),
)
def pinn(p, xt, boundary):
    """Burgers' equation: derivatives of the network by its inputs are the loss."""

    def u(z):
        h = jnp.tanh(z @ p["w1"] + p["b1"])
        return (jnp.tanh(h @ p["w2"] + p["b2"]) @ p["w3"])[0]

    def residual(z):
        g, curved = jax.jvp(jax.grad(u), (z,), (jnp.array([1.0, 0.0]),))
        return g[1] + u(z) * g[0] - 0.01 * curved[0]

    error = squared_error(jax.vmap(u)(xt), boundary)
    return jnp.mean(jax.vmap(residual)(xt) ** 2) + error


@program(
    floats(BATCH, 6),
    nets={
        "w1": Leaf("bio", 4, 6, WIDTH),
        "b1": Leaf("adamw", 4, WIDTH),
        "w2": Leaf("bio", 4, WIDTH, 12),
        "b2": Leaf("adamw", 4, 12),
    },
    scale=Leaf("adamw", 2, 6),
)
def coupling_flow(p, x):
    """RealNVP: four coupling layers in a scan, with alternating masks."""
    masks = jnp.stack([(jnp.arange(6) + i) % 2 for i in range(4)]).astype(jnp.float32)

    def layer(carry, now):
        z, logdet = carry
        w, mask = now
        h = jax.nn.relu((z * mask) @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
        s, t = jnp.split(h, 2, -1)
        s = jnp.tanh(s) * (1 - mask)
        return (z * jnp.exp(s) + t * (1 - mask), logdet + s.sum(-1)), None

    (z, logdet), _ = lax.scan(layer, (x, jnp.zeros(x.shape[0])), (p["nets"], masks))
    z = z * jnp.exp(p["scale"][0]) + p["scale"][1]
    return (0.5 * (z**2).sum(-1) - logdet).mean()


@program(
    floats(17, 9),
    integers(2, 40),
    integers(17),
    w1=Leaf("ioo or ibo", 9, HEADS, HEAD),
    src1=Leaf("adamw", HEADS, HEAD),
    dst1=Leaf("adamw", HEADS, HEAD),
    w2=SQUARE,
    src2=GAIN,
    dst2=GAIN,
    head=Leaf("head", WIDTH, 4),
)
def graph_attention(p, x, edges, labels):
    """GAT: softmaxes over the neighbors of each node by segments."""
    s, t = edges[0] % 17, edges[1] % 17

    def layer(h, a, b):
        e = (h * a).sum(-1)[s] + (h * b).sum(-1)[t]
        e = jax.nn.leaky_relu(e)
        e = jnp.exp(e - jax.ops.segment_max(e, t, 17)[t])
        z = jax.ops.segment_sum(e, t, 17)
        a = e / (z[t] + 1e-9)
        return jax.ops.segment_sum(h[s] * a[..., None], t, 17)

    h = jnp.einsum("ni,iho->nho", x, p["w1"])
    h = jax.nn.elu(layer(h, p["src1"], p["dst1"]).reshape(17, -1))
    h = jax.nn.elu(layer(h @ p["w2"], p["src2"], p["dst2"]))
    return cross_entropy(h @ p["head"], labels)


@program(
    floats(BATCH, 2 * LENGTH, 3),
    c1=Leaf("iio or adamw", 4, 3, 8),
    c2=Leaf("iio", 2, 8, WIDTH),
    x=Leaf("io", WIDTH, 3 * HIDDEN),
    h=Leaf("io", HIDDEN, 3 * HIDDEN),
    ahead=Leaf("head", 3, HIDDEN, WIDTH),
)
def contrastive_predictive_coding(p, x):
    """A matrix for each distance ahead, compared with the encodings of all samples."""

    def strided(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (2,), "VALID", dimension_numbers=numbers)

    z = strided(jax.nn.relu(strided(x, p["c1"])), p["c2"])

    def step(h, z):
        r, u, n = jnp.split(z @ p["x"], 3, -1)
        hr, hu, hn = jnp.split(h @ p["h"], 3, -1)
        u = jax.nn.sigmoid(u + hu)
        h = (1 - u) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + u * h
        return h, h

    _, c = lax.scan(step, jnp.zeros((x.shape[0], HIDDEN)), z.swapaxes(0, 1))
    at = z.shape[1] - 4
    guess = jnp.einsum("bh,khd->kbd", c[at], p["ahead"])
    real = jnp.stack([z[:, at + 1 + k] for k in range(3)])
    logits = jnp.einsum("kbd,kcd->kbc", guess, real)
    return cross_entropy(
        logits, jnp.broadcast_to(jnp.arange(x.shape[0]), logits.shape[:2])
    )


@program(
    integers(BATCH, 3),
    floats(BATCH, 13),
    floats(BATCH),
    tables=[
        Leaf("embedding", 50, 8),
        Leaf("embedding", 7, 8),
        Leaf("embedding", 900, 8),
    ],
    bottom=widths(13, WIDTH, 8, last="io"),
    cross={"u": Leaf("io", 32, 5), "v": Leaf("io", 5, 32), "b": Leaf("adamw", 32)},
    top=widths(38, HIDDEN, WIDTH, 1, first="io", last="adamw"),
)
def dlrm(p, ids, dense, clicks):
    """Several tables, a low-rank cross layer, pairwise dot products."""
    rows = [t[ids[:, i] % t.shape[0]] for i, t in enumerate(p["tables"])]
    x = jnp.stack([mlp(p["bottom"], dense, jax.nn.relu), *rows], 1)
    flat = x.reshape(x.shape[0], -1)
    c = p["cross"]
    flat = flat * (flat @ c["u"] @ c["v"] + c["b"]) + flat
    dots = jnp.einsum("bid,bjd->bij", x, x)
    i, j = np.triu_indices(4, 1)
    z = jnp.concatenate([flat, dots[:, i, j]], -1)
    logit = mlp(p["top"], z, jax.nn.relu)[:, 0]
    return (jax.nn.softplus(logit) - logit * clicks).mean()


def dense(answer, *shape, outputs=1):
    """A kernel and a bias of `nn.Dense`, or of `nn.DenseGeneral`."""
    bias = Leaf("adamw", *shape[-outputs:])
    return {"kernel": Leaf(answer, *shape), "bias": bias}


@program(
    floats(BATCH, 9),
    integers(BATCH),
    integers(),
    {"up": floats(WIDTH, HIDDEN), "stem": floats(9, WIDTH)},
    {"up": floats(WIDTH, HIDDEN), "stem": floats(9, WIDTH)},
    tasks=[Leaf("embedding", 4, WIDTH), Leaf("embedding", 4, HIDDEN)],
    stem=Leaf("io or adamw", 9, WIDTH),
    up=Leaf("io", WIDTH, HIDDEN),
    heads=Leaf("bio or embedding or head", 4, HIDDEN, 10),
    bias=Leaf("adamw", 4, 10),
)
def one_task_after_another(p, x, labels, task, old, fisher):
    """Masks of units by the task (HAT), and weights held near old ones (EWC)."""
    masks = [jax.nn.sigmoid(5 * e[task]) for e in p["tasks"]]
    h = jax.nn.relu(x @ p["stem"]) * masks[0]
    h = jax.nn.relu(h @ p["up"]) * masks[1]
    loss = cross_entropy(h @ p["heads"][task] + p["bias"][task], labels)
    held = {n: p[n] for n in old}
    terms = jax.tree.map(lambda f, a, b: (f * (a - b) ** 2).sum(), fisher, held, old)
    return loss + sum(jax.tree.leaves(terms)) + sum(m.mean() for m in masks)


@program(
    floats(BATCH, 8, 8, 3),
    mix=[Leaf("io", 12, 12)] * 2,
    gain=[{"s": Leaf("adamw", 12), "b": Leaf("adamw", 12)}] * 2,
    nets=[
        {
            "a": Leaf("iiio", 3, 3, 6, HIDDEN),
            "b": Leaf("io", HIDDEN, HIDDEN),
            "c": Leaf("iiio or head", 3, 3, HIDDEN, 12),
        }
    ]
    * 2,
)
def glow(p, x):
    """Invertible matrices between affine couplings; log determinants."""
    b = x.shape[0]
    z = x.reshape(b, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, 4, 4, 12)
    total = 0.0
    for w, g, n in zip(p["mix"], p["gain"], p["nets"], strict=True):
        z = (z + g["b"]) * jnp.exp(g["s"])
        z = z @ w
        total += 16 * (g["s"].sum() + jnp.linalg.slogdet(w)[1])
        u, v = jnp.split(z, 2, -1)
        h = jax.nn.relu(jax.nn.relu(conv(u, n["a"])) @ n["b"])
        s, t = jnp.split(conv(h, n["c"]), 2, -1)
        s = jax.nn.log_sigmoid(s + 2)
        z = jnp.concatenate([u, v * jnp.exp(s) + t], -1)
        total += s.sum((1, 2, 3))
    return (0.5 * (z * z).sum((1, 2, 3)) - total).mean()


@program(
    floats(BATCH, 7),
    floats(BATCH, 7),
    x=[
        Leaf("io or adamw", 7, HIDDEN),
        Leaf("io or adamw", 7, WIDTH),
        Leaf("adamw", 7, 1),
    ],
    z=[Leaf("io", HIDDEN, WIDTH), Leaf("adamw", WIDTH, 1)],
)
def convex_potentials(p, source, target):
    """Input-convex layers with positive matrices; transport along the gradient."""

    def potential(x):
        h = jax.nn.softplus(x @ p["x"][0])
        h = jax.nn.softplus(h @ jax.nn.softplus(p["z"][0]) + x @ p["x"][1])
        return (h @ jax.nn.softplus(p["z"][1]) + x @ p["x"][2])[..., 0]

    moved = jax.grad(lambda x: potential(x).sum())(source)
    cost = 0.5 * ((moved - source) ** 2).sum(-1)
    return (potential(target) - potential(moved) + cost).mean()


@program(
    floats(BATCH, 12),
    floats(BATCH, 12),
    {"w1": floats(12, HIDDEN), "w2": floats(HIDDEN, WIDTH), "last": floats(WIDTH, 9)},
    floats(9),
    net=widths(12, HIDDEN, WIDTH, last="io"),
    last=Leaf("head", WIDTH, 9),
    length=Leaf("adamw", 9),
)
def student_and_teacher(p, one, two, teacher, center):
    """DINO: prototypes of unit length; a teacher without a gradient."""

    def logits(net, last, length, x):
        z = mlp(net, x, jax.nn.gelu)
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        return z @ (length * last / jnp.linalg.norm(last, axis=0))

    old = {n: teacher[n] for n in ("w1", "w2")}
    loss = 0.0
    for a, b in ((one, two), (two, one)):
        aim = jax.nn.softmax((logits(old, teacher["last"], 1.0, a) - center) / 0.04)
        own = jax.nn.log_softmax(logits(p["net"], p["last"], p["length"], b) / 0.1)
        loss -= jnp.mean(jnp.sum(lax.stop_gradient(aim) * own, -1))
    return loss
