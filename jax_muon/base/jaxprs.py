"""Jaxprs: functions that operations call, inputs that they use, and source lines.

JAX's internals may change with a release; `tests/base/test_jaxprs.py` runs in each.
Names of primitives and their parameters also stand in `matrices/computation/`.
"""

import functools
import itertools
import os
import re
import sys
from collections.abc import Container, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval

# Lines of these packages are not the user's.
_LIBRARIES = ("jax", "flax", "haiku", "equinox", "keras", "haliax")


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an operation calls with exactly its own operands, or None."""
    functions = [x for x in eqn.params.values() if _is_function(x)]
    fits = [x for x in map(_closed, functions) if len(x.in_avals) == len(eqn.invars)]
    return fits[0] if fits else None


def _is_function(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)


def _closed(function: Any) -> ClosedJaxpr:
    return function if isinstance(function, ClosedJaxpr) else ClosedJaxpr(function, ())


def scan_starts(eqn: JaxprEqn) -> tuple[int, int]:
    """Where a scan's carry begins among its inputs, and where its layers do."""
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        inputs = eqn.params["ft_in"].update(eqn.invars)
        consts, carry, _ = map(list, inputs.unpack())
        return len(consts), len(consts) + len(carry)
    constants = eqn.params["num_consts"]
    return constants, constants + eqn.params["num_carry"]


def trace(function: Any, *args: Any) -> tuple[Jaxpr, int]:
    """The operations of a function that its results need, and its number of arguments.

    Arrays that the function closes over are further inputs, after the arguments.
    """
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, count = closed.jaxpr, len(closed.jaxpr.invars)
    inputs = (*jaxpr.invars, *jaxpr.constvars)
    # Names of arguments would not fit.
    unnamed = jaxpr.debug_info.with_unknown_names()
    jaxpr = jaxpr.replace(debug_info=unnamed, constvars=(), invars=inputs)
    return needed(jaxpr), count


@functools.lru_cache(4096)
def needed(jaxpr: Jaxpr) -> Jaxpr:
    """A function without the operations that none of its results needs."""
    every = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, every, instantiate=True)[0]


def marked(x: Any, name: str) -> Any:
    """The array, with a name that `uses` finds."""
    return checkpoint_name(x, _MARK + name)


_MARK = "jax_muon "
# Operations whose result is a part, a copy or a cast of their operand.
_MOVES = {
    *("convert_element_type", "copy", "name", "optimization_barrier"),
    *("reduce_precision", "reshape", "rev", "slice", "squeeze", "transpose"),
}


def operations(jaxpr: Jaxpr) -> list[str]:
    """The names of all operations, in order, but for those that only move elements."""
    names = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in {*_MOVES, "broadcast_in_dim", "expand_dims"}:
            names.append(eqn.primitive.name)
        for x in jax.tree.leaves([*eqn.params.values()]):
            names += operations(_closed(x).jaxpr) if _is_function(x) else []
    return names


def uses(jaxpr: Jaxpr, values: Container[Any]) -> tuple[list[str], list[bool]]:
    """How a function uses some inputs: names of `marked`, and operations.

    Parts, copies and casts of a value are followed, also into functions; the second
    result says which results are still those values.
    """
    found, followed = [], {v for v in jaxpr.invars if v in values}
    for eqn in jaxpr.eqns:
        takes = [not isinstance(v, Literal) and v in followed for v in eqn.invars]
        if not any(takes):
            continue
        function = called(eqn)
        name = str(eqn.params.get("name"))
        if name.startswith(_MARK):
            found.append(name.removeprefix(_MARK))
        elif eqn.primitive.name in _MOVES:
            followed.update(eqn.outvars)
        elif function is None:
            found.append(eqn.primitive.name)
        else:
            inside, results = uses(
                function.jaxpr, {*itertools.compress(function.jaxpr.invars, takes)}
            )
            found += inside
            followed.update(itertools.compress(eqn.outvars, results))
    is_result = [not isinstance(v, Literal) and v in followed for v in jaxpr.outvars]
    return found, is_result


def transpositions(calls: Sequence[JaxprEqn]) -> int:
    """How often JAX transposed the last of `calls`, once for each gradient.

    A function under `checkpoint` is computed again, as it was, inside of its transposed
    one: `transpose(jvp(f))/rematted_computation`.
    """
    count = 0
    for name in itertools.chain(*(_steps(x.source_info.name_stack) for x in calls)):
        count = count + 1 if name == "transpose(" else max(0, count - 1)
    return count


@functools.lru_cache(1024)
def _steps(name_stack: Any) -> list[str]:
    return re.findall(r"transpose\(|rematted_computation", str(name_stack))


def shape_of(v: Any) -> tuple[int, ...]:
    """The shape of an operand; () for a token."""
    return tuple(getattr(v.aval, "shape", ()))


def line_of(calls: Sequence[JaxprEqn]) -> str:
    """`model.py:57`, the line of the model that the last of `calls` comes from, or "".

    That is the innermost one outside of JAX and libraries of layers, and preferably of
    all that is installed.
    """
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    folders = tuple(os.path.dirname(m.__file__ or "") for m in modules if m)
    # JAX traces its own functions once, so operations in them name the first caller.
    eqn = next((x for x in calls if _calls_jax(x, folders[0])), calls[-1])
    traceback: Any = eqn.source_info.traceback
    package = os.path.dirname(os.path.dirname(__file__))
    lines: dict[bool, str] = {}  # the innermost first
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(package):
            break  # it calls the model
        if not frame.file_name.startswith((*folders, "<frozen")):
            line = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
            lines.setdefault("site-packages" in frame.file_name, line)
    return lines.get(False) or lines.get(True, "")


def places_of(calls: Sequence[JaxprEqn]) -> tuple[object, ...]:
    """Where in the code each of `calls` is: equal for turns of one Python loop."""
    tracebacks: list[Any] = [x.source_info.traceback for x in calls]
    stacks = [zip(*x.raw_frames(), strict=True) for x in tracebacks if x]
    return tuple(itertools.chain(*stacks))  # of functions and their instructions


def _calls_jax(eqn: JaxprEqn, folder: str) -> bool:
    closed = called(eqn) if eqn.primitive.name == "jit" else None
    source = closed.jaxpr.debug_info.func_src_info if closed else None
    return f" at {folder}" in (source or "")
