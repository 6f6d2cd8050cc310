"""The plan: which device owns which divided matrix.

A parameter may be divided in any way over a mesh: over its batch, in and out axes, and
repeated over the mesh axes that are left. Everything but orthogonalization is
elementwise, or a mean, and stays as it lies. Here matrices of one shape and placement
form a pool, and each gets one owner among the devices that hold it: those that share
its pieces, and those that repeat them. `travel.py` carries the plan out.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jax_muon.axes import MatrixAxes
from jax_muon.joins import Block
from jax_muon.matrices import Matrices
from jax_muon.mesh.specs import Sizes, entry_names, shard_shape
from jax_muon.mesh.traffic import ring_bytes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh axes that divide the batch, the in and the out axes of a parameter."""

    batch: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, spec: PartitionSpec, axes: MatrixAxes, sizes: Sizes) -> "Placement":
        """The placement of a parameter with this full spec, read as these matrices."""

        def names(group: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(
                name
                for axis in group
                for name in entry_names(spec[axis])
                if sizes[name] > 1
            )

        return cls(names(axes.batch), names(axes.reduction), names(axes.output))


@dataclasses.dataclass(frozen=True)
class Member:
    """A batch (batch, in, out) of a pool: which one, and whether it is transposed."""

    index: int
    batch: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Pool:
    """Matrices of one shape and placement, m <= n, and who computes them.

    Every owner has `per_owner` matrices, those in `extra` one more. Where `extra` is
    empty all devices that hold a matrix compute it.
    """

    members: tuple[Member, ...]
    piece: tuple[int, int]  # of (m, n), on one device
    dtype: Any
    batch: tuple[str, ...]  # mesh axes over different matrices
    short: tuple[str, ...]  # mesh axes over m
    long: tuple[str, ...]  # mesh axes over n
    replicas: tuple[str, ...]  # mesh axes that repeat the pieces
    fan: tuple[int, int]  # (m, n)
    per_owner: int
    extra: tuple[bool, ...]  # by owner, replicas before pieces; () if all compute

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
        return self.per_owner + any(self.extra)

    def load(self, sizes: Sizes) -> np.ndarray:
        """Work of each device, by its place along the axes of `divided_axes(sizes)`."""
        names = divided_axes(sizes)
        if not self.extra:
            return np.full([sizes[name] for name in names], self.count * self.flops)
        axes = self.replicas + self.pieces
        by_owner = (self.per_owner + np.array(self.extra)) * self.flops
        by_axis = by_owner.reshape([sizes[name] for name in axes])
        by_axis = np.expand_dims(by_axis, tuple(range(len(axes), len(names))))
        return by_axis.transpose([(axes + self.batch).index(name) for name in names])

    def sent_bytes(self, sizes: Sizes) -> float:
        """Bytes that a device sends for one step, as `ring_bytes` counts them."""
        matrix = math.prod(self.piece) * np.dtype(self.dtype).itemsize
        pieces = product(self.pieces, sizes)
        if not self.extra:
            return ring_bytes("all-gather", pieces, self.count * matrix)
        repeats = product(self.replicas, sizes)
        slots = len(self.extra) * self.depth // repeats
        there_and_back = 2 * ring_bytes("all-to-all", pieces, slots * matrix)
        return there_and_back + ring_bytes("all-gather", repeats, slots * matrix)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the pieces of parameters lie for `orthogonalize`.

    Attributes:
      specs: of each parameter; changed where a join would lie on several devices.
      blocks: of each device's pieces.
      placements: of each block.
      pieces: shape (batch, K in, out) and dtype of one device's pieces of each block.
    """

    specs: list[PartitionSpec]
    blocks: list[Block]
    placements: list[Placement]
    pieces: list[tuple[tuple[int, ...], Any]]


def lay_out(
    matrices: Matrices,
    names: Sequence[str],
    specs: Sequence[PartitionSpec],
    sizes: Sizes,
) -> Layout:
    """The blocks of each device's pieces, and where these lie.

    Leaves that are joined lie as the first of them. Scanned layers stay divided where
    each device has whole joins, and are otherwise undivided along the layers.

    Args:
      matrices: how the parameters are read.
      names: paths of all leaves.
      specs: of all leaves, with an entry for each axis.
      sizes: of the mesh axes.
    """
    specs = list(specs)
    shapes = [matrices[name].shape for name in names]
    all_axes = [matrices.axes(name) for name in names]
    for block in matrices.blocks(names):
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
    local = [shard_shape(x, spec, sizes) for x, spec in zip(shapes, specs, strict=True)]
    blocks = matrices.blocks(names, local)
    placements: list[Placement] = []
    pieces: list[tuple[tuple[int, ...], Any]] = []
    for block in blocks:
        leaf = block.leaves[0]
        fan_in, fan_out = all_axes[leaf].fan(local[leaf])
        placements.append(Placement.of(specs[leaf], all_axes[leaf], sizes))
        shape = (block.batch, block.joined * fan_in, fan_out)
        pieces.append((shape, matrices[names[leaf]].dtype))
    return Layout(specs, blocks, placements, pieces)


def make_pools(
    batches: Sequence[tuple[tuple[int, ...], Any]],
    placements: Sequence[Placement],
    sizes: Sizes,
    *,
    small: int = 0,
    start: int = 0,
) -> list[Pool]:
    """Pools of matrices, and owners so that the busiest device has the least to do.

    Args:
      batches: shape (batch, in, out) of one device's pieces, and dtype, for each batch.
      placements: of each batch.
      sizes: of the mesh axes.
      small: matrices with fewer elements are computed by all devices that hold them.
      start: the owner that comes first among equally busy ones, modulo their number,
        so that several groups of matrices find different owners.
    """
    found: dict[Any, list[Member]] = {}
    for index, ((shape, dtype), place) in enumerate(
        zip(batches, placements, strict=True)
    ):
        batch, rows, cols = shape
        fan = (
            rows * product(place.inputs, sizes),
            cols * product(place.outputs, sizes),
        )
        sides = ((fan[0], place.inputs, rows), (fan[1], place.outputs, cols))
        short, long = sorted(sides)
        member = Member(index, batch, transposed=short is sides[1])
        key = (short, long, dtype, place.batch)
        found.setdefault(key, []).append(member)

    names = divided_axes(sizes)
    busy_so_far = np.zeros([sizes[name] for name in names])
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
            per_owner=0,
            extra=(),
        )
        owners = product(pool.replicas + pool.pieces, sizes)
        shared = math.prod(pool.fan) >= small and owners > 1
        if shared:
            # (owners, devices with other matrices)
            order = [names.index(n) for n in pool.replicas + pool.pieces + pool.batch]
            busy = busy_so_far.transpose(order).reshape(owners, -1).max(axis=1)
            per_owner, rest = divmod(pool.count, owners)
            first = start % owners
            idlest = (np.argsort(np.roll(busy, -first), kind="stable") + first) % owners
            extra = tuple(owner in idlest[:rest] for owner in range(owners))
            pool = dataclasses.replace(pool, per_owner=per_owner, extra=extra)
        busy_so_far = busy_so_far + pool.load(sizes)
        pools.append(pool)
    return pools


def divided_axes(sizes: Sizes) -> tuple[str, ...]:
    """Mesh axes with more than one device."""
    return tuple(name for name, size in sizes.items() if size > 1)


def product(names: Sequence[str], sizes: Sizes) -> int:
    """Devices along several mesh axes."""
    return math.prod(sizes[name] for name in names)
