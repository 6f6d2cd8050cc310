"""One small loss for each way of writing that once changed a reading.

Each is read as it is and in another form that computes the same. `test_rewrites.py`
has many programs; these are the smallest.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import jax_muon as jm
from tests.programs.parts import floats, integers

pytestmark = pytest.mark.usefixtures("as_users_write")

NET = {"w": floats(6, 8), "out": floats(8, 3)}
MODEL = {"emb": floats(9, 6), **NET}
X, IDS = floats(5, 6), integers(5)


def basis(w):
    """A window (3, 4) of a matrix (6, 8), by constants."""
    return jnp.tensordot(np.ones((3, 4, 6), np.float32), w, 1)


def net(p, x, product=jnp.matmul, w=lambda w: w):
    """Two layers, whose first matrix is `w(p["w"])`."""
    return jnp.sum(jnp.tanh(product(x, w(p["w"]))) @ p["out"])


def of(w):
    """Net with a first matrix that is written in another way."""
    return functools.partial(net, w=w)


def by(product):
    """Net with a first product that is written in another way."""
    return functools.partial(net, product=product)


def model(p, ids):
    return net(p, p["emb"][ids])


def flat(p, ids):
    vector, back = ravel_pytree(p)
    return model(back(0.5 * vector + 0.5 * vector), ids)


PRODUCT = {"a": floats(6, 4), "b": floats(4, 8), "out": floats(8, 3)}


def in_halves(x, w):
    """x @ w, from two halves of its columns."""
    return jnp.concatenate([x @ y for y in jnp.split(w, 2, axis=1)], axis=1)


HEADED = {x: floats(12, 3, 5) for x in "qkv"} | {"o": floats(3, 5, 8)}


def attended(p, x, mask, by):
    """Attention of three heads, whose weights get a mask."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    weights = by(weights, mask[:, None, None, :])
    heads = jnp.einsum("bhts,bshk->bthk", weights, v)
    return net(p, jnp.einsum("bthk,hkd->btd", heads, p["o"])[..., :6])


def with_vector(p, ids, change):
    vector, back = ravel_pytree(p)
    return model(back(change(vector)), ids)


def set_one_by_one(p, ids):
    """Each parameter set in one vector, and cut out of it."""
    buffer, at, cut = jnp.zeros(126), 0, {}
    for w in p.values():
        buffer, at = buffer.at[at : at + w.size].set(w.reshape(-1)), at + w.size
    for name, w in reversed(p.items()):
        at -= w.size
        cut[name] = buffer[at : at + w.size].reshape(w.shape)
    return model(cut, ids)


def of_images(p, ids, product=None):
    """A convolution of images (4, 4) that are rows of a table."""
    x, numbers = p["emb"][ids].reshape(-1, 4, 4, 1), ("NHWC", "HWIO", "NHWC")
    y = (product or lax.conv_general_dilated)(
        x, p["w"], (1, 1), 2 * [(1, 1)], dimension_numbers=numbers
    )
    return jnp.sum(jnp.tanh(y) @ p["out"])


