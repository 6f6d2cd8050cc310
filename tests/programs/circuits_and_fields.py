"""Models of circuits, hyperbolic balls, points, streams and maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

from tests.programs.parts import (
    ATTENTION,
    BATCH,
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
    conv,
    cross_entropy,
    floats,
    heads,
    integers,
    key,
    program,
    rms,
    squared_error,
    up_down,
)

# --- physics and geometry -------------------------------------------------------------


@program(
    floats(BATCH, 9),
    integers(BATCH),
    encode=Leaf("io or adamw", 9, 4),
    shift=Leaf("adamw", 4),
    angles=Leaf("adamw", 3, 4, 2),
    out=Leaf("head", 4, 10),
    bias=Leaf("adamw", 10),
)
def quantum_circuit(p, x, labels):
    """A variational circuit of four qubits: rotations, entangling gates, a readout."""

    def turn(state, a, b, qubit):
        c, s = jnp.cos(a / 2), jnp.sin(a / 2)
        phase = jnp.exp(0.5j * b)
        gate = jnp.array([[c / phase, -s * phase], [s / phase, c * phase]])
        return jnp.moveaxis(jnp.tensordot(gate, state, ((1,), (qubit,))), 0, qubit)

    def flip(state, control, target):
        """The target is flipped where the control is one."""
        state = jnp.moveaxis(state, (control, target), (0, 1))
        state = jnp.stack([state[0], state[1, ::-1]])
        return jnp.moveaxis(state, (0, 1), (control, target))

    def run(x):
        state = jnp.zeros((2,) * 4, jnp.complex64).at[0, 0, 0, 0].set(1)
        for qubit in range(4):
            state = turn(state, x[qubit], 0.0, qubit)
        for layer in p["angles"]:
            for qubit in range(4):
                state = turn(state, layer[qubit, 0], layer[qubit, 1], qubit)
            for qubit in range(4):
                state = flip(state, qubit, (qubit + 1) % 4)
        chance = jnp.abs(state) ** 2
        sums = [chance.sum([q for q in range(4) if q != i]) for i in range(4)]
        return jnp.stack([s[0] - s[1] for s in sums])

    z = jax.vmap(run)(np.pi * jnp.tanh(x @ p["encode"] + p["shift"]))
    return cross_entropy(z @ p["out"] + p["bias"], labels)


@program(
    TOKENS,
    integers(BATCH),
    emb=Leaf("embedding", VOCAB, WIDTH),
    w1=Leaf("io", WIDTH, HIDDEN),
    b1=Leaf("adamw", HIDDEN),
    w2=Leaf("io", HIDDEN, 7),
    b2=Leaf("adamw", 7),
    points=Leaf("adamw", 10, 7),
    normals=Leaf("adamw", 10, 7),
)
def hyperbolic_classes(p, ids, labels):
    """Layers of the Poincare ball, and distances to a hyperplane of each class."""

    def norm(x):
        return jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-9)

    def to_ball(x):
        return jnp.tanh(norm(x)) * x / norm(x)

    def add(x, y):
        xy = (x * y).sum(-1, keepdims=True)
        xx, yy = norm(x) ** 2, norm(y) ** 2
        return ((1 + 2 * xy + yy) * x + (1 - xx) * y) / (1 + 2 * xy + xx * yy)

    def layer(x, w, b):
        y = x @ w
        length = norm(y) / norm(x) * jnp.arctanh(jnp.clip(norm(x), None, 0.99))
        return add(jnp.tanh(length) * y / norm(y), to_ball(b))

    x = to_ball(p["emb"][ids].mean(1))
    x = layer(layer(x, p["w1"], p["b1"]), p["w2"], p["b2"])
    z = add(-to_ball(p["points"]), x[:, None])
    length = norm(p["normals"])[:, 0]
    inner = (z * p["normals"]).sum(-1)
    signed = jnp.arcsinh(2 * inner / ((1 - (z * z).sum(-1)) * length))
    return cross_entropy(2 * length * signed, labels)


@program(
    floats(BATCH, 3, 4),
    integers(BATCH),
    stem=Leaf("oib or adamw", HIDDEN, 3, 3),
    left=Leaf("oib", HIDDEN, HIDDEN, 3),
    right=Leaf("oib", HIDDEN, HIDDEN, 3),
    paths=Leaf("biio", HIDDEN, 3, 3, 3),
    gate=Leaf("adamw", HIDDEN, 3),
    shift=Leaf("adamw", HIDDEN, 3),
    head=Leaf("head", HIDDEN, 10),
)
def multivectors(p, x, labels):
    """Clifford layers of the plane: a matrix for each grade, geometric products."""
    grade = np.array([0, 1, 1, 2])  # of 1, e1, e2, e12
    table = np.zeros((4, 4, 4), np.float32)  # (left, right, result)
    for a in range(4):
        for b in range(4):
            table[a, b, a ^ b] = -1 if (a >> 1) & b & 1 else 1

    def linear(x, w):
        return jnp.einsum("bng,mng->bmg", x, w[..., grade])

    x = linear(x, p["stem"])
    a, b = linear(x, p["left"]), linear(x, p["right"])
    rules = p["paths"][:, grade[:, None, None], grade[:, None], grade] * table
    x = x + jnp.einsum("bni,nijk,bnj->bnk", a, rules, b)
    squares = jnp.einsum("bng,gk->bnk", x**2, np.eye(3, dtype=np.float32)[grade])
    x = x * jax.nn.sigmoid(p["gate"] * squares + p["shift"])[..., grade]
    return cross_entropy(x[..., 0] @ p["head"], labels)


@program(
    floats(BATCH, LENGTH, 9),
    floats(BATCH, LENGTH, LENGTH, 5),
    floats(BATCH, LENGTH, 3, 3),
    floats(BATCH, LENGTH, 3),
    floats(BATCH, LENGTH, 2),
    stem=Leaf("io or adamw", 9, WIDTH),
    qkv=Leaf("io", WIDTH, 3 * WIDTH),
    q_points=Leaf("io", WIDTH, HEADS * 2 * 3),
    k_points=Leaf("io", WIDTH, HEADS * 2 * 3),
    v_points=Leaf("io", WIDTH, HEADS * 7 * 3),
    pairs=Leaf("io or adamw", 5, HEADS),
    weights=Leaf("adamw", HEADS),
    o=Leaf("io", HEADS * (HEAD + 5 + 7 * 4), WIDTH),
    **UP_DOWN,
    angles=Leaf("head", WIDTH, 2),
)
def invariant_points(p, x, z, turns, moves, angles):
    """AlphaFold: points of each residue's frame attend to points of others."""
    x = rms(x @ p["stem"])
    b, n = x.shape[:2]
    q, k, v = map(heads, jnp.split(x @ p["qkv"], 3, -1))

    def points(w):
        local = (x @ w).reshape(b, n, HEADS, -1, 3)
        return jnp.einsum("bnij,bnhpj->bnhpi", turns, local) + moves[:, :, None, None]

    qp, kp, vp = (points(p[f"{name}_points"]) for name in "qkv")
    far = ((qp[:, :, None] - kp[:, None]) ** 2).sum((-1, -2))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD)
    scores += jnp.moveaxis(z @ p["pairs"], -1, 1)
    scores -= jnp.moveaxis(jax.nn.softplus(p["weights"]) * far / 2, -1, 1)
    a = jax.nn.softmax(scores / np.sqrt(3))
    y = jnp.einsum("bhqk,bkhd->bqhd", a, v)
    edges = jnp.einsum("bhqk,bqkc->bqhc", a, z)
    places = jnp.einsum("bhqk,bkhpi->bqhpi", a, vp) - moves[:, :, None, None]
    places = jnp.einsum("bnji,bnhpj->bnhpi", turns, places)
    far = jnp.sqrt((places**2).sum(-1) + 1e-6)
    parts = [part.reshape(b, n, -1) for part in (y, edges, places, far)]
    x = rms(x + jnp.concatenate(parts, -1) @ p["o"])
    x = x + up_down(x, p)
    turned = x @ p["angles"]
    turned /= jnp.linalg.norm(turned, axis=-1, keepdims=True)
    return squared_error(turned, angles)


