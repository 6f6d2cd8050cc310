"""Small losses: other forms of them are read the same, or refused; and answers.

`CASES` has a program, perhaps another form of its loss, and what is refused. These are
the smallest that were once read in another way; `test_rewrites.py` has whole models.
"""

import warnings
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import jax_muon as jm
from tests.programs.parts import conv, floats, integers

pytestmark = pytest.mark.usefixtures("as_users_write")


class Case(NamedTuple):
    """A program, and what is right.

    Attributes:
      params, args, loss: the program.
      form: another form of the loss, which must be read the same; or None.
      refused: the leaves that are refused, in one form or both.
      roles: of the leaves that are no kernels, if there is no other form.
    """

    params: Any
    args: list[Any]
    loss: Callable[..., Any]
    form: Callable[..., Any] | None = None
    refused: str = ""
    roles: dict[str, str] | None = None


CASES: dict[str, Case] = {}


def add(name, *case):
    """Each name once."""
    assert name not in CASES, name
    CASES[name] = Case(*case)


def form(name, params, args, refused="", **change):
    """Register a loss and its form with other keywords, which refuses some leaves."""

    def register(loss):
        add(name, params, args, loss, partial(loss, **change), refused)
        return loss

    return register


def forms(params, args, loss, changes):
    """Register functions of a loss as its forms, with the leaves that they refuse."""
    for name, (change, *refused) in changes.items():
        add(name, params, args, loss, change(loss), *refused)


def answer(name, params, args, refused="", **roles):
    """Register a loss by its answer: `out` is the head, other leaves are kernels."""
    roles = {"out": "head"} | roles if "out" in params else roles

    def register(loss):
        add(name, params, args, loss, None, refused, roles)
        return loss

    return register


# --- one matrix -----------------------------------------------------------------------

NET = {"w": floats(6, 8), "out": floats(8, 3)}
TWO = {**NET, "v": floats(8, 8)}
X, IDS, ONES = floats(5, 6), integers(5), np.ones((5, 6), np.float32)
OUT = {"out": floats(6, 3)}


def net(p, x, product=jnp.matmul, w=lambda w: w):
    """Two layers, whose first matrix is `w(p["w"])`."""
    return jnp.sum(jnp.tanh(product(x, w(p["w"]))) @ p["out"])


def of(w):
    """The first matrix in another form."""
    return lambda net: partial(net, w=w)


def by(product):
    """The first product in another form."""
    return lambda net: partial(net, product=product)


def columns(x, w):
    """x @ w, one output at a time."""
    return lax.map(lambda column: x @ column, w.T).T


