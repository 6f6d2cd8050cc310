"""Gathers and sums of sharded arrays over mesh axes, inside shard_map."""

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_muon.dtypes import wide, wire_dtype
from jax_muon.specs import only


@dataclasses.dataclass(frozen=True)
class Wire:
    """How arrays are sent over mesh axes."""

    axes: tuple[str, ...]  # that divide the batch; gradients are summed over them
    gather_dtype: Any = None  # in which arrays are gathered; None for their own
    reduce_dtype: Any = None  # in which gradients are sent; None for the parameters'
    scanned: tuple[str, ...] = ()  # patterns of what the loss gathers by `scan_layers`

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """The whole array along these axes."""
        divided = _divided(spec, self.axes)
        if not divided:  # nothing is sent, nor rounded for that
            return x
        sent = x.astype(wire_dtype(x.dtype, self.gather_dtype))
        for axis, names in divided:
            sent = jax.lax.all_gather(sent, names, axis=axis, tiled=True)
        return sent.astype(x.dtype)

    def scatter(
        self, g: Any, spec: PartitionSpec, dtype: Any, axes: Sequence[str]
    ) -> Any:
        """This device's shard of a gradient's sum over axes, in at least float32.

        `dtype` is the parameter's. What the spec does not divide is all-reduced.
        """
        rest = [name for name in axes if jax.lax.axis_size(name) > 1]
        if not rest:  # nothing is sent, nor rounded for that
            return wide(g)
        g = g.astype(wire_dtype(dtype, self.reduce_dtype))
        for axis, names in _divided(spec, rest):
            g = jax.lax.psum_scatter(g, names, scatter_dimension=axis, tiled=True)
            rest = [name for name in rest if name not in names]
        return wide(jax.lax.psum(g, rest) if rest else g)


def _divided(spec: PartitionSpec, axes: Any) -> list[tuple[int, tuple[str, ...]]]:
    """Axes of an array that these mesh axes divide, and which of them do."""
    return [(axis, names) for axis, names in enumerate(only(spec, axes)) if names]


# The `Wire` of the train step whose loss is being traced; None outside of one.
of_step: contextvars.ContextVar[Wire | None] = contextvars.ContextVar(
    "jax_muon_wire", default=None
)
