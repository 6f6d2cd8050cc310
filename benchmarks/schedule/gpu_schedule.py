"""Whole train steps as XLA schedules them for H100s, without any H100.

    python -m benchmarks.schedule.gpu_schedule
    python -m benchmarks.schedule.gpu_schedule --models gpt2-124m --gpus 8

compiles the forward pass, the backward pass and the optimizer ahead of time for a
described topology and reads the schedule: when collectives start and end, which matrix
products run meanwhile, the bytes that a device sends, and its peak memory. Nothing
runs; times are estimated from stated rates; see `step_time`, which says what these
leave out. `benchmarks/NOTES.md` explains the output.
`make gpu-schedule` installs the compiler.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise
# JAX cannot read programs for GPUs that this machine lacks back from its cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

from benchmarks import program
from benchmarks.schedule.h100s import (
    GPUS_PER_HOST,
    LAYOUTS,
    WORKLOADS,
    WholeStep,
    h100s,
    whole_step,
)
from benchmarks.schedule.hlo import Module, Transfer
from benchmarks.schedule.step_time import (
    SLOWER,
    Rates,
    estimate,
    kinds_of_devices,
    nccl_seconds,
    transfer_seconds,
)
from jax_muon.tools import work
from jax_muon.tools.describe import describe

# What the chart of docs/speed.md has, but for 1024 GPUs.
MODELS, GPUS = ("llama-1.3b", "llama-7b", "experts-7b"), (64, 256)
# One row of results for each.
CASE = ("model", "gpus", "layout", "recipe", "microbatches", "update")
CHART = ("zero2-divided", "hsdp", "fsdp-tp")
# Products are calls of cuBLASLt: without a card, Triton's would be untuned. The second
# spares LLVM's work on small kernels, a third or more of the time to compile; for GPT-2
# 124M on 8 it changes neither the schedule nor the peak memory.
TOOL_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
}


def measure(whole: WholeStep, options: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Compile a step; bytes, products, memory and times as plain data."""
    began = time.perf_counter()
    lowered = whole.step.lower(*whole.args)
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=TOOL_OPTIONS | options)
    done = time.perf_counter()
    module = Module.parse(compiled.as_text())
    transfers = module.transfers()
    planned = describe(whole.tx, whole.params)
    kinds = kinds_of_devices(planned.rounds, planned.sizes)
    parts = *planned.stacks, *planned.rounds
    busy = sum(work.load(part, planned.sizes) for part in parts)
    ways = {
        "seconds": (rates, transfer_seconds),
        "seconds_with_latencies": (rates, nccl_seconds),
        "seconds_at_less_bandwidth": (SLOWER, nccl_seconds),
    }
    return {
        "options": dict(whole.options) | options,
        "parameter_bytes": whole.parameter_bytes,
        "sent": {
            kind: summarize([t for t in transfers if t.kind == kind], rates)
            for kind in sorted({t.kind for t in transfers})
        },
        "all": summarize(transfers, rates),
        "planned": planned.sent_bytes,
        "flops": module.flops(),
        "orthogonalize_flops": float(np.max(busy)),  # of the busiest device
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "bytes_copied_in_loops": module.bytes_copied_in_loops(),
        "trace_seconds": traced - began,
        "compile_seconds": done - traced,
    } | {
        name: dataclasses.asdict(estimate(module, rates, kinds, seconds_of))
        | {"rates": dataclasses.asdict(rates)}
        for name, (rates, seconds_of) in ways.items()
    }


def summarize(transfers: list[Transfer], rates: Rates) -> dict[str, Any]:
    """How many there are, what they send, and how much of it between hosts."""
    return {
        "transfers": len(transfers),
        "bytes": sum(t.sent_bytes for t in transfers),
        "bytes_between_hosts": sum(
            t.bytes_between_hosts(rates.gpus_per_host) for t in transfers
        ),
    }


TITLES = (
    *("model", "H100s", "layout", "collectives", "MB sent", "between hosts"),
    *("products, ms", "wait, ms", "of wire time", "with latencies"),
    *("at less bandwidth", "peak GB", "GB copied in loops", "compiled, s"),
)


def cells(result: dict[str, Any]) -> list[Any]:
    """A line of the table for one step, by `TITLES`."""
    sent, seconds = result["all"], result["seconds"]
    wait, with_latencies, at_less = (
        result[name]["step"] - result[name]["products"]
        for name in ("seconds", "seconds_with_latencies", "seconds_at_less_bandwidth")
    )
    return [
        *(result[key] for key in CASE[:3]),
        f"{sent['transfers']}",
        f"{sent['bytes'] / 1e6:.0f}",
        f"{sent['bytes_between_hosts'] / 1e6:.0f}",
        f"{1e3 * seconds['products']:.1f}",
        f"{1e3 * wait:.1f}",
        f"{100 * wait / max(1e-9, seconds['transfers']):.1f} %",
        f"{1e3 * with_latencies:.1f}",
        f"{1e3 * at_less:.1f}",
        f"{result['peak_bytes'] / 1e9:.1f}",
        f"{result['bytes_copied_in_loops'] / 1e9:.1f}",
        f"{result['compile_seconds']:.0f}",
    ]


def option(text: str) -> tuple[str, Any]:
    """KEY=VALUE of the command line, where VALUE is JSON or else text."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}; expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(words: list[str]) -> None:
    """The command."""
    name = "benchmarks.schedule.gpu_schedule"
    parser = program.parser(name, __doc__)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=MODELS)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=CHART)
    parser.add_argument("--recipe", default="nanochat")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a compiler option beside or instead of ours; may be repeated",
    )
    parser.add_argument("--json", type=pathlib.Path, help="file to put results into")
    args = parser.parse_args(words)
    for gpus in args.gpus:
        if gpus < 1 or (gpus > GPUS_PER_HOST and gpus % GPUS_PER_HOST):
            parser.error(f"--gpus {gpus}; expected 1 to 8, or a multiple of 8")
    about = program.describe(name, words)
    program.print_head(*TITLES)
    for model, gpus, layout in [
        (model, gpus, layout)
        for model in args.models
        for gpus in args.gpus
        for layout in args.layouts
    ]:
        case = (model, gpus, layout, args.recipe, args.microbatches)
        whole = whole_step(model, h100s(gpus), *case[2:])
        result = dict(zip(CASE, (*case, "after backward"), strict=True))
        result |= measure(whole, dict(args.option), Rates()) | about
        program.print_row(*cells(result))
        if args.json is not None:
            program.save_rows([result], args.json, CASE)


if __name__ == "__main__":
    main(sys.argv[1:])
