"""Polar factors of sharded matrices: stacks of one shape, dealt out to the devices.

A polar factor needs a whole matrix, and each device has a shard of it. Matrices of one
shape, dtype and sharding are a stack (count, rows, columns) of shards:

  deal:     an all-to-all gives every device some whole matrices; devices that repeat
            each other's shards take a part of these each;
  compute:  every device, the polar factors of its matrices;
  return:   the same way back.

Of 48 matrices (768, 3072) whose rows 8 devices divide, each has shards (48, 96, 3072),
gets six whole matrices (6, 768, 3072), and has shards of all factors again. Of 12, one
for each device makes 8. The rest of 4 travels in a round: an exchange with the rests of
other stacks, in which each device gets one matrix or none. What is small is gathered
and computed everywhere.

Shards may be put together in any order, if they are taken apart in the same one: a
polar factor moves with the rows and columns of its matrix.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_muon.base.specs import Sizes, devices_over, divided_axes

Polar = Callable[[Float[Array, "k m n"]], Float[Array, "k m n"]]
Axes = tuple[str, ...]  # of a mesh, those with several devices

# Stacks with fewer elements in all are computed everywhere. On an H100 that is at most
# 1 us of products; to deal them out and back are two transfers, 10 us each to start.
SMALL = 65536


class Shards(NamedTuple):
    """One device's shards of a batch of matrices.

    Of scanned layers (12, 768, 3072) whose rows 8 devices divide: shape (12, 96, 3072),
    rows ("data",), and no mesh axes over the batch and the columns. 12 separate layers
    (768, 3072) are 12 of these, of shape (1, 96, 3072).
    """

    shape: tuple[int, int, int]  # (count, rows, columns)
    dtype: np.dtype
    back_dtype: np.dtype  # in which factors return
    batch: Axes  # mesh axes over different matrices
    rows: Axes
    columns: Axes


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape, dtype and sharding, as each device has shards of them.

    12 separate layers are one stack, with counts (1,) * 12. On hosts 2 x gpus 4 of
    which the gpus divide rows, repeats is ("hosts",), divides ("gpus",), devices 8.
    """

    members: tuple[int, ...]  # the batches that they come from
    counts: tuple[int, ...]  # of matrices in each of these
    shards: Shards  # all on one device: (12, 96, 3072)
    shape: tuple[int, int]  # of a whole matrix: (768, 3072)
    repeats: Axes  # mesh axes over the same shards again
    divides: Axes  # over rows and columns, in the order of the mesh
    devices: int  # over both kinds of axes: they divide the work
    everywhere: bool  # so small that all of them compute all of it

    @property
    def count(self) -> int:
        """Matrices that one device has shards of."""
        return self.shards.shape[0]

    @property
    def even(self) -> int:
        """Matrices of which all devices get the same number: 8 of 12 on 8 devices."""
        return self.count // self.devices * self.devices

    @property
    def size(self) -> int:
        """Elements of a shard of one matrix."""
        return math.prod(self.shards.shape[1:])

    @property
    def flops(self) -> int:
        """FLOPs of one quintic of one matrix: X X^T, its square, and the product."""
        m, n = sorted(self.shape)
        return 4 * m * m * n + 2 * m**3


@dataclasses.dataclass(frozen=True)
class Round:
    """Rests that travel together: each device gets one of these matrices, or none.

    On 8 devices, rests of 4, 3 and 2 matrices are a round with counts (4, 3, 1) and one
    with (1,). From device 3 on, a round of 4 is dealt to devices 3 to 6.
    """

    stacks: tuple[Stack, ...]
    counts: tuple[int, ...]  # of their matrices
    start: int  # the device that gets the first one

    @property
    def width(self) -> int:
        """Elements that a device sends to each other one, padding included."""
        return max(stack.size for stack in self.stacks)

    @property
    def kinds(self) -> np.ndarray:
        """For each device the stack that its matrix is of; their number for none."""
        number, devices = len(self.stacks), self.stacks[0].devices
        turns = np.full(devices, number)
        turns[: sum(self.counts)] = np.repeat(np.arange(number), self.counts)
        return np.roll(turns, self.start)