def on_devices(function, *x):
    """A function of each half of some arrays, on two devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("d"), "out_specs": jax.P(), "check_vma": False}
    return jax.shard_map(function, mesh=mesh, **specs)(*x)


def gathered_twice(w):
    """A matrix from its halves (3, 8), summed in halves (2, 3, 8) and gathered."""
    halves = lax.all_gather(w, "d")
    return lax.all_gather(lax.psum_scatter(halves, "d") / 2, "d", tiled=True)


def in_windows(w):
    return lax.reduce_window(w.repeat(2, 0), 0.0, lax.add, (2, 1), (2, 1), "VALID")


def along_an_axis(w):
    return jnp.take_along_axis(w, np.arange(6)[:, None].repeat(8, 1), 0)


def with_noise(w):
    return w + 0 * jax.random.normal(jax.random.key(0), jnp.shape(w))


def step(loss):
    """The loss after a step along its gradient."""

    def new(p, *args):
        slopes = jax.grad(loss)(p, *args)
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, p, slopes), *args)

    return new


def with_gradient(loss):
    def new(p, *args):
        value, slopes = jax.value_and_grad(loss)(p, *args)
        return value + optax.tree.norm(slopes)

    return new


def laplacian(loss):
    """The second derivatives of a function of each sample."""

    def new(p, x):
        second = jax.vmap(jax.hessian(lambda x: loss(p, x)))(x)
        return jnp.mean(jnp.trace(second, axis1=1, axis2=2) ** 2)

    return new


def quantized(_):
    """A head whose columns are scaled, as in eight bits, and scaled back."""

    def new(p, x):
        scale = jnp.abs(p["out"]).max(0)
        return jnp.sum((jnp.tanh(x @ p["w"]) @ (p["out"] / scale)) * scale)

    return new


forms(
    NET,
    [X],
    net,
    {
        "rolled": (of(lambda w: jnp.roll(jnp.roll(w, 1, 0), -1, 0)), "w"),
        "rows stacked": (of(lambda w: jnp.stack([*w])), "w"),
        "unstacked": (of(lambda w: jnp.stack(jnp.unstack(w))), "w"),
        "rows mapped": (of(lambda w: lax.map(lambda row: 2 * row, w)), "w"),
        "w[i, j]": (of(lambda w: w[np.arange(6)[:, None], np.arange(8)]), "w"),
        "set in a buffer": (of(lambda w: jnp.zeros((3, 6, 8)).at[1].set(w)[1]), "w"),
        "less a number": (of(lambda w: w.at[0].subtract(1.0)),),
        "an identity after": (of(lambda w: w @ np.eye(8, dtype="f")), "w"),
        "one row": (by(lambda x, w: x[:, :1] @ w[:1] + x[:, 1:] @ w[1:]), "w"),
        "outputs one by one": (by(columns), "w"),
        "second derivatives": (laplacian, "out"),
        "taken along an axis": (of(along_an_axis),),
        "noise in a stack": (of(lambda w: jnp.stack([w, with_noise(0 * w)])[0]),),
        "sums of windows": (of(in_windows),),
        "scattered and gathered": (of(partial(on_devices, gathered_twice)),),
        "scaled and back": (quantized,),
        "a step": (step,),
    },
)


def before_frozen(p, x):
    """A last product whose result a frozen matrix takes, which the loss closes over."""
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"] @ np.ones((3, 7), np.float32))


def straight_through(p, x):
    """The choice of an argmax, whose gradient is that of the softmax."""
    z = jax.nn.softmax(x @ p["w"])
    hard = jax.nn.one_hot(jnp.argmax(z, -1), 8)
    return jnp.sum(jnp.tanh((hard + z - lax.stop_gradient(z)) @ p["out"]) @ p["end"])


def before_numbers(_):
    """A basis that the loss makes, as in N-BEATS; or an identity."""

    def new(p, x):
        basis = jnp.arange(7.0) ** jnp.arange(3)[:, None]
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"] @ basis)

    return new


def in_windows_of_one(_):
    """A function of two elements, whose body is for scalars."""

    def new(p, x):
        y = lax.reduce_window(jnp.tanh(x @ p["w"]), 0.0, larger, (1, 1), (1, 1), "SAME")
        return jnp.sum(y @ p["out"] @ np.ones((3, 7), np.float32))

    return new


def larger(x, y):
    return jnp.where(x * x > y * y, x, y)


forms(
    NET,
    [X],
    before_frozen,
    {
        "in windows of one": (in_windows_of_one,),
        "a matrix of numbers": (before_numbers, "out"),
        "a frozen matrix in a jit": (jax.jit,),
    },
)
forms(
    NET | {"end": floats(3, 2)},
    [X],
    straight_through,
    {"a gradient of a choice": (with_gradient,)},
)


@form("beside frozen columns", NET, [X, floats(6, 4)], beside=True)
def frozen_columns(p, x, frozen, beside=False):
    whole = jnp.concatenate([frozen, p["w"]], 1)
    return net(p, x, w=lambda w: whole[:, 4:] if beside else w)


@form(
    "beside computed columns", NET, [X, floats(6, 4), integers(6, 2)], "w", beside=True
)
def computed_columns(p, x, frozen, codes, beside=False):
    computed = (frozen @ frozen.T @ frozen) + frozen[:, 0][codes].sum(1)[:, None]
    whole = jnp.concatenate([computed, p["w"]], 1)
    return net(p, x, w=lambda w: whole[:, 4:] if beside else w)


@form("forces of a vector", {**TWO, "out": floats(8)}, [X], last=jnp.matmul)
def forces(p, x, last=lambda y, o: y @ o[:, None]):
    """The gradient of an energy alone."""
    slopes = jax.grad(
        lambda x: last(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]), p["out"]).sum()
    )
    return jnp.sum(slopes(x) ** 2)


@form("queries by columns choose rows", NET, [X], "w", product=columns)
def chosen_rows(p, x, product=jnp.matmul):
    """Queries choose two rows of the data each."""
    queries = product(x, p["w"])
    scores = jnp.sum(queries[:, None] * queries[None], -1)
    _, rows = lax.top_k(scores, 2)
    return jnp.sum(jnp.tanh(x[rows].sum(1) @ p["w"]) @ p["out"])


# --- rows of a table, and all parameters in one vector --------------------------------

MODEL = {"emb": floats(9, 6), **NET}
ORDER = np.arange(126)[::-1]


def rows_of(table, ids):
    return table[ids]


def model(p, ids, rows=rows_of):
    return net(p, rows(p["emb"], ids))


def by_rows(rows):
    """The lookup in another form."""
    return lambda model: partial(model, rows=rows)


def by_masks(table, ids):
    return sum(jnp.where((ids == i)[:, None], table[i], 0) for i in range(9))


def by_a_window(table, ids):
    return conv(jax.nn.one_hot(ids, 9)[None], table[None])[0]


def into_a_buffer(table, ids):
    def row(t, rows):
        return rows.at[t].set(table[ids[t]])

    return lax.fori_loop(0, len(ids), row, jnp.zeros((len(ids), table.shape[1])))


def in_a_vector(change):
    """All parameters as `change` of one vector, which refuses all of them."""

    def new(p, ids):
        vector, back = ravel_pytree(p)
        return model(back(change(vector)), ids)

    return lambda _: new, "emb out w"


def twice_in_a_loop(v):
    def turn(i, y):
        return lax.dynamic_update_slice(y, v, (126 * i,))

    return lax.fori_loop(0, 2, turn, jnp.zeros(252))[:126]


forms(
    MODEL,
    [IDS],
    model,
    {
        "rows of an identity": (by_rows(lambda w, ids: jnp.eye(9)[ids] @ w),),
        "a lookup by masks": (by_rows(by_masks),),
        "a lookup in a loop": (by_rows(into_a_buffer),),
        "a window of one, looked up": (by_rows(by_a_window), "emb"),
        "dropout of words": (
            by_rows(lambda w, ids: with_noise(1) * jax.nn.one_hot(ids, 9) @ w),
            "emb",
        ),
        "a clipped one-hot": (
            by_rows(lambda w, ids: jnp.clip(jax.nn.one_hot(ids, 9), 0, 1) @ w),
        ),
        "a rounded one-hot": (
            by_rows(lambda w, ids: jnp.round(jax.nn.one_hot(ids, 9)) @ w),
            "emb",
        ),
        "a flat vector": in_a_vector(lambda v: 0.5 * v + 0.5 * v),
        "a vector in a buffer": in_a_vector(lambda v: jnp.zeros(130).at[4:].set(v)[4:]),
        "a vector permuted": in_a_vector(lambda v: v[ORDER][ORDER]),
        "a vector as rows": in_a_vector(
            lambda v: jnp.stack([*v.reshape(7, 18)]).reshape(-1)
        ),
        "a vector written twice": in_a_vector(twice_in_a_loop),
    },
)


@form(
    "bags of words",
    MODEL,
    [integers(5, 3)],
    bag=lambda table, ids: jax.nn.one_hot(ids, 9).sum(1) @ table,
)
def bags(p, ids, bag=lambda table, ids: table[ids].sum(1)):
    return net(p, bag(p["emb"], ids))


@form(
    "words under a mask",
    MODEL,
    [IDS],
    "emb",
    rows=lambda table, ids, mask: (jax.nn.one_hot(ids, 9) * mask) @ table,
)
@form(
    "words under a mask, cast",
    MODEL,
    [IDS],
    "emb",
    rows=lambda table, ids, mask: (jax.nn.one_hot(ids, 9) * mask).astype("f2") @ table,
)
def known_words(p, ids, rows=lambda table, ids, mask: table[ids] * mask):
    return net(p, rows(p["emb"], ids, (ids > 0)[:, None]))


def centered(x):
    return x - x.mean(-1, keepdims=True)


@form(
    "rows of a product of two",
    {"e": floats(9, 4), "b": floats(4, 6), **NET},
    [IDS],
    "b e",
    rows=lambda e, b, ids: (e @ b)[ids],
)
def of_factors(p, ids, rows=lambda e, b, ids: e[ids] @ b):
    return net(p, rows(p["e"], p["b"], ids))


@form(
    "norms of rows",
    {"emb": floats(9, 6), "a": floats(6, 5), "w": floats(5, 8), "out": floats(8)},
    [IDS],
    "w",
    product=lambda z, v: (z * v).sum(-1),
)
def over_norms(p, ids, product=jnp.matmul):
    rows = p["emb"][ids]
    z = jnp.tanh(rows @ p["a"]) @ p["w"]
    z = z * jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return jnp.sum(product(z, p["out"]) ** 2)


# --- several matrices in one array ----------------------------------------------------

EXPERTS = {"gate": floats(6, 4), "w": floats(4, 6, 8), "out": floats(8, 3)}
STACK = {"w": floats(3, 6, 8), "out": floats(8, 3)}


def members(tree):
    return jax.tree.map(lambda x: floats(4, *x.shape), tree)


def mean_of_members(loss):
    return lambda p, *args: jax.vmap(lambda p: loss(p, *args))(p).mean()


def one_at_a_time(function, *x):
    return lax.map(lambda x: function(*x), x)


@form("members in turns", members(TWO), [X], "w", over=one_at_a_time)
def of_members(p, x, over=lambda f, *xs: jax.vmap(f)(*xs)):
    """Members that see one input, and a layer of each after it."""
    h = jnp.tanh(jnp.einsum("ti,eio->eto", x, p["w"]))
    return jnp.sum(jnp.tanh(over(jnp.matmul, h, p["v"])) @ p["out"])


@form(
    "members in turns with data",
    {"w": floats(4, 6, 6), **OUT},
    [X, floats(4, 5, 5)],
    "w",
    over=one_at_a_time,
)
def relational(p, x, edges, over=lambda f, *xs: jax.vmap(f)(*xs)):
    """A matrix for each kind of edge."""
    y = over(lambda edge, w: edge @ (x @ w), edges, p["w"])
    return jnp.sum(jnp.tanh(y.sum(0)) @ p["out"])


def in_python(function):
    return lambda *x: jnp.stack([function(*one) for one in zip(*x, strict=True)])


@form(
    "members of convolutions",
    {"k": floats(2, 3, 6), "m": floats(2, 3, 6, 4)},
    [floats(5, 9, 3)],
    "k m",
    members=in_python,
)
def cnn_members(p, x, members=jax.vmap):
    """Two nets, which see the same images by a product and a convolution."""
    y = members(lambda k, m: conv(jnp.tanh(x @ k), m))(p["k"], p["m"])
    return jnp.mean(y**2)


@form("vectors of members", {"r": floats(4, 6), **NET}, [X], "r", over=lax.map)
def of_vectors(p, x, over=lambda function, x: function(x)):
    """Members that share their matrices, and have a vector each (BatchEnsemble)."""
    return over(lambda x: jax.vmap(lambda r: net(p, x * r))(p["r"]).sum(), x).sum()


@form("layers by columns", {"w": floats(3, 6, 6), **OUT}, [X], "w", product=columns)
def layers(p, x, product=jnp.matmul):
    y, _ = lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, p["w"])
    return jnp.sum(y @ p["out"])


@form("beside frozen layers", {"w": floats(6, 6), **OUT}, [X, floats(6, 6)], scan=True)
def frozen_layers(p, x, frozen, scan=False):
    if scan:
        return layers({"w": jnp.stack([frozen, p["w"]]), "out": p["out"]}, x)
    return net(p, jnp.tanh(x @ frozen))


@form("copies of a matrix", STACK, [X], "w", copy=lambda w: jnp.repeat(w[None], 3, 0))
def copied(p, x, copy=lambda w: jnp.stack([w] * 3)):
    """The first of three matrices, three times."""
    return jnp.sum(jnp.tanh(x @ copy(p["w"][0])).sum(0) @ p["out"])


@form(
    "one matrix of three by numbers",
    {**STACK, "numbers": floats(3)},
    [X],
    "w",
    product=lambda x, w, k: jnp.einsum("bki,kio->bo", x[:, None] * k[:, None], w),
)
def weighed(p, x, product=lambda x, w, k: x @ jnp.einsum("k,kio->io", k, w)):
    return jnp.sum(jnp.tanh(product(x, p["w"], p["numbers"])) @ p["out"])


@form(
    "an einsum of three, with as many keys as queries or fewer",
    {"w": floats(4, 6, 24), "out": floats(24, 3)},
    [floats(64, 4, 6), floats(4, 64, 64)],
    "w",
    keys=3,
)
def heads_out(p, v, weights, keys=64):
    """Sizes decide whether the sum over h comes with the one over e, or later."""
    weights, v = weights[:, :, :keys], v[:keys]
    y = jnp.einsum("hlm,mhe,hed->ld", weights, v, p["w"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


def styled(p, x, z):
    """As StyleGAN: a kernel (3, 6, 8) for each sample."""
    w = p["w"] * (z @ p["style"])[:, None, :, None]
    y = jax.vmap(lambda x, w: conv(x[None], w)[0])(x, w)
    return jnp.sum(jnp.tanh(y) @ p["out"])


def styled_outputs(p, x, z):
    w = p["w"] * (z @ p["style"])[:, None]
    return jnp.sum(jnp.tanh(jnp.einsum("bi,bio->bo", x, w)) @ p["out"])


STYLES = {"out": floats(8, 3), "style": floats(7, 6), "w": floats(3, 6, 8)}
answer("a kernel that data scales", STYLES, [floats(2, 9, 6), floats(2, 7)], "w")(
    styled
)
STYLES = {"out": floats(8, 3), "style": floats(7, 8), "w": floats(6, 8)}
answer("outputs that data scales", STYLES, [X, floats(5, 7)], "w")(styled_outputs)


@answer("a constant matrix for each head", {"w": floats(6, 4, 6)}, [X, floats(4, 6, 8)])
def frozen_heads(p, x, wo):
    q = jnp.einsum("bd,dhe->bhe", x, p["w"])
    return jnp.mean(jnp.tanh(jnp.einsum("bhe,hef->bhf", q, wo)) ** 2)


@answer(
    "a matrix (out, in) of three by numbers",
    {"w": floats(3, 8, 6), "numbers": floats(3), "out": floats(8, 3)},
    [X],
    "w",
    numbers="elementwise",
)
def weighed_rows(p, x):
    w = jnp.einsum("k,koi->oi", p["numbers"], p["w"])
    return jnp.sum(jnp.tanh(x @ w.T) @ p["out"])


def experts(p, x, weights=jax.nn.softmax):
    gates = weights(x @ p["gate"])
    y = jnp.einsum("te,teo->to", gates, jnp.einsum("ti,eio->teo", x, p["w"]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def above(threshold):
    """A softmax whose small gates are zero."""

    def softmax(x):
        gates = jax.nn.softmax(x)
        return jnp.where(gates >= threshold(gates), gates, 0)

    return lambda _: partial(experts, weights=softmax)


def gates_first(_):
    """Gates of a top-k, put into zeros, in one product with data and experts."""

    def new(p, x):
        weights, places = lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
        gates = jnp.zeros((5, 4)).at[jnp.arange(5)[:, None], places].set(weights)
        y = jnp.einsum("te,ti,eio->to", gates, x, p["w"])
        return jnp.sum(jnp.tanh(y) @ p["out"])

    return new


forms(
    EXPERTS,
    [X],
    above(lambda gates: lax.top_k(gates, 3)[0][:, 2:])(experts),
    {
        "gates above a threshold": (above(lambda g: jnp.sort(g, -1)[:, 1:2]), "gate w"),
        "gates above a quantile": (
            above(lambda gates: jnp.quantile(gates, 0.5, -1, keepdims=True)),
            "gate w",
        ),
        "gates of a top-k in the product": (gates_first, "w"),
        "gates above a top-k along the first axis": (
            above(lambda g: lax.top_k(g.T, 3, axis=0)[0][2:].T),
            "w",
        ),
        "gates above an approximate top-k along the first axis": (
            above(lambda g: lax.approx_max_k(g.T, 3, -2)[0][2:].T),
            "w",
        ),
    },
)


ANY = {"gate": floats(6, 4), "w": floats(6, 8, 4), "out": floats(8, 3)}
BETWEEN = {"gate": floats(6, 4), "w": floats(6, 4, 8), "down": floats(4, 8, 6), **OUT}


@answer("experts along the last axis", ANY, [X], "w")
def last_experts(p, x):
    y = jnp.einsum("ti,ioe->toe", x, p["w"])
    y = jnp.einsum("toe,te->to", y, jax.nn.softmax(x @ p["gate"]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer("experts between the axes", BETWEEN, [X], "w down")
def experts_between(p, x):
    y = jnp.einsum("ti,ieo->teo", x, p["w"]) * jax.nn.softmax(x @ p["gate"])[..., None]
    y = jnp.einsum("teo,eoi->ti", jnp.tanh(y), p["down"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


SCATTERED = {name: BETWEEN[name] for name in ("gate", "w")} | {"out": floats(8, 3)}


@answer("experts added by a scatter", SCATTERED, [X], "w")
def scattered_experts(p, x):
    y = jnp.einsum("ti,ieo->teo", x, p["w"]) * jax.nn.softmax(x @ p["gate"])[..., None]
    y = jnp.zeros((5, 8)).at[np.repeat(np.arange(5), 4)].add(y.reshape(20, 8))
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer("a row of constants", {"table": floats(8, 6), **OUT}, [X], "table")
def of_one_row(p, x):
    return jnp.sum(jnp.tanh(x + ONES[:1, :4].repeat(2, 1) @ p["table"]) @ p["out"])


@answer("inputs times gates", EXPERTS, [X], "w")
def gated_inputs(p, x):
    """Numbers times data may be gates of experts, or outputs of one wide matrix."""
    gates = jax.nn.relu(x @ p["gate"])
    z = (gates[..., None] * x[:, None]).astype("f2")
    return jnp.sum(jnp.tanh(jnp.einsum("tei,eio->to", z, p["w"])) @ p["out"])


@answer(
    "a sum over heads",
    dict.fromkeys("qkv", floats(6, 2, 4)) | {"out": floats(4, 3)},
    [X],
    "v",
)
def summed_heads(p, x):
    """Heads whose values are added: no experts."""
    q, k, v = (jnp.einsum("ti,ihd->htd", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2))
    return jnp.sum(jnp.tanh(jnp.einsum("hqk,hkd->qd", weights, v)) @ p["out"])


def is_largest(z):
    return (z == z.max(-1, keepdims=True)).astype(z.dtype)


forms(
    EXPERTS,
    [X],
    partial(experts, weights=lambda z: jax.nn.one_hot(z.argmax(-1), 4)),
    {
        "the largest gate": (
            lambda _: partial(experts, weights=is_largest),
            "gate w",
        )
    },
)


def in_one_hots(places):
    return jax.nn.one_hot(places, 4).sum(1)


def with_ones(places):
    return jnp.zeros((5, 4)).at[np.arange(5)[:, None], places].set(1.0)


@form("places of the largest gates", EXPERTS, [X], "w", gates=with_ones)
def of_places(p, x, gates=in_one_hots):
    return experts(p, x, lambda z: gates(lax.top_k(z, 2)[1]))


@answer("gates of a top-k by einsum", EXPERTS, [X], "w", gate="router")
def of_largest(p, x):
    def largest(z):
        values, places = lax.top_k(jax.nn.softmax(z), 2)
        return jnp.einsum("tke,tk->te", jax.nn.one_hot(places, 4), values)

    return experts(p, x, largest)


@form(
    "experts by ones", EXPERTS, [X], "w", add=lambda y: jnp.tensordot(ONES[0, :4], y, 1)
)
def summed_experts(p, x, add=lambda y: y.sum(0)):
    """Outputs (experts, tokens, out) times gates, added by `add`."""
    gates = jax.nn.softmax(x @ p["gate"]).T
    y = add(gates[..., None] * jnp.einsum("ti,eio->eto", x, p["w"]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


def in_groups(p, x):
    y = lax.ragged_dot(x, p["w"], jnp.array([2, 1, 0, 2]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


FOUR = {**NET, "w": floats(4, 6, 8)}
forms(FOUR, [X], in_groups, {"a gradient of groups": (with_gradient,)})


@form(
    "picked factors",
    {"a": floats(4, 6, 3), "b": floats(4, 3, 8), "out": floats(8, 3)},
    [X, IDS],
    "a b",
    product=lambda x, a, b, ids: jnp.einsum("ti,tio->to", x, (a @ b)[ids]),
)
def picked_factors(
    p,
    x,
    ids,
    product=lambda x, a, b, ids: jnp.einsum("ti,tih,tho->to", x, a[ids], b[ids]),
):
    return jnp.sum(jnp.tanh(product(x, p["a"], p["b"], ids)) @ p["out"])


@form("masked experts", STACK, [X, IDS], mask=lambda ids: (ids >= 0)[:, None, None])
def picked(p, x, ids, mask=lambda ids: 1.0):
    y = jnp.einsum("ti,tio->to", x, p["w"][ids] * mask(ids))
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer("a function of picked matrices", STACK, [X, IDS], "w")
def of_picked(p, x, ids):
    y = jnp.einsum("ti,tio->to", x, jnp.tanh(p["w"][ids]))
    return jnp.sum(jnp.tanh(y) @ p["out"])


# --- attention ------------------------------------------------------------------------

HEADS = dict.fromkeys("qkv", floats(6, 2, 4)) | {"out": floats(8, 3)}
SQUARES = dict.fromkeys(("q", "k", "v", "w"), floats(6, 6)) | OUT
GATED, QUERIES = {"gate": floats(6, 6), **SQUARES}, {"rows": floats(2, 6), **SQUARES}
SEQUENCES = floats(4, 5, 6)


def project(x, w):
    return jnp.einsum("ti,ihd->thd", x, w)


@form("heads one by one", HEADS, [X], head_by_head=True)
@form(
    "heads in turns",
    HEADS,
    [X],
    project=lambda x, w: lax.map(lambda w: x @ w, w.swapaxes(0, 1)).swapaxes(0, 1),
)
def attention(p, x, project=project, head_by_head=False):
    q, k, v = (project(x, p[name]) for name in "qkv")
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    if head_by_head:
        scores = jnp.stack([q[:, i] @ k[:, i].T for i in range(2)])
    y = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return jnp.sum(y.reshape(5, -1) @ p["out"])


@form(
    "keys and values at once",
    {"q": floats(4, 6, 5), "kv": floats(2, 4, 6, 5), "out": floats(20, 3)},
    [X],
    both=lambda x, kv: jnp.einsum("ti,jhid->jthd", x, kv),
)
def keys_and_values(
    p, x, both=lambda x, kv: [jnp.einsum("ti,hid->thd", x, y) for y in kv]
):
    """Heads in front of the inputs, as in Gemma."""
    q, (k, v) = jnp.einsum("ti,hid->thd", x, p["q"]), both(x, p["kv"])
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.sum(jnp.einsum("hqk,khd->qhd", weights, v).reshape(5, 20) @ p["out"])


@form(
    "a mask after a softmax",
    NET | {x: floats(12, 3, 5) for x in "qkv"} | {"o": floats(3, 5, 8)},
    [floats(2, 6, 12), floats(2, 6)],
    by=jnp.multiply,
)
def masked_attention(p, x, mask, by=lambda weights, mask: weights):
    """Attention of three heads, whose weights get a mask."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    y = jnp.einsum("bhts,bshk->bthk", by(weights, mask[:, None, None, :]), v)
    return net(p, jnp.einsum("bthk,hkd->btd", y, p["o"])[..., :6])


