"""How the parameters of one tree are read as matrices: a value to print, keep and test.

A parameter is a batch of matrices (in, out): the axes that are summed over when the
model applies it (`reduction_axis`), the axes that it produces (`output_axis`), and
every other axis as a batch. `jax_muon.find_matrices` makes a `Matrices`, in which
`as_matrices` looks parameters up by path. It holds no arrays, so one serves every mesh.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree
from numpy.lib.array_utils import normalize_axis_tuple
from optax.contrib import MuonDimensionNumbers

from jax_muon.base import array_types, checks, trees
from jax_muon.base.tables import aligned, shape_text, sizes_text

_READ = "jax_muon.find_matrices(params, loss_fn, batch)"
# The labels that a reading gives: of matrices, and of everything else.
MUON, ADAMW = "muon", "adamw"


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are batch, in and out; indices are non-negative."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """All axes of one matrix."""
        return self.reduction + self.output

    def fan(self, shape: Sequence[int]) -> tuple[int, int]:
        """Size (in, out) of each matrix of a parameter with this shape."""
        return (
            math.prod(shape[axis] for axis in self.reduction),
            math.prod(shape[axis] for axis in self.output),
        )

    def view(self, x: Float[Array, "..."]) -> Float[Array, "*batch fan_in fan_out"]:
        """The parameter as matrices (..., in, out); (in, out) and stacks as they are.

        A query (12, 768, 12, 64) with batch (0,), in (1,) and out (2, 3) becomes
        (12, 768, 768). On Explicit mesh axes the first axis of each side stays sharded,
        and the others do not: of heads (12, 64) the 12.
        """
        if self._is_viewed(x.ndim):
            return x
        kept, merged = self._specs(x)
        shape = *(x.shape[axis] for axis in self.batch), *self.fan(x.shape)
        x = array_types.reshard(x, kept).transpose(self.batch + self.matrix)
        return array_types.reshape(x, shape, merged)

    def undo(
        self, y: Float[Array, "*batch fan_in fan_out"], like: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The parameter whose `view` is y, of the shape and sharding of `like`."""
        if self._is_viewed(like.ndim):
            return array_types.reshard(y, array_types.entries(like))
        order, (kept, merged) = self.batch + self.matrix, self._specs(like)
        shape, spec = ([z[axis] for axis in order] for z in (like.shape, kept))
        x = array_types.reshape(array_types.reshard(y, merged), shape, spec)
        x = x.transpose(np.argsort(order))
        return array_types.reshard(x, array_types.entries(like))

    @property
    def minor(self) -> tuple[int, ...]:
        """Axes that `view` merges into others: the 64 of heads (12, 64)."""
        return self.reduction[1:] + self.output[1:]

    def _is_viewed(self, ndim: int) -> bool:
        """True for (in, out) and (..., in, out)."""
        return not self.minor and self.batch + self.matrix == tuple(range(ndim))

    def _specs(self, x: Float[Array, "..."]) -> tuple[list[Any], list[Any]]:
        """Entries of the spec of x where minor axes are whole, and of its view."""
        entries = array_types.entries(x)
        kept = [None if axis in self.minor else e for axis, e in enumerate(entries)]
        sides = *self.batch, self.reduction[0], self.output[0]
        return kept, [entries[axis] for axis in sides]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How one parameter is read.

    Attributes:
      path: its path, such as "blocks/0/attn/q/kernel".
      shape: its global shape.
      dtype: its dtype.
      label: the group that it belongs to, such as "muon" or "adamw".
      role: its purpose, such as "embedding" or "query".
      reason: why, in a few words.
      axes: which of its axes are batch, in and out; None if it is not a matrix.
      doubt: why it cannot be read as a matrix, or is ambiguous; None if neither.
      scanned: the axes that a scan takes one element at a time, such as layers.
      scan: which one does: "scan_layers" or "lax.scan"; "" if nothing shows it.
      heads: of a query, key or value: (axis, width, number of heads) of its outputs, or
        of each part of them in their order.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    label: str
    role: str
    reason: str
    axes: MatrixAxes | None
    doubt: str | None = None
    scanned: tuple[int, ...] = ()
    scan: str = ""
    heads: tuple[tuple[int, int, int], ...] = ()

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True for this parameter, or some of its scanned layers.

        (12, 64, 256) with the scanned axis 0 fits (12, 64, 256) and (3, 64, 256).
        """
        if shape == self.shape:
            return True
        return len(shape) == len(self.shape) and all(
            n == size or axis in self.scanned
            for axis, (n, size) in enumerate(zip(shape, self.shape, strict=True))
        )

    @property
    def divided_last(self) -> tuple[int, ...]:
        """The axes that devices divide only if no other fits.

        First those that `MatrixAxes.view` has to gather, such as the heads' width in
        (768, 12, 64); then layers, which a scan takes one at a time.
        """
        minor = self.axes.minor if self.axes and self.label != ADAMW else ()
        return (*(axis for axis in minor if axis not in self.scanned), *self.scanned)

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """Number of matrices, their inputs and outputs; None if it is not a matrix."""
        if self.axes is None:
            return None
        fan_in, fan_out = self.axes.fan(self.shape)
        return math.prod(self.shape[axis] for axis in self.axes.batch), fan_in, fan_out


def leaf_axes(
    path: str, shape: tuple[int, ...], dtype: DTypeLike, spec: MuonDimensionNumbers
) -> MatrixAxes:
    """The axes that dimension numbers name; a ValueError if they do not fit."""
    if problem := not_a_matrix(shape, dtype):
        raise ValueError(f"parameter {path!r} of shape {shape}: {problem}")

    def normalized(axes: Any, name: str) -> tuple[int, ...]:
        return normalize_axis_tuple(() if axes is None else axes, len(shape), name)

    try:
        reduction = normalized(spec.reduction_axis, "reduction_axis")
        output = normalized(spec.output_axis, "output_axis")
        matrix = normalized(reduction + output, "reduction_axis and output_axis")
        if not reduction or not output:
            raise ValueError("no axis for the inputs, or none for the outputs")
    except ValueError as error:
        raise ValueError(
            f"parameter {path!r} of shape {shape} with {spec}: {error}; expected at "
            "least one axis each, and no axis twice"
        ) from error
    batch = tuple(axis for axis in range(len(shape)) if axis not in matrix)
    return MatrixAxes(batch, reduction, output)


def not_a_matrix(shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why a leaf can in no way be read as matrices, or None if it can.

    (64, 32) in bfloat16 can; (64,), (0, 32), int32 and float8 cannot.
    """
    real = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16
    if real and len(shape) >= 2 and 0 not in shape:
        return None
    return (
        f"with dtype {dtype} it cannot be read as matrices, which have at least two "
        "axes, none of them empty, and real floating point of at least 16 bits"
    )


