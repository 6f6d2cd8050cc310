"""Flax NNX with nnx.Optimizer: one object holds the weights, one the momentum.

python examples/flax/nnx_optimizer.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import nnx

import jax_muon as jm


class MLP(nnx.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)  # to AdamW

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.down(nnx.relu(self.up(x)))
        return self.head(self.norm(x))


@nnx.jit
def train_step(
    model: MLP, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(
        lambda model: cross_entropy(model(images), labels)
    )(model)
    optimizer.update(model, grads)
    return loss


def main() -> tuple[MLP, list[float]]:
    """Trains; returns the model and the loss at each step."""
    model = MLP(rngs=nnx.Rngs(0))
    matrices = jm.read(model, lambda model, x: model(x), IMAGE)
    tx = make_optimizer(matrices)
    print(jm.describe(tx, model))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [train_step(model, optimizer, *batch) for batch in batches()]
    return model, report(losses)


if __name__ == "__main__":
    main()