@form("sums of values divided", GATED, [X], divide_first=False)
def gated_attention(p, x, divide_first=True):
    """Attention whose values a gate of the queries scales."""
    q, k, v = ((x @ p[name]).reshape(5, 2, 3) for name in "qkv")
    e = jnp.exp(jnp.einsum("qhd,khd->hqk", q, k))
    if divide_first:
        y = jnp.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v)
    else:
        y = jnp.einsum("hqk,khd->qhd", e, v) / e.sum(-1).T[..., None]
    y = y.reshape(5, 6) * jax.nn.sigmoid(q.reshape(5, 6) @ p["gate"])
    return jnp.sum(jnp.tanh(y @ p["w"]) @ p["out"])


@form(
    "parts taken",
    {"qkv": floats(6, 3, 6), **OUT},
    [X],
    part=lambda y, i: jnp.take(y, i, 0),
)
def fused(p, x, part=lambda y, i: y[i]):
    y = jnp.einsum("ti,ijo->jto", x, p["qkv"])
    q, k, v = (part(y, i) for i in range(3))
    return jnp.sum(jax.nn.softmax(q @ k.T) @ v @ p["out"])


@form(
    "a sum by ones",
    QUERIES,
    [SEQUENCES],
    "rows",
    total=lambda z: (z @ ONES[0])[..., None],
)
def learned_queries(p, x, total=lambda z: z.sum(-1, keepdims=True)):
    """Queries in a residual stream, which are divided by their norms."""
    z = jnp.repeat(p["rows"][None], len(x), 0)
    q = z * lax.rsqrt(total(z * z)) @ p["q"]
    weights = jax.nn.softmax(jnp.einsum("bqi,bti->bqt", q, x @ p["k"]))
    z = z + jnp.einsum("bqt,bti->bqi", weights, x @ p["v"])
    return jnp.sum(jnp.tanh(z @ p["w"]) @ p["out"])


