"""Orthogonalization alone, as XLA schedules it for H100s, without any H100.

    python -m benchmarks.schedule.orthogonalization [--model llama-7b] [--json FILE]

compiles the update of `jax_muon.muon` for the matrices of a model, sharded like
`parameters="divided"` over one mesh axis, and estimates its time. Each number of GPUs
is tried with one device for owner of a matrix, and with what the planner chooses.
"""

import argparse
import json
import os
import pathlib
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

import jax_muon as jm
from benchmarks.parameters import LLAMAS, llama_parameters
from benchmarks.schedule.gpu_schedule import TOOL_OPTIONS
from benchmarks.schedule.h100s import first_axis, h100s
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.step_time import (
    Rates,
    bytes_between_hosts,
    estimate,
    kinds_of_devices,
)


def measure(matrices: dict[str, Any], gpus: int, group: int) -> dict[str, Any]:
    """The estimated time and the bytes of one update."""
    mesh = Mesh(h100s(gpus), ("data",))
    specs = {
        name: first_axis(x.shape, "data", gpus, layers=True)
        for name, x in matrices.items()
    }
    found = jm.read(matrices)
    tx = jm.on_mesh(jm.orthogonalize(matrices=found, group=group), mesh, specs)
    shapes = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name])
        )
        for name, x in matrices.items()
    }
    lowered = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0]).lower(shapes)
    options = jm.gpu_options(matrices, mesh, layers=False)
    compiled = lowered.compile(compiler_options=TOOL_OPTIONS | options)
    module = Module.parse(compiled.as_text())
    plan, rates = jm.describe(tx, matrices), Rates()
    times = estimate(module, rates, kinds_of_devices(plan.pools, plan.sizes))
    between = sum(bytes_between_hosts(t, 8) for t in module.transfers())
    exchanges = [t for t in module.transfers() if t.kind == "all-to-all"]
    return {
        "gpus": gpus,
        "group": max(pool.group for pool in plan.pools),
        "milliseconds": 1e3 * times.step,
        "products_milliseconds": 1e3 * times.products,
        "busiest_flops": float(plan.flops.max()),
        "imbalance": plan.imbalance,
        "sent_bytes": sum(t.sent_bytes for t in module.transfers()),
        "bytes_between_hosts": between,
        "all_to_all_to_owners_bytes": sum(
            t.sent_bytes for t in exchanges if bytes_between_hosts(t, 8)
        ),
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule.orthogonalization"
    )
    parser.add_argument("--model", choices=LLAMAS, default="llama-7b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    blocks = llama_parameters(args.model, jnp.bfloat16)["blocks"]
    matrices = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(blocks)
        if x.ndim > 2
    }
    rows = []
    print("| GPUs | owners | ms | of products | TFLOP | GB between hosts |")
    print("|---|---|---|---|---|---|")
    for gpus in args.gpus:
        for group in (1, 8):
            row = {"model": args.model, "most": group} | measure(matrices, gpus, group)
            owner = "groups of 8" if row["group"] > 1 else "devices"
            print(
                f"| {gpus} | {owner} | {row['milliseconds']:.1f} "
                f"| {row['products_milliseconds']:.1f} "
                f"| {row['busiest_flops'] / 1e12:.2f} "
                f"| {row['bytes_between_hosts'] / 1e9:.3f} |",
                flush=True,
            )
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
