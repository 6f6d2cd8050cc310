"""Reading scheduled HLO: a recorded form, shortened by hand; no compiler is needed."""

import dataclasses
import importlib.metadata
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks.parameters import model_parameters
from benchmarks.schedule import gpu_schedule
from benchmarks.schedule.h100s import WORKLOADS, whole_step
from benchmarks.schedule.hlo import (
    Instruction,
    Module,
    Products,
    Transfer,
    Work,
)
from benchmarks.schedule.step_time import (
    Rates,
    bytes_between_hosts,
    estimate,
    kinds_of_devices,
    transfer_seconds,
)
from jax_muon.mesh import xla_options
from jax_muon.mesh.collectives import collectives
from jax_muon.mesh.owners import Pool
from jax_muon.mesh.xla_options import gpu_options

# Two reduce-scatters over 8 devices, of which one has products meanwhile: one for all
# devices, and a branch with two (4 x 4 x 8 and 8 x 8 x 4) that a device may skip. Then
# a loop of 5 Triton products under one all-gather, a pair that is synchronous all the
# same, and one collective that is no pair.
SCHEDULED = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}

%fused_dot (p.0: bf16[8,4], p.1: bf16[4,8]) -> bf16[8,8] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  %p.1 = bf16[4,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

%taken (p.2: (bf16[1,4,8])) -> (bf16[1,4,8]) {
  %p.2 = (bf16[1,4,8]{2,1,0}) parameter(0)
  %x.2 = bf16[1,4,8]{2,1,0} get-tuple-element(%p.2), index=0
  %gemm.2 = (f32[4,4]{1,0}, s8[4194304]{0}) custom-call(%x.2, %x.2), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}
  %fusion.2 = bf16[8,8]{1,0} fusion(%x.2, %x.2), kind=kCustom, calls=%fused_dot
  ROOT %tuple.2 = (bf16[1,4,8]{2,1,0}) tuple(%x.2)
}

%skipped (p.3: ()) -> (bf16[1,4,8]) {
  %p.3 = () parameter(0)
  %zero.3 = bf16[1,4,8]{2,1,0} fusion(), kind=kLoop, calls=%fused_zero
  ROOT %tuple.3 = (bf16[1,4,8]{2,1,0}) tuple(%zero.3)
}

%body (p.4: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p.4 = (s32[], bf16[8,4]{1,0}) parameter(0)
  %x.4 = bf16[8,4]{1,0} get-tuple-element(%p.4), index=1
  ROOT %fusion.4 = bf16[8,8]{1,0} fusion(%x.4, %x.4), kind=kCustom, calls=%fused_dot
}

