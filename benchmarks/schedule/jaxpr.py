"""Collectives of a program and the bytes they send, counted from the jaxpr.

The jaxpr has the true dtypes. The HLO of XLA:CPU does not help: it promotes bfloat16
collectives to float32, and keeps all-reduces that the GPU compiler replaces by
reduce-scatters.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_muon.mesh.collectives import ring_bytes

# Primitive name to the kind of collective; JAX has several names for one kind.
_KINDS = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it."""

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    devices: int
    input_bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends."""
        return ring_bytes(self.kind, self.devices, self.input_bytes)


def collectives(function: Callable[..., Any], *args: Any) -> list[Collective]:
    """Every collective that a function calls for these arguments, in order.

    Args:
      function: a function that jax can trace, such as a train step.
      *args: its arguments, or their shapes.

    Returns:
      One `Collective` for each. Loops count once, and of several branches, such as
      those for different platforms, only the one that sends the most.
    """
    return list(_visit(jax.make_jaxpr(function)(*args).jaxpr, {}))


def _visit(jaxpr: Any, sizes: dict[str, int]) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        params = equation.params
        mesh = params.get("mesh")
        inner_sizes = sizes | dict(mesh.shape) if mesh is not None else sizes
        if kind is not None:
            axes = params.get("axes", params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            groups = params.get("axis_index_groups")
            devices = math.prod(sizes[axis] for axis in axes)
            avals = [v.aval for v in equation.invars]
            yield Collective(
                kind,
                axes,
                tuple(aval.shape for aval in avals),
                len(groups[0]) if groups else devices,
                sum(aval.size * np.dtype(aval.dtype).itemsize for aval in avals),
            )
        if equation.primitive.name == "cond":
            branches = [list(_visit(b.jaxpr, inner_sizes)) for b in params["branches"]]
            yield from max(branches, key=lambda found: sum(c.sent_bytes for c in found))
            continue
        for value in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _visit(inner, inner_sizes)
