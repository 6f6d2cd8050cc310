"""Does a loss depend on how its samples are divided between devices, and by what?

A train step computes the loss of each device's samples. That is the loss of the whole
batch if samples are independent, and random numbers belong to samples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import PyTree


def check_loss(
    loss: Callable[[Mesh, int, PyTree], float],
    mesh: Mesh,
    microbatches: int,
    args: tuple[PyTree, PyTree, PyTree],
) -> tuple[str, ...]:
    """What is wrong with a loss on this mesh, in sentences; empty if it is right.

    The loss on the mesh and on one device, both in two orders of the samples. Of 8
    samples on 2 devices the second order exchanges rows between devices, so that a
    sample meets others, and has the same place on a device:

      first   0 1 2 3 | 4 5 6 7
      second  0 5 2 7 | 4 1 6 3

    Args:
      loss: the mean loss on a mesh, in this many microbatches, of the last argument.
      mesh: that of the step.
      microbatches: of the step.
      args: parameters, batch and others.
    """
    devices = np.asarray(mesh.devices)
    whole = Mesh(devices, mesh.axis_names)
    single = Mesh(devices.flat[:1].reshape((1,) * devices.ndim), mesh.axis_names)

    def exchanged(x: Array) -> Array:
        place = np.arange(len(x)).reshape(devices.size, -1)
        columns = np.arange(place.shape[1])
        rows = (np.arange(devices.size)[:, None] + columns) % devices.size
        return x[place[rows, columns].reshape(-1)]

    params, batch, others = args
    again = params, jax.tree.map(exchanged, batch), others
    divided, alone = loss(whole, microbatches, args), loss(single, 1, args)
    bound = _bound(args)

    def differ(x: float, y: float) -> bool:
        return not abs(x - y) <= bound * max(abs(x), abs(y))  # also of a NaN

    if not differ(divided, alone):
        return ()
    text = f"the loss is {divided:.6g} on {devices.size} devices, {alone:.6g} on one: "
    in_groups = differ(loss(whole, microbatches, again), divided)
    by_place = differ(loss(single, 1, again), alone)
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


def _bound(tree: PyTree) -> float:
    """Twice what sums in another order change, relative to the loss."""
    dtypes = [x.dtype for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    narrow = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    bits = min((jnp.finfo(x).bits for x in narrow), default=32)
    return 1e-4 if bits >= 32 else 1e-2
