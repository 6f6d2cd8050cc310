"""A table of what a recipe will do with each parameter, to read before training."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_muon import matrices, paths
from jax_muon.labels import MUON, label_params
from jax_muon.matrices import DimensionNumbers
from jax_muon.recipes import nanochat
from jax_muon.sharding.axes import AxisName, axis_names
from jax_muon.sharding.owned import MatrixLayout
from jax_muon.transforms import shape_rule

_HEADER = ("parameter", "shape", "as matrices", "label", "scale", "state")


def describe(
    params: Any,
    labels: Any = None,
    *,
    tx: optax.GradientTransformation | None = None,
    rule: str = "max_ratio",
    dimension_numbers: DimensionNumbers = None,
    mesh: Mesh | None = None,
    zero2_axis: AxisName | None = None,
) -> str:
    """How every parameter is read, labelled and scaled, and what its state costs.

    Args:
      params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      tx: the optimizer whose state is measured; None: `nanochat` with these labels.
      rule: of `scale_by_shape`, for the column "scale".
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.
      mesh: also show how ZeRO-2 divides the matrices over this mesh, and what the
        division leaves empty.
      zero2_axis: the mesh axis, or axes, that it divides them over; None for all.

    Returns:
      A table in text. "as matrices" is batch x (in, out); "scale" multiplies the
      update; "state" is memory, to which the total adds what is shared (counts).

    Raises:
      ValueError: as the recipes at init.

    Examples:
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> print(describe(shapes))
      parameter   shape      as matrices     label   scale     state
      up          64 x 256   1 x (64, 256)   muon        2   66.6 KB
      wte         96 x 64    -               adamw       -   49.2 KB
      2 parameters: 22528 elements, 16384 of them muon; state 115.7 KB
    """
    labels = label_params if labels is None else labels
    tree = labels(params) if callable(labels) else labels
    by_path = dict(paths.leaves_with_paths(tree))
    if tx is None:
        others = set(by_path.values()) - {MUON, "adamw"}
        tx = nanochat(
            labels=tree,
            dimension_numbers=dimension_numbers,
            adamw_groups={label: optax.adamw(0.0) for label in others},
        )
    scale = shape_rule(rule)
    state = _state_bytes(tx, params)

    flat = paths.leaves_with_paths(params)
    rows = []
    elements = {True: 0, False: 0}
    is_muon = {path: paths.find_prefix(by_path, path) == MUON for path, _ in flat}
    masked = jax.tree_util.tree_map_with_path(
        lambda key_path, leaf: leaf if is_muon[paths.path_string(key_path)] else None,
        params,
    )
    masked_paths = [path for path, _ in paths.leaves_with_paths(masked)]
    all_axes = matrices.matrix_axes(masked, dimension_numbers, context=params)
    axes_by_path = dict(zip(masked_paths, all_axes, strict=True))
    for path, leaf in flat:
        read, factor = "-", "-"
        if path in axes_by_path:
            fan_in, fan_out = axes_by_path[path].fan(leaf.shape)
            batch = leaf.size // (fan_in * fan_out)
            read = f"{batch} x ({fan_in}, {fan_out})"
            factor = f"{scale(fan_in, fan_out):.4g}"
        elements[is_muon[path]] += leaf.size
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        label = str(paths.find_prefix(by_path, path))
        rows.append((path, shape, read, label, factor, _bytes(state.get(path, 0))))

    total = (
        f"{len(rows)} parameters: {sum(elements.values())} elements, "
        f"{elements[True]} of them {MUON}; state {_bytes(sum(state.values()))}"
    )
    lines = [*_aligned([_HEADER, *rows]), total]
    if mesh is not None:
        axes = axis_names(zero2_axis or mesh.axis_names)
        devices = math.prod(mesh.shape[name] for name in axes)
        numbers = matrices.as_dimension_numbers(axes_by_path)
        layout = MatrixLayout.of(masked, axes, devices, numbers)
        lines += ["", *_division(layout)]
    return "\n".join(lines)


def _division(layout: MatrixLayout) -> list[str]:
    """What each device owns of every stack, and what padding costs."""
    rows = [("stack", "matrices", "slots", "empty", "padding")]
    work = np.zeros(layout.devices)
    padding = total = 0
    for stack in layout.stacks:
        owned = stack.whole + np.array(stack.extra)
        slots = layout.devices * stack.depth
        empty = slots - int(owned.sum())
        size = stack.elements * stack.dtype.itemsize
        padding, total = padding + empty * size, total + slots * size
        work += owned * stack.flops
        count = f"{int(owned.sum())}"
        per_device = f"{layout.devices} x {stack.depth}"
        rows.append((stack.name, count, per_device, f"{empty}", _bytes(empty * size)))
    balance = work.max() / work.mean() if work.any() else 1.0
    waste = 100 * padding / max(total, 1)
    return [
        *_aligned(rows),
        f"{layout.devices} devices: the busiest does {balance:.2f} of the mean work; "
        f"padding is {waste:.1f} % of what is sent and of the momentum",
    ]


def _state_bytes(tx: optax.GradientTransformation, params: Any) -> dict[str, int]:
    """Bytes of optimizer state by the path of the parameter that they belong to."""
    state = jax.eval_shape(tx.init, params)
    known = sorted((path for path, _ in paths.leaves_with_paths(params)), key=len)
    total: dict[str, int] = {}
    for state_path, leaf in paths.leaves_with_paths(state):
        # inner_states/muon/inner_state/0/mu/blocks/0/kernel ends in blocks/0/kernel
        owners = [path for path in known if f"/{state_path}".endswith(f"/{path}")]
        owner = owners[-1] if owners else "shared"
        size = leaf.size * np.dtype(leaf.dtype).itemsize
        total[owner] = total.get(owner, 0) + size
    return total


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width: text to the left, the last two, numbers, to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = len(widths) - 2
    return [
        "   ".join(
            cell.ljust(width) if column < numeric else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
