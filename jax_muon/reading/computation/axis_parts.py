"""Which parts of a leaf's axes each axis of a value consists of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class AxisPart(NamedTuple):
    """A part of an axis of a value: `size` elements, `stride` apart, of a leaf's axis.

    The axis is None if it is no leaf's; `whole` is false for one factor of several.
    """

    axis: int | None
    stride: int
    size: int
    whole: bool = True


# The parts of each axis of a value, the outermost first.
AxisParts = tuple[tuple[AxisPart, ...], ...]
Shape = Sequence[int]


def axes_in(
    parts: Sequence[Iterable[AxisPart]], places: Iterable[int] | None = None
) -> set[int]:
    """The leaf's axes in some axes of a value, or in all."""
    chosen = parts if places is None else [parts[place] for place in places]
    return {x.axis for of_axis in chosen for x in of_axis if x.axis is not None}


def free(size: int) -> tuple[AxisPart, ...]:
    """An axis of a value that is no leaf's."""
    return (AxisPart(None, 1, size),) if size > 1 else ()


def placed(parts: AxisParts, source: Mapping[int, int], shape: Shape) -> AxisParts:
    """Axes of a result: from `source` by place, or else no leaf's."""
    return tuple(
        parts[source[place]] if place in source else free(size)
        for place, size in enumerate(shape)
    )


def fit(parts: AxisParts, shape: Shape) -> AxisParts:
    """The parts of axes that were cut or padded to this shape."""
    return tuple(map(_fitted, parts, shape))


def _fitted(of_axis: tuple[AxisPart, ...], size: int) -> tuple[AxisPart, ...]:
    if not of_axis or math.prod(x.size for x in of_axis) == size:
        return of_axis
    outer, *inner = of_axis
    rest = math.prod(x.size for x in inner)
    if size % rest:  # the outer factor has no whole number of elements left
        return (outer._replace(size=size), *(x._replace(size=1) for x in inner))
    return (outer._replace(size=size // rest), *inner)


def reshaped(parts: AxisParts, old: Shape, new: Shape) -> AxisParts:
    """The parts of the old axes, divided among the new ones."""
    left: list[AxisPart] = []  # the innermost first
    for before, size in zip(reversed(parts), reversed(old), strict=True):
        left += reversed(_fitted(before, size) or free(size))
    left = [x for x in left if x.size > 1]
    result = []
    for size in new:
        of_axis: list[AxisPart] = []
        while size > 1 and left:
            axis, stride, length, whole = left.pop()
            taken = math.gcd(size, length)
            if taken == 1:  # they do not divide each other: both get this axis
                taken, size = length, size * length
            if rest := length // taken - 1:
                left.append(AxisPart(axis, stride, rest + 1, False))
                whole = False
            of_axis.append(AxisPart(axis, stride * (length // taken), taken, whole))
            size //= taken
        result.append(tuple(of_axis))
    return tuple(result)
