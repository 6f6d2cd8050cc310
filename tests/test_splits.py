"""Splits: a parameter that holds several matrices is trained as several parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests.reading import reader
from tests.recipes import RECIPES


def updates_of(tx, params, grads):
    """The updates of some steps."""
    state, found = tx.init(params), []
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
        params = optax.apply_updates(params, updates)
        found.append(updates)
    return found


@pytest.mark.parametrize("name", ["nanochat later", "muonh", "moonlight"])
def test_a_fused_kernel_takes_the_path_of_three(name, rng, x64):
    widths = {"q": 16, "k": 8, "v": 8}
    apart = [
        {part: rng.standard_normal((16, width)) for part, width in widths.items()}
        for _ in range(4)
    ]

    def fused(parts):
        return {"attn/qkv": jnp.concatenate([parts[x] for x in widths], axis=1)}

    whole = [fused(parts) for parts in apart]
    recipe = functools.partial(RECIPES[name], 0.01, dtype="float64")
    split = reader(splits={"attn/qkv": jm.Split(widths)})
    expected = updates_of(recipe(), apart[0], apart[1:])
    result = updates_of(recipe(matrices=split), whole[0], whole[1:])
    as_one = updates_of(recipe(), whole[0], whole[1:])

    def distance(updates):
        off = optax.tree.sub(updates, [*map(fused, expected)])
        return optax.tree.norm(off) / optax.tree.norm(expected)

    assert distance(result) < 1e-13
    assert distance(as_one) > 0.1


def test_a_learning_rate_for_a_part(rng):
    """As the page on parameters has it."""
    splits = {"up": jm.Split(("gate", "up"))}
    tx = jm.with_splits(jm.scale_by_path({"up/gate": 0.5}), splits)
    g = {"up": jnp.asarray(rng.standard_normal((6, 20)), jnp.bfloat16)}
    scaled = tx.update(g, tx.init(g))[0]["up"]
    expected = jnp.concatenate([0.5 * g["up"][:, :10], g["up"][:, 10:]], axis=1)
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled, expected)


@pytest.mark.parametrize("axis", [1, 0])
def test_each_head_is_a_matrix_of_its_own(rng, x64, axis):
    """(embed, heads * 4), or the output projection (heads * 4, embed)."""
    shape = (6, 12) if axis else (12, 6)
    g = {"q": rng.standard_normal(shape)}
    matrices = reader(splits={"q": jm.Split(3, axis=axis)})(g)
    tx = jm.partition(
        {"muon": lambda own: jm.orthogonalize(jm.ExactPolar(), matrices=own)}, matrices
    )
    result, _ = tx.update(g, tx.init(g))
    for got, head in zip(
        np.split(result["q"], 3, axis=axis), np.split(g["q"], 3, axis=axis), strict=True
    ):
        u, _, vt = np.linalg.svd(head, full_matrices=False)
        np.testing.assert_allclose(got, u @ vt, atol=1e-12)


def test_heads_of_a_part_and_scanned_layers(rng):
    """Splits apply in order: to parts of parts, behind a layer axis."""
    g = {"qkv": jnp.asarray(rng.standard_normal((3, 6, 24)), jnp.float32)}
    splits = {"qkv": jm.Split(("q", "k", "v")), "qkv/q": jm.Split(2)}
    tx = jm.nanochat(matrices=reader(splits=splits), dtype="float32")
    state = tx.init(g)
    shapes = {tuple(x.shape) for x in jax.tree.leaves(state) if x.ndim > 2}
    # q (layers, heads, in, 4), k and v (layers, in, 8); and NorMuon's means of each
    assert shapes >= {(3, 2, 6, 4), (3, 6, 8), (3, 2, 6, 1), (3, 1, 8)}
    updates, _ = tx.update(g, state, g)
    assert updates["qkv"].shape == (3, 6, 24)


@pytest.mark.parametrize("scanned", [True, False])
def test_heads_are_joined_over_layers(rng, x64, scanned):
    """Each head of a layer with the same head of the next."""
    kernel = rng.standard_normal((4, 8, 12))
    one = {"layers": {"q": kernel}}
    many = {"layers": {str(i): {"q": layer} for i, layer in enumerate(kernel)}}
    params = one if scanned else many
    joins = {"layers/q" if scanned else "layers/{i}/q": 2}
    reading = reader(splits={"q": jm.Split(3)}, joins=joins)
    tx = jm.muon(1.0, 0.0, dtype="float64", matrices=reading)
    updates, _ = tx.update(params, tx.init(params), params)
    heads = kernel.reshape(4, 8, 3, 4)
    pairs = np.concatenate([heads[0::2], heads[1::2]], axis=1)  # (2, 16, 3, 4)
    polar = jm.NewtonSchulz(dtype="float64")
    expected = -polar(jnp.moveaxis(pairs, 2, 1))  # the factor of (8, 4) is 1
    expected = np.moveaxis(expected, 1, 2).reshape(2, 2, 8, 12).reshape(4, 8, 12)
    got = jnp.stack(jax.tree.leaves(updates)).reshape(4, 8, 12)
    np.testing.assert_allclose(got, expected, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (AxisType.Auto, {"q": 24, "k": 15, "v": 9}),
        (AxisType.Explicit, {"q": 24, "k": 15, "v": 9}),
        (AxisType.Explicit, ("q", "k", "v")),
        (AxisType.Explicit, 3),
    ],
)
def test_parts_that_devices_do_not_divide(rng, kind, parts):
    """(16, 48) over 4 devices, whose pieces are not those of the parts."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    w = jnp.asarray(rng.standard_normal((16, 48)), jnp.float32)
    placed = {"w": jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "x")))}
    plain = jm.nanochat(matrices=reader(splits={"w": jm.Split(parts)}), dtype="float32")
    tx = jm.on_mesh(plain, mesh, PartitionSpec(None, "x"))
    expected, _ = plain.update({"w": w}, plain.init({"w": w}), {"w": w})
    result, _ = jax.jit(tx.update)(placed, tx.init(placed), placed)
    np.testing.assert_allclose(result["w"], expected["w"], rtol=1e-4, atol=1e-6)
    assert result["w"].sharding.spec == PartitionSpec(None, "x")


