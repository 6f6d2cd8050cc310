"""The benchmark of the symmetric kernels: its parser, and its check on small shapes."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from benchmarks import symmetric_kernel as benchmark
from jax_muon.polar.hopper.kernel import TILING, Tiling
from tests.interpreter import interpreted, needs_interpreter

# As ptxas 13.5 and Mosaic of jax 0.10.2 print them.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gram_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for gram_mosaic_gpu_kernel
    248 bytes stack frame, 246 bytes spill stores, 300 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SERIALIZED = (
    "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions "
    "are serialized due to non wgmma instructions reading accumulator registers\n"
)
MODULE = (
    "    %108 = gpu.launch async [%8] blocks(%arg2, %arg3, %arg4) in (%arg8 = %c288, "
    "%arg9 = %c1, %arg10 = %c1) threads(%arg5, %arg6, %arg7) in (%arg11 = %c384, "
    "%arg12 = %c1, %arg13 = %c1) dynamic_shared_memory_size %c229440_i32 {\n"
)


def test_resources_are_read_from_the_compilers_text():
    """Registers bound the number of programs; without text there is no answer."""
    found = benchmark.Resources.parse(PTXAS, MODULE)
    assert found == benchmark.Resources(168, 546, False, 384, 288, 229440)
    assert found.programs_at_once == 1  # 168 * 384 registers of 65536
    few = benchmark.Resources(64, 0, False, 128, 504, 49152)
    assert few.programs_at_once == 4  # 49 KiB of 228
    assert benchmark.Resources.parse(SERIALIZED + PTXAS, MODULE).serialized
    with pytest.raises(ValueError, match="not the text of a kernel"):
        benchmark.Resources.parse("", MODULE)


def test_saved_counts_whole_tiles():
    """12 tiles of 128 x 256 of 18; of a matrix smaller than a tile more than all."""
    gram = benchmark.products((24, 768, 768))[0]
    assert benchmark.saved(gram, TILING) == pytest.approx(1 - 12 / 18)
    assert benchmark.saved(gram, Tiling(columns=128)) == pytest.approx(1 - 21 / 36)
    small = benchmark.products((24, 64, 768))[0]
    assert benchmark.saved(small, TILING) == 1 - 8


@pytest.fixture
def keeps_no_program():
    """JAX cannot read a program for a GPU that is not there back from a cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the compiler for GPUs is not installed: make .venv/gpu-schedule",
)
@pytest.mark.parametrize("index", [1, 2], ids=["gram, float32", "quadratic"])
def test_compiled_for_an_h100(index, keeps_no_program):
    """A program for each tile; registers and shared memory are enough."""
    product = benchmark.products((24, 768, 3072))[index]
    found = benchmark.compile_kernel(product, TILING)
    assert found.programs == 24 * 12
    assert found.spilled_bytes == 0
    assert not found.serialized
    assert found.threads == 384
    assert found.programs_at_once == 1


@needs_interpreter
def test_check_accepts_the_kernel_and_refuses_a_wrong_one():
    """In the interpreter, before any card is at hand."""
    tiling = Tiling(columns=128, stages=2)
    for product in benchmark.products((2, 20, 36)):
        x = benchmark.operand(product)
        assert x.shape == product.shape
        assert x.dtype == jnp.bfloat16

        def wrong(x, product=product, **options):
            return 1.02 * product.plain(x)

        with interpreted():
            assert benchmark.check(product, tiling) <= 1
        with pytest.raises(SystemExit, match=product.name):
            benchmark.check(dataclasses.replace(product, kernel=wrong), tiling)
