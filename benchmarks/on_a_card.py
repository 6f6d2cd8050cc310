"""Everything that can be known only on a GPU: correctness first, then times.

    python3 -m benchmarks.on_a_card --tasks kernels parity polar --out FOLDER
    python3 -m benchmarks.on_a_card --tasks steps train --out FOLDER
    python -m benchmarks.on_a_card --tiny --out FOLDER      # all of it on a CPU

From the root of the repository; each call ends within ten minutes. JAX and optax must
be there, what needs anything else that is missing is skipped with a line that says so.
Each task runs in a process of its own, so that one that hangs or breaks the card's
context loses no other. Each measurement is printed and written as it ends, into
FOLDER/TASK.json; what does not fit into `--seconds` is skipped.
"""

import contextlib
import functools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_muon as jm
from benchmarks import program
from benchmarks.gpt import loss
from benchmarks.parameters import model_parameters, nominal_flops, quintics_flops
from benchmarks.step import TORCH, Contender, make_step, random_like, running
from jax_muon.polar.coefficients import polar_express_coefficients
from jax_muon.polar.products import outer

# Seconds: beyond which a task is ended, and below which none is worth starting.
GRACE, LEAST = 10.0, 20.0
KERNEL_SHAPES = ((2, 768, 768), (2, 768, 3072), (2, 1000, 3000), (1, 2048, 2048))
FACTORS = (-2.5, 0.5)  # any; they are an operand of the kernel
# For an H200: square, and wide as an MLP's.
SHAPES = (
    *((m, m) for m in (768, 256, 512, 1024, 2048, 4096, 8192)),
    *((m, 4 * m) for m in (768, 256, 512, 1024, 2048)),
    (4096, 8192),
)
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
    "--format=csv,noheader",
)
TOKENS = 2**19  # of a batch, by which the optimizer's share of a train step is judged
Found = dict[str, Any]


class Record:
    """The results of one task, in a file that is written after each of them."""

    def __init__(self, path: pathlib.Path, deadline: float, run: Found | None = None):
        """No measurement begins after the deadline; `run` says where this is."""
        self.path, self.deadline = path, deadline
        self.content: Found = {"run": run, "rows": []}

    def measure(self, what: str, function: Callable[..., Any], *args: Any) -> Found:
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
        taken = time.monotonic() - began
        self.content["rows"].append({"what": what, **found, "measured_in_s": taken})
        program.save(self.content, self.path)
        words = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in found.items()
        )
        print(f"[{taken:5.1f} s] {what}: {', '.join(words)[:600]}", flush=True)
        return found


def on_a_gpu() -> bool:
    """True where kernels can run."""
    return jax.default_backend() == "gpu"


# ---- Is it right? "ok" is the verdict, and "bar" the largest error that passes


def kernels(record: Record, tiny: bool) -> None:
    """Symmetric products, then five steps of every form."""
    for shape in KERNEL_SHAPES[: 1 if tiny else None]:
        record.measure(f"kernels {shape}", kernels_of, shape)
    for shape in [(2, 16, 48)] if tiny else [(3, 768, 3072), (2, 1000, 520)]:
        for form in forms():
            what = f"polar {shape} {', '.join(form.values())}"
            record.measure(what, polar_of, shape, form)


def kernels_of(shape: tuple[int, int, int]) -> Found:
    """Symmetric products by kernels, as shares of the largest error that passes."""
    if not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    errors = {
        name: product_error(name, shape, kernel) for name, kernel in products().items()
    }
    return {"ok": all(error <= 1 for error in errors.values()), "bar": 1.0} | errors


def products() -> dict[str, Callable[..., Any]]:
    """The kernels for symmetric products of bfloat16 matrices.

    The Gram matrix of the first step is wanted in float32, since the norm is read off.
    """
    from jax_muon.polar import hopper

    return {
        "gram": hopper.gram,
        "gram, float32": functools.partial(hopper.gram, dtype="float32"),
        "quadratic": lambda a, **options: hopper.quadratic(a, *FACTORS, **options),
    }


def product_error(
    name: str, shape: tuple[int, int, int], kernel: Callable[..., Any]
) -> float:
    """The largest error of a product in units of what rounding allows.

    Sums of n terms in float32, in any order and cut off instead of rounded, are off by
    n 2^-23 times the sum of magnitudes; the reference, in float32, too. A product that
    is not symmetric is infinitely far off.

    Args:
      name: one of `products()`.
      shape: of bfloat16 matrices (batch, m, n), of norm near 1; the polynomial gets
        their Gram matrices.
      kernel: the function under test.
    """
    b, c = FACTORS
    x = jax.random.normal(jax.random.key(0), shape) / shape[-1] ** 0.5
    if name == "quadratic":
        x = outer(x, x)
    x = x.astype(jnp.bfloat16)
    found = jax.jit(kernel)(x)
    if not jnp.array_equal(found, found.mT):
        return float("inf")
    wide = x.astype(jnp.float32)
    exact, magnitudes = outer(wide, wide), outer(jnp.abs(wide), jnp.abs(wide))
    if name == "quadratic":
        exact = b * wide + c * exact
        magnitudes = abs(b) * jnp.abs(wide) + abs(c) * magnitudes
    info = jnp.finfo(found.dtype)
    allowed = 2 * (x.shape[-1] + 3) * 2.0**-23 * magnitudes + float(info.tiny)
    allowed += float(info.eps) * jnp.abs(exact)
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - exact) / allowed))


