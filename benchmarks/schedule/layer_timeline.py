"""One turn of each loop over layers: when products run and when transfers do.

    python -m benchmarks.schedule.layer_timeline --json FILE

compiles a train step for H100s that are not here and lays the rates of `step_time` on
the schedule, like `gpu_schedule`. `docs/charts.py` draws the result. XLA unrolls these
loops by two, so a turn has two layers.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from benchmarks.schedule.gpu_schedule import TOOL_OPTIONS
from benchmarks.schedule.h100s import WORKLOADS, h100s, whole_step
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.step_time import Rates, transfer_seconds

# Transfers of fewer bytes, of norms and means, are not drawn.
LEAST_BYTES = 100_000


def turns(module: Module, rates: Rates) -> list[dict[str, Any]]:
    """The middle turn of each loop that sends, in microseconds from its start.

    Returns:
      For each loop its "length", "products" as [start, end], joined where they follow
      each other at once, and "transfers" as [kind, start, end, megabytes sent].
    """
    transfers = {t.name: t for t in module.transfers()}
    before = [work.flops for work in module.work_before()]
    clock = wire = 0.0
    ends: dict[str, float] = {}
    loops: dict[str, dict[str, dict[str, Any]]] = {}
    for place, line in enumerate(module.schedule):
        loop, _, turn = line.name.rpartition("/")[2].rpartition(".")
        found: dict[str, Any] = {}
        if "/" in line.name:
            empty = {"start": clock, "products": [], "transfers": []}
            found = loops.setdefault(loop, {}).setdefault(turn, empty)
        if seconds := (before[place + 1] - before[place]) / rates.flops:
            products = found.get("products", [])
            if products and clock - products[-1][1] < 1e-9:
                products[-1][1] += seconds
            else:
                products.append([clock, clock + seconds])
            clock += seconds
        if transfer := transfers.get(line.name):
            begin = max(wire, clock)
            wire = ends[line.name] = begin + transfer_seconds(transfer, rates)
            if transfer.is_sync:
                clock = wire
            if transfer.sent_bytes > LEAST_BYTES:
                sent = transfer.sent_bytes / 1e6
                found.get("transfers", []).append([transfer.kind, begin, wire, sent])
        elif line.opcode.endswith("-done") and line.operands:
            clock = max(clock, ends.get(line.operands[0], 0.0))
        found["end"] = clock
    return [_from_start([*turns.values()][len(turns) // 2]) for turns in loops.values()]


def _from_start(turn: dict[str, Any]) -> dict[str, Any]:
    def since(seconds: float) -> float:
        return round(1e6 * (seconds - turn["start"]), 1)

    return {
        "length": since(turn["end"]),
        "products": [[since(start), since(end)] for start, end in turn["products"]],
        "transfers": [
            [kind, since(start), since(end), round(sent, 1)]
            for kind, start, end, sent in turn["transfers"]
        ],
    }


def main(words: list[str]) -> None:
    """The command."""
    name = "python -m benchmarks.schedule.layer_timeline"
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--model", choices=WORKLOADS, default="llama-7b")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args(words)
    whole = whole_step(args.model, h100s(args.gpus), "zero2-divided", "nanochat")
    compiled = whole.step.lower(*whole.args).compile(compiler_options=TOOL_OPTIONS)
    result = {
        "model": args.model,
        "gpus": args.gpus,
        "loops": turns(Module.parse(compiled.as_text()), Rates()),
    }
    args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
