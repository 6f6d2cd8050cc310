"""QK-clip: logits fall by threshold / maximum, head by head, and nothing else moves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests import trees

HEAD_DIM, EMBED, THRESHOLD = 3, 5, 10.0

# heads, key heads, layers and the axis where they begin, whether heads have an axis of
# their own, whether there are biases
LAYOUTS = {
    "MHA": (4, 4, (), 0, False, False),
    "GQA": (6, 2, (), 0, False, True),
    "scanned twice": (2, 2, (2, 2), 1, False, True),
    "DenseGeneral MQA": (4, 1, (), 0, True, False),
    "DenseGeneral scanned": (4, 2, (3,), 0, True, True),
}


def draw(name, seed=0, dtype="float32"):
    """Parameters of one attention module and of a head."""
    heads, key_heads, layers, _, apart, bias = LAYOUTS[name]

    def projection(count):
        out = (count, HEAD_DIM) if apart else (count * HEAD_DIM,)
        shapes = {"kernel": (*layers, EMBED, *out), "bias": (*layers, *out)}
        return shapes if bias else {"kernel": shapes["kernel"]}

    counts = {"q": heads, "k": key_heads, "v": key_heads}
    attn = {which: projection(count) for which, count in counts.items()}
    return trees.normal({"blocks": {"attn": attn}, "head": (2, 2, 2)}, seed, dtype)


def logits(name, params, x):
    """(*layers, heads, time, time), in float64, for inputs x (time, EMBED)."""
    heads, key_heads, layers, *_ = LAYOUTS[name]
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


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("balance", [0.5, 0.3, 0.0, 1.0])
def test_each_head_falls_by_threshold_over_maximum(rng, x64, name, balance):
    heads, key_heads, layers, axis, *_ = LAYOUTS[name]
    maxima = np.resize([40, -np.inf, 10, 1000, 3, 0, 11], (*layers, heads))
    params, updates = (draw(name, seed, "float64") for seed in (0, 1))
    first, there = (range(start, start + len(layers)) for start in (0, axis))
    moved = (
        jax.tree.map(lambda x: jnp.moveaxis(x, first, there), x)
        for x in (updates, params)
    )
    clipped = clip(*moved, maxima, balance, layers_axis=axis)
    clipped = jax.tree.map(lambda x: jnp.moveaxis(x, there, first), clipped)
    before, after = (optax.apply_updates(params, x) for x in (updates, clipped))
    x = rng.normal(size=(7, EMBED))
    gamma = THRESHOLD / np.maximum(maxima, THRESHOLD)
    expected = gamma[..., None, None] * logits(name, before, x)
    # Logits are up to 1e3 and carry some ten roundings of 1e-16 each; w + (f (w + u) -
    # w) rounds at the size of w, which is up to 100 times that of the result.
    np.testing.assert_allclose(logits(name, after, x), expected, rtol=1e-11, atol=1e-11)
    # A key head falls as the query head with the largest logit of its group asks.
    least = gamma.reshape(*layers, key_heads, -1).min(axis=-1) ** (1 - balance)
    old, new = (
        np.reshape(
            tree["blocks"]["attn"]["k"]["kernel"], (*layers, EMBED, key_heads, -1)
        )
        for tree in (before, after)
    )
    np.testing.assert_allclose(new, old * least[..., None, :, None], rtol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_groups_keep_every_bit(dtype):
    """Of two groups of three heads the first is clipped, in float32, rounded once.

    Without any promotion; gradients, and so updates, may be narrower.
    """
    params, updates = draw("GQA", 0, dtype), draw("GQA", 1, "bfloat16")
    maxima = jnp.array([1e3, 40.0, 5.0, 10.0, 9.0, -3.0])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = clip(updates, params, maxima)
    wide = (jax.tree.map(lambda x: x.astype("float32"), x) for x in (updates, params))
    expected = jax.tree.map(lambda x: x.astype(dtype), clip(*wide, maxima))
    chex.assert_trees_all_equal(got, expected)

    def changed(got, which, leaf):
        """How often each of its columns, over all rows, has another number."""
        new, old = (x["blocks"]["attn"][which][leaf] for x in (got, updates))
        return (new != old).reshape(-1, old.shape[-1]).any(axis=0)

    np.testing.assert_array_equal(got["head"], updates["head"])
    queries = clip(updates, params, maxima, 1.0)  # these alone, of heads above it
    for leaf in ("kernel", "bias"):
        assert not changed(got, "v", leaf).any()
        assert not changed(queries, "k", leaf).any()
        for tree, which, columns in ((got, "q", 9), (got, "k", 3), (queries, "q", 6)):
            found = changed(tree, which, leaf)
            assert found[:columns].any() and not found[columns:].any()


def test_biases_by_their_names_in_other_frameworks():
    """Haiku calls kernel and bias w and b, Keras has q_bias beside q_kernel."""
    leaves, maxima = (jnp.ones((EMBED, 8)), jnp.ones(8)), jnp.array([40.0, 90.0])
    ends = []
    for names in (("kernel", "bias"), ("w", "b"), ("q_kernel", "q_bias")):
        module = dict(zip(names, leaves, strict=True))
        params = {"attn": {"q": module, "k": module}}
        new = clip(params, params, maxima)["attn"]
        ends.append([new[which][name] for which in "qk" for name in names])
    assert (ends[0][1] != leaves[1]).any()
    for found in ends[1:]:
        chex.assert_trees_all_equal(found, ends[0])


def test_max_logits_by_prefix_module_or_sown():
    params = {"blocks": {i: draw("MHA")["blocks"] for i in ("1", "10")}}
    updates, tx = jax.tree.map(jnp.ones_like, params), jm.clip_qk(THRESHOLD)
    first, last = jnp.array([40.0, 1, 1, 1]), jnp.array([1.0, 1, 90, 1])
    results = [
        tx.update(updates, tx.init(params), params, max_logits=same)
        for same in (
            {"blocks/1/attn": first, "blocks/10/attn": last},
            {"blocks/10": last, "blocks/1": first},
            {"blocks": {"1": first, "10": {"attn": last}}},
            {"blocks": {"1": {"attn": {"sown": (first,)}}, "10": {"attn": (last,)}}},
        )
    ]
    for result in results:
        chex.assert_trees_all_equal(result, results[0])
    got, state = results[0]
    assert state.clipped == 2
    for block, head in (("1", 0), ("10", 2)):
        changed = got["blocks"][block]["attn"]["q"]["kernel"] != 1
        np.testing.assert_array_equal(changed.any(axis=0), np.arange(12) // 3 == head)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_maximum_that_is_not_finite_clips_nothing(value):
    params, updates = (draw("DenseGeneral MQA", seed) for seed in (0, 1))
    got = clip(updates, params, jnp.array([value, 1.0, 2.0, 3.0]))
    chex.assert_trees_all_equal(got, updates)
    finite = clip(updates, params, jnp.array([-np.inf, 40.0, 2.0, 3.0]))
    same = clip(updates, params, jnp.array([value, 40.0, 2.0, 3.0]))
    chex.assert_trees_all_equal(same, finite)


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
    """In float32, without promotion of dtypes and ranks; and no gradient flows."""
    q, k = (jnp.asarray(rng.normal(size=(2, 13, h, 4)), dtype) for h in heads)
    measure = functools.partial(jm.max_attention_logits, block_size=block_size)
    for queries, options, scale, seen in (
        (q, {"causal": True}, 0.5, np.tri(13, dtype=bool)),
        (q, {"causal": False, "scale": -2.0}, -2.0, True),
        # As many keys as one likes, where none is later than another.
        (q[:, :5], {"causal": False}, 0.5, True),
    ):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            result, pull = jax.vjp(functools.partial(measure, **options), queries, k)
        assert result.dtype == jnp.float32
        wide = (np.asarray(x, np.float64) for x in (queries, k))
        exact = largest_of_all(*wide, scale, seen)  # bfloat16 would be 4e-3 off
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)
        assert not any(jnp.any(g) for g in pull(result))


def test_whether_later_keys_count_has_no_default():
    """The logits of an encoder are larger than those of its causal half."""
    q = k = S((1, 2, 1, 1)) * jnp.array([1.0, 5.0]).reshape(1, 2, 1, 1)
    q = q[:, ::-1]
    assert jm.max_attention_logits(q, k, causal=True) == 5.0
    assert jm.max_attention_logits(q, k, causal=False) == 25.0
    with pytest.raises(TypeError, match="'causal'"):
        jm.max_attention_logits(q, k)


def test_memory_is_that_of_a_block():
    batch, time, heads, d, block = 2, 2048, 4, 16, 128
    shape = jax.ShapeDtypeStruct((batch, time, heads, d), jnp.float32)
    given = {"causal": True, "block_size": block}
    measure = jax.jit(functools.partial(jm.max_attention_logits, **given))
    used = measure.lower(shape, shape).compile().memory_analysis().temp_size_in_bytes
    all_logits = 4 * batch * heads * time**2  # 134 MB
    one_block = 4 * batch * heads * block**2  # 0.5 MB
    inputs = 2 * 4 * batch * time * heads * d  # 2 MB
    assert one_block <= used <= inputs + 4 * one_block < all_logits / 30


# --- what does not fit ----------------------------------------------------------------

S = jnp.ones
KERNEL = {"q": S((8, 12)), "k": S((8, 12))}
ONE, TWO = {"attn": KERNEL}, {str(i): {"attn": KERNEL} for i in range(2)}
THREE = {"attn": {"q": S((8, 4, 3)), "k": S((8, 3, 3))}}
NARROW = {"attn": KERNEL | {"k": S((8, 10))}}
BIAS = {"attn": KERNEL | {"q": {"kernel": S((8, 12)), "bias": S(())}}}
AB = {"a": ONE, "b": {"other": {"k": S((4, 4))}}}


def use(params, max_logits, query="attn/q", key="attn/k", grads=None):
    tx = jm.clip_qk(1.0, query=query, key=key)
    tx.update(grads or params, tx.init(params), params, max_logits=max_logits)


def measured(keys):
    jm.max_attention_logits(S((2, 5, 4, 8)), S(keys), causal=True)


WRONG = {
    r"the pattern 'wq' matches no parameter; .*attn/q": lambda: use(AB, None, "wq"),
    "module 'a' has 'a/attn/q' but nothing that key=": lambda: use(
        AB, None, key="other/k"
    ),
    "'a/attn/k' matches both query='attn' and key=": lambda: use(AB, None, "attn"),
    "module 'b/other' has 'b/other/k' but nothing that que": lambda: use(
        AB, None, "*/q", "*/k"
    ),
    "max_logits of tx.update has entries at no path": lambda: use(ONE, None),
    "no path; expected one for each .* module: 'attn'": lambda: use(ONE, {}),
    "entries at 'attn/x' .*'attn/y'": lambda: use(
        ONE, {"attn": {"x": S(2), "y": S(2)}}
    ),
    r"entries at .*: '0/attn', '1/attn'$": lambda: use(TWO, {"0": S(4)}),
    r"entries at 'attn' .*, 'mlp' of": lambda: use(ONE, {"attn": S(4), "mlp": S(4)}),
    r"expected max_logits \(\*layers, heads\)": lambda: use(ONE, S(())),
    r"'attn/q' of shape \(8, 12\) .* of 'attn' of shape \(5,\)": lambda: use(ONE, S(5)),
    r"with the layers \(3,\) from axis 0 on": lambda: use(ONE, S((3, 2))),
    "key heads that divide the query": lambda: use(THREE, S(4)),
    "'attn/k' .* one head_dim": lambda: use(NARROW, S(4)),
    r"'attn/q/bias' of shape \(\) .* biases without": lambda: use(BIAS, S(4)),
    "of shape .2, 4, 4, 8.; expected the same batch": lambda: measured((2, 4, 4, 8)),
    "of shape .2, 5, 4, 1.; expected the same batch": lambda: measured((2, 5, 4, 1)),
    "of shape .1, 5, 4, 8.; expected the same batch": lambda: measured((1, 5, 4, 8)),
    "of shape .2, 5, 3, 8.; .* that divide the heads": lambda: measured((2, 5, 3, 8)),
    "of shape .2, 5, 8, 8.; .* that divide the heads": lambda: measured((2, 5, 8, 8)),
    "gradient 'attn/q': .* of shape .1, 12.": lambda: use(
        ONE, S(4), grads={"attn": KERNEL | {"q": S((1, 12))}}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()
