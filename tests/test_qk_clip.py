"""QK-clip: logits fall by threshold / maximum, head by head, and nothing else moves."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_muon as jm

HEAD_DIM, EMBED, THRESHOLD = 3, 5, 10.0

# heads, key heads, layers, whether heads have their own axis, whether there are biases
LAYOUTS = {
    "MHA": (4, 4, (), False, False),
    "MHA, bias": (4, 4, (), False, True),
    "GQA": (6, 2, (), False, True),
    "MQA": (4, 1, (), False, False),
    "scanned": (4, 2, (3,), False, True),
    "scanned twice": (2, 2, (2, 2), False, True),
    "DenseGeneral": (4, 2, (), True, True),
    "DenseGeneral MQA": (4, 1, (), True, False),
    "DenseGeneral scanned": (4, 2, (3,), True, True),
    "one head": (1, 1, (), True, False),
}


def draw(name, seed=0, dtype=np.float32):
    """Parameters of one attention module, and the path in its tree."""
    heads, key_heads, layers, apart, bias = LAYOUTS[name]
    rng = np.random.default_rng(seed)

    def projection(count):
        out = (count, HEAD_DIM) if apart else (count * HEAD_DIM,)
        shapes = {"kernel": (*layers, EMBED, *out)}
        if bias:
            shapes["bias"] = (*layers, *out)
        return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}

    attn = {"q": projection(heads), "k": projection(key_heads)}
    attn["v"] = projection(key_heads)
    return {"blocks": {"attn": attn}, "head": {"kernel": jnp.ones((2, 2), dtype)}}


def logits(name, params, x):
    """(*layers, heads, time, time), in float64, for inputs x (time, EMBED)."""
    heads, key_heads, layers, _, _ = LAYOUTS[name]
    found = {}
    for which, count in (("q", heads), ("k", key_heads)):
        leaves = params["blocks"]["attn"][which]
        kernel, bias = (np.asarray(leaves.get(n, 0.0), np.float64) for n in KINDS)
        kernel = kernel.reshape(*layers, EMBED, count, HEAD_DIM)
        made = np.einsum("te,...ehd->...htd", x, kernel)
        if bias.ndim:
            made = made + bias.reshape(*layers, count, 1, HEAD_DIM)
        found[which] = made
    keys = np.repeat(found["k"], heads // key_heads, axis=-3)
    return np.einsum("...qd,...kd->...qk", found["q"], keys)


KINDS = ("kernel", "bias")


@jax.jit
def clip(updates, params, max_logits, balance=0.5):
    tx = jm.clip_qk(THRESHOLD, balance=balance)
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


def test_weights_as_they_will_be_after_the_update_take_the_root():
    """The rule of the paper, row by row, in float32."""
    params, updates = (draw("MHA, bias", seed) for seed in (0, 1))
    maxima = jnp.array([40.0, 10.0, 1000.0, 9.0])
    tx = jm.clip_qk(THRESHOLD)
    got, _ = tx.update(updates, tx.init(params), params, max_logits=maxima)
    factor = np.repeat([0.5, 1.0, 0.1, 1.0], HEAD_DIM)
    for which in "qk":
        for kind in ("kernel", "bias"):
            w, u, new = (
                np.asarray(tree["blocks"]["attn"][which][kind], np.float64)
                for tree in (params, updates, got)
            )
            # One rounding of the factor, and some at the size of the weights, about 4.
            np.testing.assert_allclose(w + new, factor * (w + u), atol=1e-6)


def test_a_group_takes_its_largest_logit_and_queries_what_remains():
    params = draw("GQA")
    zeros = jax.tree.map(jnp.zeros_like, params)
    # Key heads of three query heads each. The second group is below the threshold.
    maxima = jnp.array([1000.0, 40.0, 5.0, 10.0, 9.0, -3.0])
    tx = jm.clip_qk(THRESHOLD)
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits=maxima)
    after = optax.apply_updates(params, updates)
    old, new = (tree["blocks"]["attn"] for tree in (params, after))
    for which, factors in (("k", [0.1, 1]), ("q", [0.1, 2.5, 10, 1, 1, 1])):
        for kind in ("kernel", "bias"):
            expected = old[which][kind] * np.repeat(factors, HEAD_DIM)
            np.testing.assert_allclose(new[which][kind], expected, rtol=2e-6, atol=1e-6)


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
    tx = jm.clip_qk(THRESHOLD, layers_axis=1)
    state = tx.init(params)
    got, _ = tx.update(moved(updates), state, moved(params), max_logits=maxima)
    expected = moved(clip(updates, params, maxima))
    assert any(map(np.any, jax.tree.leaves(optax.tree.sub(expected, moved(updates)))))
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-6)
    wrong = re.escape(f"(heads, {', '.join(map(str, layers))}, head_dim)")
    with pytest.raises(ValueError, match=wrong):
        tx.update(updates, state, params, max_logits=maxima)


def test_two_parts_of_a_logit_of_which_one_key_is_shared():
    """Kimi K2's attention: the key that all heads share stays, and all logits fall."""
    rng = np.random.default_rng(0)
    widths = {"q": 12, "k": 12, "q_rotary": 8, "k_rotary": 2}  # four heads of 3, and 2
    params = {
        "attn": {
            name: jnp.asarray(rng.normal(size=(EMBED, width)), jnp.float32)
            for name, width in widths.items()
        }
    }
    tx = optax.chain(
        optax.sgd(0.1),
        jm.clip_qk(THRESHOLD),
        jm.clip_qk(THRESHOLD, query="attn/q_rotary", key="attn/k_rotary", balance=1.0),
    )
    maxima = np.array([15.0, 5.0, 80.0, 11.0])
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(
        grads, tx.init(params), params, max_logits={"attn": jnp.asarray(maxima)}
    )
    before = jax.tree.map(lambda p: p - 0.1, params)["attn"]
    after = optax.apply_updates(params, updates)["attn"]
    np.testing.assert_array_equal(after["k_rotary"], params["attn"]["k_rotary"] - 0.1)

    def both(attn):
        x = np.random.default_rng(1).normal(size=(7, EMBED))
        made = {n: (x @ np.asarray(w, np.float64)).reshape(7, -1, w.shape[1] // 4)
                for n, w in attn.items() if n != "k_rotary"}  # fmt: skip
        shared = x @ np.asarray(attn["k_rotary"], np.float64)
        own = np.einsum("qhd,khd->hqk", made["q"], made["k"])
        return own + np.einsum("qhd,kd->hqk", made["q_rotary"], shared)

    gamma = np.minimum(1, THRESHOLD / maxima)
    expected = gamma[:, None, None] * both(before)
    np.testing.assert_allclose(both(after), expected, rtol=1e-5, atol=1e-4)


def test_bfloat16_keeps_its_dtype_and_rounds_once():
    """Without any promotion of dtypes and ranks."""
    params, updates = (draw("GQA", seed, jnp.bfloat16) for seed in (0, 1))
    maxima = jnp.array([1000.0, 40.0, 5.0, 10.0, 9.0, -3.0])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = clip(updates, params, maxima)["blocks"]["attn"]["k"]["kernel"]
    w, u = (t["blocks"]["attn"]["k"]["kernel"].astype(float) for t in (params, updates))
    factor = np.repeat([0.1, 1], HEAD_DIM)
    assert got.dtype == jnp.bfloat16
    exact = np.asarray(factor * (w + u) - w)
    # Half of the spacing of bfloat16, 2^-8; float32 before that is a thousandth of it.
    np.testing.assert_allclose(got.astype(float), exact, rtol=2**-8)


def test_max_logits_by_prefix_module_sown_or_alone():
    params = {"blocks": [{"attn": draw("MHA", i)["blocks"]["attn"]} for i in (0, 1)]}
    updates = jax.tree.map(jnp.ones_like, params)
    first, second = jnp.array([40.0, 1, 1, 1]), jnp.array([1.0, 1, 90, 1])
    tx = jm.clip_qk(THRESHOLD)

    def update(max_logits):
        return tx.update(updates, tx.init(params), params, max_logits=max_logits)[0]

    expected = update({"blocks/0/attn": first, "blocks/1/attn": second})
    for same in (
        {"blocks/1": second, "blocks/0": first},
        {"blocks": [first, {"attn": second}]},
        {"blocks": [{"attn": {"max_logits": (s,)}} for s in (first, second)]},
    ):
        jax.tree.map(np.testing.assert_array_equal, update(same), expected)
    kernel = updates["blocks"][0]["attn"]["q"]["kernel"]
    changed = expected["blocks"][0]["attn"]["q"]["kernel"] != kernel
    np.testing.assert_array_equal(changed.any(axis=0), np.arange(12) < 3)


def test_linen_scanned_and_what_it_sows():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            q, k = (nn.DenseGeneral((2, 4), name=n)(x) for n in ("query", "key"))
            s = jm.max_attention_logits(q, k)
            self.sow("intermediates", "max_logits", s)
            return nn.DenseGeneral(6, axis=(-2, -1), name="out")(q + k), None

    axes = {"params": 0, "intermediates": 0}
    layers = nn.scan(Attention, axes, split_rngs={"params": True}, length=3)()
    x = 30 * jax.random.normal(jax.random.key(0), (2, 5, 6))
    params = layers.init(jax.random.key(1), x, None)["params"]
    tx = jm.clip_qk(THRESHOLD, query="query", key="key")

    def sown(params):
        _, kept = layers.apply({"params": params}, x, None, mutable=["intermediates"])
        return kept["intermediates"]

    zeros = jax.tree.map(jnp.zeros_like, params)
    assert sown(params)["max_logits"][0].shape == (3, 2)
    before = sown(params)["max_logits"][0][0]
    assert (before > THRESHOLD).all()
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits=sown(params))
    after = sown(optax.apply_updates(params, updates))["max_logits"][0][0]
    # The first layer sees the same inputs as before: its heads end at the threshold.
    np.testing.assert_allclose(after, THRESHOLD, rtol=1e-5)


