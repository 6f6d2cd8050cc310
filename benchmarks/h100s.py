"""Whole train steps of GPTs for meshes of H100s that this machine does not have.

A model with attention and rematerialized blocks in bfloat16, the mesh of a layout, and
the step that `make_train_step` makes of them, with its arguments as shapes with
shardings: what `gpu_schedule` compiles. Nothing runs.
"""

import dataclasses
import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks.parameters import model_parameters

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
}
LAYOUTS = ("zero2", "zero2-divided", "fsdp", "hsdp")


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step, and shapes with shardings of its parameters, state and batch."""

    step: jm.TrainStep
    args: tuple[Any, Any, Any]

    @property
    def params(self) -> Any:
        """Shapes of the parameters."""
        return self.args[0]


def h100s(gpus: int) -> np.ndarray:
    """Devices of a described machine: hosts with 8 GPUs each, in order."""
    hosts = max(1, gpus // GPUS_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H100,
        topology=f"1x{hosts}x{gpus // hosts}",  # partitions x hosts x GPUs of a host
    )
    return np.array(topology.devices)


def whole_step(model: str, devices: np.ndarray, layout: str, recipe: str) -> WholeStep:
    """The train step of a model on these devices, and its arguments.

    Args:
      model: of `WORKLOADS`.
      devices: of `h100s`, or others.
      layout: "zero2": parameters replicated between steps, gradients and state divided
        over all devices; "zero2-divided": parameters divided so too; "fsdp": the same,
        said by specs; "hsdp": parameters divided over the 8 GPUs of a host and repeated
        on every host, gradients and state divided over all.
      recipe: a name of `jax_muon`.
    """
    work, size = WORKLOADS[model], devices.size
    params = model_parameters(model, jnp.bfloat16)
    mesh = Mesh(devices, ("data",))
    if layout == "hsdp":
        grid = devices.reshape(-1, min(size, GPUS_PER_HOST))
        mesh = Mesh(grid, ("hosts", "data"))
    specs = None
    if layout in ("fsdp", "hsdp"):
        over = mesh.shape["data"]
        specs = jax.tree.map(lambda x: first_axis(x.shape, "data", over), params)
    step = jm.make_train_step(
        functools.partial(loss, head=work.head),
        getattr(jm, recipe)(),
        mesh,
        axis=tuple(mesh.axis_names),
        specs=specs,
        parameters="divided" if layout == "zero2-divided" else "as specs",
    )
    tokens = jax.ShapeDtypeStruct(
        (work.sequences * size, work.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names))),
    )
    return WholeStep(step, (*step.abstract(params), tokens))


def first_axis(shape: tuple[int, ...], name: str, devices: int) -> PartitionSpec:
    """The spec that divides the first axis that can be, as FSDP does."""
    for axis, length in enumerate(shape):
        if length % devices == 0:
            return PartitionSpec(*[None] * axis, name)
    return PartitionSpec()


def loss(params: Any, tokens: jax.Array, *, head: int) -> jax.Array:
    """Mean cross-entropy of the next token, from a GPT without biases and positions."""
    x = _norm(params["wte"][tokens[:, :-1]])
    for name in sorted(params["blocks"]):
        x = _block(x, params["blocks"][name], head)
    logits = (_norm(x) @ params["lm_head"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@functools.partial(jax.checkpoint, static_argnums=2)
def _block(x: jax.Array, block: dict[str, jax.Array], head: int) -> jax.Array:
    """Attention and MLP, recomputed in the backward pass."""
    h = _norm(x)
    heads = (*x.shape[:2], -1, head)
    q, k, v = ((h @ block[name]).reshape(heads) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ block["out"]
    return x + jnp.square(jax.nn.relu(_norm(x) @ block["up"])) @ block["down"]
