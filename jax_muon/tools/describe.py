"""What an optimizer will do with each parameter, observed while it is traced.

`describe` traces `init` and `update` abstractly and collects the facts that transforms
record (`notes.py`). So the result is right for any composition of transforms, and it
always belongs to the optimizer it was given.
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
from jax.sharding import AxisType, PartitionSpec

from jax_muon import checks, notes, paths
from jax_muon.axes import Parameter
from jax_muon.mesh import array_types, owners
from jax_muon.mesh import specs as mesh_specs
from jax_muon.mesh.collectives import ring_bytes
from jax_muon.mesh.on_mesh import abstract_state
from jax_muon.text import aligned, shape_text, sizes_text


@dataclasses.dataclass(frozen=True)
class DescribedParameter:
    """What happens to one parameter.

    Attributes:
      parameter: how it is read: path, shape, dtype, label, role, reason, axes.
      matrices: number of matrices, their inputs and outputs; None if it is not
        orthogonalized.
      joined: how many of its matrices are orthogonalized as one with others.
      scale: factor of `scale_by_shape`, or None.
      state_bytes: size of its optimizer state on one device.
      spec: its sharding on the mesh of `on_mesh`, or in its type; None if neither is
        known.
      state_spec: the sharding of its gradient and state, or None.
      repeated: True if a mesh axis that its gradient is summed over shards no axis of
        its state, so every device of that axis holds all of it.
      residual: dtype of what `keep_residual` keeps for it, "-" if it keeps nothing for
        this dtype; None without `keep_residual`.
    """

    parameter: Parameter
    matrices: tuple[int, int, int] | None
    joined: int
    scale: float | None
    state_bytes: int
    spec: PartitionSpec | None = None
    state_spec: PartitionSpec | None = None
    repeated: bool = False
    residual: str | None = None

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
      pools: sharded matrices of one shape and sharding, and which device computes them.
      sizes: number of devices along each mesh axis; empty on one device.
      summed: mesh axes that gradients are summed over, if known: the batch axes of a
        train step, or `divide` of `on_mesh`.
      orthogonalize_bytes: what a device sends in a step to orthogonalize.
      state_bytes: size of the optimizer's state on one device.
    """

    parameters: tuple[DescribedParameter, ...]
    pools: tuple[owners.Pool, ...]
    sizes: Mapping[str, int]
    summed: tuple[str, ...]
    orthogonalize_bytes: float
    state_bytes: int

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that one device sends in a step.

        "orthogonalize": matrices to their owners and back, padding included, and
        within groups three products for each of five quintics. "gradients": sums over
        `summed`, by reduce-scatter over axes that shard the state and by all-reduce
        over the others. "gathers": all-gathers of updates, or of parameters at the
        start of a step.
        """
        gradients = gathers = 0.0
        for leaf in self.parameters:
            if leaf.state_spec is None:
                continue
            names = mesh_specs.spec_names(leaf.state_spec)
            others = math.prod(self.sizes[n] for n in names if n not in self.summed)
            parts = math.prod(self.sizes[n] for n in names if n in self.summed)
            rest = math.prod(self.sizes[n] for n in self.summed if n not in names)
            size = leaf.bytes // others
            gradients += ring_bytes("reduce-scatter", parts, size)
            gradients += ring_bytes("all-reduce", rest, size // parts)
            gathers += ring_bytes("all-gather", parts, size // parts)
        return {
            "orthogonalize": self.orthogonalize_bytes,
            "gradients": gradients,
            "gathers": gathers,
        }

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over an even share of one device's work."""
        loads = sum(pool.load(self.sizes) for pool in self.pools)
        work = sum(
            pool.count * mesh_specs.devices_over(pool.batch, self.sizes) * pool.flops
            for pool in self.pools
        )
        return float(np.max(loads) * self.devices / work) if work else 1.0

    def __str__(self) -> str:
        """A table of the parameters and, on a mesh, one of the work on each device."""
        header = ("parameter", "shape", "role", "as matrices", "label", "sharding")
        rows: list[tuple[str, ...]] = [(*header, "scale", "state")]
        rows += [_row(leaf, self.sizes) for leaf in self.parameters]
        if not self.sizes:
            rows = [(*row[:5], *row[6:]) for row in rows]
        reasons = ["why", *(leaf.parameter.reason for leaf in self.parameters)]
        table = zip(aligned(rows, numbers=2), reasons, strict=True)
        lines = [f"{row}   {why}".rstrip() for row, why in table]
        elements = [math.prod(leaf.parameter.shape) for leaf in self.parameters]
        in_matrices = sum(math.prod(leaf.matrices or [0]) for leaf in self.parameters)
        lines.append(
            f"{len(elements)} parameters: {sum(elements)} elements, {in_matrices} of "
            f"them in matrices; state {bytes_text(self.state_bytes)}"
        )
        if self.sizes:
            lines[-1] += " on a device"
        lines += _residuals(self.parameters)
        if self.sizes:
            lines += ["", *_work(self)]
        return "\n".join(lines)


