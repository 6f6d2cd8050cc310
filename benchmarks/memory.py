"""How much memory a train step needs on each H100, without any H100.

    python -m benchmarks.memory
    python -m benchmarks.memory --only card --json benchmarks/results/memory.json

compiles whole train steps ahead of time and reads XLA's plan of the memory. Nothing
runs. Three tables: "updates", bytes a parameter by optimizer, for 32 scanned layers;
"models", GB a device for models of 1 to 70 billion parameters on 1 to 256 devices;
"card", a model of 8 billion on one card of 80 GB, by batch. Gradients are counted from
shapes; the rest of the peak is what XLA needs beside them. `make gpu-schedule` installs
the compiler.
"""

import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise
# JAX cannot read programs for GPUs that this machine lacks back from its cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks import gpt, program
from benchmarks.parameters import llama_parameters
from benchmarks.schedule.gpu_schedule import TOOL_OPTIONS
from benchmarks.schedule.h100s import WORKLOADS, h100s

CARD = 80e9  # bytes
LAYERS, WIDTH, TOKENS = 32, 1024, 512  # of "updates"
CASE = ("table", "model", "gpus", "sequences", "dtype", "optimizer")
KINDS = ("parameters", "state", "gradients", "rest", "peak")


def optimizers(matrices: Any, params: Any) -> dict[str, Any]:
    """Those that are compared, by name."""
    spec = optax.contrib.MuonDimensionNumbers(-2, -1)
    numbers = jax.tree.map(lambda x: spec if x.ndim > 2 else None, params)
    adamw = optax.adamw(3e-4, b2=0.95, weight_decay=0.0)
    given = {"matrices": {} if matrices is None else matrices, "adamw": adamw}
    muon = functools.partial(jm.muon, 0.02, **given)
    int8 = muon(mu_dtype="int8")
    return {
        "optax.adamw": optax.adamw(3e-4),
        "optax.contrib.muon": optax.contrib.muon(
            0.02, muon_weight_dimension_numbers=numbers
        ),
        "muon": muon(),
        "muon, float32 momentum": muon(mu_dtype="float32"),
        "muon, int8 momentum": int8,
        "muon, int8 momentum, residual": jm.keep_residual(int8),
    }


def cases() -> list[tuple[Any, ...]]:
    """All that is compiled, by `CASE`."""
    rows: list[tuple[Any, ...]] = [
        ("updates", "mlp", 1, 0, "bfloat16", optimizer)
        for optimizer in optimizers(None, {})
    ]
    rows += [
        ("models", model, gpus, WORKLOADS[model][1], dtype, "muon")
        for model in ("llama-1.3b", "llama-7b", "llama-70b")
        for gpus in (1, 8, 64, 256)
        for dtype in ("bfloat16", "float32")
    ]
    ours = "muon, int8 momentum, residual"
    card = [
        (ours, 1),
        (ours, 2),
        (ours, 4),
        ("muon, int8 momentum", 1),
        ("optax.adamw", 1),
    ]
    return rows + [
        ("card", "llama-8b", 1, sequences, "bfloat16", optimizer)
        for optimizer, sequences in card
    ]


def mlp_loss(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a stack of MLPs."""

    @jax.checkpoint
    def layer(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ block["up"]) @ block["down"] / 8, None

    x, _ = jax.lax.scan(layer, x, params["blocks"])
    return jnp.mean(jnp.square((x @ params["head"] - 1).astype(jnp.float32)))


def mlp() -> tuple[Callable[..., jax.Array], Any, jax.ShapeDtypeStruct]:
    """Loss, parameters and batch of "updates"."""
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        {"blocks": shapes, "head": (WIDTH, 32)},
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return mlp_loss, params, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)


def llama(
    model: str, dtype: str, sequences: int
) -> tuple[Callable[..., jax.Array], Any, jax.ShapeDtypeStruct]:
    """Loss, parameters and batch of a model that computes in bfloat16."""
    head, _, length = WORKLOADS[model]
    loss = functools.partial(gpt.loss, head=head, dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32)
    return loss, llama_parameters(model, dtype), tokens


def measure(
    optimizer: str, gpus: int, loss: Any, params: Any, batch: Any
) -> dict[str, Any]:
    """Bytes on one device, by kind; of one step, compiled."""
    mesh = Mesh(h100s(gpus), ("data",))
    matrices = jm.find_matrices(params, loss, batch)
    tx = optimizers(matrices, params)[optimizer]
    where: Any = mesh
    if gpus > 1:
        where = jm.fsdp(params, mesh, matrices)

        def scan(body: Any, x: Any, layers: Any, name: str) -> Any:
            return jm.scan_layers(body, x, layers)

        loss = functools.partial(loss, scan=scan)
    step = jm.make_train_step(loss, jm.on_mesh(tx, where, divide="data"))
    sharding = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=sharding)
    args = step.abstract(params)
    lowered = step.lower(*args, batch)
    stats = lowered.compile(compiler_options=TOOL_OPTIONS).memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    peak += stats.output_size_in_bytes - stats.alias_size_in_bytes
    parameters, state = map(_bytes, args)
    gradients = parameters
    rest = peak - parameters - state - gradients
    sizes = (parameters, state, gradients, rest, peak)
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    return dict(zip(KINDS, sizes, strict=True)) | {"elements": elements}


def _bytes(tree: Any) -> int:
    """Bytes on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.memory", __doc__)
    parser.add_argument("--only", choices=("updates", "models", "card"))
    parser.add_argument("--json", type=pathlib.Path, help="file to put results into")
    args = parser.parse_args(words)
    about = program.describe("benchmarks.memory", words)
    program.print_head(*CASE, "unit", *KINDS, "fits")
    for case in cases():
        result = dict(zip(CASE, case, strict=True))
        if args.only not in (None, result["table"]):
            continue
        gpus, sequences, dtype = (result[k] for k in ("gpus", "sequences", "dtype"))
        model = result["model"]
        given = mlp() if model == "mlp" else llama(model, dtype, gpus * sequences)
        result |= measure(result["optimizer"], gpus, *given)
        whole = result["table"] != "updates"
        unit, size = ("GB", 1e9) if whole else ("bytes a parameter", result["elements"])
        sizes = [f"{result[kind] / size:.2f}" for kind in KINDS]
        fits = result["peak"] <= CARD if whole else "-"
        program.print_row(*case, unit, *sizes, fits)
        if args.json is not None:
            program.save_rows([result | {"fits": fits} | about], args.json, CASE)


if __name__ == "__main__":
    main(sys.argv[1:])
