"""Flax NNX with nnx.ModelAndOptimizer: one object holds the weights and the momentum.

python examples/flax/nnx_model_and_optimizer.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import nnx

import jax_muon as jm


class CNN(nnx.Module):
    """Images (batch, 64) to logits (batch, 10), by convolutions."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, 16, (3, 3), rngs=rngs)  # (9, 16)
        self.conv = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)  # (144, 32)
        self.head = nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x.reshape(-1, 8, 8, 1)))  # (batch, 8, 8, 16)
        x = nnx.relu(self.conv(x))  # (batch, 4, 4, 32)
        return self.head(x.reshape(-1, 512))


@nnx.jit
def train_step(
    state: nnx.ModelAndOptimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(
        lambda model: cross_entropy(model(images), labels)
    )(state.model)
    state.update(grads)
    return loss


def main() -> tuple[CNN, list[float]]:
    """Trains; returns the model and the loss at each step."""
    model = CNN(rngs=nnx.Rngs(0))
    matrices = jm.read(model, lambda model, x: model(x), IMAGE)
    tx = make_optimizer(matrices)
    print(jm.describe(tx, model))
    state = nnx.ModelAndOptimizer(model, tx)
    losses = [train_step(state, *batch) for batch in batches()]
    return state.model, report(losses)


if __name__ == "__main__":
    main()
