"""What an optimizer does with each parameter: as data to assert on, and as a table."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from jax_muon.matrices import Parameter
from jax_muon.mesh import specs as mesh_specs
from jax_muon.mesh.collectives import Collective
from jax_muon.mesh.plan import Pool
from jax_muon.text import aligned, bytes_text, hints_below, shape_text, sizes_text


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
      default_rate: the rate of a recipe's AdamW; None if `adamw=` is given.
    """

    parameters: tuple[DescribedParameter, ...]
    pools: tuple[Pool, ...]
    sizes: Mapping[str, int]
    summed: tuple[str, ...]
    transfers: tuple[tuple[str, str, Collective], ...]
    devices_per_host: int
    state_bytes: int
    default_rate: float | None = None

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
        start of a step. `scan_layers` gathers its layers twice for each microbatch,
        which is not known here: they count once.
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
    def excess(self) -> dict[Pool, float]:
        """FLOPs of the busiest device beyond an even share of each pool's work."""
        loads = {pool: pool.load(self.sizes).ravel() for pool in self.pools}
        busiest = int(np.argmax(sum(loads.values()))) if loads else 0
        return {
            pool: float(load[busiest]) - self._even_share(pool)
            for pool, load in loads.items()
        }

    def _even_share(self, pool: Pool) -> float:
        different = mesh_specs.devices_over(pool.batch_axes, self.sizes)
        return pool.on_device * different * pool.flops / self.devices

    def __str__(self) -> str:
        """A table of the parameters and, on a mesh, one of the work on each device."""
        header = ("parameter", "shape", "role", "as matrices", "label", "sharding")
        rows: list[tuple[str, ...]] = [(*header, "scale", "state")]
        rows += [_row(leaf, self.sizes) for leaf in self.parameters]
        if not self.sizes:
            rows = [(*row[:5], *row[6:]) for row in rows]
        reasons, hints = hints_below([x.parameter.reason for x in self.parameters])
        table = zip(aligned(rows, numbers=2), ["why", *reasons], strict=True)
        lines = [f"{row}   {why}".rstrip() for row, why in table] + hints
        elements = [math.prod(leaf.parameter.shape) for leaf in self.parameters]
        in_matrices = sum(math.prod(leaf.matrices or [0]) for leaf in self.parameters)
        lines.append(
            f"{len(elements)} parameters: {sum(elements)} elements, {in_matrices} of "
            f"them in matrices; "
            + ", ".join(f"{k} {bytes_text(n)}" for k, n in self.held_bytes.items())
        )
        if self.sizes:
            lines[-1] += " on a device"
        if self.default_rate is not None:
            lines.append(
                f"adamw: the recipe's own, learning rate {self.default_rate:g}; pass "
                "yours as adamw=optax.adamw(lr)"
            )
        lines += _residuals(self.parameters)
        if self.sizes:
            lines += ["", *_work(self)]
        return "\n".join(lines)


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
    worst = max(plan.excess, key=lambda pool: plan.excess[pool], default=None)
    if worst and plan.imbalance > 1 and not worst.counts:
        work = f"{_name(worst)} too small for owners, computed by all that hold it"
    elif worst and plan.imbalance > 1.05:
        work += _why_uneven(worst)
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


def _name(pool: Pool) -> str:
    return f"{pool.shape[0]}x{pool.shape[1]}_{np.dtype(pool.dtype).name}"


def _why_uneven(pool: Pool) -> str:
    """Why an owner computes more of a pool than an even share."""
    zeros = sum(pool.counts) - pool.on_device
    filled = f", filled up with {zeros} of zeros" if zeros else ""
    return (
        f", since {len(pool.counts)} owners have {pool.on_device} {_name(pool)}{filled}"
    )
