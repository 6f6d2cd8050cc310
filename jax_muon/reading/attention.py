"""Roles in attention: which parameters make queries, keys and values, of which heads.

Labels and axes do not depend on it, but for kernels whose outputs are cut one by one:
joins go by the roles, `heads="apart"` goes by the heads, and a fused kernel, whose
outputs are cut into slices, gets a hint how to split it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jax_muon.reading import values as v
from jax_muon.reading.values import Parts, Scores, Shape, Use, Value, axes_in

# Keys are heads, slices, and pairs of a use and its role.
Notes = dict[Any, None]


class Heads(NamedTuple):
    """Heads along an axis of a leaf: their number, and elements of each of them."""

    use: Use
    axis: int
    number: int
    width: int


class Slice(NamedTuple):
    """Outputs of a use that are cut out along an axis."""

    use: Use
    axis: int
    start: int
    stop: int


def scores_of(notes: Notes, product: Any, pair: Sequence[Value]) -> dict[Scores, Parts]:
    """Scores that a product of two activations may be, and where their rows are.

    q (2, 16, 12, 64) by k (2, 9, 12, 64) over 64 has the scores (2, 12, 16, 9): axis 2
    has the rows of operand 0, and axis 3 those of operand 1. Batch and free axes with
    outputs of q, here 12, are heads.
    """
    operands: list[frozenset[Use]] = []
    rows: list[Parts] = []
    for i, value in enumerate(pair):
        places, contract = [*product.batch[i], *product.free[i]], product.contract[i]
        uses = [x for x, of in value.sources.items() if axes_in(of, contract)]
        notes |= dict.fromkeys(_heads(uses, value, places, contract))
        operands.append(frozenset(uses))
        sizes = enumerate(product.shapes[i])
        free = [((i, n),) if a in product.free[i] else () for a, n in sizes]
        rows.append(product.placed(i, tuple(free)))
    if not all(operands):
        return {}
    key = (id(product.eqn), *operands)
    parts = tuple(a if axes_in([a]) else b for a, b in zip(*rows, strict=True))
    return {Scores(key, (operands[0], operands[1])): parts}


def _heads(
    uses: Sequence[Use], value: Value, places: Sequence[int], contract: Sequence[int]
) -> Iterator[Heads]:
    """The heads of outputs: as (12, 64) of an axis of 768, or as an axis of 12."""
    for use in uses:
        parts = value.sources[use]
        for axis in sorted(use.axes(v.OUT)):
            number, width = (
                math.prod(n for a in at for x, n in parts[a] if x == axis)
                for at in (places, contract)
            )
            yield Heads(use, axis, number, width)


def _loops(calls: Sequence[JaxprEqn]) -> set[int]:
    return {id(x) for x in calls if x.primitive.name in ("scan", "while")}


def note_attention(
    notes: Notes, product: Any, pair: Sequence[Value], calls: Sequence[JaxprEqn]
) -> None:
    """Note roles if one operand is exponentials of scores, which weigh the other.

    Weights (2, 12, 16, 9) by v (2, 9, 12, 64) sum over 9, the rows of operand 1: its
    uses are keys.
    """
    loops = _loops(calls)
    for i, weights in enumerate(pair):
        values, at = pair[1 - i], [*product.batch[1 - i], *product.free[1 - i]]
        is_soft = weights.gate == v.SOFT and not values.gate
        for scores, rows in weights.scores.items() if is_soft else ():
            along = axes_in(rows, product.contract[i])
            if len(along) == 1:
                (key,) = along
                uses = [x for x, of in values.sources.items() if axes_in(of, at)]
                notes |= dict.fromkeys((x, "key") for x in scores.operands[key])
                notes |= dict.fromkeys((x, "query") for x in scores.operands[1 - key])
                notes |= dict.fromkeys((x, "value") for x in uses)
                for x in (*scores.operands[0], *scores.operands[1], *uses):
                    if _loops(x.calls) - loops:
                        notes[x, "outside"] = None
                batch, free = product.batch[1 - i], product.free[1 - i]
                notes |= dict.fromkeys(_heads(uses, values, batch, free))


def note_slices(
    notes: Notes, value: Value, old: Shape, new: Shape, starts: Sequence[int]
) -> None:
    """Note which outputs a slice has, along axes that are whole outputs of a leaf."""
    for use, parts in value.sources.items():
        for of_axis, size, length, start in zip(parts, old, new, starts, strict=True):
            axes = axes_in([of_axis]) & use.axes(v.OUT)
            if length < size and len(of_axis) == len(axes) == 1:
                notes[Slice(use, min(axes), start, start + length)] = None


def note_multiplied(notes: Notes, values: Sequence[Value]) -> None:
    """Note that outputs of one use multiply each other, as silu(gate) * up."""
    one, two = values
    for use in one.sources.keys() & two.sources.keys():
        pairs = zip(one.sources[use], two.sources[use], strict=False)
        if any(axes_in([a]) & axes_in([b]) for a, b in pairs):
            notes[use, "multiplied"] = None


class Attention:
    """What is noted of the products of one leaf."""

    def __init__(self, by_use: Mapping[Use, Sequence[Any]], uses: Sequence[Use]):
        own = [x for use in uses for x in by_use.get(use, ())]
        self.slices: dict[int, set[tuple[int, int]]] = {}
        for x in own:
            if isinstance(x, Slice):
                self.slices.setdefault(x.axis, set()).add((x.start, x.stop))
        self.heads = [x for x in own if isinstance(x, Heads)]
        kinds = {x[1] for x in own if not isinstance(x, Heads | Slice)}
        self.is_multiplied = "multiplied" in kinds
        self.is_outside = "outside" in kinds  # of a loop in which the products are
        self.roles = sorted(kinds - {"multiplied", "outside"})

    @property
    def role(self) -> str:
        """Query, key or value; "fused" for several, or for slices that multiply."""
        is_split = any(len(x) > 1 for x in self.slices.values())
        if len(self.roles) > 1 or (self.is_multiplied and is_split and not self.roles):
            return "fused"
        return self.roles[0] if self.roles else ""

    def widths(self, axis: int, size: int) -> list[int]:
        """The widths of slices that outputs are cut into, in order; or none."""
        parts = sorted(self.slices.get(axis, ()))
        starts, stops = zip(*parts, strict=True) if parts else ((), ())
        is_all = (*starts, size) == (0, *stops)
        return [stop - start for start, stop in parts] if is_all else []

    def in_heads(
        self, shape: Shape, output: Sequence[int]
    ) -> tuple[tuple[int, int, int], ...]:
        """`Parameter.heads`: (axis, width, heads) of each slice of its outputs.

        A fused kernel (768, 1280) of 12, 4 and 4 heads of 64 has (1, 768, 12),
        (1, 256, 4) and (1, 256, 4).
        """
        found = []
        for axis in output if self.roles else ():
            widths = self.widths(axis, shape[axis])
            for width in widths or [shape[axis]]:
                own = [x for x in self.heads if (x.axis, width % x.number) == (axis, 0)]
                own = [x for x in own if not widths or x.number * x.width == width]
                found.append((axis, width, max((x.number for x in own), default=1)))
        return tuple(found)

    def hint(self, path: str, shape: Shape, output: Sequence[int]) -> str:
        """What to say of a fused kernel whose outputs are split, or ""."""
        for axis in output if self.role == "fused" else ():
            if widths := self.widths(axis, shape[axis]):
                split: Any = {f"part_{i}": width for i, width in enumerate(widths)}
                split = split if len({*widths}) > 1 else (*split,)
                last = "" if axis == len(shape) - 1 else f", axis={axis}"
                pattern = re.sub(r".*/\d+/", "", path)  # of all layers
                text = f"splits={{{pattern!r}: Split({split}{last})}}"
                return f"; its outputs are split: {text}"
        return ""
