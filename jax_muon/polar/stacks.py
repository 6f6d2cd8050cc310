"""Many batches of matrices in few stacks, so that one batched product serves many.

Matrices of one shape, and their transposes, share a stack (k, m, n) with m <= n.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def map_stacks(
    function: Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]],
    batches: Sequence[Float[Array, "_ _ _"]],
    *,
    max_stack: int,
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function of stacks of matrices to many batches, pooled by shape.

    On an accelerator all matrices of a shape, and of the transposed shape, share
    stacks: one batched product keeps it busy. On a CPU a copy costs more than it saves:
    there a batch of several matrices is a stack of its own, and only single matrices
    are pooled, so that few programs are compiled.

    Args:
      function: of stacks (k, m, n), one matrix independent of another, and commuting
        with transposition, as a polar factor is. It is traced for every platform.
      batches: arrays (batch, in, out).
      max_stack: depth of the deepest stack, at least 1.

    Returns:
      The results, in the order and shapes of `batches`.
    """

    def by_shape(index: int, batch: Array) -> Any:
        return (*sorted(batch.shape[-2:]), batch.dtype)

    def by_leaf(index: int, batch: Array) -> Any:
        return index if len(batch) > 1 else (*batch.shape, batch.dtype)

    if not batches:
        return []
    run = functools.partial(_map_pools, function, max_stack)
    return jax.lax.platform_dependent(
        *batches,
        cpu=functools.partial(run, by_leaf),
        default=functools.partial(run, by_shape),
    )


def _map_pools(
    function: Callable[[Array], Array],
    max_stack: int,
    pool_of: Callable[[int, Array], Any],
    *batches: Array,
) -> list[Array]:
    """The function of every batch, with those that have one `pool_of` in one stack."""
    pools: dict[Any, list[int]] = {}
    for index, batch in enumerate(batches):
        pools.setdefault(pool_of(index, batch), []).append(index)

    results: dict[int, Array] = {}
    for members in pools.values():
        rows, cols = batches[members[0]].shape[-2:]
        if any(batches[i].shape[1] != rows for i in members):
            rows, cols = sorted((rows, cols))
        # (12, 768, 3072) and (12, 3072, 768) -> (24, 768, 3072)
        turned = [
            batches[i] if batches[i].shape[1] == rows else batches[i].mT
            for i in members
        ]
        pool = jnp.concatenate(turned) if len(turned) > 1 else turned[0]
        stacks = []
        for start in range(0, len(pool), max_stack):
            stack = pool[start : start + max_stack]
            stacks.append(function(stack))
            shape = getattr(stacks[-1], "shape", None)
            if shape != stack.shape:
                raise ValueError(
                    f"polar={function!r} made shape {shape} out of {stack.shape}; "
                    "expected a function whose result has the shape of its argument"
                )
        pool = jnp.concatenate(stacks) if len(stacks) > 1 else stacks[0]
        start = 0
        for index in members:
            count = len(batches[index])
            part = pool[start : start + count]
            results[index] = part if batches[index].shape[1] == rows else part.mT
            start += count
    return [results[index] for index in range(len(batches))]
