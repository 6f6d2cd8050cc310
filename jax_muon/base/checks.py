"""Checks of what JAX would take silently, or reject without an explanation.

`check_*` refuses a value and returns nothing; `as_*` also returns it, converted. The
ValueErrors name the argument, its value and the values that would do.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from jax_muon.base import trees

# A Python number, or an array of `optax.inject_hyperparams`.
Number = TypeVar("Number", bound=ArrayLike)

_HOLDS: dict[str, Callable[[float], bool]] = {
    "above 0": lambda x: x > 0,
    "of at least 0": lambda x: x >= 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
}


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise a ValueError, such as `ns_steps=0; expected a Python integer of ...`."""
    # Of <function chain.<locals>.init_fn at 0x7f0> only the name.
    text = re.sub(r"<function (?:\S+\.)?(\S+) at 0x\w+>", r"\1", repr(value))
    text = text if len(text) <= 300 else f"{text[:300]}..."
    raise ValueError(f"{name}={text}; expected {expected}")


def as_strings(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """One string or several in their order, as a tuple."""
    if isinstance(value, str):
        return (value,)
    check_kind(name, value, (tuple, list), "a string, or a tuple of strings")
    return tuple(value)


def check_kind(
    name: str, value: object, types: type | UnionType | tuple[type, ...], expected: str
) -> None:
    """The value must be an instance of one of these types."""
    if not isinstance(value, types):
        refuse(name, value, expected)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """The value must be one of these strings."""
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """The value must be a Python or NumPy integer of at least `least`."""
    is_count = isinstance(value, (int, np.integer)) and value >= least
    if not is_count or isinstance(value, bool):
        expected = f"a Python integer of at least {least}"
        refuse(name, value, expected + injected(value, name))


def injected(value: object, name: str) -> str:
    """What to write if `optax.inject_hyperparams` made this argument an array."""
    where = f"; under optax.inject_hyperparams name it in static_args=({name!r},)"
    return where if isinstance(value, jax.Array) else ""


def as_number(name: str, value: Number, limits: str, *, others: str = "") -> Number:
    """A finite number within these limits as a Python float; a tracer unchanged.

    Numbers of NumPy become floats, which are weak: float32 times np.float64(0.1) is
    float64 under x64, and float32 times 0.1 is not. NaN fails every comparison.
    """
    if isinstance(value, jax.core.Tracer):
        return value
    number: Any = value
    try:
        converted = math.nan if isinstance(value, (bool, str)) else float(number)
    except (TypeError, ValueError):
        converted = math.nan
    if not math.isfinite(converted) or not _HOLDS[limits](converted):
        refuse(name, value, f"a finite number {limits}{others}")
    return cast(Number, converted)


def as_rate(
    name: str, value: optax.ScalarOrSchedule, limits: str = "of at least 0"
) -> optax.ScalarOrSchedule:
    """A number as `as_number` returns it, or a schedule."""
    if callable(value):
        return value
    return as_number(name, value, limits, others=", or a schedule")


def rate_at(rate: optax.ScalarOrSchedule, count: ArrayLike) -> float | jax.Array:
    """The value of a number or a schedule at step `count`."""
    return rate(count) if callable(rate) else rate


def as_scalar(name: str, value: ArrayLike, expected: str, *kinds: type) -> jax.Array:
    """A traced or computed number, which must be a scalar of one of these dtypes."""
    if not isinstance(value, (int, float)) and not hasattr(value, "dtype"):
        refuse(name, value, expected)
    x = jnp.asarray(value)
    if x.shape or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} is {x.dtype} of shape {x.shape}; expected {expected}")
    return x


def is_inexact(x: object) -> bool:
    """Whether a leaf is an array, or a shape, of floats."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def check_float_dtype(name: str, dtype: DTypeLike | None) -> None:
    """The value must be None or a floating-point dtype."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        refuse(name, dtype, "a dtype of real floating point, or None")


def as_transform(name: str, tx: object) -> optax.GradientTransformationExtraArgs:
    """An optax transform, as one that takes extra arguments."""
    if isinstance(tx, optax.MultiSteps):  # not a GradientTransformation
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if not isinstance(tx, optax.GradientTransformation):
        factory, module = (str(getattr(tx, x, "")) for x in ("__name__", "__module__"))
        is_public = getattr(sys.modules.get(module), factory, None) is tx
        like = f", such as {factory}(1e-3)" if is_public else ""
        refuse(name, tx, f"an optax transform{like}")
    return optax.with_extra_args_support(tx)


# --- trees ----------------------------------------------------------------------------


