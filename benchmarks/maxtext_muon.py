"""Orthogonalization on a mesh by MaxText's all-to-all Muon, optax's and ours, counted.

    python -m benchmarks.maxtext_muon [--json FILE]

prints a table for Llama 7B with scanned layers; nothing runs. MaxText's rows follow the
rule of its 0.2.5 (`optimizers/reshape_utils.py`): each leaf's matrices go to devices by
their layer, padded with zeros to a multiple of the devices, and replicas repeat the
work. Bytes assume all-to-alls; XLA does not always turn a reshard into one. Rows of
`optax.contrib.muon` count what XLA compiles for CPUs; ours are what `jm.describe` says.
"""

import math
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "256")

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks import program
from benchmarks.parameters import llama_parameters, quintics_flops
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from jax_muon.mesh.collectives import Collective

# Devices that parameters are sharded over, and replicas of them.
MESHES = ((8, 1), (64, 1), (256, 1), (8, 8), (8, 32))
SPEC = PartitionSpec(None, "fsdp")
Counts = tuple[float, float, int]  # FLOPs, bytes that a device sends, collectives


def of_maxtext(params: Any, mesh: Mesh) -> Counts:
    """By its rule."""
    flops = sent = 0.0
    shards, leaves = mesh.shape["fsdp"], jax.tree.leaves(params)
    for leaf in leaves:
        layers, m, n = leaf.shape
        padded = math.ceil(layers / shards)  # matrices on a device
        flops += padded * quintics_flops(m, n)
        moved = padded * m * n * leaf.dtype.itemsize
        there = Collective("all-to-all", tuple(range(shards)), moved)
        sent += 2 * there.sent_bytes
    return flops, sent, 2 * len(leaves)


def of_optax(params: Any, mesh: Mesh) -> Counts:
    """By the program that XLA makes for sharded leaves."""
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
    return module.flops(), sent, len(transfers)


def of_us(params: Any, mesh: Mesh) -> Counts:
    """By the description of `jm.muon` with `on_mesh`."""
    matrices = {"*": optax.contrib.MuonDimensionNumbers(-2, -1)}
    tx = jm.on_mesh(jm.muon(matrices=matrices), mesh, SPEC)
    found = jm.describe(tx, params)
    flops = sum(pool.load(found.sizes) for pool in found.pools)
    state = jax.eval_shape(tx.init, params)
    number = len(collectives(tx.update, params, state, params))
    return float(flops.max()), found.sent_bytes["orthogonalize"], number


COUNTED = {"optax.contrib.muon": of_optax, "maxtext": of_maxtext, "jax_muon": of_us}


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.maxtext_muon", __doc__)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(words)
    params = llama_parameters("llama-7b", "float32")["blocks"]
    leaves = jax.tree.leaves(params)
    whole = sum(leaf.shape[0] * quintics_flops(*leaf.shape[1:]) for leaf in leaves)
    program.print_head(
        *("shards x replicas", "Muon", "TFLOP, busiest device", "even share"),
        *("GB sent", "collectives"),
    )
    rows = []
    for shards, replicas in MESHES:
        mesh = jax.make_mesh(
            (replicas, shards),
            ("replica", "fsdp"),
            (AxisType.Auto,) * 2,
            devices=jax.devices()[: shards * replicas],
        )
        even = whole / shards / replicas
        for name, counted in COUNTED.items():
            flops, sent, number = counted(params, mesh)
            row = {"shards": shards, "replicas": replicas, "muon": name}
            row |= {"flops": flops, "sent_bytes": sent, "collectives": number}
            rows.append(row | {"even_flops": even})
            given = flops / 1e12, even / 1e12, sent / 1e9, number
            program.print_row(f"{shards} x {replicas}", name, *given)
    if args.json:
        program.save(rows, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
