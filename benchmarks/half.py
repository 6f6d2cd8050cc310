"""Sixteen bits for the polar iteration: bfloat16 beside float16, without a GPU.

    python -m benchmarks.half                  what rounding loses, on this CPU
    python -m benchmarks.half --momentum 150   on the momentum of a run of so many steps
    python -m benchmarks.half --h100           FLOPs and bytes, compiled for an H100

The error is that of rounding alone, ||Y - Z||_F / ||Z||_F, where Z are the same
quintics in float64. A GPU takes as long for a product in float16 as in bfloat16, and
float16 has three more bits of precision, for less range, which powers of two make up
for. That makes the Gram form possible, which takes fewer FLOPs for long matrices.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_muon as jm
from benchmarks import polar, spectra
from benchmarks.h100s import h100s
from jax_muon.mesh.hlo import Module

KINDS = (
    ("bfloat16", "standard"),
    ("float16", "standard"),
    ("float16", "gram"),
    ("float32", "standard"),
    ("float32", "gram"),
)
SHAPE = (256, 1024)
STACKS = ((24, 768, 768), (24, 768, 3072), (24, 1024, 4096), (24, 2048, 8192))
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}


def rows(
    names: tuple[str, ...], cells: Callable[[str, str], list[str]]
) -> Iterator[str]:
    """A table in Markdown, a line for each way."""
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for dtype, form in KINDS:
        yield f"| {dtype}, {form} | {' | '.join(cells(dtype, form))} |"


def rounding(x: np.ndarray, dtype: str, form: str) -> float:
    """What rounding changes in the polar factor of a matrix (m, n), m <= n."""
    y = jm.PolarExpress(dtype=dtype, form=form)(jnp.asarray(x, jnp.float32))
    return polar.rounding(y, x)


def of_spectra(shape: tuple[int, int]) -> Iterator[str]:
    """The error on each of four spectra."""
    cases = [polar.matrices(kind, *shape, count=1)[0] for kind in polar.SPECTRA]
    return rows(
        tuple(polar.SPECTRA),
        lambda *kind: [f"{rounding(x, *kind):.1e}" for x in cases],
    )


def of_momentum(steps: int, width: int) -> Iterator[str]:
    """The error on every matrix's momentum after a run: mean and worst."""
    records = spectra.record(steps, [steps], width, seed=0)

    def cells(dtype: str, form: str) -> list[str]:
        found = [rounding(record["matrix"], dtype, form) for record in records]
        return [f"{np.mean(found):.1e}", f"{np.max(found):.1e}"]

    return rows(("mean", "worst"), cells)


def on_an_h100(shape: tuple[int, int, int]) -> Iterator[str]:
    """What the compiler makes of five steps on a stack of bfloat16 matrices."""
    (card,) = h100s(1).flat
    x = jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(card)
    )

    def cells(dtype: str, form: str) -> list[str]:
        function = jax.jit(jm.PolarExpress(dtype=dtype, form=form))
        module = Module.parse(function.lower(x).compile(CUBLASLT).as_text())
        work, traffic = module.work(), module.traffic()
        moved = (traffic.products, traffic.rest)
        return [
            str(work.count),
            f"{work.flops / 1e9:.0f}",
            *(f"{n / 1e9:.2f}" for n in moved),
        ]

    return rows(("products", "GFLOP", "GB by products", "GB by everything else"), cells)


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--momentum", type=int, metavar="STEPS")
    parser.add_argument("--width", type=int, default=128, help="of the model trained")
    parser.add_argument("--h100", action="store_true")
    parser.add_argument("--shape", type=int, nargs=2, default=SHAPE)
    args = parser.parse_args(words)
    if args.h100:
        for shape in STACKS:
            print(f"\n{shape}:", *on_an_h100(shape), sep="\n", flush=True)
    elif args.momentum is not None:
        print(*of_momentum(args.momentum, args.width), sep="\n")
    else:
        print(*of_spectra(tuple(args.shape)), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
