"""Divided matrices travel to owners by all-to-all, whole, and back, inside shard_map.

In three phases, for the plan that `owners.py` makes:

  to owners: each device sends its piece of every matrix to that matrix's owner;
  compute:   the owner takes the polar factor of whole matrices;
  back:      the pieces return, and go to the devices that repeat them.

The order in which the pieces are put together does not matter if they are taken apart
in the same one: a polar factor moves with the rows and columns of its matrix.
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

from jax_muon.mesh.owners import Pool, product
from jax_muon.mesh.specs import Sizes
from jax_muon.polar.stacks import map_stacks

Polar = Callable[..., Array]


def on_pieces(
    function: Callable[[list[Array]], list[Array]],
    leaves: Sequence[Array],
    specs: Sequence[PartitionSpec],
    mesh: Any,
) -> list[Array]:
    """Apply a function of each device's pieces to arrays on Explicit axes.

    Args:
      function: of the pieces, inside shard_map.
      leaves: global arrays, which lie as their types say.
      specs: how they have to lie for the function.
      mesh: the one that they lie on.

    Returns:
      The results, lying as `leaves`.
    """
    own = [jax.typeof(x).sharding.spec for x in leaves]
    moved = [
        x if spec == have else jax.reshard(x, NamedSharding(mesh, spec))
        for x, spec, have in zip(leaves, specs, own, strict=True)
    ]
    results = jax.shard_map(
        function, mesh=mesh, in_specs=(list(specs),), out_specs=list(specs)
    )(moved)
    return [
        x if spec == have else jax.reshard(x, NamedSharding(mesh, have))
        for x, spec, have in zip(results, specs, own, strict=True)
    ]


def map_pools(
    polar: Polar,
    batches: Sequence[Float[Array, "_ _ _"]],
    *,
    pools: Sequence[Pool],
    sizes: Sizes,
    max_stack: int,
) -> list[Float[Array, "_ _ _"]]:
    """Polar factors of batches (batch, in, out) of pieces, inside shard_map.

    Args:
      polar: of stacks (k, m, n) of whole matrices, each independent of the others and
        of the order of its rows and columns.
      batches: this device's pieces.
      pools: of these batches.
      sizes: of the mesh axes.
      max_stack: most matrices in one call of `polar`.

    Returns:
      The pieces of the factors, in the order and shapes of `batches`.
    """
    results: list[Any] = [None] * len(batches)
    for pool in pools:
        stack = jnp.concatenate(
            [
                batches[member.index].mT if member.transposed else batches[member.index]
                for member in pool.members
            ]
        )
        if pool.extra:
            stack = _on_owners(polar, stack, pool, sizes, max_stack)
        else:
            stack = _everywhere(polar, stack, pool, sizes, max_stack)
        start = 0
        for member in pool.members:
            part = stack[start : start + member.batch]
            results[member.index] = part.mT if member.transposed else part
            start += member.batch
    return results


def _everywhere(
    polar: Polar, stack: Array, pool: Pool, sizes: Sizes, max_stack: int
) -> Array:
    """All devices that hold pieces of a matrix gather it and compute it."""
    if pool.pieces:
        gathered = jax.lax.all_gather(stack, pool.pieces)
        stack = _put_together(gathered, pool, sizes)
    (factors,) = map_stacks(polar, [stack], max_stack=max_stack)
    if pool.pieces:
        here = jax.lax.axis_index(pool.pieces)
        pieces = _take_apart(factors, pool, sizes)
        factors = jax.lax.dynamic_index_in_dim(pieces, here, keepdims=False)
    return factors


def _on_owners(
    polar: Polar, stack: Array, pool: Pool, sizes: Sizes, max_stack: int
) -> Array:
    """Each matrix goes to its owner, and its factor comes back, chunk by chunk."""
    slots, places = _slots(pool)
    owners = len(pool.extra)
    if any(pool.extra):
        padded = jnp.concatenate([stack, jnp.zeros_like(stack[:1])])
        stack = padded[np.array(slots)]  # (owners * depth, m / short, n / long)
    here = jax.lax.axis_index(pool.replicas + pool.pieces)
    # (owners, depth, ...), of which these replicas do theirs
    stack = stack.reshape(owners, pool.depth, *pool.piece)
    repeats = product(pool.replicas, sizes)
    if repeats > 1:
        mine = owners // repeats
        start = jax.lax.axis_index(pool.replicas) * mine
        stack = jax.lax.pcast(stack, pool.replicas, to="varying")
        stack = jax.lax.dynamic_slice_in_dim(stack, start, mine)

    # At least two chunks, so that one can travel while the other is computed.
    depth = min(max_stack, max(1, math.ceil(pool.per_owner / 2)))
    cuts = [*range(0, pool.per_owner, depth), pool.per_owner]
    chunks = [(start, stop, polar) for start, stop in itertools.pairwise(cuts)]
    if any(pool.extra):
        has_one = jnp.asarray(pool.extra)[here]
        polar_if = functools.partial(_compute_if, has_one, polar)
        chunks.append((pool.per_owner, pool.depth, polar_if))
    done = []
    for start, stop, function in chunks:
        pieces = stack[:, start:stop]
        whole = _put_together(_exchange(pieces, pool), pool, sizes)
        factors = function(whole)
        done.append(_exchange(_take_apart(factors, pool, sizes), pool))
    stack = jnp.concatenate(done, axis=1) if len(done) > 1 else done[0]
    if repeats > 1:
        stack = jax.lax.all_gather(stack, pool.replicas, tiled=True, to="invarying")
    stack = stack.reshape(-1, *pool.piece)
    return stack[np.array(places)] if any(pool.extra) else stack


def _slots(pool: Pool) -> tuple[list[int], list[int]]:
    """For each slot the matrix in it (`count` where empty), and for each its slot."""
    slots: list[int] = []
    places: list[int] = []
    matrix = 0
    for more in pool.extra:
        for slot in range(pool.depth):
            if slot < pool.per_owner + more:
                places.append(len(slots))
                slots.append(matrix)
                matrix += 1
            else:
                slots.append(pool.count)
    return slots, places


def _exchange(pieces: Array, pool: Pool) -> Array:
    """(pieces, k, ...): what each device sends, exchanged for what it is sent."""
    if not pool.pieces:
        return pieces
    return jax.lax.all_to_all(pieces, pool.pieces, 0, 0, tiled=True)


def _put_together(pieces: Array, pool: Pool, sizes: Sizes) -> Array:
    """(pieces, k, m / short, n / long) to whole matrices (k, m, n)."""
    short, long = product(pool.short, sizes), product(pool.long, sizes)
    grid = pieces.reshape(short, long, -1, *pool.piece)
    return grid.transpose(2, 0, 3, 1, 4).reshape(-1, *pool.fan)


def _take_apart(whole: Array, pool: Pool, sizes: Sizes) -> Array:
    """Undoes `_put_together`."""
    short, long = product(pool.short, sizes), product(pool.long, sizes)
    rows, cols = pool.piece
    grid = whole.reshape(-1, short, rows, long, cols).transpose(1, 3, 0, 2, 4)
    return grid.reshape(short * long, -1, rows, cols)


def _compute_if(condition: Array, function: Polar, x: Array) -> Array:
    """The function of x, or zeros without computing it."""
    return jax.lax.cond(condition, function, jnp.zeros_like, x)