def test_nnx_attention_with_biases():
    attention = nnx.MultiHeadAttention(
        num_heads=4, in_features=6, qkv_features=8, decode=False, rngs=nnx.Rngs(0),
        bias_init=nnx.initializers.normal(1.0),
    )  # fmt: skip
    x = 30 * jax.random.normal(jax.random.key(0), (2, 5, 6))
    graph, params = nnx.split(attention, nnx.Param)

    def maxima(params):
        model = nnx.merge(graph, params)
        return jm.max_attention_logits(model.query(x), model.key(x), causal=False)

    pure = nnx.as_pure(params)
    before = maxima(params)
    threshold = float(jnp.sort(before)[1])
    tx = jm.clip_qk(threshold, query="query", key="key")
    zeros = jax.tree.map(jnp.zeros_like, pure)
    updates, _ = tx.update(zeros, tx.init(params), pure, max_logits=before)
    after = maxima(optax.apply_updates(pure, updates))
    np.testing.assert_allclose(after, jnp.minimum(before, threshold), rtol=1e-5)
    np.testing.assert_array_equal(after == before, before <= threshold)


# --- with other transforms ------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_maximum_that_is_not_finite_clips_nothing(value):
    params, updates = (draw("MQA", seed) for seed in (0, 1))
    got = clip(updates, params, jnp.array([value, 1.0, 2.0, 3.0]))
    jax.tree.map(np.testing.assert_array_equal, got, updates)
    finite = clip(updates, params, jnp.array([-np.inf, 40.0, 2.0, 3.0]))
    same = clip(updates, params, jnp.array([value, 40.0, 2.0, 3.0]))
    jax.tree.map(np.testing.assert_array_equal, same, finite)


