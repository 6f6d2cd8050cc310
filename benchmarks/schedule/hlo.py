"""Read the text of a scheduled HLO module: what runs while a collective is under way.

A scheduled module lists instructions in the order in which the GPU's stream gets them.
An asynchronous collective is a pair, `-start` and `-done`: whatever is listed between
the two runs while data travels. Only text is read: no compiler and no GPU is needed.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.schedule.collectives import Collective

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)"
)
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([0-9",]*)[\]}]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# Groups of devices are listed, {{0,1},{2,3}}, or rows of a range that may have been
# transposed, [2,4]<=[4,2]T(1,0), or axes of a mesh of such a range:
# mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}.
_RANGE = r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?"
_LISTED = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_ROWS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=" + _RANGE)
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(" + _RANGE + r"\))? \{([^}]*)\}"
)

_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
_PRODUCT_TARGETS = ("cublas", "gemm", "matmul")
_BITS = re.compile(r"^[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    text: str

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls."""
        branches = [
            name.strip().lstrip("%")
            for group in _BRANCHES.findall(self.text)
            for name in group.split(",")
        ]
        return (*_CALLED.findall(self.text), *branches)


@dataclasses.dataclass(frozen=True)
class Transfer(Collective):
    """A collective in the schedule: where it starts and ends, what runs meanwhile.

    Attributes:
      name: of its instruction.
      start: place in the schedule.
      done: place of its end; equal to start for a synchronous collective.
      is_sync: whether the device waits for it, be it a pair of start and done or not.
    """

    name: str
    start: int
    done: int
    is_sync: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A module's computations by name, each a list of instructions in order."""

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Read a module.

        Raises:
          ValueError: the module is not scheduled, or has no entry.
        """
        if "is_scheduled=true" not in text.partition("\n")[0]:
            raise ValueError("HLO text that is not scheduled: its order means nothing")
        computations: dict[str, list[Instruction]] = {}
        entry = None
        body: list[Instruction] = []
        for line in text.splitlines():
            if heading := _COMPUTATION.match(line):
                body = computations.setdefault(heading[2], [])
                entry = heading[2] if heading[1] else entry
            elif (found := _INSTRUCTION.match(line)) and (
                opcode := _OPCODE.search(" " + found[2])
            ):
                # Found with one space in front: places in found[2] are one less.
                arguments = found[2][opcode.end() - 1 :].partition(")")[0]
                body.append(
                    Instruction(
                        found[1],
                        opcode[1],
                        found[2][: max(0, opcode.start() - 1)],
                        tuple(_NAME.findall(arguments)),
                        line,
                    )
                )
        if entry is None:
            raise ValueError("HLO text without ENTRY")
        return cls(computations, entry)

    @functools.cached_property
    def schedule(self) -> list[Instruction]:
        """The entry computation, with loops that hold collectives written out."""
        return self._written_out(self.entry, "")

    def _written_out(self, computation: str, suffix: str) -> list[Instruction]:
        """The lines of a computation; the name of each says in which trip it runs."""
        lines = []
        for line in self.computations[computation]:
            body = _BODY.search(line.text) if line.opcode == "while" else None
            if body is not None and self._sends(body[1]):
                for trip in range(trips(line.text)):
                    inner = f"{suffix}/{line.name}.{trip}"
                    lines += self._written_out(body[1], inner)
            else:
                operands = tuple(name + suffix for name in line.operands)
                name = line.name + suffix
                lines.append(dataclasses.replace(line, name=name, operands=operands))
        return lines

    def _sends(self, computation: str) -> bool:
        """Whether a computation has collectives, itself or in a loop."""
        return any(
            line.opcode.removesuffix("-start") in _COLLECTIVES
            or (line.opcode == "while" and any(map(self._sends, line.called)))
            for line in self.computations.get(computation, [])
        )

    def transfers(self) -> list[Transfer]:
        """Collectives of the entry and its loops, in the order of their starts."""
        schedule = self.schedule
        types = {line.name: line.type for line in schedule}
        place = {line.name: index for index, line in enumerate(schedule)}
        done = {
            line.operands[0]: place[line.name]
            for line in schedule
            if line.opcode.endswith("-done") and line.operands
        }
        found = []
        for start, line in enumerate(schedule):
            kind = line.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            end = done.get(line.name, start)
            paired = line.name in done
            found.append(
                Transfer(
                    kind,
                    first_group(line.text),
                    sum(array_bytes(types[name]) for name in line.operands),
                    line.name,
                    start,
                    end,
                    not paired or '"is_sync":true' in line.text,
                )
            )
        return found

    def flops_before(
        self, takes: Callable[[Instruction], int] = lambda line: 0
    ) -> list[int]:
        """FLOPs before each place of the schedule; the last entry has all.

        Args:
          takes: which branch of a conditional a device takes: the longest is 0.
        """
        schedule = self.schedule
        types = {line.name: line.type for line in schedule}
        before = [0]
        for line in schedule:
            flops = self._flops(line, types)
            if line.opcode == "conditional":
                flops = self._branches(line)[takes(line)]
            before.append(before[-1] + flops)
        return before

    def bytes_copied_in_loops(self) -> int:
        """Bytes of copies in loops that hold collectives, in all of their trips."""
        return sum(
            array_bytes(line.type)
            for line in self.schedule
            if line.opcode in ("copy", "copy-start") and "/" in line.name
        )

    def flops(self) -> int:
        """FLOPs of all matrix products, on a device that takes the longest branches."""
        return self._flops_of(self.entry)

    def _flops_of(self, computation: str) -> int:
        lines = self.computations.get(computation, [])
        types = {line.name: line.type for line in lines}
        return sum(self._flops(line, types) for line in lines)

    def _branches(self, line: Instruction) -> list[int]:
        """FLOPs of each branch, the longest first."""
        return sorted((self._flops_of(name) for name in line.called), reverse=True)

    def _flops(self, line: Instruction, types: dict[str, str]) -> int:
        if line.opcode == "dot" or (
            line.opcode == "custom-call"
            and any(word in target(line.text) for word in _PRODUCT_TARGETS)
        ):
            return _product_flops(line, types)
        if line.opcode == "conditional":
            return self._branches(line)[0]
        return trips(line.text) * sum(map(self._flops_of, line.called))


def trips(text: str, unknown: int = 1) -> int:
    """How often a loop runs; `unknown` where its data decide."""
    return int(found[1]) if (found := _TRIPS.search(text)) else unknown


def target(text: str) -> str:
    """What a custom call calls, in small letters."""
    return text.partition('custom_call_target="')[2].partition('"')[0].lower()


def _arrays(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Element type and shape of every array in a type."""
    for dtype, sizes in _ARRAY.findall(text):
        yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def array_bytes(text: str) -> int:
    """Bytes of all arrays in a type."""
    total = 0
    for dtype, shape in _arrays(text):
        bits = _BITS.match(dtype)  # "bf16", "f8e4m3fn", "s8"; "pred" has no number
        total += math.prod(shape) * (int(bits[1]) if bits else 8) // 8
    return total


