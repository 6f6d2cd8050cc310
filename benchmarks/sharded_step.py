"""What each device computes and sends when parameters are sharded, by ours and optax's.

    python -m benchmarks.sharded_step

compiles one optimizer step of a GPT for eight CPU devices, with each implementation and
layout, and counts in the compiled program: products of a device, relative to an even
share of the same implementation on one device, and collectives. Nothing is timed.
"""

import argparse
import collections
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks.schedule.hlo import Module

P = PartitionSpec
LAYOUTS: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "fsdp 8": ((8,), P("a")),
    "tp 8": ((8,), P(None, "a")),
    "fsdp 4 x tp 2": ((4, 2), P("a", "b")),
    "fsdp 2 x tp 2 x replicas 2": ((2, 2, 2), P("a", "b")),
}
KINDS = ("all-to-all", "all-gather", "all-reduce", "collective-permute")


def matrices(layers: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The matrices of a GPT; from width 256 on, all are large enough for owners."""
    square = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block = square | {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"{layer}/{name}": jax.ShapeDtypeStruct(shape, "float32")
        for layer in range(layers)
        for name, shape in block.items()
    }


def step_of(tx: optax.GradientTransformation) -> Any:
    """Update and apply, jitted."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled(tx: optax.GradientTransformation, params: Any, state: Any) -> Module:
    """The program of one step with these arguments, and gradients like parameters."""
    text = step_of(tx).lower(params, state, params).compile().as_text()
    return Module.parse(text)


def contenders() -> dict[str, optax.GradientTransformation]:
    """What is compared."""
    return {
        "jax_muon.nanochat": jm.nanochat(dtype="float32"),
        "jax_muon.muon": jm.muon(dtype="float32"),
        "optax.contrib.muon": optax.contrib.muon(0.02),
    }


def count(params: Any, layout: str) -> list[tuple[str, ...]]:
    """A row for each implementation."""
    shape, spec = LAYOUTS[layout]
    names = ("a", "b", "c")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    own = NamedSharding(mesh, spec)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), params
    )
    rows = []
    for name, tx in contenders().items():
        whole = compiled(tx, params, jax.eval_shape(tx.init, params)).work().flops
        divided = jm.on_mesh(tx, mesh, spec)
        state = jm.abstract_state(divided, placed, mesh)
        # optax's own step knows nothing of the mesh, but its arguments lie as ours do.
        ours = name.startswith("jax_muon")
        module = compiled(divided if ours else tx, placed, state)
        lines = module.computations[module.entry]
        found = collections.Counter(x.opcode.removesuffix("-start") for x in lines)
        share = module.work().flops / (whole / mesh.size)
        counts = tuple(str(found[kind]) for kind in KINDS)
        rows.append((layout, name, f"{share:.2f}", *counts))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    params = matrices(args.layers, args.width)
    rows: list[tuple[str, ...]] = [("layout", "step", "work", *KINDS)]
    for layout in LAYOUTS:
        rows += count(params, layout)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip())
    print("work: products of a device that takes every branch, over an even share")


if __name__ == "__main__":
    main()
