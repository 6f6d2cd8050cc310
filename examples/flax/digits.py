"""Shared by both examples: handwritten digits, the loss, the optimizer."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits

import jax_muon as jm

STEPS = 40
IMAGE = jax.ShapeDtypeStruct((1, 64), "float32")  # one image, for `jm.find_matrices`


def make_optimizer(matrices: jm.Matrices) -> optax.GradientTransformationExtraArgs:
    """nanochat, for the matrices found in a model."""
    adamw = optax.adamw(0.003)
    return jm.nanochat(0.02, adamw=adamw, dtype="float32", matrices=matrices)


def batches(size: int = 256) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`STEPS` random batches: images (256, 64) from 0 to 1, labels (256,)."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        chosen = random.integers(len(images), size=size)
        yield images[chosen], digits.target[chosen]


def cross_entropy(
    logits: Float[Array, "batch 10"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def report(losses: Sequence[jax.Array]) -> list[float]:
    """Prints the loss before and after, and returns all of them."""
    values = [float(loss) for loss in losses]
    print(f"loss {values[0]:.3f} before, {values[-1]:.3f} after {len(values)} steps")
    return values
