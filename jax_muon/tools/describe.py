"""What an optimizer will do with each parameter: a table, and data to assert on.

`describe` traces `init` and `update` abstractly and collects the facts that transforms
record (`base/facts.py`). So the result is right for any composition of transforms.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jax_muon.base import array_types, checks, facts, specs, trees
from jax_muon.base.tables import aligned, shape_text, sizes_text
from jax_muon.matrices.as_matrices import Read
from jax_muon.matrices.matrices import MUON, Parameter
from jax_muon.mesh.on_mesh import OnMesh, OnMeshes, trace_init
from jax_muon.mesh.stacks import Round, Stack
from jax_muon.mesh.train_step import TrainStep
from jax_muon.polar.factors import Kernels
from jax_muon.tools import work
from jax_muon.transforms.keep_residual import Residuals
from jax_muon.transforms.orthogonalize import Orthogonalized
from jax_muon.transforms.scaling import Scales


@dataclasses.dataclass(frozen=True)
class DescribedParameter:
    """What happens to one parameter.

    Attributes:
      parameter: how it is read.
      matrices: number of matrices, their inputs and outputs, if orthogonalized.
      joined: number of matrices that are orthogonalized as one.
      scale: factor of `scale_by_shape`, or None.
      state_bytes: size of its optimizer state on one device.
      spec: its sharding on the mesh of `on_mesh`, or in its type, or None.
      state_spec: the sharding of its gradient and state, or None.
      residual: dtype of the residual that `keep_residual` keeps for it, or None.
      by_layer: of a sharded parameter in a train step: True if `scan_layers` gathers it
        a layer at a time, False if it is gathered whole before the loss; or None.
      gathered: True if `as_matrices` gathers it, since it is sharded along an axis
        that becomes one with others, such as the 64 of heads (12, 64). `sent_bytes`
        does not count that.
    """

    parameter: Parameter
    matrices: tuple[int, int, int] | None
    joined: int
    scale: float | None
    state_bytes: int
    spec: PartitionSpec | None
    state_spec: PartitionSpec | None
    residual: str | None
    by_layer: bool | None = None
    gathered: bool = False

    @property
    def bytes(self) -> int:
        """Size of the whole parameter."""
        dtype = np.dtype(self.parameter.dtype)
        return math.prod(self.parameter.shape) * dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Description:
    """What an optimizer does with a tree of parameters. `print` shows it as a table.

    Attributes:
      parameters: one entry per parameter, in the order of the tree.
      stacks: matrices of one shape and sharding, and who computes them.
      rounds: which devices get which of these; what they compute everywhere is in none.
      sizes: number of devices along each mesh axis; empty on one device.
      held_bytes: on one device, "parameters", "gradients" and "state", with all
        gradients at once, sharded like the state.
      sent_bytes: bytes that one device sends per step, by purpose. "orthogonalize":
        matrices to the devices that compute them and back, with padding;
        "gradients": their sums; "gathers": updates, or parameters at the start of a
        step. Layers of `scan_layers` are counted once although they are gathered twice.
        In plain jit the last two are over `divide` alone: the rest is the loss's.
      unsharded_state: paths of state that every device has whole, although parameters
        of its size are divided: `init` shows no sharding, as jnp.zeros(p.shape).
      kernels: shapes (m, n), m <= n, whose polar factors take kernels for Hopper GPUs.
    """

    parameters: tuple[DescribedParameter, ...]
    stacks: tuple[Stack, ...]
    rounds: tuple[Round, ...]
    sizes: Mapping[str, int]
    held_bytes: Mapping[str, int]
    sent_bytes: Mapping[str, float]
    unsharded_state: tuple[str, ...]
    kernels: tuple[tuple[int, int], ...]

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over an even share of one device's work."""
        parts: tuple[Stack | Round, ...] = *self.stacks, *self.rounds
        busy = sum(work.load(x, self.sizes) for x in parts)
        total = sum(work.matrices(x, self.sizes) * x.flops for x in self.stacks)
        devices = math.prod(self.sizes.values())
        return float(np.max(busy)) * devices / total if total else 1.0

    def __str__(self) -> str:
        """A table of the parameters and, on a mesh, one of the work on each device."""
        read = ["parameter", "shape", "role", "as matrices", "label"]
        rows = [[*read, "sharding", "scale", "state"]]
        rows += [_row(leaf, self.sizes) for leaf in self.parameters]
        if not self.sizes:
            rows = [[*row[:5], *row[6:]] for row in rows]
        reasons = ["why", *(x.parameter.reason for x in self.parameters)]
        table = zip(aligned(rows, numbers=2), reasons, strict=True)
        lines = [f"{row}   {why}".rstrip() for row, why in table]
        elements = [math.prod(leaf.parameter.shape) for leaf in self.parameters]
        in_matrices = sum(math.prod(leaf.matrices or [0]) for leaf in self.parameters)
        lines.append(
            f"{len(elements)} parameters: {sum(elements)} elements, {in_matrices} of "
            f"them in matrices; {_bytes_text(self.held_bytes)}"
            + (" on a device" if self.sizes else "")
        )
        if self.kernels:
            shapes = ", ".join(shape_text(shape) for shape in self.kernels)
            lines.append(f"polar factors by kernels for Hopper GPUs: {shapes}")
        gathered = [x.parameter.path for x in self.parameters if x.gathered]
        if gathered:
            lines.append(
                f"gathered, since an axis is sharded that becomes one with others: "
                f"{', '.join(gathered)}; use jax_muon.fsdp, or another sharding"
            )
        residuals = {leaf.residual for leaf in self.parameters} - {None}
        if residuals:
            without = [x.parameter.path for x in self.parameters if not x.residual]
            lines.append(
                f"residuals in {', '.join(map(str, residuals))}; without, not bfloat16 "
                f"or float16: {', '.join(without) or 'none'}"
            )
        by_layer = [x.parameter.path for x in self.parameters if x.by_layer]
        whole = [x for x in self.parameters if x.by_layer is False]
        if by_layer:
            names = ", ".join(x.parameter.path for x in whole) or "none"
            lines.append(
                f"gathered a layer at a time: {', '.join(by_layer)}; whole, before the "
                f"loss: {names}"
            )
        elif whole:
            size = _bytes(sum(x.bytes for x in whole))
            lines.append(
                f"gathered whole, before the loss: {size} in {len(whole)} parameters"
            )
        return "\n".join([*lines, "", *self._work()] if self.sizes else lines)

    def _work(self) -> list[str]:
        """Which devices compute the matrices of each stack, and the bytes they send."""
        devices = math.prod(self.sizes.values())
        rows = [["stack", "over", "matrices", "devices", "each"]]
        rows += [_stack_row(stack, self.sizes) for stack in self.stacks]
        lines = aligned(rows, numbers=1) if self.stacks else []
        lines.append(
            f"{devices} devices: the busiest does {self.imbalance:.2f} of an even "
            "share of the work"
        )
        in_loss = any(
            leaf.by_layer is None and sharding_text(leaf.spec, self.sizes) != "whole"
            for leaf in self.parameters
        )
        beside = ", beside what the loss sends" if in_loss else ""
        lines.append(f"each sends in a step{beside}: {_bytes_text(self.sent_bytes)}")
        if self.unsharded_state:
            paths = ", ".join(self.unsharded_state)
            lines.append(f"whole on every device, as init shows no sharding: {paths}")
        return lines


