"""Options of XLA's compiler for GPUs, so that transfers hide under the model's work."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_muon import paths
from jax_muon.checks import check_arrays, check_flag
from jax_muon.mesh.specs import AxisName, check_mesh, checked_axes
from jax_muon.reading import layers as layer_axes

# In how many buckets all parameters are sent. What comes before the first product has
# nothing to hide under, so that gathers at the beginning of a step go in small buckets:
# 5 MB for GPT-2 124M, 214 MB for 6.7B. At the end most have nothing to hide under, and
# fewer and larger ones save latency. benchmarks/NOTES.md has the measurements.
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
    layers: bool | None = None,
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
    - where layers are gathered in a loop, by `make_train_step` or `scan_layers`,
      `xla_gpu_enable_while_loop_double_buffering`, without which each turn copies the
      gathered layer, no `xla_gpu_enable_pipelined_reduce_scatter`, and buckets that are
      smaller than a layer.

    Options that this jaxlib does not know are left out; it would refuse to compile.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh.
      axis: mesh axes over which batches are divided; None for all. Over the others,
        such as those of tensor parallelism, a device holds a part of each leaf.
      gathers_first: whether parameters lie divided between steps and are gathered at
        the beginning of a step; otherwise updates are gathered at its end.
      layers: whether layers are gathered one at a time, in a loop; None for whether
        paths and shapes show that leaves have an axis of layers, with `gathers_first`.

    Returns:
      Options for `jax.jit`; {} on one device, and where devices are not GPUs.

    Raises:
      ValueError: an argument of another type, an axis that the mesh lacks.
    """
    check_mesh("mesh", mesh)
    names = mesh.axis_names if axis is None else checked_axes("axis", axis, mesh)
    check_arrays("params", params)
    check_flag("gathers_first", gathers_first)
    if layers is not None:
        check_flag("layers", layers)
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    parts = mesh.size // math.prod(mesh.shape[name] for name in names)
    sizes = {
        path: x.size * np.dtype(x.dtype).itemsize
        for path, x in paths.leaves_with_paths(params)
    }
    total = sum(sizes.values())

    def bucket(buckets: int, devices: int) -> int:
        return math.ceil(max(LEAST_BUCKET, total / buckets) / devices)

    gathers = GATHERS_FIRST if gathers_first else GATHERS_LAST
    # What arrives: a whole leaf of a gather, one part of all of a scatter.
    options = {
        "xla_gpu_all_gather_combine_threshold_bytes": bucket(gathers, parts),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket(SCATTERS, mesh.size),
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 10,
        "xla_gpu_graph_min_graph_size": 1,
    }
    # Bytes of one layer, where leaves are stacks of layers.
    stacks = layer_axes.axes_of_layers(params)
    layer = sum(
        sizes[path] / math.prod(x.shape[axis] for axis in stacks[path])
        for path, x in paths.leaves_with_paths(params)
        if stacks[path]
    )
    if (layer > 0 and gathers_first) if layers is None else layers:
        half = max(LEAST_BUCKET, layer / 2) if layer else total
        options |= {
            "xla_gpu_all_gather_combine_threshold_bytes": min(
                bucket(gathers, parts), math.ceil(half / parts)
            ),
            "xla_gpu_reduce_scatter_combine_threshold_bytes": math.ceil(
                LEAST_BUCKET / mesh.size
            ),
            "xla_gpu_enable_while_loop_double_buffering": True,
            "xla_gpu_enable_pipelined_reduce_scatter": False,
        }
    return _known(options)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that XLA knows; asking it, by a small program, takes less than a second."""
    ask = jax.jit(lambda: jnp.zeros(()))
    known = dict(options)
    while known:
        try:
            ask.lower().compile(compiler_options=known)
        except Exception as error:  # of the kind that each version of JAX has
            name = re.search(r"No such compile option: '(\w+)'", str(error))
            if name is None or known.pop(name[1], None) is None:
                break
        else:
            break
    return known