ENTRY %main (a: bf16[16,4,8], b: f32[64,4], c: bf16[1,4,8]) -> bf16[8,4,8] {
  %a = bf16[16,4,8]{2,1,0} parameter(0)
  %b = f32[64,4]{1,0} parameter(1)
  %c = bf16[1,4,8]{2,1,0} parameter(2)
  %rs.0 = ((bf16[16,4,8]{2,1,0}, /*index=1*/f32[64,4]{1,0}), (bf16[2,4,8]{2,1,0}, \
f32[8,4]{1,0})) reduce-scatter-start(%a, %b), replica_groups={{0,1,2,3,4,5,6,7}}, \
to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %rs.0.done = (bf16[2,4,8]{2,1,0}, f32[8,4]{1,0}) reduce-scatter-done(%rs.0)
  %rs.1 = (f32[64,4]{1,0}, f32[8,4]{1,0}) reduce-scatter-start(%b), \
replica_groups=[1,8]<=[8], to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %gemm.0 = (f32[2,4,4]{2,1,0}, s8[4194304]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}
  %maybe = (bf16[1,4,8]{2,1,0}) conditional(%a, %c, %c), \
true_computation=%taken, false_computation=%skipped
  %rs.1.done = f32[8,4]{1,0} reduce-scatter-done(%rs.1)
  %ag.0 = (bf16[1,4,8]{2,1,0}, bf16[8,4,8]{2,1,0}) all-gather-start(%c), \
replica_groups={{0,1,2,3,4,5,6,7}}, backend_config={"is_sync":false}
  %loop = (s32[], bf16[8,4]{1,0}) while(%b), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %ag.0.done = bf16[8,4,8]{2,1,0} all-gather-done(%ag.0)
  %ag.1 = (bf16[1,4,8]{2,1,0}, bf16[8,4,8]{2,1,0}) all-gather-start(%c), \
replica_groups={{0,1,2,3,4,5,6,7}}, backend_config={"is_sync":true}
  %gemm.1 = (f32[2,4,4]{2,1,0}, s8[4194304]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}
  %ag.1.done = bf16[8,4,8]{2,1,0} all-gather-done(%ag.1)
  %total = f32[64,4]{1,0} all-reduce(%b), replica_groups=mesh['axis_0'=2,'axis_1'=4,\
'axis_2'=3], device_ids=([4,6]T(1,0)) {'axis_0','axis_1'}, to_apply=%add
  ROOT %last = bf16[8,4,8]{2,1,0} bitcast(%ag.1.done)
}
"""


@pytest.fixture(scope="module")
def module():
    """The module above."""
    return Module.parse(SCHEDULED)


def test_transfers_in_order_with_bytes_of_one_device(module):
    """Inputs of all operands; ring form: (N-1)/N, N-1 and 2(N-1)/N of them."""
    mixed = 16 * 4 * 8 * 2 + 64 * 4 * 4
    found = [
        (t.kind, t.devices, t.input_bytes, t.sent_bytes) for t in module.transfers()
    ]
    assert found == [
        ("reduce-scatter", 8, mixed, mixed * 7 / 8),
        ("reduce-scatter", 8, 1024, 896),
        ("all-gather", 8, 64, 448),
        ("all-gather", 8, 64, 448),
        ("all-reduce", 8, 1024, 1792),
    ]
    places = [(t.start, t.done) for t in module.transfers()]
    assert places == sorted(places)
    assert places[-1][0] == places[-1][1]


def test_products_between_start_and_done(module):
    """Products of branches count apart, those of loops as often as they run."""
    first, second, third, fourth, last = module.transfers()
    gemm = Products(1, 2 * 2 * 4 * 4 * 8)
    fusion = Products(1, 2 * 8 * 8 * 4)
    branch = Products(1, 2 * 4 * 4 * 8) + fusion
    assert first.hides == last.hides == Work()
    assert second.hides == Work(always=gemm, perhaps=branch)
    assert third.hides == Work(always=fusion * 5)
    assert fourth.hides == Work(always=gemm)
    assert module.work() == Work(always=gemm + gemm + fusion * 5, perhaps=branch)


# A layer's gather under its product, in a loop of three trips.
LOOPED = """\
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %ag = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%x), \
replica_groups={{0,1}}, backend_config={"is_sync":false}
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %ag.done = f32[16,4]{1,0} all-gather-done(%ag)
  ROOT %tuple = (s32[], f32[8,4]{1,0}) tuple(%x)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %loop = (s32[], f32[8,4]{1,0}) while(%a), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %total = f32[8,4]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_transfers_in_a_loop_count_as_often_as_it_runs():
    """Each with the products beside it in its own trip."""
    looped = Module.parse(LOOPED)
    *gathers, total = looped.transfers()
    assert [t.kind for t in gathers] == 3 * ["all-gather"]
    assert len({t.name for t in gathers}) == 3
    assert {t.input_bytes for t in gathers} == {128}
    product = Products(1, 2 * 8 * 8 * 4)
    assert [t.hides for t in gathers] == 3 * [Work(always=product)]
    assert total.kind == "all-reduce"
    assert looped.work_before()[-1] == looped.work() == Work(always=product * 3)


def test_only_asynchronous_transfers_with_products_are_hidden(module):
    """A pair alone proves nothing, nor do products beside a synchronous collective."""
    assert [t.is_sync for t in module.transfers()] == [False, False, False, True, True]
    assert [t.is_hidden for t in module.transfers()] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_text_without_a_schedule_is_refused():
    """The order of other text means nothing."""
    with pytest.raises(ValueError, match="not scheduled"):
        Module.parse(SCHEDULED.replace("is_scheduled=true", "is_scheduled=false"))
    with pytest.raises(ValueError, match="ENTRY"):
        Module.parse(SCHEDULED.replace("ENTRY ", ""))


