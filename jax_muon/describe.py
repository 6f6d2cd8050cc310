"""A table of what an optimizer will do with each parameter: `plan` as text."""

import math
from typing import Any

import numpy as np
import optax
from jax.sharding import PartitionSpec

from jax_muon.matrices import aligned, shape_text, sizes_text
from jax_muon.mesh.specs import Sizes, dividing, entry_names
from jax_muon.plan import Plan, plan


def describe(tx: optax.GradientTransformation, params: Any, **extra_args: Any) -> str:
    """A table of what an optimizer will do with each parameter, to read beforehand.

    Args:
      tx: see `plan`.
      params: the parameters, or their shapes.
      **extra_args: of `tx.update`.

    Returns:
      A table in text. "role" and "why" say what a parameter was taken for; "as
      matrices" is batch x (in, out); "scale" multiplies the update; "state" is memory
      on a device. On a mesh, "lies" says how parameter and state are divided, and a
      second table which device computes what and what is sent for it.

    Raises:
      ValueError: what `tx` raises at init and update.

    Examples:
      >>> import jax
      >>> import jax_muon as jm
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> table = describe(jm.nanochat(), shapes)
      >>> [line.split()[0] for line in table.splitlines()]
      ['parameter', 'up', 'wte', '2']
    """
    return _text(plan(tx, params, **extra_args))


def _text(found: Plan) -> str:
    header = ["parameter", "shape", "role", "as matrices", "label"]
    header += ["lies"] if found.sizes else []
    rows = [(*header, "scale", "state")]
    reasons = ["why"]
    for leaf in found.parameters:
        parameter = leaf.parameter
        read = sizes_text(leaf.matrices)
        read += f", {leaf.joined} as one" if leaf.joined > 1 else ""
        rows.append(
            (
                parameter.path,
                shape_text(parameter.shape),
                parameter.role,
                read,
                parameter.label,
                *(
                    [lies(leaf.spec, leaf.state_spec, found.sizes)]
                    if found.sizes
                    else []
                ),
                "-" if leaf.scale is None else f"{leaf.scale:.4g}",
                "-" if leaf.state_bytes is None else bytes_text(leaf.state_bytes),
            )
        )
        reasons.append(parameter.reason)
    elements = {True: 0, False: 0}
    for leaf in found.parameters:
        elements[leaf.matrices is not None] += math.prod(leaf.parameter.shape)
    total = (
        f"{len(found.parameters)} parameters: {sum(elements.values())} elements, "
        f"{elements[True]} of them in matrices; state {bytes_text(found.state_bytes)}"
    )
    table = zip(aligned(rows, numbers=2), reasons, strict=True)
    lines = [f"{row}   {why}".rstrip() for row, why in table]
    lines.append(total + (" on a device" if found.sizes else ""))
    if found.sizes:
        lines += ["", *_work(found)]
    return "\n".join(lines)


def lies(own: PartitionSpec | None, state: PartitionSpec | None, sizes: Sizes) -> str:
    """The mesh axes that shard a parameter, and its state if by others.

    Without mesh axes of one device, which frameworks name by the dozen.
    """

    def text(spec: PartitionSpec | None) -> str:
        kept = dividing(spec or PartitionSpec(), sizes)
        names = [",".join(entry_names(entry)) or "-" for entry in kept]
        return " x ".join(names) if any(n != "-" for n in names) else "whole"

    where, of_state = text(own), text(own if state is None else state)
    return where if of_state == where else f"{where}; state {of_state}"


def _work(found: Plan) -> list[str]:
    """Who computes the matrices of each pool, and what is sent."""
    rows = [("pool", "over", "matrices", "owners", "each", "sent")]
    for pool in found.pools:
        different = math.prod(found.sizes[name] for name in pool.batch)
        over = "; ".join(
            f"{what} {', '.join(names)}"
            for what, names in (
                ("batch", pool.batch),
                ("short", pool.short),
                ("long", pool.long),
            )
            if names
        )
        least, most = pool.per_owner, pool.per_owner + any(pool.extra)
        each = f"{least}" if least == most else f"{least} or {most}"
        rows.append(
            (
                f"{pool.fan[0]}x{pool.fan[1]}_{np.dtype(pool.dtype).name}",
                over or "-",
                f"{pool.count * different}",
                f"{len(pool.extra) * different}" if pool.extra else "all",
                each if pool.extra else f"{pool.count}",
                bytes_text(int(pool.sent_bytes(found.sizes))),
            )
        )
    sent = found.sent_bytes
    work = f"the busiest does {found.imbalance:.2f} of an even share of the work"
    kept = not any(pool.extra for pool in found.pools)
    if kept and found.imbalance > 1:
        work = "matrices too small for owners, computed by all that hold them"
    lines = [
        *(aligned(rows, numbers=2) if found.pools else []),
        f"{found.devices} devices: {work}; each sends "
        f"{bytes_text(int(sent['orthogonalize']))} a step to orthogonalize",
    ]
    if found.summed:
        repeated = [x for x in found.parameters if x.repeated]
        size = sum(
            math.prod(x.parameter.shape) * np.dtype(x.parameter.dtype).itemsize
            for x in repeated
        )
        lines.append(
            f"summed over {', '.join(found.summed)}: "
            f"{bytes_text(int(sent['gradients']))} for gradients, "
            f"{bytes_text(int(sent['gathers']))} for gathers; "
            f"{len(repeated)} parameters of {bytes_text(size)} are repeated"
        )
    return lines


def bytes_text(count: int) -> str:
    """A number of bytes to read, such as 1.2 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
