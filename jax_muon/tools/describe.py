"""What an optimizer will do with each parameter, observed while it is traced.

`describe` traces `init` and `update` abstractly and collects the facts that transforms
record (`notes.py`). So the result is right for any composition of transforms, and it
always belongs to the optimizer it was given.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jax_muon.mesh.collectives import Collective, members_over
from jax_muon.mesh.layout import Hop
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
      transfers: what a device takes part in during a step, for what, and of which
        parameter, or "": see `sent_bytes`.
      devices_per_host: how many neighbours on the mesh share a host.
      state_bytes: size of the optimizer's state on one device.
    """

    parameters: tuple[DescribedParameter, ...]
    pools: tuple[owners.Pool, ...]
    sizes: Mapping[str, int]
    summed: tuple[str, ...]
    transfers: tuple[tuple[str, str, Collective], ...]
    devices_per_host: int
    state_bytes: int

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes on one device: those parts of the peak of a step that are known.

        "gradients" counts those of all parameters, sharded like the state.
        """

        def held(leaf: DescribedParameter, spec: PartitionSpec | None) -> int:
            names = mesh_specs.spec_names(spec or PartitionSpec())
            return leaf.bytes // math.prod(self.sizes.get(name, 1) for name in names)

        leaves = self.parameters
        return {
            "parameters": sum(held(x, x.spec) for x in leaves),
            "gradients": sum(held(x, x.state_spec or x.spec) for x in leaves),
            "state": self.state_bytes,
        }

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that one device sends in a step.

        "orthogonalize": matrices to their owners and back, padding included, and
        within teams three products for each of five quintics. "gradients": sums over
        `summed`, by reduce-scatter over axes that shard the state and by all-reduce
        over the others. "gathers": all-gathers of updates, or of parameters at the
        start of a step. A train step that takes scanned layers one at a time gathers
        them in the forward and the backward pass of each microbatch.
        """
        return self._bytes(lambda transfer: transfer.sent_bytes)

    @property
    def bytes_between_hosts(self) -> dict[str, float]:
        """Those of `sent_bytes` that a device sends to other hosts."""
        return self._bytes(lambda x: x.bytes_between_hosts(self.devices_per_host))

    def _bytes(self, count: Callable[[Collective], float]) -> dict[str, float]:
        total = dict.fromkeys(("orthogonalize", "gradients", "gathers"), 0.0)
        for what, _, transfer in self.transfers:
            total[what] += count(transfer)
        return total

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over an even share of one device's work."""
        even = sum(map(self._even_share, self.pools))
        return 1 + sum(self.excess.values()) / even if even else 1.0

    @property
    def excess(self) -> dict[owners.Pool, float]:
        """FLOPs of the busiest device beyond an even share of each pool's work."""
        loads = {pool: pool.load(self.sizes).ravel() for pool in self.pools}
        busiest = int(np.argmax(sum(loads.values()))) if loads else 0
        return {
            pool: float(load[busiest]) - self._even_share(pool)
            for pool, load in loads.items()
        }

    def _even_share(self, pool: owners.Pool) -> float:
        different = mesh_specs.devices_over(pool.batch_axes, self.sizes)
        return pool.on_device * different * pool.flops / self.devices

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
            f"them in matrices; "
            + ", ".join(f"{k} {bytes_text(n)}" for k, n in self.held_bytes.items())
        )
        if self.sizes:
            lines[-1] += " on a device"
        lines += _residuals(self.parameters)
        if self.sizes:
            lines += ["", *_work(self)]
        return "\n".join(lines)


