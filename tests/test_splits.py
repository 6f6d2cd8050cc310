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

QKV = {"attn/qkv/kernel": jm.Split({"q": 16, "k": 8, "v": 8})}
RECIPES = {
    "nanochat": functools.partial(jm.nanochat, edition="2026-08"),
    "muon": jm.muon,
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
}


def transformer(kernels, x):
    """Attention on (batch, time, 16), of 2 heads of 8 with one key head for both."""
    q, k, v = (x @ kernel for kernel in kernels)
    q = q.reshape(*q.shape[:2], 2, 8)
    weights = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k))
    return jnp.einsum("bhts,bsd->bthd", weights, v).reshape(x.shape)


@pytest.mark.parametrize("name", RECIPES)
def test_fused_kernel_takes_the_path_of_three(name, rng, x64):
    kernels = [
        jnp.asarray(rng.standard_normal((16, width)) / 4) for width in (16, 8, 8)
    ]
    x, y = rng.standard_normal((2, 4, 5, 16))
    apart = {"attn": dict(zip("qkv", ({"kernel": k} for k in kernels), strict=True))}
    fused = {"attn": {"qkv": {"kernel": jnp.concatenate(kernels, axis=1)}}}

    def loss_apart(p):
        return jnp.mean(
            (transformer([p["attn"][n]["kernel"] for n in "qkv"], x) - y) ** 2
        )

    def loss_fused(p):
        parts = jnp.split(p["attn"]["qkv"]["kernel"], (16, 24), axis=1)
        return jnp.mean((transformer(parts, x) - y) ** 2)

    def train(tx, loss, params):
        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(10):
            params, state = step(params, state)
        return params

    recipe = functools.partial(RECIPES[name], 0.01, dtype="float64")
    expected = train(recipe(), loss_apart, apart)["attn"]
    expected = jnp.concatenate([expected[n]["kernel"] for n in "qkv"], axis=1)
    result = train(recipe(matrices=reader(splits=QKV)), loss_fused, fused)["attn"][
        "qkv"
    ]["kernel"]
    start = fused["attn"]["qkv"]["kernel"]
    off, moved = jnp.linalg.norm(result - expected), jnp.linalg.norm(expected - start)
    # Roundings of 1e-16 grow some twenty times in ten steps, more or less by version.
    assert off / moved < 1e-13


def test_not_splitting_is_something_else(rng):
    """The test above could fail."""
    g = {"qkv": jnp.asarray(rng.standard_normal((8, 24)), jnp.float32)}
    split = jm.nanochat(matrices=reader(splits={"qkv": jm.Split(("q", "k", "v"))}))
    (a, _), (b, _) = (tx.update(g, tx.init(g), g) for tx in (split, jm.nanochat()))
    assert jnp.linalg.norm(a["qkv"] - b["qkv"]) > 0.1 * jnp.linalg.norm(b["qkv"])


def test_learning_rate_of_a_part(rng):
    g = {"up": jnp.asarray(rng.standard_normal((6, 20)), jnp.float32)}

    def updates(**settings):
        split = jm.Split(("gate", "up"), **settings)
        tx = jm.nanochat(matrices=reader(splits={"up": split}), dtype="float32")
        return tx.update(g, tx.init(g), g)[0]["up"]

    plain, scaled = updates(), updates(learning_rates={"gate": 0.5})
    np.testing.assert_array_equal(scaled[:, :10], 0.5 * plain[:, :10])
    np.testing.assert_array_equal(scaled[:, 10:], plain[:, 10:])


@pytest.mark.parametrize("axis", [1, 0])
def test_each_head_is_a_matrix_of_its_own(rng, x64, axis):
    """(embed, heads * 4), or the output projection (heads * 4, embed)."""
    shape = (6, 12) if axis else (12, 6)
    g = {"q": rng.standard_normal(shape)}
    matrices = jm.read(g, splits={"q": jm.Split(3, axis=axis)})
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
    reading = reader(splits={"q": jm.Split(3)}, joins=2)
    tx = jm.muon(1.0, 0.0, dtype="float64", matrices=reading)
    updates, _ = tx.update(params, tx.init(params), params)
    heads = kernel.reshape(4, 8, 3, 4)
    pairs = np.concatenate([heads[0::2], heads[1::2]], axis=1)  # (2, 16, 3, 4)
    polar = jm.NewtonSchulz(dtype=None)
    expected = -polar(jnp.moveaxis(pairs, 2, 1))  # the factor of (8, 4) is 1
    expected = np.moveaxis(expected, 1, 2).reshape(2, 2, 8, 12).reshape(4, 8, 12)
    got = jnp.stack(jax.tree.leaves(updates)).reshape(4, 8, 12)
    np.testing.assert_allclose(got, expected, atol=1e-10)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("parts", [6, 3, {"q": 24, "k": 15, "v": 9}, ("q", "k", "v")])
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


