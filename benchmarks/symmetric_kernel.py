"""Kernels for symmetric products: compiled for an H100 without one, and timed on one.

    python -m benchmarks.symmetric_kernel           # compiles; needs no card
    python -m benchmarks.symmetric_kernel --time    # against plain products, on a GPU

The first reads out what the compiler made of each kernel, and fails where registers are
spilled or tensor-core instructions wait for each other. `benchmarks/NOTES.md` says
what follows from the numbers, `make gpu-schedule` installs what the compiler needs.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.schedule.h100s import H100, lowering_for_h100
from jax_muon.polar import hopper
from jax_muon.polar.hopper import kernel as tiles
from jax_muon.polar.hopper.kernel import TILING, Tiling
from jax_muon.polar.products import matmul, outer

SHAPES = (
    (24, 768, 768),
    (24, 768, 3072),
    (24, 1024, 1024),
    (24, 1024, 4096),
    (24, 2048, 2048),
    (24, 2048, 8192),
    (24, 1000, 3000),
)
FACTORS = (-2.5, 0.5)  # any; they are an operand of the kernel
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
# One multiprocessor of an H100: registers, shared memory in bytes, of which each block
# takes 1 KiB for itself, and threads.
SM_REGISTERS, SM_SHARED_BYTES, BLOCK_SHARED_BYTES, SM_THREADS = (
    65536,
    233472,
    1024,
    2048,
)
REPEATS, CALLS = 7, 50  # timing: the median of REPEATS means over CALLS


def gram(x: jax.Array, dtype: Any = None) -> jax.Array:
    """The plain product X X^T."""
    return outer(x, x).astype(x.dtype if dtype is None else dtype)


def quadratic(a: jax.Array, b: float, c: float) -> jax.Array:
    """The plain b A + c A A."""
    square = matmul(a, a)
    return (b * a.astype(square.dtype) + c * square).astype(a.dtype)


@dataclasses.dataclass(frozen=True)
class Product:
    """A symmetric product in both ways, and how much it multiplies and adds."""

    name: str
    shape: tuple[int, int, int]
    plain: Callable[..., Any]
    kernel: Callable[..., Any]

    @property
    def flops(self) -> int:
        """FLOPs of the plain product."""
        batch, m, n = self.shape
        return 2 * batch * m * m * n


def products(shapes: list[Any]) -> list[Product]:
    """What a step does with bfloat16 matrices (..., m, n) of these shapes.

    The Gram matrix of the first step is wanted in float32, since the norm is read off.
    """
    b, c = FACTORS
    grams = [
        Product(name, shape, plain, kernel)
        for shape in shapes
        for name, plain, kernel in (
            ("gram", gram, hopper.gram),
            (
                "gram, float32",
                functools.partial(gram, dtype="float32"),
                functools.partial(hopper.gram, dtype="float32"),
            ),
        )
    ]
    quadratics = [
        Product(
            "quadratic",
            shape,
            lambda a: quadratic(a, b, c),
            lambda a, **options: hopper.quadratic(a, b, c, **options),
        )
        for shape in dict.fromkeys((batch, m, m) for batch, m, _ in shapes)
    ]
    return grams + quadratics


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one program (a block of threads) of a kernel takes."""

    registers: int  # of a thread
    spilled_bytes: int  # stored and loaded, of a thread
    serialized: bool  # tensor-core instructions wait for each other
    threads: int
    programs: int
    shared_bytes: int

    @classmethod
    def parse(cls, ptxas: str, module: str) -> "Resources":
        """From `ptxas -v` and from the module that Mosaic compiles, of one kernel."""
        launch = re.search(
            r"gpu\.launch .* in \(\S+ = %c(\d+),.* threads.* in \(\S+ = %c(\d+),.*"
            r"dynamic_shared_memory_size %c(\d+)",
            module,
        )
        registers = re.search(r"Used (\d+) registers", ptxas)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
        if launch is None or registers is None or spills is None:
            raise ValueError(f"not the text of a kernel:\n{ptxas}\n{module[:2000]}")
        programs, threads, shared = map(int, launch.groups())
        return cls(
            registers=int(registers[1]),
            spilled_bytes=int(spills[1]) + int(spills[2]),
            serialized="wgmma.mma_async instructions are serialized" in ptxas,
            threads=threads,
            programs=programs,
            shared_bytes=shared,
        )

    @property
    def programs_at_once(self) -> int:
        """On one multiprocessor; registers are given out in eights."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(
            SM_REGISTERS // registers,
            SM_SHARED_BYTES // (self.shared_bytes + BLOCK_SHARED_BYTES),
            SM_THREADS // self.threads,
        )


def compile_kernel(product: Product, tiling: Tiling) -> Resources:
    """The kernel alone, for one H100."""
    (device,) = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices
    x = jax.ShapeDtypeStruct(
        product.shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)
    )
    kernel = jax.jit(functools.partial(product.kernel, tiling=tiling))
    with tempfile.TemporaryDirectory() as name:
        # Mosaic writes what it compiles there, and what ptxas says.
        with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=name):
            with lowering_for_h100():
                lowered = kernel.lower(x)
            lowered.compile()
        folder = pathlib.Path(name)
        (ptxas,) = folder.glob("*.ptxas")
        # jax 0.10 writes no other file; all passes are 50 MB.
        before = [*folder.glob("*.before_layout_inference.txt"), *folder.glob("*.log")]
        with before[0].open(encoding="utf-8") as module:
            return Resources.parse(ptxas.read_text(), module.read(1_000_000))


def padded(size: int) -> int:
    """The size that a kernel works on."""
    return -(-size // tiles.SQUARE) * tiles.SQUARE


def saved(product: Product, tiling: Tiling) -> float:
    """The part of the plain product's FLOPs that the kernel leaves out."""
    _, m, _ = product.shape
    every = np.arange(tiles.tiles_of(padded(m), tiling.columns), dtype=np.int32)
    rows, _ = tiles.corner(every, padded(m), tiling.columns)
    computed = np.count_nonzero(np.asarray(rows) < m)
    return 1 - computed * tiles.ROWS * tiling.columns / m**2