def describe(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    devices_per_host: int = owners.DEVICES_PER_HOST,
    **extra_args: Any,
) -> Description:
    """What an optimizer will do with each parameter: a table, and data to assert on.

    Args:
      tx: any composition of this package's recipes and pieces with optax's: `chain`,
        `MultiSteps`, `inject_hyperparams`, `on_mesh`.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      devices_per_host: how many neighbours on the mesh share a host, or whatever else
        has faster links inside, such as a pod; for the bytes between hosts.
      **extra_args: arguments of `tx.update`, such as `max_logits`, or their shapes.

    Returns:
      A `Description`. Printed, it is a table: "role" and "why" say how a parameter was
      read; "as matrices" is batch x (in, out); "scale" multiplies the update; "state"
      is memory on one device. On a mesh "sharding" has the mesh axes of the parameter
      and of its state, and a second table shows which devices compute the matrices,
      how much each sends, also between hosts, and what costs most. The attributes hold
      the same facts as data.

    Raises:
      ValueError: a leaf that is not an array; whatever `tx` raises at init and update.

    Examples:
      >>> import jax
      >>> import jax_muon as jm
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> plan = describe(jm.nanochat(), shapes)
      >>> [x.parameter.label for x in plan.parameters]
      ['muon', 'adamw']
      >>> str(plan).splitlines()[0]
      'parameter   shape      role        as matrices     label   scale     state   why'
    """
    tx = checks.as_transform("tx", tx)
    checks.arrays("params", params)
    checks.count("devices_per_host", devices_per_host)
    shapes = jax.tree.map(_shape, params)
    arrays, others = array_types.arrays_and_others(extra_args)

    def first_step(params: Any, arrays: Any) -> Any:
        state = tx.init(params)
        tx.update(params, state, params, **others, **arrays)
        return state

    with _mesh_of(shapes):
        state, heard = notes.traced(first_step, shapes, arrays)
    specs: dict[str, tuple[PartitionSpec, PartitionSpec | None]] = {
        path: (x.sharding.spec, None)
        for path, x in paths.leaves_with_paths(shapes)
        if x.sharding is not None
    }
    sizes, plans = heard["sizes"], heard["pools"].values()
    hops: tuple[Hop, ...] = ()
    first_hops: dict[str, tuple[Hop, ...]] = {}  # of parameters
    for optimizer, (names, *both) in heard["on_mesh"].items():
        layout = optimizer.layout
        state = abstract_state(tx, shapes, layout.mesh)
        sizes |= layout.mesh.shape
        hops = layout.hops
        specs |= dict(zip(names, zip(*both, strict=True), strict=True))
        layers = layout.scanned_axes(shapes)
        first_hops |= {
            name: layout.layer_hops if layers.get(name) else hops for name in names
        }
    summed = tuple(name for hop in hops for name in hop.axes)
    joined: dict[str, int] = {}
    for matrices in heard["matrices"].values():
        names = list(matrices)
        for block in sorted(matrices.blocks(names), key=lambda block: block.joined):
            joined |= {names[leaf]: block.joined for leaf in block.leaves}
    read = _rows(shapes, heard["parameters"])
    state_bytes = _bytes_by_path(state, [parameter.path for parameter in read])
    residuals = heard["residual"]

    def described(parameter: Parameter) -> DescribedParameter:
        path = parameter.path
        of_param, of_state = specs.get(
            paths.nearest_prefix(specs, path) or "", (None, None)
        )
        names = () if of_state is None else mesh_specs.spec_names(of_state)
        return DescribedParameter(
            parameter,
            parameter.sizes if path in joined else None,
            joined.get(path, 1),
            heard["scale"].get(path),
            state_bytes[path],
            of_param,
            of_state,
            of_state is not None and bool(summed) and set(summed).isdisjoint(names),
            residuals.get(paths.nearest_prefix(residuals, path)),
        )

    leaves = tuple(map(described, read))
    sent = [
        ("orthogonalize", "", transfer)
        for pools in plans
        for transfer in owners.transfers(pools, sizes)
    ]
    for leaf in leaves:
        path = leaf.parameter.path
        first = first_hops.get(paths.nearest_prefix(first_hops, path) or "", hops)
        sent += [(what, path, x) for what, x in _transfers(leaf, sizes, hops, first)]
    return Description(
        leaves,
        tuple(itertools.chain(*plans)),
        sizes,
        summed,
        tuple(sent),
        devices_per_host,
        sum(map(_bytes_on_a_device, jax.tree.leaves(state))),
    )


