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

    def loss(params, tokens):
        example = LmExample.causal(hax.named(tokens, params.Pos))
        return params.compute_next_token_loss(example).scalar()

    tokens = jax.ShapeDtypeStruct((params.Pos.size,), jnp.int32)
    with hax.axis_mapping({}):  # at init that of the parameters is set
        return jm.find_matrices(params, loss, tokens, rules=rules)
