"""Whole train steps of GPTs for meshes of H100s that this machine does not have.

A model with attention and rematerialized blocks in bfloat16, the mesh of a layout, and
the step that `make_train_step` makes of them, with its arguments as shapes with
shardings: what `gpu_schedule` compiles. Nothing runs.
"""

import dataclasses
import functools
import os
from contextlib import AbstractContextManager
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

import jax_muon as jm
from benchmarks.gpt import loss
from benchmarks.parameters import LLAMAS, llama_parameters, model_parameters
from jax_muon.mesh.train_step import TrainStep

# An H100 SXM with 80 GB, as XLA describes a card that it finds. With the versions of
# driver and toolkit it knows that branches can be recorded in CUDA graphs.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
CARD_BYTES = 84_942_979_072
GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one device trains on, and the width of a head."""

    head: int
    sequences: int
    length: int


WORKLOADS = {
    "tiny": Workload(head=16, sequences=2, length=32),  # for tests
    "gpt2-124m": Workload(head=64, sequences=8, length=1024),
    "gpt-1.3b": Workload(head=128, sequences=2, length=2048),
    "gpt-6.7b": Workload(head=128, sequences=1, length=4096),
    "llama-1.3b": Workload(head=128, sequences=2, length=2048),
    "llama-7b": Workload(head=128, sequences=1, length=4096),
    "experts-7b": Workload(head=128, sequences=1, length=4096),
    "llama-tiny": Workload(head=16, sequences=2, length=32),
    "experts-tiny": Workload(head=16, sequences=2, length=32),
}
LAYOUTS = ("zero2", "zero2-divided", "fsdp", "hsdp")
# For larger models; GPT-2 has too few heads and too few words for the last.
PLAIN_LAYOUTS = ("plain", "plain-layers")
SCALE_LAYOUTS = ("zero2-hosts", "zero2-divided", "hsdp", "fsdp-tp")


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """FSDP in plain jit, around `on_mesh`, with the interface of a `TrainStep`.

    Attributes:
      tx: the optimizer on its mesh.
      mesh: a mesh with one axis, "data".
      specs: how parameters are sharded.
      head: width of a head of attention.
      by_layers: whether the model calls `scan_layers` instead of `jax.lax.scan`.
    """

    tx: Any
    mesh: Mesh
    specs: Any
    head: int
    by_layers: bool

    def lower(self, *args: Any) -> Any:
        """The step lowered for shapes with shardings."""
        options = self.compiler_options(args[0])
        jitted = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=options)
        return jitted.lower(*args)

    def abstract(self, params: Any) -> tuple[Any, Any]:
        """Shapes with shardings of parameters and state."""
        placed = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            params,
            self.specs,
        )
        return placed, jm.abstract_state(self.tx, placed, self.mesh)

    def compiler_options(self, params: Any) -> dict[str, Any]:
        """Ours for XLA."""
        return jm.gpu_options(params, self.mesh, layers=self.by_layers or None)

    def _step(self, params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(self._loss)(params, tokens)
        shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), self.specs)
        grads = jax.lax.with_sharding_constraint(grads, shardings)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def _loss(self, params: Any, tokens: Any) -> Any:
        batch = NamedSharding(self.mesh, PartitionSpec("data"))

        def scan(block: Any, x: Any, layers: Any) -> Any:
            def constrained(x: Any, layer: Any) -> Any:
                x, y = block(x, layer)
                return jax.lax.with_sharding_constraint(x, batch), y

            x = jax.lax.with_sharding_constraint(x, batch)
            if not self.by_layers:
                return jax.lax.scan(constrained, x, layers)
            specs = self.specs["blocks"]
            return jm.scan_layers(constrained, x, layers, self.mesh, specs)

        return loss(params, tokens, head=self.head, scan=scan)


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step, and shapes with shardings of its parameters, state and batch."""

    step: TrainStep | PlainStep
    args: tuple[Any, Any, Any]

    @property
    def params(self) -> Any:
        """Shapes of the parameters."""
        return self.args[0]


def lowering_for_h100(**axes: int) -> AbstractContextManager[Any]:
    """A context in which Pallas lowers kernels for an H100, though no card is here.

    Up to jax 0.10 it took any card for granted; since then it asks which one.

    Args:
      **axes: names and sizes of a mesh of such cards, on which `jax.shard_map`
        runs if it is given none.
    """
    card = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=len(axes) * (AxisType.Auto,),
        abstract_device=card,
    )
    return jax.sharding.use_abstract_mesh(mesh)


