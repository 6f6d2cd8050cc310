"""Reading scheduled HLO: a recorded form, shortened by hand; no compiler is needed."""

import pytest

from benchmarks.hlo import Module, Products, Traffic, Work
from benchmarks.parameters import model_parameters

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
'axis_2'=3], device_ids=([4,2]T(1,0)) {'axis_0','axis_1'}, to_apply=%add
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
    assert [line.name for line in module.conditionals()] == ["maybe"]


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


def test_traffic(module):
    """Operands and results by hand: two products, a branch of two, five in a loop."""
    gemm = 16 * 4 * 8 * 2 + 2 * 4 * 4 * 4
    branch = (64 + 64) + (64 + 128)
    assert module.traffic() == Traffic(2 * gemm + branch + 5 * (64 + 128), 0)
    copied = SCHEDULED.replace("bitcast(%ag.1.done)", "copy(%ag.1.done)")
    assert Module.parse(copied).traffic().rest == 2 * 8 * 4 * 8 * 2
    started = SCHEDULED.replace(
        "  ROOT %last = bf16[8,4,8]{2,1,0} bitcast(%ag.1.done)",
        "  %go = (bf16[8,4,8], bf16[8,4,8], u32[]) copy-start(%ag.1.done)\n"
        "  ROOT %last = bf16[8,4,8]{2,1,0} copy-done(%go)",
    )
    assert Module.parse(started).traffic() == Module.parse(copied).traffic()


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
