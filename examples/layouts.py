"""How a run uses devices: one of them, or a mesh of many.

  none:     one device.
  zero2:    every device holds all parameters and a shard of the optimizer's state.
  fsdp:     parameters are sharded as well.
  hsdp:     fsdp within groups of devices; the groups hold the same parameters, and the
            state is sharded over all devices.

One `jax_muon.make_train_step` serves them all. Checkpoints are the same in every
layout, so a run may resume in another.
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

import jax_muon as jm

# Mesh axes: the batch is divided over all of them, and parameters over "fsdp". They are
# Auto axes, so the model need not mention them.
AXES = {
    "none": ("data",),
    "zero2": ("data",),
    "fsdp": ("fsdp",),
    "hsdp": ("data", "fsdp"),
}


def connect(options: argparse.Namespace) -> Mesh:
    """Connects to the other processes, if any, and makes a mesh of all devices.

    Raises:
        ValueError: too few devices, or they do not fit the mesh or the batch.
    """
    if options.devices and options.devices > 1:
        # A CPU can pose as any number of devices if this precedes the first use of JAX.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        given = (options.coordinator, options.processes, options.process_id)
        # JAX finds the values that are None in the environment of the cluster.
        jax.distributed.initialize(*given)
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
    # By default two groups for hsdp.
    alone = (2, max(1, count // 2)) if options.sharding == "hsdp" else (count,)
    shape = options.mesh or alone
    if math.prod(shape) != count:
        raise ValueError(
            f"a mesh of {' x '.join(map(str, shape))} for {count} devices; expected "
            f"with --mesh A,B two numbers whose product is {count}, or --devices "
            f"{math.ceil(math.prod(shape) / jax.process_count())}"
        )
    mesh = Mesh(np.array(devices).reshape(shape), AXES[options.sharding])
    if options.batch_size % count:
        raise ValueError(
            f"--batch-size {options.batch_size} does not divide over {count} "
            f"devices; expected a multiple of {count}"
        )
    return mesh


def place(params: Any, mesh: Mesh, matrices: jm.Matrices) -> Any:
    """Where the parameters are: for `jax_muon.on_mesh`."""
    return jm.fsdp(params, mesh, matrices, "fsdp") if "fsdp" in mesh.shape else mesh


def put(windows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Shard the windows of a batch (16, 129), or of batches (8, 16, 129)."""
    spec = PartitionSpec(*[None] * (windows.ndim - 2), mesh.axis_names)
    return jax.make_array_from_callback(
        windows.shape, NamedSharding(mesh, spec), windows.__getitem__
    )


def gather(params: Any, mesh: Mesh) -> Any:
    """All-gather the parameters to the host memory of every process."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.device_get(jax.jit(lambda x: x, out_shardings=whole)(params))


def writes() -> bool:
    """True in the process that writes files and shows progress."""
    return jax.process_index() == 0


def in_any(flag: bool) -> bool:
    """True in every process if the flag is set in any; all processes must call this."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def once(function: Callable[..., Any], *args: Any) -> None:
    """Calls a function in the process that writes; the others wait.

    Raises:
        Exception: raised by the function, in every process, so that all of them stop.
    """
    error = None
    if writes():
        try:
            function(*args)
        except Exception as raised:
            error = raised
    if in_any(error is not None):
        raise error or ValueError("the first process failed; its output says why")
