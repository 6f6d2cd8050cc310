"""Wrong arguments: errors with their name, their value, and what is expected.

Every public function begins with these; what depends on a tree is checked at init and
update, with the path of the leaf. All raise a ValueError.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_muon import paths

_HOLDS: dict[str, Callable[[float], bool]] = {
    "": lambda x: True,
    "above 0": lambda x: x > 0,
    "of at least 0": lambda x: x >= 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
}


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raise the ValueError of an argument."""
    text = repr(value)
    text = text if len(text) <= 300 else f"{text[:300]}..."
    raise ValueError(f"{name}={text}; expected {expected}")


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Refuse a value that is not an instance of a type, or of one of several."""
    if not isinstance(value, kind):
        refuse(name, value, expected)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False, such as a string, which is always true."""
    check_type(name, value, (bool, np.bool_), "True or False")


def check_function(name: str, value: Any, expected: str) -> None:
    """Refuse what cannot be called, and classes."""
    if not callable(value) or isinstance(value, type):
        refuse(name, value, expected)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def check_integer(name: str, value: Any) -> None:
    """Refuse what is not a Python integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        refuse(name, value, f"a Python integer{_known(name)}")


def check_count(
    name: str, value: Any, *, least: int = 1, most: int | None = None
) -> None:
    """Refuse what is not a Python integer from `least` to `most`."""
    check_integer(name, value)
    if value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        refuse(name, value, f"an integer {limits}")


def number(
    name: str, value: Any, limits: str, *, traced: bool = True, others: str = ""
) -> Any:
    """A finite number as a Python float, or a tracer of one as it is.

    Args:
      name: of the argument.
      value: a Python or NumPy number, a JAX scalar, or, with `traced`, a tracer.
      limits: one of the texts of `_HOLDS`.
      traced: whether it need not be known while tracing.
      others: what else is allowed, for the error.
    """
    finite = "" if limits.startswith("in") else "finite "
    expected = f"a {finite}number {limits}".rstrip() + others
    if isinstance(value, jax.core.Tracer) and traced:
        return scalar(name, value, expected)
    try:
        wrong = isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value) > 0
        found = math.nan if wrong else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or not _HOLDS[limits](found):
        hint = _known(name) if isinstance(value, jax.core.Tracer) else ""
        refuse(name, value, expected + hint)
    return found


def rate(name: str, value: Any, limits: str = "of at least 0") -> Any:
    """A number as `number` gives it, or a schedule that gives scalars alone."""
    if not callable(value) or isinstance(value, type):
        return number(name, value, limits, others=", or a schedule")

    def schedule(count: Any) -> Any:
        return scalar(f"{name}(count)", value(count), "a schedule of real scalars")

    return schedule


def check_float_dtype(name: str, dtype: Any) -> None:
    """Refuse what is neither None nor a dtype of real floating point."""
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        refuse(name, dtype, "a dtype of real floating point, or None")


def check_mapping(
    name: str,
    value: Any,
    expected: str,
    check: Callable[[str, Any], Any] = lambda name, value: None,
) -> None:
    """Refuse what is not a mapping of strings to values that pass a check.

    Args:
      name: of the argument; its value at "w" is `name['w']` in errors.
      value: the argument.
      expected: what the error asks for.
      check: of the name and each value; it raises for a wrong one.
    """
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        refuse(name, value, expected)
    for key, item in value.items():
        check(f"{name}[{key!r}]", item)


def as_transform(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Any optax transform, as one that takes extra arguments.

    An `optax.MultiSteps` is not one by its type, and optax would drop its arguments.
    """
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    check_type(name, tx, optax.GradientTransformation, "an optax transform")
    return optax.with_extra_args_support(tx)


def check_arrays(name: str, tree: Any) -> None:
    """Refuse None, and a tree with a leaf that is no array.

    An equinox module holds its activation function and numbers, and an NNX graph its
    random keys.
    """
    if tree is None:
        refuse(name, tree, "a tree of arrays")
    for path, leaf in paths.leaves_with_paths(tree):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            refuse(
                f"{name} at {path!r}",
                leaf,
                "arrays alone, such as eqx.filter(model, eqx.is_inexact_array) of an "
                "equinox module, or nnx.state(model, nnx.Param)",
            )


