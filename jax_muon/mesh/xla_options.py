"""Options of XLA's compiler for GPUs, so that transfers hide under the model's work."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_muon.checks import check_arrays, check_flag
from jax_muon.mesh.specs import AxisName, check_mesh, checked_axes

# In how many buckets all parameters are sent. What comes before the first product has
# nothing to hide under, so that gathers at the beginning of a step go in small buckets:
# 5 MB for GPT-2 124M, 214 MB for 6.7B. At the end most have nothing to hide under, and
# fewer and larger ones save latency. docs/speed.md has the measurements.
GATHERS_FIRST = 64
GATHERS_LAST = 16
SCATTERS = 32
LEAST_BUCKET = 4_000_000  # bytes; a smaller one takes as long


def gpu_options(
    params: Any,
    mesh: Mesh,
    *,
    axis: AxisName | None = None,
    gathers_first: bool = True,
) -> dict[str, Any]:
    """Compiler options for a train step with these parameters on this mesh.

    `make_train_step` uses them by itself. For a step of your own, around `on_mesh`:
    `jax.jit(step, compiler_options=gpu_options(params, mesh))`. They set

    - `xla_gpu_all_gather_combine_threshold_bytes` and
      `xla_gpu_reduce_scatter_combine_threshold_bytes`: XLA sends leaves together while
      what arrives of them on a device is no larger. Its own 30 MB are a tenth of a
      small model, so much has no product to hide under, and one leaf of a large one.
    - `xla_gpu_experimental_collective_start_as_early_as_possible`: a transfer starts
      when its input is there, and not as late as a model of its speed allows.
    - `xla_gpu_experimental_parallel_collective_overlap_limit`: transfers under way at
      once, in one queue; more would keep more gradients in memory.
    - `xla_gpu_graph_min_graph_size`: branches are recorded in CUDA graphs also where
      they stand alone, so that the host never waits for a predicate.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh.
      axis: mesh axes over which batches are divided; None for all. Over the others,
        such as those of tensor parallelism, a device holds a part of each leaf.
      gathers_first: whether parameters lie divided between steps and are gathered at
        the beginning of a step; otherwise updates are gathered at its end.

    Returns:
      Options for `jax.jit`; {} on one device, and where devices are not GPUs.

    Raises:
      ValueError: an argument of another type, an axis that the mesh lacks.
    """
    check_mesh("mesh", mesh)
    names = mesh.axis_names if axis is None else checked_axes("axis", axis, mesh)
    check_arrays("params", params)
    check_flag("gathers_first", gathers_first)
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    parts = mesh.size // math.prod(mesh.shape[name] for name in names)
    total = sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(params))

    def bucket(buckets: int, devices: int) -> int:
        return math.ceil(max(LEAST_BUCKET, total / buckets) / devices)

    gathers = GATHERS_FIRST if gathers_first else GATHERS_LAST
    # What arrives: a whole leaf of a gather, one part of all of a scatter.
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": bucket(gathers, parts),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket(SCATTERS, mesh.size),
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 10,
        "xla_gpu_graph_min_graph_size": 1,
    }
