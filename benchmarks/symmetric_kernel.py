"""Kernels for symmetric products, compiled for an H100 without one.

    python -m benchmarks.symmetric_kernel

reads out what the compiler made of each kernel, and fails where registers are spilled
or tensor-core instructions wait for each other. `benchmarks/NOTES.md` says what follows
from the numbers, `make gpu-schedule` installs what the compiler needs. `check` compares
a kernel with plain products, on a GPU or in Pallas's interpreter.
"""

import dataclasses
import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import program
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
# One multiprocessor of an H100: registers, shared memory in bytes, of which each block
# takes 1 KiB for itself, and threads.
SM_REGISTERS, SM_SHARED_BYTES, BLOCK_SHARED_BYTES = 65536, 233472, 1024
SM_THREADS = 2048


@dataclasses.dataclass(frozen=True)
class Product:
    """A symmetric product of matrices (batch, m, n) in both ways."""

    name: str
    shape: tuple[int, int, int]
    plain: Callable[..., Any]
    kernel: Callable[..., Any]


def products(shape: tuple[int, int, int]) -> list[Product]:
    """What a step does with bfloat16 matrices of this shape.

    The Gram matrix of the first step is wanted in float32, since the norm is read off.
    """
    batch, m, _ = shape

    def gram(x: jax.Array) -> jax.Array:
        return outer(x, x).astype(x.dtype)

    def quadratic(a: jax.Array) -> jax.Array:
        b, c = FACTORS
        square = matmul(a, a)
        return (b * a.astype(square.dtype) + c * square).astype(a.dtype)

    def quadratic_kernel(a: jax.Array, **options: Any) -> jax.Array:
        return hopper.quadratic(a, *FACTORS, **options)

    wide = functools.partial(hopper.gram, dtype="float32")
    return [
        Product("gram", shape, gram, hopper.gram),
        Product("gram, float32", shape, gram, wide),
        Product("quadratic", (batch, m, m), quadratic, quadratic_kernel),
    ]


# ---- Compiled


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


def compile_kernel(product: Product, tiling: Tiling = TILING) -> Resources:
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


def saved(product: Product, tiling: Tiling = TILING) -> float:
    """The part of the plain product's FLOPs that the kernel leaves out."""
    _, m, _ = product.shape
    every = np.arange(tiles.tiles_of(padded(m), tiling.columns), dtype=np.int32)
    rows, _ = tiles.corner(every, padded(m), tiling.columns)
    computed = np.count_nonzero(np.asarray(rows) < m)
    return 1 - computed * tiles.ROWS * tiling.columns / m**2


# ---- Run


def operand(product: Product) -> jax.Array:
    """Gaussian matrices, or for the polynomial their Gram matrices, of norm near 1."""
    batch, m, n = product.shape
    x = jax.random.normal(jax.random.key(0), (batch, m, n)) / np.sqrt(n)
    return (outer(x, x) if product.name == "quadratic" else x).astype(jnp.bfloat16)


def check(product: Product, tiling: Tiling = TILING) -> float:
    """The largest error in units of what rounding allows; at most 1 is right.

    Sums of n terms in float32, in any order and cut off instead of rounded, are off by
    n 2^-23 times the sum of magnitudes; the reference, in float32, too.
    """
    x = operand(product)
    found = jax.jit(functools.partial(product.kernel, tiling=tiling))(x)
    if not jnp.array_equal(found, found.mT):
        raise SystemExit(f"{product.name} {product.shape}: not symmetric")
    wide = x.astype(jnp.float32)
    exact = jax.jit(product.plain)(wide)
    sizes = jnp.abs(wide)
    magnitudes = jax.jit(outer)(sizes, sizes)
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


def main() -> None:
    """The command."""
    jax.config.update("jax_platforms", "cpu")  # no driver must be looked for
    program.print_head(
        *("product", "shape", "programs", "registers", "spilled", "shared KiB"),
        *("at once", "FLOPs saved", "products wait"),
    )
    wrong = False
    compiled: dict[Any, Resources] = {}
    for product in (one for shape in SHAPES for one in products(shape)):
        # Shapes that are padded to the same one have one kernel, compiled once.
        batch, m, n = product.shape
        key = product.name, batch, padded(m), padded(n)
        used = compiled[key] = compiled.get(key) or compile_kernel(product)
        wrong |= used.serialized or used.spilled_bytes > 0
        program.print_row(
            *(product.name, product.shape, used.programs, used.registers),
            *(used.spilled_bytes, used.shared_bytes // 1024, used.programs_at_once),
            *(saved(product), "yes" if used.serialized else "no"),
        )
    if wrong:
        raise SystemExit("registers are spilled, or tensor-core instructions wait")


if __name__ == "__main__":
    main()