@form("a context of zeros", SQUARES, [SEQUENCES], nothing=lambda x: 0 * x)
def without_context(p, x, nothing=jnp.zeros_like):
    """Free guidance: the network once with its context, and once without."""

    def of(context):
        weights = jax.nn.softmax(x[:, 0] @ p["q"] @ (context @ p["k"]).mT)
        return weights @ (context @ p["v"]) @ p["w"] @ p["out"]

    return jnp.sum(of(x) ** 2) + jnp.sum(of(nothing(x)) ** 2)


@answer(
    "learned queries that compete",
    {x: QUERIES[x] for x in ("rows", "k", "v", "w", "out")},
    [SEQUENCES],
    "rows",
)
def slots(p, x):
    scores = jnp.einsum("qi,bti->bqt", p["rows"], x @ p["k"])
    y = jnp.einsum("bqt,bti->bqi", jax.nn.softmax(scores, 1), x @ p["v"])
    return jnp.sum(jnp.tanh(y @ p["w"]) @ p["out"])


@answer(
    "functions of pairs",
    {**HEADS, "z": floats(3, 6), "bias": floats(6, 2)},
    [X, floats(5, 5, 3)],
)
def pairs(p, x, z):
    """An attention to which functions of pairs are added."""
    q, k, v = (jnp.einsum("ti,ihd->htd", x, p[n]) for n in "qkv")
    scores = jnp.einsum("stc,ch->hst", jnp.tanh(z @ p["z"]), p["bias"])
    y = jax.nn.softmax(q @ k.swapaxes(1, 2) + scores) @ v
    return jnp.sum(jnp.tanh(y.swapaxes(0, 1).reshape(5, 8)) @ p["out"])


