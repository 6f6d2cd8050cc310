"""Bytes that an optimizer step moves on an H100, without any H100.

    python -m benchmarks.schedule.traffic
    python -m benchmarks.schedule.traffic --models gpt2-124m --kernels on --largest 20

compiles a step ahead of time and counts what every instruction reads and writes, times
the turns of its loops. Beside it stands the least that a step can move: 26 bytes for an
element of nanochat's matrices, in float32 with a bfloat16 iteration (gradient 4,
momentum 4 + 4, the stack of the iteration 2 written, 2 read and written by the steps'
first and last product, 2 read, parameter 4 + 4), and 28 for one of AdamW's (gradient 4,
and parameter and two moments 8 each). Matrix products are counted apart: what they move
again and again comes from the card's cache.

Nothing runs. `make gpu-traffic` installs the compiler.
"""

import collections
import dataclasses
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin looks for a driver otherwise
# JAX cannot read programs for GPUs that this machine lacks back from its cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

from benchmarks.schedule.hlo import Instruction, Module, array_bytes, target, trips

KINDS = ("products", "kernels", "passes", "copies")
# Bytes of an element: what `least` multiplies.
MUON, ADAMW = 26, 28
# Instructions that move nothing: other names for arrays, and numbers made on the spot.
FREE = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
    *("constant", "iota", "after-all", "partition-id"),
}
# And those that compute nothing.
MOVES = FREE | {
    *("copy", "copy-start", "transpose", "reshape", "broadcast", "concatenate", "pad"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "gather"),
}
SLICES = ("slice", "dynamic-slice", "gather")


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes that an instruction reads and writes in all of its turns."""

    kind: str  # of `KINDS`
    line: Instruction
    times: int
    read: int
    written: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.read + self.written


def traffic(module: Module) -> list[Moved]:
    """What every instruction of a step moves, in the order of the program.

    Of a conditional only the branch that moves the most counts. A loop that runs as
    often as its data asks counts as not run: there is one for inputs near the largest
    numbers.
    """
    return [*_walk(module, module.entry, 1)]


def _walk(module: Module, computation: str, times: int) -> Iterator[Moved]:
    lines = module.computations[computation]
    types = {line.name: line.type for line in lines}
    for line in lines:
        if line.opcode in FREE or line.opcode.endswith(("-done", "-update")):
            continue
        if line.opcode == "while":
            (body,) = line.called
            if turns := trips(line.text, unknown=0):
                yield from _walk(module, body, times * turns)
        elif line.opcode == "conditional":
            branches = [[*_walk(module, name, times)] for name in line.called]
            yield from max(branches, key=lambda rows: sum(row.bytes for row in rows))
        elif line.opcode in ("call", "async-start"):
            for name in line.called:
                yield from _walk(module, name, times)
        else:
            kind, read, written = _of(module, line, types)
            yield Moved(kind, line, times, times * read, times * written)


def _of(
    module: Module, line: Instruction, types: dict[str, str]
) -> tuple[str, int, int]:
    """Kind, bytes read, bytes written by one run of an instruction."""
    read = sum(array_bytes(types[name]) for name in line.operands)
    written = array_bytes(line.type)
    if line.opcode == "fusion":
        (called,) = line.called
        return _of_fusion(module.computations[called])
    if line.opcode == "custom-call":
        # The first array is the result; the others are room to work in.
        written = array_bytes(line.type.partition("}")[0])
        name = target(line.text)
        kinds = {"cublas": "products", "mosaic": "kernels"}
        kind = next((kinds[word] for word in kinds if word in name), "passes")
        return kind, read, written
    if line.opcode in SLICES:
        read = written
    elif line.opcode == "dynamic-update-slice":  # in place
        read = written = array_bytes(types[line.operands[1]])
    elif line.opcode == "copy-start":  # beside the new array its type has the old one
        written = read
    return "copies" if line.opcode in MOVES else "passes", read, written


def _of_fusion(lines: list[Instruction]) -> tuple[str, int, int]:
    """The same for a fusion: only what its results are made from is read.

    From each result back to the parameters goes the share of an array that is needed: a
    slice of a stack (24, 2048, 8192) needs one of 24 matrices, however many conversions
    and bitcasts stand between, and an update in place needs nothing of the old stack.
    """
    by_name = {line.name: line for line in lines}
    root = lines[-1]
    results = root.operands if root.opcode == "tuple" else (root.name,)
    needed: dict[str, float] = collections.defaultdict(float)  # bytes of each array
    written = 0
    for name in results:
        result = by_name[_original(by_name, name)]
        if _updates_in_place(by_name, result):
            written += array_bytes(by_name[result.operands[1]].type)
        else:
            written += array_bytes(by_name[name].type)
        needed[name] = array_bytes(by_name[name].type)
    for line in reversed(lines):  # an array is used after it is made
        size = array_bytes(line.type)
        share = min(1.0, needed[line.name] / size) if size else 0.0
        for name in set(line.operands):  # x * x reads x once
            whole = array_bytes(by_name[name].type)
            first = name == line.operands[0]
            if first and _updates_in_place(by_name, line):
                continue
            wanted = size if first and line.opcode in SLICES else whole
            needed[name] = min(whole, needed[name] + share * wanted)
    read = sum(needed[line.name] for line in lines if line.opcode == "parameter")
    large = {line.opcode for line in lines if line.type.partition("{")[0][-2:] != "[]"}
    kind = "copies" if large <= MOVES else "passes"
    return "products" if "dot" in large else kind, round(read), written


def _original(by_name: dict[str, Instruction], name: str) -> str:
    """The array that bitcasts give other names."""
    while by_name[name].opcode == "bitcast":
        (name,) = by_name[name].operands
    return name


def _updates_in_place(by_name: dict[str, Instruction], line: Instruction) -> bool:
    """True for a part that is written into an array that the fusion is given."""
    if line.opcode != "dynamic-update-slice":
        return False
    return by_name[_original(by_name, line.operands[0])].opcode == "parameter"


# ---- The command


def compiled_step(model: str, layout: str, kernels: bool) -> str:
    """The text of nanochat's step in bfloat16, compiled for one H100."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from benchmarks.parameters import model_parameters
    from benchmarks.schedule.gpu_schedule import TOOL_OPTIONS
    from benchmarks.schedule.h100s import h100s, lowering_for_h100
    from benchmarks.step import Contender, make_step

    shapes = model_parameters(model, "float32", scanned=layout == "scanned")
    contender = Contender("nanochat", layout, "bfloat16", kernels=kernels)
    init, step = make_step(contender, shapes)
    sharding = SingleDeviceSharding(h100s(1)[0])

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    state = jax.eval_shape(init, shapes)
    args = map(place, (shapes, state, shapes))
    with lowering_for_h100():
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        return lowered.compile(compiler_options=TOOL_OPTIONS).as_text()


