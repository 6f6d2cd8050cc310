"""Optimizer steps in JAX that `benchmarks.step` times: ours, optax's, one by hand.

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
NAMES = (*RECIPES, "fused", "optax", "optax-scan", "adamw")
RATES = {"learning_rate": 0.02, "momentum": 0.95, "weight_decay": 0.1, "beta2": 0.95}

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
    if name == "fused":
        return fused_init, functools.partial(fused_step, dtype=dtype)
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
        RATES["learning_rate"],
        coefficients,
        weight_decay=RATES["weight_decay"],
        muon_weight_dimension_numbers=numbers,
    )


# ---- nanochat's step for scanned parameters, written out in one function


def fused_init(params: Any) -> Any:
    """Momentum and mean squares, of matrices or of AdamW, and the count of steps."""

    def second(path: Any, p: Any) -> Any:
        if path[0].key != "blocks":
            return jnp.zeros_like(p)
        tall = p.shape[-1] < p.shape[-2]  # the means of nanochat: along the shorter
        return jnp.zeros_like(p[..., :1] if tall else p[..., :1, :])

    mu = jax.tree.map(jnp.zeros_like, params)
    return mu, jax.tree_util.tree_map_with_path(second, params), jnp.int32(0)


def fused_step(params: Any, state: Any, grads: Any, dtype: str) -> tuple[Any, Any]:
    """What a chain of transforms does, with nothing of it held in between."""
    mu, nu, count = state
    count += 1
    matrices = functools.partial(_fused_matrices, dtype=dtype)
    blocks = [
        matrices(*leaves)
        for leaves in zip(
            *(jax.tree.leaves(tree["blocks"]) for tree in (params, mu, nu, grads)),
            strict=True,
        )
    ]
    treedef = jax.tree.structure(params["blocks"])
    new = [
        {"blocks": jax.tree.unflatten(treedef, parts)}
        for parts in zip(*blocks, strict=True)
    ]
    for name in ("wte", "lm_head"):
        g = grads[name]
        m = 0.8 * mu[name] + 0.2 * g
        v = 0.95 * nu[name] + 0.05 * g * g
        root = jnp.sqrt(v / (1 - 0.95**count)) + 1e-10
        p = params[name] - 3e-4 * (m / (1 - 0.8**count)) / root
        for tree, leaf in zip(new, (p, m, v), strict=True):
            tree[name] = leaf
    params, mu, nu = new
    return params, (mu, nu, count)


def _fused_matrices(p: Any, m: Any, v: Any, g: Any, *, dtype: str) -> Any:
    rows, cols = p.shape[-2:]
    axis = -1 if cols < rows else -2
    lr = RATES["learning_rate"] * max(1, cols / rows) ** 0.5
    m = m + (1 - RATES["momentum"]) * (g - m)
    chunk = max(1, 2**21 // (rows * cols * jnp.dtype(dtype).itemsize))
    chunk = max(c for c in range(1, chunk + 1) if len(p) % c == 0)

    def body(index: Any, carry: Any) -> Any:
        p, v = carry

        def part(x: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk)

        def put(x: Any, new: Any) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(x, new, index * chunk, 0)

        u = part(g) + RATES["momentum"] * (part(m) - part(g))
        x = jm.PolarExpress(dtype=dtype)(u)
        square = jnp.mean(x * x, axis, keepdims=True)
        second = part(v) + (1 - RATES["beta2"]) * (square - part(v))
        scale = jax.lax.rsqrt(jnp.maximum(second, 1e-10))
        sums = [
            jnp.sum(s, (-2, -1), keepdims=True) for s in (square, square * scale**2)
        ]
        x = x * (scale * jnp.sqrt(sums[0] / jnp.maximum(sums[1], 1e-20)))
        w = part(p)
        decay = jnp.where(x * w >= 0, RATES["weight_decay"] * w, 0)
        return put(p, w - lr * (x + decay)), put(v, second)

    p, v = jax.lax.fori_loop(0, len(p) // chunk, body, (p, v))
    return p, m, v
