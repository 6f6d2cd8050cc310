"""Reads the parameters that levanter gives to an optimizer, which are the model.

The functions stand alone: copy them. `docs/frameworks.md` says how to use them.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from levanter.models.lm_model import LmExample

import jax_muon as jm


def read(params, rules=None):
    """`matrices=` of a recipe, for language models."""
    batch = hax.Axis("batch", 2)  # without one, positions look like part of a sample

    def loss(params, tokens):
        tokens = hax.named(tokens, (batch, params.Pos))
        example = hax.vmap(LmExample.causal, batch)(tokens)
        return params.compute_next_token_loss(example).scalar()

    tokens = jax.ShapeDtypeStruct((2, params.Pos.size), jnp.int32)
    with hax.axis_mapping({}):  # at init that of the parameters is set
        return jm.find_matrices(params, loss, tokens, rules=rules)
