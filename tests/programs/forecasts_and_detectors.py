"""Forecasts, detectors, tables and agents."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
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
    heads,
    integers,
    program,
    rms,
    squared_error,
    up_down,
)


class Cell(nn.Module):
    """A convolutional LSTM that sees an image and its state."""

    @nn.compact
    def __call__(self, carry, x):
        h, c = carry
        gates = nn.Conv(4 * WIDTH, (3, 3), name="x")(x)
        gates += nn.Conv(4 * WIDTH, (3, 3), use_bias=False, name="h")(h)
        peep = self.param("peep", nn.initializers.zeros, (2, WIDTH))
        i, f, g, o = jnp.split(gates, 4, -1)
        i, f = nn.sigmoid(i + peep[0] * c), nn.sigmoid(f + peep[1] * c)
        c = f * c + i * nn.tanh(g)
        h = nn.sigmoid(o) * nn.tanh(c)
        return (h, c), h


class Nowcast(nn.Module):
    """Two layers along the frames, and an image for the next frame."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            scan = nn.scan(
                Cell,
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            zero = jnp.zeros((x.shape[0], *x.shape[2:4], WIDTH))
            _, x = scan(name=f"cell_{i}")((zero, zero), x)
        return nn.Conv(3, (1, 1), name="out")(x)


def _cell(inputs, stem):
    return {
        "x": {
            "kernel": Leaf(stem, 3, 3, inputs, 4 * WIDTH),
            "bias": Leaf("adamw", 4 * WIDTH),
        },
        "h": {"kernel": Leaf("iiio", 3, 3, WIDTH, 4 * WIDTH)},
        "peep": Leaf("adamw", 2, WIDTH),
    }


@program(
    floats(BATCH, 7, 6, 6, 3),
    cell_0=_cell(3, "iiio or adamw"),
    cell_1=_cell(WIDTH, "iiio"),
    out={"kernel": Leaf("head", 1, 1, WIDTH, 3), "bias": Leaf("adamw", 3)},
)
def radar_nowcasts(p, frames):
    """ConvLSTM with peepholes in Flax, scanned along the frames."""
    y = Nowcast().apply({"params": p}, frames[:, :-1])
    return squared_error(y, frames[:, 1:])


@program(
    floats(BATCH, 9),
    floats(BATCH, 7),
    trunk=[Leaf("io or adamw", 9, HIDDEN), Leaf("io", HIDDEN, WIDTH)],
    other=[Leaf("io or adamw", 7, HIDDEN), Leaf("io", HIDDEN, WIDTH)],
    project=[Leaf("head", WIDTH, 20), Leaf("head", WIDTH, 20)],
    temperature=Leaf("adamw"),
)
def matryoshka_towers(p, x, y):
    """Prefixes of the projections are embeddings too, each with its own loss."""

    def tower(z, layers, last):
        for w in layers:
            z = jax.nn.relu(z @ w)
        return z @ last

    a = tower(x, p["trunk"], p["project"][0])
    b = tower(y, p["other"], p["project"][1])
    total = 0.0
    for size in (5, 11, 20):
        u, v = (z[:, :size] for z in (a, b))
        u, v = (z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6) for z in (u, v))
        logits = jnp.exp(p["temperature"]) * u @ v.T
        total += cross_entropy(logits, jnp.arange(len(x)))
        total += cross_entropy(logits.T, jnp.arange(len(x)))
    return total


