"""The time of a whole optimizer step, ours and others', in runs that alternate.

    python -m benchmarks.step                                 6x384 and GPT-2 124M
    python -m benchmarks.step --models gpt2-350m --rounds 3
    python -m benchmarks.step --pairs scanned --json benchmarks/results
    python -m benchmarks.step --old FOLDER --rounds 5         beside another checkout

Each pair runs ours, theirs, ours, theirs, ..., each in a separate process; the
ratio is the median over rounds. Beside it are the seconds, the temporaries and the
time to compile. `benchmarks/NOTES.md` says what the columns mean. A file of results
that is there already keeps its other pairs. All of this is on a CPU; on a GPU,
`benchmarks.on_a_card` times the same steps.

Such a process compiles, prints a line of JSON, and waits. Then it answers each line
that it reads: "step" with the seconds of a step, "timing" with those of many, "profile"
with where they go. Parameters and gradients are random, of a model in
`benchmarks.parameters`, and take memory from the first step on.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
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
TORCH = "torch-nanochat"
TF32 = "tensorfloat32"  # JAX's default for products of float32 on a GPU
ROOT = pathlib.Path(__file__).parents[1]
# Words in the names of a GPU's kernels, and what they do.
KERNELS = {
    "products": ("nvjet", "gemm", "cutlass", "cublas"),
    "kernels": ("mosaic",),
    "copies": ("copy", "transpose", "memcpy", "memset", "slice", "concatenate"),
}

Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # params, state, grads


@dataclasses.dataclass(frozen=True)
class Contender:
    """What runs, and how.

    Attributes:
      name: one of `NAMES`, or `TORCH`, nanochat's step in PyTorch.
      layout: "separate" leaves for each layer, or "scanned", one for all layers;
        torch's are separate.
      dtype: of the polar iteration. Parameters are float32 throughout. optax iterates
        in the dtype of its gradients, so in bfloat16 these and its momentum are
        bfloat16, which moves fewer bytes. "float32" is without TF32, and with `TF32`
        these are float32 and products are not.
      kernels: ours by hand for Hopper GPUs; None for what a recipe takes.
      checkout: folder of another checkout, whose jax_muon runs.
    """

    name: str
    layout: str = "scanned"
    dtype: str = "float32"
    kernels: bool | None = None
    checkout: str = ""

    def __str__(self) -> str:
        words = [self.name, self.dtype]
        if self.name != TORCH:
            words.append(self.layout)
        if self.kernels is not None:
            words.append("kernels" if self.kernels else "no kernels")
        if self.checkout:
            words.append(f"in {pathlib.Path(self.checkout).name}")
        return ", ".join(words)


# Ours and theirs: those that docs/speed.md draws.
LAYOUTS = ("scanned", "separate")
PAIRS = [(Contender("nanochat", x), Contender("optax", x)) for x in LAYOUTS]


def beside(checkout: str) -> list[tuple[Contender, Contender]]:
    """Ours here, and in another checkout."""
    return [
        (here, dataclasses.replace(here, checkout=checkout))
        for layout in LAYOUTS
        for dtype in ("float32", "bfloat16")
        for here in [Contender("nanochat", layout, dtype)]
    ]


# ---- A contender, in its process


class Served:
    """A compiled step and its arrays."""

    info: dict[str, Any]

    def send(self) -> None:
        """Start a step."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all that was started."""
        raise NotImplementedError

    def peak_bytes(self) -> int | None:
        """The most of a GPU's memory that was in use so far."""
        raise NotImplementedError

    def profile(self) -> dict[str, Any]:
        """Milliseconds of a step on a GPU by kind of its kernels, and the longest."""
        return {}

    def step(self) -> float:
        """Seconds of one step."""
        return self.flow(1)

    def flow(self, steps: int) -> float:
        """Seconds of a step where the next is sent before the last has ended."""
        began = time.perf_counter()
        for _ in range(steps):
            self.send()
        self.wait()
        return (time.perf_counter() - began) / steps

    def timing(self) -> dict[str, Any]:
        """Seconds of a step: the median of several alone, and in a flow of 20."""
        steps = 2 if self.peak_bytes() is None else 20  # on a CPU, and on a GPU
        for _ in range(2):  # the first touch of all memory
            self.step()
        return {
            "seconds": statistics.median(self.step() for _ in range(steps)),
            "flow_seconds": self.flow(steps),
            "peak_bytes": self.peak_bytes(),
        }


