"""Time to trace and lower a train step, by the number of leaves, beside optax's Muon.

A step is a gradient and an update in one trace. Process time is measured, so other
programs on the machine matter little. Run `python -m benchmarks.trace`; `--leaves`
takes other sizes, `--json FILE` writes the result.
"""

import argparse
import gc
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import jax_muon as jm
from benchmarks import machine

DEVICES = 8
BASELINE = "optax.contrib.muon"
BLOCK = {
    "norm/scale": (64,),
    **{f"attention/{name}/kernel": (64, 64) for name in ("q", "k", "v", "out")},
    "mlp/up/kernel": (64, 256),
    "mlp/down/kernel": (256, 64),
}


def parameters(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of at least so many parameters, in blocks of a transformer."""
    blocks = -(-leaves // len(BLOCK))
    return {
        f"blocks_{i}/{path}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i in range(blocks)
        for path, shape in BLOCK.items()
    }


def contenders() -> dict[str, optax.GradientTransformation]:
    """Optimizers by name."""
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,))
    muon = jm.muon(0.02)
    return {
        BASELINE: optax.contrib.muon(0.02),
        "one device": muon,
        "ZeRO-2": jm.on_mesh(muon, mesh, divide="data", min_size=1),
        "FSDP": jm.on_mesh(muon, mesh, PartitionSpec("data")),
    }


def measure(tx: optax.GradientTransformation, leaves: int) -> dict[str, float]:
    """Seconds to trace and to lower a step, and the number of its parameters."""

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.sum(x * x) for x in params.values()) * batch

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters(leaves)
    state = jax.eval_shape(tx.init, params)
    gc.collect()
    began = time.process_time()
    traced = jax.jit(step).trace(params, state, jax.ShapeDtypeStruct((), jnp.float32))
    then = time.process_time()
    traced.lower()
    end = time.process_time()
    return {"leaves": len(params), "trace": then - began, "lower": end - then}


def main(words: list[str]) -> None:
    """Measure all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args(words)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found: dict[str, list[dict[str, float]]] = {}
    base: list[float] = []
    print("                     leaves  trace s  lower s  of optax's  exponent")
    for name, tx in contenders().items():
        measure(tx, 20)  # JAX traces its own functions once
        found[name] = []
        for index, leaves in enumerate(given.leaves):
            row = measure(tx, leaves)
            found[name].append(row)
            total = row["trace"] + row["lower"]
            if name == BASELINE:
                base.append(total)
            row["ratio"] = total / base[index]
            line = f"{name:20} {row['leaves']:6}  {row['trace']:7.2f}  "
            line += f"{row['lower']:7.2f}  {row['ratio']:10.2f}"
            if index == len(given.leaves) - 1 and index:
                row["exponent"] = exponent(found[name])
                line += f"  {row['exponent']:8.2f}"
            print(line, flush=True)
    if given.json:
        result = machine.describe("benchmarks.trace", words) | {"rows": found}
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def exponent(rows: list[dict[str, float]]) -> float:
    """The power of the number of leaves that time grows with, by least squares."""
    times = [row["trace"] + row["lower"] for row in rows]
    slope, _ = np.polyfit(np.log([row["leaves"] for row in rows]), np.log(times), 1)
    return float(slope)


if __name__ == "__main__":
    main(sys.argv[1:])