# --- images and scenes ----------------------------------------------------------------


@program(
    floats(BATCH, LENGTH, 3),
    floats(BATCH, 3),
    floats(BATCH, 3),
    tables=Leaf("embedding", 3, 32, 2),
    density=[Leaf("io", 6, HIDDEN), Leaf("io", HIDDEN, 11)],
    color=[Leaf("io", 10 + 4, WIDTH), Leaf("io", WIDTH, 13), Leaf("head", 13, 3)],
)
def hashed_grids(p, points, directions, colors):
    """Instant NGP: hashed corners of three grids, interpolated, before small MLPs."""
    primes = np.array([1, 2654435761, 805459861], np.uint32)
    corners = np.stack(np.meshgrid(*[[0, 1]] * 3, indexing="ij"), -1).reshape(8, 3)

    def encode(table, size):
        x = points * size
        low = jnp.floor(x)
        part = (x - low)[..., None, :]
        at = low.astype(jnp.int32)[..., None, :] + corners
        at = at.astype(jnp.uint32) * primes
        at = (at[..., 0] ^ at[..., 1] ^ at[..., 2]) % 32
        weight = jnp.where(corners == 1, part, 1 - part).prod(-1)
        return (weight[..., None] * table[at]).sum(-2)

    z = jax.vmap(encode, out_axes=-2)(p["tables"], jnp.array([4.0, 7.0, 12.0]))
    h = jax.nn.relu(z.reshape(*points.shape[:2], 6) @ p["density"][0])
    h = h @ p["density"][1]
    x, y, z = jnp.split(directions, 3, -1)
    waves = jnp.concatenate([jnp.ones_like(x), x, y, z], -1)[:, None]
    waves = jnp.broadcast_to(waves, (*points.shape[:2], 4))
    c = jnp.concatenate([h[..., 1:], waves], -1)
    for w in p["color"][:2]:
        c = jax.nn.relu(c @ w)
    rgb = jax.nn.sigmoid(c @ p["color"][2])
    alpha = 1 - jnp.exp(-0.1 * jnp.exp(h[..., 0]))
    passed = jnp.cumprod(jnp.pad(1 - alpha, ((0, 0), (1, 0)), constant_values=1), 1)
    return squared_error(((alpha * passed[:, :-1])[..., None] * rgb).sum(1), colors)


