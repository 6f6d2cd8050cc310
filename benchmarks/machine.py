"""The machine: what it is, how fast it multiplies and copies, and what runs on it."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PACKAGES = ("jax", "jaxlib", "optax", "torch", "numpy")


def describe(module: str, words: list[str]) -> dict[str, Any]:
    """What a result is worth nothing without: machine, versions, date, command."""
    return {
        "command": shlex.join(["python", "-m", module, *words]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],  # above 0.5, something else was running
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    """Of an installed package, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """Of the accelerator, or of the processor."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = {
            line.split(":")[1].strip()
            for line in lines
            if line.startswith("model name")
        }
    return ", ".join(sorted(names)) or platform.processor()


def peaks(size: int) -> dict[str, float]:
    """FLOP/s of the product of two square matrices, and bytes/s of a copy."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        scale = jnp.asarray(size**-0.5, dtype)

        def product(x: Any, scale: Any = scale) -> Any:
            y = jnp.matmul(
                x, x, precision="highest", preferred_element_type=jnp.float32
            )
            return (y * scale).astype(x.dtype)

        found[f"{dtype}_flops"] = 2 * size**3 / seconds(product, x)
    x = jnp.ones((2**26,), jnp.float32)  # 256 MB, more than any cache
    found["copy_bytes"] = 2 * x.nbytes / seconds(lambda x: x + 1, x, donate=True)
    return found


def seconds(
    function: Callable[[Any], Any], x: Any, *, repeat: int = 7, donate: bool = False
) -> float:
    """The median time of a compiled function that is fed its own result."""
    compiled = jax.jit(function, donate_argnums=(0,) if donate else ())
    x = jax.block_until_ready(compiled(x))
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        x = jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def tuned_malloc() -> dict[str, str]:
    """Variables with which glibc keeps large blocks, on huge pages.

    By default torch gets every temporary as fresh pages, which Linux zeroes: half a
    million page faults in a step of nanochat's optimizer on GPT-2 124M.
    """
    keep = str(2**34)
    return {
        "MALLOC_MMAP_THRESHOLD_": keep,
        "MALLOC_TRIM_THRESHOLD_": keep,
        "MALLOC_TOP_PAD_": str(2**26),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


if __name__ == "__main__":
    print(describe("benchmarks.machine", sys.argv[1:]), peaks(1024))
