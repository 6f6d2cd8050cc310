"""The time of a whole optimizer step, ours and others', in runs that alternate.

    python -m benchmarks.step                                 6x384 and GPT-2 124M
    python -m benchmarks.step --models gpt2-350m --rounds 3
    python -m benchmarks.step --pairs optax --json benchmarks/results

Each pair runs ours, theirs, ours, theirs, ..., each in a separate process; the
ratio is the median over rounds. Beside it are the seconds, the temporaries and the
time to compile. `benchmarks/NOTES.md` says what the columns mean. A file of results
that is there already keeps its other pairs. All of this is on a CPU; on a GPU,
`benchmarks.on_a_card` times the same steps.

Own processes: torch and JAX would share threads, and torch is tuned by variables that
only a new process reads. Such a process prints a line of JSON when it is ready, then
the seconds of a step for each line that it reads. Parameters and gradients are random,
of a model in `benchmarks.parameters`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_muon as jm
from benchmarks import program
from benchmarks.parameters import MODELS, model_parameters

SIZES = ("6x384", "gpt2-124m")
CASE = ("model", "ours", "theirs")  # one row of results for each
ROUNDS = {"6x384": 9, "gpt2-124m": 2}  # else 3
RECIPES = ("nanochat", "muon", "moonlight", "normuon")
NAMES = (*RECIPES, "optax", "adamw")
IN_OUT = optax.contrib.MuonDimensionNumbers(-2, -1)  # of one layer or of all
TORCH = ("torch-nanochat", "torch-muon")
# With these glibc keeps large blocks, on huge pages. By default torch gets every
# temporary as fresh pages, which Linux zeroes: half a million page faults in a step of
# nanochat's optimizer on GPT-2 124M.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # params, state, grads


@dataclasses.dataclass(frozen=True)
class Contender:
    """What runs, and how.

    Attributes:
      name: one of `NAMES` or `TORCH`, or "orthogonalize", that part of a step alone.
      layout: "separate" leaves of every layer, or "scanned" ones of all layers;
        torch's are separate.
      dtype: of the polar iteration, where the contender has a choice. "float32" is
        for products of float32 without TF32, which a GPU would take by "default".
      malloc: "tuned" for `TUNED_MALLOC`.
      cublas: on a GPU, products by cuBLASLt alone. An option of this program: a flag
        of the process would be unknown to the compiler for CPUs.
    """

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


# Ours and theirs: those that docs/speed.md draws.
PAIRS = (
    (Contender("nanochat"), Contender("optax")),
    (Contender("nanochat", "separate"), Contender("optax", "separate")),
    (
        Contender("nanochat", dtype="bfloat16"),
        Contender("torch-nanochat", dtype="bfloat16", malloc="tuned"),
    ),
    (
        Contender("nanochat", dtype="bfloat16"),
        Contender("torch-muon", dtype="bfloat16"),
    ),
)


# ---- A contender, in its process


class JaxContender:
    """A compiled step, with parameters and state donated, and its arrays."""

    def __init__(self, contender: Contender, model: str):
        """Compile."""
        name, dtype = contender.name, contender.dtype
        is_scanned = contender.layout == "scanned"
        shapes = model_parameters(model, jnp.float32, scanned=is_scanned)
        self.params, self.grads = random_like(shapes, 0), random_like(shapes, 1)
        init, step = make_step(name, dtype, shapes)
        self.state = jax.jit(init)(self.params)
        args = (self.params, self.state, self.grads)
        jax.block_until_ready(args)  # so that nothing runs beside the compiler
        plain = contender.cublas and jax.default_backend() == "gpu"
        options = {"xla_gpu_enable_triton_gemm": False} if plain else None
        precision = "highest" if dtype == "float32" else "default"
        with jax.default_matmul_precision(precision):
            began = time.perf_counter()
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
            self.compiled = lowered.compile(compiler_options=options)
            analysis = self.compiled.memory_analysis()
            self.info: dict[str, Any] = {
                "compile_s": time.perf_counter() - began,
                "temporary_bytes": analysis and analysis.temp_size_in_bytes,
            }

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - began

    def peak_bytes(self) -> int | None:
        """The most of the device's memory that was in use so far, if it says."""
        stats = jax.devices()[0].memory_stats()
        return None if stats is None else stats.get("peak_bytes_in_use")


