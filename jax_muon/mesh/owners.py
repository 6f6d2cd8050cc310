"""Sharded parameters: matrices travel to owners by all-to-all, whole, and back.

In global view a parameter may be divided in any way over a mesh: over its batch, in
and out axes, and repeated over the mesh axes that are left. Everything but
orthogonalization is elementwise, or a mean, and stays as it lies. Here matrices of one
shape and placement form a pool, and each gets one owner among the devices that hold it:
those that share its pieces, and those that repeat them. In shard_map, three phases:

  to owners: each device sends its piece of every matrix to that matrix's owner;
  compute:   the owner takes the polar factor of whole matrices;
  back:      the pieces return, and go to the devices that repeat them.

Where only the longer side is divided, and it is much longer, less travels if devices
sum the Gram matrices of their pieces and compute the factor piece by piece.

In which order the pieces are put together does not matter, if they are taken apart in
the same one: a polar factor moves with the rows and columns of its matrix.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_muon.mesh.axes import vary
from jax_muon.mesh.global_view import GlobalView
from jax_muon.mesh.traffic import ring_bytes
from jax_muon.polar.stacks import map_stacks
from jax_muon.reading.axes import MatrixAxes
from jax_muon.reading.joins import Block, Joins, make_blocks

# What a device does while it sends one byte: 400 TFLOP/s beside 400 GB/s, in round
# figures those of an H100 with NVLink.
_FLOPS_PER_BYTE = 1000

# Elements of a matrix that is better gathered and computed everywhere.
_SMALL = 65536

TRAVELS = ("auto", "matrix", "gram")

Sizes = Mapping[str, int]  # of mesh axes, by name
Polar = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh axes that divide the batch, the in and the out axes of a parameter."""

    batch: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(
        cls, spec: PartitionSpec, axes: MatrixAxes, ndim: int, sizes: Sizes
    ) -> "Placement":
        """The placement of a parameter with this spec, read as these matrices."""
        by_axis = spec_axes(spec, ndim, sizes)

        def names(group: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(name for axis in group for name in by_axis[axis])

        return cls(names(axes.batch), names(axes.reduction), names(axes.output))


def spec_axes(spec: PartitionSpec, ndim: int, sizes: Sizes) -> list[tuple[str, ...]]:
    """For each axis of an array, the mesh axes of more than one device over it."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [
        tuple(
            name
            for name in (entry if isinstance(entry, tuple) else (entry,))
            if name is not None and sizes[name] > 1
        )
        for entry in entries
    ]


def shard_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Sizes
) -> tuple[int, ...]:
    """Shape of one device's piece of an array that the mesh divides evenly."""
    return tuple(
        size // _product(names, sizes)
        for size, names in zip(shape, spec_axes(spec, len(shape), sizes), strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Member:
    """A batch (batch, in, out) of a pool: which one, and whether it is transposed."""

    index: int
    batch: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Pool:
    """Matrices of one shape and placement, m <= n, and who computes them.

    Every owner has `whole` matrices, and those in `extra` one more. Where `extra` is
    empty all devices that hold a matrix compute it: each its piece, with `exchanges`
    sums of Gram matrices, or where that is zero, each the whole.
    """

    members: tuple[Member, ...]
    piece: tuple[int, int]  # of (m, n), on one device
    dtype: Any
    batch: tuple[str, ...]  # mesh axes over different matrices
    short: tuple[str, ...]  # mesh axes over m
    long: tuple[str, ...]  # mesh axes over n
    replicas: tuple[str, ...]  # mesh axes that repeat the pieces
    fan: tuple[int, int]  # (m, n)
    whole: int
    extra: tuple[bool, ...]  # by owner, replicas before pieces; () if all compute
    exchanges: int = 0

    @property
    def pieces(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold the pieces of a matrix."""
        return self.short + self.long

    @property
    def count(self) -> int:
        """Matrices that one device holds pieces of."""
        return sum(member.batch for member in self.members)

    @property
    def flops(self) -> int:
        """Work of one matrix, in products of m x n with m x m."""
        return self.fan[0] * math.prod(self.fan)

    @property
    def depth(self) -> int:
        """Slots of an owner."""
        return self.whole + any(self.extra)

    def load(self, sizes: Sizes) -> np.ndarray:
        """Work of each device, by its place along the axes of `_divided(sizes)`."""
        names = _divided(sizes)
        if not self.extra:
            share = _product(self.long, sizes) if self.exchanges else 1
            work = self.count * self.flops / share
            return np.full([sizes[name] for name in names], work)
        axes = self.replicas + self.pieces
        by_owner = (self.whole + np.array(self.extra)) * self.flops
        by_axis = by_owner.reshape([sizes[name] for name in axes])
        by_axis = np.expand_dims(by_axis, tuple(range(len(axes), len(names))))
        return by_axis.transpose([(axes + self.batch).index(name) for name in names])

    def cost(self, sizes: Sizes) -> float:
        """Of the busiest device, in FLOPs, as if nothing were hidden.

        Five quintics of a whole matrix are 20 m^2 n + 10 m^3 FLOPs. With summed Gram
        matrices a device does its share of the first, and all of the second.
        """
        m, n = self.fan
        share = _product(self.long, sizes) if self.exchanges else 1
        count = self.depth if self.extra else self.count
        flops = count * (20 * m * m * n / share + 10 * m**3)
        return flops + self.sent_bytes(sizes) * _FLOPS_PER_BYTE

    def sent_bytes(self, sizes: Sizes) -> float:
        """Bytes that a device sends for one step, as `ring_bytes` counts them."""
        matrix = math.prod(self.piece) * np.dtype(self.dtype).itemsize
        pieces = _product(self.pieces, sizes)
        if self.exchanges:
            gram = self.fan[0] ** 2 * max(4, np.dtype(self.dtype).itemsize)
            sums = self.exchanges * self.count * gram
            largest = self.count * 4
            return ring_bytes("all-reduce", pieces, sums + largest)
        if not self.extra:
            return ring_bytes("all-gather", pieces, self.count * matrix)
        repeats = _product(self.replicas, sizes)
        slots = len(self.extra) * self.depth // repeats
        there_and_back = 2 * ring_bytes("all-to-all", pieces, slots * matrix)
        return there_and_back + ring_bytes("all-gather", repeats, slots * matrix)


def make_pools(
    batches: Sequence[tuple[tuple[int, ...], Any]],
    placements: Sequence[Placement],
    sizes: Sizes,
    *,
    small: int | None = None,
    exchanges: Callable[[int, int], int | None] = lambda m, n: None,
    travel: str = "auto",
) -> list[Pool]:
    """Pools of matrices, and owners so that the busiest device has least to do.

    Args:
      batches: shape (batch, in, out) of one device's pieces, and dtype, for each batch.
      placements: of each batch.
      sizes: of the mesh axes.
      small: matrices with fewer elements are computed by all devices that hold them;
        None for 65536.
      exchanges: for a matrix (m, n), how often its Gram matrix has to be summed where
        only n is divided; None where that cannot be done.
      travel: "matrix": matrices go to owners, or all devices; "gram": where it can be
        done, Gram matrices (m, m) are summed instead; "auto": what costs less, counting
        bytes and FLOPs.
    """
    small = _SMALL if small is None else small
    found: dict[Any, list[Member]] = {}
    for index, ((shape, dtype), place) in enumerate(
        zip(batches, placements, strict=True)
    ):
        batch, rows, cols = shape
        fan = (
            rows * _product(place.inputs, sizes),
            cols * _product(place.outputs, sizes),
        )
        sides = ((fan[0], place.inputs, rows), (fan[1], place.outputs, cols))
        short, long = sorted(sides)
        member = Member(index, batch, transposed=short is sides[1])
        key = (short, long, dtype, place.batch)
        found.setdefault(key, []).append(member)

    names = _divided(sizes)
    load = np.zeros([sizes[name] for name in names])
    pools = []
    for (short, long, dtype, batch_axes), members in sorted(
        found.items(), key=lambda item: item[0][0][0] ** 2 * item[0][1][0], reverse=True
    ):
        used = {*batch_axes, *short[1], *long[1]}
        pool = Pool(
            members=tuple(members),
            piece=(short[2], long[2]),
            dtype=dtype,
            batch=batch_axes,
            short=short[1],
            long=long[1],
            replicas=tuple(name for name in names if name not in used),
            fan=(short[0], long[0]),
            whole=0,
            extra=(),
        )
        owners = _product(pool.replicas + pool.pieces, sizes)
        shared = math.prod(pool.fan) >= small and owners > 1
        if shared:
            # (owners, devices with other matrices)
            order = [names.index(n) for n in pool.replicas + pool.pieces + pool.batch]
            busy = load.transpose(order).reshape(owners, -1).max(axis=1)
            whole, rest = divmod(pool.count, owners)
            idlest = np.argsort(busy, kind="stable")[:rest]
            extra = tuple(owner in idlest for owner in range(owners))
            pool = dataclasses.replace(pool, whole=whole, extra=extra)
        sums = exchanges(*pool.fan) if pool.long and not pool.short else None
        if sums and travel != "matrix":
            grams = dataclasses.replace(pool, whole=0, extra=(), exchanges=sums)
            if travel == "gram" or grams.cost(sizes) < pool.cost(sizes):
                pool = grams
        load += pool.load(sizes)
        pools.append(pool)
    return pools


def local_blocks(
    view: GlobalView,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    all_axes: Sequence[MatrixAxes],
    joins: Joins | None,
) -> tuple[list[PartitionSpec], list[Block], list[Placement]]:
    """The blocks of each device's pieces, and where these lie.

    Specs are those of the view, changed where a join would lie on several devices.
    Leaves that are joined lie as the first of them. Scanned layers stay divided where
    each device has whole joins, and are otherwise undivided along the layers.

    Args:
      view: of the parameters.
      names: paths of all leaves.
      shapes: of all leaves, whole.
      all_axes: how each is read as matrices.
      joins: see `make_blocks`.

    Returns:
      A spec for each leaf, the blocks of the pieces, a placement for each block.
    """
    sizes, specs = view.sizes, list(view.specs)
    for block in make_blocks(names, shapes, all_axes, joins):
        if block.joined == 1:
            continue
        first, *others = block.leaves
        for leaf in others:
            specs[leaf] = specs[first]
        if not others:
            layers = all_axes[first].batch[0]
            here = shard_shape(shapes[first], specs[first], sizes)[layers]
            if here % block.joined and here < shapes[first][layers]:
                entries = list(specs[first])
                entries[layers] = None
                specs[first] = PartitionSpec(*entries)
    pieces = [
        shard_shape(x, spec, sizes) for x, spec in zip(shapes, specs, strict=True)
    ]
    blocks = make_blocks(names, pieces, all_axes, joins)
    placements = []
    for block in blocks:
        leaf = block.leaves[0]
        placements.append(
            Placement.of(specs[leaf], all_axes[leaf], len(specs[leaf]), sizes)
        )
    return specs, blocks, placements


def local_batches(
    view: GlobalView,
    leaves: Sequence[tuple[str, Any]],
    all_axes: Sequence[MatrixAxes],
    local: tuple[Sequence[PartitionSpec], Sequence[Block], Sequence[Placement]],
) -> list[tuple[tuple[int, ...], Any]]:
    """Shape (batch, K in, out) and dtype of each device's pieces of every block."""
    specs, blocks, _ = local
    batches: list[tuple[tuple[int, ...], Any]] = []
    for block in blocks:
        leaf = block.leaves[0]
        shape = shard_shape(leaves[leaf][1].shape, specs[leaf], view.sizes)
        fan_in, fan_out = all_axes[leaf].fan(shape)
        batch = (block.batch, block.joined * fan_in, fan_out)
        batches.append((batch, leaves[leaf][1].dtype))
    return batches


def map_pools(
    polar: Polar,
    batches: Sequence[Float[Array, "_ _ _"]],
    pools: Sequence[Pool],
    sizes: Sizes,
    *,
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
        if pool.exchanges:
            summed = functools.partial(polar, axis_name=pool.long)
            (stack,) = map_stacks(summed, [stack], max_stack=max_stack)
        elif pool.extra:
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
    repeats = _product(pool.replicas, sizes)
    if repeats > 1:
        mine = owners // repeats
        start = jax.lax.axis_index(pool.replicas) * mine
        stack = vary(stack, pool.replicas)
        stack = jax.lax.dynamic_slice_in_dim(stack, start, mine)

    # At least two chunks, so that one can travel while the other is computed.
    depth = min(max_stack, max(1, math.ceil(pool.whole / 2)))
    cuts = [*range(0, pool.whole, depth), pool.whole]
    chunks = [(start, stop, polar) for start, stop in itertools.pairwise(cuts)]
    if any(pool.extra):
        has_one = jnp.asarray(pool.extra)[here]
        polar_if = functools.partial(compute_if, has_one, polar)
        chunks.append((pool.whole, pool.depth, polar_if))
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
            if slot < pool.whole + more:
                places.append(len(slots))
                slots.append(matrix)
                matrix += 1
            else:
                slots.append(pool.count)
    return slots, places


def _exchange(pieces: Array, pool: Pool) -> Array:
    """(pieces, k, ...): what is meant for each of the devices, to what each sent."""
    if not pool.pieces:
        return pieces
    return jax.lax.all_to_all(pieces, pool.pieces, 0, 0, tiled=True)


def _put_together(pieces: Array, pool: Pool, sizes: Sizes) -> Array:
    """(pieces, k, m / short, n / long) to whole matrices (k, m, n)."""
    short, long = _product(pool.short, sizes), _product(pool.long, sizes)
    grid = pieces.reshape(short, long, -1, *pool.piece)
    return grid.transpose(2, 0, 3, 1, 4).reshape(-1, *pool.fan)


def _take_apart(whole: Array, pool: Pool, sizes: Sizes) -> Array:
    """Undoes `_put_together`."""
    short, long = _product(pool.short, sizes), _product(pool.long, sizes)
    rows, cols = pool.piece
    grid = whole.reshape(-1, short, rows, long, cols).transpose(1, 3, 0, 2, 4)
    return grid.reshape(short * long, -1, rows, cols)


def _divided(sizes: Sizes) -> tuple[str, ...]:
    """Mesh axes with more than one device."""
    return tuple(name for name, size in sizes.items() if size > 1)


def _product(names: Sequence[str], sizes: Sizes) -> int:
    return math.prod(sizes[name] for name in names)


def compute_if(condition: Array, function: Polar, x: Array) -> Array:
    """The function of x, or zeros without computing it."""
    return jax.lax.cond(condition, function, jnp.zeros_like, x)
