"""What XLA makes of gradients' sums on a described pod of TPUs, without any TPU.

    python -m benchmarks.schedule.tpu_schedule v5p:2x2x2
    python -m benchmarks.schedule.tpu_schedule v5p:4x4x4 --model gpt2-124m

compiles `psum_scatter` of one gradient over one, two and three dimensions of the torus,
or a whole train step, and prints collectives, bytes sent by a chip, and peak memory.
It needs `pip install "jax[tpu]"`. `benchmarks/NOTES.md` has the results.
"""

import argparse
import math
import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "TPU_SKIP_MDS_QUERY", "1"
)  # no metadata server to ask which pod this is
# JAX cannot read programs for TPUs that this machine lacks back from its cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.schedule.gpu_schedule import option
from benchmarks.schedule.h100s import WORKLOADS, whole_step
from benchmarks.schedule.hlo import Module

GRADIENT = (3072, 768)
TORUS = ("x", "y", "z")


def tpus(topology: str) -> np.ndarray:
    """Chips of a described pod, such as "v5p:4x4x4", by their places in the torus."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    sides = [1 + max(d.coords[i] for d in devices) for i in range(len(TORUS))]
    grid = np.empty(sides, object)
    for device in devices:
        grid[tuple(device.coords)] = device
    return grid


def scatter(grid: np.ndarray, axes: tuple[str, ...], *, in_turn: bool) -> Any:
    """A program: the sum of a gradient over some dimensions of the torus, scattered.

    Args:
      grid: the chips.
      axes: dimensions, of `TORUS`.
      in_turn: one `psum_scatter` for each of them, instead of one for all.
    """
    mesh = Mesh(grid, TORUS)

    def local(x: Any) -> Any:
        y = x + jax.lax.axis_index(TORUS).astype(x.dtype)  # differs on every chip
        for names in axes if in_turn else (axes,):
            y = jax.lax.psum_scatter(y, names, tiled=True)
        return y

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )
    given = NamedSharding(mesh, PartitionSpec())
    return jax.jit(function).lower(
        jax.ShapeDtypeStruct(GRADIENT, jnp.bfloat16, sharding=given)
    )


def report(title: str, lowered: Any, options: dict[str, Any]) -> str:
    """One line: collectives, bytes sent by a chip, and peak memory."""
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - started
    found = Module.parse(compiled.as_text()).collectives()
    kinds = [
        f"{len(sent)} {kind} ({sum(sent) / 1e6:.1f} MB)"
        for kind in sorted({c.kind for c in found})
        if (sent := [c.sent_bytes for c in found if c.kind == kind])
    ]
    peak = compiled.memory_analysis().peak_memory_in_bytes / 1e9
    return (
        f"{title}: {', '.join(kinds)}; peak {peak:.2f} GB; compiled in {seconds:.0f} s"
    )


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule.tpu_schedule")
    parser.add_argument("topology", help='such as "v5p:2x2x2" or "v5e:4x4"')
    parser.add_argument("--model", choices=WORKLOADS, help="its whole train step")
    parser.add_argument("--layout", default="zero2", choices=("zero2", "zero2-divided"))
    parser.add_argument("--option", type=option, action="append", default=[])
    args = parser.parse_args(words)
    grid, options = tpus(args.topology), dict(args.option)
    if args.model is not None:
        whole = whole_step(args.model, grid.reshape(-1), args.layout, "nanochat")
        lowered = whole.step.lower(*whole.args)
        title = f"{args.model}, {args.layout}, {grid.size} chips"
        print(report(title, lowered, options))
        return
    for count in range(1, len(TORUS) + 1):
        axes = TORUS[:count]
        chips = math.prod(grid.shape[:count])
        for in_turn in (False, True)[: 1 + (count > 1)]:
            title = f"over {' '.join(axes)}, {chips} chips" + in_turn * ", in turn"
            lowered = scatter(grid, axes, in_turn=in_turn)
            print(report(title, lowered, options), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
