"""A plan: which device computes which sharded matrix, and the transfers for that.

`owners.py` makes it, `exchange.py` carries it out, and `describe` shows it.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jax_muon.base.specs import (
    Sizes,
    devices_over,
    divided_axes,
    entry_names,
    spec_names,
)
from jax_muon.mesh.collectives import Collective, members_over

# The planner's number of quintics, and of exchanged m x m matrices in each.
STEPS = 5
SHARED_PRODUCTS = 3

# Number of exchanges that the work is cut into: one travels while another is computed.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Member:
    """A batch (count, in, out) of a pool: its index, and whether it is transposed."""

    index: int
    count: int
    transposed: bool

    def turn(self, x: Array) -> Array:
        """From shards of (in, out) to shards of (m, n) with m <= n, or back."""
        return x.mT if self.transposed else x


@dataclasses.dataclass(frozen=True)
class Pool:
    """Matrices with the same shape (m, n), m <= n, and shards, and their owners."""

    members: tuple[Member, ...]  # the batches that they come from
    shape: tuple[int, int]
    shard_shape: tuple[int, int]  # of one matrix, on one device
    dtype: np.dtype
    # Mesh axes over different matrices, over m, over n, and those that repeat shards:
    # together all axes with more than one device, each once.
    batch_axes: tuple[str, ...]
    short_axes: tuple[str, ...]
    long_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    # How many matrices each owner gets, replicas before shards; () if all devices that
    # hold a matrix compute it. Teams get the same number each of the matrices of one
    # shape, filled up with zeros.
    counts: tuple[int, ...] = ()
    team: int = 1  # devices of one owner, which share its work
    shared_dtype: np.dtype | None = (
        None  # in which they send each other parts of products
    )

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold the shards of a matrix."""
        return self.short_axes + self.long_axes

    @property
    def alike(self) -> Hashable:
        """What pools have in common whose matrices travel together."""
        axes = self.batch_axes, self.shard_axes, self.replica_axes
        return self.dtype, *axes, self.team

    @property
    def grid(self) -> tuple[int, int]:
        """The number of shards along m and along n."""
        (m, n), (rows, columns) = self.shape, self.shard_shape
        return m // rows, n // columns

    @property
    def on_device(self) -> int:
        """Matrices that one device holds shards of."""
        return sum(member.count for member in self.members)

    @property
    def flops(self) -> int:
        """FLOPs of five quintics of one matrix."""
        m, n = self.shape
        return STEPS * (4 * m * m * n + 2 * m**3)

    def matrices(self, sizes: Sizes) -> int:
        """Matrices on the whole mesh."""
        return self.on_device * devices_over(self.batch_axes, sizes)

    def owners(self, sizes: Sizes) -> int:
        """The number of devices, or teams of them, that can own a matrix."""
        return devices_over(self.replica_axes + self.shard_axes, sizes) // self.team

    def load(self, sizes: Sizes) -> np.ndarray:
        """FLOPs of each device, in the order of `divided_axes(sizes)`.

        On data 2 x fsdp 4, with a batch of 12 matrices over "data" and their rows over
        "fsdp", counts are (2, 2, 1, 1), and this is [[2, 2, 1, 1], [2, 2, 1, 1]] times
        the FLOPs of a matrix.
        """
        axes = self.replica_axes + self.shard_axes + self.batch_axes
        counts = self.counts or (self.on_device,) * self.owners(sizes)
        matrices = np.repeat(counts, self.team)
        by_device = np.repeat(
            matrices * (self.flops / self.team), devices_over(self.batch_axes, sizes)
        )
        by_axis = by_device.reshape([sizes[name] for name in axes])
        return by_axis.transpose([axes.index(name) for name in divided_axes(sizes)])

    def shared(self, sizes: Sizes) -> Collective:
        """An exchange within a team of a product (m, m), one of 15 for a matrix."""
        gram = self.shape[0] ** 2 * np.dtype(self.shared_dtype).itemsize
        team = members_over(self.shard_axes, sizes)[: self.team]
        return Collective("all-to-all", team, gram)


@dataclasses.dataclass(frozen=True)
class Round:
    """Matrices of several pools that are sent to their owners in one exchange."""

    pools: tuple[Pool, ...]  # with one dtype, and the same mesh axes
    starts: tuple[int, ...]  # matrices of each pool that went with earlier rounds
    counts: tuple[tuple[int, ...], ...]  # by owner, its matrices of each pool

    @property
    def kinds(self) -> list[tuple[int, ...]]:
        """The different counts of its owners."""
        return sorted(set(self.counts))

    def runs(self) -> Iterator[tuple[slice, tuple[int, ...], tuple[slice, ...]]]:
        """Neighbouring owners with the same counts, and their matrices of each pool."""
        first, starts = 0, self.starts
        for counts, same in itertools.groupby(self.counts):
            last = first + len([*same])
            stops = tuple(np.add(starts, np.multiply(last - first, counts)).tolist())
            yield slice(first, last), counts, tuple(map(slice, starts, stops))
            first, starts = last, stops

    def row_slices(self, counts: Sequence[int]) -> list[slice]:
        """Elements for an owner with these counts: by pool, in its row."""
        pairs = zip(counts, self.pools, strict=True)
        sizes = [count * math.prod(pool.shard_shape) for count, pool in pairs]
        stops = [0, *itertools.accumulate(sizes)]
        return list(map(slice, stops[:-1], stops[1:]))

    @property
    def width(self) -> int:
        """Elements that a device sends to each owner, padding included."""
        return max(self.row_slices(counts)[-1].stop for counts in self.kinds)

    def transfers(self, sizes: Sizes) -> list[Collective]:
        """To the owners and back, and then to devices that repeat the shards."""
        pool = self.pools[0]
        owners = members_over(pool.shard_axes, sizes)[:: pool.team]
        repeats = members_over(pool.replica_axes, sizes)
        size = len(owners) * self.width * np.dtype(pool.dtype).itemsize
        exchange = Collective("all-to-all", owners, size)
        return [exchange, exchange, Collective("all-gather", repeats, size)]


