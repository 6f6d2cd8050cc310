"""Joins: which matrices become one, and that everything else still sees single ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.joins import map_blocks
from tests import oracle
from tests.reading import reader


def blocks_of(shapes, joins):
    tree = {
        name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()
    }
    return jm.read(tree, joins=joins).blocks(sorted(shapes))


def layers(count, shape=(4, 6), kind="q"):
    return {f"blocks/{i}/attn/{kind}": shape for i in range(count)}


def joined_names(shapes, joins):
    """The joins with more than one member, by name."""
    names = sorted(shapes)
    return [
        tuple(names[leaf] for leaf in block.leaves)
        for block in blocks_of(shapes, joins)
        if block.joined > 1
    ]


def test_layers_are_paired_in_the_order_of_their_numbers():
    """Block 10 comes after block 9, not after block 1; the last has no partner."""
    pairs = joined_names(layers(11), {"blocks/{i}/attn/q": 2})
    numbers = [tuple(int(name.split("/")[1]) for name in pair) for pair in pairs]
    assert sorted(numbers) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_a_pattern_pairs_each_kind_by_itself():
    shapes = layers(2) | layers(2, kind="k")
    assert joined_names(shapes, {"blocks/{i}/attn/*": 2}) == [
        ("blocks/0/attn/k", "blocks/1/attn/k"),
        ("blocks/0/attn/q", "blocks/1/attn/q"),
    ]


@pytest.mark.parametrize("name", ["blocks/{i}/attn/q", "Block_{i}/query/kernel"])
def test_a_number_alone_joins_queries_keys_and_values(name):
    shapes = {name.format(i=i): (4, 6) for i in range(3)} | {"blocks/0/mlp/up": (4, 6)}
    assert joined_names(shapes, 2) == [(name.format(i=0), name.format(i=1))]
    assert joined_names(shapes, 3) == [tuple(name.format(i=i) for i in range(3))]


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        # The number that varies, not the first: linen numbers every module.
        ("Transformer_0/Block_{i}/attn/query/kernel", [(0, 1), (2, 3)]),
        ("gpt2/h/{i}/attn/q2", [(0, 1), (2, 3)]),
        ("gpt2/h/{i}/q", [(0, 1), (2, 3)]),
        ("h/{i}/attn_1/q", [(0, 1), (2, 3)]),
        ("h/{i}/attn/q_einsum/w", [(0, 1), (2, 3)]),
        ("SelfAttention_{i}/query/kernel", [(0, 1), (2, 3)]),
    ],
)
def test_which_number_is_that_of_the_layer(names, pairs):
    shapes = {names.format(i=i): (4, 6) for i in range(4)} | {"9/q": (4, 6)}
    expected = [tuple(names.format(i=i) for i in pair) for pair in pairs]
    assert joined_names(shapes, 2) == expected


def test_two_attentions_of_a_layer_are_joined_each_by_itself():
    names = [f"block_{i}/Attention_{k}/query" for k in range(2) for i in range(2)]
    assert joined_names(dict.fromkeys(names, (4, 6)), 2) == [
        tuple(names[:2]),
        tuple(names[2:]),
    ]
    unet = {f"down_{i}/attn_{k}/q": (i + 4,) * 2 for i in range(2) for k in range(2)}
    assert joined_names(unet, 2) == [tuple(list(unet)[:2]), tuple(list(unet)[2:])]
    scanned = dict.fromkeys(["layers/Attention_0/q", "layers/Attention_1/q"], (4, 6, 6))
    assert joined_names(scanned, 2) == [(name,) for name in scanned]


def test_two_queries_of_a_layer_are_joined_each_by_itself():
    names = [f"h/{i}/attn/q{k}" for k in range(2) for i in range(2)]
    expected = [tuple(names[:2]), tuple(names[2:])]
    assert joined_names(dict.fromkeys(names, (4, 6)), 2) == expected


def test_keys_are_not_joined_with_the_values_beside_them():
    shapes = {"attn/kv_einsum/w": (2, 4, 64, 16), "attn/q_einsum/w": (4, 64, 16)}
    assert joined_names(shapes, 2) == [("attn/q_einsum/w",)]


def test_two_stacks_are_joined_each_by_itself():
    shapes = {f"{s}layers/{i}/q": (4, 6) for s in ("", "vision/") for i in range(2)}
    shapes |= {f"stage{s}/block{i}/k": (4, 6) for s in range(2) for i in range(2)}
    assert set(joined_names(shapes, 2)) == {
        ("layers/0/q", "layers/1/q"),
        ("vision/layers/0/q", "vision/layers/1/q"),
        ("stage0/block0/k", "stage0/block1/k"),
        ("stage1/block0/k", "stage1/block1/k"),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["plain", "heads"])
def test_scanned_layers_equal_layers_of_their_own(rng, size, heads):
    """(layers, heads, in, out), joined along the layers, head by head."""
    stack = jnp.asarray(rng.standard_normal((7, *heads, 4, 6)), jnp.float32)
    polar = jm.PolarExpress(dtype="float32")
    numbers = MuonDimensionNumbers(-2, -1)  # 7 matrices are more than 4 or 6
    one = {"q": stack}
    many = {f"{i}/q": layer for i, layer in enumerate(stack)}
    scanned = jm.read(one, rules=numbers, joins={"q": size})
    apart = jm.read(many, rules=numbers, joins={"{i}/q": size})
    result, expected = (
        jm.orthogonalize(polar, matrices=matrices).update(grads, None)[0]
        for matrices, grads in ((scanned, one), (apart, many))
    )
    expected = jnp.stack([expected[f"{i}/q"] for i in range(7)])
    np.testing.assert_allclose(result["q"], expected, atol=2e-6)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)], ids=str)
def test_polar_factor_of_the_matrices_side_by_side(rng, x64, shape):
    """Along `in`: PyTorch's (out, K in)."""
    grads = {f"{i}/q": rng.standard_normal(shape) for i in range(3)}
    tx = jm.orthogonalize(jm.ExactPolar(), matrices=jm.read(grads, joins={"{i}/q": 2}))
    result, _ = tx.update(grads, tx.init(grads))
    wide = np.concatenate([grads["0/q"].T, grads["1/q"].T], axis=1)
    first, second = np.split(oracle_polar(wide), 2, axis=1)
    np.testing.assert_allclose(result["0/q"], first.T, atol=1e-12)
    np.testing.assert_allclose(result["1/q"], second.T, atol=1e-12)
    np.testing.assert_allclose(
        result["2/q"], oracle_polar(grads["2/q"].T).T, atol=1e-12
    )


