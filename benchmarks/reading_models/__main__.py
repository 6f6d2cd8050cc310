"""How the parameters of real models are read by a loss.

    python -m benchmarks.reading_models [FRAMEWORK ...] [--models 'gpt*']

Every model of `benchmarks/reading_models` is built by its package, and read by its
loss. A framework with pins of its own runs in its environment, runs/outside/NAME, which
`make runs/outside/NAME` makes. A model has one row, and each kind of leaf that is not
read rightly one line below it:

    right      as the answers of the model say
    wrong      otherwise, and without a doubt
    refused    with a doubt: the loss hides its use, and `jm.read` raises an error
    unused     the loss does not depend on it
    open       otherwise than the answer, which the loss does not determine

The rows go to benchmarks/results/reading_models.json. The exit status is 1 if a leaf is
wrong by the loss, or a model fails.
"""

import argparse
import collections
import fnmatch
import importlib
import json
import math
import pathlib
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax

from benchmarks import program
from benchmarks.reading import judge
from benchmarks.reading_models import FRAMEWORKS
from jax_muon.paths import leaves_with_paths
from jax_muon.reading.computation.read import read_uses

RESULTS = pathlib.Path(__file__).parents[1] / "results"
LOSS = ("right", "wrong", "refused", "unused", "open")


def main(words: list[str] | None = None) -> int:
    """Read all models of the frameworks; the exit status."""
    parser = arguments("benchmarks.reading_models", __doc__, "reading_models.json")
    options = parser.parse_args(words)

    def here(framework: str) -> bool:
        rows = list(_rows(framework, options.models))
        _keep(options.json, framework, rows, merge=options.models != "*")
        return any("error" in row or row["loss"]["wrong"] for row in rows)

    failed = in_environments("benchmarks.reading_models", options, here)
    if not options.here:
        print(summary(json.loads(options.json.read_text())))
    return int(failed)


def arguments(module: str, doc: str | None, results: str) -> argparse.ArgumentParser:
    """The command line of a program that goes over frameworks."""
    parser = program.parser(module, doc)
    add = parser.add_argument
    add("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    add("--models", default="*", help="pattern of the models to read")
    add("--here", action="store_true", help="in this environment")
    add("--json", type=pathlib.Path, default=RESULTS / results)
    return parser


def in_environments(
    module: str, options: argparse.Namespace, here: Callable[[str], Any]
) -> bool:
    """Run a program for each framework, in the environment that it needs.

    Args:
      module: of the program.
      options: of its command line. Another process gets all but the frameworks.
      here: called for the frameworks of this environment; returns whether it failed.

    Returns:
      True if any of them failed.
    """
    failed = False
    for framework in options.frameworks or FRAMEWORKS:
        environment = FRAMEWORKS[framework]
        if options.here or environment is None:
            failed |= bool(here(framework))
            continue
        command = [f"runs/outside/{environment}/bin/python", "-m", module]
        command += [framework, "--here"]
        for name in vars(options).keys() - {"frameworks", "here"}:
            value = getattr(options, name)
            values = value if isinstance(value, list) else [str(value)]
            command += [f"--{name}", *values]
        failed |= subprocess.run(command).returncode != 0
    return failed


def _rows(framework: str, pattern: str) -> Iterator[dict[str, Any]]:
    """One row for each model, which is printed as soon as it is there."""
    module = importlib.import_module(f"benchmarks.reading_models.{framework}")
    for name, model in module.MODELS.items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        try:
            row, kinds = read_model(model)
        except Exception as error:  # the packages are not ours: the next model may do
            traceback.print_exc()
            yield {"model": name, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        counts = ", ".join(f"{n} {kind}" for kind, n in row["loss"].items() if n)
        print(f"{framework} {name}: {row['leaves']} leaves, {counts}")
        for kind, count in kinds.items():
            print(f"  {count:4d} x {kind}", flush=True)
        yield {"model": name, **row}


def read_model(model: Any) -> tuple[dict[str, Any], collections.Counter[str]]:
    """The row of a `Model`, and the kinds of leaves that its loss reads otherwise."""
    loss, params, args = model.build()
    start = time.process_time()
    jax.make_jaxpr(loss)(params, *args)
    traced = time.process_time()
    uses = {x.path: x for x in read_uses(loss, params, *args)}
    read = time.process_time()
    leaves = dict(leaves_with_paths(params))
    counts = {"loss": dict.fromkeys(LOSS, 0)}
    kinds: collections.Counter[str] = collections.Counter()
    for path, leaf in leaves.items():
        shape = tuple(leaf.shape)
        param = {"path": path, "shape": shape, "expect": model.expected(path, shape)}
        use = uses[path]
        outcome, text = verdict(param, use)
        if outcome == "refused":
            text = f"{text}: {use.doubt}"
        elif use.role == "unused":
            outcome, text = "unused", ""
        counts["loss"][outcome] += 1
        if outcome != "right":
            kinds[f"{outcome} {re.sub('[0-9]+', 'N', path)} {shape}: {text}"] += 1
    row = {
        "leaves": len(leaves),
        **counts,
        "parameters": sum(math.prod(x.shape) for x in leaves.values()),
        "trace_seconds": round(traced - start, 3),
        "read_seconds": round(read - traced, 3),
    }
    return row, kinds


def verdict(param: dict[str, Any], read: Any) -> tuple[str, str]:
    """`judge`, where what nothing decides is "open"."""
    outcome, text = judge(param, read)
    return "open" if outcome == "unknowable" else outcome, text


def _keep(
    file: pathlib.Path, framework: str, rows: list[dict[str, Any]], merge: bool
) -> None:
    """Write the rows of a framework, beside those that the file has of others."""
    results = json.loads(file.read_text()) if file.exists() else {}
    if merge:
        new = {row["model"] for row in rows}
        old = results.get(framework, {}).get("models", [])
        rows = [row for row in old if row["model"] not in new] + rows
    results[framework] = {"jax": version("jax"), "models": rows}
    file.write_text(lines_of(results))


def lines_of(results: Mapping[str, Any]) -> str:
    """The results as JSON with one line for each model."""
    frameworks = []
    for framework, result in results.items():
        rows = ",\n".join(json.dumps(row) for row in result["models"])
        head = f'"{framework}": {{"jax": "{result["jax"]}", "models": [\n'
        frameworks.append(f"{head}{rows}]}}")
    return "{" + ",\n".join(frameworks) + "}\n"


def summary(results: Mapping[str, Any]) -> str:
    """A Markdown table with a row for each framework, and one for all."""
    titles = ["models", "leaves", *(f"loss: {kind}" for kind in LOSS)]
    total: collections.Counter[str] = collections.Counter()
    counts = {}
    for framework, result in results.items():
        counts[framework] = count = collections.Counter[str]()
        for row in result["models"]:
            if "error" in row:
                continue
            count += collections.Counter(models=1, leaves=row["leaves"])
            for kind, number in row["loss"].items():
                count[f"loss: {kind}"] += number
        total += count
    rows = [
        [framework, *(str(count[title]) for title in titles)]
        for framework, count in (counts | {"all": total}).items()
    ]
    return program.markdown([["framework", *titles], *rows])


if __name__ == "__main__":
    sys.exit(main())
