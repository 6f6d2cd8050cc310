"""How the parameters of real models are read, by a loss and by names.

    python -m benchmarks.reading_models [FRAMEWORK ...] [--models 'gpt*']

Every model of `benchmarks/reading_models` is built by its package, and read in three
ways: by its loss, by its names, and by its names after its paths are numbers. A
framework with pins of its own runs in its environment, runs/outside/NAME, which
`make runs/outside/NAME` makes. A model has one row, and each kind of leaf that is not
read rightly one line below it:

    right      as the answers of the model say
    wrong      otherwise, and without a doubt
    undecided  with a doubt: the loss hides its use, so names are asked
    refused    undecided, and names have a doubt too: `jm.read` raises an error
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
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "results/reading_models.json"
READER = "jax_muon.reading.computation.read:read_uses"
LOSS = ("right", "wrong", "undecided", "refused", "unused", "open")
NAMES = ("right", "wrong", "refused")


def main(arguments: list[str] | None = None) -> int:
    """Read all models of the frameworks; the exit status."""
    from benchmarks.reading_models import FRAMEWORKS

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK")
    parser.add_argument("--models", default="*", help="pattern of the models to read")
    parser.add_argument("--here", action="store_true", help="in this environment")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    parser.add_argument(
        "--reader", default=READER, help="module:function(loss, params, *args)"
    )
    options = parser.parse_args(arguments)
    frameworks = options.frameworks or list(FRAMEWORKS)
    if unknown := {*frameworks} - {*FRAMEWORKS}:
        parser.error(f"no framework {sorted(unknown)}; expected {list(FRAMEWORKS)}")
    status = 0
    for framework in frameworks:
        environment = None if options.here else FRAMEWORKS[framework]
        if environment is None:
            rows = list(_rows(framework, options.models, load(options.reader)))
            _keep(options.json, framework, rows, merge=options.models != "*")
            status |= any("error" in row or row["loss"]["wrong"] for row in rows)
        else:
            command = [f"runs/outside/{environment}/bin/python", "-m", __spec__.parent]
            more = ("--models", options.models, "--reader", options.reader)
            more += ("--json", str(options.json))
            command += [framework, "--here", *more]
            status |= subprocess.run(command).returncode
    if not options.here:
        print(summary(json.loads(options.json.read_text())))
    return int(status)


def load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _rows(
    framework: str, pattern: str, reader: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    """One row for each model, which is printed as soon as it is there."""
    module = importlib.import_module(f"benchmarks.reading_models.{framework}")
    for name, model in module.MODELS.items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        try:
            row, kinds = read_model(model, reader)
        except Exception as error:  # the packages are not ours: the next model may do
            traceback.print_exc()
            yield {"model": name, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        counts = ", ".join(f"{n} {kind}" for kind, n in row["loss"].items() if n)
        others = "; ".join(
            f"{title}: " + ", ".join(f"{n} {kind}" for kind, n in row[key].items() if n)
            for title, key in (("names", "names"), ("numbers", "numbers"))
        )
        print(f"{framework} {name}: {row['leaves']} leaves, {counts}; {others}")
        for kind, count in kinds.items():
            print(f"  {count:4d} x {kind}", flush=True)
        yield {"model": name, **row}


def read_model(
    model: Any, reader: Callable[..., Any]
) -> tuple[dict[str, Any], collections.Counter[str]]:
    """The row of one model, and the kinds of leaves that its loss reads otherwise.

    Args:
      model: a `Model`.
      reader: called with the loss, the parameters and the other arguments; returns a
        `Parameter` for each leaf, as a mapping by path or in the order of the tree.
    """
    import jax

    from benchmarks.reading import judge
    from jax_muon.paths import leaves_with_paths
    from jax_muon.reading.names.read import read_leaves
    from jax_muon.reading.names.tree import Leaf

    loss, params, args = model.build()
    start = time.process_time()
    jax.make_jaxpr(loss)(params, *args)
    traced = time.process_time()
    uses = reader(loss, params, *args)
    read = time.process_time()
    leaves = dict(leaves_with_paths(params))
    uses = uses if isinstance(uses, Mapping) else {x.path: x for x in uses}
    by_name, by_number = (
        dict(
            zip(
                leaves,
                read_leaves(
                    [
                        Leaf(path, tuple(x.shape), x.dtype)
                        for path, x in zip(paths, leaves.values(), strict=True)
                    ]
                ),
                strict=True,
            )
        )
        for paths in (leaves, [f"p{number:05d}" for number in range(len(leaves))])
    )
    counts = {"loss": dict.fromkeys(LOSS, 0)}
    counts |= {key: dict.fromkeys((*NAMES, "open"), 0) for key in ("names", "numbers")}
    kinds: collections.Counter[str] = collections.Counter()
    for path, leaf in leaves.items():
        shape = tuple(leaf.shape)
        param = {"path": path, "shape": shape, "expect": model.expected(path, shape)}
        use = uses[path]
        outcome, text = judge(param, use)
        if outcome == "refused":
            outcome = "refused" if by_name[path].doubt else "undecided"
            text = f"{text}: {use.doubt}"
        elif use.role == "unused":
            outcome, text = "unused", ""
        outcome = {"unknowable": "open"}.get(outcome, outcome)
        counts["loss"][outcome] += 1
        if outcome != "right":
            kinds[f"{outcome} {re.sub('[0-9]+', 'N', path)} {shape}: {text}"] += 1
        for key, one in (("names", by_name[path]), ("numbers", by_number[path])):
            outcome = judge(param, one)[0]
            counts[key]["open" if outcome == "unknowable" else outcome] += 1
    row = {
        "leaves": len(leaves),
        **counts,
        "parameters": sum(math.prod(x.shape) for x in leaves.values()),
        "trace_seconds": round(traced - start, 3),
        "read_seconds": round(read - traced, 3),
    }
    return row, kinds


def _keep(
    file: pathlib.Path, framework: str, rows: list[dict[str, Any]], merge: bool
) -> None:
    """Write the rows of a framework, beside those that the file has of others."""
    from importlib.metadata import version

    import jax

    results = json.loads(file.read_text()) if file.exists() else {}
    if merge:
        new = {row["model"] for row in rows}
        old = results.get(framework, {}).get("models", [])
        rows = [row for row in old if row["model"] not in new] + rows
    results[framework] = {"jax": version("jax"), "models": rows}
    assert jax.__version__ == version("jax")
    file.write_text(json.dumps(results, indent=1) + "\n")


def summary(results: Mapping[str, Any]) -> str:
    """A Markdown table with a row for each framework, and one for all."""
    titles = ["models", "leaves", *(f"loss: {kind}" for kind in LOSS)]
    titles += [f"{key}: {kind}" for key in ("names", "numbers") for kind in NAMES]
    lines = [f"| framework | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    total: collections.Counter[str] = collections.Counter()
    for framework, result in results.items():
        count: collections.Counter[str] = collections.Counter()
        for row in result["models"]:
            if "error" in row:
                continue
            count += collections.Counter(models=1, leaves=row["leaves"])
            for key in ("loss", "names", "numbers"):
                for kind, number in row[key].items():
                    count[f"{key}: {kind}"] += number
        total += count
        cells = " | ".join(str(count[title]) for title in titles)
        lines.append(f"| {framework} | {cells} |")
    cells = " | ".join(str(total[title]) for title in titles)
    return "\n".join([*lines, f"| all | {cells} |"])


if __name__ == "__main__":
    sys.exit(main())
