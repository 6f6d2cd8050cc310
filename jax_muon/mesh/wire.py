"""Gathers and sums of sharded arrays over mesh axes, inside shard_map."""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_muon.dtypes import wide, wire_dtype
from jax_muon.specs import only


@dataclasses.dataclass(frozen=True)
class Wire:
    """How arrays are sent over mesh axes."""

    axes: tuple[str, ...]  # that divide the batch; gradients are summed over them
    gather_dtype: Any = None  # in which arrays are gathered; None for their own
    reduce_dtype: Any = None  # in which gradients are sent; None for the parameters'
    parts: int = 1  # divides gradients before the sum: eight of 9000 overflow float16
    # Sum 16-bit numbers in float32, as XLA:CPU would do anyway; it crashes if the mesh
    # has other axes.
    sum_wide: bool = False
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

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any) -> Any:
        """This device's shard of the sum of a gradient, in at least float32.

        `dtype` is the parameter's. What the spec does not divide is all-reduced.
        """
        g = wide(g) / self.parts if self.parts > 1 else wide(g)
        rest = [name for name in self.axes if jax.lax.axis_size(name) > 1]
        if not rest:  # nothing is sent, nor rounded for that
            return g
        g = self._summable(g.astype(wire_dtype(dtype, self.reduce_dtype)))
        for axis, names in _divided(spec, rest):
            g = jax.lax.psum_scatter(g, names, scatter_dimension=axis, tiled=True)
            rest = [name for name in rest if name not in names]
        return wide(jax.lax.psum(g, rest) if rest else g)

    def reduce(self, collective: Callable[..., Any], tree: Any) -> Any:
        """Sums or maxima of arrays over devices, in the dtype of each."""

        def reduced(x: Any) -> Any:
            x = jnp.asarray(x)  # a loss may return numbers besides
            return collective(self._summable(x), self.axes).astype(x.dtype)

        return jax.tree.map(reduced, tree)

    def _summable(self, x: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return wide(x) if is_float and self.sum_wide else x


def _divided(spec: PartitionSpec, axes: Any) -> list[tuple[int, tuple[str, ...]]]:
    """Axes of an array that these mesh axes divide, and which of them do."""
    return [(axis, names) for axis, names in enumerate(only(spec, axes)) if names]


# The `Wire` of the train step whose loss is being traced; None outside of one.
of_step: contextvars.ContextVar[Wire | None] = contextvars.ContextVar(
    "jax_muon_wire", default=None
)
