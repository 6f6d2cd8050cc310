"""What a bfloat16 model loses when it is fine-tuned at a small learning rate.

    PYTHONPATH=examples python -m benchmarks.finetune --json benchmarks/results

The example's model is trained by nanochat for 100 of 150 steps, with rates still high,
and rounded to bfloat16. Then it is trained for 60 steps at a constant 1e-4, from the
same rounded weights and with the same batches: as float32, as bfloat16, and as bfloat16
with `keep_residual`. Losses are of the validation text, with the weights in the
parameters' dtype and products in float32. Every seed has its own weights and batches.

A second table has the movement of one random matrix in 100 steps of `moonlight`, as a
fraction of float32's: its gradient is a constant and three times as much noise.
"""

import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optimizers import best_rates

import jax_muon as jm
from benchmarks import learning, program

RATE, STEPS = 1e-4, 60
BASE = learning.Point("nanochat", dict(best_rates("nanochat")), steps=150)
BASE_STEPS = 100
OPTIMIZERS = {
    "moonlight": lambda matrices: jm.moonlight(
        RATE, dtype="float32", adamw=optax.adamw(RATE), matrices=matrices
    ),
    "adamw": lambda matrices: optax.adamw(RATE),
}
# Whether parameters are bfloat16, and what the optimizer is wrapped in.
MODES: dict[str, Any] = {
    "float32": (False, lambda tx: tx),
    "bfloat16": (True, lambda tx: tx),
    "bfloat16, int8 residual": (True, jm.keep_residual),
}
RESIDUALS = (None, "int8", "int16")
KEYS = ("optimizer", "parameters", "seed")


def base(seed: int) -> Any:
    """Weights of a run that stops while there is something left to learn."""
    factor = float(BASE.settings.get(learning.FACTOR, 1.0))  # type: ignore[arg-type]
    init, step, _ = learning.functions("nanochat", BASE.width, BASE.depth, factor)
    params = nnx.state(learning.model(BASE.width, BASE.depth, seed), nnx.Param)
    state = init(params, next(learning.rates_of(BASE)))
    rates = zip(range(1, BASE_STEPS + 1), learning.rates_of(BASE), strict=False)
    for done, rate in rates:
        params, state = step(params, state, batch(seed, done), rate)
    return params


def batch(seed: int, step: int) -> Any:
    """Windows of text, (16, 129)."""
    return learning.data().batch(seed, step, BASE.batch_size, BASE.context)


def cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def functions(optimizer: str, mode: str) -> tuple[Any, Any, Any]:
    """First parameters and state from a base, a step, and the loss of batches."""
    model = nnx.eval_shape(lambda: learning.model(BASE.width, BASE.depth, 0))
    graph, shapes = nnx.split(model)
    narrow, around = MODES[mode]

    def loss(params: Any, windows: Any) -> Any:
        return nnx.merge(graph, cast(params, "float32")).loss(windows)

    def start(rounded: Any) -> tuple[Any, Any]:
        params = rounded if narrow else cast(rounded, "float32")
        return params, init(params)

    tx = around(OPTIMIZERS[optimizer](jm.read(shapes, loss, batch(0, 1))))
    init, step = program.training(loss, lambda: tx)
    return start, step, learning.mean_loss(loss)


def movement(rate: float, residual: str | None, steps: int = 100) -> float:
    """How far a bfloat16 matrix moves, as a fraction of float32's movement."""
    keys = jax.random.split(jax.random.key(0), 2)
    first = (jax.random.normal(keys[0], (256, 256)) / 16).astype("bfloat16")
    slope = jax.random.normal(keys[1], first.shape)
    # The parameters as an optimizer sees them, so with their residual.
    seen = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, p))
    settings = {"weight_decay": 0.0, "dtype": "float32", "matrices": {"up": "muon"}}
    tx = optax.chain(jm.moonlight(rate, **settings), seen)

    def moved(p: Any, tx: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, key: Any) -> Any:
            grads = {"up": 0.3 * slope + jax.random.normal(key, slope.shape)}
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = {"up": p}
        state = tx.init(params)
        for key in jax.random.split(jax.random.key(1), steps + 1):
            params, state = step(params, state, key)
        *_, last = state.inner_state if residual and p is first else state
        return last["up"].astype("float32") - first.astype("float32")

    want = moved(first.astype("float32"), tx)
    got = moved(first, jm.keep_residual(tx, residual) if residual else tx)
    return float(jnp.vdot(want, got) / jnp.vdot(want, want))


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.finetune", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=learning.SEEDS)
    parser.add_argument("--json", type=pathlib.Path, help="folder for finetune.json")
    args = parser.parse_args(words)
    run = program.describe("benchmarks.finetune", words)
    validation = learning.data().validation_batches(BASE.batch_size, BASE.context)
    starts = {seed: cast(base(seed), "bfloat16") for seed in args.seeds}
    program.print_head("optimizer", "parameters", "seed", "before", "after")
    rows = []
    for optimizer in OPTIMIZERS:
        for mode in MODES:
            start, step, evaluate = functions(optimizer, mode)
            for seed, rounded in starts.items():
                params, state = start(rounded)
                before = float(evaluate(params, validation))
                for done in range(STEPS):
                    # Later batches than the base's.
                    params, state = step(params, state, batch(seed, 1000 + done))
                after = float(evaluate(params, validation))
                row = dict(zip(KEYS, (optimizer, mode, seed), strict=True))
                rows.append(row | {"before": before, "after": after, "run": run})
                program.print_row(
                    optimizer, mode, seed, f"{before:.4f}", f"{after:.4f}"
                )
            ended = [row["after"] for row in rows[-len(starts) :]]
            program.print_row(
                optimizer, mode, "mean", "", f"{statistics.mean(ended):.4f}"
            )
    program.print_head("learning rate", *map(str, RESIDUALS))
    for rate in (1e-4, 1e-5, 1e-6, 1e-7):
        program.print_row(f"{rate:g}", *(movement(rate, x) for x in RESIDUALS))
    if args.json is not None:
        program.save_rows(rows, args.json / "finetune.json", KEYS)


if __name__ == "__main__":
    main(sys.argv[1:])
