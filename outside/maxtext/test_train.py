"""MaxText's own train loop with the optimizer of docs/frameworks.md, edits and all."""

import functools
import os
import pathlib
import re
import shutil

import maxtext
import pytest

from outside import patched
from tests import pages

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
def edited(tmp_path_factory):
    """A copy of MaxText, of links, with the page's two edits and its code."""
    edits = pages.blocks("MaxText", "diff")
    (code,) = pages.blocks("MaxText")
    installed = pathlib.Path(maxtext.__file__).parent
    root = tmp_path_factory.mktemp("edited")
    shutil.copytree(installed, root / "maxtext", copy_function=os.symlink)
    files = ("configs/types.py", "optimizers/optimizers.py")
    for name, edit in zip(files, edits, strict=True):
        kept = "".join(x[1:] + "\n" for x in edit.splitlines() if x[0] == " ")
        text = (installed / name).read_text()
        assert text.count(kept) == 1
        changed = "".join(x[1:] + "\n" for x in edit.splitlines())
        text = text.replace(kept, changed)
        if name == files[1]:
            text = f"{code}\nfrom flax import nnx\n{text}"
        (root / "maxtext" / name).unlink()
        (root / "maxtext" / name).write_text(text)
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
def losses(edited, tmp_path_factory):
    """A function from a layout to the losses with the page's optimizer."""
    return functools.cache(
        lambda layout: train(edited, layout, tmp_path_factory.mktemp(layout))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_falls_alike_in_every_layout(layout, losses):
    found = losses(layout)
    assert len(found) == 4
    assert found[-1] < found[0] - 0.1
    # The model and the polar factor run in bfloat16, which has eight bits.
    assert found == pytest.approx(losses("fsdp"), rel=2**-8)


def test_patch(tmp_path):
    """With `upstream.patch`, settings name the recipe and its arguments."""
    patched.copy("maxtext", tmp_path)
    settings = "jax_muon_recipe=nanochat", "jax_muon_settings={adamw: 0.001, steps: 4}"
    found = [
        train(tmp_path, layout, tmp_path / layout, *settings)
        for layout in ("fsdp_tensor", "explicit")
    ]
    assert all(len(x) == 4 and x[-1] < x[0] - 0.1 for x in found)
    assert found[0] == pytest.approx(found[1], rel=2**-8)
