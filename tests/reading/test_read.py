"""Reading without a loss: Flax's forms of trees, and what rules must say."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.axes import MatrixAxes
from jax_muon.paths import is_box, leaves_with_paths
from tests import by_hand


def test_without_a_loss_every_array_needs_a_rule():
    """One error with the loss, and the rules of every kind of array."""
    params = {"wte": jnp.zeros((9, 4)), "h": {"up": jnp.zeros((3, 4, 8))}}
    words = r"(?s)2 of 2 .* jax_muon\.read\(params, loss_fn, batch\), or:.*'h/up'.*'wte'"
    with pytest.raises(ValueError, match=words):
        jm.nanochat(matrices=jm.read).init(params)
    rules = {"wte": "adamw", "*": MuonDimensionNumbers(-2, -1)}
    found = jm.read(params, rules=rules)
    assert found.labels(params) == {"wte": "adamw", "h": {"up": "muon"}}
    assert found.axes("h/up") == MatrixAxes((0,), (1,), (2,))
    with pytest.warns(UserWarning, match="They get the label 'adamw'"):
        jm.read(params, strict=False)


def test_integers_and_complex_go_to_adamw():
    params = {"a": jnp.zeros((2, 2), int), "b": jnp.zeros((2, 2), complex)}
    assert jm.read(params).labels(params) == {"a": "adamw", "b": "adamw"}


# --- forms of trees -------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        init = nn.initializers.lecun_normal()
        logical = nn.with_logical_partitioning(init, ("embed", "mlp"))
        x = nn.LayerNorm()(nn.Dense(8, kernel_init=logical)(x))
        partitioned = nn.with_partitioning(init, ("mlp", None))
        x = nn.Dense(8, kernel_init=partitioned, name="wo")(x)
        return nn.Dense(16, name="lm_head")(x)


def test_forms_of_linen():
    """Boxed, unboxed and frozen trees have the same labels."""
    boxed = LinenBlock().init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    for tree in (boxed, nn.meta.unbox(boxed), FrozenDict(boxed)):
        labels = by_hand.read(tree).labels(tree)
        matrices = {path for path, x in leaves_with_paths(labels) if x == "muon"}
        assert matrices == {"Dense_0/kernel", "wo/kernel"}
        whole = jax.tree.structure(tree, is_leaf=is_box)  # a box gets one label
        assert jax.tree.structure(labels) == whole


def test_forms_of_nnx():
    """nnx.Optimizer boxes parameters at init and not at update: both must agree."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs))
    seen = []

    def recording(params):
        matrices = by_hand.read(params)
        seen.append(dict(leaves_with_paths(matrices.labels(params))))
        return matrices

    tx = jm.nanochat(matrices=recording, dtype="float32")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(jnp.ones((1, 8)))))(model))
    plain = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    labels = dict(leaves_with_paths(by_hand.read(plain).labels(plain)))
    assert labels["layers/0/kernel"] == "muon"
    assert len(seen) >= 2
    assert all(one == labels for one in seen)
