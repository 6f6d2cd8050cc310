"""Flax linen with stacked layers: nn.scan over blocks.

Every parameter of a block has a leading axis of layers, (4, 64, 64), (4, 64). Kernels
are read as four matrices each; biases and norm scales stay with AdamW.

    python examples/flax/linen_scan.py
"""

import jax
from digits import IMAGE, batches, cross_entropy, make_optimizer, report
from flax import linen as nn
from flax.training.train_state import TrainState

import jax_muon as jm

LAYERS = 4


class Block(nn.Module):
    """(batch, 64) to (batch, 64), in the form that nn.scan takes."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.relu(nn.Dense(64)(nn.RMSNorm()(x))), None


class Stack(nn.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(10, name="head")(x)


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
    model = Stack()
    params = model.init(jax.random.key(0), jax.numpy.zeros((1, 64)))["params"]
    matrices = jm.read(params, lambda p, x: model.apply({"params": p}, x), IMAGE)
    tx = make_optimizer(matrices)
    print(jm.describe(tx, params))  # 4 x (64, 64)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for batch in batches():
        state, loss = train_step(state, *batch)
        losses.append(loss)
    return state, report(losses)


if __name__ == "__main__":
    main()
