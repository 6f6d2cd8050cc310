"""How the parameters of one tree are read as matrices: a value to print, keep and test.

A parameter is a batch of matrices (in, out): the axes that are summed over when the
model applies it (`reduction_axis`), the axes that it produces (`output_axis`), and
every other axis as a batch. `jax_muon.find_matrices` makes a `Matrices`, in which the
pieces look parameters up by path. It holds no arrays, so one serves every mesh.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree
from numpy.lib.array_utils import normalize_axis_tuple
from optax.contrib import MuonDimensionNumbers

from jax_muon.base import checks, facts, trees
from jax_muon.base.array_types import on_users_axes
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

    def view(self, x: Float[Array, "..."]) -> Float[Array, "batch fan_in fan_out"]:
        """The parameter as a batch of matrices.

        A query (12, 768, 12, 64) with batch (0,), in (1,) and out (2, 3) becomes
        (12, 768, 768).
        """
        order = self.batch + self.matrix
        count = math.prod(x.shape[axis] for axis in self.batch)
        return x.transpose(order).reshape(count, *self.fan(x.shape))

    def undo(
        self, y: Float[Array, "batch fan_in fan_out"], shape: Sequence[int]
    ) -> Float[Array, "..."]:
        """The parameter of this shape whose `view` is y."""
        order = self.batch + self.matrix
        return y.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


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
        return len(shape) == len(self.shape) and all(
            n == size or axis in self.scanned
            for axis, (n, size) in enumerate(zip(shape, self.shape, strict=True))
        )

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
            raise KeyError(
                f"parameter {path!r} was not read, only {names}; expected the tree "
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

    def axes(self, path: str) -> MatrixAxes:
        """Axes of a parameter; a ValueError if it is no matrix, or ambiguous."""
        parameter = self[path]
        if parameter.doubt is not None and parameter.label != ADAMW:
            raise ValueError(list_doubts([parameter], [*self.values()]))
        if parameter.axes is None or parameter.label == ADAMW:
            raise ValueError(
                f"parameter {path!r} of shape {parameter.shape} has the label "
                f"{parameter.label!r}, but a piece for matrices gets it; expected "
                "another label for it in optax.multi_transform, or pieces within "
                "jax_muon.partition, with an optax transform for that label, or "
                f"rules={{{path!r}: {MUON!r}}} if it is one"
            )
        return parameter.axes

    def labels(self, params: PyTree) -> PyTree:
        """The label of every parameter, for `optax.multi_transform`.

        A Flax box gets one label, so that it is masked as a whole.
        """
        return jax.tree_util.tree_map_with_path(
            lambda key_path, _: self[trees.path_string(key_path)].label,
            params,
            is_leaf=trees.is_box,
        )


# A piece takes a reading, perhaps of a larger tree, or a function of the tree it sees.
Given: TypeAlias = Matrices | Callable[[PyTree], Matrices] | None


def read_by(function: Callable[[PyTree], Any], tree: PyTree) -> Any:
    """The result of a user's function for the shapes of a tree."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    with on_users_axes():
        return function(shapes)


def reading_of(matrices: Given, tree: PyTree) -> Matrices:
    """The reading that a piece was given; None reads each leaf as a matrix (in, out).

    It is a `Matrices`, perhaps of a larger tree, or a function that returns one for the
    part of the tree that the piece sees.

    Raises a ValueError for a reading that splits parameters, which `partition` does.
    """
    reading: Any = matrices
    if trees.is_function(matrices):
        reading = read_by(matrices, tree)
    if reading is not None:
        rules = "find_matrices(params, rules={...})"
        expected = f"{_READ}, or {rules}, a function of params that returns it, or None"
        expected += checks.injected(reading, "matrices")
        checks.check_kind("matrices", reading, Matrices, expected)
        facts.note().leaves.update(reading)
        facts.note().parameters.update(reading)
        if reading.splits:
            raise ValueError(
                f"matrices= splits {', '.join(reading.splits)}, which a piece would "
                "not apply; expected the piece within jax_muon.partition, which does"
            )
        return reading
    matched = {}
    for path, leaf in trees.leaves_with_paths(tree):
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if len(shape) != 2 or not_a_matrix(shape, dtype):
            raise ValueError(
                f"parameter {path!r} of shape {shape}: without `matrices` a piece "
                "treats every leaf as one matrix (in, out); expected "
                f"matrices={_READ}, or the piece within jax_muon.partition, which "
                f"gives other parameters to another optimizer{checks.vector_hint(tree)}"
            )
        one_matrix = MatrixAxes((), (0,), (1,))
        matched[path] = Parameter(path, shape, dtype, MUON, "kernel", "", one_matrix)
    facts.note().parameters.update(matched)
    return Matrices(matched)


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
            f"matrices; expected a loss that shows it, {_READ}, or a rule for each, in "
            "matrices= of an optimizer or rules= of jax_muon.find_matrices: {",
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