def as_arrays(name: str, tree: PyTree) -> PyTree:
    """The tree with its floats as arrays; all other leaves must be arrays or shapes."""
    if all(hasattr(x, "dtype") for x in jax.tree.leaves(tree)):
        return tree  # before a path is built for each of, say, 5,000 leaves
    for path, leaf in trees.leaves_with_paths(tree):
        if not hasattr(leaf, "dtype") and type(leaf) is not float:
            expected = (
                "arrays alone, such as eqx.filter(model, eqx.is_inexact_array) of an "
                "equinox module, or nnx.state(model, nnx.Param)"
            )
            refuse(f"{name} at {path!r}", leaf, expected)
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def trained(model: PyTree) -> PyTree:
    """The parameters of a model: `nnx.Param`s of an NNX module, floats of Equinox's.

    BatchNorm's running mean is no nnx.Param; a dropout key is no float. Any other tree
    is its own parameters.
    """
    # A framework that is not imported made no module.
    nnx, equinox = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    if nnx and isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Param)
    if equinox and isinstance(model, equinox.Module):
        return jax.tree.map(lambda x: x if is_inexact(x) else None, model)
    return model


def check_no_text(name: str, tree: PyTree) -> None:
    """No leaf may be a string, such as the name of a data set in a batch."""
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, str | bytes):
            where = f"{name}{jax.tree_util.keystr(keys)}"
            refuse(where, x, "an array; leave out, or close over, what is none")


def check_params(what: str, params: PyTree) -> None:
    """The parameters must be passed to update."""
    if params is None:
        raise ValueError(
            f"{what} needs the parameters; use tx.update(updates, state, params)"
        )


def check_gradients(updates: PyTree, params: PyTree) -> None:
    """Gradients need the paths and shapes of the parameters, if these are passed."""
    if params is not None:
        check_alike("gradient", updates, "parameter", params)


def vector_hint(tree: PyTree) -> str:
    """What to write if the parameters are one flat vector, such as (124439808,)."""
    if len(getattr(tree, "shape", ())) != 1:
        return ""
    return "; one vector, as optax.flatten makes: unflatten before the optimizer"


def checked_update(
    tx: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """The update of a transform; a ValueError names what does not fit in its state."""
    try:
        stepped, new = tx.update(updates, state, params, **extra_args)
    except (AttributeError, KeyError, TypeError, ValueError):
        right = jax.eval_shape(tx.init, updates if params is None else params)
        check_state(state, right)
        check_no_dicts(state, right)
        raise
    check_state(state, new)  # transforms may broadcast one of another shape
    check_alike("update", stepped, "gradient", updates)
    return stepped, new


def check_state(restored: PyTree, like: PyTree) -> None:
    """A state needs the paths and shapes of `like`: arrays, or their shapes."""
    what = "the state is not one of this optimizer on these parameters: array"
    check_alike(what, restored, "state array of init", like)


def check_no_dicts(restored: PyTree, like: PyTree) -> None:
    """A state needs the NamedTuples and tuples of `like`, not dicts with equal paths.

    A checkpoint that is restored without a target has those: {"0": {"mu": ...}} instead
    of (ScaleByMomentumState(mu=...),), both with the path 0/mu.
    """

    def kinds(tree: PyTree) -> dict[str, list[type]]:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        return {trees.path_string(keys): [*map(type, keys)] for keys, _ in flat}

    right = kinds(like)
    for path, keys in kinds(restored).items():
        if keys != right[path]:
            raise ValueError(
                f"the state is not one of this optimizer: array {path!r} is in dicts; "
                "expected the types that init returns. Restore with tx.init(params), "
                "or its shapes, as the target, such as flax.serialization."
                "from_state_dict(tx.init(params), state)"
            )


def check_alike(what: str, tree: PyTree, whose: str, like: PyTree) -> None:
    """Two trees need the same paths and shapes, and floating point in the same leaves.

    `what` and `whose` name a leaf of each, such as "gradient" and "parameter".
    """
    structures = {jax.tree.structure(x) for x in (tree, like)}
    if len(structures) == 1 and all(
        map(_same, jax.tree.leaves(tree), jax.tree.leaves(like))
    ):
        return
    # Another structure may still have the same paths, as a FrozenDict has a dict's.
    got, right = (dict(trees.leaves_with_paths(x)) for x in (tree, like))
    for path in right | got:
        x, y = got.get(path), right.get(path)
        if x is None or y is None or not _same(x, y):
            text = f"{what} {path!r}: {_text(x)}; expected {_text(y)}, like the {whose}"
            raise ValueError(text)


def _text(x: ArrayLike | None) -> str:
    return "none" if x is None else f"{jnp.result_type(x)} of shape {np.shape(x)}"


def _same(x: ArrayLike, y: ArrayLike) -> bool:
    """True for two arrays of one shape, both or neither of them floating-point."""
    dtype, other = jnp.result_type(x), jnp.result_type(y)
    alike = jnp.issubdtype(dtype, jnp.floating) == jnp.issubdtype(other, jnp.floating)
    return np.shape(x) == np.shape(y) and bool(alike)
