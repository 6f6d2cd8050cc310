"""Reading scheduled HLO: recorded forms, shortened by hand; no compiler is needed."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks.schedule import gpu_schedule
from benchmarks.schedule.h100s import whole_step
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from benchmarks.schedule.step_time import Estimate, Rates, estimate
from tests.benchmarks.conftest import needs_gpu_compiler

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "schedule"
# Two reduce-scatters over 8 devices, of which one has products meanwhile: one for all
# devices, and a branch with two (4 x 4 x 8 and 8 x 8 x 4) that a device may skip. Then
# a loop of 5 Triton products under one all-gather, a pair that is synchronous all the
# same, and one collective that is no pair.
SCHEDULED = (FIXTURES / "scheduled.hlo").read_text()
# A layer's gather under its product, in a loop of three trips.
LOOPED = (FIXTURES / "looped.hlo").read_text()


@pytest.fixture(scope="module")
def module():
    return Module.parse(SCHEDULED)


def test_transfers(module):
    """Bytes by the ring form: (N-1)/N, N-1 and 2(N-1)/N of all operands.

    Products of loops count as often as they run.
    """
    mixed = 16 * 4 * 8 * 2 + 64 * 4 * 4
    gemm, fusion = 2 * 2 * 4 * 4 * 8, 2 * 8 * 8 * 4
    branch = 2 * 4 * 4 * 8 + fusion
    rows = [
        ("reduce-scatter", mixed, mixed * 7 / 8, False),
        ("reduce-scatter", 1024, 896, False),
        ("all-gather", 64, 448, False),
        ("all-gather", 64, 448, True),
        ("all-reduce", 1024, 1792, True),
    ]
    transfers = module.transfers()
    found = [(t.kind, t.input_bytes, t.sent_bytes, t.is_sync) for t in transfers]
    assert found == rows and {t.devices for t in transfers} == {8}
    assert module.flops() == gemm + gemm + fusion * 5 + branch


def test_transfers_in_a_loop_count_as_often_as_it_runs():
    """Each in its own trip, with the products beside it."""
    looped = Module.parse(LOOPED)
    *gathers, total = looped.transfers()
    product = 2 * 8 * 8 * 4
    before = looped.flops_before()
    found = [(t.kind, t.input_bytes, before[t.done] - before[t.start]) for t in gathers]
    assert found == 3 * [("all-gather", 128, product)]
    assert len({t.name for t in gathers}) == 3
    assert total.kind == "all-reduce"
    assert looped.flops_before()[-1] == looped.flops() == 3 * product


GROUPS = {  # the first group of devices, in each form in which XLA writes them
    "{{0,1,2},{3,4,5}}": (0, 1, 2),
    "[2,3]<=[6]": (0, 1, 2),
    "[2,3]<=[3,2]T(1,0)": (0, 2, 4),
    "mesh['a'=2,'b'=4] {'b'}": (0, 1, 2, 3),
    "mesh['a'=2,'b'=4] {'a'}": (0, 4),
    "mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}": (0, 2, 4),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_forms_of_groups(groups):
    changed = SCHEDULED.replace("{{0,1,2,3,4,5,6,7}}", groups, 1)
    assert Module.parse(changed).transfers()[0].members == GROUPS[groups]


def test_estimate_of_a_step(module):
    """By hand, for rates that make every product and transfer above last a while."""
    first, second, third, fourth, last = (t.sent_bytes for t in module.transfers())
    gemm, branch, loop = 512, 256 + 512, 5 * 512
    # Nothing is beside the first; the fourth is synchronous.
    others = first + max(loop, third) + fourth + gemm + last
    sent = first + second + third + fourth + last
    # On two kinds of devices, one of which runs the branch: all wait for the later one,
    # and the busiest does it.
    kinds = [lambda line: 0, lambda line: 1]
    for own, beside in ((kinds, branch), (kinds[1:], 0)):
        step = others + max(gemm + beside, second)
        expected = Estimate(step, 2 * gemm + beside + loop, sent)
        assert estimate(module, Rates(flops=1, within=1), own) == expected


# --- whole steps ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["zero2-divided", "fsdp", "hsdp"])
def test_whole_step_sends_every_parameter_there_and_back(layout):
    """Each is gathered once and its gradient scattered once; matrices are dealt out."""
    devices = np.array(jax.devices()[:8])
    step = whole_step("llama-tiny", devices, layout, "nanochat")
    found = collectives(step.step, *step.args)
    # In plain jit XLA sends all but layers.
    sent = step.params["blocks"] if layout == "hsdp" else step.params
    everything = sum(x.size * 2 for x in jax.tree.leaves(sent))
    for kind in ("all-gather", "reduce-scatter"):
        ours = [c for c in found if c.kind == kind and "data" in c.axes]
        large = sum(c.sent_bytes for c in ours if c.sent_bytes > 100)
        assert large >= 7 / 8 * everything
        assert {c.devices for c in ours} == {8}


@needs_gpu_compiler
def test_compiled_for_gpus(tmp_path):
    """The command, for 16 GPUs: bytes there and back, and what is printed and saved.

    In a process of its own, since JAX cannot read such a program back from a cache.
    """
    path = tmp_path / "results.json"
    words = "--models tiny --gpus 16 --layouts zero2 hsdp --json"
    found = subprocess.run(
        [sys.executable, "-m", gpu_schedule.__name__, *words.split(), str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    zero2, hsdp = json.loads(path.read_text())
    size = 15 / 16 * zero2["parameter_bytes"]
    assert zero2["sent"]["reduce-scatter"]["bytes"] == pytest.approx(size, rel=0.01)
    # Two hosts: an eighth of every ring over all, and 8 of the 15 pieces of matrices
    # that are dealt out; nothing of parameters in a host.
    for kind, sent in zero2["sent"].items():
        outside = 8 / 15 if kind == "all-to-all" else 1 / 8
        assert sent["bytes_between_hosts"] == pytest.approx(sent["bytes"] * outside)
    gathers = hsdp["sent"]["all-gather"]
    assert gathers["bytes_between_hosts"] < gathers["bytes"] / 8
    # `describe` counts all of it but NorMuon's means.
    planned, means = zero2["planned"], zero2["sent"]["all-reduce"]["bytes"]
    assert sum(planned.values()) == zero2["all"]["bytes"] - means
    assert hsdp["options"]["xla_gpu_graph_min_graph_size"] == 1
    assert hsdp["seconds"]["step"] >= hsdp["seconds"]["products"] > 0
    assert "| tiny | 16 | hsdp |" in found.stdout