@dataclasses.dataclass(frozen=True)
class Join:
    """K leaves that are joined, or one along its leading batch axis: scanned layers."""

    size: int  # K
    paths: tuple[str, ...]


class Unread(KeyError):
    """A parameter that was not read. A plain KeyError would show its text in quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Matrices(Mapping[str, Parameter]):
    """What `find_matrices` returns: parameters by path, with splits and joins.

    `print` shows which parameter goes where and why.

    Examples:
      >>> from optax.contrib import MuonDimensionNumbers
      >>> rules = {"up": MuonDimensionNumbers(-2, -1)}
      >>> jm.find_matrices({"up": jnp.ones((3, 4, 8))}, rules=rules)["up"].axes
      MatrixAxes(batch=(0,), reduction=(1,), output=(2,))
    """

    parameters: Mapping[str, Parameter]
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joins: tuple[Join, ...] | None = None  # of the parts, if parameters are split

    def __getitem__(self, path: str) -> Parameter:
        if path not in self.parameters:
            names = ", ".join(self.parameters)
            vector = "" if path else ", not a flat vector: unflatten it first"
            raise Unread(
                f"parameter {path!r} was not read, only {names}; use the tree "
                f"that `matrices` was read from{vector}"
            )
        return self.parameters[path]

    def __hash__(self) -> int:
        parts = frozenset(self.parameters.items()), frozenset(self.splits.items())
        return hash((*parts, self.joins))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __str__(self) -> str:
        """One line per parameter: its role, how it is read, its label and why."""
        rows = [["parameter", "shape", "role", "as matrices", "label", "why"]]
        for x in self.values():
            matrices = sizes_text(x.sizes) if x.label != ADAMW else "-"
            shape = shape_text(x.shape)
            rows.append([x.path, shape, x.role, matrices, x.label, x.reason])
        return "\n".join(aligned(rows))

    def of(self, tree: PyTree) -> "Matrices":
        """The reading of a tree: all that was read, or some layers or parameters."""
        changed = {}
        for path, leaf in trees.leaves_with_paths(tree):
            parameter, shape = self[path], tuple(leaf.shape)
            if not parameter.fits(shape):
                raise ValueError(
                    f"parameter {path!r} of shape {shape} was read with "
                    f"{parameter.shape}; expected {_READ} of these parameters"
                )
            if parameter.shape != shape:
                changed[path] = dataclasses.replace(parameter, shape=shape)
        if not changed:
            return self
        return dataclasses.replace(self, parameters={**self.parameters, **changed})

    def view(
        self, path: str, x: Float[Array, "..."]
    ) -> tuple[Float[Array, "*b m n"], Callable[[Float[Array, "*b m n"]], Array]]:
        """A leaf as matrices (..., in, out), and what undoes that."""
        axes = self.axes(path)
        return axes.view(x), lambda y: axes.undo(y, x)

    def axes(self, path: str) -> MatrixAxes:
        """Axes of a parameter; a ValueError if it is no matrix, or ambiguous."""
        x = self[path]
        if x.doubt is not None and x.label != ADAMW:
            raise ValueError(list_doubts([x], [*self.values()]))
        if x.axes is None or x.label == ADAMW:
            raise ValueError(
                f"parameter {path!r} of shape {x.shape} has the label {x.label!r}, but "
                "a transform of matrices gets it; use optax.multi_transform(transforms,"
                f" matrices.labels), with a transform for {x.label!r}, or "
                f"rules={{{path!r}: {MUON!r}}} if it is a matrix"
            )
        return x.axes

    def labels(self, params: PyTree) -> PyTree:
        """The label of every parameter, for `optax.multi_transform`.

        A Flax box gets one label, so that it is masked as a whole.
        """
        return jax.tree_util.tree_map_with_path(
            lambda key_path, _: self[trees.path_string(key_path)].label,
            params,
            is_leaf=trees.is_box,
        )


def check_matrices(tree: PyTree) -> None:
    """Raise a ValueError for a leaf that is no array of matrices (..., in, out)."""
    for path, x in trees.leaves_with_paths(tree):
        if problem := not_a_matrix(tuple(x.shape), x.dtype):
            raise ValueError(
                f"parameter {path!r} of shape {tuple(x.shape)}: {problem}; use the "
                "piece within jax_muon.as_matrices(tx, matrices), on parameters with "
                f"the label {MUON!r} in optax.multi_transform{checks.vector_hint(tree)}"
            )


# --- what to write where nothing shows how parameters are read ----------------------


def list_doubts(doubtful: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """What nothing says of some of the parameters: rules to choose from, by kind.

    Parameters are of one kind if their paths differ by numbers alone. The first pattern
    that matches counts, so narrower patterns come first; a pattern that would match
    more than its kind is spelled out path by path.
    """
    kinds: dict[object, list[Parameter]] = {}
    for x in doubtful:
        key = trees.numberless(x.path), x.shape, trees.numberless(str(x.doubt))
        kinds.setdefault(key, []).append(x)
    possible = [x.path for x in parameters if not not_a_matrix(x.shape, x.dtype)]
    patterns = [(_pattern(kind), kind) for kind in kinds.values()]
    matched = {
        pattern: {path for path in possible if trees.matches(pattern, path)}
        for pattern, _ in patterns
    }
    is_unread = any(x.role == "-" for x in doubtful)
    loss = f"a loss that shows it, {_READ}, or " if is_unread else ""
    lines: list[str] = []
    ruled: set[str] = set()  # by the lines so far
    for pattern, kind in sorted(patterns, key=lambda x: len(matched[x[0]])):
        ruled |= {x.path for x in kind}
        first, alone = kind[0], matched[pattern] <= ruled
        matrix = "MuonDimensionNumbers(in, out)" if len(first.shape) > 2 else MUON
        count = f", {len(kind)} of them" if alone and len(kind) > 1 else ""
        doubt = "" if first.role == "-" else f": {first.doubt}"
        lines += [
            f"    {path!r}: '{ADAMW} or {matrix}',  # {first.shape}{count}{doubt}"
            for path in ([pattern] if alone else [x.path for x in kind])
        ]
    return "\n".join(
        [
            f"nothing says whether {len(doubtful)} of {len(parameters)} parameters are "
            f"matrices; use {loss}a rule for each, in matrices= of an optimizer or "
            "rules= of jax_muon.find_matrices: {",
            *lines,
            "}",
            f"{MUON!r} is a matrix (in, out), as in x @ w. MuonDimensionNumbers, from "
            "optax.contrib, names its axes: (1, 2) in (layers, in, out), (1, (2, 3)) "
            "in (layers, in, heads, head), ((1, 2), 3) in (layers, heads, head, out).",
        ]
    )


def _pattern(kind: Sequence[Parameter]) -> str:
    """The path that parameters of one kind share, with * for the numbers that vary."""
    pieces = zip(*(re.split(r"(\d+)", x.path) for x in kind), strict=True)
    return "".join(x[0] if len({*x}) == 1 else "*" for x in pieces)


def numbers_text(reduction: Sequence[int], output: Sequence[int]) -> str:
    """Dimension numbers as a user writes them."""
    sides = [x[0] if len(x) == 1 else (*x,) for x in (reduction, output)]
    return f"MuonDimensionNumbers({sides[0]}, {sides[1]})"