@program(
    floats(BATCH, 44),
    floats(BATCH, 44),
    integers(BATCH),
    floats(BATCH),
    features=Leaf("io or adamw", 44, WIDTH),
    shift=GAIN,
    psqt=Leaf("io or adamw or head", 44, 8),
    w1=Leaf("bio", 8, 2 * WIDTH, 15),
    b1=Leaf("adamw", 8, 15),
    w2=Leaf("bio", 8, 15, 13),
    b2=Leaf("adamw", 8, 13),
    out=Leaf("adamw", 8, 13),
)
def efficient_updates(p, ours, theirs, count, result):
    """NNUE: the same features from both sides; layers picked by the pieces left."""
    a, b = (jnp.clip(x @ p["features"] + p["shift"], 0, 1) for x in (ours, theirs))
    x = jnp.concatenate([a, b], -1)

    def layers(x, w1, b1, w2, b2, out):
        h = jnp.clip(x @ w1 + b1, 0, 1)
        return jnp.clip(h @ w2 + b2, 0, 1) @ out

    own = [p[n][count] for n in ("w1", "b1", "w2", "b2", "out")]
    y = jax.vmap(layers)(x, *own)
    material = (ours - theirs) @ p["psqt"] / 2
    y += jnp.take_along_axis(material, count[:, None], -1)[:, 0]
    return squared_error(jax.nn.sigmoid(y), result)


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
    integers(BATCH, LENGTH),
    floats(BATCH, LENGTH),
    floats(5),
    emb=Leaf("embedding", 9, WIDTH),
    gates=Leaf("io", 2 * WIDTH, 7 * WIDTH),
    bias=Leaf("adamw", 7 * WIDTH),
    rates=Leaf("io", WIDTH, 9),
    scale=Leaf("adamw", 9),
)
def hawkes(p, kinds, gaps, fractions):
    """A neural Hawkes process: cells decay between events; rates of each kind."""

    def step(carry, now):
        c, end, decay, out = carry
        kind, gap = now
        inside = jnp.exp(-decay * gap[:, None] * fractions[:, None, None])
        between = end + (c - end) * inside  # (fractions, batch, width)
        rates = rate(out * jnp.tanh(between))
        c = end + (c - end) * jnp.exp(-decay * gap[:, None])
        h = out * jnp.tanh(c)
        here = jnp.take_along_axis(rate(h), kind[:, None], -1)[:, 0]
        total = rates.sum(-1).mean(0) * gap
        z = jnp.concatenate([p["emb"][kind], h], -1) @ p["gates"] + p["bias"]
        i, f, z, o, i2, f2, d = jnp.split(z, 7, -1)
        z = jnp.tanh(z)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * z
        end = jax.nn.sigmoid(f2) * end + jax.nn.sigmoid(i2) * z
        carry = c, end, jax.nn.softplus(d), jax.nn.sigmoid(o)
        return carry, total - jnp.log(here + 1e-6)

    def rate(h):
        s = jnp.exp(p["scale"])
        return s * jax.nn.softplus(h @ p["rates"] / s)

    zero = jnp.zeros((len(kinds), WIDTH))
    _, losses = lax.scan(step, (zero,) * 4, (kinds.T, gaps.T))
    return losses.mean()


@program(
    floats(BATCH, 24),
    floats(BATCH, 6, 9),
    stem=Leaf("io or adamw", 9, WIDTH),
    gru={"x": Leaf("io", WIDTH, 3 * WIDTH), "h": Leaf("io", WIDTH, 3 * WIDTH)},
    loud=Leaf("adamw", WIDTH, 1),
    waves=Leaf("io or head", WIDTH, 7),
    noise=Leaf("io or head", WIDTH, 5),
    room=Leaf("adamw", 24),
)
def oscillators(p, wave, controls):
    """DDSP: harmonics and filtered noise under a GRU's control, in a learned room."""

    def step(h, x):
        r, z, n = jnp.split(x @ p["gru"]["x"], 3, -1)
        hr, hz, hn = jnp.split(h @ p["gru"]["h"], 3, -1)
        z = jax.nn.sigmoid(z + hz)
        h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
        return h, h

    x = jax.nn.relu(controls @ p["stem"])
    _, h = lax.scan(step, jnp.zeros((len(x), WIDTH)), x.swapaxes(0, 1))
    h = h.swapaxes(0, 1)
    pitch = jnp.repeat(controls[..., :1], 4, 1)
    phase = jnp.cumsum(2 * np.pi * pitch, 1) * np.arange(1, 8)
    loud = jnp.repeat(jax.nn.softplus(h @ p["loud"]), 4, 1)
    mix = jnp.repeat(jax.nn.softmax(h @ p["waves"]), 4, 1)
    y = (loud * mix * jnp.sin(phase)).sum(-1)
    bands = jnp.fft.irfft(jax.nn.sigmoid(h @ p["noise"]), axis=-1)[..., :4]
    y = y + bands.reshape(y.shape)
    room = p["room"].at[0].set(1.0)
    y = jnp.fft.irfft(jnp.fft.rfft(y, 48) * jnp.fft.rfft(room, 48), 48)[:, :24]
    spectra = (jnp.abs(jnp.fft.rfft(z.reshape(len(z), 3, 8))) for z in (y, wave))
    return jnp.abs(jnp.subtract(*spectra)).mean()


