"""Flax's forms of trees are read alike, by a loss and by rules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.core import FrozenDict

import jax_muon as jm
from jax_muon.base.trees import is_box, leaves_with_paths


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


def test_forms_of_linen(as_users_write):
    """Boxed, unboxed and frozen trees have the same labels."""
    tokens = jnp.zeros((1, 4), int)
    boxed = LinenBlock().init(jax.random.key(0), tokens)["params"]
    rules = {"Embed_0": "adamw", "lm_head": "adamw", "kernel": "muon"}

    def apply(params, tokens):
        return LinenBlock().apply({"params": params}, tokens)

    for tree in (boxed, nn.meta.unbox(boxed), FrozenDict(boxed)):
        labels = jm.find_matrices(tree, apply, tokens).labels(tree)
        matrices = {path for path, x in leaves_with_paths(labels) if x == "muon"}
        assert matrices == {"Dense_0/kernel", "wo/kernel"}
        whole = jax.tree.structure(tree, is_leaf=is_box)  # a box gets one label
        assert jax.tree.structure(labels) == whole
        by_rules = jm.find_matrices(tree, rules=rules).labels(tree)
        assert leaves_with_paths(by_rules) == leaves_with_paths(labels)


def test_forms_of_nnx():
    """nnx.Optimizer boxes parameters at init and not at update: both must agree.

    So must the parts of a split, and residuals.
    """
    rngs = nnx.Rngs(0)
    narrow = nnx.Linear(8, 16, rngs=rngs, param_dtype="bfloat16")
    model, seen = nnx.Sequential(narrow, nnx.LayerNorm(16, rngs=rngs)), []

    def recording(params):
        splits = {"kernel": jm.Split(("q", "k"))}
        matrices = jm.find_matrices(params, rules={"layers": "muon"}, splits=splits)
        seen.append(dict(leaves_with_paths(matrices.labels(params))))
        return matrices

    tx = jm.keep_residual(jm.nanochat(matrices=recording, dtype="float32"))
    optimizer, before = nnx.Optimizer(model, tx, wrt=nnx.Param), narrow.kernel[...]
    optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(jnp.eye(8)) ** 3))(model))
    assert len(seen) >= 2
    adamw = dict.fromkeys(("layers/0/bias", "layers/1/bias", "layers/1/scale"), "adamw")
    assert all(one == adamw | {"layers/0/kernel": "muon"} for one in seen)
    assert narrow.kernel.dtype == "bfloat16" and (narrow.kernel[...] != before).any()
    residual = dict(leaves_with_paths(optimizer.opt_state.residual))["layers/0/kernel"]
    assert residual.dtype == "int8" and residual.any()


def test_a_python_float_is_a_scalar_for_adamw():
    """On a mesh as well; what the gradient of a tree gives an update for."""
    params = {"up": jnp.ones((8, 8)), "scale": 0.5}
    loss = lambda p, x: jnp.sum(p["scale"] * x @ p["up"])  # noqa: E731
    matrices = jm.find_matrices(params, loss, jnp.ones((2, 8)), rules={"up": "muon"})
    assert matrices["scale"].label == "adamw" and matrices["scale"].shape == ()
    tx = jm.nanochat(0.02, adamw=optax.sgd(1.0), matrices=matrices)
    mesh = jax.make_mesh((8,), ("data",))
    grads = jax.grad(loss)(params, jnp.ones((2, 8)))
    for each in (tx, jm.on_mesh(tx, mesh, divide="data")):
        updates, _ = each.update(grads, each.init(params), params)
        assert updates["scale"] == -128
    assert len(jm.describe(tx, params).parameters) == 2
