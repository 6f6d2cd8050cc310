"""Options for XLA's GPU compiler, so that transfers hide under the model's work."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

# Number of buckets in which all parameters are sent; XLA's own hold 30 MB, a tenth of a
# small model. The first product has nothing before it to hide transfers under, so
# gathers at the beginning of a step go in small ones: 5 MB for GPT-2 124M. At the end
# fewer, larger ones save latency. benchmarks/NOTES.md has the measurements.
GATHERS_FIRST = 64
GATHERS_LAST = 16
SCATTERS = 32
LEAST_BUCKET = 4_000_000  # bytes; a smaller one takes as long
# From so many on, latencies are long, and a layer is sent at once. Before, that would
# hold up sums of activations, by 18 ms for llama-7b and tensor parallelism on 64 H100s.
MANY_DEVICES = 16
# For a scan in plain jit, whose gathers are XLA's own: MaxText's options for GPUs. For
# llama-7b on 256 H100s products wait 23 ms, by the estimate of benchmarks/schedule,
# instead of 44 without options.
XLA_GATHERS_LAYERS = {
    "xla_gpu_all_gather_combine_threshold_bytes": 134_217_728,
    "xla_gpu_all_reduce_combine_threshold_bytes": 134_217_728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 67_108_864,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def of_leaves(
    mesh: Mesh,
    axes: Sequence[str],
    leaves: Sequence[tuple[int, int]],
    gathers_first: bool,
    xla_gathers_layers: bool = False,
) -> dict[str, Any]:
    """Compiler options for a train step on this mesh.

    Args:
      mesh: the mesh that the step runs on.
      axes: mesh axes that divide the batch.
      leaves: bytes of each parameter, and how many layers it has if `scan_layers`
        gathers these one at a time, or else 0.
      gathers_first: whether parameters are sharded between steps and gathered when one
        begins; otherwise updates are gathered at its end.
      xla_gathers_layers: whether a plain scan takes layers that are sharded.

    Returns:
      Options for `jax.jit`; {} on one device, and for devices other than GPUs.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    layer = sum(size / layers for size, layers in leaves if layers)  # bytes of one
    if xla_gathers_layers and not layer:
        return _known(XLA_GATHERS_LAYERS)
    sizes, total = [mesh.shape[name] for name in axes], sum(size for size, _ in leaves)
    parts = mesh.size // math.prod(sizes)
    # Bytes received: a whole leaf by a gather, one shard of it by a scatter.
    buckets = GATHERS_FIRST if gathers_first else GATHERS_LAST
    gather = max(LEAST_BUCKET, total / buckets)
    scatter = max(LEAST_BUCKET, total / SCATTERS) / mesh.size
    if layer and math.prod(sizes) < MANY_DEVICES:
        gather, scatter = max(LEAST_BUCKET, layer / 2), LEAST_BUCKET / mesh.size
    elif layer:  # all of one in one collective, also over a part of the mesh axes
        gather = max(LEAST_BUCKET, 1.1 * layer)
        scatter = gather / parts / min((n for n in sizes if n > 1), default=1)
    # More than ten in flight would keep more gradients in memory. In a CUDA graph of
    # even a single branch, the host never waits for a predicate.
    options = {
        "xla_gpu_all_gather_combine_threshold_bytes": math.ceil(gather / parts),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": math.ceil(scatter),
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 10,
        "xla_gpu_graph_min_graph_size": 1,
    }
    if layer:  # without two buffers each turn of a loop copies the gathered layer
        options |= {
            "xla_gpu_enable_while_loop_double_buffering": True,
            "xla_gpu_enable_pipelined_reduce_scatter": False,
        }
    return _known(options)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that XLA knows. Asking it, with a small program, takes 0.1 seconds."""
    ask, known = jax.jit(lambda: jnp.zeros(())), dict(options)
    for _ in options:
        try:
            ask.lower().compile(compiler_options=known)
            break
        except Exception as error:  # its type differs between versions of JAX
            if name := re.search(r"No such compile option: '(\w+)'", str(error)):
                known.pop(name[1], None)
    return known