def test_rules_are_about_whole_parameters():
    """(embed, 3 heads, 4) of 1 query head and 2 others, under a name of its own."""
    params = {"w": jnp.ones((6, 3, 4)), "b": jnp.ones((10, 4))}
    matrices = jm.read(
        params,
        rules={"w": MuonDimensionNumbers(0, (1, 2)), "b": "adamw"},
        splits={
            "w": jm.Split({"q": 1, "kv": 2}, axis=1),
            "b": jm.Split(("x", "y"), axis=0),
        },
    )
    found = jm.describe(jm.nanochat(matrices=matrices), params).parameters
    assert {x.parameter.path: x.matrices for x in found} == {
        "w/q": (1, 6, 4),
        "w/kv": (1, 6, 8),
        "b/x": None,
        "b/y": None,
    }


def test_qk_clip_on_a_fused_kernel(rng):
    """The same as on three kernels and their biases, bit for bit."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    three = [{"kernel": normal(6, 8), "bias": normal(8)} for _ in range(3)]
    apart = {"attn": dict(zip("qkv", three, strict=True))}
    fused = {"attn": {"qkv": jax.tree.map(lambda *x: jnp.concatenate(x, -1), *three)}}
    logits = {"attn": jnp.array([50.0, 5.0])}
    plain = jm.clip_qk(10.0)
    clip = jm.clip_qk(10.0, query="attn/qkv/*/q", key="attn/qkv/*/k")
    split = jm.with_splits(clip, {"attn/qkv": jm.Split(("q", "k", "v"))})
    expected, result = (
        tx.update(x, tx.init(x), x, max_logits=logits)[0]["attn"]
        for tx, x in ((plain, apart), (split, fused))
    )
    for kind, before in fused["attn"]["qkv"].items():
        whole = jnp.concatenate([expected[name][kind] for name in "qkv"], axis=-1)
        np.testing.assert_array_equal(result["qkv"][kind], whole)
        assert jnp.any(whole != before)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_splitting_and_joining_is_the_identity(data):
    """Over random shapes, axes, and parts of parts."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = list(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    axis = data.draw(st.integers(0, len(shape)))
    shape.insert(axis, sum(widths) * 2)
    named = {f"p{i}": 2 * width for i, width in enumerate(widths)}
    splits = {
        "w": jm.Split(
            named, axis=data.draw(st.sampled_from([axis, axis - len(shape)]))
        ),
        "w/p0": jm.Split(2, axis=axis),
        "other": jm.Split(("a", "b"), axis=0),
    }
    x = {
        "w": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        "other": np.arange(4.0),
        "left": np.ones(3),
    }
    seen = []
    inner = optax.stateless(lambda parts, params: seen.append(parts) or parts)
    whole, _ = jm.with_splits(inner, splits).update(x, optax.EmptyState())
    assert seen[0]["w"].parts["p0"].ndim == len(shape) + 1
    assert jax.tree.structure(whole) == jax.tree.structure(x)
    jax.tree.map(np.testing.assert_array_equal, whole, x)


def test_nnx_model():
    """Boxes at init, arrays at update."""
    model = nnx.Dict(qkv=nnx.Linear(6, 18, rngs=nnx.Rngs(0)))
    tx = jm.nanochat(matrices=reader(splits={"qkv/kernel": jm.Split(("q", "k", "v"))}))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = model.qkv.kernel[...]
    grads = nnx.grad(lambda m: jnp.sum(m.qkv(jnp.ones((2, 6))) ** 2))(model)
    optimizer.update(model, grads)
    assert (model.qkv.kernel[...] != before).all()


@pytest.mark.parametrize(
    ("pattern", "split", "match"),
    [
        (
            "qkv",
            jm.Split(("q", "k", "v", "w", "x")),
            r"'qkv' of shape \(6, 24\): axis -1 of size 24 does not divide into",
        ),
        (
            "qkv",
            jm.Split({"q": 16, "k": 4}),
            r"parts={'q': 16, 'k': 4}; expected .* sum 24",
        ),
        ("qkv", jm.Split(7), "does not divide into parts=7"),
        ("qkv", jm.Split(2, axis=2), r"no axis 2; expected -2 to 1"),
        ("q", jm.Split(2), "'q' matches no parameter; there are qkv"),
    ],
)
def test_splits_that_do_not_fit(pattern, split, match):
    params, splits = {"qkv": jnp.zeros((6, 24))}, {pattern: split}
    with pytest.raises(ValueError, match=match):
        reader(splits=splits)(params)
    with pytest.raises(ValueError, match=match):
        jm.with_splits(optax.identity(), splits).init(params)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"parts": ("q", "q")}, "parts=.* names, each once"),
        ({"parts": ()}, r"parts=\(\); expected a number"),
    ],
)
def test_bad_settings_of_a_split(settings, match):
    with pytest.raises(ValueError, match=match):
        jm.Split(**settings)