def _transfers(
    leaf: DescribedParameter,
    sizes: Mapping[str, int],
    hops: Sequence[Hop],
    first: Sequence[Hop],
) -> Iterator[tuple[str, Collective]]:
    """Gathers of a parameter and of its update, and sums of its gradient.

    By the hops `first` along the axes that shard the parameter, and then along those
    that shard only its state. Unless it has layers, its gradient is summed over both at
    once.
    """
    if leaf.spec is None or leaf.state_spec is None:
        return
    of_param, names = (
        set(mesh_specs.spec_names(x)) for x in (leaf.spec, leaf.state_spec)
    )
    summed = {name for hop in hops for name in hop.axes}
    size = leaf.bytes // math.prod(sizes[n] for n in names - summed)
    in_turn = ((first, of_param), (hops, names - of_param))
    at_once, spec = ((hops, names),), tuple(leaf.state_spec)

    def rings(parts: Any) -> Iterator[tuple[Hop, Any, int]]:
        """How often, over which devices, and bytes of the shard that they divide."""
        shard = size
        for some, along in parts:
            for hop, entry in itertools.product(some, spec):
                axes = {*mesh_specs.entry_names(entry)} & {*hop.axes} & along
                members = members_over(axes, sizes)
                yield hop, members, shard
                shard //= len(members)

    for hop, members, shard in rings(in_turn):
        gather = Collective("all-gather", members, shard // len(members))
        yield from hop.gathers * [("gathers", gather)]
    for hop, members, shard in rings(at_once if first is hops else in_turn):
        yield from hop.sums * [
            ("gradients", Collective("reduce-scatter", members, shard))
        ]
    left = size // math.prod(sizes[n] for n in names & summed)
    rest = Collective("all-reduce", members_over(summed - names, sizes), left)
    yield from hops[0].sums * [("gradients", rest)]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding if its type shows that."""
    sharding = array_types.own_sharding(x)
    if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _mesh_of(shapes: Any) -> Any:
    """A context with the mesh whose Explicit axes shard the parameters."""
    meshes = (x.sharding.mesh for x in jax.tree.leaves(shapes) if x.sharding)
    mesh = next(meshes, jax.sharding.get_abstract_mesh())
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
    parameter = leaf.parameter
    joined = f", {leaf.joined} as one" if leaf.joined > 1 else ""
    where, of_state = (sharding_text(x, sizes) for x in (leaf.spec, leaf.state_spec))
    if leaf.state_spec is not None and of_state != where:
        where += f"; state {of_state}"
    return (
        parameter.path,
        shape_text(parameter.shape),
        parameter.role,
        sizes_text(leaf.matrices) + joined,
        parameter.label,
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


def _work(plan: Description) -> list[str]:
    """The devices that compute the matrices of each pool, and what a device sends."""
    rows = [("pool", "over", "matrices", "owners", "each")]
    for pool in plan.pools:
        different = mesh_specs.devices_over(pool.batch_axes, plan.sizes)
        axes = {
            "batch": pool.batch_axes,
            "short": pool.short_axes,
            "long": pool.long_axes,
        }
        over = [f"{what} {', '.join(names)}" for what, names in axes.items() if names]
        who = f"{len(pool.counts) * different}" if pool.counts else "all"
        who += f" teams of {pool.team}" if pool.team > 1 else ""
        least, most = (f(pool.counts or [pool.on_device]) for f in (min, max))
        word = "or" if most == least + 1 else "to"
        rows.append(
            (
                _name(pool),
                "; ".join(over) or "-",
                f"{pool.on_device * different}",
                who,
                f"{least}" if least == most else f"{least} {word} {most}",
            )
        )
    sent, between = (
        {what: bytes_text(int(size)) for what, size in sizes.items()}
        for sizes in (plan.sent_bytes, plan.bytes_between_hosts)
    )
    work = f"the busiest does {plan.imbalance:.2f} of an even share of the work"
    if plan.imbalance > 1 and not any(pool.counts for pool in plan.pools):
        work = "matrices too small for owners, computed by all that hold them"
    elif plan.imbalance > 1.05:
        work += _why_uneven(max(plan.excess, key=lambda pool: plan.excess[pool]))
    lines = aligned(rows, numbers=1) if plan.pools else []
    lines.append(
        f"{plan.devices} devices: {work}; each sends {sent['orthogonalize']} a step "
        "to orthogonalize"
    )
    if plan.summed:
        repeated = [leaf for leaf in plan.parameters if leaf.repeated]
        largest = max(repeated, key=lambda leaf: leaf.bytes, default=None)
        lines.append(
            f"summed over {', '.join(plan.summed)}: {sent['gradients']} for "
            f"gradients, {sent['gathers']} for gathers; {len(repeated)} parameters of "
            f"{bytes_text(sum(leaf.bytes for leaf in repeated))} are repeated"
            + (f", above all {largest.parameter.path}" if largest else "")
        )
    if plan.devices > plan.devices_per_host:
        by_leaf: dict[str, float] = {}
        for _, path, transfer in plan.transfers:
            crossing = transfer.bytes_between_hosts(plan.devices_per_host)
            by_leaf[path] = by_leaf.get(path, 0) + crossing
        path = max(by_leaf, key=lambda path: by_leaf[path], default="")
        lines.append(
            f"between hosts of {plan.devices_per_host}: {between['orthogonalize']} to "
            f"orthogonalize, {between['gradients']} for gradients, "
            f"{between['gathers']} for gathers; most for "
            f"{path or 'orthogonalization'}"
        )
    return lines


def _name(pool: owners.Pool) -> str:
    return f"{pool.shape[0]}x{pool.shape[1]}_{np.dtype(pool.dtype).name}"


def _why_uneven(pool: owners.Pool) -> str:
    """Why a device computes more of a pool than an even share."""
    if not pool.counts:
        return f", since all that hold {_name(pool)} compute it"
    zeros = sum(pool.counts) - pool.on_device
    filled = f", filled up with {zeros} of zeros" if zeros else ""
    return (
        f", since {len(pool.counts)} owners have {pool.on_device} {_name(pool)}{filled}"
    )


def bytes_text(count: int) -> str:
    """A number of bytes to read, such as 1.2 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
