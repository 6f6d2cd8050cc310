"""Everything that can be known only on a GPU, in two calls of under ten minutes each.

    python3 -m benchmarks.on_a_card --part 1 2 4 --out FOLDER
    python3 -m benchmarks.on_a_card --part 3 5 --out FOLDER
    python -m benchmarks.on_a_card --tiny --out FOLDER      # all of it on a CPU

From the root of the repository; JAX, PyTorch and optax must be there, the rest may be
missing. Part 1 is correctness, 2 the card's peaks, 3 the time of optimizer steps, 4
orthogonalization alone, 5 GPT-2 124M's train step. Each task runs in a process of its
own, so that one that hangs or breaks the card's context loses no other. Each
measurement is printed and written as it ends; what does not fit into `--seconds` is
skipped with a line that says so.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_muon as jm
from benchmarks import machine, polar
from benchmarks.contenders import make_step, random_like
from benchmarks.flops import nominal_flops
from benchmarks.gpt import loss
from benchmarks.parameters import model_parameters
from benchmarks.step import Contender, running

# Seconds: beyond which a task is ended, and below which none is worth starting.
GRACE, LEAST = 10.0, 20.0
STEPS = 10  # of parity, float32, with moving rates
KERNEL_SHAPES = ((2, 768, 768), (2, 768, 3072), (2, 1000, 3000), (1, 2048, 2048))
# For an H200: square, and wide as an MLP's; stacks are as deep as `polar.depth` says.
SHAPES = (
    *((m, m) for m in (768, 256, 512, 1024, 2048, 4096, 8192)),
    *((m, 4 * m) for m in (768, 256, 512, 1024, 2048)),
    (4096, 8192),
)
TOKENS = 2**19  # of a batch, by which the optimizer's share of a train step is judged
Found = dict[str, Any]


class Record:
    """The results of one part, in a file that is written after each of them."""

    def __init__(self, path: pathlib.Path, task: str, deadline: float):
        """Read what other tasks of the part left; begin nothing after the deadline."""
        self.path, self.task, self.deadline = path, task, deadline
        self.content: Found = {"runs": {}, "rows": []}
        if path.exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))

    def measure(self, what: str, function: Callable[..., Found], *args: Any) -> Found:
        """Call a function, and keep what it returns, or why it did not."""
        began = time.monotonic()
        try:
            if began > self.deadline:
                raise ImportError("no time left")
            found = function(*args)
        except ImportError as error:
            found = {"skipped": str(error)}
        # A measurement that cannot be made must not take the others along.
        except (Exception, SystemExit) as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        taken = time.monotonic() - began
        row = {"task": self.task, "what": what, **found, "measured_in_s": taken}
        self.content["rows"].append(row)
        self.write()
        words = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in found.items()
        )
        print(f"[{taken:5.1f} s] {what}: {', '.join(words)[:600]}", flush=True)
        return found

    def write(self) -> None:
        """Write the file, whole or not at all."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def on_a_gpu() -> bool:
    """True where kernels can run."""
    return jax.default_backend() == "gpu"


# ---- Part 1: is it right? "ok" is the verdict, and "bar" the largest error that passes


def kernels(record: Record, tiny: bool) -> None:
    """Symmetric products, then five steps of every form."""
    for shape in KERNEL_SHAPES[: 1 if tiny else None]:
        record.measure(f"kernels {shape}", kernels_of, shape)
    for shape in [(2, 16, 48)] if tiny else [(3, 768, 3072), (2, 1000, 520)]:
        for form in forms():
            what = f"polar {shape} {', '.join(form.values())}"
            record.measure(what, polar_of, shape, form)


def kernels_of(shape: tuple[int, int, int]) -> Found:
    """Symmetric products by kernels against plain ones in float32.

    As a share of the bound that `symmetric_kernel.check` derives; it raises above 1.
    """
    from benchmarks import symmetric_kernel
    from jax_muon.polar.hopper.kernel import TILING

    if not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    found = {
        product.name: symmetric_kernel.check(
            product, TILING, symmetric_kernel.operand(product)
        )
        for product in symmetric_kernel.products([shape])
    }
    return {"ok": True, "bar": 1.0, **found}


