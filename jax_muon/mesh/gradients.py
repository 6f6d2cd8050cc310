"""Gradients of a device's own batch, summed so that each part arrives where it lies.

Inside shard_map over the axes that divide the batch: parameters that lie divided are
gathered leaf by leaf, gradients scattered leaf by leaf. `train_step.py` is around it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_muon.checks import scalar
from jax_muon.dtypes import wide
from jax_muon.mesh.specs import entry_names, is_spec, wire_dtype


@dataclasses.dataclass(frozen=True)
class MeanGradients:
    """The mean gradient over a batch that is divided between devices.

    Attributes are those of `make_train_step`; `devices` is their number over `axis`.
    With `reduce_wide`, what has 16 bits is summed in float32: XLA on a CPU promotes it
    anyway, and fails at that, ending the process, where the mesh has other axes.
    """

    loss_fn: Callable[..., Any]
    axis: tuple[str, ...]
    devices: int
    has_aux: bool
    max_aux: tuple[str, ...]
    weighted: bool
    microbatches: int
    accumulate: str
    reduce_dtype: Any
    gather_dtype: Any
    reduce_wide: bool

    def __call__(
        self, params: Any, batch: Any, here: Any, scattered: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """This device's part of the mean gradient, maxima, and metrics.

        Args:
          params: this device's pieces.
          batch: its share of the batch.
          here: how params lie over the axes of the batch, a spec for each.
          scattered: how gradients are to lie over them.
        """
        full = jax.tree.map(self._gather, here, params, is_leaf=is_spec)

        def scatter(grads: Any) -> Any:
            return jax.tree.map(
                lambda spec, g, p: self._scatter(g, spec, p.dtype),
                scattered,
                grads,
                full,
                is_leaf=is_spec,
            )

        def mean(weight: Any, grads: Any, microbatches: int) -> tuple[Any, Any]:
            """The weight on all devices, and this device's part of the mean gradient.

            Divided before it is summed: eight gradients of 9000 overflow float16.
            """
            total = jnp.asarray(self.devices * microbatches, weight.dtype)
            if self.weighted:
                total = jax.lax.psum(weight, self.axis)
            return total, scatter(_times(grads, _inverse(total)))

        at_once = self.accumulate == "scattered"

        def one(part: Any) -> Any:
            (weight, loss, grads, aux), largest = self._totals(full, part)
            if at_once:
                total, grads = mean(weight, grads, 1)
                grads = _times(grads, total)
            return (weight, loss, grads, aux), largest

        if self.microbatches == 1:
            totals, largest = one(batch)
        else:
            parts = jax.tree.map(
                lambda x: x.reshape(self.microbatches, -1, *x.shape[1:]), batch
            )

            def add(total: Any, part: Any) -> tuple[Any, Any]:
                added, largest = one(part)
                return jax.tree.map(jnp.add, total, added), largest

            first, _ = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
            totals, largest = jax.lax.scan(add, zeros, parts)
            largest = jax.tree.map(lambda x: jnp.max(x, axis=0), largest)

        weight, loss, grads, aux = totals
        if at_once:
            total = jax.lax.psum(weight, self.axis)
            grads = _times(grads, _inverse(total))
        else:
            total, grads = mean(weight, grads, self.microbatches)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, full)
        largest = jax.tree.map(functools.partial(self._reduce, jax.lax.pmax), largest)
        metrics = {"loss": jax.lax.psum(loss * _inverse(total), self.axis)}
        if self.has_aux:
            means = jax.tree.map(functools.partial(self._reduce, jax.lax.psum), aux)
            metrics["aux"] = {**means, **largest} if self.max_aux else means
        return grads, largest, metrics

    def _gather(self, spec: PartitionSpec, x: Any) -> Any:
        """A whole parameter."""
        for dimension, entry in enumerate(spec):
            names = entry_names(entry)
            if names:
                sent = x.astype(wire_dtype(x.dtype, self.gather_dtype))
                sent = jax.lax.all_gather(sent, names, axis=dimension, tiled=True)
                x = sent.astype(x.dtype)
        return x

    def _scatter(self, g: Any, spec: PartitionSpec, dtype: Any) -> Any:
        """This device's part of the sum of local gradients, in at least float32."""
        sent = self._to_reduce(g.astype(wire_dtype(dtype, self.reduce_dtype)))
        summed = set(self.axis)
        for dimension, entry in enumerate(spec):
            names = entry_names(entry)
            if names:
                sent = jax.lax.psum_scatter(
                    sent, names, scatter_dimension=dimension, tiled=True
                )
                summed -= set(names)
        rest = tuple(name for name in self.axis if name in summed)
        return wide(_over(jax.lax.psum, sent, rest))

    def _to_reduce(self, x: Any) -> Any:
        """In the dtype in which sums and maxima over devices are computed."""
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return wide(x) if narrow and self.reduce_wide else x

    def _reduce(self, collective: Callable[..., Any], x: Any) -> Any:
        """A sum or maximum over the devices, in the dtype of x."""
        return _over(collective, self._to_reduce(x), self.axis).astype(x.dtype)

    def _totals(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """What is summed over microbatches, and what is maximized.

        Weight, loss and gradients times it, and this device's part of the mean aux;
        then the entries of max_aux. But for aux in at least float32: weights may be
        more than float16 can hold.
        """

        def split_loss(params: Any, batch: Any) -> tuple[Any, Any]:
            loss = self.loss_fn(params, batch)
            loss, aux = _pair("has_aux", loss) if self.has_aux else (loss, ())
            loss, weight = _pair("weighted", loss) if self.weighted else (loss, 1.0)
            loss = scalar("the loss of loss_fn", loss, "a real scalar")
            weight = scalar("the weight of loss_fn", weight, "a real scalar")
            return loss, (wide(jnp.asarray(weight, jnp.result_type(float))), aux)

        gradient = jax.value_and_grad(split_loss, has_aux=True)
        (loss, (weight, aux)), grads = gradient(params, batch)
        weight = weight.astype(wide(loss).dtype)
        loss, grads = jax.tree.map(
            lambda x: self._counted(wide(x), weight), (loss, grads)
        )
        largest = {}
        if self.max_aux:
            _check_entries(aux, self.max_aux)
            largest = {name: aux[name] for name in self.max_aux}
            aux = {name: x for name, x in aux.items() if name not in largest}
        # Divided before it is summed: booleans and int8 have no sum.
        aux = jax.tree.map(lambda x: x / (self.devices * self.microbatches), aux)
        return (weight, loss, grads, aux), largest

    def _counted(self, x: Any, weight: Any) -> Any:
        """Times its weight; the mean of nothing, 0 / 0, does not count."""
        product = x * weight.astype(x.dtype)
        return jnp.where(weight == 0, 0, product) if self.weighted else product


def _over(collective: Callable[..., Any], x: Any, names: tuple[str, ...]) -> Any:
    """A sum or maximum over mesh axes.

    Over an axis of one device it is a gather: XLA cannot reduce over it what lies
    divided over other axes.
    """
    alone = tuple(name for name in names if jax.lax.axis_size(name) == 1)
    others = tuple(name for name in names if name not in alone)
    x = collective(x, others) if others else x
    if alone:
        x = jax.lax.all_gather(x[None], alone, tiled=True)[0]
    return x


def _pair(flag: str, given: Any) -> Any:
    """What loss_fn gave, if it is the pair that a flag promises."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(
            f"{flag}=True, and loss_fn gave {given!r}; expected a pair: with weighted "
            "(loss, weight), with has_aux that or the loss, and auxiliary output"
        )
    return given


def _inverse(total: Any) -> Any:
    """One over the weight, or 0: a batch in which nothing counts has no gradient."""
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _check_entries(aux: Any, names: tuple[str, ...]) -> None:
    there = aux.keys() if isinstance(aux, Mapping) else ()
    missing = set(names) - set(there)
    if missing:
        raise ValueError(
            f"max_aux={names}: loss_fn gives auxiliary output without "
            f"{sorted(missing)}; expected a dictionary that has them, got "
            + (f"one of {sorted(there)}" if there else repr(type(aux)))
        )
