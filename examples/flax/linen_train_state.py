"""Flax linen with its TrainState, which takes a recipe as any optax optimizer.

python examples/flax/linen_train_state.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import linen as nn
from flax.training.train_state import TrainState

import jax_muon as jm


class Attention(nn.Module):
    """Rows of an image (batch, 8, 8) attend to each other: logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x.reshape(-1, 8, 8))  # (batch, 8, 32)
        rows = self.param("row_embedding", nn.initializers.normal(0.1), (8, 32))
        # Kernels (32, 4, 8) of query, key and value are read as (32, 32).
        x = x + nn.MultiHeadAttention(num_heads=4)(nn.LayerNorm()(x + rows))
        return nn.Dense(10, name="head")(x.mean(axis=1))


@jax.jit
def train_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(
        lambda params: cross_entropy(state.apply_fn({"params": params}, images), labels)
    )(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> tuple[TrainState, list[float]]:
    """Trains; returns the state and the loss at each step."""
    model = Attention()
    params = model.init(jax.random.key(0), jax.numpy.zeros((1, 64)))["params"]
    matrices = jm.read(params, lambda p, x: model.apply({"params": p}, x), IMAGE)
    tx = make_optimizer(matrices)
    print(jm.describe(tx, params))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for batch in batches():
        state, loss = train_step(state, *batch)
        losses.append(loss)
    return state, report(losses)


if __name__ == "__main__":
    main()