def test_a_factor_keeps_the_dtype():
    split = jm.Split(("q", "k"), learning_rates={"q": np.float32(0.5)})
    tx = jm.with_splits(optax.identity(), {"w": split})
    w = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    assert tx.update(w, tx.init(w))[0]["w"].dtype == jnp.bfloat16


def test_rules_speak_of_whole_parameters(rng):
    """(embed, 3 heads, 4) of 1 query head and 2 others, under a name of its own."""
    params = {
        "w": jnp.asarray(rng.standard_normal((6, 3, 4)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((10, 4)), jnp.float32),
    }
    splits = {
        "w": jm.Split({"q": 1, "kv": 2}, axis=1),
        "b": jm.Split(("x", "y"), axis=0),
    }
    tx = jm.nanochat(
        matrices=reader(
            rules={"w": MuonDimensionNumbers(0, (1, 2)), "b": "adamw"}, splits=splits
        ),
        dtype="float32",
    )
    updates, state = tx.update(params, tx.init(params), params)
    for part in (updates["w"][:, :1], updates["w"][:, 1:]):
        matrix = part.reshape(6, -1)
        scale = 0.02 * max(1, matrix.shape[1] / 6) ** 0.5
        norms = np.linalg.norm(matrix) / (scale * min(matrix.shape) ** 0.5)
        assert 0.8 < norms < 1.4  # decay included
    adamw = optax.adamw(3e-4, 0.8, 0.95, 1e-10, weight_decay=0.0)
    parts = {"x": params["b"][:5], "y": params["b"][5:]}
    expected, _ = adamw.update(parts, adamw.init(parts), parts)
    np.testing.assert_array_equal(updates["b"][:5], expected["x"])
    np.testing.assert_array_equal(updates["b"][5:], expected["y"])
    del state


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

    class Fused(nnx.Module):
        def __init__(self, rngs):
            self.qkv = nnx.Linear(6, 18, rngs=rngs)

        def __call__(self, x):
            return jnp.sum(self.qkv(x) ** 2)

    model = Fused(nnx.Rngs(0))
    tx = jm.nanochat(matrices=reader(splits={"qkv/kernel": jm.Split(("q", "k", "v"))}))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.ones((2, 6))
    before = model(x)
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: m(x))(model))
    assert model(x) < before


@pytest.mark.parametrize(
    ("split", "match"),
    [
        (
            jm.Split(("q", "k", "v", "w", "x")),
            r"'qkv' of shape \(6, 24\): axis -1 of size 24 does not divide into",
        ),
        (jm.Split({"q": 16, "k": 4}), r"parts={'q': 16, 'k': 4}; expected .* sum 24"),
        (jm.Split(7), "does not divide into parts=7"),
        (jm.Split(2, axis=2), r"no axis 2; expected -2 to 1"),
    ],
)
def test_bad_splits(split, match):
    params = {"qkv": jnp.zeros((6, 24))}
    with pytest.raises(ValueError, match=match):
        jm.nanochat(matrices=reader(splits={"qkv": split})).init(params)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"parts": ("q", "q")}, "parts=.* names, each once"),
        ({"parts": ()}, r"parts=\(\); expected a number"),
        (
            {"parts": ("q", "k"), "learning_rates": {"v": 2.0}},
            r"expected factors of the parts \['q', 'k'\]",
        ),
    ],
)
def test_bad_settings_of_a_split(settings, match):
    with pytest.raises(ValueError, match=match):
        jm.Split(**settings)


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match="'q' matches no parameter; there are qkv"):
        jm.nanochat(matrices=reader(splits={"q": jm.Split(2)})).init(
            {"qkv": jnp.zeros((6, 24))}
        )