def describe(
    tx: optax.GradientTransformation, params: Any, **extra_args: Any
) -> Description:
    """What an optimizer will do with each parameter: a table, and data to assert on.

    Args:
      tx: any composition of this package's recipes and pieces with optax's: `chain`,
        `MultiSteps`, `inject_hyperparams`, `on_mesh`.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      **extra_args: arguments of `tx.update`, such as `max_logits`, or their shapes.

    Returns:
      A `Description`. Printed, it is a table: "role" and "why" say how a parameter was
      read; "as matrices" is batch x (in, out); "scale" multiplies the update; "state"
      is memory on one device. On a mesh "sharding" has the mesh axes of the parameter
      and of its state, and a second table shows which devices compute the matrices and
      how much each sends. The attributes hold the same facts as data.

    Raises:
      ValueError: a leaf that is not an array; whatever `tx` raises at init and update.

    Examples:
      >>> import jax
      >>> import jax_muon as jm
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> found = describe(jm.nanochat(), shapes)
      >>> [x.parameter.label for x in found.parameters]
      ['muon', 'adamw']
      >>> str(found).splitlines()[0]
      'parameter   shape      role        as matrices     label   scale     state   why'
    """
    tx = checks.as_transform("tx", tx)
    checks.arrays("params", params)
    shapes = jax.tree.map(_shape, params)
    arrays, others = array_types.arrays_and_others(extra_args)
    with _mesh_of(shapes), notes.listening() as heard:
        # New functions, since JAX never traces the same one twice.
        state = jax.eval_shape(lambda params: tx.init(params), shapes)
        jax.eval_shape(
            lambda g, s, p, arrays: tx.update(g, s, p, **others, **arrays),
            *(shapes, state, shapes, arrays),
        )
    specs: dict[str, tuple[PartitionSpec, PartitionSpec | None]] = {
        path: (x.sharding.spec, None)
        for path, x in paths.leaves_with_paths(shapes)
        if x.sharding is not None
    }
    sizes, summed, plans = heard["sizes"], (), heard["pools"].values()
    for optimizer, (names, *both) in heard["on_mesh"].items():
        layout = optimizer.layout
        state = abstract_state(tx, shapes, layout.mesh)
        sizes |= layout.mesh.shape
        summed = layout.summed
        specs |= dict(zip(names, zip(*both, strict=True), strict=True))
    joined: dict[str, int] = {}
    for matrices in heard["matrices"].values():
        names = list(matrices)
        for block in sorted(matrices.blocks(names), key=lambda block: block.joined):
            joined |= {names[leaf]: block.joined for leaf in block.leaves}
    read = _rows(shapes, heard["parameters"])
    own_bytes = _bytes_by_path(state, [parameter.path for parameter in read])
    residuals = heard["residual"]

    def described(parameter: Parameter) -> DescribedParameter:
        path = parameter.path
        own, of_state = specs.get(paths.nearest_prefix(specs, path) or "", (None, None))
        names = () if of_state is None else mesh_specs.spec_names(of_state)
        return DescribedParameter(
            parameter,
            parameter.sizes if path in joined else None,
            joined.get(path, 1),
            heard["scale"].get(path),
            own_bytes[path],
            own,
            of_state,
            of_state is not None and bool(summed) and set(summed).isdisjoint(names),
            residuals.get(paths.nearest_prefix(residuals, path)),
        )

    return Description(
        tuple(map(described, read)),
        tuple(itertools.chain(*plans)),
        sizes,
        summed,
        sum(owners.sent_bytes(pools, sizes) for pools in plans),
        sum(map(_bytes_on_a_device, jax.tree.leaves(state))),
    )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding if its type shows that."""
    sharding = array_types.own_sharding(x)
    if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _mesh_of(shapes: Any) -> Any:
    """A context with the mesh whose Explicit axes shard the parameters."""
    found = (x.sharding.mesh for x in jax.tree.leaves(shapes) if x.sharding)
    mesh = next(found, jax.sharding.get_abstract_mesh())
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _rows(shapes: Any, read: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters of a tree as they are read, or the parts of those with splits."""
    rows: dict[str, list[Parameter]] = {}
    leaves = dict(paths.leaves_with_paths(shapes))
    for path, parameter in read.items():
        leaf = paths.nearest_prefix(leaves, path) or ""
        # `keep_residual` shows its optimizer a wider dtype.
        parameter = dataclasses.replace(parameter, dtype=leaves[leaf].dtype)
        rows.setdefault(leaf, []).append(parameter)
    for path, x in leaves.items():
        unread = Parameter(path, tuple(x.shape), x.dtype, "-", "-", "", None)
        rows.setdefault(path, [unread])
    return [parameter for path in leaves for parameter in rows[path]]


