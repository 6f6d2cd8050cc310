"""Every parameter in another form before the loss takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from tests.rewrites.case import Case, dataclasses, is_float, register


def of_each(least_axes):
    """A rewrite that takes a function of each parameter of so many axes or more."""

    def rewrite(function):
        def leaf(w):
            return function(w) if is_float(w) and w.ndim >= least_axes else w

        def change(case):
            loss = lambda p, *args: case.loss(jax.tree.map(leaf, p), *args)  # noqa: E731
            return dataclasses.replace(case, loss=loss)

        return change

    return rewrite


def twice(function, inverse):
    """One after the other."""
    return lambda w: inverse(function(w))


def rotation(size):
    """A constant orthogonal matrix."""
    square = np.random.default_rng(size).normal(size=(size, size))
    return jnp.asarray(np.linalg.qr(square)[0], jnp.float32)


def shuffled(size):
    """A constant permutation, and its inverse."""
    order = np.random.default_rng(size).permutation(size)
    return order, np.argsort(order)


def permuted_and_back(w):
    order, inverse = shuffled(len(w))
    return w[order][inverse]


def straight_through(w):
    return w + lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)


@jax.custom_vjp
def own_vjp(w):
    return w


own_vjp.defvjp(lambda w: (w, None), lambda _, g: (g,))


@jax.custom_jvp
def own_jvp(w):
    return w


own_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


def under_shard_map(w):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), auto, devices=jax.devices()[:1])
    same = jax.shard_map(lambda w: w * 1.0, mesh=mesh, in_specs=P(), out_specs=P())
    return same(w)


@jax.custom_batching.custom_vmap
def own_vmap(w):
    return w * 1.0


own_vmap.def_vmap(lambda size, is_batched, w: (w * 1.0, is_batched[0]))


def from_devices(w, count=None):
    """Gathered from as many devices as can share its rows equally."""
    count = count or next(n for n in (8, 4, 3, 2, 1) if len(w) % n == 0)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("x",), auto, devices=jax.devices()[:count])
    gather = functools.partial(lax.all_gather, axis_name="x", axis=0, tiled=True)
    specs = {"in_specs": P("x"), "out_specs": P(), "check_vma": False}
    return jax.shard_map(gather, mesh=mesh, **specs)(w)


def norm(w, **axis):
    return jnp.linalg.norm(w, **axis) + 1.0


ANY = {
    "scaled by 1": lambda w: w * 1.0,
    "times a mask of ones": lambda w: w * jnp.ones_like(w),
    "plus zeros": lambda w: jnp.zeros_like(w) + w,
    "half and half": lambda w: 0.5 * w + 0.5 * w,
    "frozen": lax.stop_gradient,
    "bfloat16 and back": lambda w: w.astype(jnp.bfloat16).astype(w.dtype),
    "kept in bfloat16": lambda w: w.astype(jnp.bfloat16),
    "reduce_precision": lambda w: lax.reduce_precision(w, 8, 7),
    "straight-through": straight_through,
    "flat and back": lambda w: w.reshape(-1).reshape(w.shape),
    "transposed twice": lambda w: w.T.T,
    "dynamic_slice of all": lambda w: lax.dynamic_slice(w, [0] * w.ndim, w.shape),
    "dynamic_update_slice": lambda w: lax.dynamic_update_slice(
        jnp.zeros_like(w), w, [0] * w.ndim
    ),
    "set as a row": lambda w: jnp.zeros((3, *w.shape), w.dtype).at[1].set(w)[1],
    "stacked with zeros": lambda w: jnp.stack([w, jnp.zeros_like(w)])[0],
    "optimization_barrier": lax.optimization_barrier,
    "clipped far away": lambda w: jnp.clip(w, -1e9, 1e9),
    "nan_to_num": jnp.nan_to_num,
    "jit": jax.jit(lambda w: w * 1.0),
    "custom_vjp": own_vjp,
    "custom_jvp": own_jvp,
    "custom_vmap": own_vmap,
    "a jvp": lambda w: jax.jvp(lambda w: w * 1.0, [w], [w])[1],
    "fori_loop": lambda w: lax.fori_loop(0, 1, lambda _, w: w * 1.0, w),
    "cond": lambda w: lax.cond(
        jnp.ones(()) > 0, lambda w: w * 1.0, lambda w: w * 1.0, w
    ),
    "an average in a scan": lambda w: lax.scan(
        lambda m, _: (0.5 * m + 0.5 * w, None), w, None, 2
    )[0],
    "shard_map": under_shard_map,
    "device_put": lambda w: jax.device_put(w, jax.devices()[0]),
    "sharding constraint": lambda w: lax.with_sharding_constraint(
        w, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
}
VECTORS = {
    "rows taken": lambda w: jnp.take(w, jnp.arange(len(w)), 0),
    "rows permuted and back": permuted_and_back,
    "rolled and back": lambda w: jnp.roll(jnp.roll(w, 1, 0), -1, 0),
    "flipped twice": lambda w: w[::-1][::-1],
    "halves joined": lambda w: jnp.concatenate([w[: len(w) // 2], w[len(w) // 2 :]]),
    "joined with zeros, cut": lambda w: jnp.concatenate([w, jnp.zeros_like(w)])[
        : len(w)
    ],
    "padded, cut": lambda w: jnp.pad(w, [(1, 2)] * w.ndim)[(slice(1, -2),) * w.ndim],
    "tiled, cut": lambda w: jnp.tile(w, (2,) + (1,) * (w.ndim - 1))[: len(w)],
    "stacked from its rows": lambda w: jnp.stack([*w]),
    "stacked from its columns": lambda w: jnp.stack(
        [w[..., i] for i in range(w.shape[-1])], -1
    ),
    "a row added to itself": lambda w: w.at[0].add(0.0),
    "from devices": from_devices,
    "vmap of rows": jax.vmap(lambda row: row * 1.0),
    "map of rows": lambda w: lax.map(lambda row: row * 1.0, w),
    "running sums, differences": lambda w: jnp.diff(
        jnp.cumsum(w, 0), axis=0, prepend=0
    ),
}
MATRICES = {
    "two triangles": lambda w: jnp.tril(w) + jnp.triu(w, 1),
    "rows normalized and back": lambda w: w / norm(w, axis=0) * norm(w, axis=0),
    "times an identity": lambda w: w @ jnp.eye(w.shape[-1]),
    "rotated and back": lambda w: w @ rotation(w.shape[-1]) @ rotation(w.shape[-1]).T,
}
register("parameter", ANY, of_each(0))
register("parameter", VECTORS, of_each(1))
register("parameter", MATRICES, of_each(2))

# --- all parameters together ----------------------------------------------------------


def of_all(function):
    """A rewrite that takes `function` of the list of all leaves, if all are floats."""

    def change(case: Case):
        if not all(map(is_float, jax.tree.leaves(case.params))):
            return None

        def loss(p, *args):
            leaves, tree = jax.tree.flatten(p)
            return case.loss(tree.unflatten(function(leaves)), *args)

        return dataclasses.replace(case, loss=loss)

    return change


def ravelled(leaves):
    vector, back = ravel_pytree(leaves)
    return back(vector)


def vector_from_devices(leaves):
    vector, back = ravel_pytree(leaves)
    padded = jnp.pad(vector, (0, -vector.size % 8))
    return back(from_devices(padded, 8)[: vector.size])


def of_equal_shapes(function):
    """`function` of each list of leaves with one shape, of which there are several."""

    def of_leaves(leaves):
        leaves = list(leaves)
        for shape in {w.shape: None for w in leaves if w.ndim}:
            places = [i for i, w in enumerate(leaves) if w.shape == shape]
            if len(places) > 1:
                changed = function([leaves[i] for i in places])
                for i, w in zip(places, changed, strict=True):
                    leaves[i] = w
        return leaves

    def change(case: Case):
        shapes = [w.shape for w in jax.tree.leaves(case.params) if w.shape]
        several = len({*shapes}) < len(shapes)
        return of_all(of_leaves)(case) if several else None

    return change


register(
    "parameters",
    {
        "ravel_pytree": ravelled,
        "one vector from devices": vector_from_devices,
    },
    of_all,
)
register(
    "parameters",
    {
        "stacked, indexed": lambda ws: [jnp.stack(ws)[i] for i in range(len(ws))],
        "joined by rows": lambda ws: jnp.split(jnp.concatenate(ws), len(ws)),
        "scaled in one scan": lambda ws: [
            *lax.scan(lambda c, w: (c, w * 1.0), 0, jnp.stack(ws))[1]
        ],
    },
    of_equal_shapes,
)