def describe(
    tx: optax.GradientTransformation | TrainStep,
    params: Any,
    *batch: Any,
    **extra_args: Any,
) -> Description:
    """What an optimizer will do with each parameter: a table, and data to assert on.

    Args:
      tx: any optimizer, in `on_mesh` or not; or what `make_train_step` returns.
      params: the model as in `find_matrices`, or shapes (`jax.ShapeDtypeStruct`).
      *batch: for a train step, its batch and others, or their shapes, which show what
        the step gathers a layer at a time, and what whole.
      **extra_args: arguments of `tx.update`, such as `max_logits`, or their shapes.

    Returns:
      A `Description`: its attributes are data, and printed it is a table. "as matrices"
      is batch x (in, out); "scale" multiplies the update; "state" is memory on one
      device. On a mesh "sharding" has the mesh axes of the parameter and of its state,
      and a second table shows which devices compute the matrices, and how much each
      sends.

    Examples:
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> tx = jm.nanochat(
      ...     0.02, adamw=jm.adamw(3e-3), matrices={"wte": "adamw", "up": "muon"}
      ... )
      >>> found = describe(tx, shapes)
      >>> [x.parameter.label for x in found.parameters]
      ['muon', 'adamw']
    """
    step, tx = tx, tx.tx if isinstance(tx, TrainStep) else tx
    tx = checks.as_transform("tx", tx)
    params = checks.as_arrays("params", checks.trained(params))
    if isinstance(tx, OnMesh):
        tx.optimizer.place(params)  # refuses shapes that do not show where
    gathers = _gathers(step, params, batch)
    shapes = jax.tree.map(_shape, params)
    arrays, others = array_types.arrays_and_others(extra_args)

    def first_step(params: Any, arrays: Any) -> Any:
        state = tx.init(params)
        tx.update(params, state, params, **others, **arrays)
        return state

    state, recorded = facts.eval_shape(first_step, shapes, arrays)
    orthogonalized = recorded[Orthogonalized]
    layout = _layout(shapes, recorded, gathers)
    for placed, _ in recorded[OnMeshes]:  # one, perhaps inside of a chain
        before = dataclasses.replace(placed, state_specs=placed.param_specs)
        state = trace_init(tx, shapes, before).on(placed.mesh)
    read, sizes = _rows(shapes, recorded[Read].parts), layout.sizes
    state_bytes = _bytes_by_path(state, read)
    entries = [_described(x, state_bytes[x.path], layout, recorded) for x in read]
    stacks = tuple(itertools.chain(*orthogonalized.stacks.values()))
    rounds = tuple(itertools.chain(*orthogonalized.rounds.values()))
    parts: tuple[Stack | Round, ...] = *stacks, *rounds
    sent = {"orthogonalize": sum(work.sent_bytes(x, sizes) for x in parts)}
    sent |= {"gradients": 0.0, "gathers": 0.0}
    for leaf in entries:
        if leaf.spec is not None and leaf.state_spec is not None:
            _count(sent, leaf, layout.summed, sizes)

    def held(leaf: DescribedParameter, spec: PartitionSpec | None) -> int:
        names = specs.spec_names(spec or PartitionSpec())
        return leaf.bytes // math.prod(sizes.get(name, 1) for name in names)

    return Description(
        tuple(entries),
        stacks,
        rounds,
        sizes,
        {
            "parameters": sum(held(x, x.spec) for x in entries),
            "gradients": sum(held(x, x.state_spec or x.spec) for x in entries),
            "state": sum(map(_bytes_on_a_device, jax.tree.leaves(state))),
        },
        sent,
        tuple(x for _, known in recorded[OnMeshes] for x in known.whole),
        tuple(sorted(shape for shape, taken in recorded[Kernels].items() if taken)),
    )


