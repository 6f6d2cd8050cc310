"""A layout proves itself: updates on a mesh compared with those of one device.

`verify` is for a user's own mesh, before a long run or in CI. It draws parameters and
gradients of the shapes at hand, lets the optimizer make updates of them on one device
and through `on_mesh`, and compares updates and state, array by array.

How far apart the two may be: sums run in another order, which the polar iteration
amplifies the more the smaller a singular value is. So the bound of each array is that
of the narrowest dtype in the program, or ten times what gradients changed in the last
bit of float32 do on one device, whichever is larger.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_muon.certificate import Certificate, VerifiedArray
from jax_muon.checks import as_transform, check_arrays, check_count, number
from jax_muon.mesh.hlo import Module
from jax_muon.mesh.layout import Layout
from jax_muon.mesh.on_mesh import OnMesh, on_mesh
from jax_muon.mesh.specs import (
    AxisName,
    Specs,
    arrays_and_others,
    is_spec,
)
from jax_muon.reading import paths

# By bytes of the narrowest floating-point dtype in the program. On Gaussian matrices of
# 24 x 24 and those of the tests float32 was seen to differ by 3e-6, bfloat16 by 2.5e-2.
BOUNDS = {8: 1e-10, 4: 2e-5, 2: 0.1, 1: 0.3}
AMPLIFIED = 10

# Where decay has a mask, one sign that rounding turns is less than any bound; decay
# that was forgotten is more.
_SIZE_OF_PARAMS = 1e-4

_NARROW = re.compile(r"\b(?:b?f(16)|f(8)_?\w*)\[")


def verify(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    specs: Specs = None,
    divide: AxisName = (),
    *,
    min_size: int = 1024,
    gather_dtype: jax.typing.DTypeLike | None = None,
    steps: int = 2,
    seed: int = 0,
    bound: float | None = None,
    **extra_args: Any,
) -> Certificate:
    """Whether an optimizer on a mesh does what it does on one device.

    Parameters and gradients are drawn from a normal distribution; of `params` only
    paths, shapes, dtypes and, on Explicit axes, types are used. One device has to hold
    them all, and three times their gradients and state: give smaller shapes of the same
    layout for a model that is too large for that.

    Args:
      tx: an optimizer in global view, such as a recipe; not wrapped in `on_mesh`, which
        this does. In bfloat16 the bound is wide: `dtype="float32"` of a recipe makes it
        sharp.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      mesh: the mesh. With several processes, each looks at the devices that it has.
      specs: where parameters lie; see `on_mesh`.
      divide: mesh axes that further divide gradients and state; see `on_mesh`.
      min_size: least elements of a leaf that is divided so.
      gather_dtype: of updates on their way to where parameters lie; see `on_mesh`.
      steps: updates to make, one after another.
      seed: of the random numbers.
      bound: of the difference over the length of an array. None: 2e-5 in float32, 1e-10
        in float64, 0.1 where a dtype of 16 bits occurs in the program; never less than
        ten times what the last bits of the gradients change on one device, and for
        updates more by the rounding of `gather_dtype`.
      **extra_args: of `tx.update`.

    Returns:
      A `Certificate`: `.ok`, `.raise_if_wrong()`; `print` shows it.

    Raises:
      ValueError: steps below 1, a bound that is not above 0, an optimizer that is
        wrapped in `on_mesh`, and what `on_mesh` and `tx` raise.

    Examples:
      >>> import jax_muon as jm
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> shapes = {"mlp": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> found = verify(jm.muon(dtype="float32"), shapes, mesh, divide="data")
      >>> found.raise_if_wrong().ok
      True
    """
    if isinstance(getattr(as_transform("tx", tx).init, "__self__", None), OnMesh):
        raise ValueError(
            "tx is wrapped in on_mesh; expected the optimizer inside, which verify "
            "wraps itself"
        )
    check_arrays("params", params)
    check_count("steps", steps)
    check_count("seed", seed, least=0)
    random = np.random.default_rng(seed)
    # On Explicit axes the types of the parameters say where they lie.
    lie = Layout(mesh, specs).of_params(params)
    start = jax.tree.map(lambda x: _drawn(x, random, _SIZE_OF_PARAMS), params)
    grads = [jax.tree.map(lambda x: _drawn(x, random), params) for _ in range(steps)]
    on = functools.partial(
        on_mesh, divide=divide, min_size=min_size, gather_dtype=gather_dtype
    )
    found = certify(
        tx, on(tx, mesh, lie), start, grads, mesh, lie, bound=bound, **extra_args
    )
    if gather_dtype is None:
        return found
    rounding = float(jnp.finfo(gather_dtype).eps) / 2
    wider = [dataclasses.replace(x, bound=x.bound + rounding) for x in found.updates]
    return dataclasses.replace(found, updates=tuple(wider))


def certify(
    alone: optax.GradientTransformation,
    many: optax.GradientTransformation,
    start: optax.Params,
    grads: Sequence[optax.Updates],
    mesh: Mesh,
    specs: Specs,
    *,
    bound: float | None = None,
    **extra_args: Any,
) -> Certificate:
    """A certificate of two optimizers, for parameters and gradients that are given.

    Args:
      alone: the optimizer of one device.
      many: that of the mesh.
      start: the parameters, as NumPy arrays.
      grads: gradients of each step, likewise.
      mesh: the mesh.
      specs: where parameters lie; see `on_mesh`.
      bound: see `verify`.
      **extra_args: of both updates.
    """
    if bound is not None:
        number("bound", bound, "above 0", traced=False, others=", or None")
    arrays, others = arrays_and_others(extra_args)
    lie = Layout(mesh, specs).of_params(start)
    here = jax.make_mesh(
        (1,), ("alone",), (AxisType.Auto,), devices=mesh.local_devices[:1]
    )

    def put(tree: Any) -> Any:
        return jax.tree.map(
            lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
            lie,
            tree,
            is_leaf=is_spec,
        )

    alone, many = as_transform("alone", alone), as_transform("many", many)
    with jax.set_mesh(here):  # whatever mesh is set around
        params = jax.device_put(start, NamedSharding(here, PartitionSpec()))
        state = alone.init(params)
        update = jax.jit(functools.partial(alone.update, **others))
        traced = update.trace(grads[0], state, params, **arrays)
        one = traced.lower().compile()
        want = _steps(one, grads, state, params, arrays)
        other, least = want, bound
        if least is None:
            noisy = [jax.tree.map(last_bits, step) for step in grads]
            other = _steps(one, noisy, state, params, arrays)
            least = _bound(str(traced.jaxpr))

    # Gradients lie as the parameters do, as those of plain jit.
    params, placed = put(start), [put(step) for step in grads]
    state = many.init(params)
    update = jax.jit(functools.partial(many.update, **others))
    compiled = update.lower(placed[0], state, params, **arrays).compile()
    got = _steps(compiled, placed, state, params, arrays)

    updates, states = (
        jax.tree.map(functools.partial(compared, least), *trees)
        for trees in zip(got, want, other, strict=True)
    )
    return Certificate(
        tuple(
            dataclasses.replace(found, path=path, spec=spec)
            for (path, found), spec in zip(
                paths.leaves_with_paths(updates),
                jax.tree.leaves(lie, is_leaf=is_spec),
                strict=True,
            )
        ),
        tuple(
            dataclasses.replace(found, path=jax.tree_util.keystr(key_path))
            for key_path, found in jax.tree_util.tree_leaves_with_path(states)
        ),
        len(grads),
        dict(mesh.shape),
        tuple(Module.parse(compiled.as_text() or "").collectives()),
    )


def _drawn(x: Any, random: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """An array like x of numbers that are normally distributed, or of zeros."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.zeros(x.shape, x.dtype)
    return np.asarray(size * random.standard_normal(x.shape), x.dtype)


def last_bits(x: np.ndarray) -> np.ndarray:
    """The same numbers but for their last bits, if of float32 or float64."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    eps = np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps
    signs = np.resize([1, -1, -1, 1, 1], x.shape)  # of a period that few sizes have
    return (x * (1 + eps * signs)).astype(x.dtype)


def _bound(jaxpr: str) -> float:
    """The bound for the narrowest floating-point dtype in a program."""
    bits = [int(a or b) for a, b in _NARROW.findall(jaxpr)]
    if not bits and re.search(r"\bf64\[", jaxpr) and not re.search(r"\bf32\[", jaxpr):
        return BOUNDS[8]
    return BOUNDS[min(bits, default=32) // 8]


def _steps(
    update: Any, grads: Sequence[Any], state: Any, params: Any, arrays: dict[str, Any]
) -> tuple[Any, Any]:
    """For each parameter the list of its updates, for each array of state itself."""
    made = []
    for step in grads:
        updates, state = update(step, state, params, **arrays)
        made.append(updates)
    return jax.tree.map(lambda *each: _Each(each), *made), jax.tree.map(
        lambda x: _Each((x,)), state
    )


def compared(least: float, got: Any, want: Any, other: Any) -> VerifiedArray:
    """Compare an array on a mesh with that of one device, at each step.

    Args:
      least: the least that the bound is.
      got: arrays on the mesh.
      want: those of one device.
      other: those of one device for gradients with other last bits.
    """
    differences, noise = [0.0], [0.0]
    finite = same_bits = True
    for x, y, z in zip(got, want, other, strict=True):
        whole, near = _numbers(y), _numbers(z)
        noise.append(_difference([(near, whole)]))
        pieces = []
        seen: dict[str, np.ndarray] = {}
        for shard in x.addressable_shards:
            piece = _numbers(shard.data)
            first = seen.setdefault(str(shard.index), piece)
            same_bits &= first.tobytes() == piece.tobytes()
            if first is piece:
                pieces.append((piece, whole[shard.index]))
        differences.append(_difference(pieces))
        finite &= all(_is_finite(a) and _is_finite(b) for a, b in pieces)
    amplified = AMPLIFIED * max(x for x in noise if np.isfinite(x))
    return VerifiedArray(
        "",
        tuple(want[0].shape),
        max(differences),
        max(least, amplified),
        finite,
        same_bits,
    )


class _Each(tuple):  # which JAX takes for one leaf
    """What one array was at each step."""


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _is_finite(x: np.ndarray) -> bool:
    return bool(np.isfinite(x.astype(np.float64)).all())


def _difference(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Length of the difference over that of the second of each pair, in float64.

    What is infinite, or NaN, in both at once does not differ.
    """
    apart = length = 0.0
    for x, y in pieces:
        a, b = x.astype(np.float64), y.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(all="ignore"):
            apart = np.hypot(apart, np.linalg.norm((a - b)[~same]))
            length = np.hypot(length, np.linalg.norm(b[np.isfinite(b)]))
    if apart == 0:
        return 0.0
    return float(apart / length) if apart < np.inf and length else np.inf
