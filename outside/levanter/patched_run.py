"""Trains the model `argv[2]` of the patched levanter with the recipe `argv[1]`."""

import dataclasses
import sys

import draccus
import jax
import yaml
from levanter.optim.config import OptimizerConfig
from test_levanter import MODELS, train, train_on_a_mesh

FILE = """
type: jax_muon
recipe: {recipe}
settings: {{dtype: float32, momentum: 0.9}}
learning_rate: 0.02
adam_lr: 1.0e-3
warmup: 0
"""


def build(mesh=None):
    text = FILE.format(recipe=recipe)
    config = draccus.decode(OptimizerConfig, yaml.safe_load(text))
    return dataclasses.replace(config, mesh=mesh).build(10)


if __name__ == "__main__":
    recipe, name = sys.argv[1:]
    model = dataclasses.replace(MODELS[name], gradient_checkpointing=False)
    alone, _ = train(model, build(), steps=4)
    losses, state = train_on_a_mesh(model, build, steps=4)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if "'muon'" in jax.tree_util.keystr(path) and leaf.size > 1024:
            print("momentum:", leaf.sharding.spec)
    print("alone:", *alone)
    print("on a mesh:", *losses)
