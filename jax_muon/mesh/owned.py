"""Layouts: how a tree of parameters is divided between the devices of a mesh axis.

`Owned` is a tree node that holds the part of one device, and stands wherever the plain
tree would stand: in the gradients that an inner transform sees and, since transforms
build their state by mapping over parameters, in that state. Its layout says which part
of which parameter lies where, so that state can be moved to any other layout.

`MatrixLayout` gives whole matrices to owners, `RowLayout` slices of the leading axis.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_muon.mesh.axes import AxisName, axis_names, vary
from jax_muon.reading import axes as matrices
from jax_muon.reading import paths
from jax_muon.reading.axes import DimensionNumbers, MatrixAxes
from jax_muon.reading.joins import Block, Joins, make_blocks, scatter_blocks


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Owned:
    """The part of a tree that a device owns: arrays by name, and their layout."""

    parts: dict[str, Any]
    layout: "Layout"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys, and the static layout."""
        names = tuple(self.parts)
        children = [(jax.tree_util.DictKey(k), v) for k, v in self.parts.items()]
        return children, (names, self.layout)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Owned":
        """From static layout and children."""
        names, layout = static
        return cls(dict(zip(names, children, strict=True)), layout)


def is_owned(x: Any) -> bool:
    """Whether x is an `Owned` node."""
    return isinstance(x, Owned)


def map_owned(function: Callable[[Owned], Any], tree: Any) -> Any:
    """Apply a function to every `Owned` node, and leave all else as it is."""
    return jax.tree.map(
        lambda x: function(x) if is_owned(x) else x, tree, is_leaf=is_owned
    )


def state_specs(state: Any) -> Any:
    """PartitionSpecs of optimizer state: owned parts over their axis."""

    def specs(x: Any) -> Any:
        return x.layout.specs() if is_owned(x) else PartitionSpec()

    return jax.tree.map(specs, state, is_leaf=is_owned)


def check_devices(owned: Owned, devices: int) -> None:
    """Raise a ValueError if this is the state of another number of devices."""
    had = owned.layout
    if had.devices != devices:
        raise ValueError(
            f"optimizer state of {had.devices} devices on {devices} devices of the "
            f"mesh axis {had.axis!r}; move it with to_portable and from_portable"
        )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: where it is in its tree, and what it looks like."""

    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        """For messages: `blocks/0/mlp float32(768, 3072)`."""
        return f"{self.path} {self.dtype.name}{self.shape}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tree divided over `devices` devices of a mesh axis.

    The methods run inside shard_map over that axis. Outside, shard_map joins every
    device's part along the leading axis, in the order of the devices.
    """

    axis: AxisName
    devices: int
    # Not compared: NNX boxes parameters at init and not at update.
    treedef: Any = dataclasses.field(compare=False)
    leaves: tuple[Leaf, ...]

    def own(self, tree: Any) -> Owned:
        """This device's part of a replicated tree."""
        raise NotImplementedError

    def scatter(self, tree: Any, dtype: Any) -> Owned:
        """This device's part of the mean of local trees, sent in dtype."""
        raise NotImplementedError

    def gather(self, owned: Owned, dtype: Any) -> Any:
        """The replicated tree of which each device owns a part, sent in dtype."""
        raise NotImplementedError

    def specs(self) -> Owned:
        """PartitionSpecs of the parts."""
        raise NotImplementedError

    def plain(self, owned: Owned) -> Any:
        """Shapes and dtypes of the whole tree that `owned` is a part of."""
        raise NotImplementedError

    def flatten(self, tree: Any) -> list[Array]:
        """Leaves of a tree, which must be the one that this layout was made for."""
        found, treedef = describe_tree(tree)
        paths_found = [leaf.path for leaf in found]
        if treedef != self.treedef and paths_found != [x.path for x in self.leaves]:
            raise ValueError(
                f"a tree with {', '.join(map(str, found))}; valid is the tree that the "
                f"optimizer was initialized with: {', '.join(map(str, self.leaves))}"
            )
        return jax.tree.leaves(tree)

    def _slice(self, x: Array) -> Array:
        """This device's share of the leading axis of a replicated array."""
        size = x.shape[0] // self.devices
        start = jax.lax.axis_index(axis_names(self.axis)) * size
        x = vary(x, self.axis)
        return jax.lax.dynamic_slice_in_dim(x, start, size)

    def _mean_scatter(self, x: Array, dtype: Any) -> Array:
        total = jax.lax.psum_scatter(
            x.astype(dtype or x.dtype), axis_names(self.axis), tiled=True
        )
        return total.astype(x.dtype) / self.devices

    def _all_gather(self, x: Array, dtype: Any) -> Array:
        names = axis_names(self.axis)
        sent = x.astype(dtype or x.dtype)
        return jax.lax.all_gather(sent, names, tiled=True, to="invarying")


