"""The programs for Flax learn and go on, and their boxes are updated like arrays."""

import importlib
import re
import sys

import chex
import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.trees import leaves_with_paths, unbox
from tests import trees
from tests.mesh.case import mesh_of
from tests.reading import reader


@pytest.fixture
def load(examples, monkeypatch):
    """Imports a script of the folder flax, which is no package."""
    monkeypatch.syspath_prepend(str(examples / "flax"))
    yield importlib.import_module
    for path in (examples / "flax").glob("*.py"):
        sys.modules.pop(path.stem, None)


def assert_divided(state, data, params=None):
    """Momentum, and matrices, over (data, 2): the layers' axis is whole."""
    weights, state = (dict(leaves_with_paths(unbox(x))) for x in (params, state))
    rows = 64 // data
    for name, shard in (("up/kernel", (4, rows, 64)), ("down/kernel", (4, 64, rows))):
        end = f"muon/inner_state/0/mu/blocks/{name}"
        (momentum,) = (x for path, x in state.items() if path.endswith(end))
        for leaf in (weights.get(f"blocks/{name}", momentum), momentum):
            assert leaf.sharding.shard_shape(leaf.shape) == shard


@pytest.mark.parametrize("name", ["train_nnx", "train_linen"])
def test_a_program_learns_and_goes_on_from_its_checkpoint(
    load, name, tmp_path, capsys, monkeypatch
):
    """With a checkpoint at half of the steps, bit for bit as without one."""
    example, digits = load(name), load("digits")
    for module in (example, digits):
        monkeypatch.setattr(module, "STEPS", 30)
    *trained, losses = example.main(tmp_path)
    assert (tmp_path / "15").is_dir()
    assert losses[-1] < losses[0] / 4
    table = r"blocks/up/kernel +4 x 64 x 128 .* 4 x \(64, 128\) +muon +- x data x model"
    assert re.search(table, capsys.readouterr().out)
    if name == "train_nnx":
        params, state = map(nnx.state, trained)
    else:
        params, state = trained[0].params, trained[0].opt_state
        assert isinstance(params["blocks"]["up"]["kernel"], nn.Partitioned)
    assert_divided(state, 4, params)
    monkeypatch.setattr(example, "STEPS", 1000)  # half of them are never done
    *_, straight = example.main(tmp_path)
    assert straight == losses


@pytest.mark.parametrize("name", ["train_nnx", "train_linen"])
def test_boxes_on_a_mesh_are_updated_as_arrays_on_one_device(load, name, x64):
    """To rounding in float64; the momentum is divided as the boxes say."""
    example, mesh = load(name), mesh_of(2, 2, names=("data", "model"))
    rules = {"kernel": MuonDimensionNumbers(-2, -1), "bias": "adamw", "scale": "adamw"}
    tx = jm.nanochat(dtype="float64", steps=2, matrices=reader(rules))
    random = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        if name == "train_nnx":
            boxed = nnx.state(example.Stack(rngs=nnx.Rngs(0)), nnx.Param)
        else:
            boxed = example.init(jax.random.key(0))
        start, *grads = (
            jax.tree.map(lambda x: random.standard_normal(x.shape), boxed)
            for _ in range(4)
        )
        divided = getattr(example, "divided", lambda x, _: nnx.get_partition_spec(x))
        on_mesh = jm.on_mesh(tx, mesh, divided(start, mesh))
        start, grads = jax.device_put((start, grads), NamedSharding(mesh, P()))
        _, found, state = trees.run(on_mesh, start, grads)
    plain = [dict(leaves_with_paths(unbox(x))) for x in (start, *grads, found)]
    start, *grads, found = jax.device_get(plain)
    _, expected, _ = trees.run(tx, start, grads)
    assert_divided(state, 2)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-10)
