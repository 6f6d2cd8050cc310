"""What shows only later whether a parameter is a matrix, and along which axes.

Of two parameters that multiply each other both are matrices, or one of them is like
data. Data may reach a product only after several turns of a loop, and keys after
another product.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    BATCH,
    EXPERTS,
    HIDDEN,
    LENGTH,
    SQUARE,
    UP_DOWN_EXPERTS,
    WIDTH,
    Leaf,
    attend,
    between,
    cross_entropy,
    floats,
    integers,
    mlp,
    program,
    rms,
    squared_error,
    widths,
)

FOUR = dict.fromkeys("qkvo", SQUARE)


@program(
    floats(BATCH, LENGTH, 10),
    floats(BATCH, 9, 4),
    inputs=Leaf("io", 10, WIDTH),
    queries=Leaf("adamw", 9, WIDTH),
    layers=[{"itself": FOUR, "data": FOUR}] * 2,
    boxes=Leaf("head", WIDTH, 4),
)
def object_queries_of_one_image(p, images, targets):
    """DETR for one image, under vmap: queries attend to each other without data."""

    def attention(x, y, p):
        pairs = ((x, p["q"]), (y, p["k"]), (y, p["v"]))
        q, k, v = ((z @ w).reshape(1, -1, 4, 6) for z, w in pairs)
        return attend(q, k, v)[0].reshape(x.shape) @ p["o"]

    def boxes(image):
        x, z = image @ p["inputs"], p["queries"]
        for layer in p["layers"]:
            z = z + attention(rms(z), rms(z), layer["itself"])
            z = z + attention(rms(z), x, layer["data"])
        return z @ p["boxes"]

    return squared_error(jax.vmap(boxes)(images), targets)


@program(
    floats(BATCH, 11),
    integers(BATCH),
    patterns=Leaf("adamw", 30, 16),
    q=Leaf("io", 11, WIDTH),
    k=Leaf("io", 16, WIDTH),
    v=Leaf("io", 16, HIDDEN),
    out=Leaf("head", HIDDEN, 5),
)
def stored_patterns(p, x, labels):
    """Hopfield pooling: the data looks at learned patterns, by their projections."""
    keys, values = p["patterns"] @ p["k"], p["patterns"] @ p["v"]
    z = jax.nn.softmax(rms(x @ p["q"]) @ rms(keys).T) @ values
    return cross_entropy(jax.nn.relu(z) @ p["out"], labels)


@between(
    lower=SQUARE,
    upper=SQUARE,
    scales=Leaf("adamw", WIDTH),
    left=Leaf("io", WIDTH, 6),
    middle=Leaf("io", 6, 6),
    right=Leaf("io", 6, WIDTH),
)
def triangular_and_low_rank_factors(x, p):
    """A matrix as the product of two triangles, and one as that of three factors."""
    lower = jnp.tril(p["lower"], -1) + jnp.eye(WIDTH)
    upper = jnp.triu(p["upper"], 1) + jnp.diag(jnp.exp(p["scales"]))
    x = jnp.tanh(x @ (lower @ upper))
    return x @ (p["left"] @ p["middle"] @ p["right"])


@between(
    positions=Leaf("adamw", LENGTH, 9),
    project=Leaf("io", 9, WIDTH),
    condition=Leaf("adamw", 7),
    first=Leaf("io", 7, HIDDEN),
    second=Leaf("io", HIDDEN, WIDTH),
    up=SQUARE,
)
def projected_positions_and_a_condition(x, p):
    """What is added to data, or scales it, was made of parameters alone."""
    x = x + p["positions"] @ p["project"]
    scale = jax.nn.silu(p["condition"] @ p["first"]) @ p["second"]
    return x + jax.nn.gelu(rms(x) @ p["up"]) * scale


@program(
    floats(BATCH, 9),
    integers(BATCH),
    w=Leaf("io", 9, WIDTH),
    prototypes=Leaf("refused", 12, 16),
    project=Leaf("refused", 16, WIDTH),
)
def prototypes_times_a_matrix(p, x, labels):
    """Learned prototypes, or a classifier in two factors: the loss is the same."""
    prototypes = p["prototypes"] @ p["project"]
    return cross_entropy(jax.nn.relu(x @ p["w"]) @ prototypes.T, labels)


@program(
    integers(LENGTH, BATCH),
    floats(LENGTH, BATCH, 3),
    table=Leaf("embedding", 50, WIDTH),
    w=Leaf("io", WIDTH, HIDDEN),
    head=Leaf("head", HIDDEN, 3),
)
def a_delay_line(p, ids, y):
    """Tokens pass through a chain of states, and pick rows six turns later."""

    def step(states, now):
        return (now, *states[:-1]), p["table"][states[-1]] @ p["w"]

    start = (jnp.zeros(BATCH, int),) * 6
    return squared_error(jax.lax.scan(step, start, ids)[1] @ p["head"], y)


@between(
    to_q=Leaf("io", WIDTH, 36),
    to_latent=Leaf("io", WIDTH, 14),
    up=Leaf("io", 11, 48),
    o=SQUARE,
    queries=Leaf("adamw", 3, WIDTH),
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
    router=Leaf("io?", WIDTH, EXPERTS),
    **UP_DOWN_EXPERTS,
    layers=[{"w": SQUARE}, {"w": SQUARE}],
)
def gates_first_and_stacked_layers(x, p):
    """Gates multiply hidden units before they are contracted; layers are stacked."""
    gates = jax.nn.softmax(x @ p["router"])
    h = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, p["up"]))
    x = x + jnp.einsum("bte,bteh,ehd->btd", gates, h, p["down"])
    layers = jax.tree.map(lambda *layers: jnp.stack(layers), *p["layers"])
    return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]), None), x, layers)[0]


@program(
    integers(BATCH, LENGTH),
    integers(7),
    emb=Leaf("embedding", 50, WIDTH),
    w=SQUARE,
    filters=Leaf("adamw", LENGTH, WIDTH),
)
def sampled_rows_of_the_head(p, ids, sampled):
    """The last matrix before rows of the table; filters are known by their spectra."""
    x = p["emb"][ids]
    spectrum = jnp.fft.rfft(p["filters"], axis=0)[..., None, :] ** 2
    x = jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * spectrum.swapaxes(0, 1), axis=1)
    return cross_entropy((x @ p["w"])[:, -1] @ p["emb"][sampled].T, ids[:, 0])


@program(
    floats(LENGTH, BATCH, 9),
    floats(LENGTH, BATCH, 8),
    cell=Leaf("io", 17, WIDTH),
    address=Leaf("io", WIDTH, 8),
    write=Leaf("io", WIDTH, 8),
    memory=Leaf("adamw", 30, 8),
)
def a_memory_that_data_rewrites(p, xs, ys):
    """A Neural Turing Machine: queries read the memory, and more data is written."""

    def step(carry, x):
        memory, read = carry
        hidden = jnp.tanh(jnp.concatenate([x, read], -1) @ p["cell"])
        scores = jnp.einsum("bnd,bd->bn", memory, jnp.tanh(hidden @ p["address"]))
        weights = jax.nn.softmax(scores)
        memory += weights[..., None] * (hidden @ p["write"])[:, None]
        read = jnp.einsum("bn,bnd->bd", weights, memory)
        return (memory, read), read

    start = jnp.broadcast_to(p["memory"], (BATCH, 30, 8)), jnp.zeros((BATCH, 8))
    return squared_error(jax.lax.scan(step, start, xs)[1], ys)


@between(
    **FOUR,
    gate=SQUARE,
    weigh=Leaf("oi", EXPERTS, WIDTH),
    experts=Leaf("bio", EXPERTS, WIDTH, HIDDEN),
    down=Leaf("io", HIDDEN, WIDTH),
    mask=Leaf("adamw", HIDDEN, WIDTH),
)
def queries_and_hidden_units_make_gates(x, p):
    """Neither is a table that queries are compared with; a function masks a kernel."""
    q, k, v = (x @ p[name] for name in "qkv")
    y = attend(*(z.reshape(BATCH, LENGTH, 4, 6) for z in (q, k, v)))
    x = rms(x + (y.reshape(x.shape) * jax.nn.sigmoid(q @ p["gate"])) @ p["o"])
    gates = jax.nn.softmax(jnp.einsum("btd,ed->bte", x, p["weigh"]))
    y = jax.nn.relu(jnp.einsum("btd,edf->btef", x, p["experts"]))
    y = jnp.einsum("btef,bte->btf", y, gates)
    return x + y @ (p["down"] * jax.nn.sigmoid(p["mask"]))


@program(
    floats(BATCH, 9),
    floats(LENGTH, 9),
    floats(3, LENGTH, LENGTH),
    integers(BATCH),
    relations=Leaf("bio", 3, 9, WIDTH),
    query=Leaf("io", 9, HIDDEN),
    key=Leaf("io", WIDTH, HIDDEN),
    vector=Leaf("adamw", HIDDEN),
    classes=Leaf("head", HIDDEN, 5),
    gains=Leaf("adamw", 5),
)
def a_vector_after_the_last_matrices(p, x, nodes, edges, labels):
    """Additive attention to nodes of a graph ends in a sum; gains of classes do not."""
    relation = jax.vmap(lambda edges, w: edges @ (nodes @ w))
    keys = jax.nn.relu(relation(edges, p["relations"]).sum(0)) @ p["key"]
    hidden = jnp.tanh((x @ p["query"])[:, None] + keys)
    pointers = (hidden * p["vector"]).sum(-1)
    classes = (hidden.mean(1) @ p["classes"]) * p["gains"]
    return cross_entropy(pointers, labels) + cross_entropy(classes, labels)


@program(
    floats(BATCH, 9),
    integers(BATCH),
    floats(HIDDEN),
    branches=[Leaf("io", 9, WIDTH)] * 2,
    of_kinds=Leaf("bio", 4, WIDTH, HIDDEN),
    head=Leaf("head", HIDDEN, 5),
)
def branches_kinds_and_a_power_iteration(p, x, kinds, u):
    """Data chooses a branch under vmap, and a matrix; its norm divides the head."""
    first, second = (lambda x, w=w: jnp.tanh(x @ w) for w in p["branches"])
    x = jax.vmap(lambda x, i: lax.switch(i, [first, second, first], x))(x, kinds)
    one_hot = jax.nn.one_hot(kinds, 4)
    x = jnp.einsum("te,td,edf->tf", one_hot, x, p["of_kinds"])
    v = lax.stop_gradient(p["head"].T @ u)
    u = lax.stop_gradient(p["head"] @ v)
    return cross_entropy(jax.nn.relu(x) @ (p["head"] / (u @ p["head"] @ v)), kinds)


@program(
    floats(BATCH, 9),
    integers(BATCH),
    floats(BATCH, 9),
    net=widths(9, WIDTH, HIDDEN, first="io", last="io"),
    readouts=Leaf("embedding", 4, HIDDEN),
)
def forces_by_kinds(p, x, kinds, forces):
    """Each kind has a vector that turns hidden units into its energy."""

    def energy(x):
        hidden = jnp.tanh(mlp(p["net"], x, jnp.tanh))
        return jax.vmap(lambda h, kind: h @ p["readouts"][kind])(hidden, kinds).sum()

    return squared_error(jax.grad(energy)(x), forces)


@program(
    floats(BATCH, 9),
    integers(BATCH),
    up=Leaf("io", 9, WIDTH),
    hidden=Leaf("adamw", WIDTH),
    head=Leaf("head", WIDTH, 5),
    bias=Leaf("adamw", 5),
)
def sharpness_aware(p, x, labels):
    """A step up the gradient, divided by its norm, inside the loss."""

    def error(p):
        hidden = jax.nn.relu(x @ p["up"] + p["hidden"])
        return cross_entropy(hidden @ p["head"] + p["bias"], labels)

    up = jax.grad(error)(p)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(up)))
    step = jax.tree.map(lambda g: lax.stop_gradient(0.05 * g / norm), up)
    return error(jax.tree.map(jnp.add, p, step))
