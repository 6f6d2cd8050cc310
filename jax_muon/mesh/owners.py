"""The planner: each sharded matrix gets an owner, a device or a team of devices.

A parameter may be sharded in any way over a mesh: along its batch, in and out axes, and
repeated over the mesh axes that are left. Everything but orthogonalization is
elementwise, or a mean, and needs no plan. Matrices with the same shape and shards form
a pool, and each matrix gets one owner among the devices that hold it: those with its
shards, and those that repeat them. Matrices go to single devices, balanced over all
pools, or to teams of neighbours that share the work, if that takes less time.
`plan.py` holds the result.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_muon.base.specs import Sizes, devices_over, divided_axes, entry_names
from jax_muon.matrices.joins import Joined, joined_matrices
from jax_muon.matrices.matrices import Join
from jax_muon.mesh import hardware
from jax_muon.mesh.plan import Member, Pool, transfers


def local_matrices(
    joins: Sequence[Join],
    names: Sequence[str],
    arrays: Sequence[Array],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
) -> tuple[list[PartitionSpec], list[Joined], list[Pool]]:
    """Specs of leaves (..., in, out), each device's joined matrices, and their pools.

    Joined leaves are sharded like the first of them. Scanned layers stay sharded if
    each device has whole joins; otherwise their axis is not sharded.
    """
    specs = list(specs)
    shapes = [x.shape for x in arrays]
    for joined in joined_matrices(joins, names, shapes):
        if joined.size == 1:
            continue
        first, *others = joined.leaves
        for leaf in others:
            specs[leaf] = specs[first]
        if not others:
            sharding = NamedSharding(mesh, specs[first])
            on_device = sharding.shard_shape(shapes[first])[0]  # layers
            if on_device % joined.size and on_device < shapes[first][0]:
                specs[first] = PartitionSpec(None, *specs[first][1:])
    local = [
        NamedSharding(mesh, spec).shard_shape(shape)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    on_shards = joined_matrices(joins, names, local)
    shards = []
    for x in on_shards:
        leaf = x.leaves[0]
        (*_, fan_in, fan_out), spec = local[leaf], specs[leaf]
        batch, rows, columns = (
            {name for entry in side for name in entry_names(entry)}
            for side in (spec[:-2], spec[-2:-1], spec[-1:])
        )
        shape = x.batch, x.size * fan_in, fan_out
        shards.append((shape, arrays[leaf].dtype, batch, rows, columns))
    return specs, on_shards, pools_of(shards, mesh.shape)


Axes = Collection[str]
# Of a batch of matrices (in, out): the shape (batch, rows, columns) of one device's
# shard, its dtype, and the mesh axes over the batch, the rows and the columns. For 12
# matrices (768, 3072), whose rows 8 devices divide: (12, 96, 3072), float32, (),
# ("data",), ().
Shard = tuple[tuple[int, int, int], np.dtype, Axes, Axes, Axes]


def pools_of(shards: Iterable[Shard], sizes: Sizes) -> list[Pool]:
    """Pools of all matrices, without owners, the largest first."""
    members: dict[Pool, list[Member]] = {}
    several = divided_axes(sizes)
    for index, ((batch, *lengths), dtype, *over) in enumerate(shards):
        # Any order of the axes would do.
        batch_axes, *axes = (tuple(n for n in several if n in x) for x in over)
        sides = [
            (length * devices_over(names, sizes), names, length)
            for length, names in zip(lengths, axes, strict=True)
        ]
        (m, short, rows), (n, long, columns) = sorted(sides)
        replicas = tuple(x for x in several if x not in batch_axes + short + long)
        all_axes = batch_axes, short, long, replicas
        pool = Pool((), (m, n), (rows, columns), dtype, *all_axes)
        transposed = sides[0] > sides[1]
        members.setdefault(pool, []).append(Member(index, batch, transposed))
    pools = [dataclasses.replace(x, members=tuple(y)) for x, y in members.items()]
    return sorted(pools, key=lambda pool: (pool.flops, pool.shape), reverse=True)


def with_owners(
    pools: Sequence[Pool],
    sizes: Sizes,
    *,
    small: int = 0,
    start: int = 0,
    team: int = 1,
    shared_dtype: Callable[[int, int, np.dtype], np.dtype | None] | None = None,
    devices_per_host: int = hardware.DEVICES_PER_HOST,
) -> list[Pool]:
    """Give matrices owners, so that the busiest device has the least to do.

    The largest matrices come first. The planner tries to share no pool, the largest,
    the two largest, and so on, and takes the cheapest plan. Then it does the same with
    owners for small matrices, which never change the owners of larger ones.

    Args:
      pools: of `pools_of`.
      sizes: of the mesh axes.
      small: see `orthogonalize`.
      start: the owner that comes first among equally busy ones, modulo their number,
        so that matrices with other labels find other owners.
      team: see `orthogonalize`.
      shared_dtype: the method of a `NewtonSchulz`; None if none is shared.
      devices_per_host: see `on_mesh`.
    """

    def cheapest(plans: Iterable[list[Pool]]) -> list[Pool]:
        return min(plans, key=lambda plan: cost(plan, sizes, devices_per_host))

    pools = sorted(pools, key=lambda pool: math.prod(pool.shape) < small)
    large = sum(math.prod(pool.shape) >= small for pool in pools)
    plans = [_with_owners(pools, sizes, large, start)]
    for index, pool in enumerate(pools[:large]):
        dtype = shared_dtype and shared_dtype(*pool.shape, pool.dtype)
        size = _team_size(pool, sizes, team)
        if dtype is not None and size > 1:
            pools[index] = dataclasses.replace(pool, team=size, shared_dtype=dtype)
            plans.append(_with_owners(pools, sizes, large, start))
    # All 432 heads (64, 768) of GPT-2 124M on 8 devices: 54 each instead of all.
    best = cheapest(plans)
    owned = range(large, len(pools) + 1)
    return cheapest(_with_owners(best, sizes, number, start) for number in owned)


def _team_size(pool: Pool, sizes: Sizes, most: int) -> int:
    """The number of neighbours that can share a matrix of a pool, or 1.

    It divides rows and columns. The pool must be sharded along one side, over the
    innermost axes of the mesh, where the GPUs of a host are next to each other.
    """
    inner = reversed(divided_axes(sizes))
    neighbours = tuple(itertools.takewhile(lambda name: name in pool.shard_axes, inner))
    size = math.gcd(most, devices_over(neighbours, sizes), *pool.shape)
    return 1 if pool.short_axes and pool.long_axes else size


def _with_owners(
    pools: Sequence[Pool], sizes: Sizes, owned: int, start: int
) -> list[Pool]:
    """Give each matrix to the least busy owner, the largest matrices first.

    The first `owned` pools get owners; all devices compute the others.
    """
    names = divided_axes(sizes)
    busy = np.zeros([sizes[name] for name in names])
    plan = []
    for index, pool in enumerate(_with_teams(pools, sizes)):
        owners = pool.owners(sizes)
        if pool.team == 1 and index < owned and owners > 1:
            # (owners, devices with other matrices)
            order = [
                names.index(n)
                for n in pool.replica_axes + pool.shard_axes + pool.batch_axes
            ]
            loads = busy.transpose(order).reshape(owners, -1).max(axis=1)
            counts = _fill(loads, pool.on_device, pool.flops, start)
            pool = dataclasses.replace(pool, counts=counts)
        busy = busy + pool.load(sizes)
        plan.append(pool)
    return plan


def _with_teams(pools: Sequence[Pool], sizes: Sizes) -> list[Pool]:
    """Give matrices to teams in turn, where pools are to be shared.

    Pools of one shape that are sharded along different sides, such as gates and the
    projections down again, continue where the one before them ended.

    Of 16 devices in two teams of 8, (4096, 16384): three matrices sharded by rows have
    counts (2, 1), and then one sharded by columns has (0, 1).
    """
    plan = []
    for _, same in itertools.groupby(pools, key=lambda pool: (pool.shape, pool.alike)):
        together, start = [*same], 0
        owners = together[0].owners(sizes)
        total = sum(pool.on_device for pool in together)
        for pool in together:
            if pool.team > 1:
                stop = start + pool.on_device
                filled = math.ceil(total / owners) * owners if stop == total else stop
                turns = np.arange(start, filled) % owners
                counts = tuple(np.bincount(turns, minlength=owners).tolist())
                pool, start = dataclasses.replace(pool, counts=counts), stop
            plan.append(pool)
    return plan


def _fill(loads: np.ndarray, count: int, flops: int, start: int) -> tuple[int, ...]:
    """The number of new matrices for each owner, given the loads so far."""
    owners = len(loads)
    heap = [(x, (owner - start) % owners, owner) for owner, x in enumerate(loads)]
    heapq.heapify(heap)
    counts = [0] * owners
    for _ in range(count):
        load, rank, owner = heap[0]
        counts[owner] += 1
        heapq.heapreplace(heap, (load + flops, rank, owner))
    return tuple(counts)


def cost(pools: Sequence[Pool], sizes: Sizes, devices_per_host: int) -> float:
    """Estimated seconds, without any overlap of transfers and products."""
    busy = sum((pool.load(sizes) for pool in pools), start=np.zeros(()))
    sent = sum(  # over the slower one of two networks
        hardware.SECONDS_TO_START
        + max(
            x.bytes_between_hosts(devices_per_host) / hardware.BETWEEN_HOSTS,
            x.sent_bytes / hardware.WITHIN_HOSTS,
        )
        for x in transfers(pools, sizes)
        if x.devices > 1
    )
    return float(busy.max()) / hardware.FLOPS + sent
