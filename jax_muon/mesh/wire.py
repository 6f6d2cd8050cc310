"""Gathers and sums of sharded arrays over mesh axes, inside shard_map."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_muon.base.dtypes import wide, wire_dtype
from jax_muon.base.specs import only, spec_names


@dataclasses.dataclass(frozen=True)
class Wire:
    """How arrays are sent over mesh axes; see `make_train_step`."""

    mesh: Mesh
    axes: tuple[str, ...]  # that divide the batch
    gather_dtype: Any = None
    reduce_dtype: Any = None
    scanned: tuple[str, ...] = ()

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """The whole array along these axes."""
        spec = only(spec, self.axes)
        if not any(spec):  # nothing is sent, nor rounded for that
            return x
        sent = x.astype(wire_dtype(x.dtype, self.gather_dtype))
        for axis, names in enumerate(spec):
            if names:
                sent = jax.lax.all_gather(sent, names, axis=axis, tiled=True)
        return sent.astype(x.dtype)

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any, axes: Any) -> Any:
        """This device's shard of a gradient's sum over axes, in at least float32.

        `dtype` is the parameter's.
        """
        rest = [name for name in axes if jax.lax.axis_size(name) > 1]
        if not rest:  # nothing is sent, nor rounded for that
            return wide(g)
        g = g.astype(wire_dtype(dtype, self.reduce_dtype))
        if self.mesh.devices.flat[0].platform == "cpu":
            g = wide(g)  # as XLA:CPU would; it crashes if the mesh has other axes
        for axis, names in enumerate(only(spec, rest)):
            if names:
                g = jax.lax.psum_scatter(g, names, scatter_dimension=axis, tiled=True)
        rest = [name for name in rest if name not in spec_names(spec)]
        return wide(jax.lax.psum(g, rest) if rest else g)