def test_a_skipped_step_leaves_weights_alone():
    params = draw("GQA")
    tx = jm.skip_nonfinite(
        optax.chain(jm.nanochat(dtype="float32"), jm.clip_qk(THRESHOLD))
    )
    maxima = jnp.full(6, 50.0)
    state = tx.init(params)
    update = jax.jit(tx.update)
    bad = jax.tree.map(lambda p: p.at[..., 0].set(jnp.nan), params)
    updates, state = update(bad, state, params, max_logits=maxima)
    assert state.skipped == 1
    assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
    updates, state = update(params, state, params, max_logits=maxima)
    assert state.skipped == 1
    plain = jm.nanochat(dtype="float32")
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    k, w = (t["blocks"]["attn"]["k"]["kernel"] for t in (updates, params))
    moved = expected["blocks"]["attn"]["k"]["kernel"]
    np.testing.assert_allclose(w + k, 0.2**0.5 * (w + moved), rtol=1e-5, atol=1e-6)


def test_in_multi_steps_and_injected_hyperparameters():
    params = draw("MHA")
    grads = jax.tree.map(jnp.ones_like, params)
    maxima = jnp.array([40.0, 1.0, 1.0, 1.0])
    expected = clip(jax.tree.map(lambda g: -0.1 * g, grads), params, maxima)

    def make(threshold):
        return optax.chain(optax.sgd(0.1), jm.clip_qk(threshold))

    for tx in (
        optax.inject_hyperparams(make)(threshold=THRESHOLD),
        optax.MultiSteps(make(THRESHOLD), 1),
    ):
        update = jax.jit(tx.update)
        got, _ = update(grads, tx.init(params), params, max_logits=maxima)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
            got,
            expected,
        )


