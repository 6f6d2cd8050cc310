"""Orthogonalization on a mesh by MaxText's all-to-all Muon, optax's and ours, counted.

    python -m benchmarks.maxtext_muon [--json FILE]

prints a Markdown table for Llama 7B with scanned layers; nothing runs. MaxText's rows
follow the rule of its 0.2.5 (`optimizers/reshape_utils.py`): each leaf's matrices go to
devices by their layer, padded with zeros to a multiple of the devices, and replicas
repeat the work. Bytes assume all-to-alls; XLA does not always turn a reshard into one.
Rows of `optax.contrib.muon` count what XLA compiles for CPUs; ours are what
`jax_muon.describe` says.
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
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks.parameters import llama_parameters
from benchmarks.schedule.hlo import Module
from jax_muon.mesh.collectives import ring_bytes

# Devices that parameters are sharded over, and replicas of them.
MESHES = ((8, 1), (64, 1), (256, 1), (8, 8), (8, 32))
SPEC = PartitionSpec(None, "fsdp")
# True where one device works on the whole matrix of a 2-D leaf.
WHOLE_2D = {"optax.contrib.muon": False, "maxtext": False, "jax_muon": True}


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


def of_optax(params: Any, mesh: Mesh) -> tuple[float, float, int]:
    """The same of optax's, by the program that XLA makes of it for sharded leaves."""
    own = NamedSharding(mesh, SPEC)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), params
    )
    numbers = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), params)
    tx = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)

    def orthogonalize(updates: Any) -> Any:
        return tx.update(updates, tx.init(updates))[0]

    step = jax.jit(orthogonalize, out_shardings=own)
    module = Module.parse(step.lower(placed).compile().as_text())
    transfers = module.transfers()
    sent = sum(transfer.sent_bytes for transfer in transfers)
    return module.work().flops, sent, len(transfers)


def ours(params: Any, mesh: Mesh) -> tuple[float, float, int]:
    """The same of `jm.muon` with `on_mesh`, by its description."""
    found = jm.describe(jm.on_mesh(jm.muon(), mesh, SPEC), params)
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
    print(
        "| sharded x replicas | Muon | TFLOP, busiest device | even share | GB sent "
        "| collectives | 2-D leaves whole |\n|---|---|---|---|---|---|---|"
    )
    for shards, replicas in MESHES:
        mesh = jax.make_mesh(
            (replicas, shards),
            ("replica", "fsdp"),
            (AxisType.Auto,) * 2,
            devices=jax.devices()[: shards * replicas],
        )
        found = {
            "optax.contrib.muon": of_optax(params, mesh),
            "maxtext": theirs(leaves, shards),
            "jax_muon": ours(params, mesh),
        }
        even = whole / shards / replicas
        for name, (flops, sent, number) in found.items():
            covered = "yes" if WHOLE_2D[name] else "no"
            print(
                f"| {shards} x {replicas} | {name} | {flops / 1e12:.1f} "
                f"| {even / 1e12:.1f} | {sent / 1e9:.2f} | {number} | {covered} |"
            )
            row = {"shards": shards, "replicas": replicas, "muon": name}
            row |= {"flops": flops, "sent_bytes": sent, "collectives": number}
            row |= {"even_flops": even, "whole_2d_leaves": WHOLE_2D[name]}
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
