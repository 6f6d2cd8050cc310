"""Functions that run on each device, within a program of all devices.

The optimizer is written for global arrays, a loss for what one device has. Here both
meet in one loop: what differs between devices is a global array with a leading axis of
devices, and functions of it run inside shard_map.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_muon.dtypes import wide
from jax_muon.mesh.transfers import Wire

T = TypeVar("T")


class OnEach:
    """Calls functions on each device of a mesh, all of whose axes divide the batch.

    Inside shard_map, as on one device, a call is the function itself.

    Attributes:
      devices: their number.
    """

    def __init__(self, wire: Wire, mesh: Mesh) -> None:
        """`wire` sends arrays over the mesh."""
        self._wire, self._mesh, self.devices = wire, mesh, mesh.size
        self._own = PartitionSpec(wire.axis)

    def __call__(
        self, function: Callable[..., Any], takes: Any = None, returns: Any = None
    ) -> Callable[..., Any]:
        """The function, of arrays (devices, ...) or, with specs, of global arrays."""
        context = jax.sharding.get_abstract_mesh()
        if context.manual_axes:
            return function

        def local(*given: Any) -> Any:
            if takes is None:
                given = jax.tree.map(lambda x: jnp.squeeze(x, 0), given)
            results = function(*given)
            if returns is None:
                results = jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)
            return results

        return jax.shard_map(
            local,
            mesh=self._mesh if context.empty else context,
            in_specs=self._own if takes is None else takes,
            out_specs=self._own if returns is None else returns,
            check_vma=False,
        )

    def traced(self, function: Callable[..., T], params: Any, batch: Any) -> T:
        """What a function makes of tracers of whole parameters and a part of a batch.

        That is an object, which no traced function could return.
        """
        made: list[T] = []
        specs = PartitionSpec(), self._own
        call = self(lambda *tracers: made.append(function(*tracers)), specs, self._own)
        jax.eval_shape(call, params, batch)
        return made[0]

    def parts(self, batch: Any) -> Any:
        """Each device's part of a batch."""
        return self(lambda x: x, (self._own,))(batch)

    def swapped(self, tree: Any) -> Any:
        """Arrays (devices, layers, ...) as (layers, devices, ...), or back."""
        inside = jax.sharding.get_abstract_mesh().manual_axes
        return tree if inside else jax.tree.map(lambda x: x.swapaxes(0, 1), tree)

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """The whole array on each device, (devices, *x.shape)."""
        return self(lambda x: self._wire.gather(x, spec), (spec,))(x)

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any) -> Any:
        """The mean of the gradients of all devices, sharded."""

        def scatter(g: Any) -> Any:
            part, axis = wide(g) / self.devices, self._wire.axis
            return self._wire.scatter(part, spec, dtype, axis).astype(dtype)

        return self(scatter, returns=spec)(g)

    def mean(self, tree: Any) -> Any:
        """The means over devices, replicated."""

        def mean(tree: Any) -> Any:
            parts = jax.tree.map(lambda x: x / self.devices, tree)
            return self._wire.reduce(jax.lax.psum, parts)

        return self(mean, returns=PartitionSpec())(tree)
