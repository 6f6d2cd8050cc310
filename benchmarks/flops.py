"""FLOPs of orthogonalization: what is counted for everybody, and the least."""

from typing import Any

from benchmarks.parameters import model_parameters


def nominal_flops(model: str) -> int:
    """FLOPs of five quintics in the standard form, the same for every contender."""
    total = 0
    for leaf in model_leaves(model):
        m, n = sorted(leaf.shape)
        total += 5 * (4 * m * m * n + 2 * m**3)
    return total


def least_flops(model: str) -> int:
    """FLOPs of five quintics with one triangle of each symmetric product.

    In the form that needs fewer: standard, or Gram with one restart.
    """
    total = 0
    for leaf in model_leaves(model):
        m, n = sorted(leaf.shape)
        standard, gram = 15 * m * m * n + 5 * m**3, 6 * m * m * n + 14 * m**3
        total += min(standard, gram)
    return total


def model_leaves(model: str) -> list[Any]:
    """The matrices for Muon."""
    blocks = model_parameters(model, "float32")["blocks"]
    return [leaf for block in blocks.values() for leaf in block.values()]
