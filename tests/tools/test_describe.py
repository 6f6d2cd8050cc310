"""`describe` shows what an optimizer does, whatever it is wrapped in.

Whole tables, in several layouts, are in tests/fixtures/frozen.
"""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests import trees
from tests.mesh.case import AUTO, EXPLICIT, at, mesh_of
from tests.recipes import RECIPES, SHAPES

A = {"a": jax.ShapeDtypeStruct((8, 8), jnp.float32)}


def test_any_optimizer():
    table = str(jm.describe(optax.sgd(0.1, momentum=0.9), A))
    assert "256 B" in table.splitlines()[1]
    tx = RECIPES["nanochat"](matrices={"a": "muon"})
    alone = jm.describe(tx, A).parameters
    for around in (
        optax.chain(optax.clip_by_global_norm(1.0), tx),
        optax.inject_hyperparams(jm.nanochat)(0.02, matrices={"a": "muon"}),
        jm.skip_nonfinite(tx),
    ):
        assert jm.describe(around, A).parameters == alone
    (found,) = jm.describe(optax.MultiSteps(tx, 2), A).parameters
    assert found.state_bytes == alone[0].state_bytes + 8 * 8 * 4  # a sum of gradients
    both = RECIPES["nanochat"](matrices={"?*": "muon"})
    counted = jm.describe(both, A | {"count": A["a"]}).parameters
    assert counted[1].state_bytes == alone[0].state_bytes  # and no counts of steps
    joined = jm.describe(RECIPES["teon"](), trees.normal(SHAPES)).parameters
    assert [x.joined for x in joined] == [2, 2, 1, 1]  # q, q, bias, wte


def test_a_matrix_of_another_label():
    """Only what is orthogonalized is labelled "muon"."""
    params = {"attn": A["a"], "mlp": A["a"]}
    matrices = jm.find_matrices(params, rules={"?*": "muon"})
    muon = jm.as_matrices(jm.orthogonalize(jm.PolarExpress()), matrices)
    labels = {"attn": "rest", "mlp": "mlp"}
    tx = optax.multi_transform({"mlp": muon, "rest": optax.adamw(1e-3)}, labels)
    found = {x.parameter.path: x for x in jm.describe(tx, params).parameters}
    assert {path: x.parameter.label for path, x in found.items()} == {
        "attn": "-",
        "mlp": "muon",
    }


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_matrices_too_small_to_be_dealt_out(kind):
    """And state that is too small to be divided."""
    mesh = mesh_of(4, kind=kind)
    shape = functools.partial(
        jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=NamedSharding(mesh, P())
    )
    params = {f"{i}/w": shape((8, 16)) for i in range(5)} | {"wte": shape((64, 8))}
    tx = RECIPES["nanochat"](matrices={"wte": "adamw", "?*": "muon"})
    tx = jm.on_mesh(tx, mesh, divide="data", min_size=200)
    planned = jm.describe(tx, params)
    of_state = [leaf.state_spec for leaf in planned.parameters]
    assert [any(spec) for spec in of_state] == [False] * 5 + [True]
    *_, row, work, last = str(planned).splitlines()
    assert row.split() == ["8x16_float32", "-", "5", "all", "5"]
    assert work == "4 devices: the busiest does 4.00 of an even share of the work"
    sent = "orthogonalize 0 B, gradients 5.4 KB, gathers 1.5 KB"
    assert last == f"each sends in a step: {sent}"


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_on_mesh_inside_of_a_chain(kind):
    """As on_mesh alone, with the state that the chain has beside it."""
    mesh = mesh_of(4, kind=kind)
    whole = NamedSharding(mesh, P())
    params = {"up": jax.ShapeDtypeStruct((64, 256), "float32", sharding=whole)}
    tx = jm.on_mesh(RECIPES["muon"](matrices={"up": "muon"}), mesh, divide="data")
    alone, inside = (
        jm.describe(x, params) for x in (tx, optax.chain(optax.trace(0.9), tx))
    )
    size = 4 * 64 * 256
    both = [x.parameters[0].state_bytes for x in (alone, inside)]
    assert both == [size // 4, size + size // 4]
    assert inside.stacks == alone.stacks and inside.sent_bytes == alone.sent_bytes
    assert "whole; state data" in str(inside)


def test_layers_that_no_scan_gathers():
    """A step gathers them whole; of plain jit only the optimizer's part is known."""
    params = {"0": jnp.ones((64, 64)), "1": jnp.ones((64, 64)), "b": jnp.ones(64)}
    loss = lambda p, x: jnp.mean((x @ p["0"] @ p["1"] * p["b"][None]) ** 2)  # noqa: E731
    matrices = {"0": "muon", "1": "muon", "b": "adamw"}
    recipe = RECIPES["nanochat"](matrices=matrices)
    tx = jm.on_mesh(recipe, jm.fsdp(params, mesh_of(4), matrices))
    step = jm.make_train_step(loss, tx)
    found = jm.describe(step, params, jnp.ones((4, 64)))
    assert [leaf.by_layer for leaf in found.parameters] == [False, False, None]
    said = str(found)
    assert "gathered whole, before the loss: 32.8 KB in 2 parameters\n" in said
    # Each sends three quarters of a matrix: for sums of gradients, and in gathers.
    sent = "gradients 25.0 KB, gathers 24.6 KB"
    assert re.search(f"each sends in a step: orthogonalize .*, {sent}$", said)
    with pytest.raises(ValueError, match=r"batch=\(\); expected the batch and others"):
        jm.describe(step, params)
    said = str(jm.describe(tx, params))
    sent = "gradients 0 B, gathers 0 B"
    assert "gathered" not in said
    assert re.search(f"a step, beside what the loss sends: ortho.*, {sent}$", said)


def test_bytes_on_a_device():
    """Float32 kernels (64, 64) and (64, 256) in ZeRO-2 over four devices.

    Each device holds whole parameters, and a quarter of gradients and momentum.
    """
    shapes = {"q": (64, 64), "up": (64, 256)}
    params = {k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()}
    size = 4 * (64 * 64 + 64 * 256)
    tx = RECIPES["muon"](matrices={"?*": "muon"})
    assert jm.describe(tx, params).held_bytes["gradients"] == size
    held = jm.describe(jm.on_mesh(tx, mesh_of(4), divide="data"), params).held_bytes
    assert (held["parameters"], held["gradients"]) == (size, size // 4)
    assert size // 4 <= held["state"] < size // 4 + 64  # and counts of steps
    # Three of four shards come from one ring, and half of what is left from the other.
    tx = jm.on_mesh(tx, at(mesh_of(2, 4), P("fsdp")), divide=("data", "fsdp"))
    sent = jm.describe(tx, params).sent_bytes["gathers"]
    assert sent == size * 3 // 4 + size // 4 // 2


def test_leaves_that_are_gathered_are_named():
    """The 64 of heads (12, 64) is not the first of the axes that become one."""
    rules = {"*/q": MuonDimensionNumbers(0, (1, 2)), "up": "muon"}
    params = {
        name: {"q": jax.ShapeDtypeStruct((96, 12, 64), "float32")} for name in "ab"
    }
    params["up"] = jax.ShapeDtypeStruct((96, 64), "float32")
    specs = {"a": {"q": P(None, None, "data")}, "b": {"q": P("data")}, "up": P("data")}
    tx = jm.on_mesh(RECIPES["nanochat"](matrices=rules), at(mesh_of(4), specs))
    found = jm.describe(tx, params)
    assert [x.gathered for x in found.parameters] == [True, False, False]
    assert "becomes one with others: a/q; use jax_muon.fsdp" in str(found)