def forms() -> list[dict[str, str]]:
    """Settings of a polar factor: every dtype and form, and on a GPU the kernels."""
    found = [
        {"dtype": "bfloat16"},
        {"dtype": "float32", "form": "standard"},
        {"dtype": "float32", "form": "gram"},
    ]
    return found + [{"dtype": "bfloat16", "symmetric": "kernel"}] * on_a_gpu()


def polar_of(shape: tuple[int, ...], form: dict[str, str]) -> Found:
    """Five steps on Gaussian matrices against the same polynomials in float64.

    Plain bfloat16 code, which rounds every term, is 0.04 away.
    """
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    factor: Any = jm.PolarExpress(**form)  # type: ignore[arg-type]
    error = polar.rounding(jax.jit(factor)(jnp.asarray(x)), x)
    bar = {"float32": 5e-5, "bfloat16": 0.06}[form["dtype"]]
    return {"ok": error <= bar, "error": error, "bar": bar}


def parity(record: Record, tiny: bool) -> None:
    """Every recipe against PyTorch, whose side runs on the CPU, without TF32."""
    import torch

    from parity import problems, spread

    torch.set_num_threads(1)  # matrices are small
    for name in list(problems.RECIPES)[: 2 if tiny else None]:
        record.measure(f"{name}, float32", parity_of, name)
        if name in spread.RECIPES:
            record.measure(f"{name}, bfloat16", low_precision_parity_of, name)


def parity_of(name: str) -> Found:
    """A recipe against its PyTorch reference, float32, with moving rates."""
    from parity import compare, problems

    recipe, rates = problems.RECIPES[name], problems.MOVING
    tx = recipe.ours(problems.jax_rates(rates, "float32"), "float32")
    grads = problems.gradients("gaussian", STEPS)
    ours = compare.runner(tx, "float32")(grads)
    check, _ = compare.check(recipe, "gaussian", "float32", ours, grads, rates)
    return {"ok": check.state != "FAIL", "error": check.error, "bar": check.bar}


def low_precision_parity_of(name: str) -> Found:
    """A recipe in bfloat16, by its distance to the reference in float64.

    It may be twice as far as the reference in bfloat16: a GPU rounds the sums of a
    product as PyTorch does, and where XLA takes no cuBLASLt every term.
    """
    from parity import spread

    found = spread.measure(name)
    error, bar = found.ours_exact, 2 * found.reference_exact
    between = max(found.variants.values())
    return {"ok": error <= bar, "error": error, "bar": bar, "between_torch": between}


# ---- Part 2: what could be reached?


def peaks(record: Record, tiny: bool) -> None:
    """Products and a copy: what shares of a peak refer to."""
    for dtype in ("bfloat16", "float16", "float32"):
        size = (128 if tiny else 8192) // (2 if dtype == "float32" else 1)
        record.measure(f"peaks {dtype} {size}", peaks_of, size, dtype)


def peaks_of(size: int, dtype: str) -> Found:
    """FLOP/s and bytes/s, of 20 calls sent at once to a GPU."""
    return machine.peaks(size, [dtype], calls=20 if on_a_gpu() else 1)


# ---- Part 3: optimizer steps


def steps(record: Record, tiny: bool) -> None:
    """Every recipe, optax and PyTorch; the contenders that goals name stand first."""
    peak = record.measure("peaks", peaks_of, 128 if tiny else 8192, "bfloat16")
    make = functools.partial(Contender, in_train_step=False)
    bfloat16 = functools.partial(make, dtype="bfloat16")
    first = [
        bfloat16("nanochat"),
        make("optax", dtype="default"),
        bfloat16("orthogonalize"),
        bfloat16("torch-nanochat"),
        bfloat16("torch-muon"),
    ]
    rest = [
        make("adamw"),
        bfloat16("nanochat", "separate"),
        make("optax", "separate", "default"),
        bfloat16("nanochat", cublas=True),
        *(bfloat16(name) for name in ("muon", "moonlight", "normuon")),
        make("nanochat"),
        make("optax"),
    ]
    models = ["tiny"] if tiny else ["gpt2-124m", "gpt-1.3b", "gpt2-350m"]
    found: dict[tuple[str, str], float] = {}

    def measure(model: str, contender: Contender) -> None:
        left = min(120.0, record.deadline - time.monotonic())
        result = record.measure(f"{model} {contender}", step_of, model, contender, left)
        found[model, str(contender)] = result.get("seconds", math.nan)

    for model in models:
        for contender in first:
            measure(model, contender)
        record.measure(f"{model} shares", shares, model, found, peak)
    for contender in rest:
        for model in models:
            measure(model, contender)


