"""How the parts of parameters with splits are read, given how the whole ones are."""

import dataclasses
from collections.abc import Mapping

from jax_muon import splits as splitting
from jax_muon.axes import MatrixAxes, Parameter
from jax_muon.reading.projections import projection
from jax_muon.splits import Fitted, Splits


def read_parts(
    parameters: Mapping[str, Parameter], splits: Splits
) -> dict[str, Parameter]:
    """How parts are read, given how whole parameters are.

    Raises:
      ValueError: for splits that do not fit.
    """
    splitting.check(splits)
    readings = dict(parameters)
    for pattern, split in splits.items():
        fitted = splitting.fit(pattern, split, readings)
        readings = {
            parameter.path: parameter
            for path, whole in readings.items()
            for parameter in (_read(fitted[path], whole) if path in fitted else [whole])
        }
    return readings


def _read(split: Fitted, whole: Parameter) -> list[Parameter]:
    """How the parts of a parameter are read, given how the whole is."""
    shape, axis, parts = list(whole.shape), split.axis, split.parts
    if not isinstance(parts, int):
        return [
            dataclasses.replace(
                whole,
                path=f"{whole.path}/{name}",
                shape=(*shape[:axis], width, *shape[axis + 1 :]),
                role=projection(name) or whole.role,
            )
            for name, width in parts.items()
        ]
    batch, axes = splitting.batch_axis(len(shape)), whole.axes
    shape[axis] //= parts
    shape.insert(batch, parts)
    if axes is not None:
        before, fan_in, fan_out = (
            tuple(axis + (axis >= batch) for axis in side)
            for side in (axes.batch, axes.reduction, axes.output)
        )
        axes = MatrixAxes(tuple(sorted((*before, batch))), fan_in, fan_out)
    return [dataclasses.replace(whole, shape=tuple(shape), axes=axes)]
