"""The program for a GPU, tried where there is none."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import on_a_card
from benchmarks.schedule.h100s import H100, lowering_for_h100
from tests.benchmarks.conftest import needs_gpu_compiler


def test_the_command_at_tiny_sizes(tmp_path):
    """The tasks of some seconds, each in its process; polar factors are compared."""
    words = ["--tiny", "--tasks", "kernels", "polar", "--out", str(tmp_path)]
    on_a_card.main(words)
    kernels, polar = (
        json.loads((tmp_path / f"{task}.json").read_text())["rows"]
        for task in ("kernels", "polar")
    )
    assert [row["ok"] for row in kernels if "error" in row] == 3 * [True]
    assert "kernels need a GPU" in kernels[0]["skipped"]
    assert not [row for row in (*kernels, *polar) if "failed" in row]
    assert sum("nominal_flops_per_s" in row for row in polar) == 6


@pytest.fixture
def keeps_no_program():
    """JAX cannot read a program for a GPU that is not there back from a cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["gram, float32", "quadratic"])
def test_kernels_compiled_for_an_h100(name, keeps_no_program, tmp_path, monkeypatch):
    """No register is spilled, and no product waits for another."""
    (device,) = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices
    shape = (24, 768, 768 if name == "quadratic" else 3072)
    sharding = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))  # and what ptxas says
    with lowering_for_h100():
        lowered = jax.jit(on_a_card.products()[name]).lower(x)
    lowered.compile()
    (path,) = tmp_path.glob("*.ptxas")
    said = path.read_text()
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "wgmma.mma_async instructions are serialized" not in said
