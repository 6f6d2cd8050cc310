"""Trains a small convolutional network on handwritten digits with jax_muon.nanochat().

    python examples/train_cnn.py

Flax linen with its TrainState, on scikit-learn's 1797 images of 8 x 8. A kernel of a
convolution (3, 3, in, out) is read as a matrix (9 in, out); the last layer and the
biases go to AdamW.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import jax_muon as jm


class CNN(nn.Module):
    """Three convolutions and a head: images (64, 8, 8, 1) to logits (64, 10)."""

    @nn.compact
    def __call__(self, x: Float[Array, "batch 8 8 1"]) -> Float[Array, "batch 10"]:
        x = nn.relu(nn.Conv(32, (3, 3))(x))  # (64, 8, 8, 32)
        x = nn.relu(nn.Conv(64, (3, 3))(x))  # (64, 8, 8, 64)
        x = nn.max_pool(x, (2, 2), (2, 2))  # (64, 4, 4, 64)
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = x.mean(axis=(1, 2))  # (64, 64)
        return nn.Dense(10, name="head")(x)


@jax.jit
def train_step(
    state: TrainState, images: Float[Array, "batch 8 8 1"], labels: Int[Array, " batch"]
) -> tuple[TrainState, Float[Array, ""]]:
    def loss(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


@jax.jit
def accuracy(
    state: TrainState, images: Float[Array, "batch 8 8 1"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    return jnp.mean(
        state.apply_fn({"params": state.params}, images).argmax(-1) == labels
    )


def main(argv: list[str] | None = None) -> float:
    """Trains, prints, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("nanochat", "muon"), default="nanochat")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    began = time.monotonic()

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]  # (1797, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    print(f"{len(x)} images to train on, {len(x_test)} to test")

    batches = len(x) // options.batch_size  # in an epoch
    steps = options.epochs * batches
    recipe = jm.nanochat if options.optimizer == "nanochat" else jm.muon
    model = CNN()
    params = model.init(jax.random.key(options.seed), x[:1])["params"]
    tx = recipe(
        optax.linear_schedule(0.02, 0.0, steps),
        adamw=optax.adamw(optax.linear_schedule(0.003, 0.0, steps)),
        matrices=jm.read(params, lambda p, x: model.apply({"params": p}, x), x[:1]),
        dtype="float32",
    )
    print(jm.describe(tx, params))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    random = np.random.default_rng(options.seed)
    for _ in (bar := trange(options.epochs, unit="epoch")):
        order = random.permutation(len(x))[: batches * options.batch_size]
        losses = []
        for batch in order.reshape(batches, options.batch_size):
            state, loss = train_step(state, x[batch], y[batch])
            losses.append(loss)
        bar.set_postfix(loss=f"{np.mean(losses):.4f}")

    result = float(accuracy(state, x_test, y_test))
    print(f"test accuracy {result:.2%} in {time.monotonic() - began:.0f} s")
    return result


if __name__ == "__main__":
    main()
