"""Sharded matrices travel to their owners by all-to-all, and back, inside shard_map.

Three phases carry out the plan of `owners.py`:

  to owners: each device sends its shard of every matrix to that matrix's owner;
  compute:   the owner takes the polar factors;
  back:      the shards return, and go to the devices that repeat them.

Matrices of several shapes travel in one exchange (owners, width): the row of an owner
holds the shards of its matrices, one after another. Owners with different matrices run
different branches. In a group each device gets some columns of every matrix of the
group, and they compute the factor together. All groups run the same program, since
they exchange products: only how columns are made of shards may differ.

Shards may be assembled in any order, as long as they are split in the same order: a
polar factor moves with the rows and columns of its matrix.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_muon.mesh.owners import Member, Pool, Round, rounds
from jax_muon.polar.grouped import Group
from jax_muon.polar.stacks import map_stacks

Polar = Callable[..., Array]


def on_shards(
    function: Callable[[list[Array]], list[Array]],
    leaves: Sequence[Array],
    specs: list[PartitionSpec],
    mesh: Any,
) -> list[Array]:
    """Run a function of shards, divided by `specs`, on arrays on Explicit axes."""
    own = [jax.typeof(x).sharding.spec for x in leaves]

    def moved(x: Array, here: PartitionSpec, there: PartitionSpec) -> Array:
        return x if here == there else jax.reshard(x, NamedSharding(mesh, there))

    run = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=specs)
    return list(map(moved, run(list(map(moved, leaves, own, specs))), specs, own))


def map_pools(
    polar: Polar,
    batches: Sequence[Float[Array, "_ _ _"]],
    *,
    pools: Sequence[Pool],
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (batch, in, out) of shards, inside shard_map.

    `polar` gets stacks (k, m, n) of whole matrices, and `group=` where a group of
    devices is the owner. `pools` are those of the batches.
    """

    def turned(x: Array, member: Member) -> Array:
        return x.mT if member.transposed else x

    stacks = {
        pool: jnp.concatenate([turned(batches[one.index], one) for one in pool.members])
        for pool in pools
    }
    done: dict[Pool, list[Array]] = {pool: [] for pool in pools}
    for pool in pools:
        if not pool.counts:
            done[pool] = [_everywhere(polar, stacks[pool], pool)]
    sent = dict.fromkeys(pools, 0)
    for number, one in enumerate(rounds(pools)):
        parts = []
        totals = np.sum(one.counts, axis=0)
        for pool, count in zip(one.pools, totals.tolist(), strict=True):
            part = stacks[pool][sent[pool] : sent[pool] + count]
            parts.append(jnp.pad(part, ((0, count - len(part)), (0, 0), (0, 0))))
            sent[pool] += count
        with jax.named_scope(f"round_{number}"):  # for profiles
            factors = _travel(polar, parts, one)
        for pool, part in zip(one.pools, factors, strict=True):
            done[pool].append(part)
    results: list[Any] = [None] * len(batches)
    for pool in pools:
        stack = jnp.concatenate(done[pool])
        stops = itertools.accumulate(member.batch for member in pool.members)
        for member, stop in zip(pool.members, stops, strict=True):
            part = stack[stop - member.batch : stop]
            results[member.index] = turned(part, member)
    return results


def _everywhere(polar: Polar, stack: Array, pool: Pool) -> Array:
    """All devices that hold shards of a matrix gather it and compute it."""
    if pool.shards:
        gathered = jax.lax.all_gather(stack, pool.shards)
        stack = _assemble(gathered, pool)
    (factors,) = map_stacks(polar, [stack])
    if pool.shards:
        here = jax.lax.axis_index(pool.shards)
        shards = _split(factors, pool)
        factors = jax.lax.dynamic_index_in_dim(shards, here, keepdims=False)
    return factors


def _travel(
    polar: Polar,
    stacks: Sequence[Float[Array, "_ m n"]],
    one: Round,
) -> list[Float[Array, "_ m n"]]:
    """Send the shards of a round to the owners, and the shards of factors back.

    The matrices of a pool go to owners in their order. Neighbours with the same counts
    are packed together.
    """
    pool, kinds = one.pools[0], one.kinds
    runs = [(counts, len([*same])) for counts, same in itertools.groupby(one.counts)]
    at = [0] * len(stacks)
    rows = []
    for counts, owners in runs:
        parts = []
        for index, count in enumerate(counts):
            stop = at[index] + count * owners
            part = stacks[index][at[index] : stop]
            parts.append(part.reshape(owners, count, *part.shape[1:]))
            at[index] = stop
        rows.append(_pack(parts, one.width))
    table = jnp.concatenate(rows)  # (owners, width)

    repeats = jax.lax.axis_size(pool.replicas)
    if repeats > 1:  # each replica does its part of the owners' work
        mine = len(table) // repeats
        first = jax.lax.axis_index(pool.replicas) * mine
        table = jax.lax.pcast(table, pool.replicas, to="varying")
        table = jax.lax.dynamic_slice_in_dim(table, first, mine)
    group = Group(pool.shards, pool.group)
    table = group.swap_between(table) if pool.shards else table
    here = jax.lax.axis_index(pool.replicas + pool.shards) // group.size
    kind = jnp.asarray([*map(kinds.index, one.counts)])[here]
    if group.size > 1:
        table = _compute_in_groups(polar, one, group, kind, table)
    else:
        branches = [functools.partial(_compute, polar, one, counts) for counts in kinds]
        table = jax.lax.switch(kind, branches, table)
    table = group.swap_between(table) if pool.shards else table
    if repeats > 1:
        table = jax.lax.all_gather(table, pool.replicas, tiled=True, to="invarying")

    found: list[list[Array]] = [[] for _ in stacks]
    start = 0
    for counts, owners in runs:
        parts = _unpack(table[start : start + owners], one, counts)
        start += owners
        for results, part in zip(found, parts, strict=True):
            results.append(part.reshape(-1, *part.shape[2:]))
    return [jnp.concatenate(parts) for parts in found]