def stacks_of(
    shards: Sequence[Shards], sizes: Sizes, *, small: int = 0, start: int = 0
) -> tuple[list[Stack], list[Round]]:
    """Stacks of all matrices, those of the largest matrices first, and their rounds.

    Args:
      shards: of all batches of matrices.
      sizes: of the mesh axes.
      small: stacks of fewer elements in all are computed everywhere.
      start: the device, modulo their number, that gets the first matrix of a rest.
    """
    # Batches of one shape, dtype and sharding, whatever the order of the mesh axes.
    batches: dict[Shards, list[int]] = {}
    several = divided_axes(sizes)
    for index, x in enumerate(shards):
        batch, rows, columns = (
            tuple(name for name in several if name in over)
            for over in (x.batch, x.rows, x.columns)
        )
        shape = 0, *x.shape[1:]
        alike = x._replace(shape=shape, batch=batch, rows=rows, columns=columns)
        batches.setdefault(alike, []).append(index)
    stacks = []
    for alike, members in batches.items():
        _, m, n = alike.shape
        whole = (
            m * devices_over(alike.rows, sizes),
            n * devices_over(alike.columns, sizes),
        )
        divides = tuple(x for x in several if x in alike.rows + alike.columns)
        repeats = tuple(x for x in several if x not in alike.batch + divides)
        devices = devices_over(repeats + divides, sizes)
        counts = tuple(shards[index].shape[0] for index in members)
        on_device = alike._replace(shape=(sum(counts), m, n))
        few = devices == 1 or sum(counts) * math.prod(whole) < small
        given = on_device, whole, repeats, divides, devices, few
        stacks.append(Stack(tuple(members), counts, *given))
    stacks.sort(key=lambda stack: (stack.flops, stack.shape), reverse=True)
    return stacks, list(_rounds(stacks, start))


def _rounds(stacks: Sequence[Stack], start: int) -> Iterator[Round]:
    """Deal the rests of stacks to devices in turn, the largest matrices first.

    Rests of 12 ups and downs of a GPT and of 4 queries on 8 devices are 4, 4 and 4: a
    round of ups and downs, and one of queries. A device without a matrix sends zeros as
    long as the largest one, so smaller matrices travel in its place for nothing.
    """
    groups: dict[object, list[Stack]] = {}  # of the matrices of rests
    ends: dict[object, int] = {}  # where the round before ended, by mesh axes
    for stack in stacks:
        if stack.count > stack.even and not stack.everywhere:
            x = stack.shards
            alike = x.dtype, x.back_dtype, x.batch, stack.repeats, stack.divides
            rest = [stack] * (stack.count - stack.even)
            groups.setdefault(alike, []).extend(rest)
    for group in groups.values():
        for first in range(0, len(group), group[0].devices):
            counts = collections.Counter(group[first : first + group[0].devices])
            over = group[0].repeats, group[0].divides
            at = ends.get(over, start) % group[0].devices
            ends[over] = at + counts.total()
            yield Round(tuple(counts), tuple(counts.values()), at)


# --- on each device, inside shard_map -------------------------------------------------


