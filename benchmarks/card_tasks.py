"""What `on_a_card.py` measures: a function for each task.

A task gets a `Record`, and whether sizes are to be tiny; it imports what it needs
itself, so that what is missing costs that task alone.
"""

import argparse
import functools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_muon as jm
from benchmarks import card_checks, machine, polar
from benchmarks.on_a_card import Record

# For an H200: square, and wide as an MLP's; stacks are as deep as `polar.depth` says.
SHAPES = (
    *((m, m) for m in (256, 512, 768, 1024, 2048, 4096, 8192)),
    *((m, 4 * m) for m in (256, 512, 768, 1024, 2048)),
    (4096, 8192),
)
TOKENS = 2**19  # of a batch, by which the optimizer's share of a train step is judged
# XLA's options for products: cuBLASLt alone, instead of Triton's where they are faster.
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "cuBLASLt": {"xla_gpu_enable_triton_gemm": False},
}


def run(name: str, args: argparse.Namespace, deadline: float, words: list[str]) -> None:
    """Run one task of `on_a_card.tasks` in this process."""
    from benchmarks.on_a_card import tasks

    parts = {task: part for task, part, _ in tasks()}
    record = Record(args.out / f"part{parts[name]}.json", name, deadline)
    jax.config.update("jax_platforms", args.device)
    about = machine.describe("benchmarks.on_a_card", words)
    record.describe(about | {"nvidia_smi": nvidia_smi()})
    TASKS[name](record, args.tiny)


def nvidia_smi() -> str | None:
    """Card, driver, memory and clock, where the program is there."""
    fields = "name,driver_version,memory.total,clocks.sm,power.limit"
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return None


# ---- Part 1: is it right?


def kernels(record: Record, tiny: bool) -> None:
    """Symmetric products, then five steps of every form."""
    for shape in card_checks.KERNEL_SHAPES[: 1 if tiny else None]:
        check = functools.partial(card_checks.kernels, shape)
        record.measure(f"kernels {times(shape)}", check)
    for shape in [(2, 16, 48)] if tiny else [(3, 768, 3072), (2, 1000, 520)]:
        for form in forms():
            check = functools.partial(card_checks.polar, shape, **form)
            record.measure(f"polar {times(shape)} {words_of(form)}", check)


def forms() -> list[dict[str, Any]]:
    """Settings of a polar factor: every dtype and form, and on a GPU the kernels."""
    found: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"dtype": "float32", "form": "standard"},
        {"dtype": "float32", "form": "gram"},
    ]
    if card_checks.on_a_gpu():
        found += [{"dtype": "bfloat16", "symmetric": "kernel"}]
    return found


def parity(record: Record, tiny: bool) -> None:
    """Every recipe against PyTorch."""
    for index, name in enumerate(card_checks.RECIPES[: 2 if tiny else None]):
        check = functools.partial(card_checks.parity, name)
        record.measure(f"{name}, float32", check)
        if index < len(card_checks.LOW_PRECISION_RECIPES):
            check = functools.partial(card_checks.low_precision_parity, name)
            record.measure(f"{name}, bfloat16", check)


def tests(record: Record, tiny: bool) -> None:
    """`pytest -m card`, which repeats the checks as tests."""
    del tiny

    def run_pytest() -> dict[str, Any]:
        import pytest

        del pytest  # that it can be imported is all
        words = [sys.executable, "-m", "pytest", "-m", "card", "-q"]
        # Versions are the card's own: what warns there must not hide what fails.
        words += ["-W", "default", "-p", "no:cacheprovider", "tests/test_card.py"]
        left = max(10.0, record.deadline - time.monotonic())
        environment = os.environ | {"JAX_PLATFORMS": jax.default_backend()}
        if environment["JAX_PLATFORMS"] == "gpu":
            environment["JAX_PLATFORMS"] = "cuda"
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=left, env=environment
        )
        print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
        lines = done.stdout.strip().splitlines()
        return {"ok": done.returncode == 0, "last_line": lines[-1] if lines else ""}

    record.measure("pytest -m card", run_pytest)


# ---- Part 2: what could be reached?


