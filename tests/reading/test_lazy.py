"""`matrices=` as a function: the optimizer is built before the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm

MESH = jax.make_mesh((8,), ("data",), (AxisType.Auto,))


@pytest.mark.parametrize("rows", [NamedSharding(MESH, P("data")), P("data")], ids=str)
def test_a_loss_for_auto_axes_is_read_inside_on_mesh(rows):
    """Lookups and constraints that JAX refuses on the Explicit axes of `on_mesh`."""
    sizes = {"embed": (64, 32), "up": (32, 64), "head": (64, 24)}
    params = {name: jnp.ones(shape) for name, shape in sizes.items()}
    seen = []

    def loss(params, tokens):
        x = jax.lax.with_sharding_constraint(params["embed"][tokens], rows)
        return jnp.mean(jax.nn.relu(x @ params["up"]) @ params["head"])

    def matrices(shapes):
        seen.extend(jax.tree.leaves(shapes))
        return jm.read(shapes, loss, jax.ShapeDtypeStruct((8, 4), jnp.int32))

    tx = jm.nanochat(matrices=matrices, dtype="float32")
    alone = jm.nanochat(matrices={"up": "muon", "*": "adamw"}, dtype="float32")
    expected, _ = alone.update(params, alone.init(params), params)
    with jax.set_mesh(MESH):
        sharded = jm.on_mesh(tx, MESH, P("data"), divide="data")
        state = jax.jit(sharded.init)(params)
        updates, _ = jax.jit(sharded.update)(params, state, params)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in seen)
    for name, update in updates.items():
        np.testing.assert_allclose(update, expected[name], atol=1e-6)
