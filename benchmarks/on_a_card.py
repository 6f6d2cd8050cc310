"""Everything that only a GPU can say, in eight minutes.

    python3 -m benchmarks.on_a_card --out FOLDER
    python3 -m benchmarks.on_a_card --parts steps --old CHECKOUT --out FOLDER
    python -m benchmarks.on_a_card --tiny --out FOLDER        on a CPU

From the root of the repository. JAX and optax must be installed; without PyTorch, what
compares with it is left out.

Parts run side by side, each in its process. Those that time something compile, and wait
for the end of the others; then they go on one after another:

- self-test, parity, factors, recipes: what must be right. Parity with PyTorch, polar
  factors in float64, recipes on the card and on the CPU.
- learn: `benchmarks.learn`.
- kernels: each alone, beside plain products.
- steps: every contender is timed twice, and ours is profiled. Those of a group hold
  their memory together.

Each result is printed and written as it comes, as a line of FOLDER/results.jsonl. What
does not end within its seconds is ended, and no part takes another one along.
"""

import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import program
from benchmarks.learn import RUNS, Run, train
from benchmarks.parameters import model_parameters
from benchmarks.step import (
    RECIPES,
    TF32,
    TORCH,
    Contender,
    Worker,
    folder,
    make_step,
    polar,
    random_like,
    running,
)
from jax_muon.polar.coefficients import polar_express_coefficients
from jax_muon.polar.products import Products, outer

GRACE = 10.0  # seconds after which a process that has no time left is ended
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
    "--format=csv,noheader",
)
Found = dict[str, Any]


class Record:
    """A file of results, one a line, written after each of them."""

    def __init__(self, path: pathlib.Path, seconds: float):
        """Append to a file; no measurement begins later than in so many seconds."""
        self.path, self.began = path, time.monotonic()
        self.deadline = self.began + seconds

    def say(self, what: str, **found: Any) -> None:
        """Write and print a result."""
        line = json.dumps({"what": what, **found, "t": self.seconds()})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        words = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in found.items()
        )
        print(f"[{self.seconds():5.1f} s] {what}: {', '.join(words)[:500]}", flush=True)

    def seconds(self) -> float:
        """Since the beginning."""
        return round(time.monotonic() - self.began, 1)

    def measure(self, what: str, function: Callable[..., Found], *args: Any) -> None:
        """Call a function, and keep what it returns, or why it did not."""
        began = time.monotonic()
        try:
            if began > self.deadline:
                raise TimeoutError("no time left")
            found = function(*args) or {}
        except (ImportError, TimeoutError) as error:
            found = {"skipped": str(error)}
        # A measurement that cannot be made must not take the others along.
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        self.say(what, **found, took=round(time.monotonic() - began, 1))


def on_a_gpu() -> bool:
    """True where kernels can run."""
    return jax.default_backend() == "gpu"


# ---- Is it right? "ok" is the verdict, and "bar" the largest error that passes


def recipes(record: Record, args: Any) -> None:
    """Every recipe on the card and on the CPU, first one with large matrices."""
    small = "tiny" if args.tiny else "6x384"
    cases = [(small if args.tiny else "gpt2-124m", "nanochat", "bfloat16")]
    cases += [(small, name, x) for x in ("float32", "bfloat16") for name in RECIPES]
    for model, name, dtype in cases[: 1 if args.tiny else None]:
        record.measure(
            f"card and CPU, {model} {name}, {dtype}", both, model, name, dtype
        )


