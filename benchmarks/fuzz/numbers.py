"""Gradients and parameters of a case: mostly Gaussian, some hostile."""

from typing import Any

import numpy as np
from ml_dtypes import finfo

from benchmarks.fuzz.cases import Case, Leaf


def tree_of(case: Case, arrays: list[Any]) -> dict[str, Any]:
    """Arrays as nested dictionaries; where a path is taken, it is one key."""
    tree: dict[str, Any] = {}
    for leaf, array in zip(case.leaves, arrays, strict=True):
        *parents, last = leaf.path.split("/")
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and last not in node:
            node[last] = array
        else:
            tree[leaf.path] = array
    return tree


def parameters(case: Case) -> dict[str, Any]:
    """The parameters."""
    random = np.random.default_rng([case.seed, 0])
    return tree_of(
        case,
        [
            np.asarray(case.size * random.standard_normal(leaf.shape), leaf.dtype)
            for leaf in case.leaves
        ],
    )


def gradients(case: Case, step: int) -> dict[str, Any]:
    """The gradients of a step, from 1 on."""
    random = np.random.default_rng([case.seed, step])
    return tree_of(
        case,
        [
            _gradient(case.numbers, leaf, number, random)
            for number, leaf in enumerate(case.leaves)
        ],
    )


def _gradient(
    kind: str, leaf: Leaf, number: int, random: np.random.Generator
) -> np.ndarray:
    x = random.standard_normal(leaf.shape)
    if leaf.dtype == "int32":
        return np.asarray(np.round(x), leaf.dtype)
    largest = float(finfo(leaf.dtype).max)
    smallest = float(finfo(leaf.dtype).smallest_normal)
    if kind == "zeros" or (kind == "one leaf zero" and number == 0):
        x = np.zeros_like(x)
    elif kind == "huge":  # sums of their squares are finite
        x = np.clip(x, -1, 1) * min(0.5 * largest**0.5, 1e15)
    elif kind == "overflow":
        x = np.clip(x, -1, 1) * 0.9 * largest
    elif kind == "tiny":
        x = x * smallest**0.8
    elif kind == "denormal":
        x = x * smallest / 64
    elif kind == "rank one":
        x = np.ones_like(x) * x[(..., *[slice(1)] * (x.ndim > 0))]
    elif kind == "one element":
        one = np.zeros(x.size)
        one[: x.size // 2 + 1][-1:] = 1
        x = one.reshape(x.shape)
    elif kind == "equal":
        x = np.ones_like(x)
    elif kind == "rows apart":
        x = x * 10.0 ** random.uniform(-19, 0, (*leaf.shape[:-1], *[1] * (x.ndim > 0)))
    elif kind == "leaves apart":
        x = x * 10.0 ** random.uniform(-10, 4)
    elif kind in ("nan", "infinite") and x.size:
        x.flat[0] = np.nan if kind == "nan" else np.inf
    return np.asarray(x, leaf.dtype)
