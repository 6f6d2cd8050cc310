"""Runs a case and says what is wrong with it, if anything is."""

import dataclasses
import functools
import math
import pathlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks.fuzz.cases import Case
from benchmarks.fuzz.numbers import gradients, parameters, tree_of
from jax_muon import paths
from jax_muon.tools.verify import Comparison, compare, compared, last_bits

POLARS: dict[str, Callable[[], Any]] = {
    "exact": jm.ExactPolar,
    "gram": lambda: jm.PolarExpress(3, form="gram", dtype="float32"),
    "schatten": lambda: jm.PolarExpress(3, norm="schatten4", dtype="float32"),
}

# What is around a recipe, inside `on_mesh`.
AROUND: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda tx: tx,
    "injected": lambda tx: tx,
    "clip outside": lambda tx: tx,
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "skip": jm.skip_nonfinite,
    "if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "every two": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}
RIGHT, REFUSED = "right", "refused"
_PACKAGE = str(pathlib.Path(jm.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case: "right", "refused", or the kind of what is wrong."""

    kind: str
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether there is something to repair."""
        return self.kind not in (RIGHT, REFUSED)


def check(case: Case) -> Outcome:
    """Run a case on one device and on its mesh, and judge."""
    with mock.patch(
        "jax_muon.recipes.orthogonalize",
        lambda *args, **given: jm.orthogonalize(*args, small=case.small, **given),
    ):
        try:
            found = _train_step(case) if case.train_step else _on_mesh(case)
        except Exception as error:
            if not _is_ours(error):
                return Outcome(f"foreign {type(error).__name__}", _text(error))
            return _judge_refusal(case, error)
    for x in found:
        for problem in x.problems:
            # What has an end stays so; what has none, a guard keeps out of the state.
            kind = next(k for k in ("differs from", "finite", "") if k in problem)
            return Outcome(kind or "other bits", problem)
    return Outcome(RIGHT)


def optimizer(case: Case) -> Any:
    """The optimizer of one device."""
    matrices = functools.partial(
        jm.read,
        joins=case.joins,
        splits={path: jm.Split(parts) for path, parts in case.splits.items()} or None,
        out_in=case.out_in,
        # One rule for a path: dimension numbers already make a matrix of it.
        rules={path: MuonDimensionNumbers(*axes) for path, axes in case.axes.items()}
        | {p: x for p, x in case.labels.items() if x != "muon" or p not in case.axes},
    )
    given = {**case.settings, "matrices": matrices}
    if any(leaf.dtype == "float16" for leaf in case.leaves):
        given["adamw"] = optax.sgd(1e-3)  # AdamW's squares are 0 or infinite there
    if "frozen" in case.labels.values():
        given["groups"] = {"frozen": optax.set_to_zero()}
    if case.polar is not None:
        given["polar"] = POLARS[case.polar]()
    recipe = getattr(jm, case.recipe)
    if case.around == "injected":
        static = tuple(k for k, v in given.items() if not isinstance(v, float))
        recipe = optax.inject_hyperparams(recipe, static_args=static)
    return AROUND[case.around](recipe(**given))


def mesh_of(case: Case) -> Mesh:
    """The mesh."""
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    sizes = tuple(case.mesh.values())
    return jax.make_mesh(
        sizes,
        tuple(case.mesh),
        axis_types=(kind,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes)],
    )


def specs_of(case: Case) -> Any:
    """Where parameters lie, on the structure of the tree."""
    return tree_of(case, [PartitionSpec(*leaf.spec) for leaf in case.leaves])


def _many(case: Case) -> Any:
    tx = jm.on_mesh(
        optimizer(case),
        mesh_of(case),
        specs_of(case),
        case.divide,
        min_size=case.min_size,
    )
    return _outside(case, tx)


def _outside(case: Case, tx: Any) -> Any:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), tx)
    return clipped if case.around == "clip outside" else tx


def _on_mesh(case: Case) -> list[Comparison]:
    found = compare(
        _outside(case, optimizer(case)),
        _many(case),
        parameters(case),
        [gradients(case, step) for step in range(1, case.steps + 1)],
        mesh_of(case),
        specs_of(case),
    )
    return [*found.updates, *found.state]


# --- train steps ----------------------------------------------------------------------


