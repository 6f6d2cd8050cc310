"""Read parameters from a function of them: the loss, or the model's `apply`."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array, PyTree

from jax_muon.base import dtypes, jaxprs, trees
from jax_muon.matrices.computation import (  # noqa: F401, they register rules
    contractions,
    decide,
    elementwise,
    loops,
    moves,
)
from jax_muon.matrices.computation.trace import Trace
from jax_muon.matrices.computation.values import AxisPart, Value
from jax_muon.matrices.matrices import MUON, Parameter

Shaped: TypeAlias = Array | jax.ShapeDtypeStruct


def read_uses(
    function: Callable[..., PyTree],
    params: PyTree,
    *args: PyTree,
    splits: Collection[str] = (),
) -> list[Parameter]:
    """How `function(params, *args)`, of arrays or shapes, uses each parameter.

    Those that the patterns of `splits` match get no hint how to split them. Nothing is
    computed.

    Raises:
      ValueError: the result does not depend on any parameter, or cannot be followed.
    """
    leaves, readings = _arrays(params), []
    for jaxpr, constants in _traced(function, params, args):
        try:
            read = _read(jaxpr, constants, leaves, splits)
        except Exception as error:
            raise ValueError(
                f"{function} could not be followed, a mistake of jax_muon: {error!r}; "
                "expected labels instead of a loss until it is mended, as {'embed': "
                "'adamw', '*': 'muon'}"
            ) from error
        if leaves and all(x.role == "unused" for x in read):
            raise ValueError(
                f"the result of {function} depends on none of the {len(leaves)} param"
                "eters; expected the loss, or a model's apply, as a function of them"
            )
        readings.append(read)
    return [*map(decide.agreeing, *readings)] if len(readings) > 1 else readings[0]


def _read(
    jaxpr: Jaxpr,
    constants: Sequence[Array],
    leaves: Sequence[tuple[str, Shaped]],
    splits: Collection[str],
) -> list[Parameter]:
    """How a traced function uses each of these leaves."""
    trace = follow(jaxpr, constants, {path: tuple(x.shape) for path, x in leaves})
    read, found = [], decide.evidence(trace)
    for path, leaf in leaves:
        is_split = any(trees.matches(pattern, path) for pattern in splits)
        read.append(decide.parameter(path, leaf, trace, found, is_split))
    if all(x.axes is None and x.label != MUON for x in read):
        read = [decide.doubted(x, trace) for x in read]
    return decide.with_agreeing_layers(read, trace)


def follow(
    jaxpr: Jaxpr, constants: Sequence[Array], shapes: dict[str, tuple[int, ...]]
) -> Trace:
    """The uses of every parameter in a function, whose last inputs are `constants`."""
    given = jaxpr.invars[len(shapes) :]
    count = len(given) - len(constants)
    avals = [cast(ShapedArray, v.aval) for v in given]
    # Without arrays among its arguments, but keys, a function closes over its data.
    is_alone = all(_is_key(v, jaxpr) for v in given[:count] if jaxprs.shape_of(v))

    def closed_over(array: Array) -> Value:
        value = _given(array, is_alone)
        return value if is_alone else replace(value, numbers=lambda: array)

    values = [_of_leaf(path, shape) for path, shape in shapes.items()]
    values += [_given(aval, True) for aval in avals[:count]]
    values += map(closed_over, constants)
    inputs: dict[str, str] = {}
    while True:  # until no further leaf turns out to be like data
        trace, before = Trace(shapes, inputs, closed_over), len(inputs)
        trace.run(jaxpr, values)
        trace.settle()
        if len(inputs) == before:
            return trace


def _traced(
    function: Callable[..., PyTree], params: PyTree, args: tuple[PyTree, ...]
) -> list[tuple[Jaxpr, Sequence[Array]]]:
    """The operations of a function, of three samples where its arguments have one.

    With one sample, e[ids] (1, 24) + positions (1, 24) looks the same whether the
    positions are added to each sample or are a sample. With three, (3, 24) + (1, 24),
    it does not. If a loss takes another branch for three, both are returned.
    """
    leaves, tree = jax.tree.flatten(params)
    arrays = [x if hasattr(x, "shape") else None for x in leaves]

    def loss(arrays: list[Array | None], *args: PyTree) -> PyTree:
        pairs = zip(leaves, arrays, strict=True)
        whole = jax.tree.unflatten(tree, [x if a is None else a for x, a in pairs])
        return _loss(function(whole, *args))

    traced = jaxprs.make_jaxpr(loss, arrays, *args)
    for axes in (slice(None), slice(1)):
        if wider := _wider(args, axes):
            with contextlib.suppress(Exception):  # the loss has its sizes in it
                other = jaxprs.make_jaxpr(loss, arrays, *wider)
                is_same = jaxprs.operations(other[0]) == jaxprs.operations(traced[0])
                return [other] if is_same else [traced, other]
    return [traced]


def _wider(args: tuple[PyTree, ...], axes: slice) -> tuple[PyTree, ...]:
    """The arguments with a size of three for one, or () if no size is one."""

    def wider(x: Shaped) -> Shaped:
        if not has_one(x):
            return x
        shape = [*x.shape]
        shape[axes] = [3 if n == 1 else n for n in shape[axes]]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def has_one(x: Shaped) -> bool:
        return 1 in getattr(x, "shape", ())[axes]

    is_any = any(map(has_one, jax.tree.leaves(args)))
    return jax.tree.map(wider, args) if is_any else ()


def _arrays(params: PyTree) -> list[tuple[str, Shaped]]:
    """The arrays of a tree, which may also have functions and numbers, by path."""
    return [x for x in trees.leaves_with_paths(params) if hasattr(x[1], "shape")]


def _loss(result: PyTree) -> PyTree:
    """The loss alone, if a function returns it with something else beside it."""
    if not isinstance(result, tuple) or len(result) < 2:
        return result
    dtype = getattr(result[0], "dtype", int)
    is_loss = jnp.shape(result[0]) == () and jnp.issubdtype(dtype, jnp.floating)
    return result[0] if is_loss else result


def _of_leaf(path: str, shape: tuple[int, ...]) -> Value:
    parts = tuple((AxisPart(a, 1, n),) if n > 1 else () for a, n in enumerate(shape))
    return Value(leaves={path: parts})


def _is_key(v: Var, jaxpr: Jaxpr) -> bool:
    """Whether an input is a random key: also an old one, of two uint32."""
    aval = cast(ShapedArray, v.aval)
    if dtypes.is_key(aval.dtype):
        return True
    is_old = aval.dtype == jnp.uint32 and aval.shape[-1:] == (2,)
    (uses,) = jaxprs.uses_of_layers(jaxpr, [v]) if is_old else [[]]
    return any(use.operation == "random_wrap" for use in uses)


def _given(x: Array | ShapedArray, is_data: bool) -> Value:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize == 1
    given_floats = x.ndim > 0 and bool(is_float)  # eight bits: a quantized matrix
    return Value(data=is_data, given_floats=given_floats)