def peaks(record: Record, tiny: bool) -> None:
    """Products and a copy: what shares of a peak refer to."""
    for dtype in ("bfloat16", "float16", "float32"):
        size = (128 if tiny else 8192) // (2 if dtype == "float32" else 1)
        measure = functools.partial(machine.peaks, size, [dtype], calls=calls())
        record.measure(f"peaks {dtype} {size}", measure)


def calls() -> int:
    """How many products are sent at once."""
    return 20 if card_checks.on_a_gpu() else 1


# ---- Part 3: optimizer steps


def steps(record: Record, tiny: bool) -> None:
    """Every recipe, optax and PyTorch; the contenders that goals name stand first."""
    from benchmarks.step import Contender

    size = 128 if tiny else 8192
    peak = record.measure(
        "peaks", lambda: machine.peaks(size, ["bfloat16"], calls=calls())
    )
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
        left = record.deadline - time.monotonic()
        run = functools.partial(one_contender, model, contender, min(120, left))
        result = record.measure(f"{model} {contender}", run)
        if result is not None:
            found[model, str(contender)] = result["seconds"]

    for model in models:
        for contender in first:
            measure(model, contender)
        record.measure(f"{model} shares", functools.partial(shares, model, found, peak))
    for contender in rest:
        for model in models:
            measure(model, contender)


def one_contender(model: str, contender: Any, timeout: float) -> dict[str, Any]:
    """Seconds of a step, the median of several, in a process of its own.

    It has `timeout` seconds to compile.
    """
    from benchmarks.step import running

    device = "cuda" if card_checks.on_a_gpu() else "cpu"
    with running(contender, model, device, timeout) as worker:
        taken = [worker.step() for _ in range(20 if device == "cuda" else 3)]
        return {"seconds": statistics.median(taken), "least": min(taken), **worker.info}


def shares(
    model: str, found: dict[tuple[str, str], float], peak: dict[str, float] | None
) -> dict[str, Any]:
    """Ours over theirs, and what of the card's peaks the parts of our step reach.

    The rest of a step is all but orthogonalization. It reads gradients, and reads and
    writes parameters and state, once at least; in float32.
    """
    from benchmarks.contenders import make_step
    from benchmarks.flops import nominal_flops
    from benchmarks.parameters import model_parameters

    def seconds(*words: str) -> float:
        return found.get((model, ", ".join(words)), math.nan)

    ours = seconds("nanochat", "bfloat16", "scanned")
    polar_seconds = seconds("orthogonalize", "bfloat16", "scanned")
    shapes = model_parameters(model, jnp.float32, scanned=True)
    init, _ = make_step("nanochat", "bfloat16", shapes)
    moved = tree_bytes(shapes) * 3 + 2 * tree_bytes(jax.eval_shape(init, shapes))
    peak = peak or {"bfloat16_flops": math.nan, "copy_bytes": math.nan}
    rate = nominal_flops(model) / polar_seconds
    rest = moved / (ours - polar_seconds) if ours > polar_seconds else math.nan
    return {
        "to_optax": ours / seconds("optax", "default", "scanned"),
        "to_compiled_nanochat": ours / seconds("torch-nanochat", "bfloat16"),
        "to_torch_muon": ours / seconds("torch-muon", "bfloat16"),
        "orthogonalization_flops": rate,
        "of_peak": rate / peak["bfloat16_flops"],
        "rest_bytes_per_s": rest,
        "rest_of_copy": rest / peak["copy_bytes"],
    }


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ---- Part 4: orthogonalization alone


def orthogonalization(record: Record, tiny: bool) -> None:
    """Five steps in every form on every shape; then time against error."""
    shapes = ((32, 32), (32, 64)) if tiny else SHAPES
    for m, n in sorted(
        shapes, key=lambda shape: shape not in ((768, 768), (768, 3072))
    ):
        for kind in forms():
            for name, options in OPTIONS.items() if len(kind) == 1 else [("", {})]:
                polar_factor = jm.PolarExpress(**kind)
                measure = functools.partial(one_form, polar_factor, m, n, options)
                record.measure(f"{m}x{n} {words_of(kind)} {name}".rstrip(), measure)
    m, n = (32, 64) if tiny else (768, 3072)
    cases = polar.known_cases(m, n)
    for way in polar.ways()[: 2 if tiny else None]:
        measure = functools.partial(polar.measure_ways, m, n, 3, [way], cases)
        record.measure(f"{m}x{n} {way}", lambda f=measure: f()[0])


