"""The time of a whole optimizer step, ours and others', in runs that alternate.

    python -m benchmarks.step                                 6x384 and GPT-2 124M
    python -m benchmarks.step --models gpt2-350m --rounds 3
    python -m benchmarks.step --pairs optax --json benchmarks/results

Each pair runs ours, theirs, ours, theirs, ..., each in a separate process; the
ratio is the median over rounds. Beside it are the seconds, the temporaries and the
time to compile. `benchmarks/NOTES.md` says what the columns mean. A file of results
that is there already keeps its other pairs. All of this is on a CPU; on a GPU,
`benchmarks.on_a_card` times the same steps.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import program
from benchmarks.contenders import RECIPES
from benchmarks.parameters import MODELS

SIZES = ("6x384", "gpt2-124m")
CASE = ("model", "ours", "theirs")  # one row of results for each
ROUNDS = {"6x384": 9, "gpt2-124m": 2}  # else 3
# With these glibc keeps large blocks, on huge pages. By default torch gets every
# temporary as fresh pages, which Linux zeroes: half a million page faults in a step of
# nanochat's optimizer on GPT-2 124M.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """What runs, and how; see `benchmarks.contenders`."""

    name: str
    layout: str = "scanned"
    dtype: str = "float32"
    malloc: str = "default"
    cublas: bool = False

    def __str__(self) -> str:
        words = [self.name, self.dtype]
        if not self.name.startswith("torch"):
            words.append(self.layout)
        if self.malloc == "tuned":
            words.append("tuned malloc")
        if self.cublas:
            words.append("cuBLASLt")
        return ", ".join(words)


def pairs(*, every: bool = False) -> list[tuple[Contender, Contender]]:
    """Ours and theirs: those that docs/speed.md draws, or all."""
    ours, low = Contender("nanochat"), Contender("nanochat", dtype="bfloat16")
    leaves = Contender("nanochat", "separate")
    nanochat = Contender("torch-nanochat", dtype="bfloat16", malloc="tuned")
    drawn = [
        (ours, Contender("optax")),
        (leaves, Contender("optax", "separate")),
        (low, nanochat),
        (low, Contender("torch-muon", dtype="bfloat16")),
    ]
    others = [
        (leaves, ours),
        (dataclasses.replace(leaves, dtype="bfloat16"), low),
        (low, dataclasses.replace(nanochat, malloc="default")),
        (ours, Contender("torch-nanochat")),
        (ours, Contender("torch-nanochat", malloc="tuned")),
        *((Contender(name), ours) for name in (*RECIPES[1:], "adamw")),
        *((Contender(name, dtype="bfloat16"), low) for name in RECIPES[1:]),
    ]
    return drawn + others * every


class Worker:
    """A contender in its process."""

    def __init__(self, contender: Contender, process: subprocess.Popen):
        """Wait until it is ready."""
        self.contender, self.process = contender, process
        self.info = json.loads(self._line())

    def step(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None
        print("step", file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.contender} ended: see above")
        return line


@contextlib.contextmanager
def running(
    contender: Contender, model: str, device: str, timeout: float | None = None
) -> Iterator[Worker]:
    """A worker that is ready within `timeout` seconds, and ends whatever happens."""
    settings = dataclasses.asdict(contender) | {"model": model, "device": device}
    malloc = TUNED_MALLOC if settings.pop("malloc") == "tuned" else {}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.contenders", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": device} | malloc,
    ) as process:
        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, process.kill)
        timer.daemon = True
        timer.start()
        try:
            worker = Worker(contender, process)
        finally:
            timer.cancel()
        yield worker


def compare(
    model: str, ours: Contender, theirs: Contender, rounds: int
) -> dict[str, Any]:
    """Times of both in turn, and the ratio."""
    with running(ours, model, "cpu") as us, running(theirs, model, "cpu") as them:
        mine, others = program.in_turn([us.step, them.step], rounds)
        ratios = [a / b for a, b in zip(mine, others, strict=True)]
        return {
            "model": model,
            "ours": str(ours),
            "theirs": str(theirs),
            "ours_s": statistics.median(mine),
            "theirs_s": statistics.median(others),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ours_info": us.info,
            "theirs_info": them.info,
        }


def cells(result: dict[str, Any]) -> list[Any]:
    """A line of the table."""

    def both(key: str, unit: float, digits: int) -> str:
        values = [result[f"{side}_info"].get(key) for side in ("ours", "theirs")]
        return " / ".join(
            "-" if v is None else f"{v / unit:.{digits}f}" for v in values
        )

    keys = ("model", "ours", "theirs", "ours_s", "theirs_s", "ratio")
    return [
        *(result[key] for key in keys),
        both("compile_s", 1, 1),
        both("temporary_bytes", 1e6, 0),
    ]


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.step", __doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=SIZES)
    parser.add_argument(
        "--rounds", type=int, help="default: 9 for 6x384, 2 for gpt2-124m, else 3"
    )
    parser.add_argument("--pairs", help="all whose text has this word, and no others")
    parser.add_argument("--all", action="store_true", help="not only those of the docs")
    parser.add_argument("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    chosen = [
        (ours, theirs)
        for ours, theirs in pairs(every=args.all or args.pairs is not None)
        if (args.pairs or "") in f"{ours} to {theirs}"
    ]
    if not chosen:
        parser.error(f"--pairs {args.pairs}: no pair has it")
    if args.json is not None and not args.json.is_dir():
        parser.error(f"--json {args.json}; expected a folder that exists")

    jax.config.update("jax_platforms", "cpu")
    run = program.describe("benchmarks.step", words)
    print(f"{run['device']}, {run['cores']} cores, {run['versions']}")
    print(f"load average before: {run['load_before']:.1f}")
    program.print_head(
        *("model", "ours", "theirs", "ours s", "theirs s", "ratio"),
        *("compile s", "temporary MB"),
    )
    results = []
    for model in args.models:
        rounds = args.rounds or ROUNDS.get(model, 3)
        for ours, theirs in chosen:
            results.append(compare(model, ours, theirs, rounds) | {"run": run})
            program.print_row(*cells(results[-1]))
    if args.json is not None:
        program.save_rows(results, args.json / "step_cpu.json", CASE)


if __name__ == "__main__":
    main(sys.argv[1:])
