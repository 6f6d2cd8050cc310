"""Reads the model that MaxText 0.2.5 gives to `get_optimizer`.

The functions stand alone: copy them. `docs/frameworks.md` says how to use them.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from maxtext.utils.sharding import get_input_data_sharding

import jax_muon as jm


def read(config, model, mesh, rules=None):
    """`matrices=` of a recipe."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    size = config.micro_batch_size_to_train_on, config.max_target_length
    sharding = get_input_data_sharding(config, mesh)
    ids = jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding)

    def logits(params, rest, ids, positions, segments):
        model = nnx.merge(graph, params, rest)
        return model(ids, positions, segments, enable_dropout=False)

    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
        return jm.find_matrices(params, logits, rest, ids, ids, ids, rules=rules)