def _train_step(case: Case) -> list[Comparison]:
    """The distance that parameters travel, beside that of one device.

    The loss is linear: a device's gradient is the mean of its part of the batch.
    """
    given: Mapping[str, Any] = case.train_step or {}
    batch_axes = given["axis"]
    parts = math.prod(case.mesh[n] for n in batch_axes) * given["microbatches"]
    weights = np.resize(np.float32([0.5, 1.5]), parts)
    weights *= parts / weights.sum()
    grads = [gradients(case, step) for step in range(1, case.steps + 1)]
    start = parameters(case)
    for x in jax.tree.leaves(start):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return []  # of which no loss has a gradient

    def loss(params: Any, batch: Any) -> Any:
        each = jax.tree.map(
            lambda p, g: jnp.sum(p * jnp.mean(g, 0).astype(p.dtype), dtype="float32"),
            params,
            batch,
        )
        return sum(jax.tree.leaves(each))

    def batch_of(grad: Any) -> Any:
        def each(g: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):  # numbers that are to overflow
                return (g * weights.reshape(-1, *[1] * g.ndim)).astype(g.dtype)

        return jax.tree.map(each, grad)

    def run(step: Any, params: Any, state: Any, each: Any) -> list[np.ndarray]:
        for x in each:
            params, state, *_ = step(params, state, x)
        return [
            np.asarray(x, np.float64) - np.asarray(s, np.float64)
            for x, s in zip(
                *map(jax.tree.leaves, ((params, state), begin)), strict=True
            )
        ]

    tx = optimizer(case)

    @jax.jit
    def alone(params: Any, state: Any, batch: Any) -> Any:
        # As the devices' means do: divided first, so that float16 does not overflow.
        grad = jax.grad(loss)(params, batch)
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    begin = (start, jax.device_get(state))
    batches = [batch_of(grad) for grad in grads]
    noisy = [batch_of(jax.tree.map(last_bits, grad)) for grad in grads]
    want = run(alone, params, state, batches)
    other = run(alone, params, state, noisy)
    step = jm.make_train_step(
        loss, tx, mesh_of(case), specs=specs_of(case), min_size=case.min_size, **given
    )
    placed = step.init(params)
    got = run(step, *placed, batches)
    narrow = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(start))
    narrow |= "bfloat16" in case.settings.values()
    least = 0.1 if narrow else 2e-5
    names = [name for name, _ in paths.leaves_with_paths(start)]
    found = []
    columns = zip(names, jax.tree.leaves(start), got, want, other, strict=False)
    for name, s, x, y, z in columns:
        # Every step rounds a parameter, which may be far longer than its way.
        far = np.linalg.norm(s.astype(np.float64)) / max(np.linalg.norm(y), 1e-300)
        bound = least + case.steps * float(np.finfo(np.float32).eps) * far
        entry = compared(bound, (jnp.asarray(x),), (y,), (z,))
        found.append(dataclasses.replace(entry, path=name, spec=PartitionSpec()))
    return found


# --- refusals -------------------------------------------------------------------------


def _judge_refusal(case: Case, error: Exception) -> Outcome:
    """Refusals are the same on one device, unless the layout cannot be."""
    alone = _refusal(lambda: _outside(case, optimizer(case)), case)
    if alone is None:
        if not case.fits or case.train_step:
            return Outcome(REFUSED, str(error))
        return Outcome("refused on the mesh alone", _text(error))
    many = str(error) if case.train_step else _refusal(lambda: _many(case), case)
    if many is None:
        return Outcome("refused on one device alone", alone)
    if many != alone and case.fits:
        return Outcome("refused otherwise", f"{alone}\non the mesh: {many}")
    return Outcome(REFUSED, alone)


def _refusal(make: Callable[[], Any], case: Case) -> str | None:
    """The error of an abstract init and update."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters(case)
    )
    try:
        tx = make()
        if not case.explicit:
            jax.eval_shape(tx.update, shapes, jax.eval_shape(tx.init, shapes), shapes)
        else:
            jm.describe(tx, shapes)
    except Exception as error:
        return str(error)
    return None


def _is_ours(error: Exception) -> bool:
    """Whether we raised it: a ValueError or TypeError out of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, (ValueError, TypeError)) and (
        frames[-1].filename.startswith(_PACKAGE)
    )


def _text(error: Exception) -> str:
    ours = [
        f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_PACKAGE)
    ]
    return f"{type(error).__name__}: {error} (through {' '.join(ours[-4:])})"
