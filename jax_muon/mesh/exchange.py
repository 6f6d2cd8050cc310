"""Sharded matrices travel to their owners by all-to-all, and back, inside shard_map.

Three phases carry out a plan of `plan.py`: each device sends its shard of every matrix
to that matrix's owner, which takes the polar factors; then the shards return, and go to
the devices that repeat them.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_muon.matrices.joins import map_stacks
from jax_muon.mesh.plan import Pool, Round, rounds
from jax_muon.polar.teams import Team

Polar = Callable[..., Array]


def on_shards(
    function: Callable[[list[Array]], list[Array]],
    leaves: Sequence[Array],
    specs: list[PartitionSpec],
    mesh: AbstractMesh,
) -> list[Array]:
    """Run a function of shards, divided by `specs`, on arrays on Explicit axes."""
    type_specs = [jax.typeof(x).sharding.spec for x in leaves]

    def reshard(x: Array, old: PartitionSpec, new: PartitionSpec) -> Array:
        return x if old == new else jax.reshard(x, NamedSharding(mesh, new))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=specs)
    results = mapped(list(map(reshard, leaves, type_specs, specs)))
    return list(map(reshard, results, specs, type_specs))


def map_pools(
    polar: Polar, batches: Sequence[Float[Array, "_ _ _"]], *, pools: Sequence[Pool]
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (batch, in, out) of shards, inside shard_map.

    `polar` gets stacks (k, m, n) of whole matrices, and `team=` where a team is the
    owner.
    """
    stacks = {pool: _stack(batches, pool) for pool in pools}
    factors: dict[Pool, list[Array]] = {pool: [] for pool in pools}
    for pool in pools:
        if not pool.counts:
            factors[pool].append(_everywhere(polar, stacks[pool], pool))
    for number, round_ in enumerate(rounds(pools)):
        with jax.named_scope(f"round_{number}"):  # for profiles
            for pool, part in _travel(polar, stacks, round_):
                factors[pool].append(part)
    results: dict[int, Array] = {}
    for pool in pools:
        stack = jnp.concatenate(factors[pool])[: pool.on_device]
        parts = jax.lax.split(stack, [member.count for member in pool.members])
        for member, part in zip(pool.members, parts, strict=True):
            results[member.index] = member.turn(part)
    return [results[index] for index in range(len(batches))]


def _stack(batches: Sequence[Array], pool: Pool) -> Float[Array, "_ rows columns"]:
    """The shards of a pool's matrices, and as many zeros as fill up its teams."""
    stack = jnp.concatenate(
        [member.turn(batches[member.index]) for member in pool.members]
    )
    return _padded(stack, 0, max(pool.on_device, sum(pool.counts)))


def _padded(x: Array, axis: int, size: int) -> Array:
    """The array, with zeros up to this size of an axis."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, missing) if size > x.shape[axis] else x


def _everywhere(
    polar: Polar, stack: Float[Array, "k _ _"], pool: Pool
) -> Float[Array, "k _ _"]:
    """All devices that hold shards of a matrix gather it and compute it.

    5 shards (1, 8) of 5 matrices (8, 8) are gathered as (8, 5, 1, 8).
    """
    if not pool.shard_axes:
        return map_stacks(polar, [stack])[0]
    gathered = jax.lax.all_gather(stack, pool.shard_axes)
    (factors,) = map_stacks(polar, [_assemble(gathered, pool)])
    device, rows = jax.lax.axis_index(pool.shard_axes), _split(factors, pool)
    row = jax.lax.dynamic_index_in_dim(rows, device, keepdims=False)
    return row.reshape(-1, *pool.shard_shape)


def _travel(
    polar: Polar, stacks: Mapping[Pool, Float[Array, "_ _ _"]], round_: Round
) -> list[tuple[Pool, Float[Array, "_ _ _"]]]:
    """Send the shards of a round to owners, and factors back, in the same order."""
    like = round_.pools[0]  # in dtype, mesh axes and team
    replicas, team = like.replica_axes, Team(like.shard_axes, like.team)
    rows = _packed(stacks, round_)
    if replicas:  # each replica does its part of the owners' work
        owners = len(rows) // jax.lax.axis_size(replicas)
        first = jax.lax.axis_index(replicas) * owners
        rows = jax.lax.pcast(rows, replicas, to="varying")
        rows = jax.lax.dynamic_slice_in_dim(rows, first, owners)
    received = team.swap_between(rows)  # (senders, width)
    owner = jax.lax.axis_index(replicas + team.axes) // team.size
    kind = jnp.asarray([*map(round_.kinds.index, round_.counts)])[owner]
    if team.size > 1:
        factors = _compute_in_teams(polar, round_, team, kind, received)
    else:
        compute = functools.partial(_compute, polar, round_)
        branches = [functools.partial(compute, counts) for counts in round_.kinds]
        factors = jax.lax.switch(kind, branches, received)
    rows = team.swap_between(factors)
    if replicas:
        rows = jax.lax.all_gather(rows, replicas, tiled=True, to="invarying")
    return _unpacked(rows, round_)


def _packed(
    stacks: Mapping[Pool, Array], round_: Round
) -> Float[Array, "owners width"]:
    """The shards of this device for each owner, filled up with zeros."""
    # 12 matrices (768, 3072) over 8 devices, whose shards are (96, 3072): four owners
    # get two and four get one, so rows (8, 2 * 96 * 3072) with zeros in four halves.
    rows = []
    for owners, _, matrices in round_.runs():
        parts = [
            stacks[pool][slices].reshape(owners.stop - owners.start, -1)
            for pool, slices in zip(round_.pools, matrices, strict=True)
        ]
        rows.append(_padded(jnp.concatenate(parts, axis=1), 1, round_.width))
    return jnp.concatenate(rows)


def _unpacked(
    rows: Float[Array, "owners width"], round_: Round
) -> list[tuple[Pool, Float[Array, "_ _ _"]]]:
    """Undoes `_packed`: parts of the stacks of pools, in order."""
    return [
        (pool, rows[owners, elements].reshape(-1, *pool.shard_shape))
        for owners, counts, _ in round_.runs()
        for pool, elements in zip(round_.pools, round_.row_slices(counts), strict=True)
    ]


def _compute(
    polar: Polar,
    round_: Round,
    counts: Sequence[int],
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """An owner's work: from the shards of its matrices to the shards of factors."""
    shards = [received[:, elements] for elements in round_.row_slices(counts)]
    used = [(i, round_.pools[i]) for i, count in enumerate(counts) if count]
    whole = [_assemble(shards[i], pool) for i, pool in used]
    for (i, pool), factors in zip(used, map_stacks(polar, whole), strict=True):
        shards[i] = _split(factors, pool).astype(received.dtype)
    return _padded(jnp.concatenate(shards, axis=1), 1, round_.width)


