"""Options for XLA's GPU compiler, so that transfers hide under the model's work."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_muon.base.specs import AxisName, checked_axes, dividing
from jax_muon.mesh.layout import Placed, Shaped

Options = dict[str, Any]  # numbers and booleans, by names of XLA

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
# llama-7b on 256 H100s products wait 24 ms, by the estimate of benchmarks/schedule,
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


def choose(
    placed: Placed,
    leaves: Sequence[Shaped],
    scans: Sequence[str],
    axis: AxisName | None = None,
) -> Options:
    """Compiler options for a train step.

    Args:
      placed: where the parameters are.
      leaves: the parameters, or their shapes.
      scans: for each of them "scan_layers" or "lax.scan" if this takes its layers one
        at a time, and "" if it is gathered whole.
      axis: mesh axes that divide the batch; None for all.

    Returns:
      Options for `jax.jit`; {} on one device, and for devices other than GPUs.
    """
    mesh, axes = placed.mesh, checked_axes("axis", axis, placed.mesh)
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    sizes = [x.size * np.dtype(x.dtype).itemsize for x in leaves]
    rows = zip(sizes, leaves, scans, placed.param_specs, strict=True)
    # Each sharded, and so gathered, leaf: its bytes, its layers, and their scan.
    gathered = [
        (size, x.shape[0] if scan else 1, scan)
        for size, x, scan, spec in rows
        if any(dividing(spec, mesh.shape))
    ]
    # Bytes of one layer, of all parameters together.
    layer = sum(size / layers for size, layers, by in gathered if by == "scan_layers")
    if not layer and any(by == "lax.scan" for _, _, by in gathered):
        return _known(XLA_GATHERS_LAYERS)
    total, on_axes = sum(sizes), [mesh.shape[name] for name in axes]
    parts = mesh.size // math.prod(on_axes)
    # Bytes received: a whole leaf by a gather, one shard of it by a scatter.
    # If nothing is, updates are gathered, at the end of a step.
    buckets = GATHERS_FIRST if gathered else GATHERS_LAST
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


def _known(options: Options) -> Options:
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