@pytest.mark.parametrize(
    ("model", "millions"), [("gpt2-124m", 162.2), ("gpt2-350m", 405.0)]
)
def test_models_have_their_size(model, millions):
    """124M and 350M (355M) count one table for embedding and head; here are two."""
    leaves = [leaf.size for leaf in _leaves(model_parameters(model, "bfloat16"))]
    assert sum(leaves) == pytest.approx(millions * 1e6, rel=1e-3)


def _leaves(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ("{{0,1,2},{3,4,5}}", (0, 1, 2)),
        ("[2,3]<=[6]", (0, 1, 2)),
        ("[2,3]<=[3,2]T(1,0)", (0, 2, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}", (0, 2, 4)),
    ],
)
def test_forms_of_groups(groups, group):
    """The first group of devices, in each form in which XLA writes them."""
    changed = SCHEDULED.replace("{{0,1,2,3,4,5,6,7}}", groups, 1)
    assert Module.parse(changed).transfers()[0].group == group


def test_groups_that_cannot_be_read():
    changed = SCHEDULED.replace("{{0,1,2,3,4,5,6,7}}", "everyone", 1)
    with pytest.raises(ValueError, match="replica_groups"):
        Module.parse(changed).transfers()


def transfer(kind, group, sent=0):
    """A transfer of which a device sends so many bytes."""
    given = Transfer("t", kind, 0, 0, 1 << 20, tuple(group), True, Work())
    scale = sent / given.sent_bytes if sent else 1
    return dataclasses.replace(given, input_bytes=given.input_bytes * scale)


def test_bytes_between_hosts():
    """Two hosts of 8: an eighth of a ring, or every piece for the other host."""
    both, one = range(16), range(8)
    assert bytes_between_hosts(transfer("all-gather", one, 800), 8) == 0
    assert bytes_between_hosts(transfer("all-gather", both, 800), 8) == 100
    assert bytes_between_hosts(transfer("all-reduce", (3, 11), 800), 8) == 800
    sent = bytes_between_hosts(transfer("all-to-all", both, 1500), 8)
    assert sent == pytest.approx(800)
    rates = Rates(within=100, between=10)
    # By its slower part; one GPU a host uses its network card only.
    assert transfer_seconds(transfer("all-gather", both, 800), rates) == 10
    assert transfer_seconds(transfer("all-gather", one, 800), rates) == 8
    assert transfer_seconds(transfer("all-reduce", (3, 11), 800), rates) == 80


def test_estimate_of_a_step(module):
    """By hand, for rates that make every product and transfer above last a while."""
    rates = Rates(flops=1, within=1)
    transfers = module.transfers()
    first, second, third, fourth, last = (t.sent_bytes for t in transfers)
    gemm, branch, loop = 512, 256 + 512, 5 * 512
    clock = first  # nothing beside it
    clock += max(gemm + branch, second)
    clock += max(loop, third)
    clock += fourth + gemm  # synchronous
    clock += last
    found = estimate(module, rates)
    assert found.step == clock
    assert found.products == 2 * gemm + branch + loop
    assert found.waiting == clock - found.products
    assert found.transfers == first + second + third + fourth + last
    # On two kinds of devices, one of which runs the branch: all wait for the later one,
    # and the busiest does it.
    kinds = [lambda line: 0, lambda line: 1]
    assert estimate(module, rates, kinds) == found
    idle = estimate(module, rates, kinds[1:])
    assert idle.products == found.products - branch
    assert idle.step == clock - max(gemm + branch, second) + max(gemm, second)


def test_kinds_of_devices():
    """Of four owners one has a matrix more: the longer branch of that round."""
    pool = Pool(
        members=(),
        shard=(8, 4),
        dtype="float32",
        batch=(),
        short=(),
        long=("data",),
        replicas=(),
        fan=(8, 16),
        counts=(1, 0, 0, 0),
    )
    kinds = kinds_of_devices([pool], {"data": 4})
    lines = [
        Instruction("c", "conditional", "f32[4,32]", (), f'op_name="a/round_{n}/cond"')
        for n in (0, 1)
    ]
    assert [[takes(line) for line in lines] for takes in kinds] == [[0, 0], [1, 0]]


