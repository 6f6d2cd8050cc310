"""Flax NNX with stacked layers: made by nnx.vmap, applied by nnx.scan.

Every parameter of a block has a leading axis of layers, (4, 64, 64), (4, 64). Kernels
are read as four matrices each; biases and norm scales stay with AdamW.

    python examples/flax/nnx_scan.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import nnx

import jax_muon as jm

LAYERS = 4


class Block(nnx.Module):
    """(batch, 64) to (batch, 64)."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.dense = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.relu(self.dense(self.norm(x)))


class Stack(nnx.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def create(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.blocks = create(rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
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


def main() -> tuple[Stack, list[float]]:
    """Trains; returns the model and the loss at each step."""
    model = Stack(rngs=nnx.Rngs(0))
    matrices = jm.read(model, lambda model, x: model(x), IMAGE)
    tx = make_optimizer(matrices)
    print(jm.describe(tx, model))  # 4 x (64, 64)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [train_step(model, optimizer, *batch) for batch in batches()]
    return model, report(losses)


if __name__ == "__main__":
    main()
