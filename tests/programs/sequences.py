"""Sequences: attention of other kinds, routing of tokens, recurrences."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EXPERTS,
    GAIN,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    PER_HEAD,
    SQUARE,
    TOKENS,
    UP_DOWN,
    VOCAB,
    WIDTH,
    Leaf,
    attend,
    between,
    cross_entropy,
    heads,
    integers,
    program,
    rms,
)

STACKS = {
    "up": Leaf("bio", EXPERTS, WIDTH, HIDDEN),
    "down": Leaf("bio", EXPERTS, HIDDEN, WIDTH),
}


def rope_complex(x):
    """Pairs of elements of (batch, time, heads, head), turned by their position."""
    angle = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(x.shape[-1] // 2)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    z = lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angle)[None, :, None]
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


@program(
    TOKENS,
    tok=Leaf("embedding", VOCAB, WIDTH),
    layers={
        "n1": Leaf("adamw", 3, WIDTH),
        "n2": Leaf("adamw", 3, WIDTH),
        "wq": Leaf("bio", 3, WIDTH, WIDTH),
        "wk": Leaf("bio", 3, WIDTH, 2 * HEAD),
        "wv": Leaf("bio", 3, WIDTH, 2 * HEAD),
        "wo": Leaf("bio", 3, WIDTH, WIDTH),
        "w1": Leaf("bio", 3, WIDTH, HIDDEN),
        "w3": Leaf("bio", 3, WIDTH, HIDDEN),
        "w2": Leaf("bio", 3, HIDDEN, WIDTH),
    },
    norm=GAIN,
)
def tied_rotary_by_complex_numbers(p, ids):
    """Llama in a scan of checkpoints: rotary positions, grouped keys, a tied head."""

    def layer(x, w):
        h = rms(x) * w["n1"]
        q, k, v = heads(h @ w["wq"]), heads(h @ w["wk"], 2), heads(h @ w["wv"], 2)
        q, k = rope_complex(q), rope_complex(k)
        k, v = (jnp.repeat(z, max(1, HEADS // 2), 2)[:, :, :HEADS] for z in (k, v))
        x = x + attend(q, k, v, True).reshape(x.shape) @ w["wo"]
        h = rms(x) * w["n2"]
        return x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"], None

    policy = jax.checkpoint_policies.nothing_saveable
    x, _ = lax.scan(
        jax.checkpoint(layer, policy=policy),
        p["tok"][ids] * math.sqrt(WIDTH),
        p["layers"],
    )
    return cross_entropy((rms(x) * p["norm"]) @ p["tok"].T, ids)


@between(score=Leaf("router", WIDTH, EXPERTS), **STACKS)
def expert_choice(x, p):
    """Each expert takes its best tokens; results are added where they came from."""
    flat = rms(x).reshape(-1, WIDTH)
    n = len(flat)
    probs = jax.nn.softmax(flat @ p["score"])
    gates, tokens = lax.top_k(probs.T, min(4, n))
    rows = flat[tokens]
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", rows, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, p["down"]) * gates[..., None]
    out = jnp.zeros_like(flat).at[tokens.reshape(-1)].add(y.reshape(-1, WIDTH))
    return x + out.reshape(x.shape)


@between(
    score=Leaf("router", WIDTH, EXPERTS),
    balance=Leaf("adamw", EXPERTS),
    **STACKS,
    shared={
        "up": Leaf("io", WIDTH, HIDDEN),
        "gate": Leaf("io", WIDTH, HIDDEN),
        "down": Leaf("io", HIDDEN, WIDTH),
    },
)
def capacity_by_sorted_tokens(x, p):
    """DeepSeek: a bias chooses as well; slots for tokens, and an expert for all."""
    flat = rms(x).reshape(-1, WIDTH)
    n, k = len(flat), min(2, EXPERTS)
    scores = jax.nn.sigmoid(flat @ p["score"])
    _, chosen = lax.top_k(scores + lax.stop_gradient(p["balance"]), k)
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    at = expert[order]
    first = jnp.searchsorted(at, jnp.arange(EXPERTS))
    slot = jnp.arange(n * k) - first[at]
    buffer = jnp.zeros((EXPERTS, n, WIDTH))
    buffer = buffer.at[at, slot].set(flat[order // k], mode="drop")
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, p["down"])[at, slot]
    y = jnp.zeros((n * k, WIDTH)).at[order].set(y).reshape(n, k, WIDTH)
    s = p["shared"]
    shared = (jax.nn.silu(flat @ s["gate"]) * (flat @ s["up"])) @ s["down"]
    return x + ((y * weights[..., None]).sum(1) + shared).reshape(x.shape)


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
    **dict.fromkeys("qkv", Leaf("ioo or ibo", WIDTH, HEADS, HEAD)), o=PER_HEAD["o"]
)
def linear_attention(x, p):
    """Positive features; sums of keys and values over the past are cumulative."""
    q, k, v = (jnp.einsum("btd,dhk->bhtk", rms(x), p[n]) for n in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    kv = jnp.cumsum(jnp.einsum("bhtk,bhtv->bhtkv", k, v), 2)
    total = jnp.einsum("bhtk,bhtk->bht", q, jnp.cumsum(k, 2)) + 1e-6
    y = jnp.einsum("bhtk,bhtkv->bhtv", q, kv) / total[..., None]
    return x + jnp.einsum("bhtv,hvd->btd", y, p["o"])


@between(
    mix={n: GAIN for n in "rkvab"},
    decay=GAIN,
    bonus=GAIN,
    r=SQUARE,
    k=SQUARE,
    v=SQUARE,
    o=SQUARE,
    ck=Leaf("io", WIDTH, HIDDEN),
    cv=Leaf("io", HIDDEN, WIDTH),
    cr=SQUARE,
)
def rwkv(x, p):
    """Token shift, a recurrence with decays and a bonus, and channel mixing."""

    def shift(z):
        return jnp.concatenate([jnp.zeros_like(z[:, :1]), z[:, :-1]], 1)

    def lerp(z, name):
        return z * p["mix"][name] + shift(z) * (1 - p["mix"][name])

    h = rms(x)
    r, k, v = (lerp(h, name) @ p[name] for name in "rkv")
    w = -jnp.exp(p["decay"])

    def step(carry, kv):
        a, b, m = carry
        k, v = kv
        n = jnp.maximum(m, p["bonus"] + k)
        e1, e2 = jnp.exp(m - n), jnp.exp(p["bonus"] + k - n)
        y = (e1 * a + e2 * v) / (e1 * b + e2)
        n = jnp.maximum(m + w, k)
        e1, e2 = jnp.exp(m + w - n), jnp.exp(k - n)
        return (e1 * a + e2 * v, e1 * b + e2, n), y

    zero = jnp.zeros_like(x[:, 0])
    rows = k.swapaxes(0, 1), v.swapaxes(0, 1)
    _, y = lax.scan(step, (zero, zero, zero - 1e9), rows)
    x = x + (jax.nn.sigmoid(r) * y.swapaxes(0, 1)) @ p["o"]
    h = rms(x)
    mixed = jnp.square(jax.nn.relu(lerp(h, "a") @ p["ck"])) @ p["cv"]
    return x + jax.nn.sigmoid(lerp(h, "b") @ p["cr"]) * mixed


@between(
    q=SQUARE,
    k=SQUARE,
    v=SQUARE,
    o=SQUARE,
    i=Leaf("io", WIDTH, HEADS),
    f=Leaf("io", WIDTH, HEADS),
    og=SQUARE,
    i_b=Leaf("adamw", HEADS),
    f_b=Leaf("adamw", HEADS),
)
def xlstm_matrix_memory(x, p):
    """mLSTM: a memory of outer products with exponential gates, one step at a time."""
    h = rms(x)
    q, k, v = (heads(h @ p[n]).swapaxes(0, 1) for n in "qkv")
    i = (h @ p["i"] + p["i_b"]).swapaxes(0, 1)
    f = jax.nn.log_sigmoid(h @ p["f"] + p["f_b"]).swapaxes(0, 1)

    def step(carry, now):
        c, n, m = carry
        q, k, v, i, f = now
        new = jnp.maximum(f + m, i)
        i, f = jnp.exp(i - new)[..., None], jnp.exp(f + m - new)[..., None]
        c = f[..., None] * c + i[..., None] * (v[..., :, None] * k[..., None, :])
        n = f * n + i * k
        y = jnp.einsum("bhvk,bhk->bhv", c, q)
        y = y / jnp.maximum(jnp.abs((n * q).sum(-1)), 1.0)[..., None]
        return (c, n, new), y

    b, d = x.shape[0], WIDTH // HEADS
    start = (
        jnp.zeros((b, HEADS, d, d)),
        jnp.zeros((b, HEADS, d)),
        jnp.full((b, HEADS), -1e9),
    )
    y = lax.scan(step, start, (q, k, v, i, f))[1].swapaxes(0, 1).reshape(x.shape)
    return x + (jax.nn.sigmoid(h @ p["og"]) * y) @ p["o"]


@between(
    inputs=Leaf("io", WIDTH, 3 * WIDTH),
    short=Leaf("adamw", 3, 1, 3 * WIDTH),
    filter={
        "w1": Leaf("io", 5, 9),
        "b1": Leaf("adamw", 9),
        "w2": Leaf("io", 9, 9),
        "w3": Leaf("io", 9, WIDTH),
    },
    rate=GAIN,
    skip=GAIN,
    outputs=SQUARE,
)
def hyena(x, p):
    """Long convolutions by FFT, whose filters are a network of the position."""
    n = x.shape[1]
    z = jnp.pad(rms(x) @ p["inputs"], ((0, 0), (2, 0), (0, 0)))
    z = lax.conv_general_dilated(
        z,
        p["short"],
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=3 * WIDTH,
    )
    a, b, v = jnp.split(z, 3, -1)
    t = jnp.linspace(0, 1, n)[:, None]
    features = jnp.concatenate(
        [t, jnp.sin(t * 3), jnp.cos(t * 3), jnp.sin(t * 7), jnp.cos(t * 7)], -1
    )
    f = p["filter"]
    h = jnp.sin(jnp.sin(features @ f["w1"] + f["b1"]) @ f["w2"]) @ f["w3"]
    h = h * jnp.exp(-t * jnp.abs(p["rate"]))
    u = a * v
    spectrum = jnp.fft.rfft(u, 2 * n, 1) * jnp.fft.rfft(h, 2 * n, 0)[None]
    y = jnp.fft.irfft(spectrum, 2 * n, 1)[:, :n]
    return x + (b * (y + u * p["skip"])) @ p["outputs"]


@between(weight=Leaf("adamw", WIDTH, 1), att=ATTENTION, **UP_DOWN)
def mixture_of_depths(x, p):
    """The best half of the tokens goes through a block, and back to its place."""
    score = (x @ p["weight"])[..., 0]
    k = max(1, x.shape[1] // 2)
    best, at = lax.top_k(score, k)
    rows = jnp.take_along_axis(x, at[..., None], 1)
    y = rows + jax.nn.gelu(rms(rows) @ p["up"]) @ p["down"]
    q, kk, v = (heads(rms(y) @ p["att"][n]) for n in "qkv")
    y = y + attend(q, kk, v).reshape(y.shape) @ p["att"]["o"]
    y = y * jax.nn.sigmoid(best)[..., None]
    return jax.vmap(lambda x, at, y: x.at[at].add(y))(x, at, y)


LSTM = {
    "x": Leaf("io", WIDTH, 4 * HIDDEN),
    "h": Leaf("io", HIDDEN, 4 * HIDDEN),
    "b": Leaf("adamw", 4 * HIDDEN),
    "peep": Leaf("adamw", 3, HIDDEN),
    "h0": Leaf("adamw", HIDDEN),
}


@program(
    integers(BATCH, LENGTH),
    integers(BATCH, LENGTH),
    emb=Leaf("embedding", VOCAB, WIDTH),
    forwards=LSTM,
    backwards=LSTM,
    emit=Leaf("head", 2 * HIDDEN, 6),
    emit_b=Leaf("adamw", 6),
    start=Leaf("adamw", 6),
    stop=Leaf("adamw", 6),
    move=Leaf("adamw", 6, 6),
)
def bilstm_crf(p, ids, tags):
    """Two LSTMs with peepholes and learned first states, and a conditional field."""
    x = p["emb"][ids].swapaxes(0, 1)

    def lstm(w, reverse):
        def step(carry, x):
            c, h = carry
            i, f, g, o = jnp.split(x @ w["x"] + h @ w["h"] + w["b"], 4, -1)
            f = jax.nn.sigmoid(f + w["peep"][0] * c)
            i = jax.nn.sigmoid(i + w["peep"][1] * c)
            c = f * c + i * jnp.tanh(g)
            h = jax.nn.sigmoid(o + w["peep"][2] * c) * jnp.tanh(c)
            return (c, h), h

        h0 = jnp.broadcast_to(jnp.tanh(w["h0"]), (ids.shape[0], HIDDEN))
        return lax.scan(step, (jnp.zeros_like(h0), h0), x, reverse=reverse)[1]

    h = jnp.concatenate([lstm(p["forwards"], False), lstm(p["backwards"], True)], -1)
    scores = h @ p["emit"] + p["emit_b"]

    def forward(alpha, s):
        return jax.nn.logsumexp(alpha[:, :, None] + p["move"], 1) + s, None

    alpha, _ = lax.scan(forward, p["start"] + scores[0], scores[1:])
    log_z = jax.nn.logsumexp(alpha + p["stop"], -1)
    tags = (tags % 6).T
    gold = p["start"][tags[0]] + p["stop"][tags[-1]]
    gold += p["move"][tags[:-1], tags[1:]].sum(0)
    gold += jnp.take_along_axis(scores, tags[..., None], -1)[..., 0].sum(0)
    return (log_z - gold).mean()