# --- parameters and their layout ------------------------------------------------------


@dataclasses.dataclass
class _Layout:
    """How the parameters of a tree are sharded, by path."""

    sizes: Mapping[str, int]  # of the axes of the mesh
    specs: Mapping[str, tuple[PartitionSpec, PartitionSpec | None]]  # also of its state
    by_layer: Mapping[str, bool | None]
    summed: set[str]  # the axes over which gradients are summed


def _gathers(step: Any, params: Any, batch: Sequence[Any]) -> list[bool | None]:
    """Of each parameter of a train step, `DescribedParameter.by_layer`."""
    if not isinstance(step, TrainStep):
        if batch:
            expected = "none, unless tx is a step of make_train_step"
            checks.refuse("batch", batch, expected)
        return []
    if not batch:
        checks.refuse("batch", batch, "the batch and others of the step, or shapes")
    found = step.gathers(params, *batch)
    marks = zip(found.marks, found.param_specs, strict=True)
    return [mark is not None if any(spec) else None for mark, spec in marks]


def _layout(
    shapes: Any, recorded: facts.Facts, gathers: Sequence[bool | None]
) -> _Layout:
    """As the types of parameters show it, or `on_mesh`."""
    flat = trees.leaves_with_paths(shapes)
    shown = {path: (x.sharding.spec, None) for path, x in flat if x.sharding}
    layout = _Layout(recorded[Orthogonalized].sizes, shown, {}, set())
    for placed, _ in recorded[OnMeshes]:
        layout.sizes = {**layout.sizes, **placed.mesh.shape}
        both = zip(placed.param_specs, placed.state_specs, strict=True)
        layout.specs = {**layout.specs, **dict(zip(placed.paths, both, strict=True))}
        layout.by_layer = dict(zip(placed.paths, gathers, strict=False))
        layout.summed = {*(placed.mesh.axis_names if gathers else placed.divide)}
    return layout


