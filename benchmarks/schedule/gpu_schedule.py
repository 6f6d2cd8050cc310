"""Whole train steps as XLA schedules them for H100s, without any H100.

    python -m benchmarks.schedule.gpu_schedule
    python -m benchmarks.schedule.gpu_schedule --models gpt2-124m --gpus 8 --timeline

compiles the forward pass, the backward pass and the optimizer ahead of time for a
described topology and reads the schedule: when collectives start and end, which matrix
products run meanwhile, the bytes that a device sends, and its peak memory. Nothing
runs; times are estimated from stated rates. `benchmarks/NOTES.md` explains the output.
`make gpu-schedule` installs the compiler.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise
# JAX cannot read programs for GPUs that this machine lacks back from its cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import numpy as np

from benchmarks.schedule.h100s import (
    CARD_BYTES,
    GPUS_PER_HOST,
    LAYOUTS,
    PLAIN_LAYOUTS,
    SCALE_LAYOUTS,
    WORKLOADS,
    WholeStep,
    h100s,
    whole_step,
)
from benchmarks.schedule.hlo import Module, Transfer
from benchmarks.schedule.step_time import (
    Rates,
    bytes_between_hosts,
    estimate,
    kinds_of_devices,
)
from jax_muon.tools.describe import describe

CASES = (
    ("gpt2-124m", 8),
    ("gpt2-124m", 64),
    ("gpt-1.3b", 64),
    ("gpt-6.7b", 256),
    ("gpt-6.7b", 1024),
)
ALL_LAYOUTS = tuple(dict.fromkeys(LAYOUTS + SCALE_LAYOUTS + PLAIN_LAYOUTS))
RECIPES = ("nanochat", "muon", "moonlight", "normuon")

# Products are calls of cuBLASLt: without a card, Triton's would be untuned. The second
# spares LLVM's work on small kernels, a third or more of the time to compile; for GPT-2
# 124M on 8 it changes neither the schedule nor the peak memory.
TOOL_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
}
# Smaller transfers, of means and norms, are counted and not listed.
SHOWN_BYTES = 50_000
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "optax",
)


def measure(
    whole: WholeStep, lowered: Any, options: dict[str, Any], rates: Rates
) -> dict[str, Any]:
    """Compile a step; bytes, products, memory and times as plain data."""
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=TOOL_OPTIONS | options)
    seconds = time.perf_counter() - started
    module = Module.parse(compiled.as_text())
    transfers = module.transfers()
    memory = compiled.memory_analysis()
    kinds = sorted({t.kind for t in transfers})
    leaves = jax.tree.leaves(whole.params)
    planned = describe(whole.step.tx, whole.params)
    found = estimate(module, rates, kinds_of_devices(planned.pools, planned.sizes))
    return {
        "options": whole.step.compiler_options(whole.params) | options,
        "parameter_bytes": sum(x.size * np.dtype(x.dtype).itemsize for x in leaves),
        "sent": {
            kind: summarize([t for t in transfers if t.kind == kind], rates)
            for kind in kinds
        },
        "all": summarize(transfers, rates),
        "products": dataclasses.asdict(module.work()),
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "card_bytes": CARD_BYTES,
        "bytes_copied_in_loops": module.bytes_copied_in_loops(),
        "seconds": dataclasses.asdict(found)
        | {"compile": seconds, "rates": dataclasses.asdict(rates)},
        "timeline": [
            dataclasses.asdict(t)
            | {
                "group": t.devices,
                "sent_bytes": t.sent_bytes,
                "is_hidden": t.is_hidden,
            }
            for t in transfers
        ],
    }


def summarize(transfers: list[Transfer], rates: Rates) -> dict[str, Any]:
    """How much is sent and where to, how much of it exposed, FLOPs beside the rest.

    Products that run beside several transfers count for each of them.
    """
    hidden = [t for t in transfers if t.is_hidden]
    sent = sum(t.sent_bytes for t in transfers)
    between = sum(bytes_between_hosts(t, rates.gpus_per_host) for t in transfers)
    return {
        "transfers": len(transfers),
        "exposed_transfers": len(transfers) - len(hidden),
        "bytes": sent,
        "bytes_within_hosts": sent - between,
        "bytes_between_hosts": between,
        "exposed_bytes": sent - sum(t.sent_bytes for t in hidden),
        "flops_beside": sum(t.hides.flops for t in hidden),
    }


def report(result: dict[str, Any], *, timeline: bool) -> str:
    """The text that is printed for one step."""
    lines = [
        f"{result['model']}, {result['recipe']}, {result['layout']}, "
        f"for {result['gpus']} H100s"
    ]
    if timeline:
        lines += ["", *_timeline(result["timeline"]), ""]
    lines.append(
        "collectives         number  exposed   MB sent    within   between"
        "  MB exposed  TFLOP beside"
    )
    for kind, found in [*result["sent"].items(), ("all", result["all"])]:
        beside = "" if kind == "all" else f"{found['flops_beside'] / 1e12:12.1f}"
        lines.append(
            f"{kind:18}{found['transfers']:8}{found['exposed_transfers']:9}"
            f"{found['bytes'] / 1e6:10.1f}{found['bytes_within_hosts'] / 1e6:10.1f}"
            f"{found['bytes_between_hosts'] / 1e6:10.1f}"
            f"{found['exposed_bytes'] / 1e6:12.1f}"
            f"  {beside}".rstrip()
        )
    share = result["all"]["exposed_bytes"] / max(1, result["all"]["bytes"])
    seconds = result["seconds"]
    flops = seconds["products"] * seconds["rates"]["flops"]
    lines += [
        f"exposed: {100 * share:.1f} % of the bytes; products of the busiest device: "
        f"{flops / 1e12:.2f} TFLOP; peak memory {result['peak_bytes'] / 1e9:.2f} of "
        f"{result['card_bytes'] / 1e9:.1f} GB; copied in loops: "
        f"{result['bytes_copied_in_loops'] / 1e9:.2f} GB",
        f"estimate: step {1e3 * seconds['step']:.1f} ms, products "
        f"{1e3 * seconds['products']:.1f} ms, transfers on their own "
        f"{1e3 * seconds['transfers']:.1f} ms; compiled in {seconds['compile']:.0f} s",
    ]
    return "\n".join(lines)


def _timeline(transfers: list[dict[str, Any]]) -> list[str]:
    """Starts and ends of the larger transfers, in the order of the schedule."""
    events = []
    for t in transfers:
        if t["sent_bytes"] < SHOWN_BYTES:
            continue
        always, perhaps = t["hides"]["always"], t["hides"]["perhaps"]
        products = f"{always['count']:4} ({always['flops'] / 1e9:7.1f})"
        if perhaps["count"]:
            branch = f"{perhaps['count']} ({perhaps['flops'] / 1e9:.1f})"
            products += f"  + {branch} in branches"
        events.append(
            (
                t["start"],
                f"{t['kind']:15}start {t['input_bytes'] / 1e6:6.1f}"
                f"  {t['sent_bytes'] / 1e6:7.1f}  {'sync' if t['is_sync'] else 'async'}"
                f"  {products}",
            )
        )
        if t["done"] > t["start"]:
            events.append((t["done"], f"{t['kind']:15}done"))
    heading = (
        "place  collective          MB in  MB sent  wait   products meanwhile (GFLOP)"
    )
    return [heading, *(f"{place:5}  {text}" for place, text in sorted(events))]


def save(result: dict[str, Any], path: pathlib.Path) -> None:
    """Save a result, without its timeline, in place of an older one of its case."""
    keys = ("model", "gpus", "layout", "recipe")
    case = [result[key] for key in keys]
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [row for row in rows if [row[key] for key in keys] != case]
    rows.append({key: x for key, x in result.items() if key != "timeline"})
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def option(text: str) -> tuple[str, Any]:
    """KEY=VALUE of the command line, where VALUE is JSON or else text."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}; expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def cases(models: list[str] | None, gpus: list[int] | None) -> list[tuple[str, int]]:
    """Models and numbers of GPUs: `CASES`, unless the command line names others."""
    if models is not None and gpus is not None:
        return [(model, count) for model in models for count in gpus]
    return [
        (model, count)
        for model, count in CASES
        if model in (models or WORKLOADS) and count in (gpus or [count])
    ]


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule.gpu_schedule")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS)
    parser.add_argument("--gpus", type=int, nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=ALL_LAYOUTS, default=LAYOUTS)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--timeline", action="store_true", help="list all transfers")
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
    for gpus in args.gpus or []:
        if gpus < 1 or (gpus > GPUS_PER_HOST and gpus % GPUS_PER_HOST):
            parser.error(f"--gpus {gpus}; expected 1 to 8, or a multiple of 8")
    chosen = cases(args.models, args.gpus)
    if not chosen:
        parser.error(f"expected both --models and --gpus, or a case of {CASES}")
    about = {
        "command": shlex.join(
            ["python", "-m", "benchmarks.schedule.gpu_schedule", *words]
        ),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    for model, gpus in chosen:
        devices = h100s(gpus)
        measured: dict[str, Any] = {}  # by program: two layouts may be one
        for layout in args.layouts:
            whole = whole_step(model, devices, layout, args.recipe)
            lowered = whole.step.lower(*whole.args)
            program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            if program not in measured:
                options = dict(args.option)
                measured[program] = measure(whole, lowered, options, Rates())
            case = {"model": model, "gpus": gpus, "layout": layout}
            result = case | {"recipe": args.recipe} | measured[program] | about
            print(report(result, timeline=args.timeline), end="\n\n", flush=True)
            if args.json is not None:
                save(result, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
