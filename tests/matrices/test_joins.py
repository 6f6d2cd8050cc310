"""Joins: which matrices become one, and that everything else still sees single ones."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.matrices.joins import joined_matrices, map_joined, with_joins
from tests import trees
from tests.matrices import reader
from tests.programs.parts import floats
from tests.recipes import RECIPES

ATTN_Q = "blocks/{i}/attn/q"
Q, NARROW = floats(4, 6), jax.ShapeDtypeStruct((4, 6), "bfloat16")


def read(tree, joins):
    """Stacks (..., in, out), with the roles that a loss would show."""
    matrices = reader()(tree)
    with_roles = {
        path: dataclasses.replace(x, role=role(path)) for path, x in matrices.items()
    }
    return with_joins(dataclasses.replace(matrices, parameters=with_roles), joins)


def role(path):
    found = re.search(r"(q|k|up)\w*?(/kernel)?$", path)
    return {"q": "query", "k": "key"}.get(found[1], "kernel")


def names(pattern, count, k=""):
    """The names of one kind in `count` layers."""
    return [pattern.format(i=i, k=k) for i in range(count)]


def pairs(pattern, count=4):
    return [names(pattern, count)[i : i + 2] for i in range(0, count - 1, 2)]


def two(pattern):
    """For each of two kinds k, its pair of layers."""
    return [names(pattern, 2, k) for k in range(2)]


# Parameters, joins, and the names of those that are joined. All are of one shape,
# unless shapes are given by name.
FOUND = {
    # Block 10 comes after block 9, not after block 1, and has no partner.
    "order of numbers": (names(ATTN_Q, 11), {ATTN_Q: 2}, pairs(ATTN_Q, 10)),
    "what a first pattern leaves": (
        names("{i}/q", 6) + names("{i}/k", 6),
        {"{i}/q": 4, "{i}/*": 2},
        [names("{i}/q", 6)[:4], *pairs("{i}/k", 6)],
    ),
    "no pattern": ([*names(ATTN_Q, 3), "blocks/0/mlp/up"], 2, [names(ATTN_Q, 2)]),
    # Which number is that of the layer: the one that varies, not the first.
    **{
        pattern: ([*names(pattern, 4), "9/q"], 2, pairs(pattern))
        for pattern in (
            "Transformer_0/Block_{i}/attn/query/kernel",
            "gpt2/h/{i}/attn/q2",
            "h/{i}/attn_1/q",
            "SelfAttention_{i}/query/kernel",
        )
    },
    # Two of a layer are joined each by itself.
    **{
        pattern: (two(pattern)[0] + two(pattern)[1], 2, two(pattern))
        for pattern in (
            "block_{i}/Attention_{k}/query",
            "h/{i}/attn/q{k}",
            "stage{k}/block{i}/k",
        )
    },
    "shapes by stage": (
        {f"down_{k}/attn_{i}/q": (k + 4,) * 2 for k in range(2) for i in range(2)},
        2,
        two("down_{k}/attn_{i}/q"),
    ),
    "two scanned": (
        {"layers/Attention_0/q": (4, 6, 6), "layers/Attention_1/q": (4, 6, 6)},
        2,
        [["layers/Attention_0/q"], ["layers/Attention_1/q"]],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_which_matrices_are_joined(name):
    shapes, joins, expected = FOUND[name]
    if isinstance(shapes, list):
        shapes = dict.fromkeys(shapes, (4, 6))
    tree = {path: floats(*shape) for path, shape in shapes.items()}
    paths = sorted(shapes)
    found = [
        [paths[leaf] for leaf in x.leaves]
        for x in joined_matrices(
            read(tree, joins).joins, paths, [shapes[p] for p in paths]
        )
        if x.size > 1
    ]
    assert sorted(found) == sorted(expected)


def test_a_layer_whose_partner_is_masked_is_joined_with_no_other():
    tree = dict.fromkeys(names(ATTN_Q, 4), Q)
    found = read(tree, 2)
    paths = ["blocks/0/attn/q", "blocks/2/attn/q", "blocks/3/attn/q"]
    joined = joined_matrices(found.joins, paths, [Q.shape] * 3)
    assert [x.leaves for x in joined] == [(0,), (1, 2)]


@given(data=st.data())
@settings(max_examples=10)
def test_joined_matrices_hold_every_matrix_once(data):
    """Joined and back is the identity, over random shapes, batches and joins."""
    batch = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    count = data.draw(st.integers(2, 5))
    by_path = (*data.draw(batch), 2, 3)
    scanned = (data.draw(st.integers(2, 7)), *data.draw(batch), 3, 2)
    shapes = {f"{i}/q": by_path for i in range(count)} | {"scan": scanned}
    shapes |= {"pair/0": (2, 3), "pair/1": (2, 3)}
    joins = {"{i}/q": data.draw(st.integers(2, count)), "pair/{i}": 2}
    joins |= {"scan": data.draw(st.integers(2, scanned[0]))}
    arrays = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + index / 8
        for index, (name, shape) in enumerate(shapes.items())
    }
    paths = sorted(arrays)
    matrices = jm.find_matrices(arrays, rules=MuonDimensionNumbers(-2, -1), joins=joins)
    leaves = [jnp.asarray(arrays[path]) for path in paths]
    joined = joined_matrices(matrices.joins, paths, [x.shape for x in leaves])
    stacks = [x.reshape(-1, *x.shape[-2:]) for x in leaves]
    for x in joined:
        assert len(x.view(stacks)) == x.batch
    for result, leaf in zip(map_joined(list, joined, leaves), leaves, strict=True):
        np.testing.assert_array_equal(result, leaf)


@pytest.mark.parametrize(
    ("params", "joins", "match"),
    [
        (
            {"0/q": Q, "1/q": floats(4, 8)},
            {"{i}/q": 2},
            "no match of '{i}/q' among 0/q, 1/q; expected 2 .* of one shape and d",
        ),
        ({"0/q": Q, "1/q": NARROW}, {"{i}/q": 2}, "of one shape and dtype"),
        ({"a/q": Q}, {"a/q": 2}, "numbered, as in 'blocks/{i}/attn/q', or scanned"),
        ({"a/q": Q}, {"{i}/q": 2}, "join no match of '{i}/q' among a/q"),
        ({"0/up": Q}, 2, "join no query, key or value"),
        ({"0/q": Q, "1/q": Q}, 3, "joins=3 join no .* expected 3 layers or more"),
        ({"q": floats(2, 4, 6)}, {"q": 3}, "join no match of 'q'"),
    ],
)
def test_bad_joins(params, joins, match):
    with pytest.raises(ValueError, match=match):
        read(params, joins)


def test_joins_by_number_need_the_roles_that_a_loss_shows():
    params = trees.normal({f"{i}/q": (4, 6) for i in range(2)})
    with pytest.raises(ValueError, match="value that a loss shows"):
        RECIPES["teon"](matrices={"?*": "muon"}).init(params)