def _described(
    parameter: Parameter, state_bytes: int, layout: _Layout, recorded: facts.Facts
) -> DescribedParameter:
    """What happens to a parameter, or to a part of one with a split."""
    path, joined = parameter.path, recorded[Orthogonalized].joined
    residuals = recorded[Residuals]
    if joined and path not in joined and parameter.label == MUON:
        # A matrix, which `optax.multi_transform` gives to another transform.
        parameter = dataclasses.replace(parameter, label="-")
    leaf = trees.nearest_prefix(layout.specs, path) or ""
    spec, state_spec = layout.specs.get(leaf, (None, None))
    whole, divided = recorded[Read].leaves.get(leaf), state_spec or spec
    minor = whole.axes.minor if whole and whole.axes and path in joined else ()
    kept = specs.dividing(divided or PartitionSpec(), layout.sizes)
    return DescribedParameter(
        parameter,
        parameter.sizes if path in joined else None,
        joined.get(path, 1),
        recorded[Scales].get(path),
        state_bytes,
        spec,
        state_spec,
        residuals.get(trees.nearest_prefix(residuals, path) or ""),
        layout.by_layer.get(trees.nearest_prefix(layout.by_layer, path) or ""),
        any(axis < len(kept) and kept[axis] for axis in minor),
    )


def _count(
    sent: dict[str, float], leaf: DescribedParameter, summed: set[str], sizes: Any
) -> None:
    """Add the gathers of a parameter and of its update, and the sum of its gradient.

    Of these axes alone, in rings: along several, one after another.
    """
    names = {*specs.spec_names(leaf.state_spec or PartitionSpec())}
    outside = specs.devices_over(tuple(names - summed), sizes)
    whole = leaf.bytes / outside
    shards = specs.devices_over(tuple(names & summed), sizes)
    repeats = specs.devices_over(tuple(summed - names), sizes)
    over_shards = whole - whole / shards
    sent["gathers"] += over_shards
    sent["gradients"] += over_shards + 2 * (1 - 1 / repeats) * whole / shards


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding if its type shows that."""
    sharding = jax.typeof(x).sharding if array_types.is_explicit(x) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _rows(shapes: Any, read: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters of a tree as they are read, or the parts of those with splits."""
    rows: dict[str, list[Parameter]] = {}
    leaves = dict(trees.leaves_with_paths(shapes))
    for path, parameter in read.items():
        leaf = trees.nearest_prefix(leaves, path)
        if leaf is None:  # of a larger tree
            continue
        # `keep_residual` shows its optimizer a wider dtype.
        parameter = dataclasses.replace(parameter, dtype=leaves[leaf].dtype)
        rows.setdefault(leaf, []).append(parameter)
    for path, x in leaves.items():
        unread = Parameter(path, tuple(x.shape), x.dtype, "-", "-", "", None)
        rows.setdefault(path, [unread])
    return [parameter for path in leaves for parameter in rows[path]]


