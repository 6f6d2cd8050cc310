"""Reads a model of tunix, and runs an optimizer on its mesh.

The functions stand alone: copy them. `docs/frameworks.md` says how to use them.
"""

import jax
from flax import nnx

import jax_muon as jm


def read(model, wrt=nnx.LoRAParam, rules=None):
    """`matrices=` of a recipe; `wrt=nnx.Param` for a model without LoRA."""
    graph, params, rest = nnx.split(model, wrt, ...)

    def logits(params, rest, inputs):
        return nnx.merge(graph, params, rest)(**inputs)

    return jm.find_matrices(params, logits, rest, model.get_model_input(), rules=rules)


def on_its_mesh(tx, model, wrt=nnx.LoRAParam):
    """For `PeftTrainer`."""
    params = nnx.state(model, wrt)
    return jm.on_mesh(tx, jax.tree.map(lambda p: p.sharding, params))