def transfers(pools: Sequence[Pool], sizes: Sizes) -> list[Collective]:
    """The collectives of a device in a step by this plan, padding included."""
    collectives = [x for each in rounds(pools) for x in each.transfers(sizes)]
    for pool in pools:
        if not pool.counts:
            elements = pool.on_device * math.prod(pool.shard_shape)
            size = elements * np.dtype(pool.dtype).itemsize
            devices = members_over(pool.shard_axes, sizes)
            collectives.append(Collective("all-gather", devices, size))
        elif pool.team > 1:
            number = STEPS * SHARED_PRODUCTS * pool.counts[0]
            collectives += [pool.shared(sizes)] * number
    return collectives


def rounds(pools: Sequence[Pool]) -> list[Round]:
    """The exchanges of a plan, with about the same work for all owners in each."""
    by_axes: dict[Hashable, list[Pool]] = {}
    for pool in pools:
        if pool.counts:
            by_axes.setdefault(pool.alike, []).append(pool)
    exchanges = []
    # On 8 devices, a matrix (768, 3072) takes 18 units of work and one (768, 768) six.
    # Of 12 each, owners 0 to 3 have (2, 0) and the others (1, 3): 36 units, in three
    # rounds until 12, 24 and 36. A matrix goes with the round that its middle is in.
    # With (2, 0) these are at 9 and 27: rounds (1, 0), (0, 0), (1, 0). With (1, 3) they
    # are at 9, 21, 27 and 33: rounds (1, 0), (0, 1), (0, 2).
    for together in by_axes.values():
        counts = np.array([pool.counts for pool in together]).T  # (owners, pools)
        flops = np.array([pool.flops for pool in together])
        number = min(_ROUNDS, int(counts.sum(axis=1).max()))
        # A matrix goes with the round in which its owner is halfway through it.
        stops = (counts @ flops).max() / number * np.arange(1, number + 1)
        before = np.cumsum(counts * flops, axis=1) - counts * flops
        halfway = np.ceil((stops[:, None, None] - before) / flops - 0.5)
        sent = np.clip(halfway, 0, counts).astype(int)
        parts = np.diff(sent, axis=0, prepend=0)  # (rounds, owners, pools)
        starts = (sent - parts).sum(axis=1)  # (rounds, pools)
        for part, start in zip(parts, starts, strict=True):
            used = np.flatnonzero(part.any(axis=0))
            if used.size:
                chosen = tuple(together[index] for index in used)
                by_owner = tuple(map(tuple, part[:, used].tolist()))
                exchanges.append(Round(chosen, tuple(start[used].tolist()), by_owner))
    return exchanges


def excess(pools: Sequence[Pool], sizes: Sizes) -> dict[Pool, float]:
    """What the busiest device computes of each pool beyond an even share.

    In units of an even share of the work on all pools.
    """
    loads = {pool: pool.load(sizes).ravel() for pool in pools}
    even = {pool: pool.matrices(sizes) * pool.flops for pool in pools}
    busiest = int(np.argmax(sum(loads.values()))) if loads else 0
    devices, total = math.prod(sizes.values()), sum(even.values())
    return {
        pool: (float(load[busiest]) * devices - even[pool]) / total
        for pool, load in loads.items()
    }


def parameter_transfers(
    size: int,
    spec: PartitionSpec,
    state_spec: PartitionSpec,
    sizes: Sizes,
    summed: Collection[str],
) -> Iterator[tuple[str, Collective]]:
    """Gathers of a parameter and of its update, and the sum of its gradient.

    The gathers are along the axes that shard the parameter, and then along those that
    shard only its state; the gradient is summed over both at once.
    """
    param_axes, state_axes = ({*spec_names(x)} for x in (spec, state_spec))
    shard = size // math.prod(sizes[name] for name in state_axes.difference(summed))

    def rings(
        axes: Collection[str], shard: int
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """Over which devices, and bytes of the shard that they divide."""
        for entry in state_spec:
            along = {*entry_names(entry)} & {*summed} & {*axes}
            members = members_over(along, sizes)
            yield members, shard
            shard //= len(members)

    left = shard
    for axes in (param_axes, state_axes - param_axes):
        for members, whole in rings(axes, left):
            left = whole // len(members)
            yield "gathers", Collective("all-gather", members, left)
    for members, whole in rings(state_axes, shard):
        yield "gradients", Collective("reduce-scatter", members, whole)
    rest = members_over({*summed} - state_axes, sizes)
    yield "gradients", Collective("all-reduce", rest, left)
