"""Trains the model `argv[2]` of the patched levanter with the recipe `argv[1]`.

"labels" for the model is one without a loss, whose optimizer is only initialized.
"""

import dataclasses
import sys

import draccus
import jax
import yaml
from levanter.optim.config import OptimizerConfig
from test_levanter import MODELS, train, train_on_a_mesh, two_layers

FILE = """
type: jax_muon
recipe: {recipe}
settings: {{dtype: float32, momentum: 0.9}}
matrices: {matrices}
learning_rate: 0.02
adam_lr: 1.0e-3
warmup: 0
"""


def build(mesh=None, matrices="{}"):
    text = FILE.format(recipe=recipe, matrices=matrices)
    config = draccus.decode(OptimizerConfig, yaml.safe_load(text))
    return dataclasses.replace(config, mesh=mesh).build(10)


if __name__ == "__main__":
    recipe, name = sys.argv[1:]
    if name == "labels":
        start = two_layers(jax.random.key(0))
        state = build(matrices="{up: [-1, -2], down/weight/0: muon}").init(start)
        print("momenta:", sum(x.ndim > 1 for x in jax.tree.leaves(state)))
        try:
            build().init(start)
        except ValueError as error:
            sys.exit(print(error))
    model = dataclasses.replace(MODELS[name], gradient_checkpointing=False)
    alone, _ = train(model, build(), steps=4)
    losses, state = train_on_a_mesh(model, build, steps=4)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if "'muon'" in jax.tree_util.keystr(path) and leaf.size > 1024:
            print("momentum:", leaf.sharding.spec)
    print("alone:", *alone)
    print("on a mesh:", *losses)
