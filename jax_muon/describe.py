"""A table of what a recipe will do with each parameter, to read before training."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_muon.mesh import owners
from jax_muon.mesh.axes import AxisName, axis_names
from jax_muon.mesh.global_view import GlobalView, Specs, own_specs
from jax_muon.mesh.owned import MatrixLayout
from jax_muon.mesh.owners import Pool
from jax_muon.polar.factors import gram_exchanges, polar_express
from jax_muon.reading import axes as matrices
from jax_muon.reading import paths
from jax_muon.reading.axes import DimensionNumbers
from jax_muon.reading.joins import Joins, make_blocks
from jax_muon.reading.labels import MUON, label_params
from jax_muon.recipes import nanochat
from jax_muon.splits import Parts, Splits
from jax_muon.transforms import shape_rule

_HEADER = ("parameter", "shape", "as matrices", "label", "scale", "state")


def describe(
    params: Any,
    labels: Any = None,
    *,
    tx: optax.GradientTransformation | None = None,
    rule: str = "max_ratio",
    dimension_numbers: DimensionNumbers = None,
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
    zero2_axis: AxisName | None = None,
) -> str:
    """How every parameter is read, labelled and scaled, and what its state costs.

    Args:
      params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      tx: the optimizer whose state is measured; None: `nanochat` with these labels.
      rule: of `scale_by_shape`, for the column "scale".
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.
      splits: as the recipe has them; the table then has a row for each part.
      joins: as the recipe has them.
      mesh: also show how the matrices are divided over this mesh, how well, and what is
        sent for it: between owners if `specs` or the parameters' own shardings divide
        them, else by ZeRO-2.
      specs: how parameters are sharded over the mesh; None: as `params` are.
      small: as the recipe has it.
      zero2_axis: the mesh axis, or axes, that ZeRO-2 divides over; None for all.

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
    specs = own_specs(params) if specs is None else specs
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    labels = label_params if labels is None else labels
    tree = labels(params) if callable(labels) else labels
    by_path = dict(paths.leaves_with_paths(tree))
    if tx is None:
        others = set(by_path.values()) - {MUON, "adamw"}
        tx = nanochat(
            labels=tree,
            dimension_numbers=dimension_numbers,
            splits=splits,
            adamw_groups={label: optax.adamw(0.0) for label in others},
        )
    scale = shape_rule(rule)
    masked = _only_muon(params, by_path)
    numbers = matrices.as_dimension_numbers(
        dict(
            zip(
                (path for path, _ in paths.leaves_with_paths(masked)),
                matrices.matrix_axes(masked, dimension_numbers, context=params),
                strict=True,
            )
        )
    )
    if splits:
        parts = Parts.of(params, splits)
        numbers, specs = parts.numbers(numbers), parts.specs(params, mesh, specs)
        state_of = tx.init
        params = jax.eval_shape(parts.split, params)
        state = _state_bytes(lambda p: state_of(parts.join(p)), params)
        masked = _only_muon(params, by_path)
    else:
        state = _state_bytes(tx.init, params)

    matrix_leaves = paths.leaves_with_paths(masked)
    names = [path for path, _ in matrix_leaves]
    shapes = [leaf.shape for _, leaf in matrix_leaves]
    all_axes = matrices.matrix_axes(masked, numbers)
    blocks = make_blocks(names, shapes, all_axes, joins)
    joined = {names[leaf]: b.joined for b in reversed(blocks) for leaf in b.leaves}
    axes_by_path = dict(zip(names, all_axes, strict=True))

    rows = []
    elements = {True: 0, False: 0}
    for path, leaf in paths.leaves_with_paths(params):
        read, factor = "-", "-"
        if path in axes_by_path:
            fan_in, fan_out = axes_by_path[path].fan(leaf.shape)
            batch = leaf.size // (fan_in * fan_out)
            read = f"{batch} x ({fan_in}, {fan_out})"
            read += f", {joined[path]} as one" if joined[path] > 1 else ""
            factor = f"{scale(fan_in, fan_out):.4g}"
        elements[path in axes_by_path] += leaf.size
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        label = str(paths.find_prefix(by_path, path))
        rows.append((path, shape, read, label, factor, _bytes(state.get(path, 0))))

    total = (
        f"{len(rows)} parameters: {sum(elements.values())} elements, "
        f"{elements[True]} of them {MUON}; state {_bytes(sum(state.values()))}"
    )
    lines = [*_aligned([_HEADER, *rows]), total]
    if mesh is not None and specs is not None:
        view = GlobalView.of(masked, mesh, specs)
        local = owners.local_blocks(view, names, shapes, all_axes, joins)
        pieces = owners.local_batches(view, matrix_leaves, all_axes, local)
        pools = owners.make_pools(
            pieces,
            local[2],
            view.sizes,
            small=small,
            exchanges=functools.partial(gram_exchanges, polar_express),
        )
        lines += ["", *_owners(pools, view.sizes)]
    elif mesh is not None:
        axes = axis_names(zero2_axis or mesh.axis_names)
        devices = math.prod(mesh.shape[name] for name in axes)
        layout = MatrixLayout.of(masked, axes, devices, numbers, joins)
        lines += ["", *_division(layout)]
    return "\n".join(lines)


def _only_muon(params: Any, by_path: dict[str, str]) -> Any:
    """The parameters that are labelled as matrices, None in the place of others."""

    def keep(key_path: tuple[Any, ...], leaf: Any) -> Any:
        label = paths.find_prefix(by_path, paths.path_string(key_path))
        return leaf if label == MUON else None

    return jax.tree_util.tree_map_with_path(keep, params)


def _owners(pools: Sequence[Pool], sizes: dict[str, int]) -> list[str]:
    """Who computes the matrices of each pool, and what travels for it."""
    rows = [("pool", "over", "matrices", "owners", "each", "sent")]
    work = np.zeros([size for size in sizes.values() if size > 1])
    total = sent = 0.0
    for pool in pools:
        different = math.prod(sizes[name] for name in pool.batch)
        count = pool.count * different
        over = "; ".join(
            f"{what} {', '.join(names)}"
            for what, names in (
                ("batch", pool.batch),
                ("short", pool.short),
                ("long", pool.long),
            )
            if names
        )
        least, most = pool.whole, pool.whole + any(pool.extra)
        each = f"{least}" if least == most else f"{least} or {most}"
        work = work + pool.load(sizes)
        total += count * pool.flops
        sent += pool.sent_bytes(sizes)
        rows.append(
            (
                f"{pool.fan[0]}x{pool.fan[1]}_{np.dtype(pool.dtype).name}",
                over or "-",
                f"{count}",
                f"{len(pool.extra) * different}"
                if pool.extra
                else "Gram sums"
                if pool.exchanges
                else "all",
                each if pool.extra else f"{pool.count}",
                _bytes(int(pool.sent_bytes(sizes))),
            )
        )
    devices = math.prod(sizes.values())
    balance = work.max() * devices / total if total else 1.0
    return [
        *_aligned(rows),
        f"{devices} devices: the busiest does {balance:.2f} of an even share of the "
        f"work; each sends {_bytes(int(sent))} a step",
    ]


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


def _state_bytes(init: Callable[[Any], Any], params: Any) -> dict[str, int]:
    """Bytes of optimizer state by the path of the parameter that they belong to."""
    state = jax.eval_shape(init, params)
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