class Update(nn.Module):
    """The recurrent block of RAFT: motion, a gated convolution, a move."""

    @nn.compact
    def __call__(self, h, context, seen, flow):
        motion = jnp.concatenate(
            [
                nn.relu(nn.Conv(11, (1, 1), name="seen")(seen)),
                nn.relu(nn.Conv(5, (3, 3), name="flow")(flow)),
            ],
            -1,
        )
        x = jnp.concatenate([context, motion], -1)
        both = jnp.concatenate([h, x], -1)
        z = nn.sigmoid(nn.Conv(WIDTH, (3, 3), name="z")(both))
        r = nn.sigmoid(nn.Conv(WIDTH, (3, 3), name="r")(both))
        q = nn.Conv(WIDTH, (3, 3), name="q")(jnp.concatenate([r * h, x], -1))
        h = (1 - z) * h + z * nn.tanh(q)
        move = nn.Conv(2, (3, 3), name="out")(
            nn.relu(nn.Conv(13, (3, 3), name="up")(h))
        )
        return h, move


class OpticalFlow(nn.Module):
    """Features of two images, all pairs of them, and three updates."""

    @nn.compact
    def __call__(self, one, two):
        see = nn.Conv(WIDTH, (3, 3), name="features")
        f1, f2 = nn.relu(see(one)), nn.relu(see(two))
        h, context = jnp.split(
            nn.Conv(WIDTH + 7, (3, 3), name="context")(one), [WIDTH], -1
        )
        h, context = nn.tanh(h), nn.relu(context)
        pairs = jnp.einsum("bijc,bklc->bijkl", f1, f2) / np.sqrt(WIDTH)
        grid = jnp.stack(jnp.mgrid[:6, :6], -1).astype(jnp.float32)
        near = jnp.stack(jnp.mgrid[-1:2, -1:2], -1).reshape(9, 2)

        @jax.vmap
        @functools.partial(jax.vmap, in_axes=(0, 0))
        @functools.partial(jax.vmap, in_axes=(0, 0))
        def look(plane, at):
            rows, columns = (at + near).T
            return jax.scipy.ndimage.map_coordinates(plane, [rows, columns], order=1)

        update, flow, flows = Update(), jnp.zeros((*one.shape[:3], 2)), []
        for _ in range(3):
            flow = lax.stop_gradient(flow)
            h, move = update(h, context, look(pairs, grid + flow), flow)
            flow = flow + move
            flows.append(flow)
        return flows


def linen_conv(answer, *shape):
    """A kernel and a bias of `nn.Conv`."""
    return {"kernel": Leaf(answer, *shape), "bias": Leaf("adamw", shape[-1])}


@program(
    floats(BATCH, 6, 6, 3),
    floats(BATCH, 6, 6, 3),
    floats(BATCH, 6, 6, 2),
    features=linen_conv("iiio or adamw", 3, 3, 3, WIDTH),
    context=linen_conv("iiio or adamw", 3, 3, 3, WIDTH + 7),
    Update_0={
        "seen": linen_conv("iiio", 1, 1, 9, 11),
        "flow": linen_conv("iiio", 3, 3, 2, 5),
        "z": linen_conv("iiio", 3, 3, WIDTH + 23, WIDTH),
        "r": linen_conv("iiio", 3, 3, WIDTH + 23, WIDTH),
        "q": linen_conv("iiio", 3, 3, WIDTH + 23, WIDTH),
        "up": linen_conv("iiio", 3, 3, WIDTH, 13),
        "out": linen_conv("iiio or head", 3, 3, 13, 2),
    },
)
def optical_flow(p, one, two, flow):
    """RAFT in Flax: each update looks at pairs of features where the flow points."""
    flows = OpticalFlow().apply({"params": p}, one, two)
    return sum(0.8 ** (2 - i) * jnp.abs(x - flow).mean() for i, x in enumerate(flows))


