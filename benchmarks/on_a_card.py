"""Everything that can be known only on a GPU, in two calls of under ten minutes each.

    python3 -m benchmarks.on_a_card --part 1 2 4 --out FOLDER
    python3 -m benchmarks.on_a_card --part 3 5 --out FOLDER
    python -m benchmarks.on_a_card --tiny --out FOLDER      # all of it on a CPU

From the root of the repository; JAX, PyTorch and optax must be there, the rest may be
missing. Part 1 is correctness, 2 the card's peaks, 3 the time of optimizer steps, 4
orthogonalization alone, 5 GPT-2 124M's train step; `card_tasks.py` has what they do.
Each task runs in a process of its own, so that one that hangs or breaks the card's
context loses no other. Each measurement is printed and written as it ends; what does
not fit into `--seconds` is skipped with a line that says so.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Seconds: beyond which a task is ended, and for which none is worth starting.
GRACE = 10.0
LEAST = 20.0


class Record:
    """The results of one part, in a file that is written after each of them."""

    def __init__(self, path: pathlib.Path, task: str, deadline: float):
        """Read what other tasks of the part left in the file.

        Args:
          path: of the file.
          task: under whose name results are.
          deadline: by `time.monotonic`, after which nothing is begun.
        """
        self.path, self.task, self.deadline = path, task, deadline
        self.content: dict[str, Any] = {"runs": {}, "rows": []}
        if path.exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))

    def describe(self, about: dict[str, Any]) -> None:
        """Keep card, versions, date and command of this task."""
        self.content["runs"][self.task] = about
        self._write()

    def measure(
        self, what: str, function: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Call a function, and keep what it returns, or why it did not.

        Args:
          what: its name in the file and in what is printed.
          function: the measurement.

        Returns:
          Its result; None where it failed or no time was left.
        """
        began = time.monotonic()
        if began > self.deadline:
            self._add(what, {"skipped": "no time left"}, 0)
            return None
        try:
            found = function()
        except ImportError as error:
            self._add(what, {"skipped": str(error)}, began)
        # A measurement that cannot be made must not take the others along.
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            self._add(what, {"failed": text[:2000]}, began)
        else:
            self._add(what, found, began)
            return found
        return None

    def _add(self, what: str, found: dict[str, Any], began: float) -> None:
        taken = time.monotonic() - began if began else 0.0
        row = {"task": self.task, "what": what, **found}
        self.content["rows"].append(row | {"measured_in_s": round(taken, 2)})
        self._write()
        words = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
        print(f"[{taken:5.1f} s] {what}: {words}", flush=True)

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def shown(value: Any) -> str:
    """A value in a printed line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\n", " ")[:300]


def environment(device: str) -> dict[str, str]:
    """For processes that share one card."""
    return {
        **os.environ,
        "JAX_PLATFORMS": device,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
    }


def command(name: str, args: argparse.Namespace, seconds: float) -> list[str]:
    """The words that run one task in a process."""
    words = [sys.executable, "-m", "benchmarks.on_a_card", "--task", name]
    words += ["--seconds", f"{seconds:.0f}", "--out", str(args.out)]
    return words + ["--device", args.device] + ["--tiny"] * args.tiny


def run_task(name: str, args: argparse.Namespace, seconds: float) -> str:
    """Run a task in a process, and end it and all that it started in time.

    Returns:
      How it ended, in words.
    """
    process = subprocess.Popen(
        command(name, args, seconds),
        env=environment(args.device),
        start_new_session=True,
    )
    try:
        # The task itself stops in time, unless one measurement takes too long.
        status = process.wait(seconds + GRACE)
    except subprocess.TimeoutExpired:
        return f"ended after {seconds + GRACE:.0f} s: one measurement took too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "done" if status == 0 else f"broke off with status {status}: see above"


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_a_card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", type=int, nargs="+", choices=range(1, 6), default=[1, 2, 3, 4, 5])
    add("--out", type=pathlib.Path, required=True, help="folder for results")
    add("--seconds", type=float, default=540, help="for all that is asked for")
    add("--tiny", action="store_true", help="small sizes, to try the program")
    add("--device", choices=("cuda", "cpu"), help="default: cuda; cpu with --tiny")
    add("--task", help="one task in this process, as the program itself runs it")
    args = parser.parse_args(words)
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds}; expected a number above 0")
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    return args


def main(words: list[str]) -> None:
    """The command."""
    args = parse(words)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if args.task is not None:
        from benchmarks import card_tasks

        card_tasks.run(args.task, args, began + args.seconds, words)
        return

    if shutil.which("nvidia-smi") and args.device == "cuda":
        subprocess.run(["nvidia-smi"], check=False)
    for name, part, most in tasks():
        if part not in args.part:
            continue
        left = args.seconds - (time.monotonic() - began)
        if left < LEAST:
            print(f"== part {part}, {name}: skipped, no time left", flush=True)
            continue
        print(f"== part {part}, {name}: {left:.0f} s left", flush=True)
        ended = run_task(name, args, min(left - GRACE, most))
        print(f"== {name}: {ended}", flush=True)
    print(f"== {time.monotonic() - began:.0f} s in all", flush=True)


def tasks() -> list[tuple[str, int, float]]:
    """Names, parts, and the seconds that a task may take, in the order of their worth.

    In the first call correctness stands first; the tests repeat it, and come last.
    """
    return [
        ("peaks", 2, 60),
        ("kernels", 1, 90),
        ("parity", 1, 200),
        ("orthogonalization", 4, 200),
        ("steps", 3, 360),
        ("train", 5, 240),
        ("tests", 1, 150),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
