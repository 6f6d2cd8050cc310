"""Trains with the pipeline of tunix's command line, as its configuration describes."""

import sys
from unittest import mock

import jax
import omegaconf
import optax
import test_tunix
from flax import nnx
from tunix.cli import peft_main
from tunix.sft import peft_trainer

import jax_muon as jm

OPTIMIZER = {
    "opt_type": "jax_muon",
    "recipe": "nanochat",
    "settings": {"adamw": 1e-3, "dtype": "float32"},
    "schedule_type": "linear_schedule",
    "init_value": 0.03,
    "end_value": 0.01,
    "transition_steps": test_tunix.STEPS,
}
LABELS = {"w_lora_a": "muon", "w_lora_b": [0, [1, 2]], "kernel_lora_*": "muon"}
CONFIG = {
    "optimizer_config": OPTIMIZER,
    "model_config": {"mesh": {"shape": "(4,2)", "axis_names": "('fsdp','tp')"}},
    "training_config": {"eval_every_n_steps": 100},
    "tokenizer_config": {},
    "dataset_name": "",
    "batch_size": 8,
    "max_target_length": 16,
    "num_train_epochs": 1,
    "tfds_download": False,
}


class Trainer(peft_trainer.PeftTrainer):
    """Prints the losses and how its momenta are sharded."""

    def _log_metrics(self, loss, *args, **others):
        print("loss:", float(loss))
        super()._log_metrics(loss, *args, **others)

    def train(self, *args, **others):
        super().train(*args, **others)
        state = nnx.state(self.optimizer, nnx.optimizer.OptState)
        for leaf in jax.tree.leaves(state):
            if leaf.size >= 1024:
                print("state:", leaf.sharding.spec)


if __name__ == "__main__":
    lora = sys.argv[1] == "lora"
    pipeline = peft_main.PeftPipeline.__new__(peft_main.PeftPipeline)
    pipeline.config = CONFIG
    if sys.argv[1] == "labels":
        with_labels = {"optimizer_config": OPTIMIZER | {"matrices": LABELS}}
        pipeline.config = omegaconf.OmegaConf.create(with_labels)
        tx = pipeline.create_optimizer("optimizer_config")
        model = test_tunix.make_model(test_tunix.mesh_of(1, 1), lora=True)
        state = tx.init(nnx.state(model, nnx.LoRAParam)).inner_state
        momenta = jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu)
        sys.exit(print("momenta:", len(momenta)))

    def create_model(model_config, tokenizer_config, mesh):
        del model_config, tokenizer_config
        return test_tunix.make_model(mesh, lora), ""

    with (
        mock.patch.object(peft_main.model_lib, "create_model", create_model),
        mock.patch.object(peft_main.model_lib, "create_tokenizer"),
        mock.patch.object(
            peft_main.data_lib,
            "create_datasets",
            return_value=(test_tunix.batches(), None),
        ),
        mock.patch.object(peft_main.peft_trainer, "PeftTrainer", Trainer),
    ):
        pipeline.run_peft_trainer()
    print("alone")
    mesh = test_tunix.mesh_of(1, 1)
    rate = optax.linear_schedule(0.03, 0.01, test_tunix.STEPS)
    model = test_tunix.make_model(mesh, lora)
    matrices = test_tunix.PAGE["read"](model, nnx.LoRAParam if lora else nnx.Param)
    tx = jm.nanochat(rate, adamw=jm.adamw(1e-3), dtype="float32", matrices=matrices)
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=100)
    alone = Trainer(model, tx, settings)
    with mesh:
        alone.with_gen_model_input_fn(test_tunix.model_input).train(
            test_tunix.batches()
        )
