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
        kernel = np.moveaxis(weight, (0, 1), (-1, -2))
    else:
        kernel = weight.T.reshape(shape)
    return _checked(kernel, shape)


def kernel_to_torch(kernel: np.ndarray, shape: Shape) -> np.ndarray:
    """A weight of this shape from a Flax kernel; the inverse of `kernel_to_flax`."""
    if len(shape) > 2:
        weight = np.moveaxis(kernel, (-1, -2), (0, 1))
    else:
        weight = kernel.reshape(shape[::-1]).T
    return _checked(weight, shape)


def to_flax(state: Mapping[str, np.ndarray], like: Any) -> Any:
    """PyTorch's parameters, or their gradients, as a tree like these Flax parameters.

    Raises:
        ValueError: the names or shapes of the two do not correspond, with the names.
    """
    flat = paths.leaves_with_paths(like)
    names = [torch_name(path) for path, _ in flat]
    if set(names) != set(state):
        raise ValueError(
            f"no counterpart for {sorted(set(names) ^ set(state))}; PyTorch has "
            f"{sorted(state)}, Flax {sorted(names)}"
        )
    leaves = []
    for name, (path, leaf) in zip(names, flat, strict=True):
        crosses = kernel_to_flax if _is_kernel(path) else _checked
        leaves.append(crosses(np.asarray(state[name]), tuple(leaf.shape)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def to_torch(tree: Any, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """PyTorch's parameters by name, whose shapes are given; errors as `to_flax`."""
    state = {}
    for path, leaf in paths.leaves_with_paths(tree):
        name = torch_name(path)
        if name not in shapes:
            raise ValueError(f"no counterpart for {path!r}; there are {sorted(shapes)}")
        crosses = kernel_to_torch if _is_kernel(path) else _checked
        state[name] = crosses(np.asarray(leaf), tuple(shapes[name]))
    if set(state) != set(shapes):
        raise ValueError(f"no counterpart for {sorted(set(shapes) - set(state))}")
    return state


def torch_name(path: str) -> str:
    """`blocks.0.attn.q.weight` for `blocks/0/attn/q/kernel`."""
    owner, _, leaf = path.rpartition("/")
    leaf = "weight" if leaf in ("kernel", "embedding", "scale") else leaf
    return ".".join([*owner.split("/"), leaf] if owner else [leaf])


def _is_kernel(path: str) -> bool:
    return path.rpartition("/")[2] == "kernel"


def _checked(x: np.ndarray, shape: Shape) -> np.ndarray:
    if x.shape != shape:
        raise ValueError(f"shape {x.shape} does not become {shape}")
    return x
