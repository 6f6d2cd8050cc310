"""Whole train steps of GPTs for meshes of H100s that this machine does not have.

A model with attention and rematerialized blocks in bfloat16, the mesh of a layout, and
the step that `make_train_step` makes of them, with its arguments as shapes with
shardings: what `gpu_schedule` compiles. Nothing runs.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
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
)
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.gpt import loss
from benchmarks.parameters import (
    LLAMAS,
    deepseek_v3,
    llama_parameters,
    model_parameters,
)

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
GPUS_PER_HOST = 8
# Width of a head; what one device trains on: sequences, and their length.
WORKLOADS: dict[str, tuple[int, float, int]] = {
    "tiny": (16, 2, 32),  # for tests
    "gpt2-124m": (64, 8, 1024),
    "gpt-1.3b": (128, 2, 2048),
    "gpt-6.7b": (128, 1, 4096),
    "llama-1.3b": (128, 2, 2048),
    "llama-7b": (128, 1, 4096),
    "llama-7b-32k": (128, 1 / 8, 32768),
    "llama-8b": (128, 1, 4096),
    "llama-70b": (128, 1, 4096),
    "deepseek-v3": (128, 1 / 8, 4096),
    "experts-7b": (128, 1, 4096),
    "llama-tiny": (16, 2, 32),
    "experts-tiny": (16, 2, 32),
}
# GPT-2 has too few heads and too few words for "fsdp-tp"; see `whole_step`.
LAYOUTS = (
    "zero2",
    "zero2-divided",
    "fsdp",
    "hsdp",
    "zero2-hosts",
    "fsdp-tp",
    "two-pods",
)
# These are plain jit around `on_mesh`, the others steps of `make_train_step`.
IN_JIT = ("zero2", "zero2-hosts", "hsdp", "two-pods", "fsdp-tp")


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step, its optimizer on the mesh, the compiler's options, and its arguments.

    The arguments are shapes with shardings, of parameters, state and batch.
    """

    step: Any
    tx: optax.GradientTransformation
    options: Mapping[str, Any]
    args: tuple[Any, Any, Any]

    @property
    def params(self) -> Any:
        """Shapes of the parameters."""
        return self.args[0]

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters, each once."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params))


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
    model: str, devices: np.ndarray, layout: str, recipe: str, microbatches: int = 1
) -> WholeStep:
    """The train step of a model on these devices, and its arguments.

    Args:
      model: of `WORKLOADS`.
      devices: of `h100s`, or others.
      layout: "zero2": parameters replicated between steps, gradients and state divided
        over all devices; "zero2-divided": parameters also; "fsdp": the same, by other
        specs; "hsdp": parameters divided over the 8 GPUs of a host and repeated on
        every host, gradients and state divided over all; "zero2-hosts": gradients and
        state divided within a host alone; "fsdp-tp": tensor parallelism, or experts
        divided, within a host, and everything also divided over hosts; "two-pods": like
        "hsdp", where a half of the devices takes the place of a host.
      recipe: a name of `jax_muon`.
      microbatches: in which a device takes as many times the sequences.
    """
    (head, sequences, length), size = WORKLOADS[model], devices.size
    if model == "deepseek-v3":
        params = deepseek_v3(jnp.bfloat16)
    else:
        parameters = llama_parameters if model in LLAMAS else model_parameters
        params = parameters(model, jnp.bfloat16)
    mesh = Mesh(devices, ("data",))
    if layout in ("hsdp", "zero2-hosts", "fsdp-tp", "two-pods"):
        pods = layout == "two-pods"
        grid = devices.reshape(-1, size // 2 if pods else min(size, GPUS_PER_HOST))
        mesh = Mesh(grid, ("hosts", "data") if layout != "fsdp-tp" else ("data", "tp"))
    batch = tuple(name for name in mesh.axis_names if name != "tp")
    shardings: Any = None
    tokens = jax.ShapeDtypeStruct(
        (int(sequences * size) * microbatches, length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(batch)),
    )

    def scan(body: Any, x: Any, layers: Any, name: str) -> Any:
        if layout == "fsdp-tp" and shardings:  # else XLA divides embeddings by columns
            x = jax.lax.with_sharding_constraint(x, tokens.sharding)
        if layout in ("zero2", "zero2-hosts") or "out" not in layers:
            return jax.lax.scan(body, x, layers)
        if layout not in IN_JIT or shardings is None:  # in a step, or to be read
            return jm.scan_layers(body, x, layers)
        where = shardings[name]
        return jm.scan_layers(body, x, layers, shardings=where, axis=batch)

    loss_fn = functools.partial(loss, head=head, scan=scan)
    sequence = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)
    matrices = jm.find_matrices(params, loss_fn, sequence)
    adamw = optax.adamw(3e-4, 0.8, 0.95, 1e-10, weight_decay=0.0)
    tx = getattr(jm, recipe)(0.02, matrices=matrices, adamw=adamw)
    if layout == "zero2-divided":
        shardings = jm.fsdp(params, mesh, matrices)
    elif not layout.startswith("zero2"):
        specs = specs_of(params, mesh, layout)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    divide = "data" if layout == "zero2-hosts" else mesh.axis_names
    if layout == "fsdp-tp":
        divide = batch
    where = mesh if shardings is None else shardings
    tx = jm.on_mesh(tx, where, divide=divide)
    if layout not in IN_JIT:
        step = jm.make_train_step(loss_fn, tx, microbatches=microbatches)
        args = (*step.abstract(params), tokens)
        return WholeStep(step, tx, step.xla_options(*args), args)
    if microbatches > 1:
        raise ValueError(f"{layout} with {microbatches} microbatches; expected one")
    options = tx.xla_options(params, axis=batch)

    def step_in_jit(params: Any, state: Any, tokens: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = (*tx.optimizer.abstract(params), tokens)
    jitted = jax.jit(
        step_in_jit, donate_argnums=(0, 1), compiler_options=options or None
    )
    return WholeStep(jitted, tx, options, args)


def specs_of(params: Any, mesh: Mesh, layout: str) -> Any:
    """Specs of the parameters."""
    over = mesh.shape["data"]

    def spec(path: Any, x: Any) -> P:
        names = [key.key for key in path]
        layers = names[0] in ("blocks", "dense") and x.ndim > 2
        if layout != "fsdp-tp":
            # The first axis that can be divided; layers are left to the scan over them.
            fits = (a for a in range(layers, x.ndim) if x.shape[a] % over == 0)
            axis = next(fits, None)
            return P() if axis is None else P(*[None] * axis, "data")
        # Experts, rows of embeddings, and inner axes of a block over `tp`.
        batch = (None,) * (x.ndim - 2)
        if "experts" in names:
            return P(None, "tp", "data")
        if "router" in names:
            return P(None, "data")
        if names[-1] in ("wte", "lm_head", "out", "down"):
            return P(*batch, "tp", "data")
        return P(*batch, "data", "tp")

    return jax.tree_util.tree_map_with_path(spec, params)
