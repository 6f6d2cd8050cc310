"""Orthogonalization on a mesh: MaxText's all-to-all Muon and ours, counted.

    python -m benchmarks.maxtext_muon [--json FILE]

prints a Markdown table for Llama 7B, layers scanned. MaxText's rows follow the rule of
its 0.2.5 (`optimizers/reshape_utils.py`) leaf by leaf: mesh axes of matrices move
to their layers, padded to a multiple of the devices; a leaf without layers stays in
pieces; replicas repeat the work. Ours is what `jax_muon.describe` says. Nothing
runs, and bytes are those of all-to-alls, which XLA does not always make of a reshard.
"""

import argparse
import json
import math
import os
import pathlib
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "256")

import jax
from jax.sharding import AxisType, PartitionSpec

import jax_muon as jm
from benchmarks.parameters import llama_parameters
from jax_muon.mesh.traffic import ring_bytes

# Devices that parameters are sharded over, and replicas of them.
MESHES = ((8, 1), (64, 1), (256, 1), (8, 8), (8, 32))


def flops_of(m: int, n: int) -> int:
    """Five quintics of one matrix, all three products in full."""
    m, n = sorted((m, n))
    return 5 * (4 * m * m * n + 2 * m**3)


def theirs(leaves: list[Any], shards: int) -> tuple[float, float, int]:
    """FLOPs, bytes that a device sends, and collectives of MaxText's all-to-all."""
    flops = sent = 0.0
    for leaf in leaves:
        layers, m, n = leaf.shape
        padded = math.ceil(layers / shards)  # matrices on a device
        flops += padded * flops_of(m, n)
        moved = padded * m * n * leaf.dtype.itemsize
        sent += 2 * ring_bytes("all-to-all", shards, moved)
    return flops, sent, 2 * len(leaves)


def ours(params: Any, shards: int, replicas: int) -> tuple[float, float, int]:
    """The same of `jm.muon` with `on_mesh`, by its description."""
    axes = ("replica", "fsdp")
    devices = jax.devices()[: shards * replicas]
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((replicas, shards), axes, auto, devices=devices)
    tx = jm.on_mesh(jm.muon(), mesh, PartitionSpec(None, "fsdp"))
    found = jm.describe(tx, params)
    sent = found.sent_bytes["orthogonalize"]
    return float(found.flops.max()), sent, len(found.collectives)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maxtext_muon")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    params = llama_parameters("llama-7b", "float32")["blocks"]
    leaves = jax.tree.leaves(params)
    whole = sum(leaf.shape[0] * flops_of(*leaf.shape[1:]) for leaf in leaves)
    rows = []
    print("| sharded x replicas | Muon | TFLOP | even share | GB sent | collectives |")
    print("|---|---|---|---|---|---|")
    for shards, replicas in MESHES:
        found = {
            "maxtext": theirs(leaves, shards),
            "jax_muon": ours(params, shards, replicas),
        }
        even = whole / shards / replicas
        for name, (flops, sent, number) in found.items():
            print(
                f"| {shards} x {replicas} | {name} | {flops / 1e12:.1f} "
                f"| {even / 1e12:.1f} | {sent / 1e9:.2f} | {number} |"
            )
            row = {"shards": shards, "replicas": replicas, "muon": name}
            row |= {"flops": flops, "sent_bytes": sent, "collectives": number}
            rows.append(row | {"even_flops": even})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