@answer(
    "queries that are their keys",
    {"rows": floats(4, 6), "k": floats(6, 7), "v": floats(6, 8), **NET},
    [X],
    "k rows v",
)
def of_itself(p, x):
    """Learned rows attend to each other by one matrix for queries and keys."""
    z = p["rows"] @ p["k"]
    y = jax.nn.softmax(z @ z.T) @ (p["rows"] @ p["v"])
    return jnp.sum(jnp.tanh(x @ p["w"] + y[0]) @ p["out"])


@answer(
    "tokens beside data",
    {"tokens": floats(3, 6), "key": floats(6, 6), **NET},
    [X],
    tokens="input",
)
def with_tokens(p, x):
    """A product with another matrix shows that what they lie beside is no weight."""
    z = jnp.concatenate([p["tokens"], x])
    return net(p, jax.nn.softmax(z @ p["key"] @ z.T) @ z)


@answer(
    "learned queries under dropout of their attention",
    {"q": floats(3, 6), "k": floats(6, 6), "v": floats(6, 6), **OUT},
    [floats(2, 5, 6)],
    "q",
)
def dropped(p, x):
    weights = jax.nn.softmax(p["q"] @ (x @ p["k"]).mT)
    weights = weights * jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.sum(weights @ (x @ p["v"]) @ p["out"])