def oracle_polar(x):
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_blocks_hold_every_matrix_once(data):
    """Joined and back is the identity, over random shapes, batches and joins."""
    batch = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    count = data.draw(st.integers(1, 5))
    by_path = (*data.draw(batch), 2, 3)
    scanned = (data.draw(st.integers(1, 7)), *data.draw(batch), 3, 2)
    shapes = {f"{i}/q": by_path for i in range(count)} | {"scan": scanned}
    joins = {
        "{i}/q": data.draw(st.integers(1, 4)),
        "scan": data.draw(st.integers(1, 4)),
    }
    arrays = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + index / 8
        for index, (name, shape) in enumerate(shapes.items())
    }
    names = sorted(arrays)
    matrices = jm.read(arrays, rules=MuonDimensionNumbers(-2, -1), joins=joins)
    blocks = matrices.blocks(names)
    views = [matrices.axes(n).view(jnp.asarray(arrays[n])) for n in names]
    for block in blocks:
        assert len(block.view(views)) == block.batch
    for result, view in zip(map_blocks(list, blocks, views), views, strict=True):
        np.testing.assert_array_equal(result, view)


def step_teon(rng, shape, steps=4):
    """Three layers of queries by TEON in NumPy: two are joined, one is alone."""
    table = np.array(
        jm.polar_express_coefficients(
            8, lower=1e-3, cushion=0.02407327424182761, safety=0
        )
    )
    table[:-1] /= 1.01 ** np.array([1, 3, 5])
    w = [rng.standard_normal(shape).T for _ in range(3)]
    grads = [[rng.standard_normal(shape).T for _ in range(3)] for _ in range(steps)]
    m = [np.zeros(shape[::-1])] * 3
    after = [x.copy() for x in w]
    lr, wd, out_by_in = 0.02, 0.1, shape[1] / shape[0]
    for g in grads:
        m = [x + 0.05 * (y - x) for x, y in zip(m, g, strict=True)]
        both = oracle.polar(np.concatenate(m[:2], axis=1), table[:5], 1.01, 1e-7)
        u = [*np.split(both, 2, axis=1), oracle.polar(m[2], table[:5], 1.01, 1e-7)]
        after = [
            x * (1 - lr * wd) - lr * out_by_in**0.5 * y
            for x, y in zip(after, u, strict=True)
        ]
    return w, grads, after


