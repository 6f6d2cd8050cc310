"""Check a layout: compare updates on a mesh with updates on one device.

`verify` is for your own mesh, before a long run or in CI.

The two cannot agree exactly: sums run in another order, and the polar iteration
amplifies rounding, the more so the smaller a singular value is.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_muon import checks, paths
from jax_muon.mesh.array_types import arrays_and_others
from jax_muon.mesh.on_mesh import MeshTransformation
from jax_muon.text import aligned, shape_text
from jax_muon.tools.description import sharding_text

# By bits of the narrowest floating-point dtype in the program. On the matrices of the
# tests, float32 differed by 3e-6 and bfloat16 by 2.5e-2.
BOUNDS = {64: 1e-10, 32: 2e-5, 16: 0.1, 8: 0.3}
AMPLIFIED = 10

# Small enough that a rounding-flipped sign in cautious decay stays below every bound,
# large enough that a missing decay does not.
_SIZE_OF_PARAMS = 1e-4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array of updates or state on a mesh, compared with one device.

    Attributes:
      path: of the parameter, or of the array within the state.
      shape: of the whole array.
      difference: norm of the difference over the norm of one device's array, at the
        step where it is largest; NaN if some element is not finite.
      bound: the largest `difference` that passes.
      same_bits: True if devices that hold the same shard hold the same bits.
      spec: the parameter's sharding; None for state.
    """

    path: str
    shape: tuple[int, ...]
    difference: float
    bound: float
    same_bits: bool
    spec: PartitionSpec | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems with this array, as sentences."""
        what = "the update of" if self.spec is not None else "state"
        where = f"{what} {self.path!r} of shape {self.shape}"
        lines = []
        if np.isnan(self.difference):
            lines.append(f"{where} has elements that are not finite")
        elif not self.difference <= self.bound:
            lines.append(
                f"{where} differs from that of one device by {self.difference:.2g} of "
                f"its norm; expected at most {self.bound:.2g}"
            )
        if not self.same_bits:
            lines.append(f"{where} differs between devices that hold the same shard")
        return tuple(lines)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`: differences and bounds. `print` shows them as a table.

    Attributes:
      updates: one entry per parameter.
      state: one entry per array of the optimizer's state.
      sizes: number of devices along each mesh axis.
    """

    updates: tuple[Comparison, ...]
    state: tuple[Comparison, ...]
    sizes: Mapping[str, int]

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems, as sentences; empty if the layout is right."""
        return tuple(text for x in (*self.updates, *self.state) for text in x.problems)

    @property
    def ok(self) -> bool:
        """True if the layout is right."""
        return not self.problems

    def __str__(self) -> str:
        """A table of all parameters, and a line each about state and devices."""
        rows = [("parameter", "shape", "sharding", "difference", "bound")]
        for x in self.updates:
            sharding = sharding_text(x.spec, self.sizes)
            numbers = f"{x.difference:.1e}", f"{x.bound:.0e}"
            rows.append((x.path, shape_text(x.shape), sharding, *numbers))
        lines = aligned(rows, numbers=2)
        if self.state:
            worst = max(self.state, key=lambda x: x.difference / x.bound)
            lines.append(
                f"{len(self.state)} arrays of state: the largest difference is "
                f"{worst.difference:.1e} of at most {worst.bound:.0e}, in {worst.path}"
            )
        devices = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines.append(f"the mesh {devices}, compared with one device")
        lines += [f"WRONG: {text}" for text in self.problems] or ["right"]
        return "\n".join(lines)


def verify(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    steps: int = 2,
    **extra_args: Any,
) -> Verification:
    """Compare an optimizer on a mesh with the same optimizer on one device.

    Parameters and gradients are drawn from a normal distribution; only the paths,
    shapes and dtypes of `params` matter (and their shardings on Explicit axes). One
    device has to hold all of them, with three times their gradients and state: use
    smaller shapes with the same layout if your model is too large for that.

    An array may differ by 2e-5 of its norm in float32, 1e-10 in float64, and 0.1 if a
    16-bit dtype occurs in the program, or by ten times what the last bits of the
    gradients change on one device, if that is more. The rounding of `gather_dtype` is
    added for updates. A recipe's `dtype="float32"` makes the bound sharp.

    Args:
      tx: an optimizer wrapped in `on_mesh`. Each process of several compares the shards
        that it holds.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      steps: number of updates, one after another.
      **extra_args: passed to the update.

    Returns:
      A `Verification` with `.ok` and `.problems`; `print` shows it as a table.

    Raises:
      ValueError: steps below 1, an optimizer that is not `on_mesh(...)`, and whatever
        that raises.

    Examples:
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> shapes = {"mlp": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> tx = jm.muon(dtype="float32", matrices={"*": "muon"})
      >>> tx = jm.on_mesh(tx, mesh, divide="data")
      >>> jm.verify(tx, shapes).ok
      True
    """
    on_mesh = tx.on_mesh if isinstance(tx, MeshTransformation) else None
    if on_mesh is None:
        checks.refuse("tx", tx, "jax_muon.on_mesh(optimizer, mesh, ...)")
    checks.arrays("params", params)
    checks.count("steps", steps)
    random = np.random.default_rng(0)
    start = jax.tree.map(lambda x: _drawn(x, random, _SIZE_OF_PARAMS), params)
    grads = [jax.tree.map(lambda x: _drawn(x, random), params) for _ in range(steps)]
    layout, dtype = on_mesh.layout, on_mesh.gather_dtype
    shard = functools.partial(NamedSharding, layout.mesh)
    shardings = jax.tree.map(shard, layout.of_tree(params)[0])
    rounding = 0.0 if dtype is None else float(jnp.finfo(dtype).eps) / 2
    return compare(
        on_mesh.tx, tx, start, grads, shardings, rounding=rounding, **extra_args
    )


def compare(
    alone: optax.GradientTransformation,
    many: optax.GradientTransformation,
    start: optax.Params,
    grads: Sequence[optax.Updates],
    shardings: Any,
    *,
    rounding: float = 0.0,
    **extra_args: Any,
) -> Verification:
    """Compare an optimizer `alone` on one device with `many` on a mesh.

    Parameters and the gradients of each step are NumPy arrays; `shardings` are the
    parameters' on the mesh. `rounding` is added to the bound of updates.
    """
    arrays, others = arrays_and_others(extra_args)
    mesh = jax.tree.leaves(shardings)[0].mesh
    one_device = jax.make_mesh(
        (1,), ("alone",), (AxisType.Auto,), devices=mesh.local_devices[:1]
    )
    with jax.set_mesh(one_device):  # even inside a user's set_mesh
        params = jax.device_put(start, NamedSharding(one_device, PartitionSpec()))
        state = alone.init(params)
        update = jax.jit(functools.partial(alone.update, **others))
        want = _run(update, grads, state, params, arrays)
        noisy = [jax.tree.map(_last_bits, step) for step in grads]
        near = _run(update, noisy, state, params, arrays)
        jaxpr = update.trace(grads[0], state, params, **arrays).jaxpr
        bits = re.findall(r"\bb?f(\d+)(?:_\w+)?\[", str(jaxpr))
        bound = BOUNDS[min(map(int, bits), default=32)]

    # Gradients are sharded like the parameters, as plain jit leaves them.
    params, *grads = (jax.device_put(tree, shardings) for tree in (start, *grads))
    state = many.init(params)
    update = jax.jit(functools.partial(many.update, **others))
    got = _run(update, grads, state, params, arrays)

    rows = zip(got, want, near, strict=True)
    updates = [
        _compared(path, sharding.spec, bound + rounding, *next(rows))
        for path, sharding in paths.leaves_with_paths(shardings)
    ]
    of_state = [
        _compared(jax.tree_util.keystr(path), None, bound, *row)
        for (path, _), row in zip(jax.tree.leaves_with_path(state), rows, strict=True)
    ]
    return Verification(tuple(updates), tuple(of_state), dict(mesh.shape))


def _drawn(x: Any, random: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """An array like x with normally distributed elements; zeros for integers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.zeros(x.shape, x.dtype)
    return np.asarray(size * random.standard_normal(x.shape), x.dtype)


def _last_bits(x: np.ndarray) -> np.ndarray:
    """The array with its last float32 or float64 bits changed."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    eps = np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps
    signs = np.resize([1, -1, -1, 1, 1], x.shape)  # few sizes are multiples of 5
    return (x * (1 + eps * signs)).astype(x.dtype)


def _run(
    update: Any, grads: Sequence[Any], state: Any, params: Any, arrays: dict[str, Any]
) -> list[tuple[jax.Array, ...]]:
    """Each array of updates and state, after every step."""
    steps = []
    for step in grads:
        updates, state = update(step, state, params, **arrays)
        steps.append(jax.tree.leaves((updates, state)))
    return list(zip(*steps, strict=True))


def _compared(
    path: str,
    spec: PartitionSpec | None,
    least: float,
    got: Sequence[jax.Array],
    want: Sequence[jax.Array],
    near: Sequence[jax.Array],
) -> Comparison:
    """Compare one array at every step: on the mesh, on one device, and with noise."""
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
    bound = max(least, AMPLIFIED * max(filter(np.isfinite, noise)))
    largest = float(np.max(differences))
    return Comparison(path, want[0].shape, largest, bound, same_bits, spec)


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _difference(x: np.ndarray, like: np.ndarray) -> float:
    """Norm of the difference over the norm of `like`; NaN if one is not finite."""
    x, like = x.astype(np.float64), like.astype(np.float64)
    with np.errstate(all="ignore"):
        apart, length = np.linalg.norm(x - like), np.linalg.norm(like)
        if apart == 0:
            return 0.0
        return float(apart / length) if np.isfinite(apart) else np.nan
