"""Gathers and sums of sharded arrays over mesh axes, inside shard_map."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jax_muon.base.dtypes import sent_dtype, wide
from jax_muon.base.jaxprs import Mark
from jax_muon.base.specs import only, spec_names


@dataclasses.dataclass(frozen=True)
class Communicator:
    """How arrays are sent over mesh axes; see `make_train_step`."""

    mesh: Mesh
    axes: tuple[str, ...]  # that divide the batch
    gather_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None

    def gather(self, x: Array, spec: PartitionSpec) -> Array:
        """The whole array along these axes.

        A shard (96, 3072) with P("data", None) on 8 devices gives (768, 3072).
        """
        spec = only(spec, self.axes)
        if not any(spec):  # nothing is sent, nor rounded for that
            return x
        sent = x.astype(sent_dtype(x.dtype, self.gather_dtype))
        for axis, names in enumerate(spec):
            if names:
                sent = jax.lax.all_gather(sent, names, axis=axis, tiled=True)
        return sent.astype(x.dtype)

    def scatter(
        self, g: Array, spec: PartitionSpec, dtype: DTypeLike, axes: Sequence[str]
    ) -> Array:
        """This device's shard of a gradient's sum over axes, in at least float32.

        Each device has (768, 3072); with P("data", None) it gets (96, 3072) of the sum.
        `dtype` is the parameter's.
        """
        rest = [name for name in axes if jax.lax.axis_size(name) > 1]
        if not rest:  # nothing is sent, nor rounded for that
            return wide(g)
        g = g.astype(sent_dtype(dtype, self.reduce_dtype))
        if self.mesh.devices.flat[0].platform == "cpu":
            g = wide(g)  # as XLA:CPU would; it crashes if the mesh has other axes
        for axis, names in enumerate(only(spec, rest)):
            if names:
                g = jax.lax.psum_scatter(g, names, scatter_dimension=axis, tiled=True)
        rest = [name for name in rest if name not in spec_names(spec)]
        return wide(jax.lax.psum(g, rest) if rest else g)


@dataclasses.dataclass
class Scans:
    """The calls of `scan_layers` in the loss of a train step, while it is traced.

    A step traces its loss twice. First all parameters are whole, and every leaf of
    every call is marked. The step sees which parameter comes with each mark, and gives
    its spec to the second trace.
    """

    comm: Communicator
    specs: Mapping[Mark, PartitionSpec]  # of one layer; {} at first
    calls: int = 0

    def marks(self, leaves: int) -> list[Mark]:
        """The marks of the leaves of the next call."""
        self.calls += 1
        return [Mark(self.calls - 1, leaf) for leaf in range(leaves)]
