"""Labels by role, the same for every Flax form of a tree, and the rules of users."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType

import jax_muon as jm
from jax_muon.paths import is_box, leaves_with_paths
from jax_muon.reading.read import read_leaves
from jax_muon.reading.tree import Leaf
from tests.reading import reader


def labels_of(params, rules=None):
    return jm.read(params, rules=rules).labels(params)


ROLES = [
    # path, shape, label
    ("mlp/Dense_0/kernel", (4, 8), "muon"),
    ("mlp/Dense_0/bias", (8,), "adamw"),
    ("layers/mlp/Dense_0/kernel", (12, 4, 8), "muon"),
    ("layers/mlp/Dense_0/bias", (12, 8), "adamw"),
    ("layers/LayerNorm_0/scale", (12, 4), "adamw"),
    ("layers/attn/query/bias", (12, 2, 4), "adamw"),
    ("attn/query/kernel", (8, 2, 4), "muon"),
    ("attn/value/kernel", (8, 2, 4), "muon"),
    ("attn/out/kernel", (2, 4, 8), "muon"),
    ("attn/value", (8, 8), "muon"),
    ("multi_head_attention/q_proj", (8, 8), "muon"),
    ("moe/experts/up", (8, 4, 16), "muon"),
    ("moe/router/kernel", (4, 8), "adamw"),
    ("moe/router/dense/kernel", (4, 8), "adamw"),
    ("TopKRouter_0/w", (4, 8), "adamw"),
    ("router_free/kernel", (4, 8), "muon"),
    ("mlp/gate/kernel", (4, 8), "muon"),
    ("head/lora/lora_a", (8, 2), "adamw"),
    ("head/lora/a", (8, 2), "adamw"),
    ("query/lora/lora_a", (8, 2), "muon"),
    ("Einsum_0/kernel", (8, 2, 4), "muon"),
    ("Conv_0/kernel", (3, 3, 4, 8), "muon"),
    ("depthwise_conv/kernel", (3, 3, 1, 8), "adamw"),
    ("depthwise/kernel", (3, 3, 2, 8), "adamw"),
    ("GroupConv_0/kernel", (3, 3, 2, 8), "adamw"),
    ("group_0/Conv_0/kernel", (3, 3, 2, 8), "muon"),
    ("grouped_experts/up", (4, 8, 16), "muon"),
    ("ConvTranspose_0/kernel", (3, 3, 4, 8), "muon"),
    ("Embed_0/embedding", (64, 8), "adamw"),
    ("embed/embedding", (64, 8), "adamw"),
    ("wte", (64, 8), "adamw"),
    ("wpe/embedding", (64, 8), "adamw"),
    ("tok_emb/weight", (64, 8), "adamw"),
    ("pos_embedding", (1, 16, 8), "adamw"),
    ("cls_token", (1, 1, 8), "adamw"),
    ("patch_embed/kernel", (48, 8), "adamw"),
    ("lm_head/kernel", (8, 64), "adamw"),
    ("head/kernel", (8, 10), "adamw"),
    ("Head_0/kernel", (8, 10), "adamw"),
    ("logits_dense/kernel", (8, 64), "adamw"),
    ("unembed/kernel", (8, 64), "adamw"),
    ("classifier/kernel", (8, 10), "adamw"),
    ("text_embedder/layers_0/mlp/kernel", (8, 16), "muon"),
    ("head_mixer/kernel", (8, 8), "muon"),
    ("RMSNorm_0/weight", (12, 4), "adamw"),
    ("ln_1/g", (12, 4), "adamw"),
    ("adaLN/weight", (48, 8), "muon"),
    ("AdaLN_0/scale", (12, 8), "adamw"),
    ("resid_lambdas", (12, 2), "adamw"),
    ("temperature", (), "adamw"),
    ("Dense_0/lora_a", (8, 2), "muon"),
    ("Dense_0/lora_b", (2, 8), "muon"),
    ("mlp/b", (12, 8), "adamw"),
    ("LMHead/kernel", (8, 64), "adamw"),
    ("lmhead/kernel", (8, 64), "adamw"),
    ("lm_head/Dense_0/kernel", (8, 64), "adamw"),
    ("cls", (1, 1, 8), "adamw"),
    ("resampler/latents", (16, 8), "adamw"),
    ("latents/kernel", (16, 8), "muon"),
    ("s4/log_A_real", (8, 16), "adamw"),
    ("att/time_faaaa", (2, 4), "adamw"),
    ("dw/kernel", (3, 3, 1, 8), "adamw"),
    ("recurrent_block/conv_1d/w", (4, 64), "adamw"),
    ("pointwise_conv/kernel", (64, 128), "muon"),
    ("QKNorm_0/weight", (4, 8), "adamw"),
    ("norm_mlp/kernel", (8, 8), "muon"),
    ("empty/kernel", (0, 8), "adamw"),
]


@pytest.mark.parametrize(("path", "shape", "label"), ROLES, ids=[r[0] for r in ROLES])
def test_roles(path, shape, label):
    (read,) = read_leaves([Leaf(path, shape, jnp.float32)])
    assert read.label == label


GATES = [
    # the gate, what stands beside it, label
    ((4, 8), {"experts": {"up": {"kernel": (8, 4, 16)}}}, "adamw"),
    ((4, 8), {"Expert_0": {"up": (4, 16)}, "Expert_1": {"up": (4, 16)}}, "adamw"),
    ((4, 8), {"up": (8, 4, 16), "down": (8, 16, 4)}, "adamw"),
    ((4, 16), {"up": (4, 16), "down": (16, 4)}, "muon"),  # a gated MLP
    ((8, 4, 16), {"up": (8, 4, 16), "down": (8, 16, 4)}, "muon"),  # experts' own
    ((3, 8, 4, 16), {"up": (3, 8, 4, 16)}, "muon"),
]


@pytest.mark.parametrize(("gate", "beside", "label"), GATES)
def test_a_gate_beside_experts_is_a_router(gate, beside, label):
    shapes = {"moe": {"gate": {"kernel": gate}, **beside}, "experts": (2, 3, 4)}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    labels = labels_of(params)
    assert labels["moe"].pop("gate") == {"kernel": label}
    assert set(jax.tree.leaves(labels)) == {"muon"}
    ruled = labels_of(params, {"moe/gate": "gates"})
    assert ruled["moe"]["gate"] == {"kernel": "gates"}


@pytest.mark.parametrize(
    ("gate", "experts"),
    [
        ("gating/kernel", {"up": (8, 4, 16)}),
        ("gating/kernel", {"experts/0/up": (4, 16), "experts/1/up": (4, 16)}),
        ("w_gate", {"up": (8, 4, 16)}),
    ],
)
def test_a_gate_by_which_experts_are_told_is_a_router(gate, experts):
    shapes = {f"moe/{path}": shape for path, shape in {gate: (4, 8), **experts}.items()}
    shapes = {path: jax.ShapeDtypeStruct(x, "float32") for path, x in shapes.items()}
    expected = dict.fromkeys(shapes, "muon") | {f"moe/{gate}": "adamw"}
    assert labels_of(shapes) == expected


def test_integers_and_complex_go_to_adamw():
    params = {"a": jnp.zeros((2, 2), int), "b": jnp.zeros((2, 2), complex)}
    assert labels_of(params) == {"a": "adamw", "b": "adamw"}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        init = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "mlp")
        )
        x = nn.LayerNorm()(nn.Dense(8, kernel_init=init)(x))
        x = nn.MultiHeadDotProductAttention(num_heads=2)(x)
        return nn.Dense(16, name="lm_head")(x)


EXPECTED = {
    "Embed_0/embedding": "adamw",
    "Dense_0/kernel": "muon",
    "Dense_0/bias": "adamw",
    "LayerNorm_0/scale": "adamw",
    "LayerNorm_0/bias": "adamw",
    **{
        f"MultiHeadDotProductAttention_0/{name}/{leaf}": label
        for name in ("query", "key", "value", "out")
        for leaf, label in (("kernel", "muon"), ("bias", "adamw"))
    },
    "lm_head/kernel": "adamw",
    "lm_head/bias": "adamw",
}


def test_linen_boxed_unboxed_and_frozen_agree():
    boxed = LinenBlock().init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    for tree in (boxed, nn.meta.unbox(boxed), FrozenDict(boxed)):
        labels = labels_of(tree)
        assert dict(leaves_with_paths(labels)) == EXPECTED
        whole = jax.tree.structure(tree, is_leaf=is_box)  # a box gets one label
        assert jax.tree.structure(labels) == whole


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.attn = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.lm_head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.attn(x))


def test_nnx_state_pure_dict_and_update_agree():
    model = NnxBlock(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    labels = dict(leaves_with_paths(labels_of(state)))
    assert labels == dict(leaves_with_paths(labels_of(nnx.to_pure_dict(state))))
    assert labels["layers/0/kernel"] == "muon"
    assert labels["attn/value/kernel"] == "muon"
    assert labels["attn/out/kernel"] == "muon"
    assert labels["attn/value/bias"] == "adamw"
    assert labels["embed/embedding"] == labels["lm_head/kernel"] == "adamw"

    # nnx.Optimizer boxes parameters at init and not at update: both must agree.
    seen = []

    def recording(params):
        matrices = jm.read(params)
        seen.append(dict(leaves_with_paths(matrices.labels(params))))
        return matrices

    optimizer = nnx.Optimizer(
        model, jm.nanochat(matrices=recording, dtype="float32"), wrt=nnx.Param
    )

    def loss(model):
        return jnp.mean(model(jnp.zeros((1, 4), int)) ** 2)

    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    before = jax.tree.map(jnp.copy, before)
    optimizer.update(model, nnx.grad(loss)(model))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert len(seen) >= 2
    assert all(one == labels for one in seen)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
    assert moved["layers"][0]["kernel"] and moved["attn"]["value"]["kernel"]


def test_attention_kernels_of_flax_are_read_with_their_heads_together():
    model = NnxBlock(nnx.Rngs(0))
    table = str(jm.describe(jm.nanochat(), nnx.state(model, nnx.Param)))
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "1 x (8, 8)" in rows["attn/query/kernel"]
    assert "1 x (8, 8)" in rows["attn/out/kernel"]


def test_rules_come_first_and_in_order():
    params = {"blocks": [{"q": jnp.zeros((2, 2)), "k": jnp.zeros((2, 2))}] * 2}
    rules = {"blocks/0/q": "frozen", "q": "slow"}
    labels = dict(leaves_with_paths(labels_of(params, rules)))
    assert labels == {
        "blocks/0/q": "frozen",
        "blocks/0/k": "muon",
        "blocks/1/q": "slow",
        "blocks/1/k": "muon",
    }


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"'ruoter'.*moe/router"):
        labels_of({"moe": {"router": jnp.zeros((2, 2))}}, {"ruoter": "adamw"})


def test_describe_shows_what_the_optimizer_does():
    params = {
        "wte": jnp.zeros((64, 8)),
        "Conv_0": {"kernel": jnp.zeros((3, 3, 4, 72)), "bias": jnp.zeros(72)},
        "layers": {"mlp": jnp.zeros((5, 8, 32))},
    }
    tx = jm.nanochat()
    lines = str(jm.describe(tx, params)).splitlines()
    assert str(jm.describe(tx, params)).splitlines() == lines  # a second time
    ends = {
        line.index(unit)
        for line in lines[1:-1]
        for unit in (" KB ", " B ")
        if unit in line
    }
    assert max(ends) - min(ends) <= 1  # columns are aligned
    rows = {line.split()[0]: line for line in lines}
    # momentum (36 x 72) and one mean for each of 72 outputs, in float32
    assert " 10.7 KB " in rows["Conv_0/kernel"]
    assert "1 x (36, 72)" in rows["Conv_0/kernel"]
    assert "1.414" in rows["Conv_0/kernel"]
    assert "5 x (8, 32)" in rows["layers/mlp"]
    assert " 2 " in rows["layers/mlp"]
    assert "4.1 KB" in rows["wte"]  # two moments
    assert "adamw" in rows["Conv_0/bias"]
    state = jax.eval_shape(jm.nanochat().init, params)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert f"{total / 1e3:.1f} KB" in lines[-1]


def test_describe_observes_the_given_optimizer():
    """Another optimizer than ours too, and whatever stands around it."""
    params = {"a": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    table = str(jm.describe(optax.sgd(0.1, momentum=0.9), params))
    assert "256 B" in table.splitlines()[1]
    frozen = jm.nanochat(
        groups={"frozen": optax.set_to_zero()},
        matrices=reader({"a": "frozen", "b": "muon"}),
    )
    both = {**params, "b": params["a"]}
    assert "frozen" in str(jm.describe(frozen, both)).splitlines()[1]
    alone = jm.describe(jm.nanochat(), params).parameters
    for around in (
        optax.chain(optax.clip_by_global_norm(1.0), jm.nanochat()),
        optax.inject_hyperparams(jm.nanochat, static_args="steps")(),
        jm.skip_nonfinite(jm.nanochat()),
    ):
        assert jm.describe(around, params).parameters == alone
    (found,) = jm.describe(optax.MultiSteps(jm.nanochat(), 2), params).parameters
    assert found.state_bytes == alone[0].state_bytes + 8 * 8 * 4  # a sum of gradients
    muon = jm.muon(shape_rule="rms_0.2")
    assert jm.describe(muon, params).parameters[0].scale == pytest.approx(0.2 * 8**0.5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_describe_shows_what_lies_where(kind):
    params = {f"{i}/w": jax.ShapeDtypeStruct((8, 16), jnp.float32) for i in range(5)}
    params["wte"] = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    tx = jm.on_mesh(jm.nanochat(), mesh, divide="data", min_size=200)
    planned = jm.describe(tx, params)
    rows = sum(leaf.state_bytes for leaf in planned.parameters)
    assert rows <= planned.state_bytes <= rows + 16  # and counts
    assert [leaf.repeated for leaf in planned.parameters] == [True] * 5 + [False]
    assert planned.parameters[-1].state_bytes == 2 * 64 * 8 * 4 // 4
    assert planned.sent_bytes["gathers"] == 64 * 8 * 4 * 3 / 4
    *_, work, last = str(planned).splitlines()
    assert work.startswith("4 devices: matrices too small for owners, computed by all")
    assert last == (
        "summed over data: 5.4 KB for gradients, 1.5 KB for gathers; 5 parameters of "
        "2.6 KB are repeated"
    )