def describe_tree(tree: Any) -> tuple[tuple[Leaf, ...], Any]:
    """Path, shape and dtype of every leaf, and the tree's structure."""
    leaves = tuple(
        Leaf(path, tuple(leaf.shape), jnp.dtype(leaf.dtype))
        for path, leaf in paths.leaves_with_paths(tree)
    )
    return leaves, jax.tree.structure(tree)


# --- whole matrices -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive slots of a stack: matrices of a block, or one padded slot."""

    block: int | None
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape and dtype, in slots: `depth` for each device in turn.

    A slot holds one matrix (in, out), or K of them (K, in, out) that are joined. Every
    device fills its first `whole` slots; where the count does not divide, there
    is one slot more, filled on the devices in `extra` and zero on the others.
    """

    joined: int
    fan: tuple[int, int]
    dtype: Any
    runs: tuple[Run, ...]
    whole: int
    extra: tuple[bool, ...]

    @property
    def name(self) -> str:
        """Key of the parts of this stack."""
        joined = f"{self.joined}x" if self.joined > 1 else ""
        return f"{joined}{self.fan[0]}x{self.fan[1]}_{self.dtype.name}"

    @property
    def flops(self) -> int:
        """Work of one slot, as `_work` counts it."""
        return _work(self.joined, self.fan)

    @property
    def elements(self) -> int:
        """Of one slot."""
        return self.joined * math.prod(self.fan)

    @property
    def depth(self) -> int:
        """Slots of a device."""
        return self.whole + any(self.extra)

    def slots(self, views: Sequence[Array]) -> Array:
        """(devices * depth, ...) of block views (batch, ...), padded with zeros."""
        like = next(views[run.block] for run in self.runs if run.block is not None)
        pad = jnp.zeros((1, *like.shape[1:]), like.dtype)
        return jnp.concatenate(
            [
                pad if run.block is None else views[run.block][run.start : run.stop]
                for run in self.runs
            ]
        )

    def views(self, slots: Array) -> dict[int, Array]:
        """The view (batch, ...) of each block, out of all slots: undoes `slots`."""
        pieces: dict[int, list[Array]] = {}
        position = 0
        for run in self.runs:
            size = run.stop - run.start
            if run.block is not None:
                piece = slots[position : position + size]
                pieces.setdefault(run.block, []).append(piece)
            position += size
        return {block: jnp.concatenate(parts) for block, parts in pieces.items()}


@dataclasses.dataclass(frozen=True)
class MatrixLayout(Layout):
    """Every matrix whole on one owner: stacks of all matrices of one shape."""

    all_axes: tuple[MatrixAxes, ...]
    blocks: tuple[Block, ...]
    stacks: tuple[Stack, ...]

    @classmethod
    def of(
        cls,
        tree: Any,
        axis: AxisName,
        devices: int,
        numbers: DimensionNumbers,
        joins: Joins | None = None,
    ) -> "MatrixLayout":
        """Divide the matrices of a tree so that the busiest device has least to do."""
        leaves, treedef = describe_tree(tree)
        all_axes = tuple(matrices.matrix_axes(tree, numbers))
        names = [leaf.path for leaf in leaves]
        shapes = [leaf.shape for leaf in leaves]
        dtypes = [leaf.dtype for leaf in leaves]
        blocks = make_blocks(names, shapes, all_axes, joins, dtypes=dtypes)
        members: dict[Any, list[int]] = {}
        for index, block in enumerate(blocks):
            first = block.leaves[0]
            fan = all_axes[first].fan(shapes[first])
            key = (block.joined, fan, leaves[first].dtype)
            members.setdefault(key, []).append(index)

        load = [0] * devices
        stacks = []

        for (joined, fan, dtype), indices in sorted(
            members.items(), key=lambda item: _work(*item[0][:2]), reverse=True
        ):
            counts = [blocks[index].batch for index in indices]
            whole, rest = divmod(sum(counts), devices)
            # The devices with least to do so far take one matrix more.
            idlest = sorted(range(devices), key=load.__getitem__)[:rest]
            extra = tuple(device in idlest for device in range(devices))
            runs = _runs(indices, counts, whole, extra)
            stack = Stack(joined, fan, dtype, runs, whole, extra)
            stacks.append(stack)
            for device in range(devices):
                load[device] += (whole + extra[device]) * stack.flops
        return cls(
            axis, devices, treedef, leaves, all_axes, tuple(blocks), tuple(stacks)
        )

    def _views(self, tree: Any) -> list[Array]:
        """Blocks as (batch, [K,] in, out); means keep 1 where they are averaged."""
        views = [
            axes.view(x)
            for axes, x in zip(self.all_axes, self.flatten(tree), strict=True)
        ]
        stacks = [block.view(views) for block in self.blocks]
        return [
            stack if block.joined > 1 else stack[:, 0]
            for block, stack in zip(self.blocks, stacks, strict=True)
        ]

    def _split(self, chunks: dict[str, Array]) -> Owned:
        """Chunks (depth, ...) as parts: slots that all fill, and slots that some do."""
        parts = {}
        for stack in self.stacks:
            chunk = chunks[stack.name]
            if stack.whole:
                parts[f"{stack.name}/whole"] = chunk[: stack.whole]
            if any(stack.extra):
                parts[f"{stack.name}/extra"] = chunk[stack.whole :]
        return Owned(parts, self)

    def _join(self, owned: Owned) -> dict[str, Array]:
        return {
            stack.name: jnp.concatenate(
                [
                    owned.parts[f"{stack.name}/{part}"]
                    for part in ("whole", "extra")
                    if f"{stack.name}/{part}" in owned.parts
                ]
            )
            for stack in self.stacks
        }

    def own(self, tree: Any) -> Owned:
        """This device's matrices of a replicated tree (parameters, or plain state)."""
        views = self._views(tree)
        return self._split(
            {stack.name: self._slice(stack.slots(views)) for stack in self.stacks}
        )

    def scatter(self, tree: Any, dtype: Any) -> Owned:
        """This device's matrices of the mean: one reduce-scatter a stack."""
        views = self._views(tree)
        return self._split(
            {
                stack.name: self._mean_scatter(stack.slots(views), dtype)
                for stack in self.stacks
            }
        )

    def gather(self, owned: Owned, dtype: Any) -> Any:
        """The replicated tree: one all-gather a stack."""
        stacks: list[Any] = [None] * len(self.blocks)
        chunks = self._join(owned)
        for stack in self.stacks:
            chunk = chunks[stack.name]
            views = stack.views(self._all_gather(chunk, dtype).astype(chunk.dtype))
            for index, view in views.items():
                stacks[index] = view.reshape(-1, stack.joined, *view.shape[-2:])
        arrays = [
            self.all_axes[index].undo(view, self._shape(index, view.shape))
            for index, view in enumerate(scatter_blocks(self.blocks, stacks))
        ]
        return self._tree(arrays)

    def plain(self, owned: Owned) -> Any:
        """Shapes and dtypes of the whole tree."""
        shapes: list[Any] = [None] * len(self.leaves)
        for stack in self.stacks:
            part = owned.parts[f"{stack.name}/{'whole' if stack.whole else 'extra'}"]
            for run in stack.runs:
                for leaf in () if run.block is None else self.blocks[run.block].leaves:
                    shape = self._shape(leaf, part.shape)
                    shapes[leaf] = jax.ShapeDtypeStruct(shape, part.dtype)
        return self._tree(shapes)

    def _tree(self, leaves: Sequence[Any]) -> Any:
        """The whole tree; means out of their Flax boxes, as `scale_by_normuon` does."""
        tree = jax.tree.unflatten(self.treedef, leaves)
        pairs = zip(leaves, self.leaves, strict=True)
        return tree if all(x.shape == y.shape for x, y in pairs) else paths.unbox(tree)

    def _shape(self, index: int, view: Sequence[int]) -> tuple[int, ...]:
        """Shape of a leaf whose view ends in (in, out), or in 1 where it is a mean."""
        axes, shape = self.all_axes[index], list(self.leaves[index].shape)
        for group, size in zip((axes.reduction, axes.output), view[-2:], strict=True):
            if size == 1:
                for axis in group:
                    shape[axis] = 1
        return tuple(shape)

    def specs(self) -> Owned:
        """Every part is divided."""
        spec = PartitionSpec(axis_names(self.axis))
        names = [
            f"{stack.name}/{part}"
            for stack in self.stacks
            for part, there in (("whole", stack.whole), ("extra", any(stack.extra)))
            if there
        ]
        return Owned(dict.fromkeys(names, spec), self)

    def joined(self) -> dict[str, int]:
        """For each part whose matrices are joined, how many make one."""
        return {
            f"{stack.name}/{part}": stack.joined
            for stack in self.stacks
            for part in ("whole", "extra")
            if stack.joined > 1
        }

    def filled(self) -> dict[str, Array]:
        """For each part that only some devices fill, whether this one does."""
        device = jax.lax.axis_index(axis_names(self.axis))
        return {
            f"{stack.name}/extra": jnp.asarray(stack.extra)[device]
            for stack in self.stacks
            if any(stack.extra)
        }


