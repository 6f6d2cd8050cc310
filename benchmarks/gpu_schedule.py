"""The optimizer step as XLA schedules it for H100s, without any H100.

    python -m benchmarks.gpu_schedule --gpus 1 8 64 --model gpt2-124m

One GPU takes the plain step, more of them that under ZeRO-2. The command
compiles ahead of time for a described topology and reads the result: in which order
collectives start and end, and which matrix products run meanwhile; the peak memory; the
bytes that a device sends. Nothing runs, so there are no times. `docs/gpu_schedule.md`
says how to read it, `make gpu-schedule` installs what it needs.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks.hlo import Module, Transfer
from benchmarks.parameters import MODELS, model_parameters
from jax_muon.mesh.global_view import GlobalView, state_shardings
from jax_muon.mesh.owned import state_specs
from jax_muon.mesh.traffic import Collective, collectives
from jax_muon.mesh.train_step import abstract_state

AXIS = "data"
TENSOR_PARALLEL = 2
# Smaller transfers, of means and norms, are counted and not listed.
SHOWN_BYTES = 50_000
SHARDINGS = ("zero2", "fsdp", "fsdp,tp")
RECIPES = ("nanochat", "muon", "moonlight", "normuon")

# An H100 SXM with 80 GB, as XLA describes a card that it finds. With the versions of
# driver and toolkit it knows that branches can be recorded in CUDA graphs.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
CARD_BYTES = 84_942_979_072
GPUS_PER_HOST = 8

# docs/gpu_schedule.md says what each does and how it was found.
OPTIONS: dict[str, Any] = {
    # cuBLASLt calls: without a card, Triton's products would be untuned.
    "xla_gpu_enable_triton_gemm": False,
    # Graphs of one command too: below 5, a branch that stands alone is not recorded.
    "xla_gpu_graph_min_graph_size": 1,
    # Several collectives under way at once.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 10,
}
# Reduce-scatters are combined up to this many elements of output: with GPT-2 124M the
# embedding (and the head, on more than one host) joins the smallest stack of matrices.
ONE_HOST_ELEMENTS = 10_000_000
MORE_HOSTS_ELEMENTS = 1_850_000

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "optax",
)


def compiler_options(gpus: int, dtype: str, sharding: str) -> dict[str, Any]:
    """The options that we found for a number of GPUs."""
    one_host = gpus <= GPUS_PER_HOST
    elements = ONE_HOST_ELEMENTS if one_host else MORE_HOSTS_ELEMENTS
    combine = {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": elements
        * jax.numpy.dtype(dtype).itemsize
    }
    early = {"xla_gpu_experimental_collective_start_as_early_as_possible": True}
    if sharding != "zero2":
        return OPTIONS | early
    return OPTIONS | combine | ({} if one_host else early)


@dataclasses.dataclass(frozen=True)
class Step:
    """A traceable step, with its arguments as shapes with shardings."""

    function: Any
    args: tuple[Any, ...]
    donated: tuple[int, ...] = (0, 1, 2)  # parameters, state and gradients

    def compile(self, options: dict[str, Any]) -> Any:
        """The executable."""
        step = jax.jit(self.function, donate_argnums=self.donated)
        return step.lower(*self.args).compile(compiler_options=options)


def optimizer_step(
    gpus: int,
    model: str,
    recipe: str,
    dtype: str,
    max_norm: float | None = None,
    sharding: str = "zero2",
) -> Step:
    """Update and apply: on one GPU as it is, on several as `sharding` says."""
    hosts = max(1, gpus // GPUS_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H100,
        topology=f"1x{hosts}x{gpus // hosts}",  # partitions x hosts x GPUs of a host
    )
    params = model_parameters(model, dtype)
    make = functools.partial(getattr(jm, recipe), max_norm=max_norm)
    devices = np.array(topology.devices)
    if sharding == "zero2" or gpus == 1:
        build = single_step if gpus == 1 else zero2_step
        return build(make, params, Mesh(devices, (AXIS,)))
    if sharding == "fsdp":
        return sharded_step(make, params, Mesh(devices, (AXIS,)), PartitionSpec(AXIS))
    grid = devices.reshape(-1, TENSOR_PARALLEL)
    both = PartitionSpec(AXIS, "tensor")
    return sharded_step(make, params, Mesh(grid, (AXIS, "tensor")), both)


def update_and_apply(
    tx: optax.GradientTransformation, params: Any, state: Any, grads: Any
) -> tuple[Any, Any]:
    """What a train step does after its gradients."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def single_step(make: Callable[..., Any], params: Any, mesh: Mesh) -> Step:
    """The step of one device."""
    tx = make()
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    state = jax.eval_shape(tx.init, params)
    args = (place(params), place(state), place(params))
    # No result has the place of a gradient here.
    return Step(functools.partial(update_and_apply, tx), args, donated=(0, 1))


