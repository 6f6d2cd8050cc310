"""Many batches of matrices in few stacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def map_stacks(
    function: Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function of stacks of matrices to many batches.

    Single matrices of one shape share a stack, so that few programs are compiled, and
    an accelerator has work for all of its cores. A batch of several is its own stack:
    there a copy costs more than it saves.

    Args:
      function: of stacks (k, m, n), one matrix independent of another.
      batches: arrays (batch, in, out).

    Returns:
      The results, in the order and shapes of `batches`.
    """
    by_shape: dict[Any, list[int]] = {}
    for index, x in enumerate(batches):
        key = (x.shape, x.dtype) if len(x) == 1 else index
        by_shape.setdefault(key, []).append(index)
    results: dict[int, Array] = {}
    for indices in by_shape.values():
        stack = jnp.concatenate([batches[index] for index in indices])
        result = function(stack)
        shape = getattr(result, "shape", None)
        dtype: Any = getattr(result, "dtype", None)
        if shape != stack.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"polar={function!r} made {dtype} of shape {shape} out of "
                f"{stack.dtype} of shape {stack.shape}; expected a function whose "
                "result has the shape of its argument, in real floating point"
            )
        parts = jnp.split(result, len(indices)) if indices[1:] else [result]
        results |= zip(indices, parts, strict=True)
    return [results[index] for index in range(len(batches))]