@program(
    floats(BATCH, 8, 8, 3),
    integers(BATCH, 80),
    floats(BATCH, 80, 4),
    stem=Leaf("iiio or adamw", 3, 3, 3, 13),
    deeper=Leaf("iiio", 3, 3, 13, 17),
    lateral=[Leaf("io", 13, WIDTH), Leaf("io", 17, WIDTH)],
    smooth=[Leaf("iiio", 3, 3, WIDTH, WIDTH)] * 2,
    tower=Leaf("iiio", 3, 3, WIDTH, WIDTH),
    norms=Leaf("adamw", 2, WIDTH),
    classes=Leaf("head", 3, 3, WIDTH, 6),
    prior=Leaf("adamw", 6),
    boxes=Leaf("head", 3, 3, WIDTH, 4),
    scales=Leaf("adamw", 2),
)
def boxes_of_a_pyramid(p, images, labels, boxes):
    """FCOS: levels of a pyramid share a tower and two heads; focal losses."""
    x = jax.nn.relu(conv(images, p["stem"]))
    numbers = "NHWC", "HWIO", "NHWC"
    y = lax.conv_general_dilated(
        x, p["deeper"], (2, 2), "SAME", dimension_numbers=numbers
    )
    top = jax.nn.relu(y) @ p["lateral"][1]
    low = x @ p["lateral"][0] + top.repeat(2, 1).repeat(2, 2)
    logits, sides = [], []
    for i, level in enumerate((low, top)):
        z = conv(level, p["smooth"][i])
        z = jax.nn.relu(rms(conv(z, p["tower"])) * p["norms"][i])
        logits.append((conv(z, p["classes"]) + p["prior"]).reshape(len(x), -1, 6))
        side = jnp.exp(conv(z, p["boxes"]) * p["scales"][i])
        sides.append(side.reshape(len(x), -1, 4))
    logits, sides = jnp.concatenate(logits, 1), jnp.concatenate(sides, 1)
    goals = jax.nn.one_hot(labels, 6)
    focal = optax.sigmoid_focal_loss(logits, goals).sum(-1)
    left = jnp.minimum(sides[..., :2], boxes[..., :2]).sum(-1)
    right = jnp.minimum(sides[..., 2:], boxes[..., 2:]).sum(-1)
    union = sides.sum(-1) + boxes.sum(-1) - left - right
    ious = -jnp.log((left + right + 1) / (union + 1))
    return focal.mean() + (ious * (labels > 0)).mean()


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
    floats(BATCH, 7, 9),
    integers(BATCH, 6),
    floats(BATCH),
    stem=Leaf("io or adamw", 9, WIDTH),
    up=Leaf("io", WIDTH, HIDDEN),
    forward=Leaf("head", HIDDEN, 5),
    backward=Leaf("head", HIDDEN, 4),
    flow=Leaf("adamw", HIDDEN),
    total=Leaf("adamw"),
)
def flows_to_rewards(p, states, actions, reward):
    """GFlowNet: trajectory balance, and detailed balance by flows of states."""
    h = jax.nn.gelu(jax.nn.gelu(states @ p["stem"]) @ p["up"])
    ahead = jax.nn.log_softmax(h[:, :-1] @ p["forward"])
    behind = jax.nn.log_softmax(h[:, 1:] @ p["backward"])
    ahead = jnp.take_along_axis(ahead, actions[..., None], -1)[..., 0]
    behind = jnp.take_along_axis(behind, actions[..., None] % 4, -1)[..., 0]
    balance = p["total"] + ahead.sum(1) - behind.sum(1) - jnp.log(reward)
    flows = h @ p["flow"]
    steps = flows[:, :-1] + ahead - behind - flows[:, 1:]
    return (balance**2).mean() + (steps**2).mean()