def one_form(
    function: Callable[..., Any], m: int, n: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Seconds and FLOP/s of one matrix of a stack."""
    gpu = card_checks.on_a_gpu()
    count = min(24, max(1, 2**28 // (4 * m * n))) if gpu else 2
    x = jax.random.normal(jax.random.key(0), (count, m, n))
    if not gpu:
        options = {}
    (found,) = polar.timed([function], x, 5 if gpu else 1, options=options)
    flops = 5 * (4 * m * m * n + 2 * m**3)
    return {"stack": count, "seconds": found, "nominal_flops_per_s": flops / found}


# ---- Part 5: a train step


def train(record: Record, tiny: bool) -> None:
    """GPT-2 124M in bfloat16, float32 masters; the optimizer's share of a batch."""
    from benchmarks.contenders import make_step, random_like
    from benchmarks.gpt import loss
    from benchmarks.parameters import model_parameters

    model, head, batch = (
        ("tiny", 16, (2, 33)) if tiny else ("gpt2-124m", 64, (32, 1025))
    )
    shapes = model_parameters(model, jnp.float32, scanned=True)
    rows = shapes["wte"].shape[0]
    tokens = jax.random.randint(jax.random.key(2), batch, 0, rows)
    count = batch[0] * (batch[1] - 1)

    def gradients(params: Any, tokens: Any, attention: str) -> Any:
        def of_masters(params: Any) -> Any:
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            return loss(
                low, tokens, head=head, attention=attention, rematerialize=False
            )

        return jax.value_and_grad(of_masters)(params)

    def backward(attention: str) -> dict[str, Any]:
        run = jax.jit(functools.partial(gradients, attention=attention))
        taken = median_of(run, random_like(shapes, 0), tokens)
        return {"seconds": taken, "tokens_per_s": count / taken}

    usable = {}
    for attention in ("cudnn", "xla") if card_checks.on_a_gpu() else ("xla",):
        measure = functools.partial(backward, attention)
        usable[attention] = record.measure(f"gradients, {attention}", measure)
    attention, base = next((item for item in usable.items() if item[1]), ("xla", None))

    def whole(name: str, dtype: str) -> dict[str, Any]:
        init, step = make_step(name, dtype, shapes)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params: Any, state: Any, tokens: Any) -> Any:
            value, grads = gradients(params, tokens, attention)
            return *step(params, state, grads), value

        params = random_like(shapes, 0)
        state, values, taken = jax.jit(init)(params), [], []
        for _ in range(12 if card_checks.on_a_gpu() else 3):
            began = time.perf_counter()
            params, state, value = train_step(params, state, tokens)
            values.append(float(value))
            taken.append(time.perf_counter() - began)
        seconds = statistics.median(taken[1:])
        found = {"seconds": seconds, "tokens_per_s": count / seconds}
        if base is not None:
            optimizer = seconds - base["seconds"]
            rest = base["seconds"] * TOKENS / count
            found |= {
                "optimizer_seconds": optimizer,
                "share_of_half_a_million_tokens": optimizer / (optimizer + rest),
            }
        return found | {"losses": [values[0], values[-1]]}

    for name, dtype in (
        ("nanochat", "bfloat16"),
        ("adamw", "default"),
        ("optax", "default"),
        ("muon", "bfloat16"),
    ):
        record.measure(f"{name}, {attention}", functools.partial(whole, name, dtype))


def median_of(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of a call, after one that compiles."""
    jax.block_until_ready(function(*args))
    taken = []
    for _ in range(10 if card_checks.on_a_gpu() else 2):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def times(shape: tuple[int, ...]) -> str:
    """2x768x3072."""
    return "x".join(map(str, shape))


def words_of(settings: dict[str, Any]) -> str:
    """The values of settings, in words."""
    return ", ".join(map(str, settings.values()))


TASKS: dict[str, Callable[[Record, bool], None]] = {
    "kernels": kernels,
    "parity": parity,
    "tests": tests,
    "peaks": peaks,
    "steps": steps,
    "orthogonalization": orthogonalization,
    "train": train,
}
