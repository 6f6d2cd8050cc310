"""tunix: its PeftTrainer on a mesh of eight devices, as on one."""

import pathlib
import re

import jax
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import AxisType
from tunix.models.llama3 import model as llama3
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import jax_muon as jm
from outside import patched
from tests import pages

CONFIG = llama3.ModelConfig(
    num_layers=2,
    vocab_size=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
STEPS = 4
PAGE = pages.run("tunix")


def mesh_of(*sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("fsdp", "tp"), 2 * (AxisType.Auto,), devices=devices)


def make_model(mesh, lora):
    """tunix's Llama 3, sharded as its own metadata say."""

    @nnx.jit
    def make():
        model = llama3.Llama3(CONFIG, rngs=nnx.Rngs(params=0))
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
        return model

    with mesh:
        model = make()
        if not lora:
            return model
        provider = qwix.LoraProvider(
            module_path=".*q_proj|.*v_proj|.*gate_proj", rank=4, alpha=8.0
        )
        model = qwix.apply_lora_to_model(
            model, provider, rngs=nnx.Rngs(1), **model.get_model_input()
        )
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        nnx.update(
            model,
            jax.jit(lambda x: jax.lax.with_sharding_constraint(x, specs))(state),
        )
        return model


def batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, CONFIG.vocab_size, (8, 16))  # 0 is padding
    return STEPS * [
        TrainingInput(input_tokens=tokens, input_mask=np.ones((8, 16), bool))
    ]


def model_input(batch):
    mask = batch.input_mask
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def train(model, optimizer, mesh):
    """Parameters that its trainer ends with, and the momentum's specs."""
    trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=100))
    trainer = trainer.with_gen_model_input_fn(model_input)
    with mesh:
        trainer.train(batches())
    specs = {
        leaf.sharding.spec
        for leaf in jax.tree.leaves(
            nnx.state(trainer.optimizer, nnx.optimizer.OptState)
        )
        if leaf.ndim > 1
    }
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), specs


def norm(tree):
    return float(np.sqrt(sum(np.sum(x**2.0) for x in jax.tree.leaves(tree))))


@pytest.mark.parametrize("lora", [False, True])
def test_peft_trainer(lora):
    """Four steps on (4, 2) devices and on one, to 1e-4 of the distance travelled."""
    wrt = nnx.LoRAParam if lora else nnx.Param
    ends, start = {}, None
    for sizes in ((1, 1), (4, 2)):
        mesh = mesh_of(*sizes)
        model = make_model(mesh, lora)
        start = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        matrices = PAGE["read"](model, wrt)
        assert sum(x.label == "muon" for x in matrices.values()) == (12 if lora else 14)
        adamw = jm.adamw(0.02, b2=0.95, weight_decay=0.1)
        tx = jm.moonlight(0.02, adamw=adamw, dtype="float32", matrices=matrices)
        tx = PAGE["on_its_mesh"](tx, model, wrt)
        ends[sizes], specs = train(model, tx, mesh)
    assert any("fsdp" in str(spec) for spec in specs), specs
    one, many = ends.values()
    moved = jax.tree.map(np.subtract, one, start)
    assert norm(moved) > 0
    assert norm(jax.tree.map(np.subtract, many, one)) < 1e-4 * norm(moved)


@pytest.mark.parametrize("parameters", ["lora", "all"])
def test_patch(parameters, tmp_path):
    """With `upstream.patch`, the command line's pipeline knows recipes by name."""
    patched.copy("tunix", tmp_path)
    (tmp_path / "tensorflow_datasets.py").touch()  # imported, and not used
    run = pathlib.Path(__file__).with_name("patched_run.py")
    printed = patched.run(tmp_path, run, parameters)
    losses, alone = (
        [float(x) for x in re.findall("loss: (.*)", part)]
        for part in printed.split("alone\n")
    )
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    states = re.findall("state: (.*)", printed.split("alone\n")[0])
    assert any("fsdp" in spec for spec in states) or parameters == "lora"


def test_patch_with_labels(tmp_path):
    """GRPO makes its optimizers before it has a model."""
    patched.copy("tunix", tmp_path)
    (tmp_path / "tensorflow_datasets.py").touch()
    run = pathlib.Path(__file__).with_name("patched_run.py")
    assert "momenta: 12\n" in patched.run(tmp_path, run, "labels")
