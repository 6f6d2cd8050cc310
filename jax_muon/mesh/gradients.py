"""The mean gradient over a batch that is divided between devices.

This runs inside shard_map over the mesh axes that divide the batch; see `train_step`.
`Loss` is the user's function and what it returns; `MeanGradients` runs it:

  gather:   sharded parameters, except those that a scan gathers a layer at a time;
  loop:     over microbatches, each giving this device's part of the mean gradient;
  scatter:  sum over devices, except where a scan over layers has done so already.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jax_muon import checks, notes, paths
from jax_muon.dtypes import wide
from jax_muon.mesh import by_layers, specs, transfers


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, and what it returns besides the loss; see `make_train_step`."""

    function: Callable[..., Any]
    has_aux: bool = False
    max_aux: tuple[str, ...] = ()
    weighted: bool = False

    def __call__(self, params: Any, batch: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        """The loss, and its weight, auxiliary output, and entries in `max_aux`."""
        loss = self.function(params, batch)
        aux: Any = ()
        if self.has_aux:
            loss, aux = _pair("has_aux", loss)
        entries = aux if isinstance(aux, Mapping) else {}
        if missing := sorted({*self.max_aux} - {*entries}):
            raise ValueError(
                f"max_aux: the auxiliary output of loss_fn has no {missing}; "
                f"expected a dictionary with them, got entries {[*entries]}"
            )
        maxima = {name: entries[name] for name in self.max_aux}
        if maxima:
            aux = {name: x for name, x in entries.items() if name not in maxima}
        loss, weight = _pair("weighted", loss) if self.weighted else (loss, 1.0)
        loss = jnp.asarray(checks.scalar("the loss of loss_fn", loss, "a real scalar"))
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"the loss of loss_fn is {loss.dtype}, which has no gradient; expected "
                "a real scalar in floating point"
            )
        weight = checks.scalar("the weight of loss_fn", weight, "a real scalar")
        weight = wide(jnp.asarray(weight, jnp.result_type(float)))
        return loss, (weight, aux, maxima)