@program(
    floats(BATCH, 8, 8, 12),
    floats(BATCH, 8, 8, 4),
    key(),
    w1=Leaf("io", 36, HIDDEN),
    b1=Leaf("adamw", HIDDEN),
    w2=Leaf("io", HIDDEN, 12),
    seed=Leaf("adamw", 12),
    gain=Leaf("adamw", 12),
)
def cellular_automaton(p, grid, image, key):
    """Cells look at their neighbors by fixed filters, and change at random times."""
    sobel = np.outer([1, 2, 1], [-1, 0, 1]).astype(np.float32) / 8
    same = np.zeros((3, 3), np.float32)
    same[1, 1] = 1
    filters = np.stack([same, sobel, sobel.T], -1)[:, :, None]
    filters = np.tile(filters, (1, 1, 1, 12))
    grid = grid.at[:, 4, 4].add(p["seed"])

    def alive(x):
        return nn.max_pool(x[..., 3:4], (3, 3), padding="SAME") > 0.1

    def step(x, key):
        before = alive(x)
        y = conv(x, filters, groups=12)
        move = jax.nn.relu(y @ p["w1"] + p["b1"]) @ p["w2"] * p["gain"]
        x = x + move * jax.random.bernoulli(key, 0.5, (*x.shape[:3], 1))
        return x * (before & alive(x)), None

    x, _ = lax.scan(step, grid, jax.random.split(key, 4))
    return squared_error(x[..., :4], image)


class Joint(nn.Module):
    """A block of MMDiT: two streams with kernels of their own, one attention."""

    @nn.compact
    def __call__(self, x, text, time):
        def modulation(name, count):
            y = nn.Dense(count * WIDTH, name=name)(nn.silu(time))[:, None]
            return jnp.split(y, count, -1)

        def normal(x, shift, scale):
            x = nn.LayerNorm(use_bias=False, use_scale=False)(x)
            return x * (1 + scale) + shift

        def qkv(x, name):
            y = nn.DenseGeneral((3, HEADS, HEAD), name=f"{name}_qkv")(x)
            q, k, v = jnp.moveaxis(y, -3, 0)
            norms = [nn.RMSNorm(name=f"{name}_{n}_norm") for n in "qk"]
            return norms[0](q), norms[1](k), v

        shift, scale, gate, shift2, scale2, gate2 = modulation("x_mod", 6)
        parts = zip(
            qkv(normal(text, *modulation("text_mod", 2)), "text"),
            qkv(normal(x, shift, scale), "x"),
            strict=True,
        )
        q, k, v = (jnp.concatenate(pair, 1) for pair in parts)
        y = attend(q, k, v)[:, text.shape[1] :]
        y = nn.DenseGeneral(WIDTH, axis=(-2, -1), name="x_out")(y)
        x = x + gate * y
        y = nn.Dense(HIDDEN, name="up")(normal(x, shift2, scale2))
        return x + gate2 * nn.Dense(WIDTH, name="down")(nn.gelu(y))


class Denoiser(nn.Module):
    """Patches and words, moved by the time, to the velocity of each patch."""

    @nn.compact
    def __call__(self, x, text, t):
        waves = t[:, None] * np.exp(-np.arange(5, dtype=np.float32))
        waves = jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], -1)
        time = nn.Dense(WIDTH, name="time2")(nn.silu(nn.Dense(13, name="time1")(waves)))
        x = nn.Dense(WIDTH, name="patch")(x)
        text = nn.Dense(WIDTH, name="text")(text)
        x = Joint()(x, text, time)
        last = nn.Dense(2 * WIDTH, name="last_mod")(nn.silu(time))[:, None]
        shift, scale = jnp.split(last, 2, -1)
        x = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
        return nn.Dense(8, name="velocity")(x)


def dense(answer, *shape, outputs=1):
    """A kernel and a bias of `nn.Dense`, or of `nn.DenseGeneral`."""
    bias = Leaf("adamw", *shape[-outputs:])
    return {"kernel": Leaf(answer, *shape), "bias": bias}


