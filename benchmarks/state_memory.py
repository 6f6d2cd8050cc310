"""Bytes of optimizer state on each device, measured on CPU devices or planned.

    python -m benchmarks.state_memory           GPT-2 124M on 1, 2, 4 and 8 devices
    python -m benchmarks.state_memory --model gpt2-350m --devices 4
    python -m benchmarks.state_memory --layouts by layout and dtype of the momentum

The state is built for real, by `init` of `on_mesh`, and its shards are counted; for
`--layouts`, those of `benchmarks.schedule.h100s`, it is `nanochat`'s in shapes with
shardings, as `make_train_step` makes it. Leaves below `min_size` elements and step
counts are whole on every device.
"""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jax_muon as jm
from benchmarks.parameters import MODELS, model_parameters
from benchmarks.schedule.h100s import whole_step

PLANNED = (
    ("gpt2-124m", 8, ("zero2", "fsdp")),
    ("llama-7b", 64, ("zero2", "fsdp", "hsdp", "fsdp-tp")),
)
MOMENTUM_DTYPES = ("float32", "bfloat16", "int8")


def main() -> None:
    """Print a table: devices, bytes on the fullest device, and its share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tied", action="store_true", help="the embedding is the head")
    parser.add_argument("--layouts", action="store_true")
    options = parser.parse_args()
    if options.layouts:
        jax.config.update("jax_num_cpu_devices", max(count for _, count, _ in PLANNED))
        print(*by_layout(), sep="\n")
        return
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    shapes = model_parameters(options.model, jnp.float32)
    if options.tied:
        del shapes["lm_head"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    elements = sum(x.size for x in jax.tree.leaves(params))
    print(f"{options.model}: {elements / 1e6:.0f} M parameters, nanochat, float32")
    for count in options.devices:
        held, whole = state_bytes(params, count)
        share = held / (whole / count)
        print(f"{count} devices: {held / 1e6:.1f} MB on each, {share:.3f} even shares")


def by_layout() -> Iterator[str]:
    """A table in Markdown: bytes on a device by layout and dtype of the momentum."""
    yield f"| model | devices | layout | {' | '.join(MOMENTUM_DTYPES)} |"
    yield "|---" * (3 + len(MOMENTUM_DTYPES)) + "|"
    for model, count, layouts in PLANNED:
        alone = [planned_bytes(model, 1, "zero2", dtype) for dtype in MOMENTUM_DTYPES]
        yield line(model, 1, "all of it", alone)
        for layout in layouts:
            held = [planned_bytes(model, count, layout, d) for d in MOMENTUM_DTYPES]
            yield line(model, count, layout, held)


def line(model: str, count: int, layout: str, held: list[int]) -> str:
    """A line of that table."""
    return (
        f"| {model} | {count} | {layout} | "
        + " | ".join(f"{n / 1e6:,.0f} MB" for n in held)
        + " |"
    )


def planned_bytes(model: str, count: int, layout: str, momentum_dtype: str) -> int:
    """Bytes of state on each of so many devices, from shapes with shardings."""
    devices = np.array(jax.devices()[:count])
    whole = whole_step(
        model, devices, layout, "nanochat", momentum_dtype=momentum_dtype
    )
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(whole.args[1])
    )


def state_bytes(params: optax.Params, devices: int) -> tuple[int, int]:
    """Bytes of state on the fullest of so many devices, and of all state once."""
    here = jax.devices()[:devices]
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=here
    )
    tx = jm.on_mesh(jm.nanochat(), mesh, divide="data")
    leaves = jax.tree.leaves(tx.init(params))
    held = dict.fromkeys(here, 0)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values()), sum(leaf.nbytes for leaf in leaves)


if __name__ == "__main__":
    main()
