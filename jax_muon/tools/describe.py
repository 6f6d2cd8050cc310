"""What an optimizer will do with each parameter, observed while it is traced.

`describe` traces `init` and `update` abstractly and collects the facts that transforms
record (`notes.py`). So the result is right for any composition of transforms, and it
always belongs to the optimizer it was given.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jax_muon import checks, notes, paths
from jax_muon.matrices import Parameter, aligned, shape_text, sizes_text
from jax_muon.mesh import array_types
from jax_muon.mesh import specs as mesh_specs
from jax_muon.mesh.collectives import Collective, collectives, ring_bytes
from jax_muon.mesh.owners import Pool, flops_of, product


@dataclasses.dataclass(frozen=True)
class DescribedParameter:
    """What happens to one parameter.

    Attributes:
      parameter: how it is read: path, shape, dtype, label, role, reason, axes.
      matrices: number of matrices, their inputs and outputs; None if it is not
        orthogonalized.
      joined: how many of its matrices are orthogonalized as one with others.
      scale: factor of `scale_by_shape`, or None.
      state_bytes: size of its optimizer state on one device; None if unknown.
      spec: its sharding on the mesh of `on_mesh`, or in its type; None if neither is
        known.
      state_spec: the sharding of its gradient and state, or None.
      repeated: True if a mesh axis that its gradient is summed over shards no axis of
        its state, so every device of that axis holds all of it.
    """

    parameter: Parameter
    matrices: tuple[int, int, int] | None
    joined: int
    scale: float | None
    state_bytes: int | None
    spec: PartitionSpec | None = None
    state_spec: PartitionSpec | None = None
    repeated: bool = False

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
      collectives: what `update` sends to orthogonalize, in order.
      state_bytes: size of the optimizer's state on one device.
    """

    parameters: tuple[DescribedParameter, ...]
    pools: tuple[Pool, ...]
    sizes: Mapping[str, int]
    summed: tuple[str, ...]
    collectives: tuple[Collective, ...]
    state_bytes: int

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that one device sends in a step.

        "orthogonalize": matrices to their owners and back; "gradients": sums over
        `summed`, by reduce-scatter over axes that shard the state and by all-reduce
        over the others; "gathers": all-gathers of updates, or of parameters at the
        start of a step.
        """
        sent = {"orthogonalize": sum(c.sent_bytes for c in self.collectives)}
        gradients = gathers = 0.0
        for leaf in self.parameters:
            if leaf.state_spec is None or not self.summed:
                continue
            names = mesh_specs.spec_names(leaf.state_spec)
            others = math.prod(self.sizes[n] for n in names if n not in self.summed)
            parts = math.prod(self.sizes[n] for n in names if n in self.summed)
            rest = math.prod(self.sizes[n] for n in self.summed if n not in names)
            size = leaf.bytes // others
            gradients += ring_bytes("reduce-scatter", parts, size)
            gradients += ring_bytes("all-reduce", rest, size // parts)
            gathers += ring_bytes("all-gather", parts, size // parts)
        return sent | {"gradients": gradients, "gathers": gathers}

    @property
    def flops(self) -> np.ndarray:
        """FLOPs of five quintics of all matrices, by device along the mesh axes.

        Sharded matrices count on the devices that own them, others on every device.
        """
        sizes = [size for size in self.sizes.values() if size > 1]
        work = np.zeros(sizes)
        for pool in self.pools:
            work = work + pool.load(self.sizes)
        if not self.pools:
            for leaf in self.parameters:
                if leaf.matrices is not None:
                    count, fan_in, fan_out = leaf.matrices
                    joined = flops_of(fan_in * leaf.joined, fan_out)
                    work = work + count / leaf.joined * joined
        return work

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over an even share of one device's work."""
        alone = sum(
            pool.count * product(pool.batch, self.sizes) * pool.flops
            for pool in self.pools
        )
        return float(self.flops.max() * self.devices / alone) if alone else 1.0

    def __str__(self) -> str:
        """A table of the parameters and, on a mesh, one of the work on each device."""
        on_mesh = bool(self.sizes)
        header = ["parameter", "shape", "role", "as matrices", "label"]
        header += ["sharding"] if on_mesh else []
        rows = [(*header, "scale", "state")]
        for leaf in self.parameters:
            found = leaf.parameter
            read = sizes_text(leaf.matrices)
            read += f", {leaf.joined} as one" if leaf.joined > 1 else ""
            own = [found.path, shape_text(found.shape), found.role, read, found.label]
            if on_mesh:
                own.append(sharding_text(leaf.spec, leaf.state_spec, self.sizes))
            own.append("-" if leaf.scale is None else f"{leaf.scale:.4g}")
            size = "-" if leaf.state_bytes is None else bytes_text(leaf.state_bytes)
            rows.append((*own, size))
        reasons = ["why", *(leaf.parameter.reason for leaf in self.parameters)]
        table = zip(aligned(rows, numbers=2), reasons, strict=True)
        elements = [math.prod(x.parameter.shape) for x in self.parameters]
        in_matrices = sum(math.prod(x.matrices or (0,)) for x in self.parameters)
        total = (
            f"{len(elements)} parameters: {sum(elements)} elements, {in_matrices} of "
            f"them in matrices; state {bytes_text(self.state_bytes)}"
        )
        lines = [f"{row}   {why}".rstrip() for row, why in table]
        lines.append(total + (" on a device" if on_mesh else ""))
        return "\n".join([*lines, "", *_work(self)] if on_mesh else lines)


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
      how much they send. The attributes hold the same facts as data.

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
    update = checks.as_transform("tx", tx).update
    checks.arrays("params", params)
    shapes = jax.tree.map(_shape, params)
    arrays, others = array_types.arrays_and_others(extra_args)
    with _mesh_of(shapes):
        with notes.listening() as at_init:
            # A new function, since JAX never traces the same one twice.
            state = jax.eval_shape(lambda params: tx.init(params), shapes)
        with notes.listening() as at_update:
            sent = collectives(
                lambda g, s, p, arrays: update(g, s, p, **others, **arrays),
                *(shapes, state, shapes, arrays),
            )
    return _description(shapes, state, at_init, at_update, tuple(sent))