def check_trained(path: str, dtype: Any) -> None:
    """Refuse PRNG keys, 8-bit floats and whatever else AdamW cannot compute with."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    if not jnp.issubdtype(dtype, np.number) or (
        floating and jnp.finfo(dtype).bits < 16
    ):
        raise ValueError(
            f"parameter {path!r} has dtype {dtype}, which AdamW cannot train; expected "
            "a label of its own for it, such as 'frozen' with optax.set_to_zero()"
        )


def check_state(what: str, state: Any, kind: type) -> None:
    """Refuse a state that another transform made."""
    if not isinstance(state, kind):
        raise ValueError(
            f"{what}: the state is a {type(state).__name__}; expected the "
            f"{kind.__name__} that init gives"
        )


def check_state_structure(state: Any, like: Any) -> None:
    """Refuse a state of another structure than one that is right has."""
    want: Any = jax.tree.structure(like)
    if jax.tree.structure(state) != want:
        raise ValueError(
            "the state is not one of this optimizer on these parameters: "
            f"{_first_difference(state, like)}"
        )


def _first_difference(state: Any, like: Any) -> str:
    """The first array that only one of two trees of different structure has."""
    found, wanted = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
        for tree in (state, like)
    )
    for path in wanted:
        if path not in found:
            return f"it has no array at state{path}"
    for path in found:
        if path not in wanted:
            return f"it has an array at state{path}; expected none there"
    structures = jax.tree.structure(state), jax.tree.structure(like)
    return f"it is {structures[0]}; expected {structures[1]}"


def check_state_shapes(state: Any, like: Any) -> None:
    """Refuse a state whose arrays differ in shape from those of one that is right.

    Args:
      state: what was given.
      like: arrays, or their shapes, on the same structure.
    """
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), right in zip(leaves, jax.tree.leaves(like), strict=True):
        have, want = (tuple(getattr(x, "shape", ())) for x in (leaf, right))
        if have != want:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} has shape {have}; expected {want}, "
                "as init gives it for these parameters"
            )


def check_params(what: str, params: Any) -> None:
    """Refuse an update without the parameters, of a transform that needs them."""
    if params is None:
        raise ValueError(
            f"{what} needs the parameters: tx.update(updates, state, params), got "
            "params=None"
        )


def check_gradients(updates: Any, params: Any) -> None:
    """Refuse gradients, or updates on their way, that are not those of parameters."""
    if params is not None:
        check_alike("gradient", updates, "parameter", params, kinds=True)


def check_alike(
    what: str, tree: Any, whose: str, like: Any, *, kinds: bool = False
) -> None:
    """Refuse a tree whose leaves differ from another's in paths or shapes.

    Args:
      what: a leaf of the tree, such as "gradient".
      tree: arrays, with or without their Flax boxes.
      whose: what it belongs to, such as "parameter".
      like: the arrays that it has to be like.
      kinds: whether both have to be of floating point, or neither.
    """
    found, wanted = (dict(paths.leaves_with_paths(x)) for x in (tree, like))
    for path in [*wanted, *found]:
        if path not in found:
            raise ValueError(f"no {what} at {path!r}; expected one for each {whose}")
        if path not in wanted:
            raise ValueError(
                f"{what} at {path!r}, where there is no {whose}; there are "
                + (", ".join(wanted) or "none")
            )
    for path, leaf in found.items():
        shape, dtype = jnp.shape(wanted[path]), jnp.result_type(wanted[path])
        if jnp.shape(leaf) != shape:
            raise ValueError(
                f"{what} {path!r} has shape {jnp.shape(leaf)}; expected {shape}, that "
                f"of its {whose}"
            )
        kind = jnp.result_type(leaf)
        floating = [jnp.issubdtype(x, jnp.floating) for x in (kind, dtype)]
        if kinds and floating[0] != floating[1]:
            raise ValueError(
                f"{what} {path!r} has dtype {kind}; expected one like that of its "
                f"{whose}, {dtype}"
            )


def scalar(name: str, value: Any, expected: str) -> Any:
    """A traced or computed number, if it is a real scalar."""
    if not hasattr(value, "dtype") and not isinstance(value, numbers.Number):
        refuse(name, value, expected)
    dtype = jnp.result_type(value)
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if jnp.shape(value) != () or not real:
        what = f"{dtype} of shape {jnp.shape(value)}"
        raise ValueError(f"{name} is {what}; expected {expected}")
    return value


def _known(name: str) -> str:
    return (
        ", known while tracing; under optax.inject_hyperparams name it in "
        f"static_args=({name!r},)"
    )