def _work(joined: int, fan: tuple[int, int]) -> int:
    """Work of orthogonalizing (K in, out), in products of m x n with m x m."""
    rows, cols = joined * fan[0], fan[1]
    return min(rows, cols) * rows * cols


def _runs(
    indices: Sequence[int],
    counts: Sequence[int],
    whole: int,
    extra: Sequence[bool],
) -> tuple[Run, ...]:
    """Slots in the order of the devices, filled by the matrices in their order."""
    matrix = iter(
        (block, number)
        for block, count in zip(indices, counts, strict=True)
        for number in range(count)
    )
    slots: list[tuple[int | None, int]] = []
    for more in extra:
        slots += itertools.islice(matrix, whole + more)
        if any(extra) and not more:
            slots.append((None, 0))
    runs: list[Run] = []
    for block, number in slots:
        last = runs[-1] if runs else None
        if last and block is not None and (last.block, last.stop) == (block, number):
            runs[-1] = Run(block, last.start, number + 1)
        else:
            runs.append(Run(block, number, number + 1))
    return tuple(runs)


# --- slices of the leading axis -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowLayout(Layout):
    """Large leaves divided by rows of their leading axis, small ones replicated."""

    divided: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any, axis: AxisName, devices: int, min_size: int) -> "RowLayout":
        """Divide leaves of at least `min_size` elements."""
        leaves, treedef = describe_tree(tree)
        divided = tuple(
            bool(leaf.shape) and math.prod(leaf.shape) >= min_size for leaf in leaves
        )
        return cls(axis, devices, treedef, leaves, divided)

    def _owned(self, arrays: Sequence[Any]) -> Owned:
        names = [leaf.path for leaf in self.leaves]
        return Owned(dict(zip(names, arrays, strict=True)), self)

    def _padded(self, x: Array) -> Array:
        pad = -x.shape[0] % self.devices
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) if pad else x

    def own(self, tree: Any) -> Owned:
        """This device's rows of a replicated tree (parameters, or plain state)."""
        return self._owned(
            [
                self._slice(self._padded(x)) if divided else x
                for x, divided in zip(self.flatten(tree), self.divided, strict=True)
            ]
        )

    def scatter(self, tree: Any, dtype: Any) -> Owned:
        """Rows of the mean: a reduce-scatter each, one all-reduce for what is small."""
        leaves = self.flatten(tree)
        small = [x for x, d in zip(leaves, self.divided, strict=True) if not d]
        means = iter(jax.lax.pmean(small, axis_names(self.axis)) if small else [])
        return self._owned(
            [
                self._mean_scatter(self._padded(x), dtype) if divided else next(means)
                for x, divided in zip(leaves, self.divided, strict=True)
            ]
        )

    def gather(self, owned: Owned, dtype: Any) -> Any:
        """The replicated tree: an all-gather for each divided leaf."""
        arrays = [
            self._all_gather(x, dtype).astype(x.dtype)[: leaf.shape[0]]
            if divided
            else x
            for x, divided, leaf in zip(
                owned.parts.values(), self.divided, self.leaves, strict=True
            )
        ]
        return jax.tree.unflatten(self.treedef, arrays)

    def specs(self) -> Owned:
        """The axis for what is divided."""
        spec = PartitionSpec(axis_names(self.axis))
        return self._owned([spec if d else PartitionSpec() for d in self.divided])

    def plain(self, owned: Owned) -> Any:
        """Shapes and dtypes of the whole tree."""
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, part.dtype)
            for leaf, part in zip(self.leaves, owned.parts.values(), strict=True)
        ]
        return jax.tree.unflatten(self.treedef, shapes)
