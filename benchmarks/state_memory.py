"""Bytes of optimizer state on each device under ZeRO-2, measured on CPU devices.

    python -m benchmarks.state_memory           GPT-2 124M on 1, 2, 4 and 8 devices
    python -m benchmarks.state_memory --model gpt2-350m --devices 4

The state is built for real, by `init` of `on_mesh`, and its shards are counted.
Leaves below `min_size` elements and step counts are whole on every device.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import jax_muon as jm
from benchmarks.parameters import MODELS, model_parameters


def main() -> None:
    """Print a table: devices, bytes on the fullest device, and its share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tied", action="store_true", help="the embedding is the head")
    options = parser.parse_args()
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