def _compute(
    polar: Polar,
    one: Round,
    counts: Sequence[int],
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """An owner's work: from the shards of its matrices to the shards of factors."""
    if not any(counts):
        return jnp.zeros_like(received)
    parts = _unpack(received, one, counts)
    used = [index for index, count in enumerate(counts) if count]
    pools = [one.pools[index] for index in used]
    shards = [parts[index] for index in used]
    whole = list(map(_assemble, shards, pools))
    factors = map_stacks(polar, whole)
    shards = list(map(_split, factors, pools))
    for index, part in zip(used, shards, strict=True):
        parts[index] = part.astype(received.dtype)
    return _pack(parts, received.shape[1])


def _compute_in_groups(
    polar: Polar,
    one: Round,
    group: Group,
    kind: Array,
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """The work of a group on its matrices, as `_compute`, and the same for all groups.

    Each has as many matrices of a shape as the others, but the n-th of them may be of
    another pool, which is sharded along another side.
    """
    sources = [np.repeat(np.arange(len(row)), row).tolist() for row in one.kinds]
    found, start = [], 0
    for of_kinds, same in itertools.groupby(zip(*sources, strict=True)):
        count, used = len([*same]), sorted(set(of_kinds))
        pools = [one.pools[index] for index in used]
        stop = start + count * math.prod(pools[0].shard)
        flat = received[:, start:stop]
        mine = jnp.asarray([*map(used.index, of_kinds)], jnp.int32)[kind]
        x = _one_of([_columns(flat, pool, group) for pool in pools], mine)
        y = jnp.concatenate([polar(x[i : i + 1], group=group) for i in range(count)])
        shards = [_shards(y, len(flat), pool, group) for pool in pools]
        found.append(_one_of(shards, mine).astype(received.dtype))
        start = stop
    return jnp.concatenate(found, axis=1)


def _one_of(ways: Sequence[Array], index: Array) -> Array:
    """All but one of them are computed for nothing, since collectives are in them."""
    return jax.lax.select_n(index, *ways) if len(ways) > 1 else ways[0]


def _columns(flat: Float[Array, "s w"], pool: Pool, group: Group) -> Array:
    """A device's columns (k, m, n / group), from shards that all groups have sent."""
    shards = flat.reshape(len(flat), -1, *pool.shard)
    _, count, rows, columns = shards.shape
    if pool.short:
        x = shards.swapaxes(0, 1).reshape(count, -1, columns)  # (k, m / group, n)
        return group.swap(x, 2, 1)
    return shards.transpose(1, 2, 0, 3).reshape(count, rows, -1)


def _shards(y: Array, senders: int, pool: Pool, group: Group) -> Float[Array, "s w"]:
    """Undoes `_columns`."""
    count, (rows, columns) = len(y), pool.shard
    if pool.short:
        y = group.swap(y, 1, 2).reshape(count, senders, rows, columns).swapaxes(0, 1)
    else:
        y = y.reshape(count, rows, senders, columns).transpose(2, 0, 1, 3)
    return y.reshape(senders, -1)


def _pack(parts: Sequence[Float[Array, "s _ _ _"]], width: int) -> Float[Array, "s w"]:
    """The shards of each row one after another, padded to a width."""
    flat = [part.reshape(len(part), -1) for part in parts]
    row = jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]
    return jnp.pad(row, ((0, 0), (0, width - row.shape[1])))


def _unpack(
    table: Float[Array, "s w"], one: Round, counts: Sequence[int]
) -> list[Float[Array, "s _ _ _"]]:
    """Undoes `_pack`: (s, count, m, n) of each pool."""
    parts = []
    start = 0
    for pool, count in zip(one.pools, counts, strict=True):
        stop = start + count * math.prod(pool.shard)
        parts.append(table[:, start:stop].reshape(len(table), count, *pool.shard))
        start = stop
    return parts


def _assemble(shards: Array, pool: Pool) -> Array:
    """(shards, k, m / short, n / long) to whole matrices (k, m, n)."""
    grid = shards.reshape(*pool.grid, -1, *pool.shard)
    return grid.transpose(2, 0, 3, 1, 4).reshape(-1, *pool.fan)


def _split(whole: Array, pool: Pool) -> Array:
    """Undoes `_assemble`."""
    (short, long), (rows, cols) = pool.grid, pool.shard
    grid = whole.reshape(-1, short, rows, long, cols).transpose(1, 3, 0, 2, 4)
    return grid.reshape(short * long, -1, rows, cols)
