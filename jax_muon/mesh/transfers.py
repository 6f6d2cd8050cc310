"""What a train step sends over the mesh axes of the batch, and in which dtype.

`Transfers` is what users choose; `Wire` sends arrays so, inside shard_map.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_muon import checks
from jax_muon.dtypes import wide, wire_dtype
from jax_muon.mesh import specs

# The latency of a collective grows with the devices. From this number on, a layer is
# gathered in one collective, and its gradient scattered in one, not one for each array.
MANY_DEVICES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfers:
    """How `make_train_step` sends gradients, parameters and updates between devices.

    Args:
      reduce_dtype: dtype in which gradients are sent; None for the parameters'.
      gather_dtype: dtype in which parameters and updates are sent; None for their own.
      gather: how parameters that are sharded over the axes of the batch are gathered.
        "auto": if a scan in the loss takes a parameter layer by layer, each layer is
        gathered while another one runs, forward and again backward, and its gradient is
        scattered at once, for each microbatch; all others are gathered at the beginning
        of the step. "layers": the same, but a parameter with three or more axes that is
        used outside a scan is an error. "leaves": all at the beginning. "levels": as
        "auto", but between hosts first and then within a host, for hundreds of hosts:
        the step's `axis` names the mesh axis within a host first, and then those
        between hosts. Each device keeps its part of what its host has, of all scanned
        layers, for the backward pass.
      keep_gathered: keep gathered layers for the backward pass instead of gathering
        them again; needs memory for all of them.

    Raises:
      ValueError: an unknown choice, or a dtype that is not real floating point.

    Examples:
      >>> import jax_muon as jm
      >>> transfers = jm.Transfers(reduce_dtype="bfloat16", gather="layers")
      >>> # jm.make_train_step(loss_fn, tx, mesh, transfers=transfers)
    """

    reduce_dtype: jax.typing.DTypeLike | None = None
    gather_dtype: jax.typing.DTypeLike | None = None
    gather: str = "auto"
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        checks.choice("gather", self.gather, ("auto", "layers", "leaves", "levels"))
        checks.float_dtype("reduce_dtype", self.reduce_dtype)
        checks.float_dtype("gather_dtype", self.gather_dtype)
        checks.flag("keep_gathered", self.keep_gathered)


@dataclasses.dataclass(frozen=True)
class Wire:
    """Gathers, scatters and sums of arrays over the axes of the batch.

    Attributes:
      axis: these mesh axes.
      transfers: the dtypes, and how parameters are gathered.
      sum_wide: sum 16-bit numbers in float32: XLA:CPU promotes them anyway, and crashes
        if the mesh has other axes.
    """

    axis: tuple[str, ...]
    transfers: Transfers
    sum_wide: bool

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The axes within a host and those between hosts, if layers take two levels."""
        in_levels = self.transfers.gather == "levels"
        return (self.axis[:1], self.axis[1:]) if in_levels else ()

    def gather(self, x: Any, spec: PartitionSpec, over: Sequence[str] = ()) -> Any:
        """A parameter, whole along the axes of the batch, or those in `over` alone."""

        def gathered(x: Any) -> Any:
            dtype = wire_dtype(x.dtype, self.transfers.gather_dtype)
            for dimension, names in reversed(self._hops(spec, over or self.axis)):
                sent = x.astype(dtype)
                sent = jax.lax.all_gather(sent, names, axis=dimension, tiled=True)
                x = sent.astype(x.dtype)
            return x

        return self._along_other_axes(gathered, spec)(x)

    def scatter(
        self, g: Any, spec: PartitionSpec, dtype: Any, over: Sequence[str]
    ) -> Any:
        """This device's shard of the sum over mesh axes, in at least float32.

        It is sent in `reduce_dtype`, or in `dtype`, the parameter's.
        """

        def summed(g: Any) -> Any:
            rest = [name for name in over if jax.lax.axis_size(name) > 1]
            if not rest:  # nothing is sent, nor rounded for that
                return wide(g)
            sent = g.astype(wire_dtype(dtype, self.transfers.reduce_dtype))
            sent = self._summable(sent)
            for dimension, names in self._hops(spec, over):
                sent = jax.lax.psum_scatter(
                    sent, names, scatter_dimension=dimension, tiled=True
                )
                rest = [name for name in rest if name not in names]
            return wide(_over(jax.lax.psum, sent, rest))

        return self._along_other_axes(summed, spec)(g)

    def reduce(self, collective: Callable[..., Any], tree: Any) -> Any:
        """Sums or maxima of arrays over the devices, in the dtype of each array."""
        return jax.tree.map(
            lambda x: _over(collective, self._summable(x), self.axis).astype(x.dtype),
            tree,
        )

    def names(self, entry: Any) -> tuple[str, ...]:
        """The axes of the batch in an entry of a spec."""
        return tuple(name for name in specs.entry_names(entry) if name in self.axis)

    def _hops(
        self, spec: PartitionSpec, over: Sequence[str]
    ) -> list[tuple[int, tuple[str, ...]]]:
        """Dimensions and mesh axes of one scatter after another; of gathers, reversed.

        In two levels, those within a host come first, so that between hosts each device
        exchanges its part alone.
        """
        within, others = [], []
        for dimension, entry in enumerate(spec):
            names = tuple(name for name in specs.entry_names(entry) if name in over)
            # Parts of one dimension are in the order of its axes.
            split = bool(self.levels) and names[:1] == self.levels[0]
            within.append((dimension, names[:split]))
            others.append((dimension, names[split:]))
        return [(dimension, names) for dimension, names in within + others if names]

    def _along_other_axes(
        self, exchange: Callable[[Any], Any], spec: PartitionSpec
    ) -> Callable[[Any], Any]:
        """The exchange of each device's own part along other axes than the batch's.

        Left to XLA, an array that is sharded over these as well is gathered over them
        first: every GPU of a host would receive all of a layer that they share. Only
        where one dimension is divided over both kinds of axes, XLA has to do that.
        """
        exchanged = [bool(self.names(entry)) for entry in spec]
        others = PartitionSpec(
            *(None if x else entry for x, entry in zip(exchanged, spec, strict=True))
        )
        if not any(exchanged) or not any(others):
            return exchange
        return jax.shard_map(
            exchange,
            in_specs=others,
            out_specs=others,
            axis_names={*specs.spec_names(others)},
            check_vma=False,
        )

    def _summable(self, x: Any) -> Any:
        """Cast to the dtype in which sums and maxima over devices are computed."""
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return wide(x) if is_float and self.sum_wide else x


def scatters_late(sharded: Iterable[PartitionSpec], sizes: specs.Sizes) -> bool:
    """True if a layer's gradient is scattered in one collective, a layer later."""
    return any(
        math.prod(sizes[name] for name in specs.spec_names(spec)) >= MANY_DEVICES
        for spec in sharded
    )


def _over(collective: Callable[..., Any], x: Any, names: Sequence[str]) -> Any:
    """A sum or maximum over mesh axes.

    Axes of one device are skipped: XLA cannot reduce over them an array that is sharded
    over other axes.
    """
    names = tuple(name for name in names if jax.lax.axis_size(name) > 1)
    return collective(x, names) if names else x