@program(
    floats(BATCH, LENGTH, 8),
    floats(BATCH, 7, 9),
    floats(BATCH),
    key(),
    time1=dense("io or adamw", 10, 13),
    time2=dense("io", 13, WIDTH),
    patch=dense("io or adamw", 8, WIDTH),
    text=dense("io or adamw", 9, WIDTH),
    Joint_0={
        "x_mod": dense("io", WIDTH, 6 * WIDTH),
        "text_mod": dense("io", WIDTH, 2 * WIDTH),
        "text_qkv": dense("iboo or iooo or ibbo", WIDTH, 3, HEADS, HEAD, outputs=3),
        "x_qkv": dense("iboo or iooo or ibbo", WIDTH, 3, HEADS, HEAD, outputs=3),
        "text_q_norm": {"scale": Leaf("adamw", HEAD)},
        "text_k_norm": {"scale": Leaf("adamw", HEAD)},
        "x_q_norm": {"scale": Leaf("adamw", HEAD)},
        "x_k_norm": {"scale": Leaf("adamw", HEAD)},
        "x_out": dense("iio", HEADS, HEAD, WIDTH),
        "up": dense("io", WIDTH, HIDDEN),
        "down": dense("io", HIDDEN, WIDTH),
    },
    last_mod=dense("io", WIDTH, 2 * WIDTH),
    velocity=dense("head", WIDTH, 8),
)
def joint_streams(p, x, text, t, key):
    """Stable Diffusion 3 in Flax: a rectified flow under a text."""
    noise = jax.random.normal(key, x.shape)
    mixed = (1 - t[:, None, None]) * x + t[:, None, None] * noise
    return squared_error(Denoiser().apply({"params": p}, mixed, text, t), noise - x)


@program(
    floats(BATCH, 11, 9),
    floats(BATCH, 11, 2),
    floats(BATCH, 13, 9),
    floats(BATCH, 13, 2),
    integers(BATCH, 11),
    place=[Leaf("io or adamw", 2, 7), Leaf("io", 7, WIDTH)],
    see=Leaf("io or adamw", 9, WIDTH),
    layers=[{**ATTENTION, "up": Leaf("io", 2 * WIDTH, WIDTH)}] * 2,
    out=Leaf("head", WIDTH, WIDTH),
    dustbin=Leaf("adamw"),
)
def matched_keypoints(p, one, at_one, two, at_two, matches):
    """SuperGlue: attention within and across images; Sinkhorn with a dustbin."""

    def encode(x, at):
        return x @ p["see"] + jax.nn.relu(at @ p["place"][0]) @ p["place"][1]

    def message(x, y, w):
        q, k, v = heads(x @ w["q"]), heads(y @ w["k"]), heads(y @ w["v"])
        m = attend(q, k, v).reshape(x.shape) @ w["o"]
        return x + jax.nn.relu(rms(jnp.concatenate([x, m], -1)) @ w["up"])

    x, y = encode(one, at_one), encode(two, at_two)
    within, across = p["layers"]
    x, y = message(x, x, within), message(y, y, within)
    x, y = message(x, y, across), message(y, x, across)
    scores = jnp.einsum("bmd,bnd->bmn", x @ p["out"], y @ p["out"]) / np.sqrt(WIDTH)
    b, m, n = scores.shape
    scores = jnp.pad(scores, ((0, 0), (0, 1), (0, 1)))
    edge = np.zeros((m + 1, n + 1), bool)
    edge[-1], edge[:, -1] = True, True
    scores = jnp.where(edge, p["dustbin"], scores)
    rows = np.log(np.r_[np.ones(m), n] / (m + n)).astype(np.float32)
    columns = np.log(np.r_[np.ones(n), m] / (m + n)).astype(np.float32)

    def turn(_, uv):
        _, v = uv
        u = rows - jax.nn.logsumexp(scores + v[:, None], -1)
        return u, columns - jax.nn.logsumexp(scores + u[..., None], 1)

    start = jnp.zeros((b, m + 1)), jnp.zeros((b, n + 1))
    u, v = lax.fori_loop(0, 5, turn, start)
    logs = (scores + u[..., None] + v[:, None])[:, :-1]
    return -jnp.take_along_axis(logs, matches[..., None], -1).mean()


# --- sound ----------------------------------------------------------------------------


@program(
    floats(BATCH, 24, 2),
    stem=Leaf("iio or adamw", 5, 2, 13),
    down=Leaf("iio", 4, 13, WIDTH),
    into=Leaf("io", WIDTH, 7),
    books=Leaf("adamw", 3, 11, 7),
    out=Leaf("io", 7, WIDTH),
    up=Leaf("iio", 4, WIDTH, 13),
    snake=Leaf("adamw", 13),
    wave=Leaf("head", 5, 13, 2),
)
def residual_codebooks(p, wave):
    """SoundStream: each codebook quantizes what the ones before it left."""
    numbers = "NWC", "WIO", "NWC"
    x = jax.nn.elu(conv(wave, p["stem"]))
    x = lax.conv_general_dilated(x, p["down"], (2,), "SAME", dimension_numbers=numbers)
    z = x @ p["into"]

    def quantize(left, book):
        far = (left**2).sum(-1, keepdims=True) - 2 * left @ book.T + (book**2).sum(-1)
        code = book[far.argmin(-1)]
        commit = squared_error(left, lax.stop_gradient(code))
        commit += squared_error(lax.stop_gradient(left), code)
        return left - lax.stop_gradient(code), (code, commit)

    _, (codes, commits) = lax.scan(quantize, z, p["books"])
    q = z + lax.stop_gradient(codes.sum(0) - z)
    y = lax.conv_transpose(
        q @ p["out"], p["up"], (2,), "SAME", dimension_numbers=numbers
    )
    y = y + jnp.sin(p["snake"] * y) ** 2 / (p["snake"] + 1e-6)
    y = jnp.tanh(conv(y, p["wave"]))
    return jnp.abs(y - wave).mean() + commits.sum()