@dataclasses.dataclass(frozen=True)
class Described:
    """As much of a device as a mesh asks for."""

    platform: str
    id: int
    process_index: int = 0
    device_kind: str = "described"


def test_options_by_bytes_and_platform():
    """Buckets by all bytes, on GPUs; nothing anywhere else, or on one GPU."""
    params = {"w": jax.ShapeDtypeStruct((64, 8_000_000), "bfloat16")}

    def mesh(platform, *shape):
        devices = [Described(platform, i) for i in range(math.prod(shape))]
        return jax.sharding.Mesh(np.reshape(devices, shape), tuple("ab"[: len(shape)]))

    def thresholds(options):
        return [
            options[f"xla_gpu_{kind}_combine_threshold_bytes"]
            for kind in ("all_gather", "reduce_scatter")
        ]

    size = 2 * 64 * 8_000_000
    options = gpu_options(params, mesh("cuda", 8))
    assert options == gpu_options(params, mesh("gpu", 8))
    assert thresholds(options) == [size / 64, size / 32 / 8]
    last = gpu_options(params, mesh("gpu", 8), gathers_first=False)
    assert thresholds(last) == [size / 16, size / 32 / 8]
    # Over two of 16 devices each holds one half.
    halves = gpu_options(params, mesh("gpu", 8, 2), axis="a")
    assert thresholds(halves) == [size / 64 / 2, size / 32 / 16]
    small = gpu_options({"w": jax.ShapeDtypeStruct((8,), "float32")}, mesh("gpu", 8))
    assert thresholds(small) == [4_000_000, 500_000]
    assert gpu_options(params, mesh("cpu", 8)) == {}
    assert gpu_options(params, mesh("gpu", 1)) == {}


def test_options_for_layers_that_a_loop_gathers():
    """Two buffers for the loop, and buckets no larger than half a layer."""
    mesh = jax.sharding.Mesh([Described("gpu", i) for i in range(8)], "a")
    stack = {"layers": {"w": jax.ShapeDtypeStruct((4, 4096, 4096), "bfloat16")}}
    stack["layers"]["up"] = jax.ShapeDtypeStruct((4, 4096, 8192), "bfloat16")
    double = "xla_gpu_enable_while_loop_double_buffering"
    options = gpu_options(stack, mesh, layers=True)
    assert options[double]
    # jaxlib 0.12 has no such option.
    assert not options.get("xla_gpu_enable_pipelined_reduce_scatter", False)
    layer = 3 * 4096 * 4096 * 2
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] <= layer / 2
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 500_000
    for given in ({"layers": False}, {"gathers_first": False}):
        assert double not in gpu_options(stack, mesh, **given)
    assert double in gpu_options({"w": stack["layers"]["w"]}, mesh, layers=True)


def test_options_for_a_scan_in_plain_jit():
    """XLA gathers layers there by itself: its own pipelining does most."""
    mesh = jax.sharding.Mesh([Described("gpu", i) for i in range(8)], "a")
    stack = {"layers": {"w": jax.ShapeDtypeStruct((4, 64, 64), "bfloat16")}}
    options = gpu_options(stack, mesh)
    assert options == xla_options._known(xla_options.XLA_GATHERS_LAYERS)


def test_options_for_layers_on_many_devices():
    """One bucket for all of a layer, there and back."""
    mesh = jax.sharding.Mesh([Described("gpu", i) for i in range(256)], "a")
    stack = {"w": jax.ShapeDtypeStruct((32, 4096, 8192), "bfloat16")}
    stack["v"] = jax.ShapeDtypeStruct((32, 8192, 4096), "bfloat16")
    options = xla_options.options_of(
        {"layers": stack}, mesh, "a", True, True, late=True
    )
    layer = 2 * 2 * 4096 * 8192
    for kind, received in (("all_gather", layer), ("reduce_scatter", layer / 256)):
        threshold = options[f"xla_gpu_{kind}_combine_threshold_bytes"]
        assert received < threshold < 2 * received


def test_options_that_xla_does_not_know_are_left_out():
    known = {"xla_gpu_graph_min_graph_size": 1}
    unknown = {"xla_gpu_of_another_version": True, "xla_gpu_nor_this": 3}
    assert xla_options._known({**unknown, **known}) == known