def _compute_in_teams(
    polar: Polar,
    round_: Round,
    team: Team,
    kind: Array,
    received: Float[Array, "senders width"],
) -> Float[Array, "senders width"]:
    """As `_compute`, for a team; the n-th matrix of teams may be of different pools."""
    # Two teams of 8 on 16 devices; the first computes a matrix (4096, 16384) of pool 0,
    # in shards (256, 16384), the second one of pool 1, in shards (4096, 1024). Then
    # kinds are [(0, 1), (1, 0)] and orders [[1], [0]]. Both teams make columns
    # (1, 4096, 2048) from both kinds of shards, take theirs, and run one `polar`.
    orders = [np.repeat(np.arange(len(row)), row).tolist() for row in round_.kinds]
    rows, start = [], 0
    for indices, same in itertools.groupby(zip(*orders, strict=True)):
        count, choices = len([*same]), sorted(set(indices))
        pools = [round_.pools[index] for index in choices]
        stop = start + count * math.prod(pools[0].shard_shape)
        row = received[:, start:stop]
        choice = jnp.asarray([*map(choices.index, indices)], jnp.int32)[kind]
        x = _select(choice, [_to_columns(row, pool, team) for pool in pools])
        y = jnp.concatenate([polar(x[i : i + 1], team=team) for i in range(count)])
        shards = _select(
            choice, [_from_columns(y, len(row), pool, team) for pool in pools]
        )
        rows.append(shards.astype(received.dtype))
        start = stop
    return jnp.concatenate(rows, axis=1)


def _select(index: Array, arrays: Sequence[Array]) -> Array:
    """One of the arrays. All are computed, since a branch cannot hold collectives."""
    return jax.lax.select_n(index, *arrays) if len(arrays) > 1 else arrays[0]


def _to_columns(flat: Float[Array, "s w"], pool: Pool, team: Team) -> Array:
    """A device's columns (k, m, n / team), from shards that all teams have sent.

    One matrix (2048, 8192) whose columns 16 devices divide, in teams of 8: 2 shards
    (2048, 512), one from each team, become the columns (1, 2048, 1024).
    """
    shards = flat.reshape(len(flat), -1, *pool.shard_shape)
    _, count, rows, columns = shards.shape
    if pool.short_axes:
        x = shards.swapaxes(0, 1).reshape(count, -1, columns)  # (k, m / team, n)
        return team.swap(x, 2, 1)
    return shards.transpose(1, 2, 0, 3).reshape(count, rows, -1)


def _from_columns(
    y: Array, senders: int, pool: Pool, team: Team
) -> Float[Array, "s w"]:
    """Undoes `_to_columns`."""
    count, (rows, columns) = len(y), pool.shard_shape
    if pool.short_axes:
        y = team.swap(y, 1, 2).reshape(count, senders, rows, columns).swapaxes(0, 1)
    else:
        y = y.reshape(count, rows, senders, columns).transpose(2, 0, 1, 3)
    return y.reshape(senders, -1)


def _assemble(shards: Array, pool: Pool) -> Float[Array, "k m n"]:
    """Whole matrices, from the shards (k, rows, columns) that each sender has.

    Of 3 matrices (768, 3072), 8 rows (3 * 96 * 3072,) become (3, 768, 3072).
    """
    grid = shards.reshape(*pool.grid, -1, *pool.shard_shape)
    return grid.transpose(2, 0, 3, 1, 4).reshape(-1, *pool.shape)


def _split(whole: Float[Array, "k m n"], pool: Pool) -> Float[Array, "senders _"]:
    """Undoes `_assemble`: a row for each sender."""
    (short, long), (rows, columns) = pool.grid, pool.shard_shape
    grid = whole.reshape(-1, short, rows, long, columns).transpose(1, 3, 0, 2, 4)
    return grid.reshape(short * long, -1)
