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

The rows go to benchmarks/results/reading_models.json, in place of those of the same
models. The exit status is 1 if a leaf is wrong by the loss, or a model fails.
"""

import collections
import fnmatch
import importlib
import json
import math
import pathlib
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from benchmarks import program
from benchmarks.reading import judge
from benchmarks.reading_models import FRAMEWORKS
from jax_muon.reading.computation.read import read_uses
from jax_muon.trees import leaves_with_paths

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "reading_models.json"
LOSS = ("right", "wrong", "refused", "unused", "open")


def main(words: list[str] | None = None) -> int:
    """Read all models of the frameworks; the exit status."""
    parser = program.parser("benchmarks.reading_models", __doc__)
    add = parser.add_argument
    add("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    add("--models", default="*", help="pattern of the models to read")
    add("--here", action="store_true", help="in this environment")
    options = parser.parse_args(words)
    failed = False
    for framework in options.frameworks or FRAMEWORKS:
        environment = FRAMEWORKS[framework]
        if not options.here and environment is not None:
            command = [f"runs/outside/{environment}/bin/python", "-m"]
            command += ["benchmarks.reading_models", framework, "--here"]
            run = subprocess.run([*command, "--models", options.models])
            failed |= run.returncode != 0
            continue
        rows = list(_rows(framework, options.models))
        _keep(framework, rows)
        failed |= any("error" in row or row["loss"]["wrong"] > 0 for row in rows)
    return int(failed)


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
    uses = {x.path: x for x in read_uses(loss, params, *args)}
    leaves = dict(leaves_with_paths(params))
    counts = dict.fromkeys(LOSS, 0)
    kinds: collections.Counter[str] = collections.Counter()
    for path, leaf in leaves.items():
        shape = tuple(leaf.shape)
        use = uses[path]
        outcome, text = judge(model.answer(path, shape), use)
        if outcome == "refused":
            text = f"{text}: {use.doubt}"
        elif use.role == "unused":
            outcome, text = "unused", ""
        counts[outcome] += 1
        if outcome != "right":
            kinds[f"{outcome} {re.sub('[0-9]+', 'N', path)} {shape}: {text}"] += 1
    size = sum(math.prod(x.shape) for x in leaves.values())
    return {"leaves": len(leaves), "loss": counts, "parameters": size}, kinds


def _keep(framework: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a framework as JSON, one line for each model."""
    results = json.loads(RESULTS.read_text())
    new = {row["model"] for row in rows}
    old = results.get(framework, {}).get("models", [])
    rows = [row for row in old if row["model"] not in new] + rows
    results[framework] = {"jax": version("jax"), "models": rows}
    texts = []
    for name, result in results.items():
        lines = ",\n".join(json.dumps(row) for row in result["models"])
        head = f'"{name}": {{"jax": "{result["jax"]}", "models": [\n'
        texts.append(f"{head}{lines}]}}")
    RESULTS.write_text("{" + ",\n".join(texts) + "}\n")


if __name__ == "__main__":
    sys.exit(main())