@pytest.mark.parametrize("shape", [(4, 6), (8, 3)], ids=str)
def test_teon_matrices(rng, x64, shape):
    w, grads, after = step_teon(rng, shape)
    tx = jm.teon(0.02, weight_decay=0.1, dtype="float64")

    def tree(arrays):
        return {f"blocks_{i}": {"attn": {"q": x.T}} for i, x in enumerate(arrays)}

    params = tree(w)
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(tree(g), state, params)
        params = optax.apply_updates(params, updates)
    for result, expected in zip(jax.tree.leaves(params), after, strict=True):
        np.testing.assert_allclose(result, expected.T, rtol=1e-11, atol=1e-12)


def test_schedules_reach_joined_matrices(rng):
    params = {f"blocks/{i}/q": jnp.ones((4, 4)) for i in range(2)}
    grads = {name: jnp.asarray(rng.standard_normal((4, 4))) for name in params}
    tx = jm.teon(optax.piecewise_constant_schedule(0.0, {1: 1.0}))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert all(not np.any(u) for u in jax.tree.leaves(updates))


SHAPE = jax.ShapeDtypeStruct((4, 6), "float32")


@pytest.mark.parametrize(
    ("params", "joins", "match"),
    [
        (
            {"0/q": SHAPE, "1/q": jax.ShapeDtypeStruct((4, 8), "float32")},
            {"{i}/q": 2},
            r"different shapes or dtypes: '0/q' \(4, 6\) float32, '1/q' \(4, 8\)",
        ),
        ({"a/q": SHAPE}, {"a/q": 2}, "no layer number .* 'a/q', which has no layer"),
        ({"a/q": SHAPE}, {"{i}/q": 2}, "matches no matrix; there are a/q"),
        ({"0/q": SHAPE}, {"{i}/q": 0}, "at least 1"),
        ({"0/q": SHAPE}, 0, "joins=0"),
        (
            {"0/q": SHAPE, "1/q": jax.ShapeDtypeStruct((4, 6), "bfloat16")},
            {"{i}/q": 2},
            "float32, '1/q' .* bfloat16",
        ),
        ({"0/q": SHAPE}, {"{i}/q": 2, "0/{i}": 2}, "matches no matrix"),
        ({"0/q": SHAPE}, {"{i}/q": 2, "{i}/*": 2}, "matches '{i}/q' and"),
        ({"0/q": SHAPE}, {"{i}/{i}": 2}, "'{i}/{i}' matches no matrix"),
        ({"0/up": SHAPE}, 2, "no query, key or value"),
    ],
)
def test_bad_joins(params, joins, match):
    with pytest.raises(ValueError, match=match):
        jm.orthogonalize(matrices=jm.read(params, joins=joins)).init(params)
    with pytest.raises(ValueError, match=match):
        jm.nanochat(matrices=reader(joins=joins)).init(params)


def test_dimension_numbers_and_joins(rng):
    """(embed, heads, head_dim), with the last two axes as one, joined over layers."""
    numbers = MuonDimensionNumbers(0, (1, 2))
    grads = {f"{i}/q": jnp.asarray(rng.standard_normal((5, 2, 3))) for i in range(2)}
    flat = {name: x.reshape(5, 6) for name, x in grads.items()}
    apart = jm.read(grads, rules=numbers, joins={"{i}/q": 2})
    whole = jm.read(flat, joins={"{i}/q": 2})
    result, expected = (
        jm.orthogonalize(jm.ExactPolar(), matrices=matrices).update(tree, None)[0]
        for matrices, tree in ((apart, grads), (whole, flat))
    )
    for name, x in result.items():
        np.testing.assert_array_equal(x.reshape(5, 6), expected[name])
