"""Self-test: `python -m jax_muon` prints versions and devices and checks an update.

It runs `nanochat` on all devices, with its state sharded over them, and on one device.
The matrices are large enough to be dealt out to the devices.
"""

import importlib.metadata
import platform
import sys

import jax
from jax.sharding import AxisType

import jax_muon as jm

SHAPES = {
    "embed": jax.ShapeDtypeStruct((96, 256), "float32"),
    "attn/q": jax.ShapeDtypeStruct((256, 256), "float32"),
    "mlp/up": jax.ShapeDtypeStruct((256, 512), "float32"),
    "norm": jax.ShapeDtypeStruct((256,), "float32"),
}
MATRICES = {"embed": "adamw", "attn": "muon", "mlp": "muon"}


def main() -> int:
    """Run the self-test; the exit status is 1 if an update is wrong."""
    print(f"jax_muon {jm.__version__}, Python {platform.python_version()}", end="")
    for name in ("jax", "jaxlib", "optax", "numpy"):
        print(f", {name} {importlib.metadata.version(name)}", end="")
    devices = jax.devices()
    print(f"\n{len(devices)} x {devices[0].platform}, {devices[0].device_kind}\n")
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,))
    adamw = jm.adamw(3e-3)
    tx = jm.nanochat(0.02, adamw=adamw, dtype="float32", matrices=MATRICES)
    tx = jm.on_mesh(tx, mesh, divide="data")
    verification = jm.verify(tx, SHAPES)
    print(verification)
    return 0 if verification.ok else 1


if __name__ == "__main__":
    sys.exit(main())
