"""Parameters as batches of matrices.

A parameter is read as a batch of matrices (in, out): the axes that are summed over when
the model applies it (`reduction_axis`), the axes that it produces (`output_axis`), and
every other axis as a batch. `MatrixAxes` holds that reading for one leaf.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are batch, in and out; indices are non-negative.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> layers = {"up": jnp.ones((3, 4, 8)), "norm": jnp.ones((3, 4))}
      >>> jm.read({"layers": layers})["layers/up"].axes
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
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return y.reshape([shape[axis] for axis in order]).transpose(inverse)


def leaf_axes(
    path: str, shape: tuple[int, ...], dtype: Any, spec: MuonDimensionNumbers
) -> MatrixAxes:
    """The axes that dimension numbers name.

    Raises:
      ValueError: with path and shape, for a leaf that is not a floating-point matrix,
        and axes out of range, repeated or overlapping.
    """
    where = f"parameter {path!r} of shape {shape}"
    if problem := not_a_matrix(path, shape, dtype):
        raise ValueError(problem)

    def normalized(field: str) -> tuple[int, ...]:
        axes = getattr(spec, field)
        axes = (axes,) if isinstance(axes, int) else tuple(axes or ())
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{where}: {field}={axes} is out of range; expected "
                    f"{-len(shape)} to {len(shape) - 1}"
                )
        return tuple(axis % len(shape) for axis in axes)

    reduction, output = normalized("reduction_axis"), normalized("output_axis")
    matrix = reduction + output
    if len(set(matrix)) < len(matrix) or not reduction or not output:
        raise ValueError(
            f"{where}: reduction_axis={reduction} and output_axis={output} must name "
            "at least one axis each and no axis twice"
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in matrix)
    return MatrixAxes(batch, reduction, output)


def is_real(dtype: Any) -> bool:
    """Whether a dtype is real floating point in which sums can be computed."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 16


def not_a_matrix(path: str, shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why a leaf cannot be read as matrices at all, or None where it can."""
    where = f"parameter {path!r} of shape {shape}"
    if not is_real(dtype):
        return (
            f"{where} and dtype {dtype} cannot be read as matrices: expected real "
            "floating point of at least 16 bits; label it for another optimizer"
        )
    if len(shape) < 2 or 0 in shape:
        return (
            f"{where} cannot be read as a matrix: expected at least two axes, none of "
            "them empty; label it for another optimizer, such as AdamW"
        )
    return None
