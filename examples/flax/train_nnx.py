"""Flax NNX: scanned layers, sharded parameters, and a checkpoint.

nnx.vmap makes the layers and nnx.scan applies them, so every parameter of a block has a
leading axis of layers, and a kernel (4, 64, 128) is read as four matrices. The metadata
of kernels say how they are sharded, and their momentum is sharded alike. Training runs
in plain jit; `on_mesh` takes the shardings, because on a mesh with Auto axes the types
of arrays do not show them. Halfway the model and the optimizer are saved, and restored
ones do the rest.

    python examples/flax/train_nnx.py runs/nnx

Eight CPU devices simulate accelerators.
"""

import pathlib
import sys

import jax
import orbax.checkpoint as ocp
from digits import IMAGE, STEPS, batches, cross_entropy, make_optimizer, report
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_muon as jm

LAYERS = 4


class Block(nnx.Module):
    """(batch, 64) to (batch, 64)."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("data", "model"))
        down = nnx.with_partitioning(init, ("model", "data"))
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(128, 64, kernel_init=down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self, *, rngs: nnx.Rngs):
        # The axis of layers is not sharded.
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def create(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.blocks = create(rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def apply(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.head(apply(x, self.blocks))


@nnx.jit
def train_step(
    model: Stack, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(
        lambda model: cross_entropy(model(images), labels)
    )(model)
    optimizer.update(model, grads)
    return loss


def create(mesh: Mesh) -> tuple[Stack, nnx.Optimizer]:
    """A model and its optimizer."""
    model = Stack(rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    matrices = jm.find_matrices(params, lambda p, x: nnx.merge(graph, p)(x), IMAGE)
    shardings = nnx.get_named_sharding(params, mesh)
    tx = jm.on_mesh(make_optimizer(matrices), shardings)
    print(jm.describe(tx, params))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def main(folder: pathlib.Path) -> tuple[Stack, nnx.Optimizer, list[float]]:
    """Trains; returns the model, the optimizer and the loss at each step."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=2 * (AxisType.Auto,))
    losses = []
    with jax.set_mesh(mesh), ocp.StandardCheckpointer() as checkpointer:
        model, optimizer = create(mesh)
        for step, batch in enumerate(batches()):
            if step == STEPS // 2:
                saved = folder.absolute() / str(step)
                both = nnx.state((model, optimizer))
                checkpointer.save(saved, nnx.to_pure_dict(both), force=True)
                checkpointer.wait_until_finished()
                model, optimizer = create(mesh)
                both = nnx.state((model, optimizer))
                pure = checkpointer.restore(saved, nnx.to_pure_dict(both))
                nnx.replace_by_pure_dict(both, pure)
                nnx.update((model, optimizer), both)
            batch = jax.device_put(batch, P("data"))
            losses.append(train_step(model, optimizer, *batch))
        return model, optimizer, report(losses)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/nnx"))
