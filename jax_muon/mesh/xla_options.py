"""Options for XLA's GPU compiler, so that transfers hide under the model's work."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

# Number of buckets in which all parameters are sent; XLA's own hold 30 MB, a tenth of a
# small model. The first product has nothing before it to hide transfers under, so
# gathers at the beginning of a step go in small ones: 5 MB for GPT-2 124M. At the end
# fewer, larger ones save latency. benchmarks/NOTES.md has the measurements.
GATHERS_FIRST = 64
GATHERS_LAST = 16
SCATTERS = 32
LEAST_BUCKET = 4_000_000  # bytes; a smaller one takes as long
# At this size latencies are long, and a layer is sent at once. Below, that would
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
    mesh: Mesh, axes: Sequence[str], leaves: Sequence[Any], scans: Sequence[str | None]
) -> dict[str, Any]:
    """Compiler options for a train step on this mesh.

    Args:
      mesh: the mesh that the step runs on.
      axes: mesh axes that divide the batch.
      leaves: the parameters, or their shapes.
      scans: for each of them None if it is not sharded; "scan_layers" or "lax.scan" if
        this takes its layers one at a time; "" if it is gathered whole.

    Returns:
      Options for `jax.jit`; {} on one device, and for devices other than GPUs.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    sizes = [x.size * np.dtype(x.dtype).itemsize for x in leaves]
    rows = zip(sizes, leaves, scans, strict=True)
    # Bytes of one layer that is gathered, of all parameters together.
    layer = sum(size / x.shape[0] for size, x, by in rows if by == "scan_layers")
    if "lax.scan" in scans and not layer:
        return _known(XLA_GATHERS_LAYERS)
    # Otherwise updates are gathered, at the end of a step.
    gathers_first = any(by is not None for by in scans)
    total, on_axes = sum(sizes), [mesh.shape[name] for name in axes]
    parts = mesh.size // math.prod(on_axes)
    # Bytes received: a whole leaf by a gather, one shard of it by a scatter.
    buckets = GATHERS_FIRST if gathers_first else GATHERS_LAST
    gather = max(LEAST_BUCKET, total / buckets)
    scatter = max(LEAST_BUCKET, total / SCATTERS) / mesh.size
    if layer and math.prod(on_axes) < MANY_DEVICES:
        gather, scatter = max(LEAST_BUCKET, layer / 2), LEAST_BUCKET / mesh.size
    elif layer:  # all of one in one collective, also over a part of the mesh axes
        gather = max(LEAST_BUCKET, 1.1 * layer)
        scatter = gather / parts / min((n for n in on_axes if n > 1), default=1)
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