def report_compiled(tiling: Tiling, shapes: list[Any]) -> list[dict[str, Any]]:
    """Print the table of all shapes; no card is needed."""
    print(
        f"tiles of {tiles.ROWS} x {tiling.columns}, {tiles.SQUARE} deep, "
        f"at most {tiling.stages} stages; for an H100\n\n"
        "product        shape           programs  registers  spilled  shared KiB"
        "  per SM  FLOPs saved  products wait"
    )
    rows = []
    compiled: dict[Any, Resources] = {}
    for product in products(shapes):
        # Shapes that are padded to the same one have one kernel, compiled once.
        batch, m, n = product.shape
        key = product.name, batch, padded(m), padded(n)
        if key not in compiled:
            compiled[key] = compile_kernel(product, tiling)
        used = compiled[key]
        rows.append(
            {"product": product.name, "shape": product.shape}
            | dataclasses.asdict(used)
            | {"per_sm": used.programs_at_once, "saved": saved(product, tiling)}
        )
        print(
            f"{product.name:14} {'x'.join(map(str, product.shape)):16}"
            f"{used.programs:10}{used.registers:11}{used.spilled_bytes:9}"
            f"{used.shared_bytes / 1024:12.0f}{used.programs_at_once:8}"
            f"{saved(product, tiling):13.1%}{'yes' if used.serialized else 'no':>15}"
        )
    return rows


def operand(product: Product) -> jax.Array:
    """Gaussian matrices, or for the polynomial their Gram matrices, of norm near 1."""
    batch, m, n = product.shape
    x = jax.random.normal(jax.random.key(0), (batch, m, n)) / np.sqrt(n)
    return (gram(x) if product.name == "quadratic" else x).astype(jnp.bfloat16)


