"""Does a loss depend on how its samples are divided between devices, and by what?

A train step computes the loss of each device's samples. That is the loss of the whole
batch if samples are independent, and random numbers belong to samples.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jax_muon.base.dtypes import wide
from jax_muon.mesh.communicator import Communicator, Scans, scanning

# The loss of one device's microbatch, and its weight.
Loss = Callable[..., tuple[Array, tuple[Array | None, PyTree, PyTree]]]


def check_loss(
    loss: Loss,
    mesh: Mesh,
    microbatches: int,
    params: PyTree,
    batch: PyTree,
    others: Sequence[PyTree],
) -> tuple[str, ...]:
    """What is wrong with a loss on this mesh, in sentences; empty if it is right.

    The loss on the mesh and on one device, both in two orders of the samples. Of 8
    samples on 2 devices the second order exchanges rows between devices, so that a
    sample meets others, and has the same place on a device:

      first   0 1 2 3 | 4 5 6 7
      second  0 5 2 7 | 4 1 6 3
    """
    devices = np.asarray(mesh.devices)
    whole = Mesh(devices, mesh.axis_names)
    single = Mesh(devices.flat[:1].reshape((1,) * devices.ndim), mesh.axis_names)

    def exchanged(x: Array) -> Array:
        place = np.arange(len(x)).reshape(devices.size, -1)
        columns = np.arange(place.shape[1])
        rows = (np.arange(devices.size)[:, None] + columns) % devices.size
        return x[place[rows, columns].reshape(-1)]

    def value(mesh: Mesh, parts: int, batch: PyTree) -> float:
        return _mean(loss, mesh, parts, params, batch, others)

    again = jax.tree.map(exchanged, batch)
    divided, alone = value(whole, microbatches, batch), value(single, 1, batch)
    bound = _bound(params, batch, others)

    def differ(x: float, y: float) -> bool:
        return not abs(x - y) <= bound * max(abs(x), abs(y))  # also of a NaN

    if not differ(divided, alone):
        return ()
    text = f"the loss is {divided:.6g} on {devices.size} devices, {alone:.6g} on one: "
    in_groups = differ(value(whole, microbatches, again), divided)
    by_place = differ(value(single, 1, again), alone)
    if in_groups and not by_place:
        return (
            f"{text}samples interact, and each device has only its own. For negatives "
            "of the whole batch use jax.lax.all_gather(v, axes, tiled=True), for "
            "BatchNorm axis_name=axes, for a mean over a mask weighted=True",
        )
    if by_place and not in_groups:
        return (
            f"{text}the loss draws random numbers for all samples from one key, and "
            "each device draws the same for its own. Use one key per sample in the "
            "batch: jax.random.split(key, samples)",
        )
    return (f"{text}the loss depends on the number of devices",)


def _mean(
    loss: Loss,
    mesh: Mesh,
    parts: int,
    params: PyTree,
    batch: PyTree,
    others: Sequence[PyTree],
) -> float:
    """The mean loss over devices and microbatches, by their weights."""
    axes, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()

    def local(params: PyTree, batch: PyTree, others: Sequence[PyTree]) -> Array:
        pairs = []
        scans = Scans(Communicator(mesh, mesh.axis_names, None, None), {})
        for i in range(parts):
            part = jax.tree.map(
                lambda x, i=i: x.reshape(parts, len(x) // parts, *x.shape[1:])[i], batch
            )
            with scanning(scans):
                value, (weight, _, _) = loss(params, part, *others)
            pairs.append((wide(value), jnp.ones(()) if weight is None else weight))
        values, weights = (jnp.stack(x) for x in zip(*pairs, strict=True))
        weighed = jnp.where(weights == 0, 0, values * weights)
        total, count = jax.lax.psum((weighed.sum(), weights.sum()), mesh.axis_names)
        return total / jnp.where(count == 0, 1, count)

    specs = everywhere, axes, everywhere
    args = tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((params, batch, tuple(others)), specs, strict=True)
    )
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
        return float(jax.jit(mapped)(*args))


def _bound(*trees: PyTree) -> float:
    """Twice what sums in another order change, relative to the loss."""
    dtypes = [x.dtype for x in jax.tree.leaves(trees) if hasattr(x, "dtype")]
    narrow = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    bits = min((jnp.finfo(x).bits for x in narrow), default=32)
    return 1e-4 if bits >= 32 else 1e-2
