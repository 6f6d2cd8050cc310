"""Bytes that a step moves: a program written by hand, and one that is compiled."""

import json
import subprocess
import sys

from benchmarks.schedule import traffic
from benchmarks.schedule.hlo import Module
from tests.benchmarks.conftest import needs_gpu_compiler

# A loop of three turns over a stack of three matrices: each turn squares one, which
# reads it once, multiplies it, copies the product, and writes half of it as bfloat16
# into another stack. A second loop runs as its data decide, and of two branches the
# second moves more.
PROGRAM = """HloModule step, is_scheduled=true

%square (old: f32[3,8,4], i: s32[]) -> f32[8,4] {
  %old = f32[3,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %view = f32[3,32]{1,0} bitcast(%old)
  %half = f32[3,32]{1,0} negate(%view)
  %one = f32[1,32]{1,0} dynamic-slice(%half, %i, %zero), dynamic_slice_sizes={1,32}
  %flat = f32[8,4]{1,0} bitcast(%one)
  ROOT %product = f32[8,4]{1,0} multiply(%flat, %flat)
}

%write (new: bf16[3,8,4], part: f32[8,4], i: s32[]) -> bf16[3,8,4] {
  %new = bf16[3,8,4]{2,1,0} parameter(0)
  %part = f32[8,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %low = bf16[8,4]{1,0} convert(%part)
  %layer = bf16[1,8,4]{2,1,0} bitcast(%low)
  ROOT %all = bf16[3,8,4]{2,1,0} dynamic-update-slice(%new, %layer, %i, %zero, %zero)
}

%body (carry: (s32[], f32[3,8,4], bf16[3,8,4])) -> (s32[], f32[3,8,4], bf16[3,8,4]) {
  %carry = (s32[], f32[3,8,4]{2,1,0}, bf16[3,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %old = f32[3,8,4]{2,1,0} get-tuple-element(%carry), index=1
  %new = bf16[3,8,4]{2,1,0} get-tuple-element(%carry), index=2
  %squares = f32[8,4]{1,0} fusion(%old, %i), kind=kLoop, calls=%square
  %gemm = (f32[8,8]{1,0}, s8[4194304]{0}) custom-call(%squares, %squares), \
custom_call_target="__cublas$lt$matmul"
  %gram = f32[8,8]{1,0} get-tuple-element(%gemm), index=0
  %mosaic = f32[8,4]{1,0} custom-call(%gram, %squares), \
custom_call_target="mosaic_gpu_v2"
  %copied = f32[8,4]{0,1} copy(%mosaic)
  %written = bf16[3,8,4]{2,1,0} fusion(%new, %copied, %i), kind=kLoop, calls=%write
  ROOT %next = (s32[], f32[3,8,4]{2,1,0}, bf16[3,8,4]{2,1,0}) tuple(%i, %old, %written)
}

%more (x: bf16[3,8,4]) -> bf16[3,8,4] {
  %x = bf16[3,8,4]{2,1,0} parameter(0)
  ROOT %copy = bf16[3,8,4]{2,1,0} copy(%x)
}

%less (x: bf16[3,8,4]) -> bf16[3,8,4] {
  ROOT %x = bf16[3,8,4]{2,1,0} parameter(0)
}

ENTRY %main (x: (s32[], f32[3,8,4], bf16[3,8,4]), p: s32[]) -> bf16[3,8,4] {
  %x = (s32[], f32[3,8,4]{2,1,0}, bf16[3,8,4]{2,1,0}) parameter(0)
  %p = s32[] parameter(1)
  %loop = (s32[], f32[3,8,4]{2,1,0}, bf16[3,8,4]{2,1,0}) while(%x), condition=%c, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rescue = (s32[], f32[3,8,4]{2,1,0}, bf16[3,8,4]{2,1,0}) while(%loop), condition=%c, \
body=%body
  %stack = bf16[3,8,4]{2,1,0} get-tuple-element(%rescue), index=2
  ROOT %either = bf16[3,8,4]{2,1,0} conditional(%p, %stack, %stack), \
branch_computations={%less, %more}
}
"""


def test_bytes_by_hand():
    """One matrix is 128 bytes; scalars say which."""
    rows = traffic.traffic(Module.parse(PROGRAM))
    found = [
        (x.kind, x.line.name, x.read // x.times, x.written // x.times) for x in rows
    ]
    assert found == [
        ("passes", "squares", 128 + 4, 128),
        ("products", "gemm", 2 * 128, 256),
        ("kernels", "mosaic", 256 + 128, 128),
        ("copies", "copied", 128, 128),
        ("passes", "written", 128 + 4, 64),
        ("copies", "copy", 192, 192),
    ]
    assert [x.times for x in rows] == 5 * [3] + [1]


@needs_gpu_compiler
def test_a_step_moves_what_it_must(tmp_path):
    """GPT-2 124M: outside of products 4.37 GB at least, and 8 % more at most.

    In a process of its own, since JAX cannot read such a program back from a cache.
    """
    path = tmp_path / "results.json"
    words = f"--models gpt2-124m --kernels on --largest 1 --json {path}"
    command = [sys.executable, "-m", traffic.__name__, *words.split()]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (row,) = json.loads(path.read_text())
    assert row["least"] == 26 * 12 * 12 * 768**2 + 28 * 2 * 50304 * 768
    assert 0.99 * row["least"] < row["outside_products"] < 1.08 * row["least"]
    assert row["bytes"]["kernels"] > 0
    assert f"| {row['outside_products'] / 1e9:.3f} | 4.372 |" in printed
    assert "1.082 GB  x1   passes" in printed
