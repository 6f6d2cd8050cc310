"""MaxText's own train loop, with `upstream.patch`."""

import functools
import re

import pytest

from outside import patched

SMALL = """
run_name=test enable_checkpointing=False dataset_type=synthetic steps=4
base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16
base_mlp_dim=128 base_num_decoder_layers=2 vocab_size=128 max_target_length=32
per_device_batch_size=1 attention=dot_product hardware=cpu opt_type=jax_muon
skip_jax_distributed_system=True enable_goodput_recording=False
monitor_goodput=False learning_rate=0.02
"""
LAYOUTS = {
    "fsdp": "ici_fsdp_parallelism=8",
    "fsdp_tensor": "ici_fsdp_parallelism=4 ici_tensor_parallelism=2",
    "explicit": "ici_fsdp_parallelism=8 shard_mode=explicit",
    "zero1": "ici_data_parallelism=8 shard_optimizer_over_data=True",
}


@pytest.fixture(scope="module")
def patched_maxtext(tmp_path_factory):
    """A copy of MaxText with `upstream.patch`."""
    root = tmp_path_factory.mktemp("patched")
    patched.copy("maxtext", root)
    return root


def train(root, layout, output, *settings):
    """The losses that MaxText's command prints, from a copy of it."""
    base = root / "maxtext/configs/base.yml"
    output = f"base_output_directory={output}"
    small = f"{SMALL} {LAYOUTS[layout]}".split()
    command = ["-m", "maxtext.trainers.pre_train.train", base, *small, output]
    printed = patched.run(root, *command, *settings)
    return [float(x) for x in re.findall(r"\bloss: ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def losses(patched_maxtext, tmp_path_factory):
    """A function from a layout to the losses of a recipe that settings name."""
    settings = (
        "jax_muon_recipe=nanochat",
        "jax_muon_settings={adamw: 0.001, ns_steps: 4}",
    )
    return functools.cache(
        lambda layout: train(
            patched_maxtext, layout, tmp_path_factory.mktemp(layout), *settings
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_falls_alike_in_every_layout(layout, losses):
    found = losses(layout)
    assert len(found) == 4
    assert found[-1] < found[0] - 0.1
    # The model and the polar factor run in bfloat16, which has eight bits.
    assert found == pytest.approx(losses("fsdp"), rel=2**-8)
