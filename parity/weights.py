"""Weights from PyTorch to Flax and back: the one place where orientation changes.

| PyTorch                       | Flax                      | how          |
|-------------------------------|---------------------------|--------------|
| Linear.weight (out, in)       | kernel (in, out)          | transposed   |
| the same, to several heads    | kernel (in, heads, dim)   | and reshaped |
| the same, from several heads  | kernel (heads, dim, out)  | and reshaped |
| Conv.weight (out, in, *win)   | kernel (*win, in, out)    | axes moved   |
| Embedding.weight (rows, dim)  | embedding (rows, dim)     | as it is     |
| Norm.weight (dim,)            | scale (dim,)              | as it is     |
| bias (dim,)                   | bias (dim,)               | as it is     |

The window of a convolution keeps its order: (out, in, h, w) becomes (h, w, in, out).
Gradients cross in the same way. Names follow: `blocks.0.attn.q.weight` is the path
`blocks/0/attn/q/kernel`. Both sides speak NumPy, so that neither's dtype is changed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_muon import paths

Shape = tuple[int, ...]


def kernel_to_flax(weight: np.ndarray, shape: Shape) -> np.ndarray:
    """A Flax kernel of this shape from a weight (out, in) or (out, in, *window)."""
    if weight.ndim > 2:
        return np.moveaxis(weight, (0, 1), (-1, -2))
    return weight.T.reshape(shape)


def kernel_to_torch(kernel: np.ndarray, shape: Shape) -> np.ndarray:
    """A weight of this shape from a Flax kernel; the inverse of `kernel_to_flax`."""
    if len(shape) > 2:
        return np.moveaxis(kernel, (-1, -2), (0, 1))
    return kernel.reshape(shape[::-1]).T


def to_flax(state: Mapping[str, np.ndarray], like: Any) -> Any:
    """PyTorch's parameters, or their gradients, as a tree like this one of Flax."""
    leaves = []
    for path, leaf in paths.leaves_with_paths(like):
        weight = np.asarray(state[torch_name(path)])
        is_kernel = path.endswith("kernel")
        leaves.append(kernel_to_flax(weight, leaf.shape) if is_kernel else weight)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def to_torch(tree: Any, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """PyTorch's parameters by name, whose shapes are given."""
    state = {}
    for path, leaf in paths.leaves_with_paths(tree):
        name, weight = torch_name(path), np.asarray(leaf)
        is_kernel = path.endswith("kernel")
        state[name] = kernel_to_torch(weight, shapes[name]) if is_kernel else weight
    return state


def torch_name(path: str) -> str:
    """`blocks.0.attn.q.weight` for `blocks/0/attn/q/kernel`."""
    *owners, leaf = path.split("/")
    leaf = "weight" if leaf in ("kernel", "embedding", "scale") else leaf
    return ".".join([*owners, leaf])