def sharded_step(
    make: Callable[..., Any], params: Any, mesh: Mesh, spec: PartitionSpec
) -> Step:
    """The step in global view, of parameters that are all divided alike."""
    tx = make(mesh=mesh, specs=spec)

    def place(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(lambda x: place(x, NamedSharding(mesh, spec)), params)
    state = jax.eval_shape(tx.init, params)
    shardings = state_shardings(state, params, GlobalView.of(params, mesh, spec))
    args = (placed, jax.tree.map(place, state, shardings), placed)
    return Step(functools.partial(update_and_apply, tx), args, donated=(0, 1))


def zero2_step(make: Callable[..., Any], params: Any, mesh: Mesh) -> Step:
    """The step in shard_map over all devices, from local gradients."""
    tx = make(zero2_axis=AXIS)
    state = abstract_state(tx, params, mesh)
    specs = state_specs(state)

    def spread(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The global array of which every device holds `x`, joined where divided."""
        shape = (x.shape[0] * mesh.size, *x.shape[1:]) if len(spec) else x.shape
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    everywhere, divided = PartitionSpec(), PartitionSpec(AXIS)
    step = jax.shard_map(
        functools.partial(update_and_apply, tx),
        mesh=mesh,
        in_specs=(everywhere, specs, divided),
        out_specs=(everywhere, specs),
    )
    return Step(
        step,
        (
            jax.tree.map(lambda x: spread(x, everywhere), params),
            jax.tree.map(spread, state, specs),
            jax.tree.map(lambda x: spread(x, divided), params),
        ),
    )


def theoretical_bytes(gpus: int, model: str, dtype: str) -> dict[str, float]:
    """(N-1)/N of what each way carries, padded and unpadded, from the shapes alone."""
    counts: dict[tuple[int, ...], int] = {}
    plain = padded = 0
    size = jax.numpy.dtype(dtype).itemsize
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        model_parameters(model, dtype)
    ):
        plain += leaf.size * size
        if "blocks" in jax.tree_util.keystr(path):
            counts[leaf.shape] = counts.get(leaf.shape, 0) + 1
        else:  # rows of the leading axis
            rows, *rest = leaf.shape
            padded += -(-rows // gpus) * gpus * math.prod(rest) * size
    for shape, count in counts.items():
        padded += -(-count // gpus) * gpus * math.prod(shape) * size
    others = (gpus - 1) / gpus
    return {"padded": others * padded, "unpadded": others * plain}


def thunks(folder: pathlib.Path) -> dict[str, int]:
    """How the GPU's program does its branches, from the dump of the last compilation.

    A branch that is no part of a CUDA graph makes the host wait for the device, to read
    the predicate, before it sends any further work.
    """
    (path,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    graphs = waits = recorded = 0
    for line in path.read_text().splitlines():
        indented = line.startswith(" ")
        graphs += "kCommandBuffer" in line and not indented
        waits += "kConditional" in line and not indented
        recorded += "kConditional" in line and indented
    return {"graphs": graphs, "in_graphs": recorded, "host_waits": waits}


def measure(gpus: int, args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """Everything that is printed and saved, as plain data."""
    step = optimizer_step(
        gpus, args.model, args.recipe, args.dtype, args.max_norm, args.sharding
    )
    sent = collectives(step.function, *step.args)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = step.compile(options | dump)
        branches = thunks(pathlib.Path(folder))
    module = Module.parse(compiled.as_text())
    transfers = module.transfers()
    memory = compiled.memory_analysis()
    return {
        "gpus": gpus,
        "model": args.model,
        "recipe": args.recipe,
        "dtype": args.dtype,
        "max_norm": args.max_norm,
        "sharding": args.sharding if gpus > 1 else "none",
        "options": options,
        "command": shlex.join(["python", "-m", "benchmarks.gpu_schedule", *args.words]),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "timeline": [describe(transfer) for transfer in transfers],
        "summary": {
            kind: summarize([t for t in transfers if t.kind == kind])
            for kind in sorted({t.kind for t in transfers}, reverse=True)
        },
        "products": dataclasses.asdict(module.work()),
        "traffic_bytes": dataclasses.asdict(module.traffic()),
        "branches": {"all": len(module.conditionals()), **branches},
        "memory": {
            "peak_bytes": memory.peak_memory_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "card_bytes": CARD_BYTES,
        },
        "sent_bytes": {
            "hlo": sent_by_kind(transfers),
            "jaxpr": sent_by_kind(sent),
            "theory_each_way": theoretical_bytes(gpus, args.model, args.dtype),
        },
    }


def describe(transfer: Transfer) -> dict[str, Any]:
    """A transfer of the timeline, as plain data."""
    return dataclasses.asdict(transfer) | {
        "sent_bytes": transfer.sent_bytes,
        "is_hidden": transfer.is_hidden,
    }


def summarize(transfers: list[Transfer]) -> dict[str, Any]:
    """How many transfers are hidden, and the places of those that are not."""
    exposed = [i for i, t in enumerate(transfers, start=1) if not t.is_hidden]
    return {
        "all": len(transfers),
        "exposed": exposed,
        "sent_bytes": sum(t.sent_bytes for t in transfers),
        "exposed_bytes": sum(t.sent_bytes for t in transfers if not t.is_hidden),
    }


def sent_by_kind(items: list[Transfer] | list[Collective]) -> dict[str, float]:
    """Bytes that a device sends, by kind of collective."""
    total: dict[str, float] = {}
    for item in items:
        total[item.kind] = total.get(item.kind, 0) + item.sent_bytes
    return total


def report(result: dict[str, Any]) -> str:
    """The text that is printed."""
    lines = [
        f"{result['model']}, {result['recipe']}, {result['dtype']}, "
        f"{result['sharding']}, for {result['gpus']} H100s",
        "",
        "place  collective          MB in  MB sent  wait   products meanwhile (GFLOP)",
    ]
    events = []
    for t in result["timeline"]:
        if t["sent_bytes"] < SHOWN_BYTES:
            continue
        always, perhaps = t["hides"]["always"], t["hides"]["perhaps"]
        products = f"{always['count']:4} ({always['flops'] / 1e9:5.1f})"
        if perhaps["count"]:
            branch = f"{perhaps['count']} ({perhaps['flops'] / 1e9:.1f})"
            products += f"  + {branch} in branches"
        events.append(
            (
                t["start"],
                f"{t['kind']:15}start {t['input_bytes'] / 1e6:6.1f}"
                f"  {t['sent_bytes'] / 1e6:6.1f}  {'sync' if t['is_sync'] else 'async'}"
                f"  {products}",
            )
        )
        if t["done"] > t["start"]:
            events.append((t["done"], f"{t['kind']:15}done"))
    lines += [f"{place:5}  {text}" for place, text in sorted(events)]
    lines.append("")
    for kind, counts in result["summary"].items():
        hidden = counts["all"] - len(counts["exposed"])
        exposed = ", ".join(f"number {i}" for i in counts["exposed"]) or "none"
        if len(counts["exposed"]) > 4:
            exposed = f"{len(counts['exposed'])}"
        lines.append(
            f"{kind}s: {hidden} of {counts['all']} asynchronous with products between "
            f"start and done; exposed: {exposed} ({counts['exposed_bytes'] / 1e6:.1f} "
            f"of {counts['sent_bytes'] / 1e6:.1f} MB)"
        )
    branches, memory = result["branches"], result["memory"]
    products = result["products"]
    lines += [
        f"branches: {branches['all']}, of which {branches['in_graphs']} inside CUDA "
        f"graphs; the host waits for the device {branches['host_waits']} times",
        f"products of a device: {products['always']['count']} "
        f"({products['always']['flops'] / 1e9:.0f} GFLOP), and "
        f"{products['perhaps']['count']} in branches",
        f"read and written: {result['traffic_bytes']['products'] / 1e9:.2f} GB by "
        f"products, {result['traffic_bytes']['rest'] / 1e9:.2f} GB by everything else",
        f"peak memory: {memory['peak_bytes'] / 1e9:.2f} GB of "
        f"{memory['card_bytes'] / 1e9:.1f} GB",
    ]
    sent, theory = result["sent_bytes"], result["sent_bytes"]["theory_each_way"]
    for kind in sent["jaxpr"]:
        lines.append(
            f"{kind}s send {sent['jaxpr'][kind] / 1e6:.1f} MB a device and step "
            f"(jaxpr), {sent['hlo'].get(kind, 0) / 1e6:.1f} MB (HLO)"
        )
    if result["sharding"] == "zero2":
        lines.append(
            f"in theory, each way: (N-1)/N of the padded bytes "
            f"{theory['padded'] / 1e6:.1f} MB; without padding "
            f"{theory['unpadded'] / 1e6:.1f} MB"
        )
    return "\n".join(lines)


def option(text: str) -> tuple[str, Any]:
    """KEY=VALUE of the command line, where VALUE is JSON or else text."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: valid is KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_schedule")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of parameters, gradients and state, and so on the wire",
    )
    parser.add_argument(
        "--sharding",
        choices=SHARDINGS,
        default=SHARDINGS[0],
        help=f"of several GPUs; tp is over {TENSOR_PARALLEL} of them",
    )
    parser.add_argument("--max-norm", type=float, help="clip by the global norm")
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a compiler option beside or in place of ours; may be repeated",
    )
    parser.add_argument("--json", type=pathlib.Path, help="folder to save results in")
    args = parser.parse_args(words)
    args.words = words
    for gpus in args.gpus:
        if gpus < 1 or (gpus > GPUS_PER_HOST and gpus % GPUS_PER_HOST):
            parser.error(f"--gpus {gpus}: valid are 1 to 8, and multiples of 8")
        options = compiler_options(gpus, args.dtype, args.sharding)
        options |= dict(args.option)
        result = measure(gpus, args, options)
        print(report(result), end="\n\n")
        if args.json is not None:
            fsdp = gpus > 1 and "fsdp" in args.sharding
            sharded = f"_{args.sharding.replace(',', '_')}" if fsdp else ""
            case = f"{args.model}_{args.recipe}_{args.dtype}{sharded}_{gpus}"
            path = args.json / f"gpu_schedule_{case}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
