"""Where a run lives: on one device, or on a mesh of many. The mesh alone tells how.

  none:     one device.
  zero2:    every device holds all parameters, and a part of the optimizer's state.
  fsdp:     every device holds a part of each parameter, too.
  fsdp,tp:  heads and the inside of the MLP are divided as well, over a second axis of
            the mesh, along which the batch is the same.
  hsdp:     fsdp within groups of devices that repeat one another, but for the state,
            of which every device holds a part.

One `jax_muon.make_train_step` serves them all. What a checkpoint holds is the same in
all of them, so that a run may go on in another.
"""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Axes of the mesh. They are Auto, so that the model says nothing of them.
AXES = {
    "none": ("data",),
    "zero2": ("data",),
    "fsdp": ("fsdp",),
    "fsdp,tp": ("fsdp", "tp"),
    "hsdp": ("data", "fsdp"),
}

# For kernels (in, out): what a block reads from its stream, and what it adds to it.
COLUMNS = ("fsdp", "tp")
ROWS = ("tp", "fsdp")
SPECS = {
    **dict.fromkeys(("q", "k", "v", "up", "lm_head"), COLUMNS),
    **dict.fromkeys(("out", "down", "embed"), ROWS),  # embed: (vocabulary, width)
}


def connect(options: argparse.Namespace) -> Mesh:
    """Joins the other processes, if there are any, and lays out the devices of all.

    Raises:
        ValueError: there are fewer devices than asked for, or they do not fit the mesh
            or the batch.
    """
    if options.devices and options.devices > 1:
        # A CPU shows as many devices as one likes, if it is told before the first use.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        given = (options.coordinator, options.processes, options.process_id)
        jax.distributed.initialize(*given)  # None: the cluster tells
    here = jax.local_device_count()
    used = 1 if options.sharding == "none" else options.devices
    if used and used > here:
        raise ValueError(
            f"--devices {used}: this process has {here} {jax.default_backend()} "
            f"devices; expected 1 to {here}"
        )
    devices = [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)[:used]
    ]
    count = len(devices)
    # By default 2 groups that repeat one another, and 2 devices along tp.
    half = max(1, count // 2)
    pair = {"hsdp": (2, half), "fsdp,tp": (half, 2)}
    shape = options.mesh or pair.get(options.sharding, (count,))
    if math.prod(shape) != count:
        raise ValueError(
            f"a mesh of {' x '.join(map(str, shape))} for {count} devices; expected "
            f"with --mesh A,B two numbers whose product is {count}, or --devices "
            f"{math.ceil(math.prod(shape) / jax.process_count())}"
        )
    mesh = Mesh(np.array(devices).reshape(shape), AXES[options.sharding])
    parts = math.prod(mesh.shape[name] for name in batch_axes(mesh))
    if options.batch_size % parts:
        raise ValueError(
            f"--batch-size {options.batch_size} does not divide over {parts} "
            f"devices; expected a multiple of {parts}"
        )
    return mesh


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh that divide batches."""
    return tuple(name for name in mesh.axis_names if name != "tp")


def specs(params: Any, mesh: Mesh) -> Any:
    """How parameters lie between steps: `SPECS` by the last name that is in it.

    An axis that the devices do not divide stays whole.
    """

    def spec(key_path: tuple[Any, ...], x: jax.Array) -> PartitionSpec:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        names = next(SPECS[name] for name in path.split("/") if name in SPECS)
        return PartitionSpec(
            *(
                name if name in mesh.shape and size % mesh.shape[name] == 0 else None
                for name, size in zip(names, x.shape, strict=True)
            )
        )

    return jax.tree_util.tree_map_with_path(spec, params)


def put(windows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Batches (16, 129) or (8, 16, 129), their windows spread over the devices."""
    spec = PartitionSpec(*[None] * (windows.ndim - 2), batch_axes(mesh))
    return jax.make_array_from_callback(
        windows.shape, NamedSharding(mesh, spec), windows.__getitem__
    )


def gather(params: Any, mesh: Mesh) -> Any:
    """The parameters whole, in the memory of every process."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.device_get(jax.jit(lambda x: x, out_shardings=whole)(params))


def writes() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def in_any(flag: bool) -> bool:
    """Whether a flag is up in any of the processes, all of which ask at this point."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def once(function: Callable[..., Any], *args: Any) -> None:
    """Calls a function in the process that writes, while all others wait for it.

    Raises:
        Exception: what the function raises, in every process, so that none waits on.
    """
    error = None
    if writes():
        try:
            function(*args)
        except Exception as raised:
            error = raised
    if in_any(error is not None):
        raise error or ValueError("the first process could not go on; it says why")