@program(
    integers(BATCH, 11),
    floats(BATCH, LENGTH, 9),
    integers(BATCH, LENGTH),
    emb=Leaf("embedding", VOCAB, WIDTH),
    encode=Leaf("iio", 5, WIDTH, WIDTH),
    prenet=Leaf("io or adamw", 9, 13),
    lstm={
        "x": Leaf("io", 13 + WIDTH, 4 * HIDDEN),
        "h": Leaf("io", HIDDEN, 4 * HIDDEN),
        "b": Leaf("adamw", 4 * HIDDEN),
    },
    query=Leaf("io", HIDDEN, 7),
    memory=Leaf("io", WIDTH, 7),
    filters=Leaf("iio", 5, 2, 6),
    place=Leaf("io", 6, 7),
    score=Leaf("adamw", 7),
    frame=Leaf("io", HIDDEN + WIDTH, 9),
    stop=Leaf("adamw", HIDDEN + WIDTH),
    post=[Leaf("iio", 5, 9, WIDTH), Leaf("head", 5, WIDTH, 9)],
)
def speech_by_location(p, ids, mel, ends):
    """Tacotron 2: attention that sees where it looked before; an LSTM; a postnet."""
    memory = jax.nn.relu(conv(p["emb"][ids], p["encode"]))
    keys = memory @ p["memory"]
    b, n = ids.shape

    def step(carry, x):
        h, c, looked, total, seen = carry
        x = jax.nn.relu(x @ p["prenet"])
        gates = jnp.concatenate([x, seen], -1) @ p["lstm"]["x"] + h @ p["lstm"]["h"]
        i, f, g, o = jnp.split(gates + p["lstm"]["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        where = conv(jnp.stack([looked, total], -1), p["filters"]) @ p["place"]
        energy = jnp.tanh((h @ p["query"])[:, None] + keys + where) @ p["score"]
        looked = jax.nn.softmax(energy)
        seen = jnp.einsum("bn,bnd->bd", looked, memory)
        both = jnp.concatenate([h, seen], -1)
        carry = h, c, looked, total + looked, seen
        return carry, (both @ p["frame"], both @ p["stop"])

    state = jnp.zeros((b, HIDDEN))
    start = state, state, jnp.zeros((b, n)), jnp.zeros((b, n)), jnp.zeros((b, WIDTH))
    before = jnp.pad(mel, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    _, (y, stops) = lax.scan(step, start, before.swapaxes(0, 1))
    y, stops = y.swapaxes(0, 1), stops.swapaxes(0, 1)
    better = y + conv(jnp.tanh(conv(y, p["post"][0])), p["post"][1])
    stop = optax.sigmoid_binary_cross_entropy(stops, ends).mean()
    return squared_error(y, mel) + squared_error(better, mel) + stop


# --- language -------------------------------------------------------------------------


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
    q=SQUARE,
    k=Leaf("io", WIDTH, HEAD),
    v=Leaf("io", WIDTH, HEAD),
    place=Leaf("adamw", 4, HEAD),
    squeeze_k=[Leaf("io", 4 * HEAD, 7), Leaf("io", 7, HEAD)],
    squeeze_v=[Leaf("io", 4 * HEAD, 7), Leaf("io", 7, HEAD)],
    gates=Leaf("io", WIDTH, 2 * HEADS),
    o=SQUARE,
)
def native_sparse_attention(x, p):
    """Scores of squeezed blocks choose the blocks whose tokens are attended to."""
    z = rms(x)
    b, t = x.shape[:2]
    q, k, v = heads(z @ p["q"]), z @ p["k"], z @ p["v"]

    def squeeze(a, w):
        blocks = a.reshape(b, -1, 4, HEAD) + p["place"]
        return jax.nn.gelu(blocks.reshape(b, -1, 4 * HEAD) @ w[0]) @ w[1]

    scores = jnp.einsum("bthd,bnd->bthn", q, squeeze(k, p["squeeze_k"]))
    scores = jax.nn.softmax(scores / np.sqrt(HEAD))
    coarse = jnp.einsum("bthn,bnd->bthd", scores, squeeze(v, p["squeeze_v"]))
    _, best = lax.top_k(scores.sum(2), 2)  # (b, t, 2), one choice for all heads

    def take(a):
        blocks = a.reshape(b, -1, 4, HEAD)
        taken = jnp.take_along_axis(blocks[:, None], best[..., None, None], 2)
        return taken.reshape(b, t, 8, HEAD)

    fine = jax.nn.softmax(jnp.einsum("bthd,btsd->bths", q, take(k)) / np.sqrt(HEAD))
    fine = jnp.einsum("bths,btsd->bthd", fine, take(v))
    g = jax.nn.sigmoid(z @ p["gates"]).reshape(b, t, HEADS, 2)
    y = g[..., :1] * coarse + g[..., 1:] * fine
    return x + y.reshape(x.shape) @ p["o"]


LOW = {"a": Leaf("io", WIDTH, 5), "b": Leaf("io", 5, WIDTH), "c": GAIN}


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


@jax.custom_vjp
def jump(x, threshold):
    """What exceeds the threshold."""
    return x * (x > threshold)


def _jump_forward(x, threshold):
    return jump(x, threshold), (x, threshold)


def _jump_backward(kept, g):
    x, threshold = kept
    near = jnp.abs(x - threshold) < 0.05
    return (x > threshold) * g, (-threshold / 0.1 * near * g).sum(0)


jump.defvjp(_jump_forward, _jump_backward)


@program(
    floats(BATCH, 3, WIDTH),
    floats(BATCH, 5, WIDTH),
    encode=Leaf("iio or adamw", 3, WIDTH, HIDDEN),
    threshold=Leaf("adamw", HIDDEN),
    bias=Leaf("adamw", HIDDEN),
    decode=Leaf("head", HIDDEN, 5, WIDTH),
    center=Leaf("adamw", 5, WIDTH),
)
def crosscoder(p, x, y):
    """Sparse features of several layers, with a threshold that jumps, for others."""
    z = jnp.einsum("bld,ldf->bf", x, p["encode"]) + p["bias"]
    z = jump(z, jnp.broadcast_to(jnp.exp(p["threshold"]), z.shape))
    out = jnp.einsum("bf,fld->bld", z, p["decode"]) + p["center"]
    lengths = jnp.sqrt((p["decode"] ** 2).sum(-1)).sum(-1)
    return squared_error(out, y) + 0.1 * (jnp.tanh(z * lengths)).sum(-1).mean()


# --- tables and graphs ----------------------------------------------------------------


@program(
    floats(BATCH, 7),
    floats(BATCH),
    integers(BATCH),
    w1=Leaf("adamw", 7, 1, HIDDEN),
    b1=Leaf("adamw", 7, HIDDEN),
    w2=Leaf("bio", 7, HIDDEN, 13),
    b2=Leaf("adamw", 7, 13),
    w3=Leaf("head", 7, 13, 3),
    shift=Leaf("adamw", 3),
)
def additive_hazards(p, x, times, causes):
    """A net for each feature; their sum orders the times of three causes (Cox)."""

    def net(w1, b1, w2, b2, w3, x):
        h = jnp.clip(x[:, None] @ jnp.exp(w1) + b1, 0, 1)
        return jax.nn.relu(h @ w2 + b2) @ w3

    names = "w1", "b1", "w2", "b2", "w3"
    risk = jax.vmap(net)(*(p[n] for n in names), x.T)
    return _cox(risk.sum(0) + p["shift"], times, causes)


def _cox(risk, times, causes):
    """Minus the partial likelihood of who fails first, for each cause."""
    order = jnp.argsort(-times)
    risk, causes = risk[order], causes[order]
    later = lax.cumlogsumexp(risk, axis=0)
    happened = causes[:, None] == jnp.arange(3)
    return -((risk - later) * happened).sum() / len(times)


@program(
    floats(BATCH, 9),
    integers(BATCH),
    bits=Leaf("io or adamw", 9, 20),
    shift=Leaf("adamw", 20),
    gates=[Leaf("adamw", 30, 16), Leaf("adamw", 28, 16)],
    head=Leaf("head", 7, 10),
)
def logic_gates(p, x, labels):
    """Each neuron is a mixture of the sixteen functions of two fixed bits."""
    x = jax.nn.sigmoid(x @ p["bits"] + p["shift"])
    rng = np.random.default_rng(0)
    for w in p["gates"]:
        i, j = rng.integers(0, x.shape[-1], (2, len(w)))
        a, b = x[:, i], x[:, j]
        one, ab = jnp.ones_like(a), a * b
        half = [0 * a, ab, a - ab, a, b - ab, b, a + b - 2 * ab, a + b - ab]
        every = jnp.stack([*half, *(one - y for y in half[::-1])], -1)
        x = jnp.einsum("bng,ng->bn", every, jax.nn.softmax(w))
    votes = x.reshape(len(x), 7, 4).sum(-1) / 3.0
    return cross_entropy(votes @ p["head"], labels)


@program(
    integers(BATCH, 11),
    integers(BATCH, 17, 2),
    integers(BATCH, 17),
    floats(BATCH, 17),
    emb=Leaf("embedding", VOCAB, WIDTH),
    mixture=Leaf("embedding or io", 5, 3),
    bases=Leaf("ioo or iio or bio", 3, WIDTH, HIDDEN),
    own1=Leaf("io", WIDTH, HIDDEN),
    blocks=Leaf("bbio", 5, 4, 10, 6),
    own2=Leaf("io or head", HIDDEN, 24),
    relations=Leaf("embedding", 5, 24),
    bias=Leaf("adamw", HIDDEN),
)
def relations_of_bases(p, nodes, edges, kinds, signs):
    """R-GCN: matrices of relations share bases, or have blocks; DistMult."""
    n = nodes.shape[1]

    def score(nodes, edges, kinds):
        source, target = edges.T

        def gather(messages):
            total = jax.ops.segment_sum(messages, target, n)
            count = jax.ops.segment_sum(jnp.ones(len(target)), target, n)
            return total / jnp.maximum(count, 1)[:, None]

        x = p["emb"][nodes]
        every = jnp.einsum("rk,kio->rio", p["mixture"], p["bases"])
        messages = jnp.einsum("ei,eio->eo", x[source], every[kinds])
        x = jax.nn.relu(gather(messages) + x @ p["own1"] + p["bias"])
        parts = x[source].reshape(len(source), 4, -1)
        messages = jnp.einsum("eki,ekio->eko", parts, p["blocks"][kinds])
        x = gather(messages.reshape(len(source), -1)) + x @ p["own2"]
        return (x[source] * p["relations"][kinds] * x[target]).sum(-1)

    scores = jax.vmap(score)(nodes, edges, kinds)
    return optax.sigmoid_binary_cross_entropy(scores, signs).mean()


@program(
    floats(BATCH, 6),
    floats(BATCH, 9),
    stem=Leaf("io or adamw", 9, WIDTH),
    nets=[
        {
            "x": Leaf("io", 3, HIDDEN),
            "c": Leaf("io", WIDTH, HIDDEN),
            "b": Leaf("adamw", HIDDEN),
            "out": Leaf(answer, HIDDEN, 3 * 14),
            "b2": Leaf("adamw", 3 * 14),
        }
        for answer in ("io", "io or head")
    ],
)
def spline_flow(p, x, given):
    """Rational quadratic splines of one half, whose knots the other half sets."""
    c = jax.nn.relu(given @ p["stem"])

    def knots(raw):
        wide = 0.01 + (1 - 0.01 * 5) * jax.nn.softmax(raw)
        ends = jnp.cumsum(wide, -1)
        ends = jnp.pad(ends, [*[(0, 0)] * (raw.ndim - 1), (1, 0)])
        return 6 * ends - 3

    def spline(x, raw):
        xs, ys = knots(raw[..., :5]), knots(raw[..., 5:10])
        slopes = 0.01 + jax.nn.softplus(raw[..., 10:])
        slopes = jnp.pad(slopes, ((0, 0), (0, 0), (1, 1)), constant_values=1.0)
        inside = (x > -3) & (x < 3)
        z = jnp.where(inside, x, 0.0)
        at = jnp.clip((z[..., None] >= xs).sum(-1) - 1, 0, 4)[..., None]

        def take(a, step=0):
            return jnp.take_along_axis(a, at + step, -1)[..., 0]

        x0, w = take(xs), take(xs, 1) - take(xs)
        y0, h = take(ys), take(ys, 1) - take(ys)
        d0, d1, s = take(slopes), take(slopes, 1), h / w
        t = (z - x0) / w
        u = t * (1 - t)
        bottom = s + (d0 + d1 - 2 * s) * u
        y = y0 + h * (s * t * t + d0 * u) / bottom
        top = s * s * (d1 * t * t + 2 * s * u + d0 * (1 - t) ** 2)
        log = jnp.log(top) - 2 * jnp.log(bottom)
        return jnp.where(inside, y, x), jnp.where(inside, log, 0.0)

    total, (a, b) = 0.0, jnp.split(x, 2, -1)
    for n in p["nets"]:
        h = jax.nn.relu(a @ n["x"] + c @ n["c"] + n["b"])
        raw = (h @ n["out"] + n["b2"]).reshape(*a.shape, 14)
        b, log = spline(b, raw)
        total += log.sum(-1)
        a, b = b, a
    return (0.5 * (a * a).sum(-1) + 0.5 * (b * b).sum(-1) - total).mean()