def check(product: Product, tiling: Tiling, x: jax.Array) -> float:
    """The largest error in units of what rounding allows; at most 1 is right.

    Sums of n terms in float32, in any order and cut off instead of rounded, are off by
    n 2^-23 times the sum of magnitudes; the reference, in float32, too.
    """
    found = jax.jit(functools.partial(product.kernel, tiling=tiling))(x)
    if not jnp.array_equal(found, found.mT):
        raise SystemExit(f"{product.name} {product.shape}: not symmetric")
    wide = x.astype(jnp.float32)
    exact = jax.jit(product.plain)(wide)
    sizes = jnp.abs(wide)
    magnitudes = jax.jit(gram)(sizes)
    if product.name == "quadratic":
        b, c = map(abs, FACTORS)
        magnitudes = b * sizes + c * magnitudes
    allowed = (
        2 * (x.shape[-1] + 3) * 2.0**-23 * magnitudes
        + float(jnp.finfo(found.dtype).eps) * jnp.abs(exact)
        + float(jnp.finfo(found.dtype).tiny)
    )
    worst = float(jnp.max(jnp.abs(found.astype(jnp.float32) - exact) / allowed))
    if not worst <= 1:
        raise SystemExit(f"{product.name} {product.shape}: {worst:.2f} of the bound")
    return worst


def seconds(function: Callable[..., Any], x: jax.Array) -> float:
    """Seconds of a call, many sent at once; the median of several such runs."""
    function = jax.jit(function)
    jax.block_until_ready([function(x) for _ in range(CALLS)])
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([function(x) for _ in range(CALLS)][-1])
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def report_times(tiling: Tiling, shapes: list[Any]) -> list[dict[str, Any]]:
    """Check and time every product on the GPU."""
    print(
        "product        shape           plain us  kernel us  ratio"
        "  plain TFLOP/s  error / bound"
    )
    rows = []
    for product in products(shapes):
        x = operand(product)
        error = check(product, tiling, x)
        plain = seconds(product.plain, x)
        kernel = seconds(functools.partial(product.kernel, tiling=tiling), x)
        rows.append(
            {
                "product": product.name,
                "shape": product.shape,
                "plain_seconds": plain,
                "kernel_seconds": kernel,
                "error_of_bound": error,
            }
        )
        print(
            f"{product.name:14} {'x'.join(map(str, product.shape)):16}"
            f"{plain * 1e6:10.1f}{kernel * 1e6:11.1f}{plain / kernel:7.2f}"
            f"{product.flops / plain / 1e12:15.0f}{error:15.2f}"
        )
    return rows


def shape_of(text: str) -> tuple[int, ...]:
    """BATCHxMxN of the command line, with m <= n as a step has it."""
    sizes = tuple(int(size) for size in text.split("x") if size.isdigit())
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected BATCHxMxN, such as 24x768x3072"
        )
    return sizes


def versions() -> dict[str, str]:
    """Versions of the installed packages."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {
        name: installed[name] for name in PACKAGES if name in installed
    }


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.symmetric_kernel")
    parser.add_argument("--time", action="store_true", help="on a GPU")
    parser.add_argument("--shape", type=shape_of, nargs="+", default=SHAPES)
    for field, value in TILING._asdict().items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    tiling = Tiling(**{field: getattr(args, field) for field in Tiling._fields})
    # To compile, no driver must be looked for; to time, nothing but a GPU will do.
    jax.config.update("jax_platforms", "cuda" if args.time else "cpu")
    if args.time:
        try:
            card = jax.devices()[0].device_kind
        except (RuntimeError, AssertionError) as error:  # JAX finds no backend
            raise SystemExit(
                f"--time needs a GPU, with CUDA and cuDNN. {error}"
            ) from None
    else:
        card = "H100, compiled only"
    rows = (report_times if args.time else report_compiled)(tiling, args.shape)
    folder = args.json or (pathlib.Path("benchmarks/results") if args.time else None)
    if folder is not None:
        result = {
            "card": card,
            "tiling": tiling._asdict(),
            "command": shlex.join(
                ["python", "-m", "benchmarks.symmetric_kernel", *words]
            ),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "rows": rows,
        }
        name = re.sub(r"\W+", "_", card.lower())
        path = folder / f"symmetric_kernel_{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if any(row.get("spilled_bytes") or row.get("serialized") for row in rows):
        raise SystemExit("registers are spilled, or tensor-core instructions wait")


if __name__ == "__main__":
    main(sys.argv[1:])
