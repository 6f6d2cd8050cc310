"""A train step that updates scanned layers inside the backward pass, on one device.

A layer is updated as soon as its gradient is there, so gradients of all layers never
exist at once. The optimizer is called once for each layer, with the parameters, the
gradient and the state of that layer in the place of the stacks, and once for all other
parameters. What a call computes beside is not used, and XLA removes it.

New state leaves the backward pass where a gradient would, with its bits read as floats:
`jax.custom_vjp` has no gradients of integers.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from jax_muon import checks, jaxprs, notes, paths
from jax_muon.dtypes import wide
from jax_muon.mesh import by_layers, prefetch
from jax_muon.mesh.gradients import MeanGradients

_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
_OTHERWISE = "or update='after backward'"


def step(
    gradients: MeanGradients,
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    state: Any,
    batch: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    """New parameters, new state and metrics, as those of `make_train_step`."""
    specs = [_axes(x.ndim) for x in jax.tree.leaves(params)]
    traced = by_layers.ByLayers(gradients.loss, (params, batch), specs, (), _gather)
    updates = _Updates(tx, params, state, traced.held & traced.only_scanned)

    def loss_fn(params: Any, bits: Any) -> Any:
        scan = functools.partial(updates.scan, bits)
        return traced(by_layers.Exchange(_gather, _scatter, scan=scan), params, batch)

    bits = {
        place: _floats(updates.state[place])
        for place in updates.places_of(updates.layers)
    }
    loss, pull, (_, aux, _) = jax.vjp(loss_fn, params, bits, has_aux=True)
    updates.extra = {"value": wide(loss)}
    grads, bits = pull(jnp.ones_like(loss))
    params, state = updates.of_others(jax.tree.leaves(grads), bits)
    metrics = {"loss": wide(loss)}
    if gradients.loss.has_aux:
        metrics["aux"] = jax.tree.map(lambda x: x / 1, aux)  # a mean, as of several
    return params, state, metrics


class _Updates:
    """The calls of an optimizer in one step.

    Attributes:
      layers: the indices of the leaves that scans take.
      params: the leaves of the parameters before the step.
      state: those of the state.
      extra: further arguments of the optimizer, known after the forward pass.
      done: the leaves of the parameters that scans have updated.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        params: Any,
        state: Any,
        layers: Collection[int],
    ) -> None:
        """Check the optimizer's state, and that it can update these layers."""
        self._tx, self.layers = tx, frozenset(layers)
        self._names = [path for path, _ in paths.leaves_with_paths(params)]
        self._whole = _Init.of(tx, params)
        checks.state(state, self._whole.state)
        layer = _check(tx, self._whole, self._names, self.layers)
        self._single = {self.layers: layer}  # by the leaves that one layer is taken of
        self.params, self.state = jax.tree.leaves(params), jax.tree.leaves(state)
        self._of_params: Any = jax.tree.structure(params)
        self._of_state: Any = jax.tree.structure(state)
        self.extra: dict[str, Any] = {}
        self.done: set[int] = set()

    def places_of(self, layers: frozenset[int]) -> list[int]:
        """The leaves of the state that have a part for each layer of these leaves."""
        if layers not in self._single:  # there are several scans
            like = _one_layer(self._whole.params, layers)
            self._single[layers] = _Init.of(self._tx, like)
        trees = self._whole.state, self._single[layers].state
        pairs = zip(*map(jax.tree.leaves, trees), strict=True)
        return [place for place, (x, y) in enumerate(pairs) if x.shape != y.shape]

    def scan(
        self,
        bits: Mapping[int, Any],
        run: Callable[..., Any],
        held: Sequence[by_layers.Held],
        *,
        keep_gathered: bool,
        **given_to_scan: Any,
    ) -> Callable[..., Any]:
        """A scan whose gradient is the new parameters, and the bits of their state."""
        del keep_gathered  # nothing is gathered
        leaves = [x.leaf for x in held]
        for x in held:
            like = self.params[x.leaf]
            is_unchanged = x.x.shape == like.shape and x.spec == _axes(like.ndim)[1:]
            if not is_unchanged or x.leaf not in self.layers - self.done:
                raise ValueError(
                    f"update='in backward': the parameter {self._names[x.leaf]!r} is "
                    "scanned after a change, or used beside the scan; expected one "
                    f"jax.lax.scan that takes it as xs, {_OTHERWISE}"
                )
            self.done.add(x.leaf)
        places = self.places_of(frozenset(leaves))

        def layer_of(shards: list[Any]) -> list[Any]:
            exchange = by_layers.Exchange(_gather, _scatter)
            return [x.gathered(exchange, y) for x, y in zip(held, shards, strict=True)]

        def update(i: Any, grads: list[Any], stacks: list[Any], kept: Any) -> Any:
            """The stacks, and the bits of their state, with layer i updated."""
            params, state = [*self.params], [*self.state]
            all_grads = self._zeros()
            for leaf, stack, g in zip(leaves, stacks, grads, strict=True):
                params[leaf], all_grads[leaf] = _at(stack, i), g[None]
            for place, stack in zip(places, kept, strict=True):
                state[place] = _bits(_at(stack, i), state[place].dtype)
            params, state = self._call(all_grads, state, params)
            layers = [params[leaf] for leaf in leaves]
            parts = [_floats(state[place]) for place in places]
            return [
                [_put(stack, x, i) for stack, x in zip(*pair, strict=True)]
                for pair in ((stacks, layers), (kept, parts))
            ]

        scan = prefetch.scan_and_update(run, layer_of, update, **given_to_scan)
        kept = [bits[place] for place in places]
        return lambda consts, carry, stacks, xs: scan(consts, carry, (stacks, kept), xs)

    def of_others(
        self, grads: Sequence[Any], bits: Mapping[int, Any]
    ) -> tuple[Any, Any]:
        """The new parameters and state, from gradients and from what scans made."""
        of_others = [
            zero if leaf in self.done or g.dtype == jax.dtypes.float0 else g
            for leaf, (g, zero) in enumerate(zip(grads, self._zeros(), strict=True))
        ]
        params, state = self._call(of_others, self.state, self.params)
        for leaf, old in enumerate(self.params):
            if leaf in self.done:
                params[leaf] = grads[leaf]
            elif not jnp.issubdtype(old.dtype, jnp.inexact):
                params[leaf] = old
        for place, x in bits.items():
            state[place] = _bits(x, state[place].dtype)
        return self._of_params.unflatten(params), self._of_state.unflatten(state)

    def _zeros(self) -> list[Any]:
        return [jnp.zeros(x.shape, x.dtype) for x in self.params]

    def _call(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Leaves of the new parameters and of the new state."""
        params = self._of_params.unflatten(params)
        updates, state = self._tx.update(
            self._of_params.unflatten(grads),
            self._of_state.unflatten(state),
            params,
            **self.extra,
        )
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves(params), jax.tree.leaves(state)


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
        with notes.listening() as heard:
            # A new function, so that JAX traces it.
            state = jax.eval_shape(lambda params: tx.init(params), params)
        return cls(params, state, heard)


def _check(
    tx: optax.GradientTransformationExtraArgs,
    whole: _Init,
    names: Sequence[str],
    layers: Collection[int],
) -> _Init:
    """One layer of these leaves.

    Raises:
      ValueError: for an optimizer whose update of a layer needs more than that layer.
    """
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
        single = _Init.of(tx, _one_layer(whole.params, layers))
    except Exception as error:
        raise ValueError(
            "update='in backward': tx.init cannot take one layer of the parameters; "
            "expected matrices=jax_muon.read(params, loss_fn, batch), not a function, "
            f"and transforms that take any number of layers, {_OTHERWISE}"
        ) from error
    for path, parameter in whole.notes["parameters"].items():
        layer = single.notes["parameters"].get(path)
        if layer is None or (parameter.label, parameter.axes) != (
            layer.label,
            layer.axes,
        ):
            raise ValueError(
                f"update='in backward': one layer of the parameter {path!r} is read "
                "otherwise than all of them; expected "
                f"matrices=jax_muon.read(params, loss_fn, batch), {_OTHERWISE}"
            )
    flat, treedef = jax.tree.flatten(single.params)
    of_params: Any = treedef

    def update(grads: list[Any], state: Any, params: list[Any], value: Any) -> Any:
        trees = of_params.unflatten(grads), state, of_params.unflatten(params)
        return jax.tree.leaves(tx.update(*trees, value=value)[0])

    value = jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = jax.make_jaxpr(update)(flat, single.state, flat, value).jaxpr
    for is_layer in (True, False):
        wanted = [(leaf in layers) == is_layer for leaf in range(len(flat))]
        needed = jaxprs.needed_for(jaxpr, wanted)[1][: len(flat)]
        for leaf in np.flatnonzero(np.array(needed) > np.array(wanted)).tolist():
            path = names[wanted.index(True)]
            raise ValueError(
                f"update='in backward': the update of {path!r} needs the gradient of "
                f"{names[leaf]!r}; expected an optimizer without "
                "transforms of all gradients, such as clip_by_global_norm and "
                f"skip_nonfinite, {_OTHERWISE}"
            )
    return single


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


def _gather(x: Any, _: PartitionSpec) -> Any:
    return x


def _scatter(g: Any, _: PartitionSpec, dtype: Any) -> Any:
    return g.astype(dtype)


def _floats(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])


def _bits(x: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, dtype)


def _at(stack: Any, i: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(stack, i, 1)


def _put(stack: Any, layer: Any, i: Any) -> Any:
    """The stack with this layer, in its layout: XLA would copy all to another one."""
    stack = jax.lax.dynamic_update_slice_in_dim(stack, layer, i, 0)
    return with_layout_constraint(stack, Layout(tuple(range(stack.ndim))))
