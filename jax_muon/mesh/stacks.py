"""Polar factors of sharded matrices: stacks of one shape, dealt out to the devices.

A polar factor needs a whole matrix, and each device has a shard of it. Matrices of one
shape, dtype and sharding are a stack (count, rows, columns) of shards:

  deal:     an all-to-all gives every device some whole matrices; devices that repeat
            each other's shards take a part of these each;
  compute:  every device, the polar factors of its matrices;
  return:   the same way back.

Of 48 matrices (768, 3072) whose rows 8 devices divide, each has shards (48, 96, 3072),
gets six whole matrices (6, 768, 3072), and has shards of all factors again. Of 12, one
for each device makes a round of 8. The rest of 4 makes a round with the rests of other
stacks: each device gets one matrix or none. Small rounds share an exchange. What is
smaller still is gathered and computed everywhere.

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
# Rounds of fewer bytes in all share an exchange. That saves the start of a transfer, 20
# us, and a wait for the slowest device of a round; on an H100 64 MB travel in 140 us.
TOGETHER = 64_000_000


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
    """Matrices that are dealt out: every device gets the same number of them, or none.

    12 matrices on 8 devices are a round of 8 and one of 4, which the rests of 3 and 2
    others join, with counts (4, 3, 1), and a third one with (1,).
    """

    stacks: tuple[Stack, ...]
    counts: tuple[int, ...]  # of their matrices
    order: tuple[int, ...]  # all devices; the first one gets the first matrices
    each: int = 1  # matrices of a device, or none

    @property
    def width(self) -> int:
        """Elements that a device sends to each other one, padding included."""
        return self.each * max(stack.size for stack in self.stacks)

    @property
    def kinds(self) -> np.ndarray:
        """For each device the stack that its matrices are of; their number for none."""
        kinds = np.full(len(self.order), len(self.stacks))
        rows = [count // self.each for count in self.counts]
        kinds[[*self.order[: sum(rows)]]] = np.repeat(np.arange(len(rows)), rows)
        return kinds


def stacks_of(
    shards: Sequence[Shards], sizes: Sizes, *, small: int = 0, start: int = 0
) -> tuple[list[Stack], list[Round]]:
    """Stacks of all matrices, those of the largest matrices first, and their rounds.

    Args:
      shards: of all batches of matrices.
      sizes: of the mesh axes.
      small: stacks of fewer elements in all are computed everywhere.
      start: the device, modulo their number, that gets the first matrix of all rests.
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
    """First what divides evenly, then the rests, the largest matrices first.

    Rests of 12 ups and downs of a GPT and of 4 queries on 8 devices are 4, 4 and 4: a
    round of ups and downs, and one of queries. A device without a matrix sends zeros as
    long as the largest one, so smaller matrices travel in its place for nothing. Each
    round goes to the devices with the least work of those that the same mesh axes
    divide.
    """
    groups: dict[object, list[Stack]] = {}  # of the matrices of rests
    for stack in [x for x in stacks if not x.everywhere]:
        each, rest = divmod(stack.count, stack.devices)
        if each:
            order = tuple(range(stack.devices))
            yield Round((stack,), (stack.count - rest,), order, each)
        if rest:
            groups.setdefault(_alike(stack), []).extend([stack] * rest)
    loads: dict[object, np.ndarray] = {}  # FLOPs of each device, by mesh axes
    for group in groups.values():
        devices = group[0].devices
        over = group[0].repeats, group[0].divides
        load = loads.setdefault(over, np.zeros(devices))
        for first in range(0, len(group), devices):
            dealt = group[first : first + devices]
            turns = (np.arange(devices) - start) % devices
            order = tuple(np.lexsort((turns, load)).tolist())  # by load, then in turn
            load[[*order[: len(dealt)]]] += [stack.flops for stack in dealt]
            counts = collections.Counter(dealt)
            yield Round(tuple(counts), tuple(counts.values()), order)


def _alike(stack: Stack) -> tuple[object, ...]:
    """What stacks that travel together have in common; mesh axes over batches, too."""
    x = stack.shards
    return stack.repeats, stack.divides, x.dtype, x.back_dtype


def _exchanges(rounds: Sequence[Round]) -> list[list[Round]]:
    """Rounds that travel together: neighbours, as long as they are small."""
    exchanges: list[list[Round]] = []
    for one in rounds:
        stack, last = one.stacks[0], exchanges[-1] if exchanges else []
        width = sum(x.width for x in (*last, one))
        is_small = width * stack.devices * stack.shards.dtype.itemsize < TOGETHER
        if last and is_small and _alike(stack) == _alike(last[0].stacks[0]):
            last.append(one)
        else:
            exchanges.append([one])
    return exchanges


# --- on each device, inside shard_map -------------------------------------------------


