"""Real models in small: streams and states beside attention, and no rule to write."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.programs.parts import (
    ATTENTION,
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
    attend,
    attention,
    between,
    cross_entropy,
    heads,
    program,
    rms,
    squared_error,
    up_down,
)

LOW = {"a": Leaf("io", WIDTH, 5), "b": Leaf("io", 5, WIDTH), "c": GAIN}


@program(
    TOKENS,
    **EMBED_AND_HEAD,
    each=Leaf("embedding", VOCAB, 2, 7),
    of_each=Leaf("io", WIDTH, 2 * 7),
    layers=[
        {
            "att": ATTENTION,
            **UP_DOWN,
            "left": Leaf("io", WIDTH, 6),
            "right": Leaf("io", 6, WIDTH),
            "gate": Leaf("io", WIDTH, 7),
            "back": Leaf("io", 7, WIDTH),
            "modes": Leaf("io", WIDTH, 3),
            "predict": Leaf("io", 3, 9),
            "correct": Leaf("io", 3, 3),
        }
    ]
    * 2,
    split=Leaf("bio or oio or ioo", 2, WIDTH, WIDTH),
)
def alternating_updates(p, ids):
    """Gemma 3n: three streams, of which one is computed; inputs of each layer."""
    x = p["emb"][ids]
    each = p["each"][ids] + (x @ p["of_each"]).reshape(*ids.shape, 2, 7)
    h = jnp.stack([x, *(x @ w for w in p["split"])])
    for i, w in enumerate(p["layers"]):
        modes = jnp.tanh(rms(h[0]) @ w["modes"])
        mix = (modes @ w["predict"]).reshape(*ids.shape, 3, 3)
        ahead = h + jnp.einsum("mbtd,btmn->nbtd", h, mix)
        z = rms(ahead[0])
        y = ahead[0] + attention(ahead[0], w["att"]) + z @ w["left"] @ w["right"]
        y = y + up_down(rms(y), w)
        error = y - ahead[0]
        scale = jnp.tanh(rms(y) @ w["modes"]) @ w["correct"] + 1
        h = ahead + jnp.moveaxis(scale, -1, 0)[..., None] * error
        gated = jax.nn.gelu(h[0] @ w["gate"]) * each[:, :, i]
        h = h.at[1:].add(rms(gated @ w["back"]))
    return cross_entropy(rms(h.mean(0)) @ p["head"], ids)


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


@program(
    TOKENS,
    **EMBED_AND_HEAD,
    grams=[Leaf("embedding", 31, WIDTH), Leaf("embedding", 37, WIDTH)],
    latent={**ATTENTION},
    cross=ATTENTION,
    **UP_DOWN,
)
def bytes_in_patches(p, ids):
    """Tables of hashed n-grams; means of patches of four bytes, and back to bytes."""
    x = p["emb"][ids]
    for n, table in enumerate(p["grams"], 2):
        code = sum(jnp.roll(ids, i, 1) * 7**i for i in range(n))
        x = x + table[code % len(table)]
    segments = np.arange(ids.shape[1]) // 4
    count = ids.shape[1] // 4
    sums = jax.vmap(lambda x: jax.ops.segment_sum(x, segments, count))(x)
    patches = sums / 4
    patches = patches + attention(patches, p["latent"])
    patches = patches + up_down(rms(patches), p)
    q = heads(rms(x) @ p["cross"]["q"])
    k, v = (heads(patches @ p["cross"][n]) for n in "kv")
    x = x + attend(q, k, v).reshape(x.shape) @ p["cross"]["o"]
    return cross_entropy(rms(x) @ p["head"], ids)


@between(
    layers=[
        {
            "mix": Leaf("io", WIDTH, 4),
            "mix_gain": Leaf("adamw"),
            "mix_bias": Leaf("adamw", 3, 4),
            "back": Leaf("adamw", WIDTH),
            "back_gain": Leaf("adamw"),
            "back_bias": Leaf("adamw", 3),
            **block,
        }
        for block in (ATTENTION, UP_DOWN)
    ],
    norm=GAIN,
)
def hyper_connections(x, p):
    """Three residual streams, mixed by each layer as the token asks."""
    h = jnp.stack([x] * 3, -2)
    for w, run in zip(p["layers"], (attention, up_down), strict=True):
        z = rms(h)
        mix = jnp.tanh(z @ w["mix"]) * w["mix_gain"] + w["mix_bias"]
        back = jnp.tanh(z @ w["back"]) * w["back_gain"] + w["back_bias"]
        mixed = jnp.einsum("btnm,btnd->btmd", mix, h)
        y = run(rms(mixed[..., 0, :]), w)
        h = mixed[..., 1:, :] + back[..., None] * y[..., None, :]
    return rms(h.sum(-2)) * p["norm"]


@between(
    rows={
        n: Leaf(f"io, {r}", WIDTH, WIDTH)
        for n, r in zip("qk", ("query", "key"), strict=True)
    }
    | {"v": Leaf("io, value", WIDTH, WIDTH), "o": SQUARE},
    position=Leaf("adamw", LENGTH // 4, WIDTH),
    columns=ATTENTION,
    **UP_DOWN,
)
def rows_of_an_alignment(x, p):
    """MSA transformer: all rows share one attention along columns; and columns' own."""
    b, n = x.shape[:2]
    x = x.reshape(b, 4, n // 4, WIDTH) + p["position"]
    z = rms(x)
    q, k, v = (heads(z @ p["rows"][name]) for name in "qkv")
    scores = jnp.einsum("brihd,brjhd->bhij", q, k) / np.sqrt(4 * HEAD)
    y = jnp.einsum("bhij,brjhd->brihd", jax.nn.softmax(scores), v)
    x = x + y.reshape(x.shape) @ p["rows"]["o"]
    by_column = x.swapaxes(1, 2).reshape(-1, 4, WIDTH)
    by_column = by_column + attention(by_column, p["columns"])
    x = by_column.reshape(b, n // 4, 4, WIDTH).swapaxes(1, 2).reshape(b, n, WIDTH)
    return rms(x + up_down(rms(x), p))


@between(
    q=Leaf("io", WIDTH, 2 * WIDTH),
    k=Leaf("io", WIDTH, 2 * WIDTH),
    v=SQUARE,
    o=SQUARE,
    **dict.fromkeys(("q1", "k1", "q2", "k2"), Leaf("adamw", HEAD)),
    gain=Leaf("adamw", HEAD),
)
def differential_attention(x, p):
    """The difference of two softmaxes, weighed by a scalar of four vectors."""
    h = rms(x)
    q, k = (heads(h @ p[name], 2 * HEADS) for name in "qk")
    a = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(HEAD))
    a = a.reshape(a.shape[0], HEADS, 2, *a.shape[2:])
    first, second = (jnp.exp(jnp.dot(p[f"q{i}"], p[f"k{i}"])) for i in (1, 2))
    weight = first - second + 0.8
    a = a[:, :, 0] - weight * a[:, :, 1]
    y = jnp.einsum("bhts,bshd->bthd", a, heads(h @ p["v"]))
    y = rms(y) * p["gain"] * 0.2
    return x + y.reshape(x.shape) @ p["o"]


@between(
    **{
        f"{n}_heads": Leaf("io", WIDTH, r * HEADS)
        for n, r in zip("qkv", (5, 2, 3), strict=True)
    },
    **{
        f"{n}_parts": Leaf("io", WIDTH, r * HEAD)
        for n, r in zip("qkv", (5, 2, 3), strict=True)
    },
    o=SQUARE,
    gate=Leaf("io", WIDTH, HIDDEN),
    up=Leaf("io", WIDTH, HIDDEN),
    down=Leaf("io", HIDDEN, WIDTH),
)
def tensor_product_attention(x, p):
    """Queries, keys and values are sums of outer products of heads and parts."""
    z = rms(x)

    def outer(name):
        a = (z @ p[f"{name}_heads"]).reshape(*x.shape[:2], -1, HEADS)
        b = (z @ p[f"{name}_parts"]).reshape(*x.shape[:2], -1, HEAD)
        return jnp.einsum("btrh,btrd->bthd", a, b) / a.shape[2]

    y = attend(outer("q"), outer("k"), outer("v"), causal=True)
    x = x + y.reshape(x.shape) @ p["o"]
    z = rms(x)
    return rms(x + (jax.nn.silu(z @ p["gate"]) * (z @ p["up"])) @ p["down"])


@between(
    shift=Leaf("adamw", 6, WIDTH),
    r=SQUARE,
    k=SQUARE,
    v=SQUARE,
    o=SQUARE,
    decay=LOW,
    rate=LOW,
    gate={n: LOW[n] for n in "ab"},
    erase=GAIN,
    scale=GAIN,
    bonus=Leaf("adamw", HEADS, HEAD),
    norm=GAIN,
    mix=GAIN,
    **UP_DOWN,
)
def rwkv7(x, p):
    """A state that is decayed, erased along a direction, and written to."""
    z = rms(x)
    before = jnp.pad(z, ((0, 0), (1, 0), (0, 0)))[:, :-1] - z
    zr, zw, zk, zv, za, zg = (z + before * mu for mu in p["shift"])
    r, k, v = zr @ p["r"], zk @ p["k"], zv @ p["v"]
    w = jnp.tanh(zw @ p["decay"]["a"]) @ p["decay"]["b"] + p["decay"]["c"]
    w = jnp.exp(-0.6 * jax.nn.sigmoid(w))
    a = jax.nn.sigmoid(za @ p["rate"]["a"] @ p["rate"]["b"] + p["rate"]["c"])
    g = jax.nn.sigmoid(zg @ p["gate"]["a"]) @ p["gate"]["b"]
    kk = heads(k * p["erase"])
    kk = kk / (jnp.linalg.norm(kk, axis=-1, keepdims=True) + 1e-6)
    k = k * (1 + (a - 1) * p["scale"])
    r, k, v, w, a = map(heads, (r, k, v, w, a))

    def step(s, at):
        r, k, v, w, kk, a = at
        old = jnp.einsum("bhij,bhj->bhi", s, kk)
        s = s * w[..., None, :] - old[..., None] * (kk * a)[..., None, :]
        s = s + v[..., None] * k[..., None, :]
        return s, jnp.einsum("bhij,bhj->bhi", s, r)

    start = jnp.zeros((len(x), HEADS, HEAD, HEAD))
    along = [c.swapaxes(0, 1) for c in (r, k, v, w, kk, a)]
    y = lax.scan(step, start, along)[1].swapaxes(0, 1)
    y = rms(y).reshape(x.shape) * p["norm"]
    y = y + ((r * k * p["bonus"]).sum(-1, keepdims=True) * v).reshape(x.shape)
    x = x + (y * g) @ p["o"]
    z = rms(x)
    z = z + (jnp.pad(z, ((0, 0), (1, 0), (0, 0)))[:, :-1] - z) * p["mix"]
    return rms(x + jax.nn.relu(z @ p["up"]) ** 2 @ p["down"])
