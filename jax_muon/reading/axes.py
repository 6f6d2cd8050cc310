"""Parameters as batches of matrices.

A parameter is read as a batch of matrices (in, out): the axes that are summed over when
the model applies it (`reduction_axis`), the axes that it produces (`output_axis`), and
every other axis as a batch. `MatrixAxes` holds that reading for one leaf.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from jax_muon.reading import paths

# One for all parameters, a tree (or a prefix of one) of them, or a function that gives
# such a tree. None, at any place, reads the parameter by its path and rank.
DimensionNumbers = Any

# Names of attention projections in Flax and in models written by hand.
QUERY_LIKE = {"q", "k", "v", "query", "key", "value", "wq", "wk", "wv"}
QUERY_LIKE |= {"q_proj", "k_proj", "v_proj"}
_OUT_LIKE = {"o", "out", "wo", "o_proj", "out_proj"}


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


def matrix_axes(
    tree: Any, dimension_numbers: DimensionNumbers = None, *, context: Any = None
) -> list[MatrixAxes]:
    """How each leaf of a tree is read as matrices, in the order of `jax.tree.leaves`.

    Without dimension numbers, by what stands beside a parameter and by its name: a
    sibling `bias` has the shape of the batch and output axes; the kernel of a module
    called conv is (*window, in, out), with the window and `in` summed over, behind as
    many axes of layers as the `scale` of a norm beside it has; attention
    projections with a head axis, in a module that has both a query and an output
    projection, are (embed, heads, head_dim) and (heads, head_dim, embed); everything
    else is (*batch, in, out). `describe` shows the outcome.

    Args:
      tree: parameters, or updates of their shape. Masked leaves are passed over.
      dimension_numbers: `optax.contrib.MuonDimensionNumbers` for all leaves, or a tree
        of them, or a function of `tree` that gives one. In a tree a prefix serves for
        all leaves below it, and None means the rule above.
      context: the whole model, of which `tree` may be a masked part: biases, for
        instance, are masked where Muon's matrices are read. None for `tree` itself.

    Returns:
      One `MatrixAxes` a leaf.

    Raises:
      ValueError: with path and shape, for a leaf with fewer than two axes or no
        elements, a dtype that is not real floating point, axes out of range, repeated
        or overlapping, a convolution kernel of five axes or more with neither a bias
        nor a norm to tell its window from scanned layers; with a context, for dimension
        numbers at a path that no parameter has.
    """
    flat = paths.leaves_with_paths(tree)
    if callable(dimension_numbers):
        dimension_numbers = dimension_numbers(tree)
    specs = {
        path: spec
        for path, spec in paths.leaves_with_paths(
            dimension_numbers, is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
        )
        if spec is not None
    }
    shapes = {
        path: tuple(getattr(leaf, "shape", ()))
        for path, leaf in paths.leaves_with_paths(tree if context is None else context)
    }
    for path, spec in specs.items():
        if not isinstance(spec, MuonDimensionNumbers):
            raise ValueError(
                f"dimension_numbers at {path!r}: {spec!r}; valid are "
                "optax.contrib.MuonDimensionNumbers or None"
            )
        known = any(f"{name}/".startswith(f"{path}/") for name in shapes)
        if context is not None and path and not known:
            raise ValueError(
                f"dimension_numbers at {path!r}, which no parameter has; there are "
                + ", ".join(shapes)
            )
    return [
        _leaf_axes(
            path,
            shapes[path],
            jnp.result_type(leaf),
            paths.find_prefix(specs, path) or _by_role(path, shapes),
        )
        for path, leaf in flat
    ]


def as_dimension_numbers(
    axes_by_path: Mapping[str, MatrixAxes],
) -> dict[str, MuonDimensionNumbers]:
    """A reading as dimension numbers, for where the model is not seen whole."""
    return {
        path: MuonDimensionNumbers(axes.reduction, axes.output)
        for path, axes in axes_by_path.items()
    }


def _by_role(path: str, shapes: dict[str, tuple[int, ...]]) -> MuonDimensionNumbers:
    ndim = len(shapes[path])
    if ndim < 3:
        return MuonDimensionNumbers(-2, -1)
    if found := _by_bias(path, shapes):
        return found
    if is_convolution(path):
        layers = _layers_by_scale(path, shapes)
        if layers is None and ndim > 4:
            raise ValueError(
                f"parameter {path!r} of shape {shapes[path]} is a convolution kernel "
                "whose window cannot be told from scanned layers; valid are "
                "dimension_numbers for it, such as MuonDimensionNumbers((1, 2, 3), 4)"
            )
        return MuonDimensionNumbers(tuple(range(layers or 0, ndim - 1)), ndim - 1)
    return _by_attention(path, shapes) or MuonDimensionNumbers(-2, -1)


def is_convolution(path: str) -> bool:
    """Whether a parameter, or the module that owns it, is called conv.

    ConvLocal is none: it has a matrix (window and in, out) for each place.
    """
    owner, name = f"/{path}".split("/")[-2:]
    words = paths.words(owner) + paths.words(name)
    return "conv" in words and "local" not in words


def _layers_by_scale(path: str, shapes: dict[str, tuple[int, ...]]) -> int | None:
    """How many axes of layers a kernel has, by the scales of norms beside its module.

    The scale of one norm has one axis, inputs or outputs; those before are layers.
    """
    parts, kernel = path.split("/"), shapes[path]
    for depth in range(len(parts) - 2, -1, -1):
        leads = {
            shape[:-1]
            for other, shape in shapes.items()
            if (beside := other.split("/"))[:depth] == parts[:depth]
            and len(beside) == depth + 2
            and beside[-1] == "scale"
            and shape[-1:] in (kernel[-2:-1], kernel[-1:])
        }
        if leads:
            lead = leads.pop()
            fits = not leads and kernel[: len(lead)] == lead
            return len(lead) if fits else None
    return None


def _by_bias(
    path: str, shapes: dict[str, tuple[int, ...]]
) -> MuonDimensionNumbers | None:
    """The one reading in which the sibling bias is (*batch, *output), or None.

    The outputs are the last axes or, in a transposed convolution with
    `transpose_kernel=True`, the one before the last.
    """
    kernel = shapes[path]
    bias = shapes.get(f"{path.rpartition('/')[0]}/bias".lstrip("/"), ())
    ends = (len(kernel), len(kernel) - 1) if is_convolution(path) else (len(kernel),)
    for end in ends:
        readings = []
        for batch in range(len(bias)):
            output = tuple(range(end - len(bias) + batch, end))
            inputs = tuple(i for i in range(batch, len(kernel)) if i not in output)
            if (
                len(bias) < len(kernel)
                and bias == tuple(kernel[i] for i in (*range(batch), *output))
                and (end == len(kernel) or len(output) == 1)
            ):
                readings.append(MuonDimensionNumbers(inputs, output))
        if readings:
            return readings[0] if len(readings) == 1 else None
    return None


def _by_attention(
    path: str, shapes: dict[str, tuple[int, ...]]
) -> MuonDimensionNumbers | None:
    """Axes of an attention projection that keeps its heads apart, else None.

    Such a module is told from scanned plain kernels (layers, in, out) by siblings: the
    heads and head_dim of a query (*layers, embed, heads, head_dim) are those of out,
    (*layers, heads, head_dim, embed).
    """
    parts = path.split("/")
    for depth, name in enumerate(parts):
        siblings = {}
        for other in sorted(QUERY_LIKE | _OUT_LIKE):
            renamed = "/".join([*parts[:depth], other, *parts[depth + 1 :]])
            if len(shapes.get(renamed, ())) == len(shapes[path]):
                siblings[other] = shapes[renamed]
        heads = {
            shape[-3:-1] for other, shape in siblings.items() if other in _OUT_LIKE
        } & {shape[-2:] for other, shape in siblings.items() if other in QUERY_LIKE}
        if heads and name in _OUT_LIKE:
            return MuonDimensionNumbers((-3, -2), -1)
        if heads and name in QUERY_LIKE:
            return MuonDimensionNumbers(-3, (-2, -1))
    return None


def _leaf_axes(
    path: str, shape: tuple[int, ...], dtype: Any, spec: MuonDimensionNumbers
) -> MatrixAxes:
    where = f"parameter {path!r} of shape {shape}"
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{where} and dtype {dtype} cannot be read as matrices: valid are real "
            "floating-point parameters; label it for another optimizer"
        )
    if len(shape) < 2 or 0 in shape:
        raise ValueError(
            f"{where} cannot be read as a matrix: valid are at least two axes, none of "
            "them empty; label it for another optimizer, such as AdamW"
        )

    def normalized(field: str) -> tuple[int, ...]:
        axes = getattr(spec, field)
        axes = (axes,) if isinstance(axes, int) else tuple(axes or ())
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{where}: {field}={axes} is out of range; valid are "
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
