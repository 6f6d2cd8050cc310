"""The command."""

import argparse
import pathlib
import shlex
import sys
from typing import Any

from benchmarks import learning
from benchmarks.learning import pace, plan, report
from benchmarks.learning.grid import BASELINE, BEGINNINGS
from benchmarks.learning.records import FOLDER, Records
from benchmarks.learning.training import VARIANTS

STAGES = plan.STAGES | {"pace": pace.pace}


def main(words: list[str]) -> None:
    """Runs what is asked for, or writes what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=learning.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=BEGINNINGS, default=list(BEGINNINGS))
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--steps", type=int, default=300, help="of AdamW")
    add("--width", type=int, default=128)
    add("--results", type=pathlib.Path, default=FOLDER, metavar="FOLDER")
    add("--report", action="store_true", help="table and pictures of the runs so far")
    args = parser.parse_args(words)
    command = shlex.join(["python", "-m", "benchmarks.learning", *words])
    records = Records(args.results, command)
    if args.report:
        report.write_all(records)
        return
    for stage in args.stages:
        for optimizer in args.optimizers:
            if has(stage, optimizer, args.steps):
                found = STAGES[stage](records, optimizer, args.steps, args.width)
                print(f"{stage} of {optimizer}: {shown(found)}", flush=True)


def has(stage: str, optimizer: str, steps: int) -> bool:
    """Whether there is anything to do at a stage for an optimizer."""
    if stage == "variants":
        return optimizer in VARIANTS and steps <= plan.SEARCHED
    return optimizer != BASELINE or stage not in ("shortest", "pace")


def shown(found: Any) -> Any:
    """What a stage found, with the mean loss in place of records."""
    if isinstance(found, dict):
        return {name: shown(records) for name, records in found.items()}
    return round(plan.mean(found), 4) if isinstance(found, list) else found


if __name__ == "__main__":
    main(sys.argv[1:])