def step_of(model: str, contender: Contender, timeout: float) -> Found:
    """Seconds of a step, the median of several; `timeout` seconds to compile."""
    device = "cuda" if on_a_gpu() else "cpu"
    with running(contender, model, device, timeout) as worker:
        taken = [worker.step() for _ in range(20 if device == "cuda" else 3)]
        return {"seconds": statistics.median(taken), "least": min(taken), **worker.info}


def shares(model: str, found: dict[tuple[str, str], float], peak: Found) -> Found:
    """Ours over theirs, and what of the card's peaks the parts of our step reach.

    The rest of a step is all but orthogonalization. It reads gradients, and reads and
    writes parameters and state, once at least; in float32.
    """

    def seconds(*words: str) -> float:
        return found.get((model, ", ".join(words)), math.nan)

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    ours = seconds("nanochat", "bfloat16", "scanned")
    polar_seconds = seconds("orthogonalize", "bfloat16", "scanned")
    shapes = model_parameters(model, jnp.float32, scanned=True)
    init, _ = make_step("nanochat", "bfloat16", shapes)
    moved = size(shapes) * 3 + 2 * size(jax.eval_shape(init, shapes))
    rate = nominal_flops(model) / polar_seconds
    rest = moved / (ours - polar_seconds) if ours > polar_seconds else math.nan
    return {
        "to_optax": ours / seconds("optax", "default", "scanned"),
        "to_compiled_nanochat": ours / seconds("torch-nanochat", "bfloat16"),
        "to_torch_muon": ours / seconds("torch-muon", "bfloat16"),
        "orthogonalization_flops": rate,
        "of_peak": rate / peak.get("bfloat16_flops", math.nan),
        "rest_bytes_per_s": rest,
        "rest_of_copy": rest / peak.get("copy_bytes", math.nan),
    }


# ---- Part 4: orthogonalization alone


def orthogonalization(record: Record, tiny: bool) -> None:
    """Five steps in every form on every shape; then time against error."""
    # cuBLASLt alone, instead of Triton's products where XLA finds them faster.
    cublas = {"xla_gpu_enable_triton_gemm": False} if on_a_gpu() else {}
    for m, n in ((32, 32), (32, 64)) if tiny else SHAPES:
        for form in forms():
            what = f"{m}x{n} {', '.join(form.values())}"
            record.measure(what, form_of, form, m, n, {})
            if len(form) == 1:
                record.measure(f"{what} cuBLASLt", form_of, form, m, n, cublas)
    m, n = (32, 64) if tiny else (768, 3072)
    cases = polar.known_cases(m, n)
    for way in polar.ways()[: 2 if tiny else None]:
        measure = functools.partial(polar.measure_ways, m, n, 3, [way], cases)
        record.measure(f"{m}x{n} {way}", lambda f=measure: f()[0])


