"""Flax NNX with parameters divided over a mesh by their partitioning metadata.

The momentum is divided as its parameter. All runs in plain jit; `on_mesh` takes the
specs, since the types of arrays do not show them on a mesh with Auto axes. Eight CPU
devices stand for accelerators.

    python examples/flax/nnx_partitioned.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_muon as jm


class MLP(nnx.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("data", "model"))
        down = nnx.with_partitioning(init, ("model", "data"))
        self.up = nnx.Linear(64, 128, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(128, 64, kernel_init=down, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x + self.down(nnx.relu(self.up(x))))


@nnx.jit
def train_step(
    model: MLP, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(
        lambda model: cross_entropy(model(images), labels)
    )(model)
    optimizer.update(model, grads)
    return loss


def main() -> tuple[MLP, nnx.Optimizer, list[float]]:
    """Trains; returns the model, the optimizer and the loss at each step."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=2 * (AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = MLP(rngs=nnx.Rngs(0))
        matrices = jm.read(model, lambda model, x: model(x), IMAGE)
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        tx = jm.on_mesh(make_optimizer(matrices), mesh, specs)
        print(jm.describe(tx, model))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = [
            train_step(model, optimizer, *jax.device_put(batch, P("data")))
            for batch in batches()
        ]
        return model, optimizer, report(losses)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
