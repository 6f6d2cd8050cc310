"""Many batches of matrices in few stacks, so that one batched product serves many.

Matrices of one shape, and their transposes, share a stack (k, m, n) with m <= n.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Most matrices in one call, which bounds temporary memory.
MAX_STACK = 256


def map_stacks(
    function: Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Apply a function of stacks of matrices to many batches, pooled by shape.

    On an accelerator all matrices of a shape, and of the transposed shape, share
    stacks: one batched product keeps it busy. On a CPU a copy costs more than it saves:
    there a batch of several matrices is a stack of its own, and only single matrices
    are pooled, so that few programs are compiled.

    Args:
      function: of stacks (k, m, n), one matrix independent of another, and commuting
        with transposition, as a polar factor is. It is traced once, or twice where the
        two kinds of platforms pool differently.
      batches: arrays (batch, in, out).

    Returns:
      The results, in the order and shapes of `batches`.
    """
    sizes = [(*sorted(x.shape[-2:]), x.dtype) for x in batches]
    single = [i if len(x) > 1 else (x.shape, x.dtype) for i, x in enumerate(batches)]
    on_accelerators, on_cpu = _pools(sizes), _pools(single)
    run = functools.partial(_map_pools, function)
    if on_accelerators == on_cpu:
        return run(on_cpu, *batches)
    return jax.lax.platform_dependent(
        *batches,
        cpu=functools.partial(run, on_cpu),
        default=functools.partial(run, on_accelerators),
    )


def _pools(keys: Sequence[Any]) -> list[list[int]]:
    """The indices of equal keys, together."""
    pools: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        pools.setdefault(key, []).append(index)
    return [*pools.values()]


def _map_pools(
    function: Callable[[Array], Array],
    pools: list[list[int]],
    *batches: Array,
) -> list[Array]:
    """The function of every batch; those of one pool share stacks."""
    results: dict[int, Array] = {}
    for members in pools:
        shapes = [batches[i].shape[1:] for i in members]
        # (12, 768, 3072) and (12, 3072, 768) -> (24, 768, 3072)
        turned = [len({*shapes}) > 1 and rows > cols for rows, cols in shapes]
        pool = jnp.concatenate(
            [
                batches[i].mT if turn else batches[i]
                for i, turn in zip(members, turned, strict=True)
            ]
        )
        stacks = []
        for start in range(0, len(pool), MAX_STACK):
            stack = pool[start : start + MAX_STACK]
            stacks.append(function(stack))
            shape = getattr(stacks[-1], "shape", None)
            dtype: Any = getattr(stacks[-1], "dtype", None)
            if shape != stack.shape or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"polar={function!r} made {dtype} of shape {shape} out of "
                    f"{stack.dtype} of shape {stack.shape}; expected a function whose "
                    "result has the shape of its argument, in real floating point"
                )
        ends = np.cumsum([len(batches[i]) for i in members])
        parts = jnp.split(jnp.concatenate(stacks), ends[:-1])
        for index, turn, part in zip(members, turned, parts, strict=True):
            results[index] = part.mT if turn else part
    return [results[index] for index in range(len(batches))]