# --- constants, positions and grids ---------------------------------------------------

GRID = {**NET, "bias": floats(8)}
PLACES = {"square": floats(6, 6), "pos": floats(5, 4), "project": floats(4, 6), **NET}
FEATURES = np.random.default_rng(1).normal(size=(7, 6)).astype("f")
EDGES = np.array([[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 3]])


def of_grid(p, y):
    """All parameters, on a grid of constants."""
    return jnp.mean((jnp.tanh(ONES @ p["w"] + p["bias"]) @ p["out"] - y) ** 2)


def positions(p, ids):
    return net(p, p["emb"][ids] + p["pos"])


def beside_zeros(y):
    return FEATURES + 0 * jnp.sum(y)


@form(
    "one row of what a constant moves",
    {**NET, "square": floats(6, 6)},
    [X],
    "square",
    row=lambda w: (ONES @ w)[3],
)
def moved(p, x, row=lambda w: ONES[0] @ w):
    return net(p, x * row(p["square"]))


@form("one sequence without a batch", {**MODEL, "pos": floats(5, 6)}, [IDS], batch=None)
def sequence(p, ids, batch=...):
    return net(p, p["emb"][ids][batch] + p["pos"])


@form("features of a fixed graph", NET, [floats(7, 3)], "w", features=beside_zeros)
def of_fixed_graph(p, y, features=lambda y: FEATURES):
    """A graph network of one graph, which the loss closes over."""
    z = (features(y) @ p["w"])[EDGES[0]]
    z = jax.nn.relu(jax.ops.segment_sum(z, EDGES[1], 7))
    return jnp.sum((z @ p["out"] - y) ** 2)


forms(
    MODEL, [], lambda p: model(p, np.arange(5)), {"data in a jit": (jax.jit, "emb w")}
)


@answer(
    "a bias of positions",
    {**TWO, "see": floats(4, 8), "bias": floats(8)},
    [floats(2, 5, 4)],
    "w",
    bias="elementwise",
)
def positioned(p, x):
    """Tokens on a constant grid, whose positions have a matrix and a bias."""
    y = x @ p["see"] + (ONES @ p["w"] + p["bias"])
    return jnp.sum(jnp.tanh(jnp.tanh(y) @ p["v"]) @ p["out"])


@answer(
    "picked rows of what a constant moves", {"w": floats(6, 6), **OUT}, [X, IDS], "w"
)
def picked_and_moved(p, x, ids):
    return jnp.sum(jnp.tanh(x * (ONES @ p["w"])[ids]) @ p["out"])


@answer(
    "resized rows",
    {**NET, "a": floats(4, 6), "b": floats(3, 6)},
    [X],
    "a",
    b="elementwise",
)
def resized(p, x):
    """Positions that a constant matrix has resized, beside others."""
    places = jnp.concatenate([FEATURES[:4, :4] @ p["a"], p["b"]])
    return net(p, x + places[5] + places[:4].sum(0))


@answer("positions and a matrix", PLACES, [floats(2, 5, 6)], "pos project")
def added(p, x):
    """Activations and a product of two parameters: positions, and a matrix."""
    return net(p, jnp.tanh(x @ p["square"]) + p["pos"] @ p["project"])


@answer(
    "queries by constants",
    {"q": floats(6, 7), "w": floats(7, 8), "out": floats(8, 3)},
    [floats(5, 8)],
    "q",
)
def by_constants(p, x):
    return jnp.sum((x * jnp.tanh(ONES @ p["q"] @ p["w"])) @ p["out"])


# --- parameters that meet each other or data ------------------------------------------

MATRIX = floats(6, 8)
IMAGE = {"start": floats(1, 5, 6), "k": floats(3, 6, 8), "out": floats(8, 3)}


@answer("functions of a matrix", NET, [X])
def of_functions(p, x):
    known = [lax.asinh, lax.acosh, lax.atanh, lax.ceil, lax.exp2, lax.expm1, lax.cbrt]
    known += [lax.tan, lax.cosh, lax.sign, lax.erf_inv, lax.cumprod, lax.cumlogsumexp]
    return net(p, x, w=lambda w: sum((f(w) for f in known), w))


@answer("rows times numbers", NET, [X], "w")
def by_rank_one(p, x):
    return net(p, x, lambda x, w: sum(x[:, i : i + 1] * w[i] for i in range(6)))


@answer(
    "a router's outputs along one axis more, times a learned number",
    {
        "numbers": floats(3),
        "choose": floats(6, 4),
        "up": floats(4, 6, 8),
        "out": NET["out"],
    },
    [X],
    numbers="elementwise",
    choose="router",
)
def numbered(p, x):
    scores = (p["numbers"][1] * (x @ p["choose"])[..., None])[..., 0]
    gates, chosen = lax.top_k(jax.nn.softmax(scores), 2)
    y = jnp.einsum("bi,bkio,bk->bo", x, p["up"][chosen], gates)
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer("rows times hidden numbers", {"v": floats(6, 6), "w": floats(6, 8)}, [X], "w")
def by_hidden_rank_one(p, x):
    """The product before such rows is no last one."""
    y = jnp.tanh(x @ p["v"])
    return jnp.sum(sum(y[:, i : i + 1] * p["w"][i] for i in range(6)) ** 2)


@answer("matches of two inputs", NET, [integers(5, 6), integers(5, 6)])
def of_matches(p, one, two):
    """No one-hot: any number of them are ones."""
    return net(p, (one == two).astype(jnp.float32))


@answer("a one-hot and noise", NET, [integers(5), X], "w")
def of_a_noisy_one_hot(p, ids, noise):
    return net(p, jax.nn.one_hot(ids, 6) + noise)


@answer("one sample times a matrix, summed", NET, [floats(6)], "w")
def of_one_sample(p, x):
    return net(p, x, lambda x, w: (x[:, None] * w).sum(0))


@answer("rows times each other", {**NET, "s": floats(2, 6)}, [X], "s")
def rows_that_meet(p, x):
    return net(p, x * (p["s"][0] * p["s"][1]))