def forms() -> list[dict[str, Any]]:
    """Settings of a polar factor: every dtype and form, and on a GPU the kernels."""
    wide = [{"dtype": "float32", "form": form} for form in ("standard", "gram")]
    kernels = [{"dtype": "bfloat16", "symmetric": "kernel"}] * on_a_gpu()
    return [{"dtype": "bfloat16"}, *wide, *kernels]


def polar_of(shape: tuple[int, ...], form: dict[str, Any]) -> Found:
    """Five steps on Gaussian matrices against the same polynomials in float64.

    Plain bfloat16 code, which rounds every term, is 0.04 away.
    """
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    error = rounding(jax.jit(jm.PolarExpress(**form))(jnp.asarray(x)), x)
    bar = {"float32": 5e-5, "bfloat16": 0.06}[form["dtype"]]
    return {"ok": error <= bar, "error": error, "bar": bar}


def rounding(y: Any, x: np.ndarray) -> float:
    """How far Y is from the five quintics of X (..., m, n) in float64, relatively."""
    exact = x.astype(np.float64)
    exact /= 1.02 * np.linalg.norm(exact, axis=(-2, -1), keepdims=True) + 1e-6
    for a, b, c in polar_express_coefficients(5):
        gram = exact @ exact.swapaxes(-1, -2)
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    apart = np.asarray(y, np.float64) - exact
    return float(np.linalg.norm(apart) / np.linalg.norm(exact))


def parity(record: Record, tiny: bool) -> None:
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
        """Steps in bfloat16, by the distance to the reference in float64.

        It may be twice that of the reference in bfloat16: a GPU rounds the sums of a
        product as PyTorch does, and every term where XLA does not use cuBLASLt.
        """
        found = compare.spread(name)
        ours, bar = found.ours_exact, 2 * found.reference_exact
        between = max(found.variants.values())
        return {"ok": ours <= bar, "error": ours, "bar": bar, "between_torch": between}

    torch.set_num_threads(1)  # matrices are small
    for name in list(problems.RECIPES)[: 2 if tiny else None]:
        record.measure(f"{name}, float32", single, name)
        if name in compare.SPREAD:
            record.measure(f"{name}, bfloat16", half, name)


# ---- How long does it take?


def steps(record: Record, tiny: bool) -> None:
    """Every recipe, optax and PyTorch; what docs/speed.md compares stands first."""
    low = "bfloat16"
    first = (
        ("nanochat", "scanned", low),
        ("optax", "scanned", "default"),
        *((name, "scanned", low) for name in ("orthogonalize", *TORCH)),
    )
    rest = (
        ("adamw",),
        ("nanochat", "separate", low),
        ("optax", "separate", "default"),
        ("nanochat", "scanned", low, "default", True),  # cuBLASLt alone
        *((name, "scanned", low) for name in ("muon", "moonlight", "normuon")),
        ("nanochat",),
        ("optax",),
    )
    models = ["tiny"] if tiny else ["gpt2-124m", "gpt-1.3b", "gpt2-350m"]
    cases = [(model, one) for model in models for one in first]
    for model, one in cases + [(model, one) for one in rest for model in models]:
        contender = Contender(*one)
        left = min(120.0, record.deadline - time.monotonic())
        record.measure(f"{model} {contender}", step_of, model, contender, left)


def step_of(model: str, contender: Contender, timeout: float) -> Found:
    """Seconds of a step, the median of several; `timeout` seconds to compile."""
    device = "cuda" if on_a_gpu() else "cpu"
    with running(contender, model, device, timeout) as worker:
        taken = [worker.step() for _ in range(20 if device == "cuda" else 3)]
        found = {"seconds": statistics.median(taken), "least": min(taken)}
        if contender.name == "orthogonalize":
            found["nominal_flops_per_s"] = nominal_flops(model) / found["seconds"]
        return found | worker.info


def orthogonalization(record: Record, tiny: bool) -> None:
    """Five steps in every form on every shape."""
    ways: list[tuple[str, Found, Found]] = [("", form, {}) for form in forms()]
    if on_a_gpu():  # without Triton's products, which XLA takes where they are faster
        cublas = {"xla_gpu_enable_triton_gemm": False}
        ways.append(("cuBLASLt ", {"dtype": "bfloat16"}, cublas))
    for m, n in ((32, 32), (32, 64)) if tiny else SHAPES:
        for name, form, options in ways:
            what = f"{m}x{n} {name}{', '.join(form.values())}"
            record.measure(what, form_of, form, m, n, options)


