"""A train step that updates scanned layers inside the backward pass.

On one device a layer is updated as soon as its gradient is there, so gradients of all
layers never exist at once. The optimizer is called once for each layer, with the
parameters, the gradient and the state of that layer instead of the stacks, and
once for all other parameters. What a call computes beside is not used, and XLA removes
it. On several devices it takes as many layers at a time as there are devices: the
matrices of one layer would not occupy them all.

New state leaves the backward pass where a gradient would, with its bits read as floats:
`jax.custom_vjp` has no gradients of integers.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

from jax_muon import checks, jaxprs, notes
from jax_muon.dtypes import wide
from jax_muon.mesh import by_layers, prefetch
from jax_muon.mesh.gradients import MeanGradients, applied
from jax_muon.mesh.on_each import OnEach
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.specs import devices_over, spec_names

_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
_OTHERWISE = "or update='after backward'"
# Transforms that take the norm of a leaf, a mean over its layers, or one random key.
_OF_STACKS = (
    *("clip_by_block_rms", "scale_by_trust_ratio", "adaptive_grad_clip"),
    *("scale_by_factored_rms", "scale_by_param_block_rms", "add_noise"),
)


def step(
    gradients: MeanGradients, optimizer: OnMesh, params: Any, state: Any, batch: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """New parameters, new state and metrics, as `make_train_step` returns them."""
    on_each = OnEach(gradients.wire, optimizer.layout.mesh)
    flat = jax.tree.leaves(params)
    of_params: Any = jax.tree.structure(params)
    axes = [_axes(x.ndim) for x in flat]

    def trace(params: Any, batch: Any) -> by_layers.ByLayers:
        return by_layers.ByLayers(gradients.loss, (params, batch), axes, (), _same)

    traced = on_each.traced(trace, params, batch)
    scanned = traced.held & traced.scanned
    # Of one layer alone, shapes do not show what belongs to it.
    traced.held = {leaf for leaf in scanned if len(flat[leaf]) > 1}
    updates = _Updates(on_each, optimizer, params, state, traced.held)
    for leaf in traced.held & traced.indexed:
        updates.refuse_changed(leaf)
    sharded = [i for i, spec in enumerate(updates.coarse) if spec_names(spec)]
    how = {updates.names[i]: traced.how.get(i, "whole") for i in sharded}
    notes.note("gathered", how)

    def loss_fn(params: Any, bits: Any) -> Any:
        scan = functools.partial(updates.scan, bits)
        exchange = by_layers.Exchange(_same, _same, scan=scan, call=on_each)
        return traced(exchange, params, on_each.parts(batch))

    bits = {
        place: _floats(updates.state[place])
        for place in updates.places_of(updates.layers)
    }
    whole: Any = [
        x if leaf in updates.layers else on_each.gather(x, spec)
        for leaf, (x, spec) in enumerate(zip(flat, updates.coarse, strict=True))
    ]
    whole = of_params.unflatten(whole)
    loss, pull, (_, aux, _) = jax.vjp(loss_fn, whole, bits, has_aux=True)
    metrics = {"loss": on_each.mean(wide(loss))}
    updates.extra = {"value": metrics["loss"]}
    grads, bits = pull(jnp.ones_like(loss))
    params, state = updates.of_others(jax.tree.leaves(grads), bits)
    if gradients.loss.has_aux:
        metrics["aux"] = on_each.mean(aux)
    return params, state, metrics


class _Updates:
    """The calls of an optimizer in one step.

    Attributes:
      layers: the indices of the leaves that scans take.
      names: the paths of the parameters.
      coarse: how parameters are sharded.
      params: the leaves of the parameters before the step.
      state: the leaves of the state.
      extra: further arguments of the optimizer, known after the forward pass.
      done: the leaves of the parameters that scans have updated.
    """

    def __init__(
        self,
        on_each: OnEach,
        optimizer: OnMesh,
        params: Any,
        state: Any,
        layers: Collection[int],
    ) -> None:
        """Check the optimizer's state, and that it can update these layers."""
        self._on_each, self._tx, self.layers = on_each, optimizer.tx, frozenset(layers)
        self._whole = _Init.of(self._tx, params)
        self.names, self.coarse, self._fine = optimizer.layout.of_leaves(params)
        self._of_all = self._of_layers = self._tx.update
        if on_each.devices > 1:
            like_all = dataclasses.replace(optimizer.layout, whole=self._whole.params)
            of_layers = OnMesh(self._tx, like_all, optimizer.gather_dtype)
            self._of_all, self._of_layers = optimizer.update, of_layers.update
        of_state = jax.tree.leaves(optimizer.abstract(params)[1])
        self._specs_of_state = [x.sharding.spec for x in of_state]
        checks.state(state, self._whole.state)
        one_layer = _init_of_layer(self._tx, self._whole, self.layers)
        _check_gradients(self._tx, one_layer, self.names, self.layers)
        self.params, self.state = jax.tree.leaves(params), jax.tree.leaves(state)
        for leaf in self.layers:
            spec = self._fine[leaf]
            if devices_over(spec[0], optimizer.layout.mesh.shape) > 1:
                raise ValueError(
                    f"update='in backward': the parameter {self.names[leaf]!r} of "
                    f"shape {self.params[leaf].shape} and its state have {spec}, which "
                    "divides its layers; expected specs, and sizes, that divide "
                    f"another axis, {_OTHERWISE}"
                )
        self._of_params: Any = jax.tree.structure(params)
        self._of_state: Any = jax.tree.structure(state)
        self.extra: dict[str, Any] = {}
        self.done: set[int] = set()

    def places_of(self, layers: Collection[int]) -> list[int]:
        """The leaves of the state that have a part for each layer of these leaves."""
        one = jax.eval_shape(self._tx.init, _one_layer(self._whole.params, layers))
        pairs = zip(*map(jax.tree.leaves, (self._whole.state, one)), strict=True)
        return [place for place, (x, y) in enumerate(pairs) if x.shape != y.shape]

    def refuse_changed(self, leaf: int) -> None:
        """Raise a ValueError for a parameter that is not just scanned."""
        raise ValueError(
            f"update='in backward': the parameter {self.names[leaf]!r} is scanned "
            "after a change, or used beside the scan; expected one jax.lax.scan that "
            f"takes it as xs, {_OTHERWISE}"
        )

    def scan(
        self,
        bits: Mapping[int, Any],
        run: Callable[..., Any],
        held: Sequence[by_layers.Held],
        loop: prefetch.Loop,
        *,
        keep_gathered: bool,
    ) -> Callable[..., Any]:
        """A scan whose gradient is the new parameters, and the bits of their state."""
        leaves = [x.leaf for x in held]
        for x in held:
            like = self.params[x.leaf]
            is_unchanged = x.x.shape == like.shape and x.spec == _axes(like.ndim)[1:]
            if not is_unchanged or x.leaf not in self.layers - self.done:
                self.refuse_changed(x.leaf)
            self.done.add(x.leaf)
        places, on_each = self.places_of(leaves), self._on_each
        numbers = range(min(on_each.devices, loop.length), loop.length + 1)
        together = next(n for n in numbers if loop.length % n == 0)
        exchange = by_layers.Exchange(on_each.gather, _same)
        of_layer = [dataclasses.replace(x, spec=self.coarse[x.leaf][1:]) for x in held]

        def gather(shards: list[Any]) -> list[Any]:
            pairs = zip(of_layer, shards, strict=True)
            return [x.gathered(exchange, shard) for x, shard in pairs]

        def scatter(grads: list[Any]) -> list[Any]:
            pairs = zip(leaves, grads, strict=True)
            return [self._scatter(g, leaf, self._fine[leaf][1:]) for leaf, g in pairs]

        def layers_of(stack: Any, i: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(stack, i, together)

        def update(i: Any, grads: list[Any], stacks: list[Any], kept: Any) -> Any:
            """Stacks, and the bits of their state, after the update of some layers."""
            params, state = [*self.params], [*self.state]
            all_grads = self._zeros()
            for leaf, stack, g in zip(leaves, stacks, grads, strict=True):
                params[leaf], all_grads[leaf] = layers_of(stack, i), g
            for place, stack in zip(places, kept, strict=True):
                state[place] = _bits(layers_of(stack, i), state[place].dtype)
            params, state = self._call(self._of_layers, all_grads, state, params)
            return [
                put(self.coarse[leaf], stack, params[leaf], i)
                for leaf, stack in zip(leaves, stacks, strict=True)
            ], [
                put(self._specs_of_state[place], stack, _floats(state[place]), i)
                for place, stack in zip(places, kept, strict=True)
            ]

        def put(spec: PartitionSpec, stack: Any, layers: Any, i: Any) -> Any:
            return on_each(_put, (spec, spec, PartitionSpec()), spec)(stack, layers, i)

        scan = prefetch.scan_and_update(
            run,
            gather,
            scatter,
            update,
            loop,
            together=together,
            on_each=on_each,
            keep_gathered=keep_gathered,
        )
        kept = [bits[place] for place in places]

        def scan_of_values(consts: Any, carry: Any, stacks: Any, xs: Any) -> Any:
            for x in xs:
                if isinstance(x, by_layers.Held):
                    self.refuse_changed(x.leaf)
            carry, ys = scan(consts, carry, stacks, on_each.swapped(xs), kept)
            return carry, on_each.swapped(ys)

        return scan_of_values

    def of_others(
        self, grads: Sequence[Any], bits: Mapping[int, Any]
    ) -> tuple[Any, Any]:
        """The new parameters and state, from gradients and from what scans made."""
        of_others = [
            zero
            if leaf in self.done or g.dtype == jax.dtypes.float0
            else self._scatter(g, leaf, self._fine[leaf])
            for leaf, (g, zero) in enumerate(zip(grads, self._zeros(), strict=True))
        ]
        params, state = self._call(self._of_all, of_others, self.state, self.params)
        for leaf in self.done:
            params[leaf] = grads[leaf]
        for place, x in bits.items():
            state[place] = _bits(x, state[place].dtype)
        return self._of_params.unflatten(params), self._of_state.unflatten(state)

    def _scatter(self, g: Any, leaf: int, spec: Any) -> Any:
        spec = PartitionSpec(*spec)
        return self._on_each.scatter(g, spec, self.params[leaf].dtype)

    def _zeros(self) -> list[Any]:
        return [jnp.zeros(x.shape, x.dtype) for x in self.params]

    def _call(
        self, update: Callable[..., Any], grads: Any, state: Any, params: Any
    ) -> tuple[Any, Any]:
        """Leaves of the new parameters and of the new state."""
        params = self._of_params.unflatten(params)
        updates, state = update(
            self._of_params.unflatten(grads),
            self._of_state.unflatten(state),
            params,
            **self.extra,
        )
        return jax.tree.leaves(applied(params, updates)), jax.tree.leaves(state)


class _Init(NamedTuple):
    """What one trace of an optimizer's `init` shows.

    Attributes:
      params: the parameters, or their shapes.
      state: the shapes of the state.
      notes: what the optimizer records.
    """

    params: Any
    state: Any
    notes: notes.Notes

    @classmethod
    def of(cls, tx: optax.GradientTransformation, params: Any) -> "_Init":
        """For these parameters, or their shapes."""
        return cls(params, *notes.traced(tx.init, params))


def _init_of_layer(
    tx: optax.GradientTransformation, whole: _Init, layers: Collection[int]
) -> _Init:
    """`init` for one layer, or a ValueError if it means other matrices than `whole`."""
    if not layers:
        raise ValueError(
            "update='in backward': loss_fn has no scan that takes parameters layer by "
            f"layer; expected a jax.lax.scan with them as xs, {_OTHERWISE}"
        )
    for matrices in whole.notes["matrices"].values():
        for join in matrices.joins or ():
            if len(join.paths) != join.size:
                raise ValueError(
                    f"update='in backward': layers of {join.paths[0]!r} are joined; "
                    f"expected an optimizer without joins over layers, {_OTHERWISE}"
                )
    try:
        one_layer = _Init.of(tx, _one_layer(whole.params, layers))
    except Exception as error:
        raise ValueError(
            "update='in backward': tx.init cannot take one layer of the parameters; "
            "expected matrices=jax_muon.read(params, loss_fn, batch), not a function, "
            f"and transforms that take any number of layers, {_OTHERWISE}"
        ) from error
    for path, parameter in whole.notes["parameters"].items():
        layer = one_layer.notes["parameters"].get(path)
        if layer is None or not parameter.is_read_like(layer):
            raise ValueError(
                f"update='in backward': one layer of the parameter {path!r} is read "
                "otherwise than all of them; expected "
                f"matrices=jax_muon.read(params, loss_fn, batch), {_OTHERWISE}"
            )
    return one_layer


def _check_gradients(
    tx: optax.GradientTransformationExtraArgs,
    one_layer: _Init,
    names: Sequence[str],
    layers: Collection[int],
) -> None:
    """Raise a ValueError if a layer's update needs other gradients, or they need its.

    Layers are updated before those gradients are there.
    """
    flat, treedef = jax.tree.flatten(one_layer.params)
    of_params: Any = treedef

    def update(grads: list[Any], state: Any, params: list[Any], value: Any) -> Any:
        trees = of_params.unflatten(grads), state, of_params.unflatten(params)
        return jax.tree.leaves(tx.update(*trees, value=value)[0])

    value = jax.ShapeDtypeStruct((), jnp.float32)
    with use_abstract_mesh(AbstractMesh((), ())):  # as on one device
        jaxpr = jax.make_jaxpr(update)(flat, one_layer.state, flat, value).jaxpr
    called = {function.partition(".")[0] for function in jaxprs.functions(jaxpr)}
    for name in _OF_STACKS:
        if name in called:
            raise ValueError(
                f"update='in backward': {name} takes a parameter of several layers as "
                f"one; expected an optimizer without it, {_OTHERWISE}"
            )
    for is_layer in (True, False):
        wanted = [(leaf in layers) == is_layer for leaf in range(len(flat))]
        needed = jaxprs.needed_for(jaxpr, wanted)[1][: len(flat)]
        for leaf in np.flatnonzero(np.array(needed) > np.array(wanted)).tolist():
            path = names[wanted.index(True)]
            raise ValueError(
                f"update='in backward': the update of {path!r} needs the gradient of "
                f"{names[leaf]!r}; expected an optimizer without "
                "transforms of all gradients, such as clip_by_global_norm and "
                "skip_nonfinite, or matrices outside of the scan of a layer's shape, "
                f"which share its stack, {_OTHERWISE}"
            )


def _one_layer(params: Any, layers: Collection[int]) -> Any:
    """Shapes of the parameters, with one layer of these leaves."""
    flat, treedef = jax.tree.flatten(params)
    shapes = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]) if i in layers else x.shape, x.dtype)
        for i, x in enumerate(flat)
    ]
    return jax.tree.unflatten(treedef, shapes)


def _axes(ndim: int) -> PartitionSpec:
    """A name for each axis, which shows what operations have done before a scan."""
    return PartitionSpec(*(f"axis {axis}" for axis in range(ndim)))


def _same(x: Any, *_: Any) -> Any:
    return x


def _floats(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])


def _bits(x: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, dtype)


def _put(stack: Any, layers: Any, i: Any) -> Any:
    """The stack with these layers put in at i, in its layout.

    XLA would copy all of it to another one.
    """
    stack = jax.lax.dynamic_update_slice_in_dim(stack, layers, i, 0)
    return with_layout_constraint(stack, Layout(tuple(range(stack.ndim))))