@dataclasses.dataclass(frozen=True)
class MeanGradients:
    """Computes the mean gradients, maxima and metrics of one step.

    Attributes:
      loss: the loss.
      wire: how arrays are sent between devices.
      microbatches: parts of a device's batch.
    """

    loss: Loss
    wire: transfers.Wire
    microbatches: int

    def __call__(
        self, params: Any, batch: Any, coarse: Any, fine: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """This device's shard of the mean gradient, maxima, and metrics.

        Args:
          params: this device's shards.
          batch: its part of the batch.
          coarse: how params are sharded over all axes of the mesh, a spec for each.
          fine: how gradients are to be sharded over them.
        """
        count = self.microbatches
        parts = jax.tree.map(
            lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch
        )
        first = jax.tree.map(lambda x: x[0], parts)
        held, loss_of = self._by_layers(params, first, coarse)
        leaves, treedef = jax.tree.flatten(params)
        is_held = jax.tree.unflatten(treedef, [i in held for i in range(len(leaves))])
        gathered = jax.tree.map(
            lambda x, spec, h: x if h else self.wire.gather(x, spec),
            *(params, coarse, is_held),
        )

        def sums(part: Any) -> tuple[Any, Any]:
            total, means, aux, maxima = self._of_part(gathered, is_held, part, loss_of)
            return (total, _times(means, total), aux), maxima

        (total, means, aux), maxima = _sum_over(sums, parts, first, count)
        # A batch in which nothing counts has no gradient.
        loss, grads = _times(means, jnp.where(total > 0, 1 / total, 0))
        grads = jax.tree.map(self._scatter, grads, params, fine, coarse, is_held)
        maxima = self.wire.reduce(jax.lax.pmax, maxima)
        metrics = {"loss": jax.lax.psum(loss, self.wire.axis)}
        if self.loss.has_aux:
            aux = self.wire.reduce(jax.lax.psum, aux)
            metrics["aux"] = {**aux, **maxima} if maxima else aux
        return grads, maxima, metrics

    def _scatter(self, g: Any, x: Any, fine: Any, coarse: Any, is_held: bool) -> Any:
        """The shard of a gradient, summed where a scan has not done so already."""
        scattered = specs.spec_names(coarse) if is_held else ()
        over = [name for name in self.wire.axis if name not in scattered]
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else g.dtype
        return self.wire.scatter(g, fine, dtype, over).astype(x.dtype)

    def _of_part(
        self, params: Any, is_held: Any, part: Any, loss_of: Callable[..., Any]
    ) -> tuple[Any, Any, Any, Any]:
        """One microbatch: total weight, parts of means, aux, and maxima.

        Args:
          params: whole parameters, and shards of those that are held.
          is_held: which these are.
          part: this device's part of the microbatch.
          loss_of: see `_by_layers`.
        """
        devices = jax.lax.axis_size(self.wire.axis)

        def part_of_mean(g: Any) -> Any:
            """This device's part of the mean gradient over devices.

            Divided before it is summed: eight gradients of 9000 overflow float16. A
            device of weight 0 has a gradient where collectives take its samples to
            other devices. The gradient of its own mean is 0, or NaN if that mean is
            0 / 0: then it is left out.
            """
            g = _times(wide(g), not_in_cotangent)
            if self.loss.weighted:
                g = jnp.where((weight == 0) & jnp.isnan(g), 0, g)
            return g

        loss, pull, (weight, aux, maxima) = jax.vjp(
            lambda params: loss_of(part_of_mean)(params, part), params, has_aux=True
        )
        total = jnp.asarray(devices, weight.dtype)
        if self.loss.weighted:
            total = jax.lax.psum(weight, self.wire.axis)
        # Collectives in the loss mix the cotangents of devices, so these have to be in
        # the ratio of the weights. They are 1 on average, as much as float16 bears;
        # what the loss's dtype rounds off is not in the cotangent.
        share = weight / jnp.where(total == 0, 1, total)
        cotangent = (share * devices).astype(loss.dtype)
        ratio = share / cotangent.astype(share.dtype)
        not_in_cotangent = jnp.where(cotangent == 0, 1 / devices, ratio)
        (grads,) = pull(cotangent)

        def of_leaf(g: Any, is_held: bool) -> Any:
            if g.dtype == jax.dtypes.float0:  # of an integer
                return jnp.zeros(g.shape)
            return wide(g) if is_held else part_of_mean(g)

        loss = jnp.where(weight == 0, 0, _times(wide(loss), share))
        # Divided before it is summed: booleans and int8 have no sum.
        aux = jax.tree.map(lambda x: x / (devices * self.microbatches), aux)
        return total, (loss, jax.tree.map(of_leaf, grads, is_held)), aux, maxima

    def _by_layers(
        self, params: Any, part: Any, coarse: Any
    ) -> tuple[Collection[int], Callable[..., Any]]:
        """The leaves that are held, gathered by scans, and the loss of such parameters.

        The loss is a function of `part_of_mean`, which turns a gradient into this
        device's part of the mean. It is called in the backward pass, when weights are
        known.
        """
        wire, how = self.wire, self.wire.transfers.gather
        sharded = [specs.only(spec, wire.axis) for spec in jax.tree.leaves(coarse)]
        if how == "leaves" or not any(map(any, sharded)):
            return (), lambda part_of_mean: self.loss
        flat = [
            spec if any(gathered) else PartitionSpec()
            for spec, gathered in zip(jax.tree.leaves(coarse), sharded, strict=True)
        ]
        traced = by_layers.ByLayers(
            self.loss, (params, part), flat, wire.axis, wire.gather
        )
        self._check(traced, params, flat)
        sizes = {name: jax.lax.axis_size(name) for name in wire.axis}
        late = transfers.scatters_late(sharded, sizes)

        def loss_of(part_of_mean: Callable[[Any], Any]) -> Callable[..., Any]:
            def scatter(g: Any, spec: Any, dtype: Any, over: Any = ()) -> Any:
                if over in ((), *wire.levels[:1]):  # not summed within a host yet
                    g = part_of_mean(g)
                names = specs.spec_names(specs.only(spec, over or wire.axis))
                return wire.scatter(g, spec, dtype, names).astype(dtype)

            keep = wire.transfers.keep_gathered
            exchange = by_layers.Exchange(wire.gather, scatter, keep, late, wire.levels)
            return functools.partial(traced, exchange) if traced.held else self.loss

        return traced.held, loss_of

    def _check(
        self, traced: by_layers.ByLayers, params: Any, flat: list[PartitionSpec]
    ) -> None:
        """Note how parameters are gathered; refuse what `gather` does not allow."""
        names = [path for path, _ in paths.leaves_with_paths(params)]
        how = sorted(traced.how.items())
        notes.note("gathered", {names[i]: words for i, words in how})
        inner = self.wire.axis[0]
        for i in traced.held if self.wire.levels else ():
            # Otherwise the parts are in another order after two gathers.
            if any(inner in self.wire.names(entry)[1:] for entry in flat[i]):
                raise ValueError(
                    f"gather='levels': the parameter {names[i]!r} has {flat[i]}, with "
                    f"others before {inner!r}, the axis within a host; expected that "
                    f"first, as in axis={self.wire.axis}"
                )
        for i, operation in traced.others.items():
            if self.wire.transfers.gather == "layers" and len(flat[i]) > 2:
                raise ValueError(
                    f"gather='layers': {operation} uses the parameter {names[i]!r} "
                    f"with {flat[i]} outside of a scan over layers; expected a "
                    "jax.lax.scan that takes it as xs, with an axis of layers that no "
                    "device divides, or gather='auto'"
                )


def applied(params: Any, updates: Any) -> Any:
    """The new parameters; integers and booleans stay as they are."""
    return jax.tree.map(
        lambda old, new: new if jnp.issubdtype(old.dtype, jnp.inexact) else old,
        params,
        optax.apply_updates(params, updates),
    )


def _sum_over(
    function: Callable[[Any], tuple[Any, Any]], parts: Any, first: Any, count: int
) -> tuple[Any, Any]:
    """The sum of a function's first result over parts, and maxima of the other.

    The parts are along the leading axis of a tree's arrays, `count` of them.
    """
    if count == 1:
        return function(first)

    def add(so_far: Any, part: Any) -> tuple[Any, Any]:
        more, maxima = function(part)
        return jax.tree.map(jnp.add, so_far, more), maxima

    shapes, _ = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    summed, maxima = jax.lax.scan(add, zeros, parts)
    return summed, jax.tree.map(lambda x: jnp.max(x, axis=0), maxima)


def _pair(flag: str, output: Any) -> Any:
    """The output of loss_fn, if it is the pair that a flag promises."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        pairs = {"weighted": "(loss, weight)", "has_aux": "(loss, auxiliary output)"}
        raise ValueError(
            f"{flag}=True, and loss_fn returned {output!r}; expected {pairs[flag]}, or "
            "with both flags ((loss, weight), auxiliary output)"
        )
    return output


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
