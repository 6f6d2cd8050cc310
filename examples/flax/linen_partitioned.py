"""Flax linen with parameters divided over a mesh by their logical axes.

Parameters stay in their boxes (nn.LogicallyPartitioned) throughout: labels, recipes and
the table see through them, and the momentum keeps them, so that it is divided as its
parameter. Plain jit; eight CPU devices stand for accelerators.

    python examples/flax/linen_partitioned.py
"""

from functools import partial
from typing import Any

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_muon as jm

RULES = (("embed", "data"), ("mlp", "model"))


class MLP(nn.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        y = nn.relu(nn.Dense(128, kernel_init=up, name="up")(x))
        x = x + nn.Dense(64, kernel_init=down, name="down")(y)
        return nn.Dense(10, name="head")(x)


def init(key: jax.Array) -> dict:
    return MLP().init(key, jax.numpy.zeros((1, 64)))["params"]


def divided(tree: Any, mesh: Mesh) -> Any:
    """A sharding for each parameter of a tree, by its logical axes."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(tree), mesh, RULES)


def train_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(
        lambda params: cross_entropy(state.apply_fn({"params": params}, images), labels)
    )(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> tuple[TrainState, list[float]]:
    """Trains; returns the state and the loss at each step."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=2 * (AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        key = jax.random.key(0)
        params = jax.eval_shape(init, key)
        matrices = jm.read(params, lambda p, x: MLP().apply({"params": p}, x), IMAGE)
        tx = jm.on_mesh(make_optimizer(matrices), mesh, divided(params, mesh))
        print(jm.describe(tx, params))

        def create(key: jax.Array) -> TrainState:
            return TrainState.create(apply_fn=MLP().apply, params=init(key), tx=tx)

        shardings = divided(jax.eval_shape(create, key), mesh)
        state = jax.jit(create, out_shardings=shardings)(key)
        jitted = partial(jax.jit, out_shardings=(shardings, None))(train_step)
        losses = []
        for batch in batches():
            state, loss = jitted(state, *jax.device_put(batch, P("data")))
            losses.append(loss)
        return state, report(losses)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
