"""Options for XLA's GPU compiler, so that transfers hide under the model's work."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_muon import checks, paths
from jax_muon.matrices import Matrices
from jax_muon.mesh import specs
from jax_muon.mesh.layout import ScannedAxes

# Number of buckets in which all parameters are sent. The first product has nothing
# before it to hide transfers under, so gathers at the beginning of a step go in small
# buckets: 5 MB for GPT-2 124M, 214 MB for 6.7B. At the end most have nothing to hide
# under, and fewer, larger ones save latency. benchmarks/NOTES.md has the measurements.
GATHERS_FIRST = 64
GATHERS_LAST = 16
SCATTERS = 32
LEAST_BUCKET = 4_000_000  # bytes; a smaller one takes as long
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
    axis: specs.AxisName | None = None,
    gathers_first: bool = True,
    layers: bool | None = None,
    matrices: Matrices | None = None,
) -> dict[str, Any]:
    """Compiler options for a train step with these parameters on this mesh.

    `make_train_step` uses them already. For your own step around `on_mesh`:
    `jax.jit(step, compiler_options=gpu_options(params, mesh,
    matrices=matrices))`. They set

    - `xla_gpu_all_gather_combine_threshold_bytes` and
      `xla_gpu_reduce_scatter_combine_threshold_bytes`: XLA sends leaves together up to
      this many bytes received by a device. Its own 30 MB are a tenth of a small model,
      so much has no product to hide under, and one leaf of a large one.
    - `xla_gpu_experimental_collective_start_as_early_as_possible`: a transfer starts
      when its input is there, not as late as a model of its speed allows.
    - `xla_gpu_experimental_parallel_collective_overlap_limit`: transfers in flight, in
      one queue; more would keep more gradients in memory.
    - `xla_gpu_graph_min_graph_size`: even a single branch is recorded in a CUDA graph,
      so the host never waits for a predicate.
    - if `make_train_step` or `scan_layers` gathers layers in a loop,
      `xla_gpu_enable_while_loop_double_buffering`, without which each turn copies the
      gathered layer, no `xla_gpu_enable_pipelined_reduce_scatter`, and buckets smaller
      than a layer; with 16 devices or more, `make_train_step` uses one per layer.
    - if XLA gathers layers itself, in a `jax.lax.scan` in plain jit: MaxText's
      options.

    Options that this jaxlib does not know are left out; it would refuse to compile.

    Args:
      params: the parameters, or their shapes.
      mesh: the mesh that the step runs on.
      axis: mesh axes that divide the batch; None for all. Over the others, such as
        tensor parallelism's, a device holds a part of each leaf.
      gathers_first: whether parameters are sharded between steps and gathered at the
        beginning of a step; otherwise updates are gathered at its end.
      layers: how scanned layers are gathered. True: one at a time, by
        `make_train_step` or `scan_layers`. False: no scan takes sharded leaves. None:
        by XLA, in a `jax.lax.scan` in plain jit, if `gathers_first` and if a scan takes
        parameters; otherwise as False.
      matrices: the reading of the parameters, which says along which axes a scan takes
        them. Needed unless no scan takes sharded leaves.

    Returns:
      Options for `jax.jit`; {} on one device, and for devices other than GPUs.

    Raises:
      ValueError: leaves that are not arrays, an axis that the mesh lacks, no `matrices`
        although layers may be scanned.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"mlp": jnp.ones((64, 256))}
      >>> options = jm.gpu_options(params, mesh, layers=False)
      >>> options if jax.default_backend() == "cpu" else {}
      {}
    """
    names = specs.checked_axes("axis", mesh.axis_names if axis is None else axis, mesh)
    checks.arrays("params", params)
    if matrices is None and (layers or (layers is None and gathers_first)):
        expected = (
            "jax_muon.read(params, loss_fn, batch), which shows the layers that a scan "
            "takes, or layers=False if no scan takes sharded leaves"
        )
        checks.refuse("matrices", matrices, expected)
    stacks = {path: x.scanned for path, x in (matrices or {}).items()}
    return options_of(params, mesh, names, stacks, gathers_first, layers)


def options_of(
    params: Any,
    mesh: Mesh,
    axis: Sequence[str],
    stacks: ScannedAxes,
    gathers_first: bool,
    layers: bool | None,
    late: bool = False,
    inner: str | None = None,
) -> dict[str, Any]:
    """`gpu_options` for checked arguments, the axes of layers, and `scatters_late`.

    `inner` is the mesh axis within a host, if layers are gathered in two levels.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    parts = mesh.size // math.prod(mesh.shape[name] for name in axis)
    total, layer = 0, 0.0  # bytes of all parameters, and of one layer in stacks of them
    for path, x in paths.leaves_with_paths(params):
        size = x.size * np.dtype(x.dtype).itemsize
        total += size
        if stacks.get(path):
            layer += size / math.prod(x.shape[i] for i in stacks[path])
    if layers is None and layer and gathers_first:
        return _known(XLA_GATHERS_LAYERS)
    # Bytes received: a whole leaf by a gather, one shard of it by a scatter.
    gather = max(
        LEAST_BUCKET, total / (GATHERS_FIRST if gathers_first else GATHERS_LAST)
    )
    scatter = max(LEAST_BUCKET, total / SCATTERS)
    if layers and (late or inner):
        gather = scatter = max(LEAST_BUCKET, 1.1 * (layer or total))
    elif layers:
        gather = min(gather, max(LEAST_BUCKET, (layer or 2 * total) / 2))
        scatter = LEAST_BUCKET
    options = {
        "xla_gpu_all_gather_combine_threshold_bytes": math.ceil(gather / parts),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": math.ceil(
            scatter / (mesh.shape[inner] if inner else mesh.size)
        ),
        # With it, one level's transfers would wait for the other's.
        "xla_gpu_experimental_collective_start_as_early_as_possible": not inner,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 10,
        "xla_gpu_graph_min_graph_size": 1,
    }
    if layers:
        options |= {
            "xla_gpu_enable_while_loop_double_buffering": True,
            "xla_gpu_enable_pipelined_reduce_scatter": False,
        }
    return _known(options)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that XLA knows. Asking it, with a small program, takes 0.1 seconds."""
    ask = jax.jit(lambda: jnp.zeros(()))
    known = dict(options)
    while known:
        try:
            ask.lower().compile(compiler_options=known)
        except Exception as error:  # its type differs between versions of JAX
            name = re.search(r"No such compile option: '(\w+)'", str(error))
            if name is None or known.pop(name[1], None) is None:
                break
        else:
            break
    return known
