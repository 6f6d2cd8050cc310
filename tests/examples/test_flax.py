"""The programs for Flax learn and resume, and their boxes are sharded as they say."""

import importlib
import re

import pytest
from flax import linen as nn
from flax import nnx

from jax_muon.base.trees import leaves_with_paths, unbox


@pytest.mark.parametrize("name", ["train_nnx", "train_linen"])
def test_a_program_learns_and_goes_on_from_its_checkpoint(
    name, examples, tmp_path, capsys, monkeypatch
):
    """With a checkpoint at half of the steps, bit for bit as without one."""
    monkeypatch.syspath_prepend(str(examples / "flax"))
    example, digits = map(importlib.import_module, (name, "digits"))
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
    weights, state = (dict(leaves_with_paths(unbox(x))) for x in (params, state))
    # Over (data, model), of 4 and 2 devices: the layers' axis is whole.
    for name, shard in (("up/kernel", (4, 16, 64)), ("down/kernel", (4, 64, 16))):
        end = f"muon/inner_state/0/mu/blocks/{name}"
        (momentum,) = (x for path, x in state.items() if path.endswith(end))
        for leaf in (weights[f"blocks/{name}"], momentum):
            assert leaf.sharding.shard_shape(leaf.shape) == shard
    monkeypatch.setattr(example, "STEPS", 1000)  # half of them are never done
    *_, straight = example.main(tmp_path)
    assert straight == losses
