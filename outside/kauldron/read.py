"""Reads the model of a trainer of kauldron, and shards its optimizer.

The functions stand alone: copy them. `docs/frameworks.md` says how to use them.
"""

import jax
from kauldron import kd

import jax_muon as jm


def reading(model, train_ds):
    """`matrices=` of a recipe."""

    def read(params):
        batch = kd.data.utils.mock_batch_from_elem_spec(
            train_ds.element_spec, kd.sharding.FIRST_DIM
        )
        args, kwargs = kd.data.utils.get_model_inputs_from_batch(model, batch)
        key = jax.random.key(0)

        def apply(params, rest, key, args, kwargs):
            variables = {"params": params, **rest}
            return model.apply(variables, *args, rngs=key, mutable=True, **kwargs)[0]

        with kd.nn.set_train_property(True):
            rest = jax.eval_shape(model.init, key, *args, **kwargs)
            return jm.find_matrices(rest.pop("params"), apply, rest, key, args, kwargs)

    return read


def sharded(tx, params):
    """Arguments of `kd.train.Trainer`; `params` is a `kd.sharding.FSDPSharding`."""
    return {
        "optimizer": jm.on_mesh(tx, params),
        "sharding": kd.sharding.ShardingStrategy(params=params),
    }