def _description(
    shapes: Any,
    state: Any,
    at_init: Sequence[notes.Note],
    at_update: Sequence[notes.Note],
    sent: tuple[Collective, ...],
) -> Description:
    read: dict[str, Parameter] = {}
    joined: dict[str, int] = {}
    scales: dict[str, float] = {}
    states = []  # of each `partition`; of the whole optimizer if there is none
    pools: dict[Any, list[Pool]] = {}
    sizes: dict[str, int] = {}
    summed: tuple[str, ...] = ()
    specs: dict[str, tuple[PartitionSpec, PartitionSpec | None]] = {
        path: (x.sharding.spec, None)
        for path, x in paths.leaves_with_paths(shapes)
        if x.sharding is not None
    }
    total = sum(map(array_types.bytes_on_a_device, jax.tree.leaves(state)))
    for kind, facts in itertools.chain(at_init, at_update):
        if kind == "state":
            states.append(facts["state"])
        elif kind == "placed_state":  # on Auto axes, whose types show no sharding
            for x in jax.tree.leaves(facts["state"]):
                total += array_types.bytes_on_a_device(x) - x.size * x.dtype.itemsize
        elif kind == "matrices":
            read |= facts["all"]
            names = list(facts["joined"])
            blocks = facts["joined"].blocks(names)
            for block in sorted(blocks, key=lambda block: block.joined):
                joined |= {names[leaf]: block.joined for leaf in block.leaves}
        elif kind == "scale":
            scales |= facts["factors"]
        elif kind == "pools":
            pools[facts["names"]] = facts["pools"]  # a branch may be traced twice
            sizes |= facts["sizes"]
        elif kind == "on_mesh":
            sizes |= dict(facts["layout"].mesh.shape)
            summed = facts["layout"].summed
            names, *both = facts["specs"]
            specs |= dict(zip(names, zip(*both, strict=True), strict=True))

    leaves = dict(paths.leaves_with_paths(shapes))
    own_bytes = dict.fromkeys(read or leaves, 0)
    for one in states or [state]:
        own_bytes |= _bytes_by_path(one, own_bytes)

    def described(path: str, parameter: Parameter) -> DescribedParameter:
        own, of_state = specs.get(paths.nearest_prefix(specs, path) or "", (None, None))
        sharded = () if of_state is None else mesh_specs.spec_names(of_state)
        return DescribedParameter(
            parameter,
            parameter.sizes if path in joined else None,
            joined.get(path, 1),
            scales.get(path),
            own_bytes.get(path),
            own,
            of_state,
            of_state is not None and bool(summed) and set(summed).isdisjoint(sharded),
        )

    parts: dict[str, list[str]] = {}  # a parameter with splits has several
    for path in read:
        parts.setdefault(str(paths.nearest_prefix(leaves, path)), []).append(path)
    rows = []
    for path, x in leaves.items():
        unread = Parameter(path, tuple(x.shape), x.dtype, "-", "-", "", None)
        rows += [described(p, read[p]) for p in parts.get(path, ())] or [
            described(path, unread)
        ]
    every_pool = tuple(itertools.chain(*pools.values()))
    return Description(tuple(rows), every_pool, sizes, summed, sent, total)


