"""QK-clip: logits fall by threshold / maximum, head by head, and nothing else moves."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_muon as jm

HEAD_DIM, EMBED, THRESHOLD = 3, 5, 10.0

# heads, key heads, layers, whether heads have their own axis, whether there are biases
LAYOUTS = {
    "MHA": (4, 4, (), False, False),
    "GQA": (6, 2, (), False, True),
    "scanned twice": (2, 2, (2, 2), False, True),
    "DenseGeneral MQA": (4, 1, (), True, False),
    "DenseGeneral scanned": (4, 2, (3,), True, True),
    "one head": (1, 1, (), True, False),
}


def draw(name, seed=0, dtype="float32"):
    """Parameters of one attention module, and the path in its tree."""
    heads, key_heads, layers, apart, bias = LAYOUTS[name]
    rng = np.random.default_rng(seed)

    def projection(count):
        out = (count, HEAD_DIM) if apart else (count * HEAD_DIM,)
        shapes = {"kernel": (*layers, EMBED, *out)}
        if bias:
            shapes["bias"] = (*layers, *out)
        return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}

    counts = {"q": heads, "k": key_heads, "v": key_heads}
    attn = {which: projection(count) for which, count in counts.items()}
    return {"blocks": {"attn": attn}, "head": {"kernel": jnp.ones((2, 2), dtype)}}


def logits(name, params, x):
    """(*layers, heads, time, time), in float64, for inputs x (time, EMBED)."""
    heads, key_heads, layers, _, _ = LAYOUTS[name]
    found = {}
    for which, count in (("q", heads), ("k", key_heads)):
        leaves = {k: np.asarray(x) for k, x in params["blocks"]["attn"][which].items()}
        kernel = leaves["kernel"].reshape(*layers, EMBED, count, HEAD_DIM)
        found[which] = np.einsum("te,...ehd->...htd", x, kernel)
        if "bias" in leaves:
            found[which] += leaves["bias"].reshape(*layers, count, 1, HEAD_DIM)
    keys = np.repeat(found["k"], heads // key_heads, axis=-3)
    return np.einsum("...qd,...kd->...qk", found["q"], keys)


@functools.partial(jax.jit, static_argnames="layers_axis")
def clip(updates, params, max_logits, balance=0.5, threshold=THRESHOLD, layers_axis=0):
    """Threshold and balance are traced, as `optax.inject_hyperparams` does."""
    tx = jm.clip_qk(threshold, balance=balance, layers_axis=layers_axis)
    return tx.update(updates, tx.init(params), params, max_logits=max_logits)[0]


def by_head(name, leaf, kind, count):
    """A leaf as (*layers, heads, ...)."""
    layers = LAYOUTS[name][2]
    inputs = (EMBED,) if kind == "kernel" else ()
    view = np.asarray(leaf).reshape(*layers, *inputs, count, HEAD_DIM)
    return np.moveaxis(view, -2, len(layers))


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    balance=st.sampled_from([0.5, 0.3, 0.0, 1.0]),
    values=st.lists(
        st.floats(-100, 1000) | st.sampled_from([THRESHOLD, 0.0, -np.inf]),
        min_size=5,
        max_size=13,
    ),
)
def test_each_head_falls_by_threshold_over_maximum(name, balance, seed, values):
    heads, key_heads, layers, _, _ = LAYOUTS[name]
    maxima = np.resize(values, (*layers, heads))
    with jax.enable_x64(True):
        params, updates = (draw(name, s, np.float64) for s in (seed, seed + 1))
        clipped = clip(updates, params, jnp.asarray(maxima), balance)
        before = optax.apply_updates(params, updates)
        after = optax.apply_updates(params, clipped)

    x = np.random.default_rng(seed).normal(size=(7, EMBED))
    gamma = np.where(maxima > THRESHOLD, THRESHOLD / np.maximum(maxima, THRESHOLD), 1)
    expected = gamma[..., None, None] * logits(name, before, x)
    # Logits are up to 1e3 and carry some ten roundings of 1e-16 each; w + (f (w + u) -
    # w) rounds at the size of w, which is up to 100 times that of the result.
    np.testing.assert_allclose(logits(name, after, x), expected, rtol=1e-11, atol=1e-11)

    # Bit for bit the same: groups in which no head is clipped, and everything else.
    given, got = updates["blocks"]["attn"], clipped["blocks"]["attn"]
    jax.tree.map(np.testing.assert_array_equal, got["v"], given["v"])
    np.testing.assert_array_equal(clipped["head"]["kernel"], updates["head"]["kernel"])
    group = (maxima > THRESHOLD).reshape(*layers, key_heads, -1).any(-1)
    unmoved = {"q": ~np.repeat(group, heads // key_heads, axis=-1), "k": ~group}
    if balance == 1:
        unmoved = {"q": ~(maxima > THRESHOLD), "k": np.ones_like(group)}
    for which, same in unmoved.items():
        for kind in given[which]:
            old, new = (
                by_head(name, tree[which][kind], kind, same.shape[-1])
                for tree in (given, got)
            )
            np.testing.assert_array_equal(old[same], new[same])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipped_in_float32_and_rounded_once(dtype):
    """Without any promotion; gradients, and so updates, may be narrower."""
    params, updates = draw("GQA", 0, dtype), draw("GQA", 1, "bfloat16")
    maxima = jnp.array([1e3, 40.0, 5.0, 10.0, 9.0, -3.0])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = clip(updates, params, maxima)
    wide = (jax.tree.map(lambda x: x.astype("float32"), x) for x in (updates, params))
    expected = jax.tree.map(lambda x: x.astype(dtype), clip(*wide, maxima))
    chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("name", ["scanned twice", "DenseGeneral scanned"])
def test_layers_on_another_axis_change_nothing(name):
    heads, _, layers, _, _ = LAYOUTS[name]
    count = len(layers)
    maxima = jnp.arange(np.prod(layers) * heads).reshape(*layers, heads) * 3.0

    def moved(tree):
        def move(x):
            return jnp.moveaxis(x, range(count), range(1, count + 1))

        return {"blocks": jax.tree.map(move, tree["blocks"]), "head": tree["head"]}

    params, updates = (draw(name, seed) for seed in (0, 1))
    got = clip(moved(updates), moved(params), maxima, layers_axis=1)
    expected = moved(clip(updates, params, maxima))
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-6)
    wrong = f"with the layers {layers} from axis 1 on"
    with pytest.raises(ValueError, match=re.escape(wrong)):
        clip(updates, params, maxima, layers_axis=1)


def test_max_logits_by_prefix_module_sown_or_alone():
    params = {"blocks": [{"attn": draw("MHA", i)["blocks"]["attn"]} for i in (0, 1)]}
    updates = jax.tree.map(jnp.ones_like, params)
    first, second = jnp.array([40.0, 1, 1, 1]), jnp.array([1.0, 1, 90, 1])
    expected = clip(updates, params, {"blocks/0/attn": first, "blocks/1/attn": second})
    for same in (
        {"blocks/1": second, "blocks/0": first},
        {"blocks": [first, {"attn": second}]},
        {"blocks": [{"attn": {"max_logits": (s,)}} for s in (first, second)]},
    ):
        chex.assert_trees_all_equal(clip(updates, params, same), expected)
    kernel = updates["blocks"][0]["attn"]["q"]["kernel"]
    changed = expected["blocks"][0]["attn"]["q"]["kernel"] != kernel
    np.testing.assert_array_equal(changed.any(axis=0), np.arange(12) < 3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_maximum_that_is_not_finite_clips_nothing(value):
    params, updates = (draw("DenseGeneral MQA", seed) for seed in (0, 1))
    got = clip(updates, params, jnp.array([value, 1.0, 2.0, 3.0]))
    chex.assert_trees_all_equal(got, updates)
    finite = clip(updates, params, jnp.array([-np.inf, 40.0, 2.0, 3.0]))
    same = clip(updates, params, jnp.array([value, 40.0, 2.0, 3.0]))
    chex.assert_trees_all_equal(same, finite)


PATTERNS = {  # query, key
    r"the pattern 'wq' matches no parameter; .*attn/q/kernel": ("wq", "attn/k"),
    "module 'a' has 'a/attn/q/kernel' but nothing that key=": ("attn/q", "other/k"),
    "'a/attn/k/kernel' matches both query='attn' and key=": ("attn", "attn/k"),
    "module 'b/other' has 'b/other/k/kernel' but nothing that que": ("*/q", "*/k"),
}


@pytest.mark.parametrize("message", PATTERNS)
def test_patterns_at_init(message):
    params = {
        "a": {"attn": {n: {"kernel": jnp.zeros((4, 4))} for n in "qk"}},
        "b": {"other": {"k": {"kernel": jnp.zeros((4, 4))}}},
    }
    query, key = PATTERNS[message]
    with pytest.raises(ValueError, match=message):
        jm.clip_qk(1.0, query=query, key=key).init(params)


S = jnp.ones
KERNEL = {"q": S((8, 12)), "k": S((8, 12))}
ONE, TWO = {"attn": KERNEL}, {str(i): {"attn": KERNEL} for i in range(2)}
THREE = {"attn": {"q": S((8, 4, 3)), "k": S((8, 3, 3))}}
NARROW = {"attn": KERNEL | {"k": S((8, 10))}}
BIAS = {"attn": KERNEL | {"q": {"kernel": S((8, 12)), "bias": S(())}}}
AT_UPDATE = {  # parameters, max_logits
    "max_logits of tx.update has entries at no path": (ONE, None),
    "entries at no path; expected one for each .* module: 'attn'": (ONE, {}),
    "entries at 'attn/x' .*'attn/y'": (ONE, {"attn": {"x": S(2), "y": S(2)}}),
    r"entries at .*: '0/attn', '1/attn'$": (TWO, {"0": S(4)}),
    r"expected max_logits \(\*layers, heads\)": (ONE, S(())),
    r"'attn/q' of shape \(8, 12\) .* of 'attn' of shape \(5,\)": (ONE, S(5)),
    r"with the layers \(3,\) from axis 0 on": (ONE, S((3, 2))),
    "key heads that divide the query": (THREE, S(4)),
    "'attn/k' .* one head_dim": (NARROW, S(4)),
    r"'attn/q/bias' of shape \(\) .* biases without embed": (BIAS, S(4)),
}


@pytest.mark.parametrize("message", AT_UPDATE)
def test_max_logits_and_shapes_at_update(message):
    tx, (params, max_logits) = jm.clip_qk(1.0), AT_UPDATE[message]
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params, max_logits=max_logits)


# --- the largest logits: those of all, in blocks and so in little memory --------------


def largest_of_all(q, k, scale, seen):
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    return np.where(seen, logits, -np.inf).max(axis=(0, 2, 3))


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [((4, 4), 1, "float32"), ((6, 2), 4, "bfloat16"), ((3, 1), 64, "float32")],
)
def test_blocks_have_the_maximum_of_all_logits(rng, heads, block_size, dtype):
    """In float32, without promotion of dtypes and ranks."""
    q, k = (jnp.asarray(rng.normal(size=(2, 13, h, 4)), dtype) for h in heads)
    measure = jax.jit(
        jm.max_attention_logits, static_argnames=("scale", "causal", "block_size")
    )
    for queries, options, scale, seen in (
        (q, {}, 0.5, np.tri(13, dtype=bool)),
        (q, {"causal": False, "scale": -2.0}, -2.0, True),
        # As many keys as one likes, where none is later than another.
        (q[:, :5], {"causal": False}, 0.5, True),
    ):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            result = measure(queries, k, block_size=block_size, **options)
        assert result.dtype == jnp.float32
        wide = (np.asarray(x, np.float64) for x in (queries, k))
        exact = largest_of_all(*wide, scale, seen)  # bfloat16 would be 4e-3 off
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows(rng):
    q, k = (jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.float32) for _ in "qk")
    grads = jax.grad(lambda q, k: jnp.sum(jm.max_attention_logits(q, k)), (0, 1))(q, k)
    assert not any(jnp.any(g) for g in grads)


def test_memory_is_that_of_a_block():
    batch, time, heads, d, block = 2, 2048, 4, 16, 128
    shape = jax.ShapeDtypeStruct((batch, time, heads, d), jnp.float32)
    measure = jax.jit(functools.partial(jm.max_attention_logits, block_size=block))
    used = measure.lower(shape, shape).compile().memory_analysis().temp_size_in_bytes
    all_logits = 4 * batch * heads * time**2  # 134 MB
    one_block = 4 * batch * heads * block**2  # 0.5 MB
    inputs = 2 * 4 * batch * time * heads * d  # 2 MB
    assert one_block <= used <= inputs + 4 * one_block < all_logits / 30


Q = (2, 5, 4, 8)
WRONG = {  # queries, keys, options
    "expected .batch, time, heads, d.": (Q, (2, 5, 4, 6), {}),
    "key_heads that divide heads": (Q, (2, 5, 3, 8), {}),
    "expected .*batch, the same time, key_heads": (Q, (2, 6, 4, 8), {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_shapes_of_queries_and_keys(message):
    q, k, options = WRONG[message]
    with pytest.raises(ValueError, match=message):
        jm.max_attention_logits(S(q), S(k), **options)
