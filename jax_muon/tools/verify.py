"""Check a layout: compare updates on a mesh with updates on one device.

The two cannot agree exactly: sums run in another order, and the polar iteration
amplifies rounding, the more so the smaller a singular value is.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_muon.base import checks, dtypes, facts, trees
from jax_muon.base.specs import dividing
from jax_muon.base.tables import aligned
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.train_step import IN_ON_MESH
from jax_muon.tools.work import matrices
from jax_muon.transforms.orthogonalize import Orthogonalized

# By bits of the narrowest floating-point dtype in the program. On the matrices of the
# tests, float32 differed by 3e-6 and bfloat16 by 2.5e-2.
_BOUNDS = {64: 1e-10, 32: 2e-5, 16: 0.1, 8: 0.3}
_AMPLIFIED = 10  # what the last bits of gradients change on one device, by as much

_STATE = "state "  # before the path of an array of state

Run = tuple[optax.Params, Sequence[optax.Updates]]  # the gradients of each step


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`: differences and bounds. `print` shows them as a table.

    Attributes:
      differences: by path, the largest difference of an update at any step, relative
        to its norm (NaN if an element is finite on one side only), and its bound; and
        the same of arrays of state, under "state" and a path.
      problems: as sentences; empty if the layout is right.
      remarks: the mesh, how many parameters are sharded, and matrices dealt out.
    """

    differences: Mapping[str, tuple[float, float]]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the layout is right."""
        return not self.problems

    def __str__(self) -> str:
        """A row for each parameter, and all problems, also of the state."""
        rows = [("parameter", "difference", "bound")]
        for name, (apart, bound) in self.differences.items():
            if not name.startswith(_STATE):
                rows.append((name, f"{apart:.1e}", f"{bound:.0e}"))
        verdict = [f"WRONG: {text}" for text in self.problems] or ["right"]
        return "\n".join([*aligned(rows, numbers=2), *self.remarks, *verdict])


def verify(tx: OnMesh, params: optax.Params, **extra_args: Any) -> Verification:
    """Compare an optimizer on a mesh with the same optimizer on one device.

    Two updates of random parameters by random gradients are compared, and one without
    gradients, which shows weight decay; not all of them may be 0. One device has to
    hold the parameters, with six times their updates and state. Smaller shapes with the
    same layout will do: matrices of 256 x 256 are dealt out as large ones are, and
    the table says if none was.

    An array may differ by 2e-5 of its norm in float32, 1e-10 in float64, and 0.1 if a
    16-bit dtype occurs in the program, or by ten times what the last bits of the
    gradients change on one device, if that is more. Updates may also differ by the
    rounding of `gather_dtype`. A recipe's `dtype="float32"` makes the bound sharp.

    Args:
      tx: an optimizer wrapped in `on_mesh`.
      params: the parameters, or their shapes; on Explicit axes with their shardings.
      **extra_args: passed to the update.

    Raises:
      ValueError: an optimizer that is not in `on_mesh`; a tree without parameters.

    Examples:
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), auto)
      >>> shapes = {"mlp": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> tx = jm.muon(0.02, dtype="float32", matrices={"mlp": "muon"})
      >>> tx = jm.on_mesh(tx, mesh, divide="data")
      >>> jm.verify(tx, shapes).ok
      True
    """
    checks.check_kind("tx", tx, OnMesh, IN_ON_MESH)
    optimizer = tx.optimizer
    params = checks.as_arrays("params", params)
    if not jax.tree.leaves(params):
        checks.refuse("params", params, "a tree with at least one array")
    random = np.random.default_rng(0)
    whole, *grads = (
        jax.tree.map(lambda x: _drawn(x, random), params) for _ in range(3)
    )
    # So small that a sign flipped by rounding, in cautious decay, is below every bound.
    start = jax.tree.map(lambda x: (x * 1e-4).astype(x.dtype), whole)
    runs = [(start, grads), (whole, [jax.tree.map(np.zeros_like, whole)])]
    dtype = optimizer.gather_dtype
    shardings = jax.tree.map(lambda x: x.sharding, optimizer.abstract(params)[0])
    rounding = 0.0 if dtype is None else float(jnp.finfo(dtype).eps) / 2
    found = compare(
        optimizer.tx,
        tx,
        runs,
        shardings,
        rounding=rounding,
        must_move=True,
        **extra_args,
    )
    placed, _ = optimizer.place(params)
    sharded, divided = (
        sum(any(dividing(spec, placed.mesh.shape)) for spec in some)
        for some in (placed.param_specs, placed.state_specs)
    )
    mesh, dealt_out = found.remarks
    by_leaf = f"{sharded} of {len(placed.paths)} parameters, and the state of {divided}"
    remarks = mesh, f"sharded: {by_leaf}; {dealt_out}"
    return dataclasses.replace(found, remarks=remarks)


def compare(
    alone: optax.GradientTransformation,
    many: optax.GradientTransformation,
    runs: Sequence[Run],
    shardings: Any,
    *,
    rounding: float = 0.0,
    must_move: bool = False,
    **extra_args: Any,
) -> Verification:
    """Compare an optimizer `alone` on one device with `many` on a mesh.

    Runs are of NumPy arrays; `shardings` are the parameters' on the mesh. `rounding` is
    added to the bound of updates. With `must_move` it is a problem if all are 0.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    one_device = jax.make_mesh(
        (1,), ("alone",), (AxisType.Auto,), devices=mesh.local_devices[:1]
    )
    noisy = [(params, jax.tree.map(_last_bits, grads)) for params, grads in runs]
    with jax.set_mesh(one_device):  # even inside a user's set_mesh
        whole = NamedSharding(one_device, PartitionSpec())
        both, program = _results(alone, [*runs, *noisy], whole, extra_args)
    bits = re.findall(r"\bb?f(\d+)(?:_\w+)?\[", str(program.jaxpr))
    least = _BOUNDS[min(map(int, bits), default=32)]
    # Gradients are sharded like the parameters, as plain jit leaves them.
    with facts.recording() as recorded:
        got, program = _results(many, runs, shardings, extra_args)

    updates, state = map(trees.leaves_with_paths, program.out_info)
    names = [*(path for path, _ in updates), *(_STATE + path for path, _ in state)]
    differences: dict[str, tuple[float, float]] = {}
    problems, moved = [], 0
    for name, x, y in zip(names, got, both, strict=True):
        apart, noise, same_bits = _compared(x, y[: len(x)], y[len(x) :])
        is_update = len(differences) < len(updates)
        moved += is_update and any(_numbers(step).any() for step in y)
        bound = max(least + rounding * is_update, _AMPLIFIED * noise)
        differences[name] = apart, bound
        where = "the update of " * is_update + f"{name!r} of shape {x[0].shape}"
        if not apart <= bound:
            problems.append(
                f"{where} differs from that of one device by {apart:.2g} of its norm; "
                f"expected at most {bound:.2g}"
            )
        if not same_bits:
            problems.append(f"{where} differs between devices that hold the same shard")
    if must_move and not moved:
        # Under optax.MultiSteps(tx, 4), or while a schedule of rates begins at 0.
        problems.append(
            "all updates are 0, so that nothing was compared; use an optimizer "
            "that moves parameters in its first two steps"
        )
    devices = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    stacks = [*itertools.chain(*recorded[Orthogonalized].stacks.values())]
    total, dealt = (
        sum(matrices(x, mesh.shape) for x in some)
        for some in (stacks, [x for x in stacks if not x.everywhere])
    )
    hint = "; use one of at least 256 x 256 that is sharded or repeated"
    remarks = (
        f"the mesh {devices}, compared with one device",
        f"{dealt} of {total} matrices were dealt out"
        + (hint if mesh.size > 1 and total and not dealt else ""),
    )
    return Verification(differences, tuple(problems), remarks)


def _results(
    tx: optax.GradientTransformation,
    runs: Sequence[Run],
    where: Any,
    extra_args: Mapping[str, Any],
) -> tuple[list[tuple[jax.Array, ...]], jax.stages.Traced]:
    """Each array of updates and state at every step of all runs, and the program."""
    update, steps = jax.jit(functools.partial(tx.update, **extra_args)), []
    for params, grads in runs:
        params = jax.device_put(params, where)
        state = tx.init(params)
        for step in grads:
            args = jax.device_put(step, where), state, params
            updates, state = update(*args)
            steps.append(jax.tree.leaves((updates, state)))
    return list(zip(*steps, strict=True)), update.trace(*args)


def _drawn(x: Any, random: np.random.Generator) -> np.ndarray:
    """An array like x with normally distributed elements; zeros for integers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.zeros(x.shape, x.dtype)
    return np.asarray(random.standard_normal(x.shape), x.dtype)


def _last_bits(x: np.ndarray) -> np.ndarray:
    """The array with its last float32 or float64 bits changed."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    eps = np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps
    signs = np.resize([1, -1, -1, 1, 1], x.shape)  # few sizes are multiples of 5
    return (x * (1 + eps * signs)).astype(x.dtype)


def _compared(
    got: Sequence[jax.Array], want: Sequence[jax.Array], near: Sequence[jax.Array]
) -> tuple[float, float, bool]:
    """The largest difference of one array at any step, and the largest by noise.

    And True if devices that hold the same shard hold the same bits.
    """
    differences, noise, same_bits = [], [0.0], True
    for x, y, z in zip(got, want, near, strict=True):
        alone = _numbers(y)
        shards = [(shard.index, _numbers(shard.data)) for shard in x.addressable_shards]
        whole = alone.copy()  # other processes compare the shards that they hold
        for index, shard in shards:
            whole[index] = shard
        same_bits &= all(whole[i].tobytes() == shard.tobytes() for i, shard in shards)
        differences.append(_difference(whole, alone))
        noise.append(_difference(_numbers(z), alone))
    return float(np.max(differences)), max(filter(np.isfinite, noise)), same_bits


def _numbers(x: Any) -> np.ndarray:
    if dtypes.is_key(x.dtype):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _difference(x: np.ndarray, like: np.ndarray) -> float:
    """Norm of the difference over the norm of `like`; NaN if only one is finite."""
    x, like = x.astype(np.float64), like.astype(np.float64)
    if np.array_equal(x, like, equal_nan=True):
        return 0.0
    with np.errstate(all="ignore"):
        apart, length = np.linalg.norm(x - like), np.linalg.norm(like)
        return float(apart / length) if np.isfinite(apart) else np.nan
