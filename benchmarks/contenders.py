"""Optimizer steps that `benchmarks.step` times, each in a process of its own.

    python -m benchmarks.contenders '{"name": "nanochat", "model": "6x384", ...}'

prints a line of JSON when it is ready, then the seconds of a step for each line that it
reads. Own processes: torch and JAX would share threads, and torch is tuned by variables
that only a new process reads. Parameters and gradients are random, of a model in
`benchmarks.parameters`.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_muon as jm
from benchmarks.parameters import model_parameters

RECIPES = ("nanochat", "muon", "moonlight", "normuon")
NAMES = (*RECIPES, "optax", "adamw")
IN_OUT = optax.contrib.MuonDimensionNumbers(-2, -1)  # of one layer or of all
TORCH = ("torch-nanochat", "torch-muon")

Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # params, state, grads


class JaxContender:
    """A compiled step, with parameters and state donated, and its arrays."""

    def __init__(
        self,
        name: str,
        model: str,
        layout: str,
        dtype: str,
        *,
        cublas: bool = False,
    ):
        """Compile.

        Args:
          name: one of `NAMES`, or "orthogonalize", that part of a step alone.
          model: one of `benchmarks.parameters.MODELS`.
          layout: "separate" leaves of every layer, or "scanned" ones of all layers.
          dtype: of the polar iteration, where the contender has a choice. "float32" is
            for products of float32 without TF32, which a GPU would take by "default".
          cublas: on a GPU, products by cuBLASLt alone. An option of this program: a
            flag of the process would be unknown to the compiler for CPUs.
        """
        shapes = model_parameters(model, jnp.float32, scanned=layout == "scanned")
        self.params, self.grads = random_like(shapes, 0), random_like(shapes, 1)
        init, step = make_step(name, dtype, shapes)
        self.state = jax.jit(init)(self.params)
        args = (self.params, self.state, self.grads)
        jax.block_until_ready(args)  # so that nothing runs beside the compiler
        gpu = jax.default_backend() == "gpu"
        options = {"xla_gpu_enable_triton_gemm": False} if cublas and gpu else None
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
    matrices = jm.read(blocks, rules=IN_OUT)
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
    """An optimizer of PyTorch; matrices are separate parameters (out, in)."""

    def __init__(self, name: str, model: str, dtype: str, device: str):
        """Do the first step, which compiles.

        Args:
          name: "torch-nanochat", the parity suite's reference under torch.compile, or
            "torch-muon", torch.optim.Muon; both with fused AdamW.
          model: one of `benchmarks.parameters.MODELS`.
          dtype: of the polar iteration; torch.optim.Muon knows only bfloat16.
          device: "cpu" or "cuda".
        """
        import torch

        from parity.references import CompiledNanochat

        self.cuda = torch.cuda if device == "cuda" else None
        generator = torch.Generator(device).manual_seed(0)

        def random(shape: tuple[int, ...]) -> Any:
            return 0.02 * torch.randn(shape[::-1], generator=generator, device=device)

        groups: dict[str, list[Any]] = {"muon": [], "adamw": []}
        leaves = jax.tree_util.tree_leaves_with_path(model_parameters(model, "float32"))
        for path, leaf in leaves:
            p = torch.nn.Parameter(random(leaf.shape))
            p.grad = random(leaf.shape)
            groups["muon" if path[0].key == "blocks" else "adamw"].append(p)
        muon, adamw = groups["muon"], groups["adamw"]
        if name == "torch-nanochat":
            first: Any = CompiledNanochat(muon, dtype=getattr(torch, dtype))
            settings: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-10}
        elif name == "torch-muon":
            first = torch.optim.Muon(muon, lr=0.02, weight_decay=0.1)
            settings = {}
        else:
            raise ValueError(f"contender {name!r}; expected one of {', '.join(TORCH)}")
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


def serve(
    name: str, model: str, device: str, layout: str, dtype: str, **options: Any
) -> None:
    """Serve until the input ends."""
    contender: JaxContender | TorchContender
    if name.startswith("torch"):
        contender = TorchContender(name, model, dtype, device)
    else:
        contender = JaxContender(name, model, layout, dtype, **options)
    contender.step()  # the first touch of all memory
    contender.info["peak_bytes"] = contender.peak_bytes()
    print(json.dumps(contender.info), flush=True)
    for _ in sys.stdin:
        print(contender.step(), flush=True)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