def form_of(form: dict[str, str], m: int, n: int, options: Found) -> Found:
    """Seconds and FLOP/s of one matrix of a stack."""
    factor: Any = jm.PolarExpress(**form)  # type: ignore[arg-type]
    count = min(24, max(1, 2**28 // (4 * m * n))) if on_a_gpu() else 2
    x = jax.random.normal(jax.random.key(0), (count, m, n))
    (found,) = polar.timed([factor], x, 5 if on_a_gpu() else 1, options=options)
    flops = 5 * (4 * m * m * n + 2 * m**3)
    return {"stack": count, "seconds": found, "nominal_flops_per_s": flops / found}


# ---- Part 5: a train step


def train(record: Record, tiny: bool) -> None:
    """GPT-2 124M in bfloat16, float32 masters; the optimizer's share of a batch."""
    model, head, batch = (
        ("tiny", 16, (2, 33)) if tiny else ("gpt2-124m", 64, (32, 1025))
    )
    shapes = model_parameters(model, jnp.float32, scanned=True)
    tokens = jax.random.randint(jax.random.key(2), batch, 0, shapes["wte"].shape[0])
    count = batch[0] * (batch[1] - 1)

    def gradients(params: Any, tokens: Any, attention: str) -> Any:
        def of_masters(params: Any) -> Any:
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            how = {"head": head, "attention": attention, "rematerialize": False}
            return loss(low, tokens, **how)

        return jax.value_and_grad(of_masters)(params)

    def timed(step: Callable[[Any, Any], Any], params: Any, state: Any) -> Found:
        """The median time of a step that gives parameters, state and a loss."""
        values, taken = [], []
        for _ in range(12 if on_a_gpu() else 3):
            began = time.perf_counter()
            params, state, value = step(params, state)
            values.append(float(value))
            taken.append(time.perf_counter() - began)
        seconds = statistics.median(taken[1:])
        rate = count / seconds
        return {
            "seconds": seconds,
            "tokens_per_s": rate,
            "losses": values[:: len(values) - 1],
        }

    def backward(attention: str) -> Found:
        run = jax.jit(functools.partial(gradients, tokens=tokens, attention=attention))

        def step(params: Any, grads: Any) -> Any:
            value, grads = jax.block_until_ready(run(params))
            return params, grads, value

        return timed(step, random_like(shapes, 0), None)

    def whole(name: str, dtype: str, attention: str, base: float) -> Found:
        init, update = make_step(name, dtype, shapes)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any) -> Any:
            value, grads = gradients(params, tokens, attention)
            return *update(params, state, grads), value

        params = random_like(shapes, 0)
        found = timed(step, params, jax.jit(init)(params))
        optimizer = found["seconds"] - base
        share = optimizer / (optimizer + base * TOKENS / count)
        half_a_million = {
            "optimizer_seconds": optimizer,
            "share_of_2**19_tokens": share,
        }
        return found | half_a_million

    usable = {}
    for attention in ("cudnn", "xla") if on_a_gpu() else ("xla",):
        found = record.measure(f"gradients, {attention}", backward, attention)
        if "seconds" in found:
            usable[attention] = found["seconds"]
    attention, base = next(iter(usable.items()), ("xla", math.nan))
    dtypes = {"nanochat": "bfloat16", "adamw": "default", "optax": "default"}
    for name, dtype in (dtypes | {"muon": "bfloat16"}).items():
        record.measure(f"{name}, {attention}", whole, name, dtype, attention, base)


# ---- The command

# Name: part, the seconds that it may take, the function; in the order of their worth.
TASKS: dict[str, tuple[int, float, Callable[[Record, bool], None]]] = {
    "peaks": (2, 60, peaks),
    "kernels": (1, 90, kernels),
    "parity": (1, 200, parity),
    "orthogonalization": (4, 200, orthogonalization),
    "steps": (3, 360, steps),
    "train": (5, 240, train),
}


def run_task(name: str, words: list[str], device: str, seconds: float) -> str:
    """Run a task in a process, and end it and all that it started in time.

    Returns:
      How it ended, in words.
    """
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*words, "--task", name, "--seconds", f"{seconds:.0f}"],
        env={**os.environ, "JAX_PLATFORMS": device, **shared},
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
    add(
        "--task", choices=TASKS, help="one task in this process, as the program runs it"
    )
    args = parser.parse_args(words)
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds}; expected a number above 0")
    device = args.device or ("cpu" if args.tiny else "cuda")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if args.task is not None:
        part, _, function = TASKS[args.task]
        path, deadline = args.out / f"part{part}.json", began + args.seconds
        jax.config.update("jax_platforms", device)
        record = Record(path, args.task, deadline)
        about = machine.describe("benchmarks.on_a_card", words)
        record.content["runs"][args.task] = about | {"nvidia_smi": nvidia_smi()}
        record.write()
        function(record, args.tiny)
        return
    print(nvidia_smi(), flush=True)
    command = [sys.executable, "-m", "benchmarks.on_a_card", *words]
    for name, (part, most, _) in TASKS.items():
        if part not in args.part:
            continue
        left = args.seconds - (time.monotonic() - began)
        print(f"== part {part}, {name}: {left:.0f} s left", flush=True)
        ended = "skipped, no time left"
        if left >= LEAST:
            ended = run_task(name, command, device, min(left - GRACE, most))
        print(f"== {name}: {ended}", flush=True)
    print(f"== {time.monotonic() - began:.0f} s in all", flush=True)


def nvidia_smi() -> str | None:
    """Card, driver, memory and clock, where the program is there."""
    fields = "name,driver_version,memory.total,clocks.sm,power.limit"
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if shutil.which(words[0]) is None:
        return None
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
