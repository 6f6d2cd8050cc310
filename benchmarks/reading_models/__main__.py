"""How the parameters of real models are read by a loss.

    python -m benchmarks.reading_models [FRAMEWORK ...] [--models 'gpt*']

Every model is built by its package, in its environment runs/outside/NAME, which
`make runs/outside/NAME` makes, and read by its loss. A model has one row, and each kind
of leaf that is not read rightly one line below it:

    right      as the answers of the model say
    wrong      otherwise, and without a doubt
    refused    with a doubt: the loss hides its use: `jm.find_matrices` raises an error
    unused     the loss does not depend on it
    open       otherwise than the answer, which the loss does not determine

The exit status is 1 if a leaf is wrong by the loss, or a model fails.
"""

import fnmatch
import importlib
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator

from benchmarks import program
from benchmarks.reading import judge
from benchmarks.reading_models import FRAMEWORKS, Model
from jax_muon.base.trees import leaves_with_paths
from jax_muon.reading.read import read_uses


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
        if options.here or environment is None:
            failed |= not all([*_rows(framework, options.models)])
        else:
            command = [f"runs/outside/{environment}/bin/python", "-m"]
            command += ["benchmarks.reading_models", framework, "--here"]
            run = subprocess.run([*command, "--models", options.models])
            failed |= run.returncode != 0
    return int(failed)


def _rows(framework: str, pattern: str) -> Iterator[bool]:
    """Print a row for each model; True where nothing is wrong."""
    module = importlib.import_module(f"benchmarks.reading_models.{framework}")
    for name, model in module.MODELS.items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        try:
            counts, kinds = read_model(model)
        except Exception:  # the packages are not ours: the next model may do
            traceback.print_exc()
            print(f"{framework} {name}: failed")
            yield False
            continue
        text = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        print(f"{framework} {name}: {counts.total()} leaves, {text}")
        for kind, count in kinds.items():
            print(f"  {count:4d} x {kind}", flush=True)
        yield counts["wrong"] == 0


def read_model(model: Model) -> tuple[Counter[str], Counter[str]]:
    """How many leaves are right, wrong and so on, and the kinds of those not right."""
    loss, params, args = model.build()
    uses = {x.path: x for x in read_uses(loss, params, *args)}
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for path, leaf in leaves_with_paths(params):
        shape, use = tuple(leaf.shape), uses[path]
        outcome, text = judge(model.answer(path, shape), use)
        if outcome == "refused":
            text = f"{text}: {use.doubt}"
        elif use.role == "unused":
            outcome, text = "unused", ""
        counts[outcome] += 1
        if outcome != "right":
            kinds[f"{outcome} {re.sub('[0-9]+', 'N', path)} {shape}: {text}"] += 1
    return counts, kinds


if __name__ == "__main__":
    sys.exit(main())