def form_of(form: dict[str, Any], m: int, n: int, options: Found) -> Found:
    """Seconds and FLOP/s of one matrix of a stack."""
    count = min(24, max(1, 2**28 // (4 * m * n))) if on_a_gpu() else 2
    x = jax.random.normal(jax.random.key(0), (count, m, n))
    rounds = 5 if on_a_gpu() else 1
    found = timed(jm.PolarExpress(**form), x, rounds, options)
    rate = quintics_flops(m, n) / found
    return {"stack": count, "seconds": found, "nominal_flops_per_s": rate}


def timed(function: Any, x: jax.Array, rounds: int, options: Found) -> float:
    """The median seconds for a matrix of the stack; `options` are XLA's.

    Its input is donated, as it is a temporary in an optimizer.
    """
    lowered = jax.jit(function, donate_argnums=(0,)).lower(x)
    compiled = lowered.compile(compiler_options=options)
    taken = []
    for _ in range(rounds + 1):
        y = jax.block_until_ready(jnp.array(x))
        began = time.perf_counter()
        jax.block_until_ready(compiled(y))
        taken.append((time.perf_counter() - began) / len(x))
    return statistics.median(taken[1:])


def train(record: Record, tiny: bool) -> None:
    """GPT-2 124M in bfloat16, float32 masters; the optimizer's share of a batch."""
    model, head, batch = (
        ("tiny", 16, (2, 33)) if tiny else ("gpt2-124m", 64, (32, 1025))
    )
    shapes = model_parameters(model, jnp.float32, scanned=True)
    tokens = jax.random.randint(jax.random.key(2), batch, 0, shapes["wte"].shape[0])
    count = batch[0] * (batch[1] - 1)

    base: dict[str, float] = {}  # seconds without an optimizer

    def timed(name: str, dtype: str, attention: str) -> Found:
        """The median time of a whole step."""
        init, update = make_step(name, dtype, shapes)

        def of_masters(params: Any) -> Any:
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            how = {"head": head, "attention": attention, "rematerialize": False}
            return loss(low, tokens, **how)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any) -> Any:
            value, grads = jax.value_and_grad(of_masters)(params)
            return *update(params, state, grads), value

        params = random_like(shapes, 0)
        state = jax.jit(init)(params)
        values, taken = [], []
        for _ in range(12 if on_a_gpu() else 3):
            began = time.perf_counter()
            params, state, value = jax.block_until_ready(step(params, state))
            values.append(float(value))
            taken.append(time.perf_counter() - began)
        seconds = statistics.median(taken[1:])
        rate, ends = count / seconds, values[:: len(values) - 1]
        found = {"seconds": seconds, "tokens_per_s": rate, "losses": ends}
        if name == "gradients":
            base[attention] = seconds
        elif attention in base:
            found["optimizer_seconds"] = own = seconds - base[attention]
            whole = own + base[attention] * TOKENS / count
            found["share_of_2**19_tokens"] = own / whole
        return found

    for attention in ("cudnn", "xla") if on_a_gpu() else ("xla",):
        what = f"gradients, {attention}"
        record.measure(what, timed, "gradients", "", attention)
    attention = next(iter(base), "xla")
    for name in ("nanochat", "adamw", "optax", "muon"):
        dtype = "bfloat16" if name in ("nanochat", "muon") else "default"
        record.measure(f"{name}, {attention}", timed, name, dtype, attention)


# ---- The command

# Name: the seconds that it may take, and the function; in the order of their worth.
TASKS: dict[str, tuple[float, Callable[[Record, bool], None]]] = {
    "kernels": (90, kernels),
    "parity": (200, parity),
    "polar": (200, orthogonalization),
    "steps": (360, steps),
    "train": (240, train),
}


def run_task(name: str, words: list[str], seconds: float) -> str:
    """Run a task in a process, end it and all that it started in time, and say how."""
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*words, "--only", name, "--seconds", f"{seconds:.0f}"],
        env=os.environ | shared,
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


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.on_a_card", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--out", type=pathlib.Path, required=True, help="folder for results")
    add("--seconds", type=float, default=540, help="for all that is asked for")
    add("--tiny", action="store_true", help="small sizes, to try the program")
    add("--only", choices=TASKS, help="a task in this process, as the program runs it")
    args = parser.parse_args(words)
    began = time.monotonic()
    if args.only is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        run = program.describe("benchmarks.on_a_card", words)
        with contextlib.suppress(FileNotFoundError):
            run["nvidia_smi"] = subprocess.check_output(NVIDIA_SMI, text=True).strip()
        record = Record(args.out / f"{args.only}.json", began + args.seconds, run)
        record.measure(args.only, TASKS[args.only][1], record, args.tiny)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu" if args.tiny else "cuda")
    command = [sys.executable, "-m", "benchmarks.on_a_card", *words]
    for name, (most, _) in TASKS.items():
        if name in args.tasks:
            left = args.seconds - (time.monotonic() - began)
            print(f"== {name}: {left:.0f} s left", flush=True)
            ended = "skipped, no time left"
            if left >= LEAST:
                ended = run_task(name, command, min(left - GRACE, most))
            print(f"== {name}: {ended}", flush=True)
    print(f"== {time.monotonic() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
