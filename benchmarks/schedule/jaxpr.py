"""Collectives of a program and the bytes they send, counted from the jaxpr.

The jaxpr has the true dtypes. The HLO of XLA:CPU does not help: it promotes bfloat16
collectives to float32, and keeps all-reduces that the GPU compiler replaces by
reduce-scatters.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.schedule.collectives import Collective, members_over

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
class Call(Collective):
    """One collective of a program, with its mesh axes and the shapes of its input."""

    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def collectives(function: Callable[..., Any], *args: Any) -> list[Call]:
    """Every collective that a function calls for these arguments, in order.

    Args:
      function: a function that jax can trace, such as a train step.
      *args: its arguments, or their shapes.

    Returns:
      One `Call` for each, in a scan as many as it has steps. Of several branches,
      such as those for different platforms, only the one that sends the most counts.
    """
    return list(_visit(jax.make_jaxpr(function)(*args).jaxpr, {}))


def _visit(jaxpr: Any, sizes: dict[str, int]) -> Iterator[Call]:
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        params = equation.params
        mesh = params.get("mesh")
        inner_sizes = sizes | dict(mesh.shape) if mesh is not None else sizes
        if kind is not None:
            axes = params.get("axes", params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            groups = params.get("axis_index_groups")
            group = members_over(axes, sizes)
            avals = [v.aval for v in equation.invars]
            yield Call(
                kind,
                tuple(group[place] for place in groups[0]) if groups else group,
                sum(aval.size * np.dtype(aval.dtype).itemsize for aval in avals),
                axes,
                tuple(aval.shape for aval in avals),
            )
        if equation.primitive.name == "cond":
            branches = [list(_visit(b.jaxpr, inner_sizes)) for b in params["branches"]]
            yield from max(branches, key=lambda found: sum(c.sent_bytes for c in found))
            continue
        for value in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                times = params["length"] if equation.primitive.name == "scan" else 1
                yield from times * [*_visit(inner, inner_sizes)]
