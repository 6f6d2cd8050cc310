"""Language models: losses, heads, memories and streams beside attention."""

import jax
import jax.numpy as jnp
import optax
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
    UP_DOWN_EXPERTS,
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
    up_down,
)


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
    floats(BATCH, LENGTH, WIDTH),
    integers(BATCH),
    router=Leaf("router", WIDTH, EXPERTS),
    **UP_DOWN_EXPERTS,
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
