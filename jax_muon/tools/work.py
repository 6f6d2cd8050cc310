"""What stacks and rounds cost: FLOPs of each device, and bytes that one sends."""

import numpy as np

from jax_muon.base.specs import Sizes, devices_over, divided_axes
from jax_muon.mesh.stacks import Round, Stack


def matrices(stack: Stack, sizes: Sizes) -> int:
    """Matrices on the whole mesh."""
    return stack.count * devices_over(stack.shards.batch, sizes)


def load(x: Stack | Round, sizes: Sizes) -> np.ndarray:
    """FLOPs of a quintic on each device, in the order of `divided_axes(sizes)`.

    Of a stack those that every device computes; rounds have all others.
    """
    if isinstance(x, Round):
        flops = x.each * np.array([*(float(stack.flops) for stack in x.stacks), 0.0])
        return on_mesh(x.stacks[0], flops[x.kinds], sizes)
    count = x.count if x.everywhere else 0
    return on_mesh(x, np.full(x.devices, count * float(x.flops)), sizes)


def on_mesh(stack: Stack, values: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Values for each device of a stack, in the order of `divided_axes(sizes)`.

    On data 2 x fsdp 4, with a batch over "data" and rows over "fsdp", (2, 2, 1, 1) is
    [[2, 2, 1, 1], [2, 2, 1, 1]].
    """
    batch = stack.shards.batch
    order, names = (*stack.repeats, *stack.divides, *batch), divided_axes(sizes)
    by_axis = np.repeat(values, devices_over(batch, sizes))
    by_axis = by_axis.reshape([sizes[name] for name in order])
    return by_axis.transpose([order.index(name) for name in names])


def sent_bytes(x: Stack | Round, sizes: Sizes) -> float:
    """Bytes that a device sends in a step, with zeros for those that get no matrix.

    Of a stack those that it gathers; rounds have all others.
    """
    stack = x.stacks[0] if isinstance(x, Round) else x
    there, back = (
        np.dtype(dtype).itemsize
        for dtype in (stack.shards.dtype, stack.shards.back_dtype)
    )
    repeats, shards = (devices_over(x, sizes) for x in (stack.repeats, stack.divides))
    if isinstance(x, Stack):
        return x.count * x.size * there * (shards - 1) if x.everywhere else 0.0
    # Each of those that repeat shards sends its part, and gathers all others.
    rows = stack.devices * x.width
    exchanged = rows * (there + back) / repeats * (1 - 1 / shards)
    return exchanged + rows * back * (1 - 1 / repeats)
