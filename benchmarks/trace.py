"""Time to trace and lower a train step, by the number of leaves, beside optax's Muon.

    python -m benchmarks.trace [--leaves 100 1000]

A step is a gradient and an update in one trace. Process time is measured, so other
programs on the machine matter little. benchmarks/NOTES.md has the results.
"""

import gc
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

import jax_muon as jm
from benchmarks import program

DEVICES = 8
BLOCK = {
    "norm/scale": (64,),
    **{f"attention/{name}/kernel": (64, 64) for name in ("q", "k", "v", "out")},
    "mlp/up/kernel": (64, 256),
    "mlp/down/kernel": (256, 64),
}


def contenders() -> dict[str, optax.GradientTransformation]:
    """Optimizers by name."""
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,))
    muon = jm.muon(0.02, matrices={"*": "muon"})
    return {
        "optax.contrib.muon": optax.contrib.muon(0.02),
        "one device": muon,
        "ZeRO-2": jm.on_mesh(muon, mesh, divide="data", min_size=1),
        "FSDP": jm.on_mesh(muon, mesh, PartitionSpec("data")),
    }


def measure(tx: optax.GradientTransformation, leaves: int) -> tuple[int, float, float]:
    """The number of leaves in whole blocks; seconds to trace and to lower a step."""

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.sum(x * x) for x in params.values()) * batch

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {
        f"blocks_{i}/{path}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i in range(-(-leaves // len(BLOCK)))
        for path, shape in BLOCK.items()
    }
    state = jax.eval_shape(tx.init, params)
    gc.collect()
    began = time.process_time()
    traced = jax.jit(step).trace(params, state, jax.ShapeDtypeStruct((), jnp.float32))
    then = time.process_time()
    traced.lower()
    return len(params), then - began, time.process_time() - then


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.trace", __doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 5000])
    given = parser.parse_args(words)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    program.print_head("optimizer", "leaves", "trace s", "lower s")
    for name, tx in contenders().items():
        measure(tx, 20)  # JAX traces its own functions once
        for leaves in given.leaves:
            program.print_row(name, *measure(tx, leaves))


if __name__ == "__main__":
    main(sys.argv[1:])
