"""The benchmark of the symmetric kernels: its parser, and its check on small shapes."""

import jax.numpy as jnp
import pytest

from benchmarks import symmetric_kernel as benchmark
from jax_muon.polar.kernels import HOPPER, Tiling

# As ptxas 13.5 and XLA of jax 0.10.2 print them.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gram' for 'sm_90a'
ptxas info    : Function properties for gram
    248 bytes stack frame, 246 bytes spill stores, 300 bytes spill loads
ptxas info    : Used 178 registers, used 1 barriers
"""
SERIALIZED = (
    "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions "
    "are serialized due to non wgmma instructions reading accumulator registers\n"
)
THUNKS = (
    "001: kCustomKernel [source | sink] gram grid: [21, 24, 1] threads: [256, 1, 1]  "
    "shared_memory: 98304 bytes\n"
)


def test_resources_are_read_from_the_compilers_text():
    """Registers bound the number of programs; without text there is no answer."""
    found = benchmark.Resources.parse(PTXAS, THUNKS)
    assert found == benchmark.Resources(178, 546, False, 256, 504, 98304)
    assert found.programs_at_once == 1  # 184 * 256 registers of 65536
    few = benchmark.Resources(64, 0, False, 128, 504, 49152)
    assert few.programs_at_once == 4  # 49 KiB of 228
    assert benchmark.Resources.parse(SERIALIZED + PTXAS, THUNKS).serialized
    with pytest.raises(ValueError, match="not the text of a kernel"):
        benchmark.Resources.parse("", THUNKS)


def test_saved_counts_whole_tiles():
    """21 of 36 tiles; and of a matrix smaller than a tile more than all of it."""
    gram = benchmark.products([(24, 768, 768)])[0]
    assert benchmark.saved(gram, HOPPER) == pytest.approx(1 - 21 / 36)
    small = benchmark.products([(24, 64, 768)])[0]
    assert benchmark.saved(small, HOPPER) == 1 - 4


def test_check_accepts_the_kernel_and_refuses_a_wrong_one():
    """In the interpreter, before any card is at hand."""
    tiling = Tiling(tile=16, depth=16)
    for product in benchmark.products([(2, 20, 36)]):
        x = benchmark.operand(product)
        assert x.shape == product.shape
        assert x.dtype == jnp.bfloat16

        def interpreted(x, product=product, **options):
            return product.kernel(x, interpret=True, **options)

        def wrong(x, product=product, **options):
            return 1.02 * product.plain(x)

        def replaced(kernel, p=product):
            return benchmark.Product(p.name, p.shape, p.plain, kernel)

        assert benchmark.check(replaced(interpreted), tiling, x) <= 1
        with pytest.raises(SystemExit, match=product.name):
            benchmark.check(replaced(wrong), tiling, x)
