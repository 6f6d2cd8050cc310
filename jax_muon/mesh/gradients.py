"""Gradients of a device's own batch, summed so that each part arrives where it lies.

Inside shard_map over the axes that divide the batch: parameters that lie divided are
gathered leaf by leaf, gradients scattered leaf by leaf. `train_step.py` is around it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_muon import paths
from jax_muon.checks import scalar
from jax_muon.dtypes import wide
from jax_muon.mesh.layers import ByLayers
from jax_muon.mesh.specs import entry_names, is_spec, spec_names, wire_dtype
from jax_muon.notes import note


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
    how: str
    keep_gathered: bool

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
        traced = self._by_layers(params, batch, here)
        places = range(len(jax.tree.leaves(params)))
        held = jax.tree.unflatten(
            jax.tree.structure(params),
            [traced is not None and place in traced.held for place in places],
        )
        full = jax.tree.map(
            lambda spec, x, is_held: x if is_held else self.gather(x, spec),
            here,
            params,
            held,
            is_leaf=is_spec,
        )

        def scatter(grads: Any) -> Any:
            def one(
                spec: PartitionSpec, own: PartitionSpec, g: Any, p: Any, h: bool
            ) -> Any:
                summed = set(spec_names(own)) if h else set()
                over = [name for name in self.axis if name not in summed]
                return self._scatter(g, spec, p.dtype, over)

            return jax.tree.map(
                one, scattered, here, grads, full, held, is_leaf=is_spec
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
            (weight, loss, grads, aux), largest = self._totals(traced, held, full, part)
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

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """A whole parameter."""
        for dimension, entry in enumerate(spec):
            names = entry_names(entry)
            if names:
                sent = x.astype(wire_dtype(x.dtype, self.gather_dtype))
                sent = jax.lax.all_gather(sent, names, axis=dimension, tiled=True)
                x = sent.astype(x.dtype)
        return x

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any, extra: Any) -> Any:
        """This device's piece of the gradient of a layer, a part of the mean.

        It is divided over all devices, and summed over those that have pieces.
        """
        weight, total = extra
        g = _times(self._counted(wide(g), weight), _inverse(total))
        return self._scatter(g, spec, dtype, spec_names(spec)).astype(dtype)

    def _scatter(
        self, g: Any, spec: PartitionSpec, dtype: Any, over: Sequence[str]
    ) -> Any:
        """This device's part of the sum over mesh axes, in at least float32."""
        sent = self._to_reduce(g.astype(wire_dtype(dtype, self.reduce_dtype)))
        rest = list(over)
        for dimension, entry in enumerate(spec):
            names = tuple(name for name in entry_names(entry) if name in over)
            if names:
                sent = jax.lax.psum_scatter(
                    sent, names, scatter_dimension=dimension, tiled=True
                )
                rest = [name for name in rest if name not in names]
        return wide(_over(jax.lax.psum, sent, tuple(rest)))

    def _to_reduce(self, x: Any) -> Any:
        """In the dtype in which sums and maxima over devices are computed."""
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return wide(x) if narrow and self.reduce_wide else x

    def _reduce(self, collective: Callable[..., Any], x: Any) -> Any:
        """A sum or maximum over the devices, in the dtype of x."""
        return _over(collective, self._to_reduce(x), self.axis).astype(x.dtype)

    def _by_layers(self, params: Any, batch: Any, here: Any) -> ByLayers | None:
        """The loss, if it is to be looked into, traced on whole parameters."""
        specs = jax.tree.leaves(here, is_leaf=is_spec)
        if self.how == "leaves" or not any(map(any, specs)):
            return None
        whole = jax.tree.map(
            lambda spec, x: jax.eval_shape(lambda x: self.gather(x, spec), x),
            here,
            params,
            is_leaf=is_spec,
        )
        part = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (x.shape[0] // self.microbatches, *x.shape[1:]), x.dtype
            ),
            batch,
        )
        traced = ByLayers(self._split_loss, (whole, part), specs)
        names = [path for path, _ in paths.leaves_with_paths(params)]
        note(
            "gathered",
            by_layers=[names[place] for place in sorted(traced.held)],
            whole={names[place]: op for place, op in traced.others.items()},
        )
        for place, operation in traced.others.items():
            if self.how == "layers" and len(specs[place]) > 2:
                raise ValueError(
                    f"gather='layers': {operation} uses the parameter {names[place]!r} "
                    f"with {specs[place]} outside of a scan over layers; expected a "
                    "jax.lax.scan that takes it as xs, with an axis of layers that no "
                    "device divides, or gather='auto'"
                )
        return traced

    def _split_loss(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The loss, its weight and auxiliary output."""
        loss = self.loss_fn(params, batch)
        loss, aux = _pair("has_aux", loss) if self.has_aux else (loss, ())
        loss, weight = _pair("weighted", loss) if self.weighted else (loss, 1.0)
        loss = scalar("the loss of loss_fn", loss, "a real scalar")
        weight = scalar("the weight of loss_fn", weight, "a real scalar")
        return loss, (wide(jnp.asarray(weight, jnp.result_type(float))), aux)

    def _totals(
        self, traced: ByLayers | None, held: Any, params: Any, batch: Any
    ) -> tuple[Any, Any]:
        """What is summed over microbatches, and what is maximized.

        Weight, loss and gradients times it, and this device's part of the mean aux;
        then the entries of max_aux. But for aux in at least float32: weights may be
        more than float16 can hold.
        """
        loss_fn, total = self._split_loss, jnp.asarray(float(self.devices))
        if traced is not None and traced.held:
            weight = jnp.ones_like(total)
            if self.weighted:  # what `scatter` has to know before the loss is there
                weight = traced.result(1, self, params, batch)
                total = jax.lax.psum(weight, self.axis)
            loss_fn = functools.partial(
                traced,
                self,
                extra=(weight, total),
                keep_gathered=self.keep_gathered,
            )
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (weight, aux)), grads = gradient(params, batch)
        weight = weight.astype(wide(loss).dtype)
        loss = self._counted(wide(loss), weight)
        grads = jax.tree.map(
            lambda x, h: (
                _times(wide(x), total) if h else self._counted(wide(x), weight)
            ),
            grads,
            held,
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