def h100s(gpus: int) -> np.ndarray:
    """Devices of a described machine: hosts with 8 GPUs each, in order."""
    hosts = max(1, gpus // GPUS_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H100,
        topology=f"1x{hosts}x{gpus // hosts}",  # partitions x hosts x GPUs of a host
    )
    return np.array(topology.devices)


def whole_step(
    model: str,
    devices: np.ndarray,
    layout: str,
    recipe: str,
    **settings: Any,
) -> WholeStep:
    """The train step of a model on these devices, and its arguments.

    Args:
      model: of `WORKLOADS`.
      devices: of `h100s`, or others.
      layout: "zero2": parameters replicated between steps, gradients and state divided
        over all devices; "zero2-divided": parameters also; "fsdp": the same, by
        specs; "hsdp": parameters divided over the 8 GPUs of a host and repeated
        on every host, gradients and state divided over all; "zero2-hosts": gradients
        and state divided within a host alone; "fsdp-tp": tensor parallelism, or experts
        divided, within a host, and everything also divided over hosts; "plain":
        "fsdp" in plain jit; "plain-layers": the same with `scan_layers`.
      recipe: a name of `jax_muon`.
      **settings: of the recipe.
    """
    work, size = WORKLOADS[model], devices.size
    if model in LLAMAS:
        params = llama_parameters(model, jnp.bfloat16)
    else:
        params = model_parameters(model, jnp.bfloat16)
    mesh = Mesh(devices, ("data",))
    if layout in ("hsdp", "zero2-hosts", "fsdp-tp"):
        grid = devices.reshape(-1, min(size, GPUS_PER_HOST))
        mesh = Mesh(grid, ("hosts", "data") if layout != "fsdp-tp" else ("data", "tp"))
    batch = tuple(name for name in mesh.axis_names if name != "tp")
    specs, tx = specs_of(params, mesh, layout), getattr(jm, recipe)(**settings)
    step: Any
    if layout in PLAIN_LAYOUTS:
        by_layers = layout == "plain-layers"
        step = PlainStep(jm.on_mesh(tx, mesh, specs), mesh, specs, work.head, by_layers)
    else:
        step = jm.make_train_step(
            functools.partial(loss, head=work.head),
            tx,
            mesh,
            axis=batch,
            specs=specs,
            divide="data" if layout == "zero2-hosts" else None,
            parameters="divided" if layout == "zero2-divided" else "as specs",
        )
    tokens = jax.ShapeDtypeStruct(
        (work.sequences * size, work.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(batch)),
    )
    return WholeStep(step, (*step.abstract(params), tokens))


def specs_of(params: Any, mesh: Mesh, layout: str) -> Any:
    """Specs of the parameters; None if they are replicated, or sharded by the step."""
    if layout.startswith("zero2"):
        return None
    over = mesh.shape["data"]
    if layout != "fsdp-tp":
        return jax.tree_util.tree_map_with_path(
            lambda path, x: first_axis(
                x.shape, "data", over, layers=path[0].key == "blocks" and x.ndim > 2
            ),
            params,
        )

    def spec(path: Any, x: Any) -> PartitionSpec:
        """Experts, rows of embeddings, and inner axes of a block over `tp`."""
        names = [key.key for key in path]
        batch = (None,) * (x.ndim - 2)
        if "experts" in names:
            return PartitionSpec(None, "tp", "data")
        if "router" in names:
            return PartitionSpec(None, "data")
        if names[-1] in ("wte", "lm_head", "out", "down"):
            return PartitionSpec(*batch, "tp", "data")
        return PartitionSpec(*batch, "data", "tp")

    return jax.tree_util.tree_map_with_path(spec, params)


def first_axis(
    shape: tuple[int, ...], name: str, devices: int, layers: bool = False
) -> PartitionSpec:
    """The spec that divides the first axis that can be, as FSDP does.

    An axis of layers, the first, is left to the scan over it.
    """
    for axis, length in enumerate(shape):
        if length % devices == 0 and (axis or not layers):
            return PartitionSpec(*[None] * axis, name)
    return PartitionSpec()
