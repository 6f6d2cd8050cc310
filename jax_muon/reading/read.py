"""Read parameters from a function of them: the loss, or the model's `apply`."""

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array, PyTree

from jax_muon.base import dtypes, jaxprs, trees
from jax_muon.matrices.matrices import Parameter
from jax_muon.reading import decide, loops, products  # noqa: F401, rules
from jax_muon.reading import values as v
from jax_muon.reading.trace import Trace
from jax_muon.reading.values import Use, Value, View

Shaped: TypeAlias = Array | jax.ShapeDtypeStruct


def read_uses(
    function: Callable[..., PyTree],
    params: PyTree,
    *args: PyTree,
    splits: Collection[str] = (),
    like_data: Collection[str] = (),
) -> list[Parameter]:
    """How `function(params, *args)`, of arrays or shapes, uses each parameter.

    Those in `like_data`, by a rule of the user, are no matrices. Nothing is computed.

    Raises:
      ValueError: the result does not depend on any parameter.
    """
    leaves, readings = trees.leaves_with_paths(params), []
    leaves = [x for x in leaves if hasattr(x[1], "shape")]
    for jaxpr, constants in _traced(function, params, args):
        read = _read(jaxpr, constants, leaves, splits, like_data)
        if leaves and all(x.role == "unused" for x in read):
            raise ValueError(
                f"the result of {function} depends on none of the {len(leaves)} param"
                "eters; use the loss, or a model's apply, as a function of them"
            )
        readings.append(read)
    return [*map(decide.agreeing, *readings)] if len(readings) > 1 else readings[0]


def _read(
    jaxpr: Jaxpr,
    constants: Sequence[Array],
    leaves: Sequence[tuple[str, Shaped]],
    splits: Collection[str],
    like_data: Collection[str],
) -> list[Parameter]:
    """How a traced function, whose last inputs are `constants`, uses these leaves."""
    shapes = {path: tuple(x.shape) for path, x in leaves}
    given = jaxpr.invars[len(shapes) :]
    count = len(given) - len(constants)
    # Without arrays among its arguments, but keys, a function closes over its data.
    is_alone = all(_is_key(x, jaxpr) for x in given[:count] if jaxprs.shape_of(x))
    pairs = enumerate(map(_is_float, given))
    others = [Value(data=i < count or is_alone, given=x) for i, x in pairs]
    trace, own = Trace(shapes, like_data), []
    for path, shape in shapes.items():
        parts = tuple(((a, n),) if n > 1 else () for a, n in enumerate(shape))
        views = {} if path in like_data else {path: View(parts)}
        own.append(Value(not views, given=not views, leaves=views))
    for value in trace.run(jaxpr, [*own, *others]):
        trace.reached |= {x.path for x in value.sources}
        for leaf, view in value.leaves.items() if jaxpr.eqns else ():
            kind = "factor" if view.went(v.INNER) else "elementwise"
            trace.use({leaf: view}, kind, jaxpr.eqns[-1])
    uses: dict[str, list[Use]] = {path: [] for path in shapes}
    for use in trace.facts.uses.values():
        uses[use.path].append(use)
    read = []
    for path, x in leaves:
        is_split = any(trees.matches(y, path) for y in splits)
        read.append(decide.parameter(path, x, trace, uses[path], is_split))
    return decide.with_agreeing_layers(read, uses)


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
        wider = jax.tree.map(functools.partial(_wider, axes=axes), args)
        if any(map(operator.is_not, *map(jax.tree.leaves, (wider, args)))):
            with contextlib.suppress(Exception):  # the loss has its sizes in it
                other = jaxprs.make_jaxpr(loss, arrays, *wider)
                is_same = jaxprs.operations(other[0]) == jaxprs.operations(traced[0])
                return [other] if is_same else [traced, other]
    return [traced]


def _wider(x: Shaped, axes: slice) -> Shaped:
    """An argument with a size of three for one."""
    shape = [*getattr(x, "shape", ())]
    if 1 not in shape[axes]:
        return x
    shape[axes] = [3 if n == 1 else n for n in shape[axes]]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _loss(result: PyTree) -> PyTree:
    """The loss alone, if a function returns it with something else beside it."""
    if not isinstance(result, tuple) or len(result) < 2:
        return result
    dtype = getattr(result[0], "dtype", int)
    is_loss = jnp.shape(result[0]) == () and jnp.issubdtype(dtype, jnp.floating)
    return result[0] if is_loss else result


def _is_key(x: Var, jaxpr: Jaxpr) -> bool:
    """Whether an input is a random key: also an old one, of two uint32."""
    dtype, shape = cast(ShapedArray, x.aval).dtype, jaxprs.shape_of(x)
    if dtypes.is_key(dtype):
        return True
    is_old = dtype == jnp.uint32 and shape[-1:] == (2,)
    (uses,) = jaxprs.uses_of_layers(jaxpr, [x]) if is_old else [[]]
    return any(use.operation == "random_wrap" for use in uses)


def _is_float(x: Var) -> bool:
    """Whether an input is an array of floats; eight bits: a quantized matrix."""
    dtype = cast(ShapedArray, x.aval).dtype
    is_float = jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize == 1
    return bool(jaxprs.shape_of(x)) and is_float