def map_shards(
    polar: Polar,
    stacks: Sequence[Stack],
    rounds: Sequence[Round],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (count, rows, columns) of shards.

    1. even: of each stack, what divides evenly goes to the devices and back;
    2. rests: what does not, in rounds, so that devices compute different matrices at
       the same time;
    3. batches: stacks are split into the batches that they came from.
    """
    pieces: dict[Stack, list[Array]] = {}  # of factors, in order, shaped in step 3
    rests: dict[Stack, Array] = {}
    for number, stack in enumerate(stacks):
        x = jnp.concatenate([batches[index] for index in stack.members])
        with jax.named_scope(f"stack_{number}"):  # for profiles
            # 1. Even.
            if stack.everywhere:
                pieces[stack] = [_everywhere(polar, stack, x)]
                continue
            # 48 shards (96, 3072) are rows (8, 6 * 96 * 3072), one for each device.
            flat, even = x.reshape(stack.count, stack.size), stack.even
            compute = functools.partial(_compute, polar, stack)
            rows = flat[:even].reshape(stack.devices, -1)
            pieces[stack] = [_exchanged(compute, stack, rows)] if even else []
            rests[stack] = flat[even:]
    # 2. Rests.
    for number, one in enumerate(rounds):
        with jax.named_scope(f"round_{number}"):
            taken = []
            for stack, count in zip(one.stacks, one.counts, strict=True):
                taken.append(_padded(rests[stack][:count], one.width))
                rests[stack] = rests[stack][count:]
            factors = _travel(polar, one, jnp.concatenate(taken))
            parts = jnp.split(factors, np.cumsum(one.counts)[:-1].tolist())
            for stack, part in zip(one.stacks, parts, strict=True):
                pieces[stack].append(part[:, : stack.size])
    # 3. Batches.
    results: dict[int, Array] = {}
    for stack, parts in pieces.items():
        whole = jnp.concatenate([x.reshape(-1, *stack.shards.shape[1:]) for x in parts])
        split = jnp.split(whole, np.cumsum(stack.counts)[:-1].tolist())
        results |= zip(stack.members, split, strict=True)
    return [results[index] for index in range(len(batches))]


def _padded(x: Float[Array, "rows _"], width: int) -> Float[Array, "rows width"]:
    return jnp.pad(x, [(0, 0), (0, width - x.shape[1])])


def _travel(
    polar: Polar, one: Round, rows: Float[Array, "matrices width"]
) -> Float[Array, "matrices width"]:
    """The factors of a round's matrices, one row of shards for each."""
    # Of 4 matrices (768, 3072) and 3 (768, 2048) whose rows 8 devices divide: rows
    # (7, 96 * 3072) with zeros behind the shards (96, 2048), and one more row of zeros.
    # From device 0 on, kinds are [0, 0, 0, 0, 1, 1, 1, 2].
    stack, count = one.stacks[0], len(rows)
    rows = jnp.pad(rows, [(0, stack.devices - count), (0, 0)])
    rows = jnp.roll(rows, one.start, 0)
    kinds, device = jnp.asarray(one.kinds), stack.repeats + stack.divides
    kind = kinds[jax.lax.axis_index(device)]

    def branch(x: Stack) -> Polar:
        compute = functools.partial(_compute, polar, x)
        return lambda rows: _padded(compute(rows[:, : x.size]), one.width)

    branches = list(map(branch, one.stacks))
    if count < stack.devices:  # some have none
        # XLA for CPUs cannot compile an all-to-all whose rows are partly constants.
        rows = jax.lax.optimization_barrier(rows)
        branches.append(lambda rows: jnp.zeros_like(rows, stack.shards.back_dtype))
    compute = functools.partial(jax.lax.switch, kind, branches)
    done = _exchanged(compute, stack, rows)
    return jnp.roll(done, -one.start, 0)[:count]


def _exchanged(
    compute: Polar, stack: Stack, rows: Float[Array, "devices width"]
) -> Float[Array, "devices width"]:
    """Send each device its row, and get back what it computes from all such rows.

    On 8 devices, row d of (8, width) goes to device d, which computes from 8 rows, one
    of each sender, and sends them back. On 2 hosts that repeat the shards of their 8
    GPUs there are 16 rows: each host takes 8 of them, and in the end gathers all 16.
    """
    if stack.repeats:
        mine = len(rows) // jax.lax.axis_size(stack.repeats)
        first = jax.lax.axis_index(stack.repeats) * mine
        rows = jax.lax.pcast(rows, stack.repeats, to="varying")
        rows = jax.lax.dynamic_slice_in_dim(rows, first, mine)
    swap = functools.partial(
        jax.lax.all_to_all, axis_name=stack.divides, split_axis=0, concat_axis=0
    )
    rows = swap(rows, tiled=True) if stack.divides else rows
    rows = compute(rows)
    rows = swap(rows, tiled=True) if stack.divides else rows
    if stack.repeats:
        # All of them have the shards again, as their types have to say.
        rows = jax.lax.all_gather(rows, stack.repeats, tiled=True, to="invarying")
    return rows


def _compute(
    polar: Polar, stack: Stack, rows: Float[Array, "senders width"]
) -> Float[Array, "senders width"]:
    """A device's work: shards of whole matrices to shards of their factors."""
    # Of 6 matrices (768, 3072) from 8 senders, rows (8, 6 * 96 * 3072) are the grid
    # (8, 6, 96, 3072), and with axes in the order (1, 0, 2, 3) the matrices. On data 4
    # x tp 2 that divide rows and columns it is (4, 2, 6, 192, 1536) in (2, 0, 3, 1, 4).
    over, k = stack.divides, len(stack.divides)
    shape = *map(jax.lax.axis_size, over), -1, *stack.shards.shape[1:]
    by_rows, by_columns = (
        [over.index(name) for name in side]
        for side in (stack.shards.rows, stack.shards.columns)
    )
    order = k, *by_rows, k + 1, *by_columns, k + 2
    grid = rows.reshape(shape).transpose(order)
    factors = polar(grid.reshape(-1, *stack.shape)).astype(stack.shards.back_dtype)
    return factors.reshape(grid.shape).transpose(np.argsort(order)).reshape(rows.shape)


def _everywhere(
    polar: Polar, stack: Stack, x: Float[Array, "k _ _"]
) -> Float[Array, "k _ _"]:
    """Gather whole matrices on every device, and keep its shards of their factors.

    5 shards (1, 8) of matrices (8, 8) on 8 devices are gathered as (8, 5, 1, 8).
    """
    if not stack.divides:
        return polar(x).astype(x.dtype)
    gathered = jax.lax.all_gather(x, stack.divides)
    rows = _compute(polar, stack, gathered.reshape(len(gathered), -1))
    device = jax.lax.axis_index(stack.divides)
    mine = jax.lax.dynamic_index_in_dim(rows, device, keepdims=False)
    return mine.reshape(x.shape)