def _bytes_by_path(state: Any, names: Collection[str]) -> dict[str, int]:
    """Bytes of state on a device, by the parameter whose path ends the array's own."""
    total: dict[str, int] = {}
    for path, x in paths.leaves_with_paths(state):
        parts = path.split("/")
        ends = ("/".join(parts[start:]) for start in range(len(parts) + 1))
        if (owner := next((end for end in ends if end in names), None)) is not None:
            total[owner] = total.get(owner, 0) + array_types.bytes_on_a_device(x)
    return total


def _shape(x: Any) -> Any:
    """The shape of an array, with its sharding if its type shows that."""
    sharding = array_types.own_sharding(x)
    if sharding is None or not _explicit(sharding.mesh):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _explicit(mesh: Any) -> bool:
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def _mesh_of(shapes: Any) -> Any:
    """A context with the mesh whose Explicit axes shard the parameters."""
    found = (x.sharding.mesh for x in jax.tree.leaves(shapes) if x.sharding)
    mesh = next(found, None)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    )


# --- the table ------------------------------------------------------------------------


def sharding_text(
    own: PartitionSpec | None, state: PartitionSpec | None, sizes: Mapping[str, int]
) -> str:
    """The mesh axes that shard a parameter, and its state if they differ.

    Mesh axes of one device are left out; frameworks name many of them.
    """

    def text(spec: PartitionSpec | None) -> str:
        kept = mesh_specs.dividing(spec or PartitionSpec(), sizes)
        names = [",".join(mesh_specs.entry_names(entry)) or "-" for entry in kept]
        return " x ".join(names) if any(n != "-" for n in names) else "whole"

    where, of_state = text(own), text(own if state is None else state)
    return where if of_state == where else f"{where}; state {of_state}"


def _work(found: Description) -> list[str]:
    """Which devices compute the matrices of each pool, and how much they send."""
    rows = [("pool", "over", "matrices", "owners", "each", "sent")]
    for pool in found.pools:
        different = product(pool.batch, found.sizes)
        over = [
            f"{what} {', '.join(names)}"
            for what in ("batch", "short", "long")
            if (names := getattr(pool, what))
        ]
        owners = f"{len(pool.counts) * different}" if pool.counts else "all"
        least, most = (f(pool.counts or (pool.count,)) for f in (min, max))
        word = "or" if most == least + 1 else "to"
        rows.append(
            (
                f"{pool.fan[0]}x{pool.fan[1]}_{np.dtype(pool.dtype).name}",
                "; ".join(over) or "-",
                f"{pool.count * different}",
                owners if pool.group == 1 else f"{owners} groups of {pool.group}",
                f"{least}" if least == most else f"{least} {word} {most}",
                bytes_text(int(pool.sent_bytes(found.sizes))),
            )
        )
    sent = {what: bytes_text(int(size)) for what, size in found.sent_bytes.items()}
    work = f"the busiest does {found.imbalance:.2f} of an even share of the work"
    owned = any(pool.counts for pool in found.pools)
    if not owned and found.imbalance > 1:
        work = "matrices too small for owners, computed by all that hold them"
    lines = [
        *(aligned(rows, numbers=2) if found.pools else []),
        f"{found.devices} devices: {work}; each sends {sent['orthogonalize']} a step "
        "to orthogonalize",
    ]
    if found.summed:
        repeated = [x.bytes for x in found.parameters if x.repeated]
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
