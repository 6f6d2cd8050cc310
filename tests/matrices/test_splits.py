"""Splits: a parameter that holds several matrices is trained as several parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests import trees
from tests.matrices import reader
from tests.mesh.case import at, mesh_of
from tests.recipes import RECIPES


@pytest.mark.parametrize("name", ["nanochat later", "muonh"])
def test_a_fused_kernel_takes_the_path_of_three(name, x64):
    widths = {"q": 16, "k": 8, "v": 8}
    shapes = {part: (16, width) for part, width in widths.items()}
    apart = [trees.normal(shapes, seed, "float64") for seed in range(4)]

    def fused(parts):
        return {"attn/qkv": jnp.concatenate([parts[x] for x in widths], axis=1)}

    def run(given, **matrices):
        tx = RECIPES[name](learning_rate=0.01, dtype="float64", **matrices)
        return trees.run(tx, given[0], given[1:])[0]

    whole, expected = [*map(fused, apart)], [*map(fused, run(apart))]
    split = reader(splits={"attn/qkv": jm.Split(widths)})
    assert trees.distance(run(whole, matrices=split), expected) < 1e-13
    assert trees.distance(run(whole), expected) > 0.1


@pytest.mark.parametrize("scanned", [True, False])
def test_heads_are_joined_over_layers(rng, x64, scanned):
    """Each head of a layer with the same head of the next."""
    kernel = rng.standard_normal((4, 8, 12))
    one = {"layers": {"q": kernel}}
    many = {"layers": {str(i): {"q": layer} for i, layer in enumerate(kernel)}}
    params = one if scanned else many
    joins = {"layers/q" if scanned else "layers/{i}/q": 2}
    reading = reader(splits={"q": jm.Split.heads(3)}, joins=joins)
    tx = RECIPES["muon"](
        learning_rate=1.0, momentum=0.0, dtype="float64", matrices=reading
    )
    updates, _ = tx.update(params, tx.init(params), params)
    heads = kernel.reshape(4, 8, 3, 4)
    pairs = np.concatenate([heads[0::2], heads[1::2]], axis=1)  # (2, 16, 3, 4)
    polar = jm.NewtonSchulz(dtype="float64")
    expected = -polar(jnp.moveaxis(pairs, 2, 1))  # the factor of (8, 4) is 1
    expected = np.moveaxis(expected, 1, 2).reshape(2, 2, 8, 12).reshape(4, 8, 12)
    got = jnp.stack(jax.tree.leaves(updates)).reshape(4, 8, 12)
    np.testing.assert_allclose(got, expected, atol=1e-10)


UNEVEN = jm.Split({"q": 24, "k": 15, "v": 9}), jm.Split(("q", "k", "v"))


@pytest.mark.parametrize("split", [*UNEVEN, jm.Split.heads(3)], ids=str)
def test_parts_that_devices_do_not_divide(split):
    """(16, 48) over 4 devices, whose pieces are not those of the parts."""
    tx = RECIPES["muon"](matrices=reader(splits={"w": split}), dtype="float32")
    tx = jm.on_mesh(tx, at(mesh_of(4), PartitionSpec(None, "data")))
    found = jm.verify(tx, {"w": jax.ShapeDtypeStruct((16, 48), "float32")})
    assert found.ok, found


def test_rules_are_about_whole_parameters():
    """(embed, 3 heads, 4) of 1 query head and 2 others; parts of parts in layers."""
    shapes = {"w": (6, 3, 4), "b": (10, 4), "qkv": (3, 6, 24), "wte": (10, 6)}
    params = trees.normal(shapes)
    by_heads, stacks = MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers(-2, -1)
    matrices = jm.find_matrices(
        params,
        rules={"w": by_heads, "b": "adamw", "qkv": stacks, "wte": "adamw"},
        splits={
            "w": jm.Split({"q": 1, "kv": 2}, axis=1),
            "b": jm.Split(("x", "y"), axis=0),
            "qkv": jm.Split(("q", "k", "v")),
            "qkv/q": jm.Split.heads(2),
            "wte": jm.Split.heads(3),
        },
    )
    tx = RECIPES["nanochat"](matrices=matrices)
    found = jm.describe(tx, params).parameters
    assert {x.parameter.path: x.matrices for x in found} == {
        **{"w/q": (1, 6, 4), "w/kv": (1, 6, 8), "b/x": None, "b/y": None, "wte": None},
        **{"qkv/q": (6, 6, 4), "qkv/k": (3, 6, 8), "qkv/v": (3, 6, 8)},
    }
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


def test_qk_clip_on_a_fused_kernel():
    """The same as on three kernels and their biases, bit for bit."""
    three = [trees.normal({"kernel": (6, 8), "bias": (8,)}, seed) for seed in range(3)]
    apart = {"attn": dict(zip("qkv", three, strict=True))}
    fused = {"attn": {"qkv": jax.tree.map(lambda *x: jnp.concatenate(x, -1), *three)}}
    clip = jm.clip_qk(10.0, query="attn/qkv/*/q", key="attn/qkv/*/k")
    split = jm.with_splits(clip, {"attn/qkv": jm.Split(("q", "k", "v"))})
    logits = {"attn": jnp.array([50.0, 5.0])}
    expected, result = (
        tx.update(x, tx.init(x), x, max_logits=logits)[0]["attn"]
        for tx, x in ((jm.clip_qk(10.0), apart), (split, fused))
    )
    for kind, before in fused["attn"]["qkv"].items():
        whole = jnp.concatenate([expected[name][kind] for name in "qkv"], axis=-1)
        np.testing.assert_array_equal(result["qkv"][kind], whole)
        assert jnp.any(whole != before)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_splitting_and_joining_is_the_identity(axis):
    """Of parts of parts, and of equal ones, and boxes stay, which parts have not."""
    x = {"w": jnp.arange(216.0).reshape(6, 6, 6), "left": jnp.ones(3)}
    boxed = x | {"w": nn.Partitioned(x["w"], names=("a", "b", "c"))}
    splits = {"w": jm.Split({"a": 4, "b": 2}, axis), "w/a": jm.Split.heads(2, axis)}
    seen = []
    inner = optax.stateless(lambda parts, params: seen.append(parts) or parts)
    whole, _ = jm.with_splits(inner, splits).update(boxed, optax.EmptyState())
    chex.assert_trees_all_equal(whole, boxed)
    a, b = (jnp.take(x["w"], i, axis) for i in (jnp.arange(4), jnp.array([4, 5])))
    parts = seen[0]["w"]
    np.testing.assert_array_equal(parts["b"], b)
    np.testing.assert_array_equal(parts["a"], jnp.stack(jnp.split(a, 2, axis), 1))


WRONG = {  # pattern, and what Split or Split.heads takes
    r"'qkv' of shape \(6, 24\): axis -1 of size 24 does not": ("qkv", tuple("qkvwx")),
    r"parts={'q': 16, 'k': 4}; expected .* add up to 24": ("qkv", {"q": 16, "k": 4}),
    "does not divide into parts=7": ("qkv", 7),
    r"no axis 2; expected -2 to 1": ("qkv", 2, 2),
    "'q' matches no parameter; expected a pattern of qkv": ("q", 2),
    r"number=0; expected a Python integer of at least 1": ("qkv", 0),
    r"parts=\('q', 'q'\); expected .* of different names": ("qkv", ("q", "q")),
    r"parts=\(\); expected names": ("qkv", ()),
    "parts={'q': 25, 'k': -1}; expected names": ("qkv", {"q": 25, "k": -1}),
}


@pytest.mark.parametrize("match", WRONG)
def test_splits_that_do_not_fit(match):
    pattern, *split = WRONG[match]
    params = {"qkv": jnp.zeros((6, 24))}
    for use in (
        lambda splits: reader(splits=splits)(params),
        lambda splits: jm.with_splits(optax.identity(), splits).init(params),
    ):
        with pytest.raises(ValueError, match=match):
            make = jm.Split.heads if isinstance(split[0], int) else jm.Split
            use({pattern: make(*split)})