def random_like(shapes: Any, seed: int) -> Any:
    """Gaussian arrays, each of them its own."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


def make_step(name: str, dtype: str, shapes: Any) -> tuple[Callable[[Any], Any], Step]:
    """The functions that give the state of parameters, and that do a step."""
    if name == "orthogonalize":
        return lambda _: (), functools.partial(orthogonalize_step, dtype=dtype)
    if name == "gradients":  # no step: they are its state, so that they are computed
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return zeros, lambda params, _, grads: (params, grads)
    tx = transform(name, dtype, shapes)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def orthogonalize_step(params: Any, state: Any, grads: Any, dtype: str) -> Any:
    """Polar factors of the matrices' gradients, and nothing else of a step."""
    blocks = grads["blocks"]
    matrices = jm.find_matrices(blocks, rules=IN_OUT)
    tx = jm.orthogonalize(jm.PolarExpress(dtype=dtype), matrices=matrices)
    blocks, _ = tx.update(blocks, tx.init(blocks))
    return params | {"blocks": blocks}, state


def transform(name: str, dtype: str, shapes: Any) -> optax.GradientTransformation:
    """The optax transform of a contender."""
    if name in RECIPES:
        matrices = {"wte": "adamw", "lm_head": "adamw", "*": IN_OUT}
        return getattr(jm, name)(dtype=dtype, matrices=matrices)
    if name == "adamw":
        return optax.adamw(3e-4)
    # optax reads a matrix only where it has two axes, and an embedding as one: it is
    # told which leaves are for Muon. It computes in the dtype of the gradients.
    numbers = {"wte": None, "lm_head": None}
    numbers["blocks"] = jax.tree.map(lambda _: IN_OUT, shapes["blocks"])
    return optax.contrib.muon(
        0.02, weight_decay=0.1, muon_weight_dimension_numbers=numbers
    )


class TorchContender:
    """An optimizer of PyTorch with fused AdamW; matrices are parameters (out, in).

    "torch-nanochat" is the parity suite's reference under torch.compile; "torch-muon",
    torch.optim.Muon, knows only bfloat16.
    """

    def __init__(self, contender: Contender, model: str, device: str):
        """Do the first step, which compiles, on "cpu" or "cuda"."""
        import torch

        from parity.references import CompiledNanochat

        self.cuda = torch.cuda if device == "cuda" else None
        generator = torch.Generator(device).manual_seed(0)

        def random(shape: tuple[int, ...]) -> Any:
            return 0.02 * torch.randn(shape[::-1], generator=generator, device=device)

        muon: list[Any] = []
        adamw: list[Any] = []
        leaves = jax.tree_util.tree_leaves_with_path(model_parameters(model, "float32"))
        for path, leaf in leaves:
            p = torch.nn.Parameter(random(leaf.shape))
            p.grad = random(leaf.shape)
            (muon if path[0].key == "blocks" else adamw).append(p)
        if contender.name == "torch-nanochat":
            dtype = getattr(torch, contender.dtype)
            first: Any = CompiledNanochat(muon, dtype=dtype)
            settings: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-10}
        elif contender.name == "torch-muon":
            first = torch.optim.Muon(muon, lr=0.02, weight_decay=0.1)
            settings = {}
        else:
            raise ValueError(
                f"contender {contender.name!r}; expected one of {', '.join(TORCH)}"
            )
        rest = torch.optim.AdamW(adamw, lr=3e-4, fused=True, **settings)
        self.optimizers = (first, rest)
        self.info: dict[str, Any] = {"compile_s": self.step()}

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.cuda:
            self.cuda.synchronize()
        return time.perf_counter() - began

    def peak_bytes(self) -> int | None:
        """The most of a GPU's memory that was allocated so far."""
        return self.cuda.max_memory_allocated() if self.cuda else None


def serve(contender: Contender, model: str, device: str) -> None:
    """Serve until the input ends."""
    served: JaxContender | TorchContender
    if contender.name.startswith("torch"):
        served = TorchContender(contender, model, device)
    else:
        served = JaxContender(contender, model)
    served.step()  # the first touch of all memory
    print(json.dumps(served.info | {"peak_bytes": served.peak_bytes()}), flush=True)
    for _ in sys.stdin:
        print(served.step(), flush=True)


# ---- Two processes, in turn


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
    settings = json.dumps(dataclasses.asdict(contender))
    malloc = TUNED_MALLOC if contender.malloc == "tuned" else {}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.step", "--serve", settings, model, device],
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
    add = parser.add_argument
    add("--models", choices=MODELS, nargs="+", default=SIZES)
    add("--rounds", type=int, help="default: 9 for 6x384, 2 for gpt2-124m, else 3")
    add("--pairs", default="", help="all whose text has this word, and no others")
    add("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    chosen = [pair for pair in PAIRS if args.pairs in f"{pair[0]} to {pair[1]}"]
    if not chosen:
        texts = "; ".join(f"{ours} to {theirs}" for ours, theirs in PAIRS)
        parser.error(f"--pairs {args.pairs}; expected a word of {texts}")
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
    if sys.argv[1:2] == ["--serve"]:  # as `running` starts it
        _, _, settings, model, device = sys.argv
        serve(Contender(**json.loads(settings)), model, device)
    else:
        main(sys.argv[1:])