def by_patches(x, w, *_, **__):
    x = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    parts = [x[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    return jnp.concatenate(parts, -1) @ w.reshape(-1, w.shape[-1])


def in_rows(length, before=3):
    """All parameters as one vector, padded and in rows of this length, and cut out."""

    def new(p, ids):
        vector, back = ravel_pytree(p)
        end = before + len(vector)
        rows = jnp.pad(vector, (before, -end % length)).reshape(-1, length)
        return model(back((0.5 * rows).reshape(-1)[before:end]), ids)

    return new


def in_buckets(length):
    """Each parameter padded to whole rows of one buffer, as an optimizer's buckets."""

    def new(p, ids):
        padded = {
            n: jnp.pad(w.reshape(-1), (0, -w.size % length)) for n, w in p.items()
        }
        rows = {name: w.reshape(-1, length) for name, w in padded.items()}
        buffer, at, cut = jnp.concatenate([*rows.values()]), 0, {}
        for name, w in p.items():
            part = buffer[at : at + len(rows[name])].reshape(-1)
            cut[name] = part[: w.size].reshape(w.shape)
            at += len(rows[name])
        return model(cut, ids)

    return new


def positions(p, ids):
    return net(p, p["emb"][ids] + p["pos"])


def two(p, x):
    return jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"])


def stacked(p, x):
    both = jnp.stack([p["a"], p["b"]])
    return two({"a": both[0], "b": both[1]}, x)


def conv(x, w):
    numbers = ("NWC", "WIO", "NWC")
    out = lax.conv_general_dilated(
        x[None], w[None], (1,), "VALID", dimension_numbers=numbers
    )
    return out[0]


def in_mapped_rows(w, length):
    return lax.map(lambda row: 2 * row, w.reshape(-1, length)).reshape(w.shape)


def on_devices(function, *x):
    """A function of each half of some arrays, on two devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d")
    return jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False
    )(*x)


def gathered_twice(w):
    """A matrix from its halves (3, 8), summed in halves (2, 3, 8) and gathered."""
    halves = lax.all_gather(w, "d")
    return lax.all_gather(lax.psum_scatter(halves, "d") / 2, "d", tiled=True)


def mean_of_two(p, x, mean):
    y = mean(lambda w, v: jnp.tanh(x @ w) @ v, p["w"], p["v"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


def mean_on_devices(function, *w):
    return on_devices(lambda *w: lax.pmean(function(*(x[0] for x in w)), "d"), *w)


def scattered_sums(y):
    part = lax.psum_scatter(y[0, :2], "d")
    return jnp.concatenate([lax.all_gather(part, "d"), y[0, 2:]])


def in_sharded_rows(w):
    """A flat vector as a row on each device, gathered (FSDP)."""
    rows = w.reshape(2, -1)
    flat = on_devices(lambda v: lax.all_gather(v[0], "d", tiled=True), rows)
    return flat.reshape(w.shape)


def in_windows(w):
    return lax.reduce_window(w.repeat(2, 0), 0.0, lax.add, (2, 1), (2, 1), "VALID")


def scaled_rows(p, ids):
    return jnp.sum((p["emb"][ids] * p["scale"]) @ p["out"])


def with_gradient(loss):
    def new(p, *args):
        value, slopes = jax.value_and_grad(loss)(p, *args)
        return value + optax.tree.norm(slopes)

    return new


def step(loss):
    def new(p, *args):
        slopes = jax.grad(loss)(p, *args)
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, p, slopes), *args)

    return new


def energy(p, x, penalty=lambda w: jnp.sum(w**2)):
    """A loss of forces alone, with a penalty on the matrices."""
    forces = jax.grad(net, 1)(p, x)
    return jnp.sum(forces**2) + sum(map(penalty, p.values()))


def forces(p, x, last):
    """The gradient of an energy alone."""
    slopes = jax.grad(
        lambda x: last(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]), p["o"]).sum()
    )
    return jnp.sum(slopes(x) ** 2)


def layers_by_one_hots(p, x, rows=()):
    """Layers in a scan, or chosen by rows of an identity, or by numbers, in a scan."""

    def layer(x, row):
        if rows:
            one = row[0] if jnp.ndim(row[0]) else jax.nn.one_hot(row[0], 3)
            row = [jnp.tensordot(one, y, 1) for y in layers]
        gain, w = row
        return jnp.tanh((x * gain) @ w), None

    layers = p["gain"], p["w"]
    x, _ = lax.scan(layer, x, rows or layers)
    return jnp.sum(x @ p["out"])


def by_a_vector(p, x, total):
    return total(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) * p["o"]).sum()


def largest(w):
    return jnp.sum(lax.top_k(jnp.abs(w).reshape(-1), 4)[0])


def laplacian(p, x):
    """The second derivatives of a function of each sample."""
    second = jax.vmap(jax.hessian(lambda x: net(p, x)))(x)
    return jnp.mean(jnp.trace(second, axis1=1, axis2=2) ** 2)


def quantized(p, x):
    """A head whose columns are scaled, as in eight bits, and scaled back."""
    scale = jnp.abs(p["out"]).max(0)
    return jnp.sum((jnp.tanh(x @ p["w"]) @ (p["out"] / scale)) * scale)


def mlp(layers, x):
    return jnp.tanh(x @ layers[0]) @ layers[1]


def critics(p, x):
    """Two networks; what follows takes the result of the first."""
    a, b = (mlp(p[name], x) for name in "ab")
    return jnp.sum(jnp.tanh(a) @ p["out"]) + jnp.sum(b**2)


def critics_by_two_calls(p, x):
    a = mlp(p["a"], x)
    b = mlp(p["b"], x)
    return jnp.sum(jnp.tanh(a) @ p["out"]) + jnp.sum(b**2)


def spectral(p, x, u):
    """A power iteration whose result divides the matrix."""
    v = lax.stop_gradient(p["w"] @ u)
    u = lax.stop_gradient(p["w"].T @ v)
    return net(p, x, w=lambda w: w / (v @ w @ u))


def of_grid(p, y, change=lambda w: w):
    """All parameters, on a grid of constants."""
    p = jax.tree.map(change, p)
    grid = np.ones((5, 6), np.float32)
    return jnp.mean((jnp.tanh(grid @ p["w"] + p["bias"]) @ p["out"] - y) ** 2)


def experts(p, x, weights):
    gates, product = weights(x @ p["gate"]), "ti,eio->teo"
    if p["w"].shape == DENSE["w"].shape:
        product = "ti,ieo->teo"
    y = jnp.einsum("te,teo->to", gates, jnp.einsum(product, x, p["w"]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def gates_first(p, x):
    """Gates of a top-k, put into zeros, in one product with data and experts."""
    weights, places = lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
    gates = jnp.zeros((5, 4)).at[jnp.arange(5)[:, None], places].set(weights)
    return jnp.sum(jnp.tanh(jnp.einsum("te,ti,eio->to", gates, x, p["w"])) @ p["out"])


def in_turns(x, w):
    return lax.map(lambda column: x @ column, w.T).T


def layers_of(ws, x, product=jnp.matmul):
    return lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, ws)[0]


def beside_frozen(p, x, frozen):
    return net(p, x, w=lambda w: jnp.concatenate([frozen, w], 1)[:, 4:])


def softmax_by(exp=jnp.exp, inverse=False):
    def softmax(x):
        e = exp(x)
        s = e.sum(-1, keepdims=True)
        return e * (1 / s) if inverse else e / s

    return lambda p, x: experts(p, x, softmax)


def summed_experts(p, x, add=lambda y: y.sum(0)):
    """Outputs (experts, tokens, out) times gates, added by `add`."""
    gates = jax.nn.softmax(x @ p["gate"]).T
    y = add(gates[..., None] * jnp.einsum("ti,eio->eto", x, p["w"]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def added_in_a_scan(y):
    return lax.scan(lambda z, row: (z + row, None), jnp.zeros_like(y[0]), y)[0]


def as_one_segment(y):
    return jax.ops.segment_sum(y, np.zeros(len(y), int), 1)[0]


def picked(p, x, ids, mask=lambda w, ids: w):
    return jnp.sum(
        jnp.tanh(jnp.einsum("ti,tio->to", x, mask(p["w"][ids], ids))) @ p["out"]
    )


def of_picked(p, x, w):
    return jnp.sum(jnp.tanh(jnp.einsum("ti,tio->to", x, w)) @ p["out"])


def masked(w, ids):
    return w * (ids >= 0)[:, None, None]


def memory(p, x, product=lambda k, m: k @ m.T):
    weights = jax.nn.softmax(x @ product(p["k"], p["m"]))
    return jnp.sum(weights @ p["m"] @ p["out"])


def with_metric(p, x):
    """A loss, and an argmax of hidden units that nothing needs."""
    hidden = jnp.tanh(x @ p["w"])
    usage = jax.nn.one_hot(jnp.argmax(hidden, -1), 8).T @ x
    return (jnp.sum(hidden @ p["out"]), usage)[0]


def in_while_loop(loss):
    def new(p, *args):
        def body(carry):
            return carry[0] + 1, carry[1] + loss(p, *args)

        return lax.while_loop(lambda carry: carry[0] < 1, body, (0, 0.0))[1]

    return new


def in_a_list(p, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2])


def mean_of_members(loss):
    return lambda p, *args: jax.vmap(lambda p: loss(p, *args))(p).mean()


def in_a_loop(loss):
    """The sum over members, which a loop takes by their number."""

    def new(p, *args):
        def body(i, y):
            return y + loss(jax.tree.map(lambda w: w[i], p), *args)

        return lax.fori_loop(0, 4, body, 0.0)

    return new


def gated(p, x):
    hidden = jnp.tanh(x @ p["w"])
    return jnp.sum((jax.nn.sigmoid(hidden @ p["gate"])[:, None] * hidden) @ p["out"])


def members(tree):
    return jax.tree.map(lambda x: floats(4, *x.shape), tree)


def before_frozen(p, x):
    """A last product whose result a frozen matrix takes, which the loss closes over."""
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"] @ FROZEN)


def of_global_ids(p):
    return model(p, np.arange(5))


def rows_of_a_buffer(x, w):
    y = jnp.zeros((len(x), w.shape[1]))
    return lax.fori_loop(0, len(x), lambda i, y: y.at[i].set(x[i] @ w), y)


def blocks(x, w):
    """The first input alone, then the others."""
    return x[:, :1] @ w[:1] + x[:, 1:] @ w[1:]


def lookup_by(rows):
    """A model whose rows of the table are found in another way."""
    return lambda p, ids: net(p, rows(p["emb"], ids))


def by_masks(table, ids):
    return sum(jnp.where((ids == i)[:, None], table[i], 0) for i in range(len(table)))


def into_a_buffer(table, ids):
    def row(t, rows):
        return rows.at[t].set(table[ids[t]])

    return lax.fori_loop(0, len(ids), row, jnp.zeros((len(ids), table.shape[1])))


def softmax_above(threshold):
    """A softmax whose small gates are zero."""

    def softmax(x):
        gates = jax.nn.softmax(x)
        return jnp.where(gates >= threshold(gates), gates, 0)

    return lambda p, x: experts(p, x, softmax)


def project(x, w):
    return jnp.einsum("ti,ihd->thd", x, w)


def project_in_turns(x, w):
    return lax.map(lambda w: x @ w, w.swapaxes(0, 1)).swapaxes(0, 1)


def heads(p, x, scores=lambda q, k: jnp.einsum("qhd,khd->hqk", q, k), project=project):
    q, k, v = (project(x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(scores(q, k))
    return jnp.sum(jnp.einsum("hqk,khd->qhd", weights, v).reshape(5, -1) @ p["out"])


def one_by_one(q, k):
    return jnp.stack([q[:, i] @ k[:, i].T for i in range(2)])


def heads_first(p, x, attend=jax.vmap):
    """Heads (heads, in, head), each of which attends by itself."""
    q, k, v = (jnp.einsum("ti,hid->htd", x, p[name]) for name in "qkv")
    y = attend(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)(q, k, v)
    return jnp.sum(jnp.tanh(y.swapaxes(0, 1).reshape(5, -1)) @ p["out"])


def mapped(function):
    return lambda *x: lax.map(lambda x: function(*x), x)


def smear(p, x, roll=lambda x, axis: x):
    """Matrices that gates mix, and which meet data."""
    w = jnp.einsum("be,eio->bio", jax.nn.softmax(x @ p["gate"]), p["w"])
    y = jnp.einsum("bi,bio->bo", roll(x, 1), roll(w, 1))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def positive(x):
    """A mask (6, 8) that data makes."""
    return jnp.broadcast_to((x[0] > 0)[:, None], (6, 8)).astype(x.dtype)


def straight_through(p, x):
    """The choice of an argmax, whose gradient is that of the softmax."""
    z = jax.nn.softmax(x @ p["w"])
    hard = jax.nn.one_hot(jnp.argmax(z, -1), 8)
    return jnp.sum(jnp.tanh((hard + z - lax.stop_gradient(z)) @ p["out"]) @ p["end"])


def projected(p, ids, change=lambda w: w):
    """Positions that a matrix projects."""
    x = p["emb"][ids] + change(p["pos"]) @ p["project"]
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"])


def with_noise(w):
    return w + 0 * jax.random.normal(jax.random.key(0), jnp.shape(w))


def positioned(p, x, add):
    """Tokens on a constant grid, whose positions have a matrix and a bias."""
    grid = np.ones((5, 6), np.float32)
    y = add(x @ p["see"], grid @ p["w"])
    return jnp.sum(jnp.tanh(jnp.tanh(y) @ p["v"]) @ p["out"])


def gathered(p, x, weights=jax.nn.sigmoid):
    """Sums of data for each learned row, without a softmax."""
    h = jnp.tanh(x @ p["w"])
    return jnp.sum(jnp.tanh(weights(p["rows"] @ h.T) @ h) @ p["out"])


def of_codes(p, y, codes=lambda p: jnp.tanh(p["codes"] @ p["f"])):
    """Waves on a constant grid, modulated."""
    grid = np.ones((5, 6), np.float32)
    x = jnp.sin(grid @ p["w"]) * codes(p)
    return jnp.mean((jnp.tanh(x @ p["v"]) @ p["out"] - y) ** 2)


def in_groups(p, x):
    y = lax.ragged_dot(x, p["w"], jnp.array([2, 1, 0, 2]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def conditioned(p, x, product=jnp.matmul):
    """Layers that add products of one condition, as modulations do."""

    def layer(h, w):
        return h + product(x, w), None

    h, _ = lax.scan(layer, jnp.zeros((len(x), 8)), p["w"])
    return jnp.sum(jnp.tanh(h) @ p["out"])


def fused(p, x, part=lambda y, i: y[i]):
    y = jnp.einsum("ti,ijo->jto", x, p["qkv"])
    q, k, v = (part(y, i) for i in range(3))
    return jnp.sum(jax.nn.softmax(q @ k.T) @ v @ p["out"])


def learned_queries(p, x, total=jnp.sum):
    """Queries in a residual stream, which are divided by their norms."""
    z = jnp.repeat(p["queries"][None], len(x), 0)
    q = z * lax.rsqrt(total(z * z, -1, keepdims=True)) @ p["q"]
    weights = jax.nn.softmax(jnp.einsum("bqi,bti->bqt", q, x @ p["k"]))
    z = z + jnp.einsum("bqt,bti->bqi", weights, x @ p["v"])
    return jnp.sum(jnp.tanh(z @ p["up"]) @ p["out"])


def recurrent(p, x, inverse=lambda n: 1 / n):
    def turn(h, row):
        h = jnp.tanh(row + h @ p["w"].T * inverse(24.0))
        return h, h

    _, y = lax.scan(turn, jnp.zeros(6), x)
    return jnp.sum(y @ p["out"])


def of_members(p, x, product=jnp.matmul):
    """Members that see one input, and a layer of each after it."""
    h = jnp.tanh(jnp.einsum("ti,eio->eto", x, p["w"]))
    return jnp.sum(jnp.tanh(product(h, p["v"])) @ p["out"])


def one_member_at_a_time(h, w):
    return lax.map(lambda pair: pair[0] @ pair[1], (h, w))


def normed(p, x, product=jnp.matmul):
    """A spectral norm, whose vectors come from the matrix and a constant alone."""
    w = p["w"]
    v = lax.stop_gradient(jnp.ones((1, 8)) @ w.T)
    v = v / jnp.linalg.norm(v)
    u = lax.stop_gradient(v @ w)
    norm = product(v @ w, (u / jnp.linalg.norm(u)).T)[0, 0]
    return net(p, x, w=lambda w: w / norm)


def with_padded_outputs(x, w):
    return (x @ jnp.pad(w, [(0, 0), (0, 3)]))[:, : w.shape[1]]


def several_ahead(p, x):
    """Three predictions from one input, by a stack of matrices and one head."""
    y = jnp.tanh(jnp.einsum("ti,kio->tko", x, p["w"])) @ p["out"]
    return -jnp.mean(jax.nn.log_softmax(y)[..., 0])


def relational(p, x, edges, over=lambda f, xs: jax.vmap(f)(*xs)):
    """A matrix for each kind of edge."""
    y = over(lambda edge, w: edge @ (x @ w), (edges, p["w"]))
    return jnp.sum(jnp.tanh(y.sum(0)) @ p["out"])


def compete(p, x, axis):
    """A softmax over keys, or over learned queries, as of slots."""
    scores = jnp.einsum("qi,bti->bqt", p["queries"], x @ p["k"])
    y = jnp.einsum("bqt,bti->bqi", jax.nn.softmax(scores, axis), x @ p["v"])
    return jnp.sum(jnp.tanh(y @ p["w"]) @ p["out"])


def largest_apart(p, x):
    return net(p, x, lambda x, w: x @ w - (x @ w).max(-1, keepdims=True))


def distances(p, x, square=lambda z: jnp.sum(z**2, -1)):
    """Distances of data to inducing points."""
    far = square(x)[:, None] + square(p["points"]) - 2 * x @ p["points"].T
    return jnp.sum(jnp.tanh(jnp.exp(-far) @ p["w"]) @ p["out"])


def in_one_hots(places):
    return jax.nn.one_hot(places, 4).sum(1)


def with_ones(places):
    return jnp.zeros((len(places), 4)).at[np.arange(5)[:, None], places].set(1.0)


def centered(x):
    return x - x.mean(-1, keepdims=True)


def product_and_moments(x, w):
    return x @ w - x.mean(-1, keepdims=True) * w.sum(0)


def of_heads(p, ids, shape):
    h = jnp.tanh(p["emb"][ids].reshape(shape) @ p["w"])
    return jnp.sum(h.reshape(5, 16) @ p["out"])


def factors(p, x):
    return jax.nn.sigmoid(x @ p["gate"]).mean(0)


def of_vectors(p, x):
    """Members that share their matrices, and have a vector each (BatchEnsemble)."""
    return jax.vmap(lambda r: net(p, x * r))(p["r"]).sum()


def weigh(e, v):
    return jnp.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v)


def weigh_and_divide(e, v):
    return jnp.einsum("hqk,khd->qhd", e, v) / e.sum(-1).T[..., None]


def gated_attention(p, x, weigh=weigh):
    """Attention whose values a gate of the queries scales."""
    q, k, v = ((x @ p[name]).reshape(5, 2, 3) for name in "qkv")
    y = weigh(jnp.exp(jnp.einsum("qhd,khd->hqk", q, k)), v).reshape(5, 6)
    y *= jax.nn.sigmoid(q.reshape(5, 6) @ p["gate"])
    return jnp.sum(jnp.tanh(y @ p["w"]) @ p["out"])


def total(q, z):
    return jnp.einsum("bc,bc->", q, z)


def soft_targets(p, x, q, mean=total):
    return -mean(q, jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["out"]))


def scaled_logits(p, x, ids, change=lambda y: y):
    y = jnp.tanh(x @ p["w"]) @ p["out"] * p["scale"]
    return -jax.nn.log_softmax(change(y))[jnp.arange(5), ids].sum()


OF_VECTOR = {"w": floats(6, 8), "v": floats(8, 8), "o": floats(8)}
FACTORS = {"w": floats(6, 8), "a": floats(8, 4), "out": floats(4, 3)}
GATED_HEADS = dict.fromkeys(("q", "k", "v", "gate", "w"), floats(6, 6)) | {
    "out": floats(6, 3)
}
CENTERS = {"points": floats(7, 6), "w": floats(7, 8), "out": floats(8, 3)}
COMPETING = dict.fromkeys(("k", "v", "w"), floats(6, 6)) | {
    "queries": floats(2, 6),
    "out": floats(6, 3),
}
WIDE = {"emb": floats(9, 24), "w": floats(24, 40), "out": floats(40, 3)}
TWO = {"w": floats(6, 8), "v": floats(8, 8), "out": floats(8, 3)}
FROZEN = np.ones((3, 7), np.float32)
ROW = np.arange(6)[:, None]
LAYERS = [floats(6, 8), floats(8, 8), floats(8, 8)]
HEADS = dict.fromkeys("qkv", floats(6, 2, 4)) | {"out": floats(8, 3)}


def rotated(p, x, change):
    """Data times a function of a matrix that constants move."""
    return net(p, x * jnp.tanh(change(p["square"])))


def queries(p, x):
    """Two kinds of learned queries, which are like data."""
    h = jnp.tanh(x @ p["w"])
    y = jax.nn.softmax(p["rows"] @ h.T) @ h + jnp.tanh(p["q"] @ p["v"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


def with_mean(p, x, change):
    return jnp.sum((x * jnp.tanh(change(p["q"], p["w"]))) @ p["out"])


def in_every_window(p, x, change):
    """Three windows (4,) of samples (6,), each times a matrix (6, 8) by constants."""
    basis = np.ones((3, 4, 6), np.float32)
    return jnp.sum(jnp.tanh(change(basis, x.reshape(-1, 3, 4), p["w"])) @ p["out"])


def convolved(x, w):
    """Images (n, 9, 3) and windows of three elements."""
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=numbers)


def cnn_members(p, x, members=jax.vmap):
    """Two nets, which see the same images by a product and a convolution."""
    y = members(lambda k, m: convolved(jnp.tanh(x @ k), m))(p["k"], p["m"])
    return jnp.mean(y**2)


def in_python(function):
    return lambda *x: jnp.stack([function(*one) for one in zip(*x, strict=True)])


def above(threshold):
    """Experts whose logits are no smaller than this."""
    return lambda p, x: experts(
        p, x, lambda y: jnp.where(y >= threshold(y), jax.nn.sigmoid(y), 0)
    )


def in_columns(p, ids):
    """All parameters as rows of a vector, in two parts."""
    vector, back = ravel_pytree(p)
    rows = vector.reshape(-1, 6)
    rows = jnp.concatenate([rows[:, :2], rows[:, 2:]], 1)
    return model(back(rows.reshape(-1)), ids)


def low_rank(p, x, product):
    return jnp.sum(jnp.tanh(product(jnp.tanh(x @ p["w"]), p["a"], p["b"])) @ p["out"])


def pairs(p, x, z, by=lambda z, bias: jnp.einsum("stc,ch->hst", z, bias)):
    """An attention to which functions of pairs are added."""
    q, k, v = (jnp.einsum("ti,ihd->htd", x, p[n]) for n in "qkv")
    scores = q @ k.swapaxes(1, 2) + by(jnp.tanh(z @ p["z"]), p["bias"])
    y = (jax.nn.softmax(scores) @ v).swapaxes(0, 1).reshape(5, 8)
    return jnp.sum(jnp.tanh(y) @ p["out"])


def added(p, x, by=jnp.add):
    """Activations and a product of two parameters: positions, and a matrix."""
    h = by(jnp.tanh(x @ p["square"]), p["pos"] @ p["project"])
    return jnp.sum(jnp.tanh(h @ p["w"]) @ p["out"])


def two_attentions(p, x):
    """Learned queries attend to each other, then to data."""
    q, k, v = (p["rows"] @ p[name] for name in "qkv")
    y = jax.nn.softmax(q @ k.T) @ v
    z = jax.nn.softmax(y @ (x @ p["keys"]).T) @ (x @ p["values"])
    return jnp.sum(jnp.tanh(z) @ p["out"])


EXPERTS = {"gate": floats(6, 4), "w": floats(4, 6, 8), "out": floats(8, 3)}
DENSE = {**EXPERTS, "w": floats(6, 4, 8)}  # experts in one kernel, as of DenseGeneral
GRID = {**NET, "bias": floats(8)}
OUT, OUTPUTS = {"out": floats(6, 3)}, {"out": floats(8, 3)}


def weighed_matrices(p, x):
    """Numbers make one matrix of three."""
    w = jnp.einsum("k,kio->io", p["numbers"], p["w"])
    return jnp.sum(jnp.tanh(x @ w) @ p["out"])


def weighed_inputs(p, x):
    y = jnp.einsum("bki,kio->bo", x[:, None] * p["numbers"][:, None], p["w"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


def distances_to_planes(p, x, product=lambda z, v: z @ v.T):
    """Hyperbolic planes (10, 8), as heads of hyperbolic networks have them."""
    y = product(jnp.tanh(x @ p["w"]), p["planes"])
    return jnp.sum((y * jnp.linalg.norm(p["planes"], axis=-1)) ** 2)


def chosen_rows(p, x, product=jnp.matmul):
    """Queries choose two rows of the data each."""
    queries = product(x, p["w"])
    scores = jnp.sum(queries[:, None] * queries[None], -1)
    _, rows = lax.top_k(scores, 2)
    return jnp.sum(jnp.tanh(x[rows].sum(1) @ p["w"]) @ p["out"])


DECODER = {"q": floats(6, 5), "k": floats(6, 5), "v": floats(6, 5), "o": floats(5, 6)}
DECODER |= {"a": floats(6, 2), "b": floats(2, 6), "out": floats(6, 3)}


def decoder(p, x, start=jnp.zeros_like):
    """Three steps of a state that attends to x, and is updated in two products."""

    def step(c, _):
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", c @ p["q"], x @ p["k"]))
        read = jnp.einsum("bs,bsd->bd", weights, x @ p["v"])
        return jnp.tanh(read @ p["o"] + c @ p["a"] @ p["b"]), c @ p["out"]

    return jnp.sum(lax.scan(step, start(x[:, 0]), length=3)[1] ** 2)


def with_null_context(p, x, null=jnp.zeros_like):
    """Free guidance: the network once with its context, and once without."""

    def of(context):
        weights = jax.nn.softmax(x[:, 0] @ p["q"] @ (context @ p["k"]).mT)
        return weights @ (context @ p["v"]) @ p["o"] @ p["out"]

    return jnp.sum(of(x) ** 2) + jnp.sum(of(null(x)) ** 2)


def pooled_convolution(p, x):
    z = lax.conv_general_dilated(
        x, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    weights = jax.nn.softmax(jnp.tanh(z) @ p["v"])
    return jnp.sum((jnp.einsum("bt,btd->bd", weights, jnp.tanh(z)) @ p["out"]) ** 2)


def turned(p, x, power=lambda z: z**0.5j):
    z = power(jax.nn.softplus(x @ p["w"])).real
    return jnp.sum((z @ p["out"]) ** 2)


def copied(p, x, copies=lambda w: jnp.stack([w] * 3)):
    """The first of three matrices, three times."""
    return jnp.sum(jnp.tanh(x @ copies(p["w"][0])).sum(0) @ p["out"])


def consistency(p, x, last=jnp.ones_like):
    """A network at a time of the data beside one at the last time."""

    def at(times):
        waves = jnp.sin(times[:, None] * np.arange(1.0, 7.0))
        return jnp.sum(jnp.tanh(x @ p["w"] + waves @ p["t1"] @ p["t2"]) @ p["out"])

    return at(x[:, 0]) + at(last(x[:, 0]))


def tables_of_layers(p, ids, rows=lambda e, w, ids: e[ids] @ w):
    """Each layer looks words up in a table of few numbers, which a matrix widens."""
    layers = zip(p["emb"].swapaxes(0, 1), p["w"], strict=True)
    return jnp.sum(sum(jnp.tanh(rows(e, w, ids)) for e, w in layers) @ p["out"])


FEATURES = np.random.default_rng(1).normal(size=(7, 6)).astype("f")
EDGES = np.array([[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 3]])


def of_fixed_graph(p, y, features=lambda y: FEATURES):
    """A graph network of one graph, which the loss closes over."""
    z = (features(y) @ p["w"])[EDGES[0]]
    z = jax.nn.relu(jax.ops.segment_sum(z, EDGES[1], 7))
    return jnp.sum((z @ p["out"] - y) ** 2)


def of_items(p, ids, features=lambda ids: FEATURES):
    """Rows of the features of all items, which the loss closes over."""
    return jnp.sum(jnp.tanh(features(ids) @ p["w"])[ids] @ p["out"])


def spectra(p, x, each=jax.vmap):
    """Eigenvalues of each sample's covariance, by another matrix."""
    z = x @ p["a"]
    values = jnp.linalg.eigvalsh(jnp.einsum("bti,btj->bij", z, z))
    return jnp.sum(each(lambda e: (e @ p["w"]) ** 2)(values))


def resized(p, x, rows=lambda w: w[5]):
    """Positions that a constant matrix has resized, beside others."""
    positions = jnp.concatenate([FEATURES[:4, :4] @ p["a"], p["b"]])
    return net(p, x + rows(positions) + positions[:4].sum(0))


def by_counts(p, ids, counts=lambda m: jnp.histogram(m, 5)[0]):
    rows = p["emb"][ids]
    return jnp.sum(rows * counts(rows).max() @ p["out"])


def with_relative(p, x, table=lambda w: jnp.pad(w, ((0, 1), (0, 0)))[:7]):
    """Scores with a bias for each distance, of which one row is zeros."""
    scores = (x @ p["q"]) @ (x @ p["k"]).T
    bias = table(p["bias"])[np.arange(25).reshape(5, 5) % 7, 0]
    return jnp.sum(jax.nn.softmax(scores + bias) @ x @ p["out"])


def over_norms(p, ids, product=jnp.matmul):
    rows = p["emb"][ids]
    z = jnp.tanh(rows @ p["a"]) @ p["w"]
    z = z * jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return jnp.sum(product(z, p["out"]) ** 2)


SAME = {  # what is rewritten: parameters, loss, arguments, and another loss
    "rolled": (NET, net, [X], of(lambda w: jnp.roll(jnp.roll(w, 1, 0), -1, 0))),
    "rows taken": (NET, net, [X], of(lambda w: jnp.take(w, jnp.arange(6), 0))),
    "rows stacked": (NET, net, [X], of(lambda w: jnp.stack([*w]))),
    "rows mapped": (NET, net, [X], of(lambda w: lax.map(lambda row: 2 * row, w))),
    "set in a flat buffer": (
        MODEL,
        model,
        [IDS],
        lambda p, ids: with_vector(p, ids, lambda v: jnp.zeros(130).at[4:].set(v)[4:]),
    ),
    "each set in a flat buffer": (MODEL, model, [IDS], set_one_by_one),
    "cut at a number": (
        MODEL,
        model,
        [IDS],
        lambda p, ids: with_vector(
            p,
            ids,
            lambda v: lax.dynamic_slice(jnp.pad(v, (3, 0)), [jnp.int32(3)], [126]),
        ),
    ),
    "patches of rows": (
        {"emb": floats(9, 16), "w": floats(3, 3, 1, 8), "out": floats(8, 3)},
        of_images,
        [IDS],
        functools.partial(of_images, product=by_patches),
    ),
    "two rows interleaved": (
        {"w": floats(2, 8), "out": floats(8, 3)},
        net,
        [floats(5, 2)],
        of(lambda w: jnp.stack([w[::2], w[1::2]], 1).reshape(w.shape)),
    ),
    "rows of other lengths mapped": (
        NET,
        net,
        [X],
        of(lambda w: in_mapped_rows(in_mapped_rows(w, 12), 3)),
    ),
    "gathered from devices": (
        NET,
        net,
        [X],
        of(lambda w: on_devices(lambda v: lax.all_gather(v, "d"), w).reshape(6, 8)),
    ),
    "a member on each device": (
        {"w": floats(2, 6, 8), "v": floats(2, 8, 8), "out": floats(8, 3)},
        lambda p, x: mean_of_two(p, x, lambda f, *w: jax.vmap(f)(*w).mean(0)),
        [X],
        lambda p, x: mean_of_two(p, x, mean_on_devices),
    ),
    "scattered sums": (
        NET,
        net,
        [X],
        by(lambda x, w: on_devices(scattered_sums, jnp.stack([x @ w] * 2))),
    ),
    "flat rows gathered from devices": (
        {"w": floats(3, 8), "out": floats(8, 3)},
        net,
        [floats(5, 3)],
        of(in_sharded_rows),
    ),
    "a block of one row": (NET, net, [X], by(blocks)),
    "a flat vector": (MODEL, model, [IDS], flat),
    "rows across wide matrices": (WIDE, model, [IDS], in_rows(24, before=0)),
    "buckets of wide matrices": (WIDE, model, [IDS], in_buckets(64)),
    "rows of a flat vector": (MODEL, model, [IDS], in_rows(7)),
    "two rows of a flat vector": (MODEL, model, [IDS], in_rows(66)),
    "buckets": (MODEL, model, [IDS], in_buckets(16)),
    "stacked": ({"a": floats(6, 6), "b": floats(6, 6)}, two, [X], stacked),
    "set in a buffer": (
        NET,
        net,
        [X],
        of(lambda w: jnp.zeros((3, *w.shape)).at[1].set(w)[1]),
    ),
    "rows into a buffer": (NET, net, [X], by(rows_of_a_buffer)),
    "outputs one by one": (
        NET,
        net,
        [X],
        by(lambda x, w: lax.map(lambda c: x @ c, w.T).T),
    ),
    "outputs of layers one by one": (
        {"w": floats(3, 6, 8), "out": floats(8, 3)},
        conditioned,
        [X],
        functools.partial(
            conditioned, product=lambda x, w: lax.map(lambda c: x @ c, w.T).T
        ),
    ),
    "a sum by ones": (
        {
            "queries": floats(2, 6),
            **dict.fromkeys(("q", "k", "v", "up"), floats(6, 6)),
            **OUT,
        },
        learned_queries,
        [floats(4, 5, 6)],
        functools.partial(
            learned_queries, total=lambda q, *_, **__: (q @ jnp.ones(6))[..., None]
        ),
    ),
    "a power of constants": (
        {"w": floats(6, 6), **OUT},
        recurrent,
        [X],
        functools.partial(recurrent, inverse=lambda n: jnp.abs(n) ** -1.0),
    ),
    "parts taken": (
        {"qkv": floats(6, 3, 6), **OUT},
        fused,
        [X],
        functools.partial(fused, part=lambda y, i: jnp.take(y, i, 0)),
    ),
    "a last vector by ones": (
        OF_VECTOR,
        functools.partial(by_a_vector, total=lambda y: y.sum(-1)),
        [X],
        functools.partial(by_a_vector, total=lambda y: y @ np.ones(8, "f")),
    ),
    "a last vector by running sums": (
        OF_VECTOR,
        functools.partial(by_a_vector, total=lambda y: y.sum(-1)),
        [X],
        functools.partial(by_a_vector, total=lambda y: jnp.cumsum(y, -1)[:, -1]),
    ),
    "a grid of two axes": (
        NET,
        lambda p, y: net(p, np.ones((20, 6), np.float32)) - y.sum(),
        [X],
        lambda p, y: net(p, np.ones((5, 4, 6), np.float32)) - y.sum(),
    ),
    "a basis of a window": (
        NET,
        lambda p, x: net(p, x.reshape(5, 12), w=lambda w: basis(w).reshape(12, 8)),
        [floats(5, 3, 4)],
        lambda p, x: net(p, x, functools.partial(jnp.einsum, "bij,ijo->bo"), basis),
    ),
    "an identity after": (NET, net, [X], of(lambda w: w @ np.eye(8, dtype="f"))),
    "an identity before": (NET, net, [X], of(lambda w: np.eye(6, dtype="f") @ w)),
    "less a number": (NET, net, [X], of(lambda w: w.at[0].subtract(1.0))),
    "sums of windows": (NET, net, [X], of(in_windows)),
    "a window of one": (NET, net, [X], by(conv)),
    "a window of one, looked up": (
        MODEL,
        model,
        [IDS],
        lambda p, ids: net(p, conv(jax.nn.one_hot(ids, 9), p["emb"])),
    ),
    "a gradient": (
        {"emb": floats(9, 6), "scale": floats(6), "out": floats(6, 3)},
        scaled_rows,
        [IDS],
        with_gradient(scaled_rows),
    ),
    "a gradient of a softmax": (
        {"w": floats(3, 6, 8), "out": floats(8, 3)},
        several_ahead,
        [X],
        with_gradient(several_ahead),
    ),
    "a gradient of groups": (
        {"w": floats(4, 6, 8), "out": floats(8, 3)},
        in_groups,
        [X],
        with_gradient(in_groups),
    ),
    "a gradient of a choice": (
        {"w": floats(6, 8), "out": floats(8, 3), "end": floats(3, 2)},
        straight_through,
        [X],
        with_gradient(straight_through),
    ),
    "noise of zero": (
        {**MODEL, "pos": floats(5, 4), "project": floats(4, 6)},
        projected,
        [IDS],
        functools.partial(projected, change=with_noise),
    ),
    "noise before a product of two": (
        {**PRODUCT, "w": floats(6, 8)},
        lambda p, x: net(p, x, w=lambda w: w + p["a"] @ p["b"]),
        [X],
        lambda p, x: net(p, x, w=lambda w: with_noise(w) + p["a"] @ p["b"]),
    ),
    "a bias of positions": (
        {**NET, "see": floats(4, 8), "bias": floats(8), "v": floats(8, 8)},
        lambda p, x: positioned(p, x, lambda x, y: x + (y + p["bias"])),
        [floats(2, 5, 4)],
        lambda p, x: positioned(p, x, lambda x, y: jnp.tanh(y) + (x + p["bias"])),
    ),
    "a logistic function by hand": (
        {**NET, "rows": floats(9, 8)},
        gathered,
        [X],
        functools.partial(gathered, weights=lambda y: 1 / (1 + jnp.exp(-y))),
    ),
    "noise in a stack": (
        NET,
        net,
        [X],
        of(lambda w: jnp.stack([w, jax.random.normal(jax.random.key(0), w.shape)])[0]),
    ),
    "a penalty by a top-k": (
        NET,
        energy,
        [X],
        functools.partial(energy, penalty=largest),
    ),
    "forces of a vector": (
        OF_VECTOR,
        functools.partial(forces, last=lambda y, o: y @ o[:, None]),
        [X],
        functools.partial(forces, last=lambda y, o: y @ o),
    ),
    "second derivatives": (NET, net, [X], laplacian),
    "scaled and back": (NET, net, [X], quantized),
    "networks in a comprehension": (
        {"a": LAYERS[:2], "b": LAYERS[:2], "out": floats(8, 3)},
        critics_by_two_calls,
        [X],
        critics,
    ),
    "columns one by one in layers": (
        {"w": floats(3, 6, 6), "out": floats(6, 3)},
        lambda p, x: jnp.sum(layers_of(p["w"], x) @ p["out"]),
        [X],
        lambda p, x: jnp.sum(layers_of(p["w"], x, in_turns) @ p["out"]),
    ),
    "constants on both sides": (
        {**NET, "square": floats(6, 6)},
        lambda p, x: rotated(p, x, lambda w: np.ones((5, 6), np.float32) @ w),
        [X],
        lambda p, x: rotated(
            p, x, lambda w: np.ones((5, 6), np.float32) @ w @ np.ones((6, 6))
        ),
    ),
    "one row of what a constant moves": (
        {**NET, "square": floats(6, 6)},
        lambda p, x: net(p, x * (np.ones(6, np.float32) @ p["square"])),
        [X],
        lambda p, x: net(p, x * (np.ones((5, 6), np.float32) @ p["square"])[3]),
    ),
    "windows of a matrix by constants": (
        NET,
        lambda p, x: in_every_window(
            p, x, lambda b, x, w: jnp.einsum("thk,hki->thi", x, b) @ w
        ),
        [floats(5, 12)],
        lambda p, x: in_every_window(
            p, x, lambda b, x, w: jnp.einsum("thk,hko->tho", x, b @ w)
        ),
    ),
    "queries in one vector": (
        {
            **{"w": floats(6, 8), "rows": floats(9, 8), "out": floats(8, 3)},
            **{"q": floats(9, 4), "v": floats(4, 8)},
        },
        queries,
        [X],
        lambda p, x: (lambda v, back: queries(back(0.5 * v), x))(*ravel_pytree(p)),
    ),
    "a mean of queries": (
        {"q": floats(9, 6), "w": floats(6, 8), "out": floats(8, 3)},
        lambda p, x: with_mean(p, x, lambda q, w: (q @ w).mean(0)),
        [floats(5, 8)],
        lambda p, x: with_mean(p, x, lambda q, w: q.mean(0) @ w),
    ),
    "rows of a product of two": (
        {"e": floats(9, 4), "b": floats(4, 6), **NET},
        lambda p, ids: net(p, p["e"][ids] @ p["b"]),
        [IDS],
        lambda p, ids: net(p, (p["e"] @ p["b"])[ids]),
    ),
    "rows by a running index": (
        NET,
        lambda p, x: jnp.sum(
            lax.fori_loop(0, 3, lambda i, y: y + x @ p["w"], jnp.zeros((5, 8)))
            @ p["out"]
        ),
        [X],
        lambda p, x: jnp.sum(
            lax.fori_loop(
                0,
                3,
                lambda i, y: y + jnp.roll(x, i, 1) @ p["w"][(jnp.arange(6) - i) % 6],
                jnp.zeros((5, 8)),
            )
            @ p["out"]
        ),
    ),
    "a threshold by a sort": (
        EXPERTS,
        above(lambda y: lax.top_k(y, 2)[0][:, -1:]),
        [X],
        above(lambda y: jnp.sort(y, -1)[:, -2:-1]),
    ),
    "members of convolutions": (
        {"k": floats(2, 3, 6), "m": floats(2, 3, 6, 4)},
        functools.partial(cnn_members, members=in_python),
        [floats(5, 9, 3)],
        cnn_members,
    ),
    "unstacked": (NET, net, [X], of(lambda w: jnp.stack(jnp.unstack(w)))),
    "frozen columns, cast": (
        {"w": floats(6, 4), "out": floats(8, 3)},
        lambda p, x, frozen: net(p, x, w=lambda w: jnp.concatenate([frozen, w], 1)),
        [X, floats(6, 4)],
        lambda p, x, frozen: net(
            p, x, w=lambda w: jnp.concatenate([frozen, w], 1).astype(jnp.bfloat16)
        ),
    ),
    "columns of one vector in rows": (MODEL, model, [IDS], in_columns),
    "a low rank, transposed": (
        {"w": floats(6, 8), "a": floats(9, 2), "b": floats(2, 8), "out": floats(9, 3)},
        lambda p, x: low_rank(p, x, lambda h, a, b: (h @ b.T) @ a.T),
        [X],
        lambda p, x: low_rank(p, x, lambda h, a, b: h @ (a @ b).T),
    ),
    "one sequence without a batch": (
        {**MODEL, "pos": floats(5, 6)},
        lambda p, ids: net(p, p["emb"][ids][None] + p["pos"]),
        [IDS],
        lambda p, ids: net(p, p["emb"][ids] + p["pos"]),
    ),
    "scattered whole": (
        NET,
        net,
        [X],
        of(functools.partial(on_devices, gathered_twice)),
    ),
    "a step": (NET, net, [X], step(net)),
    "clipped": (
        GRID,
        of_grid,
        [floats(5, 3)],
        functools.partial(of_grid, change=lambda w: jnp.clip(w, -1e9, 1e9)),
    ),
    "powers of two": (DENSE, softmax_by(), [X], softmax_by(jnp.exp2)),
    "a reciprocal": (DENSE, softmax_by(), [X], softmax_by(inverse=True)),
    "a logarithm": (
        DENSE,
        softmax_by(),
        [X],
        lambda p, x: experts(p, x, lambda y: jnp.exp(jax.nn.log_softmax(y))),
    ),
    "a sum of logarithms": (
        DENSE,
        softmax_by(),
        [X],
        lambda p, x: experts(
            p, x, lambda y: jnp.exp(y - jax.nn.logsumexp(y, -1, keepdims=True))
        ),
    ),
    "exponentials over their mean": (
        DENSE,
        softmax_by(),
        [X],
        lambda p, x: experts(
            p, x, lambda y: jnp.exp(y) / jnp.exp(y).mean(-1, keepdims=True)
        ),
    ),
    "gates in a branch": (
        DENSE,
        softmax_by(),
        [X],
        lambda p, x: experts(
            p,
            x,
            lambda y: lax.cond(
                x.sum() > 0, jax.nn.softmax, lambda y: jax.nn.softmax(2 * y), y
            ),
        ),
    ),
    "experts added in a scan": (
        EXPERTS,
        summed_experts,
        [X],
        functools.partial(summed_experts, add=added_in_a_scan),
    ),
    "experts as one segment": (
        EXPERTS,
        summed_experts,
        [X],
        functools.partial(summed_experts, add=as_one_segment),
    ),
    "experts times ones": (
        EXPERTS,
        summed_experts,
        [X],
        functools.partial(
            summed_experts, add=lambda y: jnp.tensordot(np.ones(4, "f"), y, 1)
        ),
    ),
    "experts as running sums": (
        EXPERTS,
        summed_experts,
        [X],
        functools.partial(summed_experts, add=lambda y: jnp.cumsum(y, 0)[-1]),
    ),
    "picked factors": (
        {"a": floats(4, 6, 3), "b": floats(4, 3, 8), "out": floats(8, 3)},
        lambda p, x, ids: of_picked(
            p, jnp.einsum("ti,tio->to", x, p["a"][ids]), p["b"][ids]
        ),
        [X, IDS],
        lambda p, x, ids: of_picked(p, x, (p["a"] @ p["b"])[ids]),
    ),
    "masked experts": (
        {"w": floats(4, 6, 8), "out": floats(8, 3)},
        picked,
        [X, IDS],
        functools.partial(picked, mask=masked),
    ),
    "operands swapped": (
        {"k": floats(6, 7), "m": floats(9, 7), "out": floats(7, 3)},
        memory,
        [X],
        functools.partial(memory, product=lambda k, m: (m @ k.T).T),
    ),
    "w[i, j]": (NET, net, [X], of(lambda w: w[ROW, np.arange(8)])),
    "taken along an axis": (
        NET,
        net,
        [X],
        of(lambda w: jnp.take_along_axis(w, np.broadcast_to(ROW, (6, 8)), 0)),
    ),
    "a mask by einsum": (
        NET,
        lambda p, x: net(p, x, w=lambda w: w * positive(x)),
        [X],
        lambda p, x: net(p, x, w=lambda w: jnp.einsum("io,io->io", w, positive(x))),
    ),
    "a gain by a row of an identity": (
        {"gain": floats(2, 6), **NET},
        lambda p, x: net(p, x * p["gain"][1]),
        [X],
        lambda p, x: net(p, x * (np.eye(2, dtype="f")[1] @ p["gain"])),
    ),
    "rows of an identity": (
        MODEL,
        model,
        [IDS],
        lookup_by(lambda table, ids: jnp.eye(9)[ids] @ table),
    ),
    "bags of words": (
        MODEL,
        lambda p, ids: net(p, p["emb"][ids].sum(1)),
        [integers(5, 3)],
        lambda p, ids: net(p, jax.nn.one_hot(ids, 9).sum(1) @ p["emb"]),
    ),
    "words under a mask": (
        MODEL,
        lambda p, ids: net(p, p["emb"][ids] * (ids > 0)[:, None]),
        [IDS],
        lambda p, ids: net(p, (jax.nn.one_hot(ids, 9) * (ids > 0)[:, None]) @ p["emb"]),
    ),
    "words or none": (
        MODEL,
        lambda p, ids: net(p, p["emb"][ids] * (ids > 0)[:, None]),
        [IDS],
        lambda p, ids: net(
            p, jnp.where((ids > 0)[:, None], jax.nn.one_hot(ids, 9), 0) @ p["emb"]
        ),
    ),
    "dropout of words": (
        MODEL,
        model,
        [IDS],
        lambda p, ids: net(p, with_noise(1) * jax.nn.one_hot(ids, 9) @ p["emb"]),
    ),
    "a lookup by masks": (MODEL, model, [IDS], lookup_by(by_masks)),
    "a lookup in a loop": (MODEL, model, [IDS], lookup_by(into_a_buffer)),
    "gates above a threshold": (
        EXPERTS,
        softmax_above(lambda gates: lax.top_k(gates, 3)[0][:, 2:]),
        [X],
        softmax_above(lambda gates: jnp.sort(gates, -1)[:, 1:2]),
    ),
    "the largest gate": (
        EXPERTS,
        functools.partial(experts, weights=lambda z: jax.nn.one_hot(z.argmax(-1), 4)),
        [X],
        functools.partial(
            experts, weights=lambda z: (z == z.max(-1, keepdims=True)).astype(z.dtype)
        ),
    ),
    "gates above a quantile": (
        EXPERTS,
        softmax_above(lambda gates: lax.top_k(gates, 3)[0][:, 2:]),
        [X],
        softmax_above(lambda gates: jnp.quantile(gates, 0.5, -1, keepdims=True)),
    ),
    "places of the largest gates": (
        EXPERTS,
        functools.partial(experts, weights=lambda z: in_one_hots(lax.top_k(z, 2)[1])),
        [X],
        functools.partial(experts, weights=lambda z: with_ones(lax.top_k(z, 2)[1])),
    ),
    "moments of rows": (
        MODEL,
        lambda p, ids: net(p, centered(p["emb"][ids])),
        [IDS],
        lambda p, ids: net(p, p["emb"][ids], product_and_moments),
    ),
    "heads of rows": (
        {"emb": floats(9, 6), "w": floats(3, 8), "out": floats(16, 3)},
        functools.partial(of_heads, shape=(5, 2, 3)),
        [IDS],
        functools.partial(of_heads, shape=(10, 3)),
    ),
    "sums of values divided": (
        GATED_HEADS,
        gated_attention,
        [X],
        functools.partial(gated_attention, weigh=weigh_and_divide),
    ),
    "factors of a head": (
        FACTORS,
        lambda p, x: net(p, x, lambda x, w: jnp.tanh(x @ w) @ p["a"]),
        [X],
        lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"]) @ (p["a"] @ p["out"]))),
    ),
    "targets by einsum": (
        NET,
        functools.partial(soft_targets, mean=lambda q, z: (q * z).sum()),
        [X, floats(5, 3)],
        soft_targets,
    ),
    "a maximum in a gradient": (NET, largest_apart, [X], with_gradient(largest_apart)),
    "squares by einsum": (
        CENTERS,
        distances,
        [X],
        functools.partial(distances, square=lambda z: jnp.einsum("ni,ni->n", z, z)),
    ),
    "a factor of a later matrix": (
        {"gate": floats(6, 8), **NET},
        lambda p, x: net(p, x, lambda x, w: (x @ w) * factors(p, x)),
        [X],
        lambda p, x: net(p, x, w=lambda w: w * factors(p, x)),
    ),
    "a sample of vectors of members": (
        {"r": floats(4, 6), **NET},
        of_vectors,
        [X],
        lambda p, x: lax.map(lambda x: of_vectors(p, x), x).sum(),
    ),
    "beside frozen columns": (
        NET,
        lambda p, x, _: net(p, x),
        [X, floats(6, 4)],
        beside_frozen,
    ),
    "beside frozen layers": (
        {"w": floats(6, 6), "out": floats(6, 3)},
        lambda p, x, frozen: net(p, jnp.tanh(x @ frozen)),
        [X, floats(6, 6)],
        lambda p, x, frozen: jnp.sum(
            layers_of(jnp.stack([frozen, p["w"]]), x) @ p["out"]
        ),
    ),
    "centered logits": (
        NET | {"scale": floats(3)},
        scaled_logits,
        [X, IDS],
        functools.partial(scaled_logits, change=lambda y: y - y.mean(-1)[:, None]),
    ),
    "a product in halves": (
        PRODUCT,
        lambda p, x: jnp.sum(jnp.tanh(x @ (p["a"] @ p["b"])) @ p["out"]),
        [X],
        lambda p, x: jnp.sum(
            jnp.tanh(in_halves(x, in_halves(p["a"], p["b"]))) @ p["out"]
        ),
    ),
    "a mask after a softmax": (
        NET | HEADED,
        functools.partial(attended, by=lambda weights, mask: weights),
        [floats(2, 6, 12), floats(2, 6)],
        functools.partial(attended, by=jnp.multiply),
    ),
    "gates of a top-k in the product": (
        EXPERTS,
        softmax_above(lambda gates: lax.top_k(gates, 3)[0][:, 2:]),
        [X],
        gates_first,
    ),
    "gates without a softmax": (
        EXPERTS,
        softmax_by(),
        [X],
        functools.partial(experts, weights=jax.nn.sigmoid),
    ),
    "large gates": (DENSE, softmax_by(), [X], softmax_above(lambda gates: 0.1)),
    "a quotient by a power": (
        DENSE,
        softmax_by(),
        [X],
        lambda p, x: experts(
            p, x, lambda y: jnp.exp(y) * jnp.exp(y).sum(-1, keepdims=True) ** -1.0
        ),
    ),
    "heads one by one": (
        HEADS,
        heads,
        [X],
        functools.partial(heads, scores=one_by_one),
    ),
    "heads first, one by one": (
        {**dict.fromkeys("qkv", floats(2, 6, 4)), "out": floats(8, 3)},
        heads_first,
        [X],
        functools.partial(heads_first, attend=mapped),
    ),
    "heads in turns": (
        HEADS,
        heads,
        [X],
        functools.partial(heads, project=project_in_turns),
    ),
    "padded outputs of a spectral norm": (
        NET,
        normed,
        [X],
        functools.partial(normed, product=with_padded_outputs),
    ),
    "members in turns with data": (
        {"w": floats(4, 6, 6), "out": floats(6, 3)},
        relational,
        [X, floats(4, 5, 5)],
        functools.partial(relational, over=lambda f, xs: lax.map(lambda x: f(*x), xs)),
    ),
    "learned queries that compete": (
        COMPETING,
        functools.partial(compete, axis=-1),
        [floats(4, 5, 6)],
        functools.partial(compete, axis=1),
    ),
    "members in turns": (
        members(TWO),
        of_members,
        [X],
        functools.partial(of_members, product=one_member_at_a_time),
    ),
    "layers by rows of an identity": (
        {"gain": floats(3, 6), "w": floats(3, 6, 6), **OUT},
        layers_by_one_hots,
        [X],
        lambda p, x: layers_by_one_hots(p, x, rows=(np.eye(3, dtype="f"),)),
    ),
    "layers by one-hots of their numbers": (
        {"gain": floats(3, 6), "w": floats(3, 6, 6), **OUT},
        layers_by_one_hots,
        [X],
        lambda p, x: layers_by_one_hots(p, x, rows=(np.arange(3),)),
    ),
    "members by their numbers": (
        members({**NET, "gate": floats(8)}),
        mean_of_members(gated),
        [X],
        in_a_loop(gated),
    ),
    "mixed matrices rolled": (
        EXPERTS,
        smear,
        [X],
        functools.partial(smear, roll=lambda x, axis: jnp.roll(x, 1, axis)),
    ),
    "mixed matrices rolled back": (
        EXPERTS,
        smear,
        [X],
        functools.partial(smear, roll=lambda x, axis: jnp.roll(x, -1, axis)),
    ),
    "one matrix of three by numbers": (
        {**NET, "numbers": floats(3), "w": floats(3, 6, 8)},
        weighed_matrices,
        [X],
        weighed_inputs,
    ),
    "norms beside a product as a sum": (
        {"w": floats(6, 8), "planes": floats(10, 8)},
        distances_to_planes,
        [X],
        functools.partial(
            distances_to_planes, product=lambda z, v: (z[:, None] * v).sum(-1)
        ),
    ),
    "queries by columns choose rows": (
        NET,
        chosen_rows,
        [X],
        functools.partial(
            chosen_rows, product=lambda x, w: lax.map(lambda c: x @ c, w.T).T
        ),
    ),
    "a state that starts with zeros": (
        DECODER,
        decoder,
        [floats(4, 5, 6)],
        functools.partial(decoder, start=lambda x: 0 * x),
    ),
    "a context of zeros": (
        {name: DECODER[name] for name in ("q", "k", "v", "o", "out")},
        with_null_context,
        [floats(4, 5, 6)],
        functools.partial(with_null_context, null=lambda x: 0 * x),
    ),
    "a step of a convolution": (
        {"k": floats(2, 6, 8), "v": floats(8), "out": floats(8, 3)},
        pooled_convolution,
        [floats(4, 5, 6)],
        step(pooled_convolution),
    ),
    "a complex power": (
        NET,
        turned,
        [X],
        functools.partial(turned, power=lambda z: jnp.exp(0.5j * jnp.log(z))),
    ),
    "copies of one matrix": (
        {"w": floats(3, 6, 8), "out": floats(8, 3)},
        copied,
        [X],
        functools.partial(copied, copies=lambda w: jnp.repeat(w[None], 3, 0)),
    ),
    "norms of rows": (
        {"emb": floats(9, 6), "a": floats(6, 5), "w": floats(5, 8), "out": floats(8)},
        over_norms,
        [IDS],
        functools.partial(over_norms, product=lambda z, v: (z * v).sum(-1)),
    ),
    "a constant beside data": (
        {**NET, "t1": floats(6, 5), "t2": floats(5, 8)},
        consistency,
        [X],
        functools.partial(consistency, last=lambda times: 0 * times + 1),
    ),
    "rows of a table of each layer": (
        {"emb": floats(9, 4, 6), "w": floats(4, 6, 8), "out": floats(8, 3)},
        tables_of_layers,
        [IDS],
        functools.partial(tables_of_layers, rows=lambda e, w, ids: (e @ w)[ids]),
    ),
    "features of a fixed graph": (
        NET,
        of_fixed_graph,
        [floats(7, 3)],
        functools.partial(of_fixed_graph, features=lambda y: FEATURES + 0 * jnp.sum(y)),
    ),
    "features of items": (
        NET,
        of_items,
        [integers(5)],
        functools.partial(of_items, features=lambda y: FEATURES + 0 * jnp.sum(y)),
    ),
    "eigenvalues one by one": (
        {"a": floats(6, 4), "w": floats(4, 8)},
        spectra,
        [floats(3, 5, 6)],
        functools.partial(spectra, each=lambda f: functools.partial(lax.map, f)),
    ),
    "rows beside moved ones": (
        {**NET, "a": floats(4, 6), "b": floats(3, 6)},
        resized,
        [X],
        functools.partial(resized, rows=lambda w: w[4:][1]),
    ),
    "a histogram of rows": (
        {"emb": floats(9, 6), "out": floats(6, 3)},
        by_counts,
        [IDS],
        functools.partial(by_counts, counts=lambda m: jnp.sum(m, 0)),
    ),
    "biases beside zeros": (
        {"q": floats(6, 4), "k": floats(6, 4), "bias": floats(6, 1), **OUT},
        with_relative,
        [X],
        functools.partial(
            with_relative, table=lambda w: jnp.zeros((7, 1)).at[:6].set(w)
        ),
    ),
    "a frozen matrix in a jit": (NET, before_frozen, [X], jax.jit(before_frozen)),
    "data in a jit": (MODEL, of_global_ids, [], jax.jit(of_global_ids)),
    "a metric in a loop": (NET, with_metric, [X], in_while_loop(with_metric)),
}
# Leaves of `SAME` that are refused, in one form or both.
REFUSED: dict[str, list[str]] = {
    "rolled": ["w"],
    "rows stacked": ["w"],
    "rows mapped": ["w"],
    "set in a flat buffer": ["emb", "out", "w"],
    "each set in a flat buffer": ["emb", "out", "w"],
    "cut at a number": ["emb", "out", "w"],
    "two rows interleaved": ["w"],
    "rows of other lengths mapped": ["w"],
    "flat rows gathered from devices": ["w"],
    "a block of one row": ["w"],
    "a flat vector": ["emb", "out", "w"],
    "rows across wide matrices": ["emb", "out", "w"],
    "buckets of wide matrices": ["emb", "out", "w"],
    "rows of a flat vector": ["emb", "out", "w"],
    "two rows of a flat vector": ["emb", "out", "w"],
    "buckets": ["emb", "out", "w"],
    "stacked": ["a", "b"],
    "set in a buffer": ["w"],
    "outputs one by one": ["w"],
    "outputs of layers one by one": ["w"],
    "a last vector by ones": ["v"],
    "a last vector by running sums": ["v"],
    "an identity after": ["w"],
    "a window of one, looked up": ["emb"],
    "a gradient of a softmax": ["w"],
    "noise of zero": ["pos", "project"],
    "a bias of positions": ["w"],
    "a logistic function by hand": ["rows"],
    "a penalty by a top-k": ["out"],
    "second derivatives": ["out"],
    "columns one by one in layers": ["w"],
    "constants on both sides": ["square"],
    "one row of what a constant moves": ["square"],
    "queries in one vector": ["out", "q", "rows", "v", "w"],
    "a threshold by a sort": ["gate", "w"],
    "members of convolutions": ["k"],
    "unstacked": ["w"],
    "columns of one vector in rows": ["emb", "out", "w"],
    "a low rank, transposed": ["a", "b"],
    "powers of two": ["w"],
    "a reciprocal": ["w"],
    "a logarithm": ["w"],
    "a sum of logarithms": ["w"],
    "exponentials over their mean": ["w"],
    "gates in a branch": ["w"],
    "experts added in a scan": ["w"],
    "experts as running sums": ["w"],
    "picked factors": ["a", "b"],
    "w[i, j]": ["w"],
    "words under a mask": ["emb"],
    "words or none": ["emb"],
    "dropout of words": ["emb"],
    "gates above a threshold": ["gate", "w"],
    "the largest gate": ["gate", "w"],
    "gates above a quantile": ["gate", "w"],
    "places of the largest gates": ["w"],
    "targets by einsum": ["out"],
    "squares by einsum": ["points"],
    "a factor of a later matrix": ["gate"],
    "a sample of vectors of members": ["r"],
    "centered logits": ["out"],
    "gates of a top-k in the product": ["w"],
    "gates without a softmax": ["w"],
    "large gates": ["w"],
    "a quotient by a power": ["w"],
    "members in turns with data": ["w"],
    "learned queries that compete": ["queries"],
    "members in turns": ["w"],
    "layers by rows of an identity": ["w"],
    "layers by one-hots of their numbers": ["w"],
    "members by their numbers": ["gate"],
    "mixed matrices rolled": ["w"],
    "mixed matrices rolled back": ["w"],
    "one matrix of three by numbers": ["w"],
    "norms beside a product as a sum": ["planes"],
    "queries by columns choose rows": ["w"],
    "a context of zeros": ["k"],
    "copies of one matrix": ["w"],
    "norms of rows": ["w"],
    "features of a fixed graph": ["w"],
    "features of items": ["w"],
    "rows beside moved ones": ["a", "b"],
}
OTHERWISE = {  # parameters, loss, arguments: and others of which the same holds
    "one sample": (
        ({**MODEL, "pos": floats(5, 6)}, positions, [integers(2, 5)]),
        ({**MODEL, "pos": floats(5, 6)}, positions, [integers(1, 5)]),
    ),
    "one sequence": (
        ({**MODEL, "pos": floats(5, 6)}, positions, [integers(2, 5)]),
        ({**MODEL, "pos": floats(5, 6)}, positions, [IDS]),
    ),
    "one sample of a power iteration": (
        (NET, spectral, [floats(2, 6), floats(8)]),
        (NET, spectral, [floats(1, 6), floats(8)]),
    ),
    "members": ((NET, net, [X]), (members(NET), mean_of_members(net), [X])),
    "members on a grid": (
        (GRID, of_grid, [floats(5, 3)]),
        (members(GRID), mean_of_members(of_grid), [floats(5, 3)]),
    ),
}


def reading(params, loss, args):
    """Labels and axes, without the batch and from the last axis on, by path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrices = jm.find_matrices(params, loss, *args, strict=False)
    found = {}
    for path, x in matrices.items():
        if x.doubt is not None:
            found[path] = "refused"
            continue
        sides = (x.axes.reduction, x.axes.output) if x.label == "muon" else ()
        found[path] = [[a - len(x.shape) for a in axes] for axes in sides]
    return found


ORDER = np.arange(126)[::-1]
UNFOLLOWED = {  # what becomes of a vector of three parameters, and is undone
    "permuted": lambda v: v[ORDER][ORDER],
    "rolled": lambda v: jnp.roll(jnp.roll(v, 5), -5),
    "rows transposed": lambda v: v.reshape(7, 18).T.reshape(-1).reshape(18, 7).T,
    "wide rows transposed": lambda v: v.reshape(6, 21).T.reshape(-1).reshape(21, 6).T,
    "rows joined": lambda v: jnp.concatenate([*v.reshape(7, 18)]),
    "rows stacked": lambda v: jnp.stack([*v.reshape(7, 18)]),
    "rows in a loop": lambda v: lax.fori_loop(
        0, 7, lambda i, y: y.at[i].set(v.reshape(7, 18)[i]), jnp.zeros((7, 18))
    ),
    "rows by numbers": lambda v: v[np.arange(126).reshape(7, 18)],
    "slices of a permutation in a loop": lambda v: lax.map(
        lambda i: lax.dynamic_slice(v[ORDER], (63 * i,), (63,)), jnp.arange(2)
    ).reshape(-1)[ORDER],
    "a permutation padded and cut": lambda v: jnp.pad(v[ORDER], (4, 4))[4:130][ORDER],
    "a part of a permutation, padded": lambda v: jnp.pad(v[ORDER][:100], (0, 26)),
    "written twice in a loop": lambda v: lax.fori_loop(
        0,
        2,
        lambda i, y: lax.dynamic_update_slice(y, v, (126 * i,)),
        jnp.zeros(252),
    )[:126],
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_an_order_that_is_not_followed(name):
    def loss(p, ids):
        vector, back = ravel_pytree(p)
        return model(back(UNFOLLOWED[name](vector).reshape(-1)), ids)

    with pytest.raises(ValueError, match="nothing says whether"):
        jm.find_matrices(MODEL, loss, IDS)


@pytest.mark.parametrize("name", SAME)
def test_another_form(name):
    """Another form has the same answer, or is refused; `REFUSED` names these."""
    params, loss, args, other = SAME[name]
    one, two = reading(params, loss, args), reading(params, other, args)
    same = {path for path in one if one[path] == two[path] != "refused"}
    refused = {path for path in one if "refused" in (one[path], two[path])}
    assert same | refused == {*one}, (one, two)
    assert refused == {*REFUSED.get(name, ())}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_sizes(name):
    one, two = OTHERWISE[name]
    assert reading(*one) == reading(*two)


LABELLED = {  # parameters, loss, arguments: and what is no kernel
    "functions of pairs": (
        {
            **dict.fromkeys("qkv", floats(6, 2, 4)),
            **{"z": floats(3, 6), "bias": floats(6, 2), "out": floats(8, 3)},
        },
        pairs,
        [X, floats(5, 5, 3)],
        {"out": "head"},
    ),
    "a graph": (
        {"w": floats(6, 8), "out": floats(8, 3)},
        lambda p, x, graph: (
            -jnp.sum(
                jax.nn.log_softmax(graph @ (jnp.tanh(graph @ x @ p["w"]) @ p["out"]))
            )
        ),
        [X, floats(5, 5)],
        {"out": "head"},
    ),
    "features of a teacher": (
        {"w": floats(6, 8), "out": floats(8, 4)},
        lambda p, x, teacher: jnp.sum(
            jnp.einsum("bqd,bkd->bqk", jnp.tanh(x @ p["w"]) @ p["out"], teacher) ** 2
        ),
        [floats(2, 5, 6), floats(2, 7, 4)],
        {"out": "head"},
    ),
    "positions and a matrix": (
        {"square": floats(6, 6), "pos": floats(5, 4), "project": floats(4, 6), **NET},
        added,
        [floats(2, 5, 6)],
        {"pos": "input", "out": "head"},
    ),
    "scales and a matrix": (
        {"square": floats(6, 6), "pos": floats(5, 4), "project": floats(4, 6), **NET},
        functools.partial(added, by=jnp.multiply),
        [floats(2, 5, 6)],
        {"pos": "input", "out": "head"},
    ),
    "queries in two attentions": (
        {
            **dict.fromkeys(("q", "k", "v", "keys"), floats(6, 4)),
            **{"rows": floats(9, 6), "values": floats(6, 8), "out": floats(8, 3)},
        },
        two_attentions,
        [X],
        {"rows": "input", "out": "head"},
    ),
    "a branch by an argmax": (
        {
            "gate": floats(6, 2),
            "a": floats(6, 8),
            "b": floats(6, 8),
            "out": floats(8, 3),
        },
        lambda p, x: jnp.sum(
            lax.switch(
                jnp.argmax(x.mean(0) @ p["gate"]),
                [lambda x, w=p[name]: jnp.tanh(x @ w) for name in "ab"],
                x,
            )
            @ p["out"]
        ),
        [X],
        {"gate": "router", "out": "head"},
    ),
}


def with_memory(p, x):
    """A memory (6, 8) that every turn of a loop rewrites."""

    def turn(memory, x):
        return 0.9 * memory + jnp.outer(x, x @ memory), x @ memory

    _, y = lax.scan(turn, p["w"], x)
    return jnp.sum(jnp.tanh(y) @ p["out"])


def by_five(p, x):
    product = functools.reduce(jnp.matmul, [p[name] for name in "abcde"])
    return jnp.sum(jnp.tanh(x @ product) @ p["out"])


def by_mixed_factors(p, x, gates):
    y = jnp.einsum("ti,th,hio->to", x, gates, p["a"] @ p["b"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


UNCERTAIN = {  # what is refused: parameters, loss, arguments, and the refused leaves
    "frozen rows in a loop": (
        {"w": floats(6, 8)},
        lambda p, x, frozen: jnp.sum(lax.map(lambda row: x @ p["w"] @ row, frozen)),
        [X, floats(3, 8)],
        "w",
    ),
    "queries before two matrices": (
        {"q": floats(5, 6), "b": floats(6, 7), "c": floats(7, 8), "out": floats(8, 3)},
        lambda p, x: jnp.sum((x * jnp.tanh(p["q"] @ p["b"] @ p["c"])) @ p["out"]),
        [floats(5, 8)],
        "qbc",
    ),
    "queries by constants": (
        {"q": floats(6, 7), "w": floats(7, 8), "out": floats(8, 3)},
        lambda p, x: jnp.sum(
            (x * jnp.tanh(np.ones((5, 6), np.float32) @ p["q"] @ p["w"])) @ p["out"]
        ),
        [floats(5, 8)],
        "q",
    ),
    "a first state": (NET, with_memory, [X], "w"),
    "products of many parameters": (
        dict(zip("abcde", map(floats, (6, 5, 4, 7, 8), (5, 4, 7, 8, 3)), strict=True))
        | {"out": floats(3, 2)},
        by_five,
        [X],
        "bcd",
    ),
    "stacked factors that gates mix": (
        {"a": floats(4, 6, 3), "b": floats(4, 3, 8), "out": floats(8, 3)},
        by_mixed_factors,
        [X, floats(5, 4)],
        "b",
    ),
    "waves beside functions of other parameters": (
        {
            **{"codes": floats(5, 7), "f": floats(7, 8), "w": floats(6, 8)},
            **{"v": floats(8, 9), "out": floats(9, 3)},
        },
        of_codes,
        [floats(5, 3)],
        "w",
    ),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_uncertain(name):
    params, loss, args, refused = UNCERTAIN[name]
    with pytest.warns(UserWarning, match="nothing says whether"):
        found = jm.find_matrices(params, loss, *args, strict=False)
    assert {path for path, x in found.items() if x.doubt is not None} == {*refused}


@pytest.mark.parametrize("name", LABELLED)
def test_label(name):
    params, loss, args, others = LABELLED[name]
    matrices = jm.find_matrices(params, loss, *args)
    found = {path: x.role for path, x in matrices.items() if x.label != "muon"}
    assert found == others


def test_an_axis_that_is_summed_before_a_product():
    """Of w (6, 4, 8), x (5, 6) @ w.sum(1) shows no side of axis 1."""

    def loss(p, x):
        return net(p, x, w=lambda w: w.sum(1))

    with pytest.raises(ValueError, match="axis 1 is "):
        jm.find_matrices({"w": floats(6, 4, 8), "out": floats(8, 3)}, loss, X)


def test_random_keys_beside_data_that_is_closed_over():
    x, keys = jnp.ones((5, 6)), jax.random.split(jax.random.key(0), 5)

    def linear(p, x):
        return jnp.sum((x @ p["out"]) ** 2)

    def loss(p, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
        return linear(p, x) + 0 * noise.sum()

    assert reading(OUT, loss, [keys]) == reading(OUT, linear, [X])


def test_a_solver_that_is_not_transposed():
    def loss(p, x):
        y = lax.custom_linear_solve(lambda y: p["a"] @ y, x[0], lambda _, b: b)
        return net(p, y[None])

    with pytest.raises(ValueError, match="it goes into custom_linear_solve"):
        jm.find_matrices({"a": floats(6, 6), **NET}, loss, X)


def test_a_use_without_a_product_is_a_use():
    """A sorted table, and a state in one of two branches."""

    def loss(p, x):
        x = lax.cond(x.sum() > 0, lambda: p["state"], lambda: jnp.tanh(x))
        return jnp.sum((x + jnp.sort(p["levels"])[0]) @ p["w"])

    found = jm.find_matrices(
        {
            "levels": floats(4, 6),
            "state": floats(5, 6),
            "w": floats(6, 8),
        },
        loss,
        X,
    )
    assert {found[name].label for name in ("levels", "state")} == {"adamw"}


def test_a_list_of_matrices_has_a_head():
    names = dict(zip("abc", LAYERS, strict=True))
    by_name = reading(names, lambda p, x: in_a_list([p["a"], p["b"], p["c"]], x), [X])
    assert [*reading(LAYERS, in_a_list, [X]).values()] == [*by_name.values()]
    assert not by_name["c"]


def test_tokens_beside_data():
    """A product with another matrix shows that what they lie beside is no weight."""

    def loss(p, x):
        z = jnp.concatenate([p["tokens"], x])
        return net(p, jax.nn.softmax(z @ p["key"] @ z.T) @ z)

    params = {"tokens": floats(3, 6), "key": floats(6, 6), **NET}
    found = jm.find_matrices(params, loss, X)
    assert {x: read.label for x, read in found.items()} == {
        "tokens": "adamw",
        "key": "muon",
        "w": "muon",
        "out": "adamw",
    }


def test_a_head_has_no_need_of_axes():
    """Two last products may disagree about axis 0, which no optimizer reads."""

    def loss(p, x):
        shared = jnp.einsum("bi,kio->kbo", x[0], p["head"])
        return jnp.sum(shared + jnp.einsum("kbi,kio->kbo", x, p["head"]))

    found = jm.find_matrices({"head": floats(3, 6, 8)}, loss, floats(3, 5, 6))
    assert found["head"].role == "head"


def test_a_branch_on_the_number_of_samples_is_an_error():
    """With one sample the loss is another one: neither reading is chosen silently."""

    def loss(p, x):
        if len(x) == 1:
            return jnp.sum(x @ p["out"].T @ p["w"].T)
        return net(p, x)

    square = {"w": floats(6, 6), "out": floats(6, 6)}
    assert jm.find_matrices(square, loss, floats(2, 6))["out"].role == "head"
    with pytest.raises(ValueError, match=r"one sample \(\w+\) and three \(\w+\) are"):
        jm.find_matrices(square, loss, floats(1, 6))


def test_a_branch_on_the_number_of_samples_that_changes_no_reading():
    def loss(p, x):
        return net(p, x) if len(x) == 1 else net(p, 2 * x)

    assert reading(NET, loss, [floats(1, 6)]) == reading(NET, net, [X])


def test_many_blocks_in_a_scan_in_a_scan():
    """A residual stream of ten products loses what others take: none becomes a head."""
    blocks, wide = [f"block_{i}" for i in range(9)], {"up": (6, 8), "down": (8, 6)}

    def mlp(x, p):
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return jax.nn.relu(x @ p["up"]) @ p["down"]

    def local(x, p):
        for name in blocks:
            x = x + mlp(x, p[name])
        return x, None

    def layer(x, p):
        x, _ = lax.scan(local, x, p["local"])
        return x + mlp(x, p["global"]), None

    def loss(p, ids):
        x, _ = lax.scan(layer, p["emb"][ids], p["layers"])
        return jnp.sum(jax.nn.softmax(2.0 * x @ p["out"])[:, 0])

    def floats_of(*lead):
        return {name: floats(*lead, *shape) for name, shape in wide.items()}

    layers = {"local": dict.fromkeys(blocks, floats_of(4, 2)), "global": floats_of(4)}
    params = {"emb": floats(9, 6), "layers": layers, "out": floats(6, 3)}
    matrices = jm.find_matrices(params, loss, IDS)
    others = {path for path, x in matrices.items() if x.label != "muon"}
    assert others == {"emb", "out"}
