"""`find_matrices(..., heads="apart")`: each attention head is a matrix."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests.programs.parts import floats, integers, rms

pytestmark = pytest.mark.usefixtures("as_users_write")

BATCH, TIME, WIDTH, HEADS, HEAD = 2, 8, 24, 4, 6
SQUARE = floats(WIDTH, WIDTH)
TABLES = {"emb": floats(90, WIDTH), "head": floats(WIDTH, 90)}


def attend(q, k, v, cap=lambda scores: scores):
    scores = cap(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def flat(x):
    return x.reshape(BATCH, TIME, -1)


def in_heads(*arrays):
    return [x.reshape(BATCH, TIME, -1, HEAD) for x in arrays]


def separate(x, p):
    return flat(attend(*in_heads(*(x @ p[n] for n in "qkv")))) @ p["o"]


def capped(x, p):
    """Scores of at most 50, as in Gemma 2."""
    parts = in_heads(*(x @ p[n] for n in "qkv"))
    return flat(attend(*parts, lambda scores: 50 * jnp.tanh(scores / 50))) @ p["o"]


def shared_keys(x, p):
    q, k, v = in_heads(*(x @ p[n] for n in "qkv"))
    return flat(attend(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))) @ p["o"]


def one_key(x, p):
    (q,), k, v = in_heads(x @ p["q"]), x @ p["k"], x @ p["v"]
    weights = jax.nn.softmax(jnp.einsum("bthk,bsk->bhts", q, k))
    return flat(jnp.einsum("bhts,bsk->bthk", weights, v)) @ p["o"]


def fused(x, p):
    parts = in_heads(*jnp.split(x @ p["qkv"], [WIDTH, WIDTH + 12], -1))
    return flat(jax.nn.dot_product_attention(*parts)) @ p["o"]


def fused_with_an_axis(x, p):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", x, p["qkv"]), 2, 0)
    return jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"])


def fused_in_each_head(x, p):
    parts = (x @ p["qkv"]).reshape(BATCH, TIME, HEADS, 3 * HEAD)
    return flat(attend(*jnp.split(parts, 3, -1))) @ p["o"]


def turned(x):
    """Rotary positions: halves of a head."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * 0.6 - b * 0.8, a * 0.8 + b * 0.6], -1)


def dense_general(x, p):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    return jnp.einsum("bthk,hkd->btd", attend(turned(q), turned(k), v), p["o"])


def latent(x, p):
    """DeepSeek: latents of queries, and of keys and values; one key has positions."""
    q = (rms(x @ p["q_a"]) @ p["q_b"]).reshape(BATCH, TIME, HEADS, 9)
    down = x @ p["kv_a"]
    up = (rms(down[..., :10]) @ p["kv_b"]).reshape(BATCH, TIME, HEADS, 11)
    shape = BATCH, TIME, HEADS, 3
    positions = jnp.broadcast_to(down[..., None, 10:], shape)
    k = jnp.concatenate([up[..., :6], positions], -1)
    return flat(attend(q, k, up[..., 6:])) @ p["o"]


def scanned(x, p):
    step = lambda x, layer: (x + separate(x, layer), None)  # noqa: E731
    return lax.scan(step, x, p["layers"])[0]


# A layer, the shapes of its parameters, and the matrices (number, in, out) by path.
LAYERS = [
    (
        separate,
        dict.fromkeys("qkvo", SQUARE),
        dict.fromkeys("kqv", (4, 24, 6)) | {"o": (1, 24, 24)},
    ),
    (
        capped,
        dict.fromkeys("qkvo", SQUARE),
        dict.fromkeys("kqv", (4, 24, 6)) | {"o": (1, 24, 24)},
    ),
    (
        shared_keys,
        {"q": SQUARE, "k": floats(WIDTH, 12), "v": floats(WIDTH, 12), "o": SQUARE},
        {"q": (4, 24, 6), "k": (2, 24, 6), "v": (2, 24, 6), "o": (1, 24, 24)},
    ),
    (
        one_key,
        {"q": SQUARE, "k": floats(WIDTH, 6), "v": floats(WIDTH, 6), "o": SQUARE},
        {"q": (4, 24, 6), "k": (1, 24, 6), "v": (1, 24, 6), "o": (1, 24, 24)},
    ),
    (
        fused,
        {"qkv": floats(WIDTH, 48), "o": SQUARE},
        {
            "qkv/part_0": (4, 24, 6),
            "qkv/part_1": (2, 24, 6),
            "qkv/part_2": (2, 24, 6),
            "o": (1, 24, 24),
        },
    ),
    (
        fused_with_an_axis,
        {"qkv": floats(WIDTH, 3, HEADS, HEAD), "o": floats(HEADS, HEAD, WIDTH)},
        {"qkv": (12, 24, 6), "o": (1, 24, 24)},
    ),
    (
        fused_in_each_head,
        {"qkv": floats(WIDTH, 72), "o": SQUARE},
        {"qkv": (4, 24, 18), "o": (1, 24, 24)},
    ),
    (
        dense_general,
        {n: floats(WIDTH, HEADS, HEAD) for n in "qkv"}
        | {"o": floats(HEADS, HEAD, WIDTH)},
        dict.fromkeys("kqv", (4, 24, 6)) | {"o": (1, 24, 24)},
    ),
    (
        latent,
        {
            "q_a": floats(WIDTH, 12),
            "q_b": floats(12, 36),
            "kv_a": floats(WIDTH, 13),
            "kv_b": floats(10, 44),
            "o": floats(20, WIDTH),
        },
        {
            "q_a": (1, 24, 12),
            "q_b": (4, 12, 9),
            "kv_a": (1, 24, 13),
            "kv_b": (4, 10, 11),
            "o": (1, 20, 24),
        },
    ),
    (
        scanned,
        {"layers": dict.fromkeys("qkvo", floats(3, WIDTH, WIDTH))},
        {f"layers/{n}": (12, 24, 6) for n in "kqv"} | {"layers/o": (3, 24, 24)},
    ),
]


