"""Bytes of optimizer state on each device under ZeRO-2, measured on CPU devices.

    python -m benchmarks.state_memory           GPT-2 124M on 1, 2, 4 and 8 devices
    python -m benchmarks.state_memory --model gpt2-350m --devices 4

The state is built for real, by `init_optimizer`, and its shards are counted.
"""

import argparse

import jax
import jax.numpy as jnp

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
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        state = jm.init_optimizer(jm.nanochat(zero2_axis="data"), params, mesh)
        held = dict.fromkeys(mesh.devices.flat, 0)
        for leaf in jax.tree.leaves(state):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        print(f"{count} devices: {max(held.values()) / 1e6:.1f} MB on each")
        del state


if __name__ == "__main__":
    main()
