"""Options for XLA's GPU compiler, so that transfers hide under the model's work."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_muon.base import checks, specs, trees
from jax_muon.matrices.find import Reader
from jax_muon.mesh.layout import read_layers

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


def gpu_options(
    params: Any,
    mesh: Mesh,
    *,
    matrices: Reader,
    axis: specs.AxisName | None = None,
    gathers_first: bool = True,
    scanned: Sequence[str] = (),
) -> dict[str, Any]:
    """Compiler options for a train step with these parameters on this mesh.

    `make_train_step` uses them already. For your own step around `on_mesh`:
    `jax.jit(step, compiler_options=gpu_options(params, mesh, matrices=matrices))`.
    Leaves are sent in buckets by the model's size, or of a layer of `scan_layers`; a
    transfer starts when its input is there, and ten are in flight. If XLA gathers
    layers itself, in a `jax.lax.scan` in plain jit, they are MaxText's options. What
    this jaxlib does not know is left out.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh that the step runs on.
      matrices: as in `partition`, to see what axes a `jax.lax.scan` in plain jit takes;
        None if no scan takes parameters that XLA gathers.
      axis: mesh axes that divide the batch; None for all.
      gathers_first: whether parameters are sharded between steps and gathered when one
        begins; otherwise updates are gathered at its end.
      scanned: patterns of the paths of parameters that `scan_layers` gathers.

    Returns:
      Options for `jax.jit`; {} on one device, and for devices other than GPUs.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> jm.gpu_options({"mlp": jnp.ones((64, 256))}, mesh, matrices=None)
      {}
    """
    names = specs.checked_axes("axis", axis, mesh)
    params = checks.arrays("params", params)
    patterns = checks.strings("scanned", scanned)
    leaves = trees.leaves_with_paths(params)
    trees.check_patterns_match("scanned", patterns, [path for path, _ in leaves])
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    has_scan = any(read_layers(matrices, params).values())
    if has_scan and gathers_first and not patterns:
        return _known(XLA_GATHERS_LAYERS)
    sizes = [mesh.shape[name] for name in names]
    parts = mesh.size // math.prod(sizes)
    total, layer = 0, 0.0  # bytes of all parameters, and of one layer that is gathered
    for path, x in leaves:
        size = x.size * np.dtype(x.dtype).itemsize
        total += size
        if any(trees.matches(pattern, path) for pattern in patterns):
            layer += size / max([1, *x.shape[:1]])
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
