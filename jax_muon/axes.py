"""Parameters as batches of matrices: the values that a reading consists of.

A parameter is read as a batch of matrices (in, out): the axes that are summed over when
the model applies it (`reduction_axis`), the axes that it produces (`output_axis`), and
every other axis as a batch. `MatrixAxes` holds that reading for one leaf.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.lib.array_utils import normalize_axis_tuple
from optax.contrib import MuonDimensionNumbers

# The labels that a reading gives: of matrices, and of everything else.
MUON, ADAMW = "muon", "adamw"


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are batch, in and out; indices are non-negative.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> from optax.contrib import MuonDimensionNumbers
      >>> rules = {"up": MuonDimensionNumbers(-2, -1)}
      >>> jm.read({"up": jnp.ones((3, 4, 8))}, rules=rules)["up"].axes
      MatrixAxes(batch=(0,), reduction=(1,), output=(2,))
    """

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
        """The parameter as a batch of matrices."""
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
      options: readings of an ambiguous one, the likeliest first; None is no matrix.
      scanned: the axes that a scan takes one element at a time, such as layers.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> up = jm.read({"up": jnp.ones((4, 8))}, rules={"up": "muon"})["up"]
      >>> up.role, up.axes.reduction, up.axes.output
      ('kernel', (0,), (1,))
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    label: str
    role: str
    reason: str
    axes: MatrixAxes | None
    doubt: str | None = None
    options: tuple[MatrixAxes | None, ...] = ()
    scanned: tuple[int, ...] = ()

    def is_read_like(self, other: "Parameter") -> bool:
        """Whether both have one label, and one reading as matrices."""
        return (self.label, self.axes) == (other.label, other.axes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array is this parameter, or some of its scanned layers."""
        return len(shape) == len(self.shape) and all(
            n == own or axis in self.scanned
            for axis, (n, own) in enumerate(zip(shape, self.shape, strict=True))
        )

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """Number of matrices, their inputs and outputs; None if it is not a matrix."""
        if self.axes is None:
            return None
        fan_in, fan_out = self.axes.fan(self.shape)
        return math.prod(self.shape[axis] for axis in self.axes.batch), fan_in, fan_out


def leaf_axes(
    path: str, shape: tuple[int, ...], dtype: Any, spec: MuonDimensionNumbers
) -> MatrixAxes:
    """The axes that dimension numbers name.

    Raises:
      ValueError: with path and shape, for a leaf that is not a floating-point matrix,
        and axes out of range, repeated or overlapping.
    """
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


def is_real(dtype: Any) -> bool:
    """True for real floating-point dtypes of at least 16 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 16


def not_a_matrix(shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why a leaf can in no way be read as matrices, or None if it can."""
    if is_real(dtype) and len(shape) >= 2 and 0 not in shape:
        return None
    return (
        f"with dtype {dtype} it cannot be read as matrices, which have at least two "
        "axes, none of them empty, and real floating point of at least 16 bits"
    )
