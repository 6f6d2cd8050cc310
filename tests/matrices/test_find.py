"""Flax's forms of trees are read alike, by a loss and by rules."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import jax_muon as jm
from jax_muon.base.trees import is_box, leaves_with_paths
from tests.recipes import RECIPES


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


class LinenMLP(nn.Module):
    """Three layers, the last of them apart; or all of them in one loop."""

    apart: bool = True

    @nn.compact
    def __call__(self, x):
        for _ in range(2 if self.apart else 3):
            x = jnp.tanh(nn.Dense(8)(x))
        return nn.Dense(8)(x) if self.apart else x


class LinenEncoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = LinenMLP()(x)
        return x + LinenMLP()(x)


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (LinenMLP(), {"Dense_2/kernel"}),
        (LinenMLP(apart=False), set()),
        (LinenEncoder(), set()),
    ],
)
def test_heads_of_linen(model, heads, as_users_write):
    """A number tells layers of a loop, or blocks, but not every Dense of a module."""
    x = jnp.zeros((2, 8))
    params = model.init(jax.random.key(0), x)["params"]
    found = jm.find_matrices(params, lambda p, x: model.apply({"params": p}, x), x)
    assert {path for path, read in found.items() if read.role == "head"} == heads


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

    tx = jm.keep_residual(RECIPES["nanochat"](matrices=recording, dtype="float32"))
    optimizer, before = nnx.Optimizer(model, tx, wrt=nnx.Param), narrow.kernel[...]
    optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(jnp.eye(8)) ** 3))(model))
    assert len(seen) >= 2
    adamw = dict.fromkeys(("layers/0/bias", "layers/1/bias", "layers/1/scale"), "adamw")
    assert all(one == adamw | {"layers/0/kernel": "muon"} for one in seen)
    assert narrow.kernel.dtype == "bfloat16" and (narrow.kernel[...] != before).any()
    residual = dict(leaves_with_paths(optimizer.opt_state.residual))["layers/0/kernel"]
    assert residual.dtype == "int8" and residual.any()


class Tied(nnx.Module):
    """One layer under two names, of which the loss uses the second."""

    def __init__(self):
        self.a = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        self.b = self.a
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(0))


def test_a_shared_module_of_nnx_has_one_leaf_for_each_variable(as_users_write):
    def loss(model, x):
        return jnp.mean(model.head(model.norm(jnp.tanh(model.b(x)))) ** 2)

    found = jm.find_matrices(Tied(), loss, jnp.ones((2, 8)))
    roles = {path: x.role for path, x in found.items() if len(x.shape) == 2}
    assert roles == {"a/kernel": "kernel", "head/kernel": "head"}
    assert "b/kernel" not in found and "norm/mean" not in found


class Attention(NamedTuple):
    """A field has the name of the content of a Flax box."""

    query: Any
    key: Any
    value: Any


def test_a_field_called_value_is_in_the_path():
    params = {"attn": Attention(*[jnp.ones((8, 8))] * 3)}
    found = jm.find_matrices(params, rules={"attn/value": "adamw", "*": "muon"})
    labels = {path: x.label for path, x in found.items()}
    assert labels == {
        "attn/query": "muon",
        "attn/key": "muon",
        "attn/value": "adamw",
    }


# --- functions and arguments ----------------------------------------------------------


TWO = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4)), "table": jnp.ones((9, 4))}


def two(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def test_functions_among_the_arguments():
    """Such as `model.apply`; arrays beside them are arguments as ever."""

    def loss(p, model, ids):
        return jnp.sum(model["apply"](p, p["table"][ids]))

    found = jm.find_matrices(TWO, loss, {"apply": two}, jnp.arange(3))
    assert [found[x].role for x in TWO] == ["kernel", "head", "embedding"]


def test_two_numbers_are_a_key_if_they_are_used_as_one(as_users_write):
    def lookup(p, ids):
        return jnp.sum(two(p, p["table"][ids]))

    def noisy(p, x, key):
        noise = jax.random.normal(jax.random.split(key)[0], (9, 4))
        return jnp.sum(two(p, x + (p["table"] + noise).sum(0)))

    ids = jnp.zeros(2, jnp.uint32)
    assert jm.find_matrices(TWO, lookup, ids)["table"].role == "embedding"
    found = jm.find_matrices(TWO, noisy, jnp.ones((2, 4)), jax.random.PRNGKey(0))
    assert [found[x].role for x in TWO] == ["kernel", "head", "elementwise"]


def test_matrices_that_the_loss_does_not_use_are_named():
    """As where a loss returns several: of (loss, others) only the loss counts."""

    def losses(p, x):
        return jnp.mean(x @ p["up"]), jnp.mean(p["down"])

    arguments = {k: TWO[k] for k in ("up", "down")} | {"bias": jnp.ones(8)}
    words = "depends on none of down, which get the label 'adamw'"
    with pytest.warns(UserWarning, match=words) as seen:
        jm.find_matrices(arguments, losses, jnp.ones((2, 4)))
    assert len(seen) == 1 and seen[0].filename == __file__
    found = jm.find_matrices(arguments, losses, jnp.ones((2, 4)), rules={"down": None})
    assert found["down"].reason == "by your rules"


def test_a_python_float_is_a_scalar_for_adamw():
    """On a mesh as well; what the gradient of a tree gives an update for."""
    params = {"up": jnp.ones((8, 8)), "scale": 0.5}
    loss = lambda p, x: jnp.sum(p["scale"] * x @ p["up"])  # noqa: E731
    matrices = jm.find_matrices(params, loss, jnp.ones((2, 8)), rules={"up": "muon"})
    assert matrices["scale"].label == "adamw" and matrices["scale"].shape == ()
    tx = RECIPES["nanochat"](
        learning_rate=0.02, adamw=optax.sgd(1.0), matrices=matrices
    )
    mesh = jax.make_mesh((8,), ("data",))
    grads = jax.grad(loss)(params, jnp.ones((2, 8)))
    for each in (tx, jm.on_mesh(tx, mesh, divide="data")):
        updates, _ = each.update(grads, each.init(params), params)
        assert updates["scale"] == -128
    assert len(jm.describe(tx, params).parameters) == 2
