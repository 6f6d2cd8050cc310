"""Memories, flows, recurrences, drafts and agents: models of more kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EMBED_AND_HEAD,
    GAIN,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    SQUARE,
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
    program,
    rms,
    squared_error,
    up_down,
)

# --- sequences ------------------------------------------------------------------------


@program(
    floats(BATCH, LENGTH, 9),
    integers(BATCH, 5),
    stem=Leaf("iio or adamw", 3, 9, WIDTH),
    ff=[UP_DOWN, UP_DOWN],
    att=ATTENTION,
    point=Leaf("io", WIDTH, 2 * WIDTH),
    depth=Leaf("adamw", 7, 1, WIDTH),
    norm=GAIN,
    back=SQUARE,
    head=Leaf("head", WIDTH, 13),
)
def conformer(p, sound, labels):
    """Two halves of an MLP around attention and a gated depthwise convolution; CTC."""
    x = conv(sound, p["stem"])
    x = x + 0.5 * up_down(rms(x), p["ff"][0])
    x = x + attention(x, p["att"])
    a, g = jnp.split(rms(x) @ p["point"], 2, -1)
    y = conv(a * jax.nn.sigmoid(g), p["depth"], groups=WIDTH)
    x = x + jax.nn.silu(rms(y) * p["norm"]) @ p["back"]
    x = rms(x + 0.5 * up_down(rms(x), p["ff"][1]))
    logits = x @ p["head"]
    pads = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, pads[0], labels, pads[1]).mean()


@between(
    qkv=Leaf("io", WIDTH, 3 * WIDTH),
    low=Leaf("io", WIDTH, 5),
    high=Leaf("io", 5, WIDTH),
    bias=GAIN,
    gate=SQUARE,
    norm=Leaf("adamw", HEAD),
    o=SQUARE,
)
def gated_linear_attention(x, p):
    """GLA in chunks: decays of each channel, products inside and between chunks."""
    z = rms(x)

    def cut(a):
        return a.reshape(x.shape[0], x.shape[1] // 4 or 1, -1, HEADS, HEAD)

    q, k, v = map(cut, jnp.split(z @ p["qkv"], 3, -1))
    g = cut(jax.nn.log_sigmoid(z @ p["low"] @ p["high"] + p["bias"]) / 16)
    g = jnp.cumsum(g, 2)
    q, k = q * jnp.exp(g), k * jnp.exp(-g)
    inner = jnp.einsum("bnthd,bnshd->bnhts", q, k)
    y = jnp.einsum(
        "bnhts,bnshd->bnthd",
        jnp.where(np.tri(inner.shape[-1], dtype=bool), inner, 0),
        v,
    )
    last = g[:, :, -1]
    adds = jnp.einsum("bnshd,bnshe->bnhde", k * jnp.exp(last)[:, :, None], v)

    def step(s, at):
        decay, add = at
        return s * jnp.exp(decay)[..., None] + add, s

    start = jnp.zeros((x.shape[0], HEADS, HEAD, HEAD))
    _, states = lax.scan(step, start, (last.swapaxes(0, 1), adds.swapaxes(0, 1)))
    y = y + jnp.einsum("bnthd,bnhde->bnthe", q, states.swapaxes(0, 1))
    y = (rms(y) * p["norm"]).reshape(x.shape) * jax.nn.silu(z @ p["gate"])
    return x + y @ p["o"]


@program(
    floats(BATCH, LENGTH, 5),
    integers(BATCH),
    start=Leaf("io or adamw", 5, WIDTH),
    f1=Leaf("io", WIDTH, HIDDEN),
    f2=Leaf("io", HIDDEN, 5 * WIDTH),
    classes=Leaf("head", WIDTH, 10),
)
def neural_cde(p, path, labels):
    """The state turns with the path, by a matrix that the state makes."""

    def field(h):
        y = jnp.tanh(jax.nn.relu(h @ p["f1"]) @ p["f2"])
        return y.reshape(len(h), WIDTH, 5)

    def step(h, move):
        k1 = jnp.einsum("bhc,bc->bh", field(h), move)
        k2 = jnp.einsum("bhc,bc->bh", field(h + k1 / 2), move)
        return h + k2, None

    moves = jnp.diff(path, axis=1).swapaxes(0, 1)
    h, _ = lax.scan(step, path[:, 0] @ p["start"], moves)
    return cross_entropy(h @ p["classes"], labels)


@program(
    TOKENS,
    emb=Leaf("embedding", VOCAB, WIDTH),
    att=ATTENTION,
    head=Leaf("head", WIDTH, 34),
    tails=[
        [Leaf("io", WIDTH, 10), Leaf("head", 10, 30)],
        [Leaf("io", WIDTH, 7), Leaf("head", 7, 34)],
    ],
)
def adaptive_softmax(p, ids):
    """Frequent words, and two clusters of rarer ones behind narrow matrices."""
    x = p["emb"][ids]
    x = rms(x + attention(x, p["att"]))
    top = jax.nn.log_softmax(x @ p["head"])
    bounds = 32, 62, 96
    short = jnp.clip(ids, 0, 31)
    logs = jnp.where(
        ids < 32, jnp.take_along_axis(top, short[..., None], -1)[..., 0], 0
    )
    for i, (w, v) in enumerate(p["tails"]):
        tail = jax.nn.log_softmax(x @ w @ v)
        at = jnp.clip(ids - bounds[i], 0, tail.shape[-1] - 1)
        own = jnp.take_along_axis(tail, at[..., None], -1)[..., 0] + top[..., 32 + i]
        logs = jnp.where((ids >= bounds[i]) & (ids < bounds[i + 1]), own, logs)
    return -logs.mean()


@program(
    TOKENS,
    **EMBED_AND_HEAD,
    layers=[{"att": ATTENTION, **UP_DOWN}] * 3,
    exits=Leaf("adamw", 3, WIDTH),
    halt=Leaf("adamw", WIDTH),
    draft={"join": Leaf("io", 2 * WIDTH, WIDTH), **UP_DOWN},
)
def early_exits_and_a_draft(p, ids):
    """LayerSkip and EAGLE: every layer predicts; a draft guesses the next features."""
    x, loss = p["emb"][ids], 0.0
    for i, w in enumerate(p["layers"]):
        x = x + attention(x, w["att"])
        x = x + up_down(rms(x), w)
        h = rms(x) * p["exits"][i]
        weight = jax.nn.sigmoid(lax.stop_gradient(h) @ p["halt"])
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], ids)
        loss += (losses * (0.5 + weight)).mean() / (3 - i)
    z = (
        jnp.concatenate([lax.stop_gradient(x)[:, :-1], p["emb"][ids[:, 1:]]], -1)
        @ p["draft"]["join"]
    )
    z = z + up_down(rms(z), p["draft"])
    goal = jax.nn.log_softmax(lax.stop_gradient(rms(x)[:, 1:] @ p["head"]))
    own = jax.nn.log_softmax(rms(z) @ lax.stop_gradient(p["head"]))
    return (
        loss
        + (jnp.exp(goal) * (goal - own)).sum(-1).mean()
        + squared_error(z, lax.stop_gradient(x)[:, 1:])
    )


# --- memories, sets, flows ------------------------------------------------------------


@between(
    q=Leaf("io", WIDTH, HEADS * 2 * 5),
    keys=Leaf("router", HEADS, 2, 7, 5),
    values=Leaf("embedding", 49, WIDTH),
    gate=SQUARE,
)
def product_keys(x, p):
    """A memory of 7 x 7 places: the best of two halves of a query, and their pairs."""
    q = (rms(x) @ p["q"]).reshape(*x.shape[:2], HEADS, 2, 5)
    scores, at = lax.top_k(jnp.einsum("bthcd,hcnd->bthcn", q, p["keys"]), 3)
    pairs = (scores[..., 0, :, None] + scores[..., 1, None, :]).reshape(
        *x.shape[:2], HEADS, 9
    )
    ids = (at[..., 0, :, None] * 7 + at[..., 1, None, :]).reshape(pairs.shape)
    best, where = lax.top_k(pairs, 3)
    ids = jnp.take_along_axis(ids, where, -1)
    y = (jax.nn.softmax(best)[..., None] * p["values"][ids]).sum((2, 3))
    return x + y * jax.nn.silu(x @ p["gate"])


@program(
    floats(BATCH, 12, 7),
    floats(BATCH, 12, 7),
    key(),
    mean=Leaf("adamw", 11),
    spread=Leaf("adamw", 11),
    k=Leaf("io", 7, 11),
    v=Leaf("io", 7, 11),
    q=Leaf("io", 11, 11),
    gru=[Leaf("io", 11, 33), Leaf("io", 11, 33)],
    up=Leaf("io", 11, HIDDEN),
    down=Leaf("io", HIDDEN, 11),
    paint=[Leaf("io", 11, HIDDEN), Leaf("head", HIDDEN, 8)],
    place=Leaf("adamw", 12, 11),
)
def slot_attention(p, x, y, key):
    """Slots drawn at random compete for inputs in turns; each paints with a mask."""
    k, v = rms(x) @ p["k"], rms(x) @ p["v"]
    slots = p["mean"] + jnp.exp(p["spread"]) * jax.random.normal(key, (len(x), 4, 11))

    def turn(slots, _):
        a = jax.nn.softmax(jnp.einsum("bsd,bnd->bns", rms(slots) @ p["q"], k))
        a = a / (a.sum(1, keepdims=True) + 1e-6)
        m = jnp.einsum("bns,bnd->bsd", a, v)
        r, z, n = jnp.split(m @ p["gru"][0], 3, -1)
        hr, hz, hn = jnp.split(slots @ p["gru"][1], 3, -1)
        z = jax.nn.sigmoid(z + hz)
        slots = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * slots
        return slots + jax.nn.relu(rms(slots) @ p["up"]) @ p["down"], None

    slots, _ = lax.scan(turn, slots, None, 3)
    h = slots[:, :, None] + p["place"]
    out = jax.nn.relu(h @ p["paint"][0]) @ p["paint"][1]
    rgb, mask = out[..., :7], jax.nn.softmax(out[..., 7:], 1)
    return squared_error((rgb * mask).sum(1), y)


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


# --- agents ---------------------------------------------------------------------------


@program(
    floats(BATCH, 9),
    integers(BATCH),
    floats(BATCH),
    floats(BATCH, 9),
    key(),
    {
        "see": floats(9, WIDTH),
        "waves": floats(16, WIDTH),
        "mix": floats(WIDTH, HIDDEN),
        "q": floats(HIDDEN, 5),
    },
    see=Leaf("io or adamw", 9, WIDTH),
    waves=Leaf("io or adamw", 16, WIDTH),
    mix=Leaf("io", WIDTH, HIDDEN),
    q=Leaf("head", HIDDEN, 5),
)
def implicit_quantiles(p, s, a, r, s2, key, target):
    """IQN: cosines of a drawn quantile times features; Huber losses of all pairs."""

    def quantiles(p, s, tau):
        c = jnp.cos(np.pi * tau[..., None] * np.arange(16, dtype="f"))
        h = jax.nn.relu(s @ p["see"])[:, None] * jax.nn.relu(c @ p["waves"])
        return jax.nn.relu(h @ p["mix"]) @ p["q"]

    k1, k2 = jax.random.split(key)
    t1, t2 = jax.random.uniform(k1, (len(s), 7)), jax.random.uniform(k2, (len(s), 6))
    now = jnp.take_along_axis(quantiles(p, s, t1), a[:, None, None], -1)[..., 0]
    later = quantiles(target, s2, t2)
    best = later.mean(1).argmax(-1)
    later = jnp.take_along_axis(later, best[:, None, None], -1)[..., 0]
    d = lax.stop_gradient(r[:, None] + 0.9 * later)[:, None] - now[..., None]
    w = jnp.abs(t1[..., None] - (d < 0))
    return (w * optax.huber_loss(d)).sum(1).mean()