def whole(layout):
    return whole_step("tiny", np.array(jax.devices()[:8]), layout, "nanochat")


def test_parameters_divided_and_fsdp_are_one_program():
    texts = [
        step.step.lower(*step.args).as_text()
        for step in map(whole, ("zero2", "zero2-divided", "fsdp"))
    ]
    assert texts[0] != texts[1] == texts[2]


@pytest.mark.parametrize(("layout", "groups"), [("zero2-divided", {8}), ("hsdp", {8})])
def test_whole_step_sends_every_parameter_there_and_back(layout, groups):
    """Each is gathered once and its gradient scattered once; matrices go to owners."""
    step = whole(layout)
    found = collectives(step.step, *step.args)
    everything = sum(x.size * 2 for x in jax.tree.leaves(step.params))
    for kind in ("all-gather", "reduce-scatter"):
        ours = [c for c in found if c.kind == kind and "data" in c.axes]
        large = sum(c.sent_bytes for c in ours if c.sent_bytes > 100)
        assert large >= 7 / 8 * everything
        assert {c.devices for c in ours} == groups


def has_gpu_compiler():
    """Whether `make .venv/gpu-schedule` has been here."""
    found = {dist.name for dist in importlib.metadata.distributions()}
    return "jax-cuda13-plugin" in found


@pytest.mark.skipif(
    not has_gpu_compiler(),
    reason="the compiler for GPUs is not installed: make .venv/gpu-schedule",
)
def test_compiled_for_gpus(tmp_path):
    """The command, for 16 GPUs: bytes there and back, and what is printed and saved.

    In a process of its own, since JAX cannot read such a program back from a cache.
    """
    path = tmp_path / "results.json"
    words = ["--models", "tiny", "--gpus", "16", "--layouts", "zero2", "hsdp"]
    words += ["--json", str(path), "--timeline"]
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.schedule.gpu_schedule", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    zero2, hsdp = json.loads(path.read_text())
    size = 15 / 16 * zero2["parameter_bytes"]
    # All matrices are small here: what is no parameter is gathered for every device.
    assert zero2["sent"]["all-gather"]["bytes"] >= size
    assert zero2["sent"]["reduce-scatter"]["bytes"] == pytest.approx(size, rel=0.01)
    for rows in (zero2, hsdp):
        for sent in (*rows["sent"].values(), rows["all"]):
            within, between = sent["bytes_within_hosts"], sent["bytes_between_hosts"]
            assert within + between == pytest.approx(sent["bytes"])
    # Two hosts: an eighth of every ring over all, and nothing of parameters in a host.
    assert zero2["all"]["bytes_between_hosts"] == pytest.approx(
        zero2["all"]["bytes"] / 8, rel=0.01
    )
    gathers = hsdp["sent"]["all-gather"]
    assert gathers["bytes_between_hosts"] < gathers["bytes"] / 8
    assert hsdp["layout"] == "hsdp"
    assert hsdp["options"]["xla_gpu_graph_min_graph_size"] == 1
    assert hsdp["seconds"]["step"] >= hsdp["seconds"]["products"] > 0
    assert "estimate: step" in found.stdout
    gpu_schedule.save(hsdp, path)
    assert json.loads(path.read_text()) == [zero2, hsdp]


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "12"],
        ["--models", "gpt9"],
        ["--models", "tiny"],
        ["--layouts", "tp"],
        ["--option", "key"],
    ],
)
def test_bad_words(words):
    with pytest.raises(SystemExit):
        gpu_schedule.main(words)


def test_cases():
    assert gpu_schedule.cases(None, None) == list(gpu_schedule.CASES)
    assert gpu_schedule.cases(["gpt2-124m"], None) == [
        ("gpt2-124m", 8),
        ("gpt2-124m", 64),
    ]
    assert gpu_schedule.cases(None, [64]) == [("gpt2-124m", 64), ("gpt-1.3b", 64)]
    assert gpu_schedule.cases(["tiny"], [16]) == [("tiny", 16)]
    assert {model for model, _ in gpu_schedule.CASES} < set(WORKLOADS)
