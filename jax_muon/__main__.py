"""The package looks at itself, and at layouts of a model, from the command line.

    python -m jax_muon                 versions, devices, and updates as a self-test
    python -m jax_muon verify SHAPES --mesh data=2,fsdp=4 --specs fsdp,- --divide data

The second lays out a model on simulated CPU devices and compares updates with those of
one device; see `jax_muon.verify`. The file SHAPES has the parameters' shapes:
`{"params": [{"path": "mlp/kernel", "shape": [768, 3072], "dtype": "float32"}]}`, with
axis names in "names" where there are any. The model is read at these shapes, and run at
smaller ones, which should not be too small: a matrix of fewer than 65536 elements is
gathered, a larger one goes to an owner.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import pathlib
import platform
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon import recipes
from jax_muon.reading.labels import MUON

RECIPES = {name: getattr(recipes, name) for name in recipes.__all__}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 1 where something is wrong."""
    told: dict[str, Any] = {
        "description": __doc__,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(prog="python -m jax_muon", **told)
    commands = parser.add_subparsers(dest="command", metavar="verify")
    options = commands.add_parser("verify", help="a layout of a model's shapes", **told)
    add = options.add_argument
    add("shapes", type=pathlib.Path, help="the file SHAPES")
    add("--devices", type=int, help="simulated; else as many as the mesh has")
    add("--mesh", type=_mesh, default={"data": 8}, metavar="data=2,fsdp=4")
    add("--explicit", action="store_true", help="a mesh with Explicit axes")
    add("--specs", default="", metavar="fsdp,tp", help="of a leaf's last axes; - for "
        "none. Where devices do not divide it, an axis stays whole")  # fmt: skip
    add("--divide", default="", metavar="data", help="mesh axes that divide state")
    add("--recipe", choices=RECIPES, default="nanochat")
    add("--dtype", default="float32", help="of the polar iteration")
    add("--largest", type=int, default=512, help="sizes above are halved until below")
    add("--steps", type=int, default=2)
    add("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        found = _self_test() if given.command is None else _verify(given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(found)
    return 0 if found.ok else 1


def _self_test() -> jm.Certificate:
    """Compare a small model's updates, its state divided, with those of one device."""
    print(f"jax_muon {jm.__version__}, Python {platform.python_version()}", end="")
    for name in ("jax", "jaxlib", "optax", "numpy"):
        print(f", {name} {importlib.metadata.version(name)}", end="")
    devices = jax.devices()
    print(f"\n{len(devices)} x {devices[0].platform}, {devices[0].device_kind}\n")
    shapes = {
        "embed": jax.ShapeDtypeStruct((96, 64), "float32"),
        "attn/q": jax.ShapeDtypeStruct((64, 64), "float32"),
        "mlp/up": jax.ShapeDtypeStruct((64, 256), "float32"),
        "norm": jax.ShapeDtypeStruct((64,), "float32"),
    }
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,))
    return jm.verify(jm.nanochat(dtype="float32"), shapes, mesh, divide="data")


def _verify(given: argparse.Namespace) -> jm.Certificate:
    needed = math.prod(given.mesh.values())
    with contextlib.suppress(RuntimeError):  # JAX has devices already
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices or needed)
    devices = jax.devices()[: given.devices]
    if len(devices) < needed:
        raise ValueError(
            f"--mesh {given.mesh} for {len(devices)} devices; expected at most as many"
        )
    kind = AxisType.Explicit if given.explicit else AxisType.Auto
    mesh = jax.sharding.Mesh(
        np.array(devices[:needed]).reshape(*given.mesh.values()),
        tuple(given.mesh),
        axis_types=(kind,) * len(given.mesh),
    )
    shapes, reading = small_model(given.shapes, given.largest)
    names = [None if name == "-" else name for name in given.specs.split(",") if name]

    def spec(path: str) -> PartitionSpec:
        shape = shapes[path].shape
        entries = [
            name if size % given.mesh.get(name, 1) == 0 else None
            for name, size in zip(reversed(names), reversed(shape), strict=False)
        ]
        return PartitionSpec(*[None] * (len(shape) - len(entries)), *entries[::-1])

    return jm.verify(
        RECIPES[given.recipe](dtype=given.dtype, reading=reading),
        shapes,
        mesh,
        spec,
        tuple(name for name in given.divide.split(",") if name),
        steps=given.steps,
        seed=given.seed,
    )


def small_model(file: pathlib.Path, largest: int) -> tuple[Any, jm.Reading]:
    """Small shapes of a model, and the reading of its full ones.

    Args:
      file: with the shapes, in JSON.
      largest: sizes above are halved until they are not, as long as the half is a whole
        number, and a multiple of 8 where the size is one.

    Returns:
      Shapes by path, and a `Reading` of them.

    Raises:
      ValueError: the file is not of that form; a matrix that can be read in several
        ways.
    """
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["params"]
        whole = {
            x["path"]: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"])
            for x in listed
        }
        names = {x["path"]: tuple(x["names"]) for x in listed if x.get("names")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{file}: {error!r}; expected {{"params": [{{"path": "mlp/kernel", '
            '"shape": [768, 3072], "dtype": "float32"}]}'
        ) from error
    read = jm.Reading(names=names or None).read(whole)
    numbers = {
        path: MuonDimensionNumbers(axes.reduction, axes.output)
        for path, found in read.items()
        if found.label == MUON
        for axes in [read.axes(path)]
    }
    reading = jm.Reading(
        labels={path: found.label for path, found in read.items()},
        # A function gives paths; a mapping would be patterns, which match others too.
        dimension_numbers=lambda tree: numbers,
    )
    small = {
        path: jax.ShapeDtypeStruct([_halved(n, largest) for n in x.shape], x.dtype)
        for path, x in whole.items()
    }
    return small, reading


def _halved(size: int, largest: int) -> int:
    least = 8 if size % 8 == 0 else 1
    while size > largest and size % (2 * least) == 0:
        size //= 2
    return size


def _mesh(text: str) -> dict[str, int]:
    """Sizes of mesh axes by name."""
    pairs = [part.split("=") for part in text.split(",")]
    wrong = any(len(p) != 2 or not p[1].isdecimal() or int(p[1]) == 0 for p in pairs)
    if wrong or len({p[0] for p in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(
            f"{text}: expected axes with sizes, such as data=2,fsdp=4"
        )
    return {name: int(size) for name, size in pairs}


if __name__ == "__main__":
    sys.exit(main())