def _product_flops(line: Instruction, types: dict[str, str]) -> int:
    """2 x elements of the product x length of the sums."""
    _, product = next(_arrays(line.type))
    _, left = next(_arrays(types[line.operands[0]]))
    contracted = _CONTRACTED.search(line.text)
    axes = re.findall(r"\d+", contracted[1]) if contracted else [str(len(left) - 1)]
    return 2 * math.prod(product) * math.prod(left[int(axis)] for axis in axes)


def first_group(text: str) -> tuple[int, ...]:
    """The first group of devices that a collective runs over."""
    if listed := _LISTED.search(text):
        return tuple(int(device) for device in listed[1].split(","))
    if rows := _ROWS.search(text):
        return tuple(_range(rows[2], rows[3])[: int(rows[1])].tolist())
    if mesh := _MESH.search(text):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        names = re.findall(r"'([^']+)'", mesh[4])
        all_devices = ",".join(str(size) for size in sizes.values())
        devices = _range(mesh[2] or all_devices, mesh[3]).reshape(*sizes.values())
        here = tuple(slice(None) if name in names else 0 for name in sizes)
        return tuple(devices[here].flat)
    raise ValueError(f"a collective without replica_groups that we can read: {text}")


def _range(shape: str, axes: str | None) -> np.ndarray:
    """0, 1, 2 ... in this shape, transposed to these axes, in one row."""
    sizes = [int(size) for size in shape.split(",")]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    order = None if axes is None else [int(axis) for axis in axes.split(",")]
    return (numbers if order is None else numbers.transpose(order)).reshape(-1)
