"""Sharded matrices travel to their owners by all-to-all, and back, inside shard_map.

Three phases carry out the plan of `owners.py`:

  to owners: each device sends its shard of every matrix to that matrix's owner;
  compute:   the owner takes the polar factors;
  back:      the shards return, and go to the devices that repeat them.

Matrices of several shapes travel in one exchange (owners, width): the row of an owner
holds the shards of its matrices, one after another. Owners with different matrices run
different branches. In a team each device gets some columns of every matrix of the
team, and they compute the factor together. All teams run the same program, since
they exchange products: only how columns are made of shards may differ.

Shards may be assembled in any order, as long as they are split in the same order: a
polar factor moves with the rows and columns of its matrix.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_muon.mesh.owners import Pool, Round, rounds
from jax_muon.polar.stacks import map_stacks
from jax_muon.polar.teams import Team

Polar = Callable[..., Array]


def on_shards(
    function: Callable[[list[Array]], list[Array]],
    leaves: Sequence[Array],
    specs: list[PartitionSpec],
    mesh: Any,
) -> list[Array]:
    """Run a function of shards, divided by `specs`, on arrays on Explicit axes."""
    types = [jax.typeof(x).sharding.spec for x in leaves]

    def reshard(x: Array, old: PartitionSpec, new: PartitionSpec) -> Array:
        return x if old == new else jax.reshard(x, NamedSharding(mesh, new))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=specs)
    results = mapped(list(map(reshard, leaves, types, specs)))
    return list(map(reshard, results, specs, types))


def map_pools(
    polar: Polar, batches: Sequence[Float[Array, "_ _ _"]], *, pools: Sequence[Pool]
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (batch, in, out) of shards, inside shard_map.

    `polar` gets stacks (k, m, n) of whole matrices, and `team=` where a team of
    devices is the owner. `pools` are those of the batches.
    """
    stacks = {pool: _stack(batches, pool) for pool in pools}
    factors: dict[Pool, list[Array]] = {pool: [] for pool in pools}
    for pool in pools:
        if not pool.counts:
            factors[pool].append(_everywhere(polar, stacks[pool], pool))
    for number, exchange in enumerate(rounds(pools)):
        with jax.named_scope(f"round_{number}"):  # for profiles
            for pool, part in _travel(polar, stacks, exchange):
                factors[pool].append(part)
    results: dict[int, Array] = {}
    for pool in pools:
        stack = jnp.concatenate(factors[pool])[: pool.count]
        parts = jax.lax.split(stack, [member.batch for member in pool.members])
        for member, part in zip(pool.members, parts, strict=True):
            results[member.index] = member.turn(part)
    return [results[index] for index in range(len(batches))]


def _stack(batches: Sequence[Array], pool: Pool) -> Float[Array, "_ m n"]:
    """The matrices of a pool, and as many zeros as fill up its teams."""
    stack = jnp.concatenate(
        [member.turn(batches[member.index]) for member in pool.members]
    )
    return _padded(stack, 0, max(pool.count, sum(pool.counts)))


def _padded(x: Array, axis: int, size: int) -> Array:
    """The array, with zeros up to this size of an axis."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, missing) if size > x.shape[axis] else x


def _everywhere(
    polar: Polar, stack: Float[Array, "k _ _"], pool: Pool
) -> Float[Array, "k _ _"]:
    """All devices that hold shards of a matrix gather it and compute it."""
    if not pool.shards:
        return map_stacks(polar, [stack])[0]
    gathered = jax.lax.all_gather(stack, pool.shards)
    (factors,) = map_stacks(polar, [_assemble(gathered, pool)])
    device, rows = jax.lax.axis_index(pool.shards), _split(factors, pool)
    row = jax.lax.dynamic_index_in_dim(rows, device, keepdims=False)
    return row.reshape(-1, *pool.shard)


def _travel(
    polar: Polar, stacks: Mapping[Pool, Float[Array, "_ _ _"]], exchange: Round
) -> list[tuple[Pool, Float[Array, "_ _ _"]]]:
    """Send the shards of a round to the owners, and the shards of factors back.

    The matrices of a pool go to owners in their order, and the factors return in it.
    """
    pool, kinds = exchange.pools[0], exchange.kinds
    rows = []
    for owners, _, matrices in exchange.runs():
        number = owners.stop - owners.start
        pairs = zip(exchange.pools, matrices, strict=True)
        parts = [stacks[pool][part].reshape(number, -1) for pool, part in pairs]
        rows.append(_padded(jnp.concatenate(parts, axis=1), 1, exchange.width))
    table = jnp.concatenate(rows)  # (owners, width)

    if pool.replicas:  # each replica does its part of the owners' work
        number = len(table) // jax.lax.axis_size(pool.replicas)
        first = jax.lax.axis_index(pool.replicas) * number
        table = jax.lax.pcast(table, pool.replicas, to="varying")
        table = jax.lax.dynamic_slice_in_dim(table, first, number)
    team = Team(pool.shards, pool.team)
    table = team.swap_between(table)
    owner = jax.lax.axis_index(pool.replicas + pool.shards) // team.size
    kind = jnp.asarray([*map(kinds.index, exchange.counts)])[owner]
    if team.size > 1:
        table = _compute_in_teams(polar, exchange, team, kind, table)
    else:
        compute = functools.partial(_compute, polar, exchange)
        branches = [functools.partial(compute, counts) for counts in kinds]
        table = jax.lax.switch(kind, branches, table)
    table = team.swap_between(table)
    if pool.replicas:
        table = jax.lax.all_gather(table, pool.replicas, tiled=True, to="invarying")
    return [
        (pool, table[owners, columns].reshape(-1, *pool.shard))
        for owners, counts, _ in exchange.runs()
        for pool, columns in zip(exchange.pools, exchange.columns(counts), strict=True)
    ]


def _compute(
    polar: Polar,
    exchange: Round,
    counts: Sequence[int],
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """An owner's work: from the shards of its matrices to the shards of factors."""
    shards = [received[:, columns] for columns in exchange.columns(counts)]
    used = {index: exchange.pools[index] for index, count in enumerate(counts) if count}
    whole = [_assemble(shards[index], pool) for index, pool in used.items()]
    for (index, pool), factors in zip(
        used.items(), map_stacks(polar, whole), strict=True
    ):
        shards[index] = _split(factors, pool).astype(received.dtype)
    return _padded(jnp.concatenate(shards, axis=1), 1, exchange.width)


