"""The program for a GPU, tried where there is none."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import on_a_card, step
from benchmarks.schedule.h100s import H100, lowering_for_h100
from tests.benchmarks.conftest import needs_gpu_compiler


def test_the_command_at_tiny_sizes(tmp_path, monkeypatch):
    """All parts, each in its process; torch does not compile."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    words = ["--tiny", "--out", str(tmp_path), "--runs"]
    on_a_card.main([*words, "nanochat:0.02:20:0"])
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = {row["what"]: row for row in map(json.loads, lines)}
    assert not [row for row in rows.values() if "failed" in row]
    skipped = {row["skipped"] for row in rows.values() if "skipped" in row}
    assert skipped == {"kernels need a GPU; their tests interpret them"}
    assert [row["ok"] for row in rows.values() if "ok" in row] == 5 * [True]
    timed = [row for what, row in rows.items() if what.endswith(", turn 2")]
    assert len(timed) == 3 and all(row["flow_seconds"] > 0 for row in timed)
    assert rows["run"]["run"]["versions"]["jax"] == jax.__version__
    # Bytes of Python sources: better than guessing one of 256.
    assert rows["curve"]["step"] == 20 and rows["curve"]["val"] < 5.2


def test_kinds_of_kernels_in_a_profile():
    """Events of the host, and times that cover others, do not count."""

    def event(pid, name, us):
        return {"ph": "X", "pid": pid, "tid": 1, "name": name, "dur": us}

    def name(pid, kind, name, tid=1):
        args = {"name": name}
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}

    events = [
        *(
            name(1, "process_name", "/device:GPU:0"),
            name(2, "process_name", "/host:CPU"),
        ),
        *(name(1, "thread_name", "Stream #13"), name(1, "thread_name", "XLA Ops", 2)),
        {"ph": "X", "pid": 1, "tid": 2, "name": "nvjet", "dur": 1e6},
        *(
            event(1, "nvjet_sm90_tst_128x128_NNT", 3000),
            event(1, "loop_add_fusion", 600),
        ),
        *(event(1, "mosaic_gpu_kernel", 900), event(1, "loop_add_fusion", 600)),
        *(event(1, "MemcpyD2D", 60), event(2, "nvjet", 1e6)),
    ]
    found = step.by_kind(events, steps=3)
    kinds = {"products": 1.0, "kernels": 0.3, "passes": 0.4, "copies": 0.02}
    assert found["by_kind_ms"] == pytest.approx(kinds)
    assert list(found["longest_ms"])[:2] == [
        "nvjet_sm90_tst_128x128_NNT",
        "loop_add_fusion",
    ]


@pytest.fixture
def keeps_no_program():
    """JAX cannot read a program for a GPU that is not there back from a cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@needs_gpu_compiler
@pytest.mark.parametrize("name", on_a_card.products())
def test_kernels_compiled_for_an_h100(name, keeps_no_program, tmp_path, monkeypatch):
    """No register is spilled, and no product waits for another."""
    (device,) = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices
    shape = (24, 768, 768 if name == "polynomial" else 3072)
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