def loss_of(layer):
    def loss(p, ids):
        x = p["emb"][ids]
        return jnp.mean((jnp.tanh(x + layer(x, p)) @ p["head"]) ** 2)

    return loss


def find(layer, params, **options):
    ids = integers(BATCH, TIME)
    return jm.find_matrices(TABLES | params, loss_of(layer), ids, **options)


@pytest.mark.parametrize(("layer", "params", "expected"), LAYERS)
def test_heads_that_the_loss_shows(layer, params, expected):
    matrices = find(layer, params, heads="apart")
    tx = jm.muon(0.02, adamw=optax.adamw(1e-3), matrices=matrices)
    leaves = jm.describe(tx, TABLES | params).parameters
    sizes = {x.parameter.path: x.matrices for x in leaves if x.matrices}
    assert sizes == expected
    joined = find(layer, params)
    assert not joined.splits and {x.label for x in joined.values()} == {"muon", "adamw"}


def test_numbers_of_a_split_by_hand(rng):
    """And the table says which heads it found."""
    params = TABLES | dict.fromkeys("qkvo", SQUARE)
    params = {k: jnp.asarray(rng.normal(size=x.shape)) for k, x in params.items()}
    heads = find(separate, params, heads="apart")
    assert "; heads apart: 4" in heads["q"].reason and "apart" not in heads["o"].reason
    by_hand = find(separate, params, splits=dict.fromkeys("qkv", jm.Split.heads(4)))
    txs = [
        jm.muon(0.02, adamw=optax.adamw(1e-3), matrices=x, dtype="float32")
        for x in (heads, by_hand)
    ]
    one, two = (tx.update(params, tx.init(params), params)[0] for tx in txs)
    assert all((one[k] == two[k]).all() for k in params)


def no_heads(x, p):
    weights = jax.nn.softmax((x @ p["q"]) @ jnp.swapaxes(x @ p["k"], 1, 2))
    return weights @ (x @ p["v"]) @ p["o"]


ERRORS = [
    (no_heads, {}, r"no heads of parameter 'q' of shape \(24, 24\); use splits="),
    (lambda x, p: jnp.tanh(x @ p["q"]) @ p["o"], {"rules": {}}, "shows no attention"),
    (separate, {"joins": 2}, "joins=2; expected None with heads='apart'"),
]


@pytest.mark.parametrize(("layer", "options", "words"), ERRORS)
def test_heads_that_it_does_not_show(layer, options, words):
    names = "qo" if "rules" in options else "qkvo"
    with pytest.raises(ValueError, match=words):
        find(layer, dict.fromkeys(names, SQUARE), heads="apart", **options)
    split = {"splits": {"q": jm.Split.heads(4)}}
    if layer is no_heads:
        assert find(layer, dict.fromkeys("qkvo", SQUARE), heads="apart", **split)


def test_a_path_that_is_a_part_of_another():
    def two(x, p):
        return separate(x, p) + separate(x, p["more"])

    layer = dict.fromkeys("qkvo", SQUARE)
    with pytest.raises(ValueError, match="'k' is a part of 'more/k', so no"):
        find(two, layer | {"more": layer}, heads="apart")


@pytest.mark.parametrize("numbers", [((0,), (2,)), ((0,), (1, 2)), ((1, 2), (0,))])
def test_numbers_of_rules_with_heads_on_any_side(numbers):
    """Heads of (24, 4, 6) that rules have in the batch already are there once."""
    params = {n: floats(WIDTH, HEADS, HEAD) for n in "qkv"} | {"o": SQUARE}

    def loss(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        return jnp.mean(jnp.tanh(flat(attend(q, k, v)) @ p["o"]) ** 2)

    rules = {"q": MuonDimensionNumbers(*numbers)}
    x = floats(BATCH, TIME, WIDTH)
    found = jm.find_matrices(params, loss, x, rules=rules, heads="apart")
    sides = (WIDTH, HEAD) if numbers[0] == (0,) else (HEAD, WIDTH)
    assert found["q"].sizes == (HEADS, *sides)
    assert found["k"].sizes == (HEADS, WIDTH, HEAD)