def test_a_run_whose_logits_grow_stays_bounded():
    """Attention without QK-norm that learns a sharp lookup, with a large step size."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 16, 8)), jnp.float32)
    params = {
        "attn": {
            name: jnp.asarray(rng.normal(size=(8, 8)) / 8**0.5, jnp.float32)
            for name in "qk"
        }
    }

    def loss(params):
        q, k = (  # two heads of four
            (x @ params["attn"][name]).reshape(4, 16, 2, 4) for name in "qk"
        )
        attention = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        wanted = jnp.roll(x, 1, axis=1)  # each position wants its neighbour
        mixed = jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(attention), x) / 2
        largest = jm.max_attention_logits(q, k, causal=False)
        return jnp.mean((mixed - wanted) ** 2), largest

    def run(tx):
        @jax.jit
        def step(carry, _):
            params, state = carry
            (_, largest), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = tx.update(grads, state, params, max_logits=largest)
            return (optax.apply_updates(params, updates), state), largest

        return jax.lax.scan(step, (params, tx.init(params)), length=200)[1]

    threshold = 20.0
    muon = jm.nanochat(0.2, weight_decay=0.0, dtype="float32")
    free = run(optax.with_extra_args_support(muon))
    clipped = run(optax.chain(muon, jm.clip_qk(threshold)))
    assert (free[-1] > 10 * threshold).all()
    # What one step adds to a head at the threshold.
    assert clipped.max() < 1.5 * threshold
    assert (clipped[100:] > threshold / 2).all()


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ("wq", "attn/k", r"the pattern 'wq' matches no parameter; .*attn/q/kernel"),
        ("attn/q", "wk", r"the pattern 'wk' matches no parameter"),
        (
            "attn/q",
            "other/k",
            r"module 'a' has 'a/attn/q/kernel' but nothing that key=",
        ),
        ("attn", "attn/k", r"'a/attn/k/kernel' matches both query='attn' and key="),
        ("attn/k", "attn/k", "matches both query='attn/k' and key='attn/k'"),
        ("*/q", "*/k", r"module 'b/other' has 'b/other/k/kernel' but nothing that que"),
    ],
)
def test_patterns_at_init(query, key, message):
    params = {
        "a": {"attn": {n: {"kernel": jnp.zeros((4, 4))} for n in "qk"}},
        "b": {"other": {"k": {"kernel": jnp.zeros((4, 4))}}},
    }
    with pytest.raises(ValueError, match=message):
        jm.clip_qk(1.0, query=query, key=key).init(params)


S = jnp.ones
KERNEL = {"q": S((8, 12)), "k": S((8, 12))}


@pytest.mark.parametrize(
    ("attn", "max_logits", "message"),
    [
        (KERNEL, None, "got max_logits=None"),
        (KERNEL, {}, "entries at no path; expected one for each .* module: 'attn'"),
        (KERNEL, {"b": S(2)}, r"entries at 'b' of shape \(2,\); expected .*: 'attn'"),
        (KERNEL, [S(2), S(2)], "entries at '0' .*, '1' .*; expected .*: 'attn'"),
        (KERNEL, {"attn": {"x": S(2), "y": S(2)}}, "entries at 'attn/x' .*'attn/y'"),
        (KERNEL, S(()), r"expected .* max_logits of shape \(\*layers, heads\)"),
        (KERNEL, S(5), r"'attn/q' of shape \(8, 12\) .* of 'attn' of shape \(5,\)"),
        (KERNEL, S(0), r"'attn/q' .* \(0,\); expected \(embed, heads \* head_dim\)"),
        (
            KERNEL,
            S((3, 2)),
            r"expected \(3, embed, heads \* head_dim\) or \(3, embed, heads, head",
        ),
        ({"q": S((8, 4, 3)), "k": S((8, 4, 3))}, S(3), r"'attn/q' of shape \(8, 4, 3"),
        ({"q": S((8, 4, 3)), "k": S((8, 2, 4))}, S(4), r"'attn/k' of shape \(8, 2, 4"),
        (
            {"q": S((8, 4, 3)), "k": S((8, 3, 3))},
            S(4),
            "'attn/k' .* expected .* key heads that divide the query heads",
        ),
        ({"q": S((8, 12)), "k": S((8, 10))}, S(4), "'attn/k' .* one head_dim"),
        (
            {"q": {"kernel": S((8, 12)), "bias": S(8)}, "k": S((8, 12))},
            S(4),
            "'attn/q/kernel' .* one head_dim",
        ),
        (
            {"q": S((8, 12)), "k": {"kernel": S((8, 6)), "bias": S(12)}},
            S(4),
            "'attn/k/kernel' .* one head_dim",
        ),
        (
            {"q": {"kernel": S((8, 12)), "bias": S(())}, "k": S((8, 12))},
            S(4),
            r"'attn/q/bias' .* expected \(heads \* head_dim\) or \(heads, head_dim\)",
        ),
    ],
)
def test_max_logits_and_shapes_at_update(attn, max_logits, message):
    params = {"attn": attn, "mlp": jnp.ones((8, 8))}
    tx = optax.chain(optax.sgd(0.1), jm.clip_qk(1.0))
    state = tx.init(params)
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, params, max_logits=max_logits)


def test_params_are_needed_and_an_entry_serves_one_module():
    params = {str(i): {"attn": KERNEL} for i in range(2)}
    tx = jm.clip_qk(1.0)
    with pytest.raises(ValueError, match="got params=None"):
        tx.update(params, tx.init(params), max_logits=jnp.ones(4))
    for logits in (jnp.ones(4), {"0": jnp.ones(4)}):
        with pytest.raises(ValueError, match=r"entries at .*: '0/attn', '1/attn'$"):
            tx.update(params, tx.init(params), params, max_logits=logits)