def _bytes_by_path(state: Any, read: Sequence[Parameter]) -> dict[str, int]:
    """Bytes of state on a device, by the parameter's path, which ends the state's.

    Momentum of a whole parameter counts for its parts, by their numbers of elements.
    """
    total = {x.path: 0 for x in read}
    parts: dict[str, list[Parameter]] = {}
    for x in read:
        names = x.path.split("/")
        for end in range(1, len(names) + 1):
            parts.setdefault("/".join(names[:end]), []).append(x)
    for path, x in trees.leaves_with_paths(state):
        if not x.shape and jnp.issubdtype(x.dtype, jnp.integer):
            continue  # a count of steps, also if a parameter is called `count`
        while path not in parts and path:
            path = path.partition("/")[2]
        elements = [math.prod(part.shape) for part in parts.get(path, ())]
        for part, number in zip(parts.get(path, ()), elements, strict=True):
            share = number / max(sum(elements), 1)
            total[part.path] += round(_bytes_on_a_device(x) * share)
    return total


def _bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


# --- cells of the tables --------------------------------------------------------------


def _row(leaf: DescribedParameter, sizes: Mapping[str, int]) -> list[str]:
    """The cells of one parameter."""
    parameter = leaf.parameter
    joined = f", {leaf.joined} as one" if leaf.joined > 1 else ""
    where, state_text = (sharding_text(x, sizes) for x in (leaf.spec, leaf.state_spec))
    if leaf.state_spec is not None and state_text != where:
        where += f"; state {state_text}"
    shape, matrices = shape_text(parameter.shape), sizes_text(leaf.matrices) + joined
    scale = "-" if leaf.scale is None else f"{leaf.scale:.4g}"
    read = [parameter.path, shape, parameter.role, matrices, parameter.label]
    return [*read, where, scale, _bytes(leaf.state_bytes)]


def _stack_row(stack: Stack, sizes: Mapping[str, int]) -> list[str]:
    """The cells of one stack."""
    different = specs.devices_over(stack.shards.batch, sizes)
    axes = {what: getattr(stack.shards, what) for what in ("batch", "rows", "columns")}
    over = [f"{what} {', '.join(names)}" for what, names in axes.items() if names]
    devices = "all" if stack.everywhere else f"{stack.devices * different}"
    least, most = stack.count // stack.devices, -(-stack.count // stack.devices)
    least, most = (stack.count,) * 2 if stack.everywhere else (least, most)
    each = f"{least}" if least == most else f"{least} or {most}"
    name = f"{stack.shape[0]}x{stack.shape[1]}_{np.dtype(stack.shards.dtype).name}"
    return [name, "; ".join(over) or "-", f"{stack.count * different}", devices, each]


def sharding_text(spec: PartitionSpec | None, sizes: Mapping[str, int]) -> str:
    """The mesh axes of several devices that shard an array."""
    kept = specs.dividing(spec or PartitionSpec(), sizes)
    names = [",".join(specs.entry_names(entry)) or "-" for entry in kept]
    return " x ".join(names) if any(n != "-" for n in names) else "whole"


def _bytes(count: int) -> str:
    """A number of bytes to read, such as 1.2 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _bytes_text(sizes: Mapping[str, float]) -> str:
    """Sizes with their names, such as `parameters 1.2 MB, state 300 B`."""
    return ", ".join(f"{what} {_bytes(int(size))}" for what, size in sizes.items())