def _bytes_by_path(state: Any, names: Sequence[str]) -> dict[str, int]:
    """Bytes of state on a device. A parameter's path ends that of its state.

    Integers without axes are counts of steps. They belong to no parameter, not even to
    one called `count`.
    """
    total = dict.fromkeys(names, 0)
    for path, x in paths.leaves_with_paths(state):
        if not x.shape and jnp.issubdtype(x.dtype, jnp.integer):
            continue
        while path not in total and path:
            path = path.partition("/")[2]
        if path in total:
            total[path] += _bytes_on_a_device(x)
    return total


def _bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


# --- the table ------------------------------------------------------------------------


def _row(leaf: DescribedParameter, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The cells of one parameter."""
    found = leaf.parameter
    joined = f", {leaf.joined} as one" if leaf.joined > 1 else ""
    where, of_state = (sharding_text(x, sizes) for x in (leaf.spec, leaf.state_spec))
    if leaf.state_spec is not None and of_state != where:
        where += f"; state {of_state}"
    return (
        found.path,
        shape_text(found.shape),
        found.role,
        sizes_text(leaf.matrices) + joined,
        found.label,
        where,
        "-" if leaf.scale is None else f"{leaf.scale:.4g}",
        bytes_text(leaf.state_bytes),
    )


def sharding_text(spec: PartitionSpec | None, sizes: Mapping[str, int]) -> str:
    """The mesh axes that shard an array.

    Mesh axes of one device are left out; frameworks name many of them.
    """
    kept = mesh_specs.dividing(spec or PartitionSpec(), sizes)
    names = [",".join(mesh_specs.entry_names(entry)) or "-" for entry in kept]
    return " x ".join(names) if any(n != "-" for n in names) else "whole"


def _residuals(leaves: Sequence[DescribedParameter]) -> list[str]:
    """Which parameters have a residual, if any could have one."""
    without = [leaf.parameter.path for leaf in leaves if leaf.residual == "-"]
    dtypes = [leaf.residual for leaf in leaves if leaf.residual not in (None, "-")]
    lines = (
        [f"parameters with residual in {dtypes[0]}: {len(dtypes)}"] if dtypes else []
    )
    if without:
        lines.append(f"without, not bfloat16 or float16: {', '.join(without)}")
    return lines


def _work(found: Description) -> list[str]:
    """The devices that compute the matrices of each pool, and what a device sends."""
    rows = [("pool", "over", "matrices", "owners", "each")]
    for pool in found.pools:
        different = mesh_specs.devices_over(pool.batch, found.sizes)
        axes = {"batch": pool.batch, "short": pool.short, "long": pool.long}
        over = [f"{what} {', '.join(names)}" for what, names in axes.items() if names]
        who = f"{len(pool.counts) * different}" if pool.counts else "all"
        who += f" groups of {pool.group}" if pool.group > 1 else ""
        least, most = (f(pool.counts or [pool.count]) for f in (min, max))
        word = "or" if most == least + 1 else "to"
        rows.append(
            (
                f"{pool.fan[0]}x{pool.fan[1]}_{np.dtype(pool.dtype).name}",
                "; ".join(over) or "-",
                f"{pool.count * different}",
                who,
                f"{least}" if least == most else f"{least} {word} {most}",
            )
        )
    sent = {what: bytes_text(int(size)) for what, size in found.sent_bytes.items()}
    work = f"the busiest does {found.imbalance:.2f} of an even share of the work"
    if found.imbalance > 1 and not any(pool.counts for pool in found.pools):
        work = "matrices too small for owners, computed by all that hold them"
    lines = aligned(rows, numbers=1) if found.pools else []
    lines.append(
        f"{found.devices} devices: {work}; each sends {sent['orthogonalize']} a step "
        "to orthogonalize"
    )
    if found.summed:
        repeated = [leaf.bytes for leaf in found.parameters if leaf.repeated]
        lines.append(
            f"summed over {', '.join(found.summed)}: {sent['gradients']} for "
            f"gradients, {sent['gathers']} for gathers; {len(repeated)} parameters of "
            f"{bytes_text(sum(repeated))} are repeated"
        )
    return lines


def bytes_text(count: int) -> str:
    """A number of bytes to read, such as 1.2 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
