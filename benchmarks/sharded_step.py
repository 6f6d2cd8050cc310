"""What each device computes and sends when parameters are sharded, ours beside optax's.

    python -m benchmarks.sharded_step

compiles one optimizer step of a GPT for eight CPU devices, with each implementation and
layout, and counts in the compiled program: products of a device, relative to an even
share of the same implementation on one device, and collectives. Nothing is timed.
"""

import argparse
import collections
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jax_muon as jm
from benchmarks.hlo import Module
from jax_muon.mesh.global_view import GlobalView, state_shardings

P = PartitionSpec
LAYOUTS: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "fsdp 8": ((8,), P("a")),
    "tp 8": ((8,), P(None, "a")),
    "fsdp 4 x tp 2": ((4, 2), P("a", "b")),
    "fsdp 2 x tp 2 x replicas 2": ((2, 2, 2), P("a", "b")),
}
KINDS = ("all-to-all", "all-gather", "all-reduce", "collective-permute")


def matrices(layers: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The matrices of a GPT."""
    square = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block = square | {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"{layer}/{name}": jax.ShapeDtypeStruct(shape, "float32")
        for layer in range(layers)
        for name, shape in block.items()
    }


def compiled(
    tx: optax.GradientTransformation, params: Any, place: Callable[[Any], Any]
) -> Module:
    """The program of one step."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    placed, state = place(params), place(jax.eval_shape(tx.init, params))
    text = jax.jit(step).lower(placed, state, placed).compile().as_text()
    return Module.parse(text)


def contenders(mesh: Mesh | None, spec: PartitionSpec) -> dict[str, Any]:
    """What is compared, each as it is used on this mesh."""
    where = {} if mesh is None else {"mesh": mesh, "specs": spec, "small": 0}
    return {
        "jax_muon.nanochat": jm.nanochat(dtype="float32", **where),
        "jax_muon.muon": jm.muon(dtype="float32", **where),
        "optax.contrib.muon": optax.contrib.muon(0.02),
    }


def count(params: Any, layout: str) -> list[tuple[str, ...]]:
    """A row for each implementation."""
    shape, spec = LAYOUTS[layout]
    names = ("a", "b", "c")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    view = GlobalView.of(params, mesh, spec)

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            tree,
            state_shardings(tree, params, view),
        )

    rows = []
    alone = contenders(None, spec)
    for name, tx in contenders(mesh, spec).items():
        whole = compiled(alone[name], params, lambda tree: tree).work().flops
        module = compiled(tx, params, place)
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
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    params = matrices(args.layers, args.width)
    rows = [("layout", "step", "work", *KINDS)]
    for layout in LAYOUTS:
        rows += count(params, layout)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip())
    print("work: products of a device that takes every branch, over an even share")


if __name__ == "__main__":
    main()
