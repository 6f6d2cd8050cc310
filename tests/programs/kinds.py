"""Models of further kinds: splines, memories, structures, forecasts, speech."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
    EMBED_AND_HEAD,
    EXPERTS,
    GAIN,
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
    conv,
    cross_entropy,
    floats,
    heads,
    integers,
    mlp,
    program,
    rms,
    squared_error,
    up_down,
    widths,
)

# --- predictors -----------------------------------------------------------------------


@program(
    floats(BATCH, 7),
    floats(BATCH),
    base1=Leaf("io or adamw", 7, WIDTH),
    spline1=Leaf("ioi", 7, WIDTH, 5),
    base2=Leaf("io", WIDTH, 3),
    spline2=Leaf("ioi", WIDTH, 3, 5),
    out=Leaf("adamw", 3),
)
def kan(p, x, y):
    """Kolmogorov-Arnold layers: a spline for each pair of an input and an output."""
    knots = np.linspace(-1, 1, 5, dtype=np.float32)

    def layer(x, base, spline):
        basis = jnp.exp(-((x[..., None] - knots) ** 2) * 8)
        return jax.nn.silu(x) @ base + jnp.einsum("bik,iok->bo", basis, spline)

    x = jnp.tanh(layer(x, p["base1"], p["spline1"]))
    return squared_error(layer(x, p["base2"], p["spline2"]) @ p["out"], y)


@program(
    floats(BATCH, 20, 3),
    floats(BATCH, 8, 3),
    trend=Leaf("head", 20, 8),
    season=Leaf("head", 20, 8),
    up=Leaf("io or adamw", 20, HIDDEN),
    theta=Leaf("io", HIDDEN, 6),
    norm=Leaf("adamw", 3),
)
def forecast_by_trends_and_waves(p, x, y):
    """DLinear along the time, and a block of N-BEATS with a basis of constants."""
    x = x * p["norm"]
    padded = jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="edge")
    slow = lax.reduce_window(padded, 0.0, lax.add, (1, 5, 1), (1, 1, 1), "VALID") / 5
    ahead = jnp.einsum("btc,th->bhc", slow, p["trend"])
    ahead += jnp.einsum("btc,th->bhc", x - slow, p["season"])
    time = np.arange(8, dtype=np.float32) / 8
    waves = [f(2 * np.pi * k * time) for k in (1, 2, 3) for f in (np.sin, np.cos)]
    h = jax.nn.relu(x.swapaxes(1, 2) @ p["up"])
    return squared_error(ahead + (h @ p["theta"] @ np.stack(waves)).swapaxes(1, 2), y)


@program(
    floats(BATCH, LENGTH, 2),
    force=Leaf("unused", 3, 4),
    **widths(2, WIDTH, HIDDEN, 1, last="adamw"),
)
def poisson_by_hessians(p, x):
    """Only the equation is the loss: no value of the network itself."""

    def u(z):
        return mlp({n: p[n] for n in ("w1", "w2", "w3")}, z, jnp.tanh)[0]

    def residual(z):
        return jnp.trace(jax.hessian(u)(z)) + jnp.sin(z).sum()

    return jnp.mean(jax.vmap(jax.vmap(residual))(x) ** 2)


@program(
    floats(BATCH, LENGTH, 4),
    integers(BATCH),
    local=widths(4, WIDTH, HIDDEN, last="io"),
    turn=widths(4, WIDTH, 16, last="io"),
    after=widths(HIDDEN, WIDTH, 10, first="io"),
)
def point_clouds(p, points, labels):
    """PointNet: a matrix for each cloud turns its points; a maximum over them."""
    b = points.shape[0]
    turn = mlp(p["turn"], points, jax.nn.relu).max(1).reshape(b, 4, 4) + jnp.eye(4)
    x = jnp.einsum("bnc,bcd->bnd", points, turn)
    x = jax.nn.relu(mlp(p["local"], x, jax.nn.relu)).max(1)
    return cross_entropy(mlp(p["after"], x, jax.nn.relu), labels)


@program(
    floats(BATCH, 6, 3),
    floats(BATCH, 9, 2),
    floats(BATCH, 9),
    pairs=widths(3, WIDTH, WIDTH, last="io"),
    q=Leaf("io, query", 2, WIDTH),
    k=Leaf("io, key", 2, WIDTH),
    decoder=widths(WIDTH + 2, HIDDEN, 2, first="io"),
)
def attentive_neural_process(p, context, x, y):
    """Pairs (x, y) of a context, attended to by the places that are asked for."""
    r = jax.nn.relu(mlp(p["pairs"], context, jax.nn.relu))
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["q"], context[..., :2] @ p["k"])
    r = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), r)
    out = mlp(p["decoder"], jnp.concatenate([r, x], -1), jax.nn.relu)
    mean, width = out[..., 0], 0.1 + jax.nn.softplus(out[..., 1])
    return jnp.mean(jnp.log(width) + ((y - mean) / width) ** 2)


# --- structures and graphs ------------------------------------------------------------


@program(
    floats(BATCH, 5, LENGTH, WIDTH),
    floats(BATCH, LENGTH, LENGTH),
    outer=[Leaf("io", WIDTH, 6), Leaf("io", WIDTH, 7)],
    pair=Leaf("io", 42, WIDTH),
    gate=[SQUARE] * 2,
    edge=[SQUARE] * 2,
    norm=GAIN,
    out=SQUARE,
    distance=Leaf("adamw", WIDTH, 1),
)
def triangles_of_pairs(p, sequences, distances):
    """AlphaFold: a mean of outer products, and products along triangles of pairs."""
    a, b = (sequences @ w for w in p["outer"])
    outer = jnp.einsum("bsic,bsjd->bijcd", a, b) / sequences.shape[1]
    z = outer.reshape(*outer.shape[:3], -1) @ p["pair"]
    x = rms(z) * p["norm"]
    left, right = (
        jax.nn.sigmoid(x @ g) * (x @ e)
        for g, e in zip(p["gate"], p["edge"], strict=True)
    )
    z = z + rms(jnp.einsum("bikc,bjkc->bijc", left, right)) @ p["out"]
    return squared_error((z @ p["distance"])[..., 0], distances)


@program(
    floats(BATCH, LENGTH, 9),
    integers(BATCH, LENGTH, LENGTH),
    integers(BATCH, LENGTH),
    floats(BATCH),
    atoms=Leaf("io or adamw", 9, WIDTH),
    degree=Leaf("embedding", 7, WIDTH),
    spatial=Leaf("embedding", 11, HEADS),
    att=ATTENTION,
    **UP_DOWN,
    out=Leaf("adamw", WIDTH),
)
def graphormer(p, atoms, distance, degree, y):
    """Attention with a bias for each distance in the graph, from a table."""
    x = atoms @ p["atoms"] + p["degree"][degree]
    q, k, v = (heads(rms(x) @ p["att"][n]) for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.moveaxis(
        p["spatial"][distance], -1, 1
    )
    y_ = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + y_.reshape(x.shape) @ p["att"]["o"]
    x = x + up_down(rms(x), p)
    return squared_error(x.mean(1) @ p["out"], y)


@program(
    floats(BATCH, 8, 8, 3),
    integers(BATCH),
    stem=Leaf("iiio or adamw", 3, 3, 3, WIDTH),
    offset=Leaf("iiio", 3, 3, WIDTH, 2),
    value=SQUARE,
    squeeze=Leaf("io", WIDTH, 6),
    excite=Leaf("io", 6, WIDTH),
    head=Leaf("head", WIDTH, 10),
)
def deformed_and_squeezed(p, images, labels):
    """Values taken at places that the features choose, weighed by channel."""
    x = jax.nn.relu(conv(images, p["stem"]))
    move = jnp.tanh(conv(x, p["offset"]))
    v = x @ p["value"]

    def sample(v, move):
        rows, columns = jnp.mgrid[:8, :8]
        return sum(
            jax.scipy.ndimage.map_coordinates(
                v[..., c], [rows + move[..., 0], columns + move[..., 1]], order=1
            )[..., None]
            * np.eye(WIDTH, dtype=np.float32)[c]
            for c in range(v.shape[-1])
        )

    x = x + jax.vmap(sample)(v, move)
    gate = jax.nn.sigmoid(jax.nn.relu(x.mean((1, 2)) @ p["squeeze"]) @ p["excite"])
    return cross_entropy((x * gate[:, None, None]).mean((1, 2)) @ p["head"], labels)


# --- language -------------------------------------------------------------------------


@between(
    w=Leaf("adamw", HEADS, 6, 6),
    q=SQUARE,
    k=SQUARE,
    v=SQUARE,
    rate=Leaf("io", WIDTH, HEADS),
    o=SQUARE,
)
def test_time_training(x, p):
    """A fast matrix for each head takes a step of its own loss at every position."""
    q, k, v = (heads(rms(x) @ p[n]) for n in "qkv")
    rate = jax.nn.sigmoid(x @ p["rate"])

    def inner(w, k, v):
        return jnp.sum((k @ w - v) ** 2)

    def step(w, at):
        q, k, v, rate = at
        slope = jax.vmap(jax.vmap(jax.grad(inner)))(w, k, v)
        w = w - 0.1 * rate[..., None, None] * slope
        return w, jnp.einsum("bhi,bhio->bho", q, w)

    start = jnp.broadcast_to(p["w"], (x.shape[0], *p["w"].shape))
    _, y = lax.scan(step, start, [a.swapaxes(0, 1) for a in (q, k, v, rate)])
    return x + y.swapaxes(0, 1).reshape(x.shape) @ p["o"]


@between(
    x=Leaf("io", WIDTH, 2 * HIDDEN),
    conv=Leaf("adamw", 4, HIDDEN),
    gates=[Leaf("bio", 4, 10, 10)] * 2,
    decay=Leaf("adamw", HIDDEN),
    out=Leaf("io", HIDDEN, WIDTH),
)
def griffin(x, p):
    """A gated linear recurrence, whose gates have blocks; an associative scan."""
    gate, y = jnp.split(rms(x) @ p["x"], 2, -1)
    padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
    y = sum(padded[:, i : i + x.shape[1]] * p["conv"][i] for i in range(4))

    def blocks(w):
        return jnp.einsum("btgi,gio->btgo", heads(y), w).reshape(y.shape)

    r, i = (jax.nn.sigmoid(blocks(w)) for w in p["gates"])
    log_a = -8 * jax.nn.softplus(p["decay"]) * r
    a, b = jnp.exp(log_a), jnp.sqrt(1 - jnp.exp(2 * log_a) + 1e-6) * i * y

    def join(one, two):
        return one[0] * two[0], one[1] * two[0] + two[1]

    h = lax.associative_scan(join, (a, b), axis=1)[1]
    return x + (jax.nn.gelu(gate) * h) @ p["out"]


@between(
    inside=Leaf("io, fused or io", WIDTH, 2 * HIDDEN + 2 * 7 + HEADS),
    conv=Leaf("adamw", 4, HIDDEN + 14),
    a=Leaf("adamw", HEADS),
    d=Leaf("adamw", HEADS),
    bias=Leaf("adamw", HEADS),
    norm=Leaf("adamw", HIDDEN),
    out=Leaf("io", HIDDEN, WIDTH),
)
def mamba_of_heads(x, p):
    """Mamba 2: one projection for everything, a decay for each head, a scan."""
    z, xbc, dt = jnp.split(rms(x) @ p["inside"], [HIDDEN, 2 * HIDDEN + 14], -1)
    kernel = p["conv"][:, None]
    xbc = jnp.pad(xbc, ((0, 0), (3, 0), (0, 0)))
    numbers = ("NWC", "WIO", "NWC")
    xbc = jax.nn.silu(
        lax.conv_general_dilated(
            xbc,
            kernel,
            (1,),
            "VALID",
            dimension_numbers=numbers,
            feature_group_count=HIDDEN + 14,
        )
    )
    u, b, c = jnp.split(xbc, [HIDDEN, HIDDEN + 7], -1)
    u, dt = heads(u), jax.nn.softplus(dt + p["bias"])
    decay = jnp.exp(-jnp.exp(p["a"]) * dt)

    def step(h, at):
        u, b, c, decay, dt = at
        h = h * decay[..., None, None] + jnp.einsum("bhd,bn,bh->bhdn", u, b, dt)
        return h, jnp.einsum("bhdn,bn->bhd", h, c)

    start = jnp.zeros((x.shape[0], HEADS, HIDDEN // HEADS, 7))
    along = [a.swapaxes(0, 1) for a in (u, b, c, decay, dt)]
    y = lax.scan(step, start, along)[1].swapaxes(0, 1) + p["d"][:, None] * u
    y = rms(y.reshape(*x.shape[:2], HIDDEN) * jax.nn.silu(z)) * p["norm"]
    return x + y @ p["out"]


@between(up=Leaf("io", WIDTH, HIDDEN), down=Leaf("io", HIDDEN, WIDTH), gain=GAIN)
def ternary_weights(x, p):
    """BitNet: weights of three values and activations of 8 bits, straight through."""

    def ternary(w):
        scale = jnp.mean(jnp.abs(w)) + 1e-5
        return w + lax.stop_gradient(jnp.round(jnp.clip(w / scale, -1, 1)) * scale - w)

    def eight_bits(x):
        scale = 127 / (jnp.abs(x).max(-1, keepdims=True) + 1e-5)
        return x + lax.stop_gradient(jnp.round(x * scale) / scale - x)

    h = jax.nn.relu(eight_bits(rms(x) * p["gain"]) @ ternary(p["up"])) ** 2
    return x + eight_bits(rms(h)) @ ternary(p["down"])


@program(
    TOKENS,
    **EMBED_AND_HEAD,
    att=ATTENTION,
    ahead=[{"join": Leaf("io", 2 * WIDTH, WIDTH), **UP_DOWN}] * 2,
    medusa=Leaf("oio", 3, WIDTH, WIDTH),
)
def several_tokens_ahead(p, ids):
    """DeepSeek's chain of modules, and Medusa's blocks side by side, share a head."""
    x = p["emb"][ids]
    x = x + attention(x, p["att"])
    wide = x[:, :, None] + jax.nn.silu(jnp.einsum("btd,kde->btke", x, p["medusa"]))
    loss = cross_entropy(
        wide[:, :-3] @ p["head"],
        jnp.stack([ids[:, k : k + ids.shape[1] - 3] for k in (1, 2, 3)], -1),
    )
    for step, w in enumerate(p["ahead"], 1):
        later = p["emb"][jnp.roll(ids, -step, 1)]
        x = jnp.concatenate([rms(x), rms(later)], -1) @ w["join"]
        x = x + up_down(rms(x), w)
        loss += cross_entropy(rms(x) @ p["head"], jnp.roll(ids, -1 - step, 1))
    return loss


@program(
    TOKENS,
    integers(BATCH, 6),
    emb=Leaf("embedding", VOCAB, WIDTH),
    q=Leaf("io, query", WIDTH, WIDTH),
    k=Leaf("io, key", WIDTH, WIDTH),
    prior=Leaf("adamw", WIDTH, 3),
    latent=Leaf("io", WIDTH, 3 * WIDTH),
    copy=Leaf("adamw", WIDTH, 1),
)
def mixture_of_softmaxes_and_copies(p, ids, source):
    """Three softmaxes over a tied table, and a pointer to the source."""
    x, keys = p["emb"][ids], p["emb"][source]
    weights = jnp.einsum("btd,bsd->bts", x @ p["q"], keys @ p["k"])
    weights = jax.nn.softmax(weights)
    x = rms(x + weights @ keys)
    latent = jnp.tanh(x @ p["latent"]).reshape(*x.shape[:2], 3, WIDTH)
    words = jax.nn.softmax(latent @ p["emb"].T)
    words = jnp.einsum("btk,btkv->btv", jax.nn.softmax(x @ p["prior"]), words)
    copied = jax.vmap(lambda w, s: jnp.zeros((len(w), VOCAB)).at[:, s].add(w))
    gate = jax.nn.sigmoid(x @ p["copy"])
    chance = gate * words + (1 - gate) * copied(weights, source)
    return -jnp.log(jnp.take_along_axis(chance, ids[..., None], -1) + 1e-6).mean()


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
    att=ATTENTION, **UP_DOWN, halt=Leaf("adamw", WIDTH), time=Leaf("adamw", 4, WIDTH)
)
def halting_in_depth(x, p):
    """One layer again and again; each position says when it is done."""

    def turn(carry, time):
        x, left, total = carry
        h = x + time
        h = h + attention(h, p["att"])
        h = h + up_down(rms(h), p)
        stop = jax.nn.sigmoid(h @ p["halt"])
        return (h, left * (1 - stop), total + (left * stop)[..., None] * h), None

    start = x, jnp.ones(x.shape[:2]), jnp.zeros_like(x)
    (x, left, total), _ = lax.scan(turn, start, p["time"])
    return total + left[..., None] * x


@program(
    integers(BATCH, 2, LENGTH),
    {"emb": floats(VOCAB, WIDTH), "head": floats(WIDTH, VOCAB)},
    **EMBED_AND_HEAD,
    att=ATTENTION,
    **UP_DOWN,
)
def preferences(p, pairs, frozen):
    """DPO: two answers under the model, and under a frozen one, without a label."""

    def chance(p, ids):
        x = p["emb"][ids]
        if "att" in p:
            x = x + attention(x, p["att"])
            x = x + up_down(rms(x), p)
        logs = jax.nn.log_softmax(rms(x) @ p["head"])[..., :-1, :]
        return jnp.take_along_axis(logs, ids[..., 1:, None], -1).sum((-1, -2))

    def margin(p):
        good, bad = (chance(p, pairs[:, i]) for i in (0, 1))
        return good - bad

    return -jax.nn.log_sigmoid(0.1 * (margin(p) - margin(frozen))).mean()


@program(
    integers(BATCH, LENGTH),
    integers(BATCH, 9),
    emb=Leaf("embedding", VOCAB, WIDTH),
    att=ATTENTION,
    project=Leaf("head", WIDTH, 8),
)
def late_interaction(p, queries, documents):
    """ColBERT: the best token of a document for each token of a query."""

    def encode(ids):
        x = p["emb"][ids]
        x = x + attention(x, p["att"])
        z = rms(x) @ p["project"]
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    q, d = encode(queries), encode(documents)
    scores = jnp.einsum("qtc,dsc->qdts", q, d).max(-1).sum(-1)
    return cross_entropy(scores, jnp.arange(len(scores)))


# --- speech, images, plans ------------------------------------------------------------


@program(
    floats(BATCH, LENGTH, 9),
    integers(BATCH, 6),
    encoder={"x": Leaf("io or adamw", 9, WIDTH), **UP_DOWN},
    emb=Leaf("embedding", VOCAB, WIDTH),
    cell={"x": Leaf("io", WIDTH, 3 * WIDTH), "h": Leaf("io", WIDTH, 3 * WIDTH)},
    join=[Leaf("io", WIDTH, HIDDEN)] * 2,
    bias=Leaf("adamw", HIDDEN),
    head=Leaf("head", HIDDEN, VOCAB),
)
def transducer(p, sound, ids):
    """RNN-T: all pairs of a frame and a prefix, and the sum over all paths."""
    x = sound @ p["encoder"]["x"]
    x = x + up_down(rms(x), p["encoder"])

    def cell(h, x):
        r, u, n = jnp.split(x @ p["cell"]["x"], 3, -1)
        hr, hu, hn = jnp.split(h @ p["cell"]["h"], 3, -1)
        u = jax.nn.sigmoid(u + hu)
        h = (1 - u) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + u * h
        return h, h

    start = jnp.zeros((len(ids), WIDTH))
    _, words = lax.scan(cell, start, p["emb"][ids].swapaxes(0, 1))
    both = x @ p["join"][0], words.swapaxes(0, 1) @ p["join"][1]
    z = jnp.tanh(both[0][:, :, None] + both[1][:, None] + p["bias"])
    logs = jax.nn.log_softmax(z @ p["head"])
    blank = logs[..., 0]
    label = jnp.take_along_axis(logs, ids[:, None, :, None], -1)[..., 0]

    def frame(alpha, at):
        blank, label = at

        def word(before, at):
            stay, move = at
            now = jnp.logaddexp(stay, before + move)
            return now, now

        stay = alpha + blank
        rest = (stay[:, 1:].T, label[:, :-1].T)
        _, now = lax.scan(word, stay[:, 0], rest)
        return jnp.concatenate([stay[:, :1], now.T], 1), None

    alpha = jnp.zeros(ids.shape)
    alpha, _ = lax.scan(frame, alpha, (blank.swapaxes(0, 1), label.swapaxes(0, 1)))
    return -alpha[:, -1].mean()


@program(
    floats(BATCH, LENGTH, 7),
    integers(BATCH, LENGTH),
    floats(BATCH, LENGTH),
    see=widths(7, HIDDEN, WIDTH, last="io"),
    move=widths(WIDTH + 5, HIDDEN, WIDTH, first="io", last="io"),
    reward=widths(WIDTH, HIDDEN, 1, first="io", last="adamw"),
    policy=Leaf("head", WIDTH, 5),
    value=Leaf("adamw", WIDTH, 1),
)
def muzero(p, seen, actions, rewards):
    """A model of the world, unrolled from its first state along the actions."""

    def normal(s):
        low, high = s.min(-1, keepdims=True), s.max(-1, keepdims=True)
        return (s - low) / (high - low + 1e-5)

    s, loss = normal(mlp(p["see"], seen[:, 0], jax.nn.relu)), 0.0
    for t in range(3):
        loss += cross_entropy(s @ p["policy"], actions[:, t])
        loss += squared_error((s @ p["value"])[:, 0], rewards[:, t])
        act = jax.nn.one_hot(actions[:, t], 5)
        s = normal(s + mlp(p["move"], jnp.concatenate([s, act], -1), jax.nn.relu))
        loss += squared_error(mlp(p["reward"], s, jax.nn.relu)[:, 0], rewards[:, t])
    return loss


@program(
    floats(BATCH, LENGTH),
    floats(BATCH, LENGTH, 6),
    integers(BATCH, LENGTH),
    rewards=Leaf("adamw", 1, WIDTH),
    states=Leaf("io or adamw", 6, WIDTH),
    actions=Leaf("embedding", 5, WIDTH),
    time=Leaf("adamw", LENGTH, WIDTH),
    att=ATTENTION,
    **UP_DOWN,
    head=Leaf("head", WIDTH, 5),
)
def decision_transformer(p, rewards, states, actions):
    """Rewards, states and actions in turns, as one sequence."""
    parts = rewards[..., None] @ p["rewards"], states @ p["states"]
    x = jnp.stack([*parts, p["actions"][actions]], 2) + p["time"][:, None]
    x = x.reshape(x.shape[0], -1, WIDTH)
    x = x + attention(x, p["att"])
    x = x + up_down(rms(x), p)
    return cross_entropy(rms(x)[:, 1::3] @ p["head"], actions)


@program(
    floats(BATCH, 8, 8, 3),
    floats(BATCH),
    first=Leaf("iiio or adamw", 3, 3, 3, WIDTH),
    noise=Leaf("io", 10, WIDTH),
    convs=[Leaf("iiio", 3, 3, WIDTH, WIDTH)] * 2,
    gain=Leaf("adamw"),
    out=Leaf("head", 3, 3, WIDTH, 3),
)
def kernels_of_unit_norm(p, images, sigma):
    """EDM 2: every kernel is divided by the norm of each output."""

    def unit(w):
        axes = tuple(range(w.ndim - 1))
        scale = jnp.sqrt(w.size / w.shape[-1])
        return w / (1e-4 + jnp.sqrt((w * w).sum(axes, keepdims=True))) / scale

    steps = 2.0 ** np.arange(5, dtype=np.float32)
    waves = jnp.log(sigma)[:, None] * steps
    c = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1) @ unit(p["noise"])
    x = conv(images + sigma[:, None, None, None] * 0.1, unit(p["first"]))
    for w in p["convs"]:
        y = conv(jax.nn.silu(x), unit(w)) * (1 + c[:, None, None] * p["gain"])
        x = (x + conv(jax.nn.silu(y), unit(w))) / np.float32(np.sqrt(2))
    return squared_error(conv(x, unit(p["out"])), images)


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


@program(
    floats(BATCH, LENGTH, WIDTH),
    integers(BATCH),
    router=Leaf("router", WIDTH, EXPERTS),
    up=Leaf("bio", EXPERTS, WIDTH, HIDDEN),
    down=Leaf("bio", EXPERTS, HIDDEN, WIDTH),
    classes=Leaf("head", WIDTH, 10),
)
def balanced_by_sinkhorn(p, x, labels):
    """Experts after rounds of normalization; classes of unit length with a margin."""
    flat = x.reshape(-1, WIDTH)
    scores = flat @ p["router"]
    chance = jnp.exp(scores)
    for _ in range(3):
        chance = chance / chance.sum(0, keepdims=True)
        chance = chance / chance.sum(1, keepdims=True)
    _, expert = lax.top_k(lax.stop_gradient(chance), 2)
    gates = jnp.take_along_axis(jax.nn.sigmoid(scores), expert, -1)
    up, down = p["up"][expert], p["down"][expert]
    h = jax.nn.gelu(jnp.einsum("ti,tkio->tko", flat, up))
    y = jnp.einsum("tko,tkod,tk->td", h, down, gates).reshape(x.shape)
    z = (x + y).mean(1)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    cosine = z @ (p["classes"] / jnp.linalg.norm(p["classes"], axis=0))
    return cross_entropy(10 * (cosine - 0.3 * jax.nn.one_hot(labels, 10)), labels)