def _compute_in_teams(
    polar: Polar,
    exchange: Round,
    team: Team,
    kind: Array,
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """The work of a team on its matrices, as `_compute`, and the same for all teams.

    Each has as many matrices of a shape as the others, but the n-th of them may be of
    another pool, which is sharded along another side.
    """
    orders = [np.repeat(np.arange(len(row)), row).tolist() for row in exchange.kinds]
    rows, start = [], 0
    for of_kinds, same in itertools.groupby(zip(*orders, strict=True)):
        count, choices = len([*same]), sorted(set(of_kinds))
        pools = [exchange.pools[index] for index in choices]
        stop = start + count * math.prod(pools[0].shard)
        row = received[:, start:stop]
        choice = jnp.asarray([*map(choices.index, of_kinds)], jnp.int32)[kind]
        x = _select(choice, [_columns(row, pool, team) for pool in pools])
        y = jnp.concatenate([polar(x[i : i + 1], team=team) for i in range(count)])
        shards = _select(choice, [_shards(y, len(row), pool, team) for pool in pools])
        rows.append(shards.astype(received.dtype))
        start = stop
    return jnp.concatenate(rows, axis=1)


def _select(index: Array, arrays: Sequence[Array]) -> Array:
    """All but one are computed for nothing, since there are collectives in them."""
    return jax.lax.select_n(index, *arrays) if len(arrays) > 1 else arrays[0]


def _columns(flat: Float[Array, "s w"], pool: Pool, team: Team) -> Array:
    """A device's columns (k, m, n / team), from shards that all teams have sent."""
    shards = flat.reshape(len(flat), -1, *pool.shard)
    _, count, rows, columns = shards.shape
    if pool.short:
        x = shards.swapaxes(0, 1).reshape(count, -1, columns)  # (k, m / team, n)
        return team.swap(x, 2, 1)
    return shards.transpose(1, 2, 0, 3).reshape(count, rows, -1)


def _shards(y: Array, senders: int, pool: Pool, team: Team) -> Float[Array, "s w"]:
    """Undoes `_columns`."""
    count, (rows, columns) = len(y), pool.shard
    if pool.short:
        y = team.swap(y, 1, 2).reshape(count, senders, rows, columns).swapaxes(0, 1)
    else:
        y = y.reshape(count, rows, senders, columns).transpose(2, 0, 1, 3)
    return y.reshape(senders, -1)


def _assemble(shards: Array, pool: Pool) -> Float[Array, "k m n"]:
    """Whole matrices, from the shards (k, rows, columns) that each sender has."""
    grid = shards.reshape(*pool.grid, -1, *pool.shard)
    return grid.transpose(2, 0, 3, 1, 4).reshape(-1, *pool.fan)


def _split(whole: Float[Array, "k m n"], pool: Pool) -> Float[Array, "senders _"]:
    """Undoes `_assemble`: a row for each sender."""
    (short, long), (rows, columns) = pool.grid, pool.shard
    grid = whole.reshape(-1, short, rows, long, columns).transpose(1, 3, 0, 2, 4)
    return grid.reshape(short * long, -1)