def both(model: str, name: str, dtype: str) -> Found:
    """Two steps from the same numbers: how far apart they end, relatively.

    Where an update is nearly zero, rounding decides its sign, and with cautious decay
    whether the parameter decays: of (6, 1536, 384) for 28 elements, apart by 1.3e-4 of
    the movement, all others by 8e-6. So one element in 100,000 is left out.
    """
    shapes = model_parameters(model, jnp.float32, scanned=True)
    init, step = make_step(Contender(name, dtype=dtype), shapes)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):  # drawn once: generators differ in the last bit
        start, *grads = (jax.device_get(random_like(shapes, seed)) for seed in range(3))
    ends = []
    for device in (jax.devices()[0], cpu):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            params, state = start, jax.jit(init)(start)
            for grad in grads:
                params, state = jax.jit(step)(params, state, grad)
        ends.append(jax.device_get(params))

    def apart(a: Any, b: Any, before: Any) -> float:
        sizes = np.sort(np.abs(a - b), axis=None)
        kept = sizes[: sizes.size - sizes.size // 100_000]
        return float(np.linalg.norm(kept) / np.linalg.norm(b - before))

    error = max(jax.tree.leaves(jax.tree.map(apart, *ends, start)))
    bar = {"float32": 3e-5, "bfloat16": 0.08}[dtype]
    return {"ok": error <= bar, "error": error, "bar": bar}


def factors(record: Record, args: Any) -> None:
    """Each kernel alone, then polar factors, with kernels and without."""
    large = ((2, 768, 3072), (2, 3072, 768), (2, 1000, 1400), (1, 2048, 2048))
    for shape in ((2, 16, 48),) if args.tiny else large:
        for name, function in products().items():
            record.measure(f"{name} {shape}", product, name, shape, function)
        for dtype, kernels in (
            ("bfloat16", True),
            ("bfloat16", False),
            ("float32", None),
        ):
            contender = Contender("nanochat", dtype=dtype, kernels=kernels)
            what = f"polar factor {shape}, {contender}"
            record.measure(what, factor, shape, contender)


QUINTIC = 3.5, -2.5, -0.2  # any; it is an operand of the kernel


def products() -> dict[str, Callable[[jax.Array], jax.Array]]:
    """The kernels for symmetric products of bfloat16 matrices, by name."""
    from jax_muon.polar.hopper.kernel import HopperProducts

    wide, tall = HopperProducts(), HopperProducts(tall=True)
    return {
        "gram": wide.gram,
        "gram, tall": lambda x: tall.gram(x.mT),
        "polynomial": lambda r: wide.polynomial(r, QUINTIC),
    }


def product(name: str, shape: tuple[int, ...], kernel: Callable[..., Any]) -> Found:
    """The largest error of a product in units of what rounding allows.

    Sums of n terms in float32, in any order and cut off instead of rounded, are off by
    n 2^-23 times the sum of magnitudes; the reference, in float32, too.
    """
    if not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    x = jax.random.normal(jax.random.key(0), shape) / shape[-1] ** 0.5
    x = (outer(x, x) if name == "polynomial" else x).astype(jnp.bfloat16)
    found = jax.jit(kernel)(x)
    wide = x.astype(jnp.float32)
    exact, magnitudes = outer(wide, wide), outer(jnp.abs(wide), jnp.abs(wide))
    if name == "polynomial":
        (a, b, q), unit = QUINTIC, jnp.eye(shape[1])
        exact = a * unit + b * (wide + q * exact)
        magnitudes = a * unit + abs(b) * (jnp.abs(wide) + abs(q) * magnitudes)
    info = jnp.finfo(found.dtype)
    allowed = 2 * (x.shape[-1] + 3) * 2.0**-23 * magnitudes + float(info.tiny)
    allowed += float(info.eps) * jnp.abs(exact)
    error = float(jnp.max(jnp.abs(found.astype(jnp.float32) - exact) / allowed))
    symmetric = bool(jnp.array_equal(found, found.mT))
    return {"ok": error <= 1 and symmetric, "error": error, "symmetric": symmetric}


def factor(shape: tuple[int, ...], contender: Contender) -> Found:
    """Five steps on Gaussian matrices against the same polynomials in float64.

    The worst row shows a tile that is wrong. Plain bfloat16 code is 0.04 away.
    """
    if contender.kernels and not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y = np.asarray(jax.jit(polar(contender))(jnp.asarray(x)), np.float64)
    exact = x.astype(np.float64)
    exact /= 1.02 * np.linalg.norm(exact, axis=(-2, -1), keepdims=True) + 1e-6
    for a, b, c in polar_express_coefficients(5):
        gram = exact @ exact.swapaxes(-1, -2)
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    apart, rows = np.linalg.norm(y - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    error = float(np.linalg.norm(apart) / np.linalg.norm(rows))
    bar = {"float32": 5e-5, "bfloat16": 0.06}[contender.dtype]
    worst = float(np.max(apart / rows))
    return {"ok": worst <= 2 * bar, "error": error, "worst_row": worst, "bar": bar}


def kernels(record: Record, args: Any) -> None:
    """Microseconds of each kernel, and of plain products."""
    from jax_muon.polar.hopper.kernel import HopperProducts

    shapes = [(48, 384, 384), (12, 384, 1536), (48, 512, 512), (12, 512, 2048)]
    shapes += [(1, 768, 768), (12, 768, 768), (48, 768, 768), (12, 768, 3072)]
    shapes += [(12, 3072, 768), (24, 1024, 1024), (24, 1024, 4096)]
    shapes += [(24, 2048, 2048), (96, 2048, 2048), (24, 2048, 8192), (24, 8192, 2048)]
    cases = [(shape, False) for shape in shapes]
    cases += [(shape, True) for shape in shapes if shape[1] == shape[2]]

    def compiled(case: tuple[tuple[int, ...], bool]) -> dict[str, Any]:
        shape, is_polynomial = case
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        tall = shape[1] > shape[2]

        def program(products: Products) -> Any:
            polynomial = functools.partial(products.polynomial, quintic=QUINTIC)
            function = polynomial if is_polynomial else products.gram
            return repeated(function).lower(x).compile()

        return {
            "us": program(HopperProducts(tall)),
            "plain_us": program(Products(tall)),
        }

    if not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(compiled, cases))
    sys.stdin.read()  # until what runs beside it has ended
    for (shape, is_polynomial), some in zip(cases, programs, strict=True):
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        taken: dict[str, list[float]] = {k: [] for k in some}
        for turn in range(4):
            for k, f in some.items():
                began = time.perf_counter()
                jax.block_until_ready(f(x))
                if turn:
                    us = 1e6 * (time.perf_counter() - began) / REPEATED
                    taken[k].append(round(us, 1))
        record.say(f"{'polynomial' if is_polynomial else 'gram'} {shape}", **taken)


REPEATED = 50


def repeated(function: Callable[[jax.Array], jax.Array]) -> Any:
    """So many calls in a row of a function that keeps the dtype."""

    def run(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, _: jax.Array) -> jax.Array:
            # A barrier: otherwise XLA would move what is the same out of the loop.
            return function(jax.lax.optimization_barrier((x, i))[0])

        first = jax.eval_shape(function, x)
        return jax.lax.fori_loop(0, REPEATED, body, jnp.zeros(first.shape, first.dtype))

    return jax.jit(run)


def parity(record: Record, args: Any) -> None:
    """Every recipe against PyTorch, whose side runs on the CPU, without TF32."""
    import torch

    from parity import compare, problems

    def single(name: str) -> Found:
        """Ten steps in float32 with moving rates."""
        recipe, rates = problems.RECIPES[name], problems.MOVING
        grads = problems.gradients("gaussian", 10)
        ours = compare.runner(recipe.ours(rates, "float32"), "float32")(grads)
        check = compare.check(recipe, "gaussian", "float32", ours, grads, rates)
        return {"ok": check.state != "FAIL", "error": check.error, "bar": check.bar}

    def half(name: str) -> Found:
        """Steps in bfloat16: their distance to the reference in float64.

        It may be twice that of the reference in bfloat16.
        """
        found = compare.spread(name)
        ours, bar = found.ours_exact, 2 * found.reference_exact
        between = max(found.variants.values())
        return {"ok": ours <= bar, "error": ours, "bar": bar, "between_torch": between}

    torch.set_num_threads(1)  # matrices are small
    for name in list(problems.RECIPES)[: 1 if args.tiny else None]:
        record.measure(f"parity, {name}, float32", single, name)
        if name in compare.SPREAD and not args.tiny:
            record.measure(f"parity, {name}, bfloat16", half, name)


def self_test(record: Record, args: Any) -> None:
    """`python -m jax_muon`."""

    def verdict() -> Found:
        command = [sys.executable, "-m", "jax_muon"]
        ended = subprocess.run(command, capture_output=True, text=True)
        return {"ok": ended.returncode == 0, "says": ended.stdout[-300:]}

    record.measure("python -m jax_muon", verdict)


# ---- How long does it take?


def groups(tiny: bool, old: list[str]) -> list[tuple[str, list[Contender]]]:
    """Models and contenders: a group is on the card together, 80 GB at most."""
    low = "bfloat16"
    ours = [Contender("nanochat", dtype=low, checkout=x) for x in ("", *old)]
    has_torch = importlib.util.find_spec("torch") is not None
    torch = [Contender(TORCH, dtype=low)] if has_torch else []
    theirs = [Contender("optax", dtype=x) for x in (low, TF32)]
    theirs.append(Contender("adamw"))
    if tiny:
        return [("tiny", [*ours, *torch, theirs[-1]])]
    plain = [Contender("nanochat", dtype=low, kernels=False)]
    separate = [Contender(name, "separate", low) for name in ("nanochat", "optax")]
    return [
        ("gpt2-124m", [*ours, *torch, *theirs, *separate, *plain]),
        *(("gpt-1.3b", ours[i : i + 3]) for i in range(0, len(ours), 3)),
        ("gpt-1.3b", [*torch, *plain]),
        ("gpt-1.3b", theirs),
    ]


def steps(record: Record, args: Any) -> None:
    """Compile all, then time one after another, group after group."""
    device = "cuda" if on_a_gpu() else "cpu"
    with contextlib.ExitStack() as stack:
        waiting = [
            (model, [stack.enter_context(running(x, model, device)) for x in some])
            for model, some in groups(args.tiny, [str(x) for x in args.old])
        ]

        def measure(model: str, worker: Worker, what: str, *asked: str) -> None:
            ask = worker.ask if asked else lambda: worker.info
            record.measure(f"{model} {worker.contender}, {what}", ask, *asked)

        for model, workers in waiting:
            for worker in workers:
                measure(model, worker, "compiled")
        sys.stdin.read()  # until what runs beside it has ended
        record.measure("the card itself", card, 64 if args.tiny else 8192)
        for model, workers in waiting:
            for turn in (1, 2):
                for worker in workers:
                    measure(model, worker, f"turn {turn}", "timing")
            for worker in workers:
                if worker.contender.name == "nanochat":
                    measure(model, worker, "profile", "profile")
                worker.process.kill()
                worker.process.wait()  # and its memory is free


def learn(record: Record, args: Any) -> None:
    """See `benchmarks.learn`."""
    train(record.say, record.deadline, args.runs, args.tiny)


def card(size: int) -> Found:
    """What it reaches in a bfloat16 product of square matrices, and in a copy."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)

    def rate(function: Callable[..., jax.Array], each: float) -> float:
        compiled = jax.jit(function).lower(x).compile()
        jax.block_until_ready([compiled(x) for _ in range(20)])
        began = time.perf_counter()
        jax.block_until_ready([compiled(x) for _ in range(20)])
        return 20 * each / (time.perf_counter() - began)

    product = rate(lambda x: x @ x, 2 * size**3)
    return {
        "flops_per_s": product,
        "copied_bytes_per_s": rate(lambda x: x + 1, 4 * size**2),
    }


# ---- The command

# For how many seconds each part may run. Those that wait stand first: the input of a
# part ends when the parts behind it have ended.
PARTS: dict[str, tuple[float, Callable[[Record, Any], None]]] = {
    "steps": (460, steps),
    "kernels": (400, kernels),
    "learn": (325, learn),
    "recipes": (240, recipes),
    "factors": (240, factors),
    "parity": (240, parity),
    "self-test": (240, self_test),
}


@contextlib.contextmanager
def part(name: str, words: list[str], record: Record) -> Iterator[None]:
    """A process that is waited for, and ended when time is out, with all it started."""
    command = [sys.executable, "-m", "benchmarks.on_a_card", *words, "--only", name]
    if name != "learn":  # which would wait for all the others' compilers
        command = ["nice", *command]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    status: Any = "ended, no time left"
    try:
        yield
        # It stops by itself in time, unless one measurement takes too long.
        left = record.began + PARTS[name][0] + GRACE - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=max(1, left))
            status = process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status != 0:
        record.say(name, failed=status)


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.on_a_card", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--out", type=pathlib.Path, required=True, help="folder for results")
    add("--old", type=folder, nargs="+", default=[], help="checkouts to time as well")
    add("--runs", type=Run.parse, nargs="+", default=RUNS, help="of benchmarks.learn")
    add("--tiny", action="store_true", help="small sizes, to try the program")
    add("--only", choices=PARTS, help="in this process, as the program runs it")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    if args.only is not None:
        seconds, function = PARTS[args.only]
        record = Record(path, seconds)
        record.measure(args.only, function, record, args)
        return
    # Both, so that a process can compare them; none takes all of the card's memory.
    os.environ["JAX_PLATFORMS"] = "cpu" if args.tiny else "cuda,cpu"
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    run = program.describe("benchmarks.on_a_card", words)
    with contextlib.suppress(FileNotFoundError):
        run["card"] = subprocess.check_output(NVIDIA_SMI, text=True).strip()
    record = Record(path, math.inf)
    record.say("run", run=run)
    with contextlib.ExitStack() as stack:
        for name in PARTS:
            if name in args.parts:
                stack.enter_context(part(name, words, record))


if __name__ == "__main__":
    main(sys.argv[1:])