class JaxContender(Served):
    """A step of JAX, with parameters and state donated."""

    def __init__(self, contender: Contender, model: str):
        """Compile, by shapes alone."""
        scanned = contender.layout == "scanned"
        self.shapes = model_parameters(model, jnp.float32, scanned=scanned)
        low = contender.name == "optax" and contender.dtype == "bfloat16"
        dtype = "bfloat16" if low else "float32"
        self.grad_shapes = model_parameters(model, dtype, scanned=scanned)
        self.init, step = make_step(contender, self.shapes)
        state = jax.eval_shape(self.init, self.shapes)
        precision = "highest" if contender.dtype == "float32" else "default"
        began = time.perf_counter()
        with jax.default_matmul_precision(precision):
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
                self.shapes, state, self.grad_shapes
            )
            self.compiled = lowered.compile()
        self.lowered_text = lowered.as_text()
        analysis = self.compiled.memory_analysis()
        self.info = {
            "compile_s": time.perf_counter() - began,
            "temporary_bytes": analysis and analysis.temp_size_in_bytes,
        }

    @functools.cached_property
    def grads(self) -> Any:
        """Gradients, and at the first use parameters and state as well."""
        self.params, grads = (
            random_like(self.shapes, 0),
            random_like(self.grad_shapes, 1),
        )
        self.state = jax.jit(self.init)(self.params)
        return jax.block_until_ready(grads)

    def send(self) -> None:
        """Start a step."""
        grads = self.grads
        self.params, self.state = self.compiled(self.params, self.state, grads)

    def wait(self) -> None:
        """Wait for the last."""
        jax.block_until_ready((self.params, self.state))

    def peak_bytes(self) -> int | None:
        """The most of the device's memory that was in use so far, if it says."""
        stats = jax.devices()[0].memory_stats()
        return None if stats is None else stats.get("peak_bytes_in_use")

    def profile(self) -> dict[str, Any]:
        """Milliseconds of a step on a GPU by kind of its kernels, and the longest."""
        steps = 3
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.flow(steps)
            (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return by_kind(events, steps)


def by_kind(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """What `Served.profile` says, from the events of a profiler's trace.

    Only a GPU's streams count: its other threads show modules and operations, which
    cover the same time again.
    """
    names = {
        (e["name"], e["pid"], e.get("tid")): e["args"]["name"].lower()
        for e in events
        if e.get("name") in ("process_name", "thread_name")
    }
    gpus = {
        pid
        for (kind, pid, _), name in names.items()
        if kind == "process_name" and "gpu" in name
    }
    streams = {
        (pid, tid)
        for (kind, pid, tid), name in names.items()
        if kind == "thread_name" and pid in gpus and "stream" in name
    }
    taken: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            taken[event["name"]] += event["dur"] / 1000 / steps
    kinds: collections.Counter[str] = collections.Counter()
    for name, ms in taken.items():
        found = (
            k for k, words in KERNELS.items() if any(w in name.lower() for w in words)
        )
        kinds[next(found, "passes")] += ms
    return {"by_kind_ms": dict(kinds), "longest_ms": dict(taken.most_common(12))}


def random_like(shapes: Any, seed: int) -> Any:
    """Gaussian arrays, each of them its own."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


def make_step(contender: Contender, shapes: Any) -> tuple[Callable[[Any], Any], Step]:
    """The functions that give the state of parameters, and that do a step."""
    tx = transform(contender, shapes)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def polar(contender: Contender) -> Any:
    """The polar factor of a contender."""
    return jm.PolarExpress(dtype=contender.dtype, kernels=contender.kernels)


def transform(contender: Contender, shapes: Any) -> optax.GradientTransformation:
    """The optax transform of a contender."""
    name, dtype = contender.name, contender.dtype
    if name in RECIPES:
        how: dict[str, Any] = {"dtype": dtype}
        if contender.kernels is not None:
            how = {"polar": polar(contender)}
        adamw = optax.adamw(3e-4, 0.8, 0.95, 1e-10)
        matrices = {"wte": "adamw", "lm_head": "adamw", "*": IN_OUT}
        return getattr(jm, name)(0.02, adamw=adamw, matrices=matrices, **how)
    if name == "adamw":
        return optax.adamw(3e-4)
    # optax reads a matrix only where it has two axes, and an embedding as one: it is
    # told which leaves are for Muon.
    numbers = {"wte": None, "lm_head": None}
    numbers["blocks"] = jax.tree.map(lambda _: IN_OUT, shapes["blocks"])
    return optax.contrib.muon(
        0.02,
        weight_decay=0.1,
        muon_weight_dimension_numbers=numbers,
        mu_dtype="float32" if dtype == TF32 else dtype,
    )


class TorchContender(Served):
    """nanochat's step as nanochat arranges it, with fused AdamW.

    Matrices are parameters (out, in).
    """

    def __init__(self, contender: Contender, model: str, device: str):
        """Do the first step, which compiles, on "cpu" or "cuda"."""
        import torch

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
        settings = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10, "fused": True}
        rest = torch.optim.AdamW(adamw, **settings)
        self.optimizers = (stacked_nanochat(muon, contender.dtype), rest)
        self.info = {"compile_s": self.step()}

    def send(self) -> None:
        """Start a step, on a CPU to its end."""
        for optimizer in self.optimizers:
            optimizer.step()

    def wait(self) -> None:
        """Wait for a GPU."""
        if self.cuda:
            self.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """The most of a GPU's memory that was allocated so far."""
        return self.cuda.max_memory_allocated() if self.cuda else None


def stacked_nanochat(params: list[Any], dtype: str) -> Any:
    """nanochat's Muon as nanochat runs it on one GPU: one compiled call for a shape.

    The parity suite's reference under torch.compile. Its parameters of one shape are
    stacked, (12, 768, 3072), updated, and copied back; the state stays stacked.
    """
    import torch

    from parity.references import CompiledNanochat

    class Stacked(CompiledNanochat):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                by_shape: dict[Any, list[Any]] = {}
                for p in group["params"]:
                    by_shape.setdefault(p.shape, []).append(p)
                for some in by_shape.values():
                    w, grad = torch.stack(some), torch.stack([p.grad for p in some])
                    self._update(w, grad, self.state[some[0]], group)
                    torch._foreach_copy_(some, [*w.unbind()])

    return Stacked(params, dtype=getattr(torch, dtype))


def serve(contender: Contender, model: str, device: str) -> None:
    """Serve until the input ends."""
    served: Served
    if contender.name == TORCH:
        served = TorchContender(contender, model, device)
    else:
        served = JaxContender(contender, model)
    print(json.dumps(served.info), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(served, line.strip())()), flush=True)


# ---- Two processes, in turn


class Worker:
    """A contender in its process."""

    def __init__(self, contender: Contender, process: subprocess.Popen):
        """Do not wait for it."""
        self.contender, self.process = contender, process

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """What it says when it has compiled: the first use waits for that."""
        return self._line()

    def ask(self, what: str) -> Any:
        """Its answer to "step", "timing" or "profile"."""
        assert self.info and self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.contender} ended: see above")
        return json.loads(line)