def least(model: str) -> int:
    """Bytes that a step moves at least: see the top of the file."""
    import jax

    from benchmarks.parameters import model_parameters

    shapes = model_parameters(model, "float32")
    blocks = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes["blocks"]))
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    return MUON * blocks + ADAMW * (whole - blocks)


CASE = ("model", "layout", "kernels")


def main(words: list[str]) -> None:
    """The command."""
    from benchmarks import program
    from benchmarks.parameters import MODELS

    name = "benchmarks.schedule.traffic"
    parser = program.parser(name, __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=("gpt2-124m", "gpt-1.3b"))
    add("--layouts", nargs="+", choices=("scanned", "separate"), default=("scanned",))
    add("--kernels", nargs="+", choices=("on", "off"), default=("on", "off"))
    add("--largest", type=int, default=0, help="instructions to list for each step")
    add("--json", type=pathlib.Path, help="file to put results into")
    args = parser.parse_args(words)
    about = program.describe(name, words)
    program.print_head(
        *CASE, *(f"{kind}, GB" for kind in KINDS), "outside products", "least, GB"
    )
    for case in (
        (model, layout, kernels)
        for model in args.models
        for layout in args.layouts
        for kernels in args.kernels
    ):
        rows = traffic(Module.parse(compiled_step(*case[:2], case[2] == "on")))
        moved = dict.fromkeys(KINDS, 0)
        for row in rows:
            moved[row.kind] += row.bytes
        outside, floor = moved["passes"] + moved["copies"], least(case[0])
        sizes = (*moved.values(), outside, floor)
        program.print_row(*case, *(f"{size / 1e9:.3f}" for size in sizes))
        if args.json is not None:
            found = dict(zip(CASE, case, strict=True)) | {"bytes": moved}
            found |= {"outside_products": outside, "least": floor}
            program.save_rows([found | about], args.json, CASE)
        for row in sorted(rows, key=lambda row: -row.bytes)[: args.largest]:
            source = row.line.text.partition('op_name="')[2].partition('"')[0]
            print(
                f"  {row.bytes / 1e9:7.3f} GB  x{row.times:<3} {row.kind:8} "
                f"{row.line.name:36} {row.line.type.partition('{')[0]:26} "
                f"{source[-48:]}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