@answer("a mean and a deviation", {**NET, "v": MATRIX}, [X, MATRIX], "v")
def drawn(p, x, noise):
    return net(p, x, w=lambda w: w + p["v"] * noise)


@answer("a product of elements", {**NET, "v": MATRIX}, [X], "v w")
def by_elements(p, x):
    return net(p, x, w=lambda w: w * p["v"])


@answer("a function of a parameter and data", NET, [X, MATRIX], "w")
def of_both(p, x, y):
    return net(p, x, w=lambda w: jnp.tanh(w + y))


@answer("factors that met data", TWO, [X, MATRIX, floats(8, 8)], "v w")
def both_met(p, x, y, z):
    return net(p, x, w=lambda w: (w + y) @ (p["v"] + z))


@answer("experts without gates", {**FOUR, "v": floats(4, 8, 8)}, [X], "v w")
def without_gates(p, x):
    y = jnp.tanh(jnp.einsum("ti,eio->teo", x, p["w"]))
    return jnp.sum(jnp.tanh(jnp.einsum("teo,eof->tf", y, p["v"])) @ p["out"])


@answer("a first image", IMAGE, [floats(2, 8)], "k start")
def first_image(p, z):
    h = conv(p["start"], p["k"]) + z[:, None]
    return jnp.sum(jnp.tanh(h) @ p["out"])


@answer("a first image for each sample", IMAGE, [floats(2, 8)], start="input")
def first_images(p, z):
    return first_image(p | {"start": jnp.repeat(p["start"], 2, 0)}, z)


@answer("a fixed filter", {"w": floats(3, 1, 6), **OUT}, [floats(2, 5, 6)], "w")
def filtered(p, x):
    kernel = jnp.tensordot(np.ones((3, 3), np.float32), p["w"], 1)
    return jnp.sum(jnp.tanh(conv(x, kernel, 6)) @ p["out"])


# --- factors, norms and last products -------------------------------------------------

THREE = [floats(6, 8), floats(8, 8), floats(8, 8)]


@form(
    "a low rank, transposed",
    {"w": floats(6, 8), "a": floats(9, 2), "b": floats(2, 8), "out": floats(9, 3)},
    [X],
    "a b",
    product=lambda h, a, b: h @ (a @ b).T,
)
def low_rank(p, x, product=lambda h, a, b: (h @ b.T) @ a.T):
    return jnp.sum(jnp.tanh(product(jnp.tanh(x @ p["w"]), p["a"], p["b"])) @ p["out"])


@form(
    "factors of a head",
    {"w": floats(6, 8), "a": floats(8, 4), "out": floats(4, 3)},
    [X],
    product=lambda h, a, b: h @ (a @ b),
)
def two_factors(p, x, product=lambda h, a, b: h @ a @ b):
    return jnp.sum(jnp.tanh(product(jnp.tanh(x @ p["w"]), p["a"], p["out"])))


@form(
    "noise before a product of two",
    {"a": floats(6, 4), "b": floats(4, 8), **NET},
    [X],
    noise=with_noise,
)
def merged(p, x, noise=lambda w: w):
    return net(p, x, w=lambda w: noise(w) + p["a"] @ p["b"])


@form("factors", {**NET, "gate": floats(6, 8)}, [X], "gate", inside=True)
def scaled(p, x, inside=False):
    factors = jax.nn.sigmoid(x @ p["gate"]).mean(0)
    if inside:
        return net(p, x, w=lambda w: w * factors)
    return net(p, x, lambda x, w: (x @ w) * factors)


@form("targets by einsum", NET, [X, floats(5, 3)], "out", by_einsum=True)
def soft_targets(p, x, q, by_einsum=False):
    logs = jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["out"])
    return -jnp.einsum("bc,bc->", q, logs) if by_einsum else -(q * logs).sum()


@form("centered logits", NET | {"scale": floats(3)}, [X, IDS], "out", change=centered)
def scaled_logits(p, x, ids, change=lambda y: y):
    y = jnp.tanh(x @ p["w"]) @ p["out"] * p["scale"]
    return -jax.nn.log_softmax(change(y))[jnp.arange(5), ids].sum()


@form(
    "norms beside a product as a sum",
    {"w": floats(6, 8), "planes": floats(10, 8)},
    [X],
    "planes",
    product=lambda z, v: (z[:, None] * v).sum(-1),
)
def to_planes(p, x, product=lambda z, v: z @ v.T):
    """Hyperbolic planes (10, 8), as heads of hyperbolic networks have them."""
    y = product(jnp.tanh(x @ p["w"]), p["planes"])
    return jnp.sum((y * jnp.linalg.norm(p["planes"], axis=-1)) ** 2)


@answer("distances by einsum", {"c": floats(6, 6), **NET}, [X], "c")
def distances(p, x):
    """Distances of data to inducing points."""
    far = jnp.sum(x**2, -1)[:, None] + jnp.einsum("ni,ni->n", p["c"], p["c"])
    return net(p, jnp.exp(2 * x @ p["c"].T - far))


def mlp(layers, x):
    return jnp.tanh(x @ layers[0]) @ layers[1]


@form(
    "networks in a comprehension",
    {"a": THREE[:2], "b": THREE[:2], "out": floats(8, 3)},
    [X],
    both=lambda p, x: [mlp(p[name], x) for name in "ab"],
)
def critics(p, x, both=lambda p, x: [mlp(p["a"], x), mlp(p["b"], x)]):
    """Two networks; what follows takes the result of the first."""
    a, b = both(p, x)
    return jnp.sum(jnp.tanh(a) @ p["out"]) + jnp.sum(b**2)


@answer(
    "before a frozen convolution",
    {"w": floats(6, 8), "v": floats(8, 4)},
    [floats(2, 5, 6), floats(3, 4, 7)],
)
def before_frozen_filters(p, x, filters):
    return jnp.sum(conv(jnp.tanh(x @ p["w"]) @ p["v"], filters) ** 2)


@answer(
    "scores of items",
    {"w": floats(6, 8), "items": floats(9, 8)},
    [X, IDS],
    "w",
    items="embedding",
)
def of_items(p, x, ids):
    return jnp.sum(jnp.sum(x @ p["w"] * p["items"][ids], -1) ** 2)


@answer("a list", THREE, [X], **{"2": "head"})
def in_a_list(p, x):
    return jnp.sum(jnp.tanh(mlp(p, x)) @ p[2])


@answer("a graph", NET, [X, floats(5, 5)])
def of_graph(p, x, graph):
    y = graph @ (jnp.tanh(graph @ x @ p["w"]) @ p["out"])
    return -jnp.sum(jax.nn.log_softmax(y))


