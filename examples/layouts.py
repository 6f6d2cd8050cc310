"""Where a run lives: on one device, or by ZeRO-2 on the devices of a mesh.

With ZeRO-2 every device holds the parameters, and a part of the optimizer's state. What
a checkpoint holds is the same in every layout, so that a run may go on in another one.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_muon as jm


def connect(options: argparse.Namespace) -> "Layout":
    """Joins the other processes, if there are any, and lays out the devices of all.

    Raises:
        ValueError: there are fewer devices than asked for.
    """
    if options.devices and options.devices > 1:
        # A CPU shows as many devices as one likes, if it is told before the first use.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        given = (options.coordinator, options.processes, options.process_id)
        jax.distributed.initialize(*given)  # None: the cluster tells
    if options.sharding == "none":
        return Layout(None)
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
    if options.batch_size % len(devices):
        raise ValueError(
            f"--batch-size {options.batch_size} does not divide over {len(devices)} "
            f"devices; valid are multiples of {len(devices)}"
        )
    return Layout(Mesh(np.array(devices), ("data",)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with one axis, "data", or None for one device."""

    mesh: Mesh | None

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return jax.process_index() == 0

    def wait(self, what: str) -> None:
        """Until all processes are here."""
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(what)

    @property
    def zero2_axis(self) -> str | None:
        """What the optimizers of jax_muon have to know."""
        return None if self.mesh is None else "data"

    def place(self, params: Any) -> Any:
        """The parameters where the run needs them."""
        if self.mesh is None:
            return params
        return jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))

    def init(self, tx: optax.GradientTransformation, params: Any) -> Any:
        """The state of an optimizer at the beginning."""
        if self.mesh is None:
            return tx.init(params)
        return jm.init_optimizer(tx, params, self.mesh)

    def make_step(
        self,
        loss: Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]],
        tx: optax.GradientTransformation,
        max_aux: tuple[str, ...] = (),
    ) -> Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]]:
        """A compiled step: (params, state, batch) to (params, state, metrics).

        Those entries beside the loss that max_aux names go to the optimizer, too.
        """
        if self.mesh is not None:
            return jm.make_train_step(
                loss, tx, self.mesh, has_aux=True, max_aux=max_aux
            )

        def step(params, state, batch):
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, aux), grads = gradient(params, batch)
            extra = {name: aux[name] for name in max_aux}
            updates, state = tx.update(grads, state, params, **extra)
            metrics = {"loss": value, "aux": aux}
            return optax.apply_updates(params, updates), state, metrics

        return jax.jit(step, donate_argnums=(0, 1))

    def batch(self, windows: np.ndarray) -> Any:
        """A batch (16, 129) with its windows spread over the devices."""
        if self.mesh is None:
            return windows
        sharding = NamedSharding(self.mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(
            windows.shape, sharding, windows.__getitem__
        )

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
