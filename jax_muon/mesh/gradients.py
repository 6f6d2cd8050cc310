"""Gradients of each device's own batch, summed so that each device gets its shard.

This runs inside shard_map over the mesh axes that divide the batch; see `train_step`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_muon import checks, notes, paths
from jax_muon.dtypes import wide, wire_dtype
from jax_muon.mesh import by_layers, specs, xla_options


@dataclasses.dataclass(frozen=True)
class MeanGradients:
    """The mean gradient over a batch that is divided between devices.

    The attributes are those of `make_train_step`, and `how` is its `gather`. With
    `reduce_wide`, 16-bit numbers are summed in float32: XLA:CPU promotes them anyway,
    and crashes if the mesh has other axes.
    """

    loss_fn: Callable[..., Any]
    axis: tuple[str, ...]
    has_aux: bool
    max_aux: tuple[str, ...]
    weighted: bool
    microbatches: int
    accumulate: str
    reduce_dtype: Any
    gather_dtype: Any
    reduce_wide: bool
    how: str
    keep_gathered: bool

    def __call__(
        self, params: Any, batch: Any, here: Any, scattered: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """This device's shard of the mean gradient, maxima, and metrics.

        Args:
          params: this device's shards.
          batch: its share of the batch.
          here: how params are sharded over all axes of the mesh, a spec for each.
          scattered: how gradients are to be sharded over them.
        """
        devices, count = jax.lax.axis_size(self.axis), self.microbatches
        parts = jax.tree.map(
            lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch
        )
        part = jax.tree.map(lambda x: x[0], parts)
        traced = self._by_layers(params, part, here)
        treedef: Any = jax.tree.structure(params)
        leaves = range(treedef.num_leaves)
        is_held = [traced is not None and i in traced.held for i in leaves]
        held = jax.tree.unflatten(treedef, is_held)
        full = jax.tree.map(
            lambda spec, x, h: x if h else self.gather(x, spec), here, params, held
        )

        def scatter(grads: Any) -> Any:
            """Sum over devices, except where a scan over layers has done so already."""

            def one(spec: Any, own: Any, g: Any, x: Any, h: bool) -> Any:
                done = specs.spec_names(own) if h else ()
                over = [name for name in self.axis if name not in done]
                dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else g.dtype
                return self._scatter(g, spec, dtype, over)

            return jax.tree.map(one, scattered, here, grads, params, held)

        def sums(part: Any) -> Any:
            """Sums over microbatches: weights, and means times weights."""

            def scatter_layer(g: Any, spec: Any, dtype: Any, over: Any = ()) -> Any:
                """In the backward pass, when weight and rest are known."""
                if not over or over == self.axis[:1]:  # not summed within a host yet
                    g = self._mean_part(g, weight, rest)
                mine = specs.only(spec, over or self.axis)
                summed = self._scatter(g, spec, dtype, specs.spec_names(mine))
                return summed.astype(dtype)

            loss_fn: Any = self.split_loss
            if traced is not None and traced.held:
                sizes = {name: jax.lax.axis_size(name) for name in self.axis}
                sharded = [specs.only(x, self.axis) for x in jax.tree.leaves(here)]
                late = xla_options.scatters_late(sharded, sizes)
                exchange = by_layers.Exchange(
                    self.gather, scatter_layer, self.keep_gathered, late, self.levels
                )
                loss_fn = functools.partial(traced, exchange)
            loss, pull, (weight, aux) = jax.vjp(
                lambda full: loss_fn(full, part), full, has_aux=True
            )
            total = jnp.asarray(devices, weight.dtype)
            if self.weighted:
                total = jax.lax.psum(weight, self.axis)
            # Collectives in the loss mix the cotangents of devices, so these have to be
            # in the ratio of the weights. They are 1 on average, as much as float16
            # bears; what the loss's dtype rounds off is part of the rest.
            share = weight / jnp.where(total == 0, 1, total)
            cotangent = (share * devices).astype(loss.dtype)
            ratio = share / cotangent.astype(share.dtype)
            rest = jnp.where(cotangent == 0, 1 / devices, ratio)
            (grads,) = pull(cotangent)

            def mean_part(g: Any, h: bool) -> Any:
                if g.dtype == jax.dtypes.float0:  # of an integer
                    return jnp.zeros(g.shape)
                return wide(g) if h else self._mean_part(g, weight, rest)

            grads = jax.tree.map(mean_part, grads, held)
            if self.accumulate == "scattered":
                grads = scatter(grads)
            loss = jnp.where(weight == 0, 0, _times(wide(loss), share))
            means = (loss, grads)
            largest = {name: aux[name] for name in self.max_aux}
            if largest:
                aux = {name: x for name, x in aux.items() if name not in largest}
            # Divided before it is summed: booleans and int8 have no sum.
            aux = jax.tree.map(lambda x: x / (devices * count), aux)
            return (total, _times(means, total), aux), largest

        def add(so_far: Any, part: Any) -> Any:
            more, largest = sums(part)
            return jax.tree.map(jnp.add, so_far, more), largest

        if count == 1:
            summed, largest = sums(part)
        else:
            first, _ = jax.eval_shape(sums, part)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
            summed, largest = jax.lax.scan(add, zeros, parts)
            largest = jax.tree.map(lambda x: jnp.max(x, axis=0), largest)

        total, means, aux = summed
        # A batch in which nothing counts has no gradient.
        loss, grads = _times(means, jnp.where(total > 0, 1 / total, 0))
        if self.accumulate == "local":
            grads = scatter(grads)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        largest = jax.tree.map(functools.partial(self._reduce, jax.lax.pmax), largest)
        metrics = {"loss": jax.lax.psum(loss, self.axis)}
        if self.has_aux:
            aux = jax.tree.map(functools.partial(self._reduce, jax.lax.psum), aux)
            metrics["aux"] = {**aux, **largest} if largest else aux
        return grads, largest, metrics

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The axes within a host and those between hosts, if layers take two levels."""
        return (self.axis[:1], self.axis[1:]) if self.how == "levels" else ()

    def gather(self, x: Any, spec: PartitionSpec, over: Sequence[str] = ()) -> Any:
        """A parameter, whole along the axes of the batch, or those in `over` alone."""

        def gathered(x: Any) -> Any:
            for dimension, entry in enumerate(spec):
                names = self._names(entry)
                names = tuple(name for name in names if not over or name in over)
                for hop in reversed(self._hops(names)):
                    sent = x.astype(wire_dtype(x.dtype, self.gather_dtype))
                    sent = jax.lax.all_gather(sent, hop, axis=dimension, tiled=True)
                    x = sent.astype(x.dtype)
            return x

        return self._of_own_part(gathered, spec)(x)

    def _scatter(
        self, g: Any, spec: PartitionSpec, dtype: Any, over: Sequence[str]
    ) -> Any:
        """This device's shard of the sum over mesh axes, in at least float32."""

        def summed(g: Any) -> Any:
            sent = self._to_reduce(g.astype(wire_dtype(dtype, self.reduce_dtype)))
            rest = list(over)
            for dimension, entry in enumerate(spec):
                names = tuple(name for name in specs.entry_names(entry) if name in over)
                for hop in self._hops(names):
                    sent = jax.lax.psum_scatter(
                        sent, hop, scatter_dimension=dimension, tiled=True
                    )
                    rest = [name for name in rest if name not in hop]
            return wide(_over(jax.lax.psum, sent, tuple(rest)))

        return self._of_own_part(summed, spec)(g)

    def _names(self, entry: Any) -> tuple[str, ...]:
        """The axes of the batch in an entry of a spec."""
        return tuple(name for name in specs.entry_names(entry) if name in self.axis)

    def _hops(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The axes of one collective after another, those within a host first."""
        if self.levels and names[:1] == self.levels[0] and names[1:]:
            return [names[:1], names[1:]]
        return [names] if names else []

    def _of_own_part(
        self, exchange: Callable[[Any], Any], spec: PartitionSpec
    ) -> Callable[[Any], Any]:
        """The exchange of each device's own part along other axes than the batch's.

        Left to XLA, an array that is sharded over these as well is gathered over them
        first: every GPU of a host would receive all of a layer that they share. Only
        where one dimension is divided over both kinds of axes, XLA has to do that.
        """
        here = [bool(self._names(entry)) for entry in spec]
        own = PartitionSpec(
            *(None if x else entry for x, entry in zip(here, spec, strict=True))
        )
        if not any(here) or not any(own):
            return exchange
        return jax.shard_map(
            exchange,
            in_specs=own,
            out_specs=own,
            axis_names={*specs.spec_names(own)},
            check_vma=False,
        )

    def _to_reduce(self, x: Any) -> Any:
        """Cast to the dtype in which sums and maxima over devices are computed."""
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return wide(x) if is_float and self.reduce_wide else x

    def _reduce(self, collective: Callable[..., Any], x: Any) -> Any:
        """A sum or maximum over the devices, in the dtype of x."""
        return _over(collective, self._to_reduce(x), self.axis).astype(x.dtype)

    def _mean_part(self, g: Any, weight: Any, rest: Any) -> Any:
        """A device's part of the mean gradient over devices.

        Divided before it is summed: eight gradients of 9000 overflow float16. A device
        of weight 0 has a gradient where collectives take its samples to other devices.
        The gradient of its own mean is 0, or NaN if that mean is 0 / 0: then it is
        left out.
        """
        g = _times(wide(g), rest)
        return jnp.where((weight == 0) & jnp.isnan(g), 0, g) if self.weighted else g

    def _by_layers(
        self, params: Any, part: Any, here: Any
    ) -> by_layers.ByLayers | None:
        """The loss, traced for whole parameters, if some of them are sharded."""
        flat = [
            spec if any(specs.only(spec, self.axis)) else PartitionSpec()
            for spec in jax.tree.leaves(here)
        ]
        if self.how == "leaves" or not any(map(any, flat)):
            return None
        args = params, part
        traced = by_layers.ByLayers(self.split_loss, args, flat, self.axis, self.gather)
        names = [path for path, _ in paths.leaves_with_paths(params)]
        how = dict.fromkeys(traced.held, "a layer at a time")
        how |= {i: f"whole, for {operation}" for i, operation in traced.others.items()}
        notes.note("gathered", {names[i]: how[i] for i in sorted(how)})
        if self.how == "levels":
            for i in traced.held:
                self._check_levels(names[i], flat[i])
        for i, operation in traced.others.items():
            if self.how == "layers" and len(flat[i]) > 2:
                raise ValueError(
                    f"gather='layers': {operation} uses the parameter {names[i]!r} "
                    f"with {flat[i]} outside of a scan over layers; expected a "
                    "jax.lax.scan that takes it as xs, with an axis of layers that no "
                    "device divides, or gather='auto'"
                )
        return traced

    def _check_levels(self, path: str, spec: PartitionSpec) -> None:
        """Refuse a spec whose parts are in another order after two gathers."""
        for entry in spec:
            if self.axis[0] in self._names(entry)[1:]:
                raise ValueError(
                    f"gather='levels': the parameter {path!r} has {spec}, with others "
                    f"before {self.axis[0]!r}, the axis within a host; expected that "
                    f"first, as in axis={self.axis}"
                )

    def split_loss(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The loss, its weight and auxiliary output."""
        loss = self.loss_fn(params, batch)
        loss, aux = _pair("has_aux", loss) if self.has_aux else (loss, ())
        there = aux if isinstance(aux, Mapping) else {}
        if missing := sorted({*self.max_aux} - {*there}):
            raise ValueError(
                f"max_aux: the auxiliary output of loss_fn has no {missing}; "
                f"expected a dictionary with them, got entries {[*there]}"
            )
        loss, weight = _pair("weighted", loss) if self.weighted else (loss, 1.0)
        loss = jnp.asarray(checks.scalar("the loss of loss_fn", loss, "a real scalar"))
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"the loss of loss_fn is {loss.dtype}, which has no gradient; expected "
                "a real scalar in floating point"
            )
        weight = checks.scalar("the weight of loss_fn", weight, "a real scalar")
        return loss, (wide(jnp.asarray(weight, jnp.result_type(float))), aux)


def _over(collective: Callable[..., Any], x: Any, names: tuple[str, ...]) -> Any:
    """A sum or maximum over mesh axes.

    Those of one device are left out: XLA cannot reduce arrays that are sharded over
    other axes over them.
    """
    names = tuple(name for name in names if jax.lax.axis_size(name) > 1)
    return collective(x, names) if names else x


def _pair(flag: str, given: Any) -> Any:
    """The output of loss_fn, if it is the pair that a flag promises."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        pairs = {"weighted": "(loss, weight)", "has_aux": "(loss, auxiliary output)"}
        raise ValueError(
            f"{flag}=True, and loss_fn returned {given!r}; expected {pairs[flag]}, or "
            "with both flags ((loss, weight), auxiliary output)"
        )
    return given


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
