"""The machine: its name, how fast it multiplies and copies, and its packages."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "optax", "torch", "numpy")


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
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = {
            line.split(":")[1].strip()
            for line in lines
            if line.startswith("model name")
        }
    return ", ".join(sorted(names)) or platform.processor()


def peaks(
    size: int, dtypes: Sequence[str] = ("float32", "bfloat16"), *, calls: int = 1
) -> dict[str, float]:
    """FLOP/s of the product of two square matrices, and bytes/s of a copy.

    Args:
      size: of the matrices.
      dtypes: of which a product is measured.
      calls: how many are sent at once: on an accelerator several, so that it never
        waits for the host.
    """
    found = {}
    for dtype in dtypes:
        # Of norm near 2, so that the result can be multiplied again.
        x = jax.random.normal(jax.random.key(0), (size, size)) * size**-0.5
        x = x.astype(dtype)
        # A CPU multiplies in bfloat16 only where the result is float32.
        wide = jnp.float32 if jax.default_backend() == "cpu" else dtype

        def product(y: Any, x: Any, wide: Any = wide) -> Any:
            z = jnp.matmul(x, y, precision="highest", preferred_element_type=wide)
            return z.astype(x.dtype)

        taken = seconds(product, x, x, calls=calls)
        found[f"{dtype}_flops"] = 2 * size**3 / taken
    x = jnp.ones((2**26,), jnp.float32)  # 256 MB, more than any cache
    taken = seconds(lambda x: x + 1, x, donate=True, calls=calls)
    found["copy_bytes"] = 2 * x.nbytes / taken
    return found


def seconds(
    function: Callable[..., Any],
    x: Any,
    *operands: Any,
    repeat: int = 7,
    donate: bool = False,
    calls: int = 1,
) -> float:
    """The median time of a compiled function of x that is fed its own result."""
    compiled = jax.jit(function, donate_argnums=(0,) if donate else ())
    x = jax.block_until_ready(compiled(x, *operands))
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(calls):
            x = compiled(x, *operands)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - began) / calls)
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
