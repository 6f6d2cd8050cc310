"""Random cases, each checked against one device, on up to 8 simulated CPU devices.

    python -m benchmarks.fuzz --cases 200
    python -m benchmarks.fuzz --cases 2000 --counts fuzz.json   goes on where it ended
    python -m benchmarks.fuzz --only 17,42

Every case compares updates and state with those of one device (2e-5 of the length of
each array in float32, or ten times what the last bits of the gradients change there),
asks for equal bits where devices hold the same piece, for finite numbers where the
gradients are finite, and for errors of ours alone. A wrong case is made smaller and
printed as a test to paste. The exit status is 1 if there is one.
"""

import argparse
import collections
import json
import os
import pathlib
import sys
from typing import Any

import jax

from benchmarks.fuzz.cases import Case, draw
from benchmarks.fuzz.minimize import as_test, minimize
from benchmarks.fuzz.run import Outcome, check

# Compiled programs pile up; now and then they are thrown away.
_CLEAR_EVERY = 50


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign, print its counts, and give the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", type=int, default=200)
    add("--seed", type=int, default=0)
    add("--only", help="numbers of cases, with commas")
    add("--counts", type=pathlib.Path, help="file to go on from, and to write to")
    add("--tries", type=int, default=60, help="to make a wrong case smaller")
    options = parser.parse_args(arguments)
    state: dict[str, Any] = {"seed": options.seed, "done": 0, "counts": {}, "wrong": {}}
    if options.counts and options.counts.exists():
        state = json.loads(options.counts.read_text())
        if state["seed"] != options.seed:
            parser.error(f"{options.counts} is of --seed {state['seed']}")
    numbers = range(state["done"], options.cases)
    if options.only:
        numbers = [int(number) for number in options.only.split(",")]
    counts = collections.Counter(state["counts"])
    for number in numbers:
        outcome = check(draw(options.seed, number))
        counts[outcome.kind] += 1
        if outcome.is_wrong:
            state["wrong"][str(number)] = f"{outcome.kind}: {outcome.text}"
            print(_report(options, number, outcome), flush=True)
        state |= {"done": number + 1, "counts": dict(counts)}
        if options.counts and not options.only:
            part = options.counts.with_suffix(".part")
            part.write_text(json.dumps(state, indent=1))
            os.replace(part, options.counts)
        if number % _CLEAR_EVERY == _CLEAR_EVERY - 1:
            jax.clear_caches()
    print(f"{sum(counts.values())} cases of seed {options.seed}: {dict(counts)}")
    return 1 if state["wrong"] else 0


def _report(options: argparse.Namespace, number: int, outcome: Outcome) -> str:
    """A wrong case in words, and the smallest like it as a test."""

    def fails(case: Case) -> bool:
        return check(case).kind == outcome.kind

    case = minimize(draw(options.seed, number), fails, options.tries)
    test = as_test(case, f"case_{options.seed}_{number}")
    return f"case {number}: {outcome.kind}: {outcome.text}\n{test}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main())