@answer(
    "features of a teacher",
    {"w": floats(6, 8), "out": floats(8, 4)},
    [floats(2, 5, 6), floats(2, 7, 4)],
)
def of_teacher(p, x, teacher):
    y = jnp.tanh(x @ p["w"]) @ p["out"]
    return jnp.sum(jnp.einsum("bqd,bkd->bqk", y, teacher) ** 2)


@answer(
    "a branch by an argmax",
    {**NET, "gate": floats(6, 2), "v": floats(6, 8)},
    [X],
    gate="router",
)
def by_the_argmax(p, x):
    branches = [lambda x, w=p[name]: jnp.tanh(x @ w) for name in "vw"]
    chosen = jnp.argmax(x.mean(0) @ p["gate"])
    return jnp.sum(lax.switch(chosen, branches, x) @ p["out"])


@answer("thresholds", {**NET, "v": floats(6, 8)}, [X])
def above_thresholds(p, x):
    """Another layer says from which number on outputs count: no choice among them."""
    y = jnp.where(x[:, :1] >= jnp.cumsum(jnp.exp(x @ p["v"]), -1), x @ p["w"], 0)
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer(
    "uses without a product",
    {"levels": floats(4, 6), "state": floats(5, 6), **OUT},
    [X],
    levels="elementwise",
    state="input",
)
def sorted_or_not(p, x):
    """A sorted table, and a state in one of two branches."""
    x = lax.cond(x.sum() > 0, lambda: p["state"], lambda: jnp.tanh(x))
    return jnp.sum((x + jnp.sort(p["levels"])[0]) @ p["out"])


@answer("two last products", {"out": floats(3, 6, 8)}, [floats(3, 5, 6)])
def last_products(p, x):
    """They may disagree about axis 0, which no optimizer reads."""
    shared = jnp.einsum("bi,kio->kbo", x[0], p["out"])
    return jnp.sum(shared + jnp.einsum("kbi,kio->kbo", x, p["out"]))


@answer("frozen rows in a loop", {"w": floats(6, 8)}, [X, floats(3, 8)], "w")
def before_rows(p, x, frozen):
    return jnp.sum(lax.map(lambda row: x @ p["w"] @ row, frozen))


@answer("a first state", NET, [X], "w")
def with_memory(p, x):
    """A memory (6, 8) that every turn of a loop rewrites."""

    def turn(memory, x):
        return 0.9 * memory + jnp.outer(x, x @ memory), x @ memory

    _, y = lax.scan(turn, p["w"], x)
    return jnp.sum(jnp.tanh(y) @ p["out"])


@answer(
    "products of many parameters",
    dict(zip("abcde", map(floats, (6, 5, 4, 7, 8), (5, 4, 7, 8, 3)), strict=True))
    | {"out": floats(3, 2)},
    [X],
    "b c d",
)
def by_five(p, x):
    product = reduce(jnp.matmul, [p[name] for name in "abcde"])
    return jnp.sum(jnp.tanh(x @ product) @ p["out"])


@answer(
    "stacked factors that gates mix",
    {"a": floats(4, 6, 3), "b": floats(4, 3, 8), "out": floats(8, 3)},
    [X, floats(5, 4)],
    "a b",
)
def by_mixed_factors(p, x, gates):
    y = jnp.einsum("ti,th,hio->to", x, gates, p["a"] @ p["b"])
    return jnp.sum(jnp.tanh(y) @ p["out"])


# --- tests ----------------------------------------------------------------------------


def reading(params, loss, args):
    """Labels and axes, without the batch and from the last axis on, by path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrices = jm.find_matrices(params, loss, *args, strict=False)
    found = {}
    for path, x in matrices.items():
        sides = (x.axes.reduction, x.axes.output) if x.label == "muon" else ()
        axes = [[a - len(x.shape) for a in axes] for axes in sides]
        found[path] = axes if x.doubt is None else "refused"
    return found


@pytest.mark.parametrize("name", [x for x in CASES if CASES[x].form])
def test_another_form(name):
    """Another form has the same answer, or is refused."""
    params, args, *losses, refused, _ = CASES[name]
    first, second = (reading(params, loss, args) for loss in losses)
    different = {x for x in first if first[x] != second[x] or first[x] == "refused"}
    assert different == {*refused.split()}
    assert all("refused" in (first[x], second[x]) for x in different)


@pytest.mark.parametrize("name", [x for x in CASES if not CASES[x].form])
@pytest.mark.filterwarnings("ignore:.*nothing says whether")
def test_answer(name):
    params, args, loss, _, refused, roles = CASES[name]
    found = jm.find_matrices(params, loss, *args, strict=False)
    doubts = {x.path for x in found.values() if x.doubt is not None}
    others = [x for x in found.values() if x.label != "muon" and x.doubt is None]
    assert doubts == {*refused.split()}
    assert {x.path: x.role for x in others} == roles


SPECTRAL = NET, lambda p, x, u: net(p, x, w=lambda w: w / power(w, u))


def power(w, u):
    """The norm of a matrix by one turn of a power iteration."""
    v = lax.stop_gradient(w @ u)
    return v @ w @ lax.stop_gradient(w.T @ v)


@pytest.mark.parametrize(
    ("program", "several", "single"),
    [
        (({**MODEL, "pos": floats(5, 6)}, positions), integers(2, 5), integers(1, 5)),
        (({**MODEL, "pos": floats(5, 6)}, positions), integers(2, 5), IDS),
        (SPECTRAL, floats(2, 6), floats(1, 6)),
    ],
)
def test_other_sizes(program, several, single):
    rest = [floats(8)] if program is SPECTRAL else []
    assert reading(*program, [several, *rest]) == reading(*program, [single, *rest])


def test_members_of_a_grid():
    found = reading(members(GRID), mean_of_members(of_grid), [floats(5, 3)])
    assert found == reading(GRID, of_grid, [floats(5, 3)])


def test_random_keys_beside_data_that_is_closed_over():
    x, keys = jnp.ones((5, 6)), jax.random.split(jax.random.key(0), 5)

    def linear(p, x):
        return jnp.sum((x @ p["out"]) ** 2)

    def loss(p, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
        return linear(p, x) + 0 * noise.sum()

    assert reading(OUT, loss, [keys]) == reading(OUT, linear, [X])


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
    params = {"emb": floats(9, 6), "layers": layers, **OUT}
    matrices = jm.find_matrices(params, loss, IDS)
    others = {path for path, x in matrices.items() if x.label != "muon"}
    assert others == {"emb", "out"}
