"""A whole train step in one shard_map: local gradients, update, mean loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.mesh.axes import AxisName, axis_names, vary, varying_axes
from jax_muon.mesh.owned import check_devices, is_owned, state_specs
from jax_muon.polar.products import wide
from jax_muon.reading import paths


def init_optimizer(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh
) -> optax.OptState:
    """Optimizer state on a mesh: divided where `tx` divides it, else replicated.

    Args:
      tx: a transform, such as a recipe with `zero2_axis=`, or plain.
      params: parameters, on one device or replicated over the mesh.
      mesh: the mesh whose axes `tx` names.

    Returns:
      The state, as global arrays.

    Raises:
      ValueError: `tx` names an axis that the mesh does not have.
    """
    specs = state_specs(abstract_state(tx, params, mesh))
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    return jax.jit(init)(replicate(params, mesh))


def abstract_state(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh
) -> optax.OptState:
    """The state as one device holds it: shapes and dtypes, nothing computed."""
    seen: list[Any] = []

    def probe(params: optax.Params) -> None:
        state = tx.init(params)
        seen.append(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        )

    empty = PartitionSpec()
    jax.eval_shape(
        jax.shard_map(probe, mesh=mesh, in_specs=empty, out_specs=empty), params
    )
    return seen[0]


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def _size(mesh: Mesh, axis: AxisName) -> int:
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: AxisName = "data",
    has_aux: bool = False,
    max_aux: str | Sequence[str] = (),
    weighted: bool = False,
    microbatches: int = 1,
    donate: bool = True,
) -> Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]]:
    """A jitted train step over a batch that is divided between devices.

    Args:
      loss_fn: `loss_fn(params, batch)` gives the mean loss of its batch, a scalar;
        with `weighted`, the pair (mean loss, weight), where the weight says how much
        the mean counts: the number of unmasked tokens, for example. With `has_aux`, a
        pair of that and a tree of arrays.
      tx: an optimizer that takes local gradients, such as a recipe with `zero2_axis=`.
      mesh: the mesh.
      axis: mesh axis, or axes, over which batches are divided along their leading axis.
      has_aux: whether loss_fn gives auxiliary output.
      max_aux: with a dictionary as auxiliary output, the entries of which not the mean
        counts but the maximum, over devices and microbatches. `tx` gets them as extra
        arguments of these names: "max_logits" for `clip_qk`.
      weighted: whether loss_fn gives weights.
      microbatches: number of parts that a device's batch is taken in, one after
        another; the gradients are added up, and communicated once.
      donate: whether parameters and state are updated in place.

    Returns:
      `step(params, opt_state, batch) -> (params, opt_state, metrics)`, where metrics
      has "loss", the mean over the whole batch, and with `has_aux` "aux", its mean over
      devices and microbatches, or maximum where `max_aux` says so.

    Raises:
      ValueError: microbatches below 1, an axis that the mesh does not have, max_aux
        without has_aux; at the first call, a batch that microbatches or devices do not
        divide, auxiliary output without an entry of max_aux.
    """
    names = axis_names(axis)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis={name!r}: valid are the mesh axes {mesh.axis_names}"
            )
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: valid is at least 1")
    largest_names = (max_aux,) if isinstance(max_aux, str) else tuple(max_aux)
    if largest_names and not has_aux:
        raise ValueError(f"max_aux={max_aux!r}: valid with has_aux=True")
    tx = optax.with_extra_args_support(tx)
    batch_spec = PartitionSpec(names)
    devices = _size(mesh, axis)

    def split_loss(params: Any, batch: Any) -> tuple[Any, Any]:
        loss = loss_fn(params, batch)
        loss, aux = loss if has_aux else (loss, ())
        loss, weight = loss if weighted else (loss, 1.0)
        return loss, (wide(jnp.asarray(weight, jnp.result_type(float))), aux)

    def totals(params: Any, batch: Any) -> tuple[Any, Any]:
        """What adds up over microbatches, and what takes the maximum.

        Weight, loss and gradients times it, and aux; then the entries of max_aux. In at
        least float32: weights may be more than float16 can hold.
        """
        gradient = jax.value_and_grad(split_loss, has_aux=True)
        (loss, (weight, aux)), grads = gradient(params, batch)
        weight = vary(weight.astype(wide(loss).dtype), axis)
        grads = jax.tree.map(lambda g: wide(g) * weight.astype(wide(g).dtype), grads)
        largest = {}
        if largest_names:
            _check_entries(aux, largest_names)
            largest = {name: aux[name] for name in largest_names}
            aux = {name: x for name, x in aux.items() if name not in largest}
        loss = vary(wide(loss), axis) * weight
        # Marked here, since a scan wants the same marks on what goes in and comes out.
        aux, largest = jax.tree.map(lambda x: vary(x, axis), (aux, largest))
        return (weight, loss, grads, aux), largest

    def local_step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        # Without this, jax.grad of a replicated input sums over devices by itself.
        local = jax.tree.map(lambda p: vary(p, axis), params)
        if microbatches == 1:
            (weight, loss, grads, aux), largest = totals(local, batch)
        else:
            parts = jax.tree.map(
                lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch
            )

            def add(total: Any, part: Any) -> tuple[Any, None]:
                added, largest = totals(local, part)
                return (
                    jax.tree.map(jnp.add, total[0], added),
                    jax.tree.map(jnp.maximum, total[1], largest),
                ), None

            first = totals(local, jax.tree.map(lambda x: x[0], parts))
            rest = jax.tree.map(lambda x: x[1:], parts)
            ((weight, loss, grads, aux), largest), _ = jax.lax.scan(add, first, rest)

        total = jax.lax.psum(weight, names)
        # A batch in which nothing counts has no gradient.
        share = jnp.where(total > 0, devices / jnp.where(total > 0, total, 1), 0)
        grads = jax.tree.map(
            lambda g, p: (g * share.astype(g.dtype)).astype(p.dtype), grads, params
        )
        largest = jax.tree.map(lambda x: jax.lax.pmax(x, names), largest)
        updates, state = tx.update(grads, state, params, **largest)
        _check_same_everywhere(updates, names)
        metrics = {"loss": jax.lax.pmean(loss * share, names)}
        if has_aux:
            mean = jax.tree.map(lambda x: jax.lax.pmean(x / microbatches, names), aux)
            metrics["aux"] = {**mean, **largest} if largest_names else mean
        return optax.apply_updates(params, updates), state, metrics

    explicit = AxisType.Explicit in mesh.axis_types

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if not leaf.shape or leaf.shape[0] % (devices * microbatches):
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} of shape {leaf.shape}: valid "
                    f"is a leading axis that {devices} devices x {microbatches} "
                    "microbatches divide"
                )
        for node in jax.tree.leaves(state, is_leaf=is_owned):
            if is_owned(node):
                check_devices(node, _size(mesh, node.layout.axis))
        _check_state(state, abstract_state(tx, params, mesh))
        specs = state_specs(state)
        if explicit:
            batch = jax.reshard(batch, NamedSharding(mesh, batch_spec))
        return jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(PartitionSpec(), specs, batch_spec),
            out_specs=(PartitionSpec(), specs, PartitionSpec()),
        )(params, state, batch)

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())


def _check_state(state: Any, valid: Any) -> None:
    if jax.tree.structure(state) != jax.tree.structure(valid):  # type: ignore[operator]
        raise ValueError(
            "the state given to the train step is not one of its optimizer on these "
            "parameters and this mesh; valid is what init_optimizer gives, or "
            "from_portable for a portable or single-device state. Given: "
            f"{jax.tree.structure(state)}; valid: {jax.tree.structure(valid)}"
        )


def _check_entries(aux: Any, names: tuple[str, ...]) -> None:
    there = aux.keys() if isinstance(aux, Mapping) else ()
    missing = set(names) - set(there)
    if missing:
        raise ValueError(
            f"max_aux={names}: loss_fn gives auxiliary output without "
            f"{sorted(missing)}; valid is a dictionary that has them, given was "
            + (f"one of {sorted(there)}" if there else repr(type(aux)))
        )


def _check_same_everywhere(updates: Any, names: tuple[str, ...]) -> None:
    for path, leaf in paths.leaves_with_paths(updates):
        differing = varying_axes(leaf) & set(names)
        if differing:
            raise ValueError(
                f"the update of {path!r} differs between the devices of the mesh axis "
                f"{sorted(differing)}; valid is an optimizer that reduces over "
                f"{names}: a recipe with zero2_axis={names}, and guards with "
                f"axis={names}"
            )
