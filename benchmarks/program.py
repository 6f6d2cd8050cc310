"""What programs share: arguments, tables, results with their machine, timing."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import jax

PACKAGES = (
    *("jax", "jaxlib", "optax", "torch", "numpy"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
)


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of a program, whose help is the text of its file."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=raw
    )


def print_head(*titles: str) -> None:
    """Begin a Markdown table."""
    print_row(*titles)
    print("|---" * len(titles) + "|")


def print_row(*cells: Any) -> None:
    """A row of it, numbers with three digits."""
    words = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells)
    print(f"| {' | '.join(words)} |", flush=True)


def save(result: Any, path: pathlib.Path) -> None:
    """Write results as JSON, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def save_rows(
    rows: Sequence[dict[str, Any]], path: pathlib.Path, keys: Sequence[str]
) -> None:
    """Save rows of a table, in place of older ones that agree in these keys."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    by_case = {tuple(row[key] for key in keys): row for row in (*old, *rows)}
    save([*by_case.values()], path)


# ---- The machine


def describe(module: str, words: list[str]) -> dict[str, Any]:
    """Machine, versions, date and command, kept with every result."""
    return {
        "command": shlex.join(["python", "-m", module, *words]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],  # above 0.5, something else was running
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    """The version of an installed package, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """The name of the accelerator, or of the processor."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":")[1].strip() for line in lines if "model name" in line}
    return ", ".join(sorted(names)) or platform.processor()


# ---- Time


def in_turn(timers: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """The times of each, measured one after another in every round."""
    times = [[timer() for timer in timers] for _ in range(rounds)]
    return [list(own) for own in zip(*times, strict=True)]