@program(
    floats(BATCH, 11),
    integers(BATCH),
    norm=Leaf("adamw", 11),
    shared=Leaf("io or adamw", 11, 2 * 20),
    steps=[
        {
            "own": Leaf("io", 20, 2 * 20),
            "mask": Leaf("io", 8, 11),
            "norm": Leaf("adamw", 11),
        }
    ]
    * 2,
    head=Leaf("head", 12, 10),
)
def attentive_tables(p, x, labels):
    """TabNet: each step looks at a few columns, chosen by a sparsemax."""

    def glu(x, w):
        a, b = jnp.split(x @ w, 2, -1)
        return a * jax.nn.sigmoid(b)

    def sparsemax(z):
        ordered = -jnp.sort(-z, -1)
        counts = jnp.arange(1, z.shape[-1] + 1)
        sums = jnp.cumsum(ordered, -1)
        size = (1 + counts * ordered > sums).sum(-1, keepdims=True)
        threshold = (jnp.take_along_axis(sums, size - 1, -1) - 1) / size
        return jnp.maximum(z - threshold, 0)

    x = x * p["norm"]
    prior, total, out = jnp.ones_like(x), 0.0, 0.0
    about = glu(x, p["shared"])[:, :8]
    for w in p["steps"]:
        mask = sparsemax(prior * (about @ w["mask"]) * w["norm"])
        prior = prior * (1.3 - mask)
        total += -(mask * jnp.log(mask + 1e-5)).sum(-1).mean()
        h = glu(mask * x, p["shared"])
        h = (h + glu(h, w["own"])) * np.sqrt(0.5)
        about, z = h[:, :8], jax.nn.relu(h[:, 8:])
        out = out + z
    return cross_entropy(out @ p["head"], labels) + 1e-3 * total


@program(
    floats(BATCH, 25, 3),
    floats(BATCH, 25, 2),
    stem=Leaf("io or adamw", 3, WIDTH),
    inside=Leaf("io", WIDTH, WIDTH),
    slices=Leaf("io", HEAD, 7),
    warmth=Leaf("adamw", HEADS),
    q=Leaf("io", HEAD, HEAD),
    k=Leaf("io", HEAD, HEAD),
    v=Leaf("io", HEAD, HEAD),
    o=SQUARE,
    **UP_DOWN,
    out=Leaf("head", WIDTH, 2),
)
def physical_slices(p, x, y):
    """Transolver: points of a mesh join slices, which attend to each other."""
    x = x @ p["stem"]
    z = heads(rms(x) @ p["inside"])
    w = jax.nn.softmax(z @ p["slices"] / p["warmth"][:, None])
    tokens = jnp.einsum("bnhs,bnhd->bhsd", w, z)
    tokens /= w.sum(1)[..., None] + 1e-5
    q, k, v = (tokens @ p[n] for n in "qkv")
    a = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(HEAD))
    tokens = jnp.einsum("bhst,bhtd->bhsd", a, v)
    z = jnp.einsum("bhsd,bnhs->bnhd", tokens, w)
    x = x + z.reshape(x.shape) @ p["o"]
    x = x + up_down(rms(x), p)
    return squared_error(rms(x) @ p["out"], y)


@program(
    floats(BATCH, 19, 3),
    integers(BATCH, 19),
    edge1=Leaf("io or adamw", 6, WIDTH),
    edge2=Leaf("io", 2 * WIDTH, HIDDEN),
    whole=Leaf("io", WIDTH + HIDDEN, 30),
    after=Leaf("io", 30 + WIDTH, 13),
    norm=Leaf("adamw", 13),
    head=Leaf("head", 13, 8),
)
def edges_to_neighbors(p, points, parts):
    """DGCNN: each point looks at its nearest ones, in space and then in features."""

    def edges(x):
        far = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        _, near = lax.top_k(-far, 4)
        others = jax.vmap(lambda x, near: x[near])(x, near)
        own = jnp.broadcast_to(x[:, :, None], others.shape)
        return jnp.concatenate([own, others - own], -1)

    a = jax.nn.leaky_relu(edges(points) @ p["edge1"]).max(2)
    b = jax.nn.leaky_relu(edges(a) @ p["edge2"]).max(2)
    whole = jax.nn.leaky_relu(jnp.concatenate([a, b], -1) @ p["whole"]).max(1)
    whole = jnp.broadcast_to(whole[:, None], (*points.shape[:2], 30))
    h = jnp.concatenate([whole, a], -1) @ p["after"]
    return cross_entropy(jax.nn.relu(rms(h) * p["norm"]) @ p["head"], parts)


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