@contextlib.contextmanager
def running(contender: Contender, model: str, device: str) -> Iterator[Worker]:
    """A worker that compiles, and ends whatever happens."""
    settings = json.dumps(dataclasses.asdict(contender))
    with contextlib.ExitStack() as stack:
        paths = [str(ROOT)]
        if contender.checkout:
            # The benchmarks of this folder with the package of that one.
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            package = pathlib.Path(contender.checkout).resolve() / "jax_muon"
            (pathlib.Path(folder) / "jax_muon").symlink_to(package)
            paths.insert(0, folder)
        platform = "cpu" if contender.name == TORCH else device
        own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.step",
                "--serve",
                settings,
                model,
                device,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": platform} | own,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        yield Worker(contender, process)


def compare(
    model: str, ours: Contender, theirs: Contender, rounds: int
) -> dict[str, Any]:
    """Times of both in turn, and the ratio."""
    with running(ours, model, "cpu") as us, running(theirs, model, "cpu") as them:
        infos = us.info, them.info  # so that no compiler runs beside a step
        for worker in (us, them):
            worker.ask("step")  # the first touch of all memory
        timers = [functools.partial(worker.ask, "step") for worker in (us, them)]
        mine, others = program.in_turn(timers, rounds)
        ratios = [a / b for a, b in zip(mine, others, strict=True)]
        return {
            "model": model,
            "ours": str(ours),
            "theirs": str(theirs),
            "ours_s": statistics.median(mine),
            "theirs_s": statistics.median(others),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ours_info": infos[0],
            "theirs_info": infos[1],
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


def folder(text: str) -> pathlib.Path:
    """A folder of the command line."""
    path = pathlib.Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}; expected a folder that exists")
    return path


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.step", __doc__)
    add = parser.add_argument
    add("--models", choices=MODELS, nargs="+", default=SIZES)
    add("--rounds", type=int, help="default: 9 for 6x384, 2 for gpt2-124m, else 3")
    add("--pairs", default="", help="all whose text has this word, and no others")
    add("--old", type=folder, help="a checkout to compare with; nothing is saved")
    add("--json", type=folder, help="folder to save results in")
    args = parser.parse_args(words)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}; expected a number of at least 1")
    pairs = beside(str(args.old)) if args.old else PAIRS
    chosen = [pair for pair in pairs if args.pairs in f"{pair[0]} to {pair[1]}"]
    if not chosen:
        texts = "; ".join(f"{ours} to {theirs}" for ours, theirs in pairs)
        parser.error(f"--pairs {args.pairs}; expected a word of {texts}")

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
    if args.json is not None and not args.old:
        program.save_rows(results, args.json / "step_cpu.json", CASE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:  # as `running` starts it
        _, _, settings, model, device = sys.argv
        serve(Contender(**json.loads(settings)), model, device)
    else:
        main(sys.argv[1:])