def map_shards(
    polar: Polar,
    stacks: Sequence[Stack],
    rounds: Sequence[Round],
    batches: Sequence[Float[Array, "_ _ _"]],
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (count, rows, columns) of shards.

    1. shards: batches are put together into stacks; small ones are computed here;
    2. rounds: a row of shards for each device, which travel in exchanges;
    3. batches: stacks are split into the batches that they came from.
    """
    # 1. Shards.
    left: dict[Stack, Array] = {}  # (count, elements of a shard), not dealt out yet
    pieces: dict[Stack, list[Array]] = {}  # of factors, in order, shaped in step 3
    for number, stack in enumerate(stacks):
        x = jnp.concatenate([batches[index] for index in stack.members])
        left[stack], pieces[stack] = x.reshape(stack.count, stack.size), []
        if stack.everywhere:
            with jax.named_scope(f"stack_{number}"):  # for profiles
                pieces[stack] = [_everywhere(polar, stack, x)]
    # 2. Rounds.
    number = 0
    for together in _exchanges(rounds):
        rows = [_dealt(one, left) for one in together]
        factors = _travel(polar, together, rows, number)
        number += len(together)
        for one, done in zip(together, factors, strict=True):
            ends = np.cumsum(one.counts) // one.each
            parts = jnp.split(done, ends.tolist())
            for stack, part in zip(one.stacks, parts, strict=False):
                pieces[stack].append(part[:, : one.each * stack.size])
    # 3. Batches.
    results: dict[int, Array] = {}
    for stack, parts in pieces.items():
        whole = jnp.concatenate([x.reshape(-1, *stack.shards.shape[1:]) for x in parts])
        split = jnp.split(whole, np.cumsum(stack.counts)[:-1].tolist())
        results |= zip(stack.members, split, strict=True)
    return [results[index] for index in range(len(batches))]


def _padded(x: Float[Array, "rows _"], width: int) -> Float[Array, "rows width"]:
    return jnp.pad(x, [(0, 0), (0, width - x.shape[1])])


def _permuted(rows: Array, order: Sequence[int]) -> Array:
    """Rows in this order."""
    if [*order] == [*range(len(rows))]:
        return rows
    return jnp.take(rows, np.array(order), 0, mode="clip")


def _dealt(one: Round, left: dict[Stack, Array]) -> Float[Array, "devices width"]:
    """Take a row for each device of a round from the shards that are left."""
    # Of 48 shards (96, 3072) on 8 devices, 6 each: rows (8, 6 * 96 * 3072).
    # Of 4 matrices (768, 3072) and 3 (768, 2048): rows (7, 96 * 3072) with zeros behind
    # the shards (96, 2048), and one more row of zeros.
    rows = []
    for stack, count in zip(one.stacks, one.counts, strict=True):
        own, left[stack] = left[stack][:count], left[stack][count:]
        rows.append(_padded(own.reshape(count // one.each, -1), one.width))
    dealt, places = jnp.concatenate(rows), np.argsort(one.order).tolist()
    none = len(places) - len(dealt)
    dealt = _permuted(jnp.pad(dealt, [(0, none), (0, 0)]), places)
    # XLA for CPUs cannot compile an all-to-all whose rows are partly constants.
    return jax.lax.optimization_barrier(dealt) if none else dealt


def _travel(
    polar: Polar,
    rounds: Sequence[Round],
    rows: Sequence[Float[Array, "devices _"]],
    number: int,
) -> list[Float[Array, "devices _"]]:
    """The factors of several rounds, from number `number` on, in one exchange."""
    # Of widths 64, 16 and 48 a device gets rows of 128 elements.
    ends = np.cumsum([one.width for one in rounds])[:-1].tolist()

    def compute(rows: Array) -> Array:
        parts, factors = jnp.split(rows, ends, 1), []
        for i, (one, part) in enumerate(zip(rounds, parts, strict=True)):
            with jax.named_scope(f"round_{number + i}"):
                factors.append(_compute_round(polar, one, part))
        return jnp.concatenate(factors, 1)

    done = _exchanged(compute, rounds[0].stacks[0], jnp.concatenate(rows, 1))
    pairs = zip(rounds, jnp.split(done, ends, 1), strict=True)
    return [_permuted(part, one.order) for one, part in pairs]


def _compute_round(
    polar: Polar, one: Round, rows: Float[Array, "senders width"]
) -> Float[Array, "senders width"]:
    """A device's work in a round: its matrices, if it has any."""

    def branch(x: Stack) -> Polar:
        compute, width = functools.partial(_compute, polar, x), one.each * x.size
        return lambda rows: _padded(compute(rows[:, :width]), one.width)

    # Of 4 matrices of a stack and 3 of another on 8 devices in their order, kinds are
    # [0, 0, 0, 0, 1, 1, 1, 2].
    kinds, stack = one.kinds, one.stacks[0]
    branches = list(map(branch, one.stacks))
    if len(branches) in kinds:
        zeros = functools.partial(jnp.zeros_like, dtype=stack.shards.back_dtype)
        branches.append(zeros)
    device = jax.lax.axis_index(stack.repeats + stack.divides)
    return jax.lax.switch(jnp.asarray(kinds)[device], branches, rows)


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
