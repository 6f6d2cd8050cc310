"""Optimizer steps in JAX that `benchmarks.step` times: ours and optax's.

Each is a function (params, state, grads) -> (params, state), compiled with parameters
and state donated, on random parameters of a model in `benchmarks.parameters`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_muon as jm
from benchmarks.parameters import model_parameters

RECIPES = ("nanochat", "muon", "moonlight", "normuon")
NAMES = (*RECIPES, "optax", "optax-scan", "adamw")

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class JaxContender:
    """A compiled step and the arrays that it runs on."""

    def __init__(
        self,
        name: str,
        model: str,
        layout: str,
        dtype: str,
        *,
        in_train_step: bool = True,
        cublas: bool = False,
    ):
        """Compile.

        Args:
          name: one of `NAMES`, or "orthogonalize", that part of a step alone.
          model: one of `benchmarks.parameters.MODELS`.
          layout: "separate" leaves of every layer, or "scanned" ones of all layers.
          dtype: of the polar iteration, where the contender has a choice. "float32" is
            for products of float32 without TF32, which a GPU would take by "default".
          in_train_step: whether to compile the step inside a train step too, and say
            what temporaries it has there.
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
            compiled = lowered.compile(compiler_options=options)
            self.info = {
                "compile_s": time.perf_counter() - began,
                "temporary_bytes": temporaries(compiled),
            }
            if in_train_step:
                found = temporaries_in_train_step(step, args)
                self.info["train_step_temporary_bytes"] = found
        self.compiled = compiled

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


def temporaries(compiled: Any) -> int | None:
    """Bytes beside arguments and results, or None where the platform does not say."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def temporaries_in_train_step(step: Step, args: tuple[Any, Any, Any]) -> int | None:
    """The same where gradients are temporaries themselves, less their bytes.

    In a train step an optimizer can write over the gradients, which it cannot if they
    are arguments. A branch stands for the backward pass: the compiler must hold what
    either side gives.
    """

    def train_step(params: Any, state: Any, grads: Any, sign: Any) -> tuple[Any, Any]:
        negative = functools.partial(jax.tree.map, jnp.negative)
        return step(params, state, jax.lax.cond(sign, negative, lambda g: g, grads))

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    total = temporaries(jitted.lower(*args, jnp.bool_(True)).compile())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(args[2]))
    return None if total is None else total - held


def make_step(name: str, dtype: str, shapes: Any) -> tuple[Callable[[Any], Any], Step]:
    """The functions that give the state of parameters, and that do a step."""
    if name == "orthogonalize":
        return lambda _: (), functools.partial(orthogonalize_step, dtype=dtype)
    tx = transform(name, dtype, shapes)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def orthogonalize_step(params: Any, state: Any, grads: Any, dtype: str) -> Any:
    """Polar factors of the matrices' gradients, and nothing else of a step."""
    blocks = grads["blocks"]
    matrices = jm.read(blocks, rules="muon")
    tx = jm.orthogonalize(jm.PolarExpress(dtype=dtype), matrices=matrices)
    blocks, _ = tx.update(blocks, tx.init(blocks))
    return params | {"blocks": blocks}, state


def transform(name: str, dtype: str, shapes: Any) -> optax.GradientTransformation:
    """The optax transform of a contender."""
    if name in RECIPES:
        return getattr(jm, name)(dtype=dtype)
    if name == "adamw":
        return optax.adamw(3e-4)
    # optax reads a matrix only where it has two axes, and an embedding as one: it is
    # told which leaves are for Muon. It computes in the dtype of the gradients.
    spec = optax.contrib.MuonDimensionNumbers(-2, -1)
    numbers = {"wte": None, "lm_head": None}
    numbers["blocks"] = jax.tree.map(lambda _: spec, shapes["blocks"])
    coefficients: Any = (3.4445, -4.7750, 2.0315)
    if name == "optax-scan":  # one for each step, which optax runs as a scan
        coefficients = jm.polar_express_coefficients(5)
    return optax.contrib.muon(
        0.02,
        coefficients,
        weight_decay=0.1,
        muon_weight_dimension_numbers=numbers,
    )
