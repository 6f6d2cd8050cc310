"""Where a run lives: on one device, or on the devices of a mesh in one of three ways.

  zero2:    every device holds the parameters, and a part of the optimizer's state.
  fsdp:     every device holds a part of each, and its part of the batch.
  fsdp,tp:  heads and the inside of the MLP are divided as well, over a second axis of
            the mesh, along which the batch is the same.

What a checkpoint holds is the same in all of them, so that a run may go on in another.
"""

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_muon as jm

# For kernels (in, out): what a block reads from its stream, and what it adds to it.
COLUMNS = PartitionSpec("fsdp", "tp")
ROWS = PartitionSpec("tp", "fsdp")
SPECS = {
    **dict.fromkeys(("q", "k", "v", "up", "lm_head"), COLUMNS),
    **dict.fromkeys(("out", "down", "embed"), ROWS),  # embed: (vocabulary, width)
}


def connect(options: argparse.Namespace) -> "Layout":
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
    if options.sharding == "none":
        return Layout()
    here = jax.local_device_count()
    if options.devices and options.devices > here:
        raise ValueError(
            f"--devices {options.devices}: this process has {here} "
            f"{jax.default_backend()} devices; valid are 1 to {here}"
        )
    devices = [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)[: options.devices]
    ]
    count = len(devices)
    if options.sharding == "fsdp,tp":
        shape = options.mesh or (count // 2, 2)
        if math.prod(shape) != count:
            raise ValueError(
                f"a mesh of {' x '.join(map(str, shape))} for {count} devices; valid "
                f"with --mesh FSDP,TP are two numbers whose product is {count}"
            )
        layout = Layout(Mesh(np.array(devices).reshape(shape), ("fsdp", "tp")))
    elif options.sharding == "fsdp":
        layout = Layout(Mesh(np.array(devices), ("fsdp",)))
    else:
        layout = Zero2(Mesh(np.array(devices), ("data",)))
    parts = layout.mesh.shape[layout.batch_axis]
    if options.batch_size % parts:
        raise ValueError(
            f"--batch-size {options.batch_size} does not divide over {parts} "
            f"devices; valid are multiples of {parts}"
        )
    return layout


@dataclasses.dataclass(frozen=True)
class Layout:
    """One device, or parameters that are divided over a mesh: plain jit either way.

    The axes of the mesh are Auto, so that the model says nothing of them: the compiler
    divides its work as parameters and batches lie.
    """

    mesh: Mesh | None = None
    batch_axis = "fsdp"

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return jax.process_index() == 0

    def wait(self, what: str) -> None:
        """Until all processes are here."""
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(what)

    def place(self, params: Any) -> Any:
        """The parameters where the run needs them."""
        if self.mesh is None:
            return params
        return jax.device_put(params, shardings(params, self.mesh))

    def settings(self, params: Any) -> dict[str, Any]:
        """What the optimizers of jax_muon have to know: more arguments of a recipe."""
        if self.mesh is None:
            return {}
        return {"mesh": self.mesh, "specs": places(params)}

    def init(self, tx: optax.GradientTransformation, params: Any) -> Any:
        """The state of an optimizer at the beginning."""
        there = places(jm.abstract_portable(tx, params, self.mesh))
        return jax.jit(tx.init, out_shardings=there)(params)

    def make_step(
        self,
        loss: Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]],
        tx: optax.GradientTransformation,
        max_aux: tuple[str, ...] = (),
    ) -> Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]]:
        """A compiled step: (params, state, batch) to (params, state, metrics).

        Those entries beside the loss that max_aux names go to the optimizer, too.
        """

        def step(params, state, batch):
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, aux), grads = gradient(params, batch)
            extra = {name: aux[name] for name in max_aux}
            updates, state = tx.update(grads, state, params, **extra)
            metrics = {"loss": value, "aux": aux}
            return optax.apply_updates(params, updates), state, metrics

        return jax.jit(step, donate_argnums=(0, 1))

    def batch(self, windows: np.ndarray) -> Any:
        """Batches (16, 129) or (8, 16, 129), their windows spread over the devices."""
        if self.mesh is None:
            return windows
        spec = PartitionSpec(*[None] * (windows.ndim - 2), self.batch_axis)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(
            windows.shape, sharding, windows.__getitem__
        )

    def gather(self, params: Any) -> Any:
        """The parameters whole, in the memory of every process."""
        if self.mesh is not None:
            whole = NamedSharding(self.mesh, PartitionSpec())
            params = jax.jit(lambda params: params, out_shardings=whole)(params)
        return jax.device_get(params)

    def abstract(self, tx: optax.GradientTransformation, params: Any) -> dict[str, Any]:
        """Shapes and places of what a checkpoint of this run holds."""
        return {
            "params": jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                params,
            ),
            "opt_state": jm.abstract_portable(tx, params, self.mesh),
        }

    def save(self, params: Any, state: Any) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"params": params, "opt_state": jm.to_portable(state)}

    def restore(
        self, tx: optax.GradientTransformation, saved: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Parameters and state from a checkpoint of any layout."""
        params = saved["params"]
        return params, jm.from_portable(tx, params, saved["opt_state"], self.mesh)


class Zero2(Layout):
    """Parameters that every device holds, and optimizers that divide their own work."""

    batch_axis = "data"

    def place(self, params: Any) -> Any:
        return jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))

    def settings(self, params: Any) -> dict[str, Any]:
        return {"zero2_axis": "data"}

    def init(self, tx: optax.GradientTransformation, params: Any) -> Any:
        return jm.init_optimizer(tx, params, self.mesh)

    def make_step(self, loss, tx, max_aux=()):
        return jm.make_train_step(loss, tx, self.mesh, has_aux=True, max_aux=max_aux)


def places(tree: Any) -> Any:
    """Where the arrays of a tree lie."""
    return jax.tree.map(lambda x: x.sharding, tree)


def shardings(params: Any, mesh: Mesh) -> Any:
    """Where parameters go: `SPECS` by the last name that is in it.

    An axis that the devices do not divide stays whole.
    """

    def sharding(key_path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        spec = next(SPECS[name] for name in path.split("/") if name in SPECS)
        sizes = [mesh.shape.get(name, 1) for name in spec]
        entries = [
            name if devices > 1 and size % devices == 0 else None
            for name, devices, size in zip(spec, sizes, x.shape, strict=True)
        ]
        while entries and entries[-1] is None:
            entries.pop()  # as jit writes it, or it would compile the second step again
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(sharding, params)
