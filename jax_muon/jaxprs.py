"""What the package knows of JAX's internals: primitives, parameters, source lines.

Everything here may change with a release of JAX; `tests/test_jaxprs.py` runs in each.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

# Lines of these packages are not the user's.
_LIBRARIES = ("jax", "flax", "haiku", "equinox", "keras", "haliax")


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an operation calls with exactly its own operands, or None."""
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
            if len(closed.jaxpr.invars) == len(eqn.invars):
                return closed
    return None


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
    jaxpr = jaxpr.replace(
        constvars=(),
        invars=(*jaxpr.invars, *jaxpr.constvars),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    needed = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, needed, instantiate=True)[0], count


def line_of(calls: Sequence[JaxprEqn]) -> str:
    """`model.py:57`, the line of the user's code that an operation comes from, or "".

    Where only installed packages are on the stack, the innermost one that is not JAX or
    a library of layers.

    Args:
      calls: the operation, after those that call it, the outermost first.
    """
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    folders = tuple(os.path.dirname(m.__file__ or "") for m in modules if m)
    # JAX traces its own functions once, and operations in them show who called first.
    eqn = next((x for x in calls if _calls_jax(x, folders[0])), calls[-1])
    traceback, installed = eqn.source_info.traceback, ""
    for frame in traceback.frames if traceback else ():  # the innermost first
        file = frame.file_name
        if file.startswith((*folders, "<frozen")):
            continue
        line = f"{os.path.basename(file)}:{frame.line_num}"
        if "site-packages" not in file:
            return line
        installed = installed or line
    return installed


def _calls_jax(eqn: JaxprEqn, folder: str) -> bool:
    closed = called(eqn) if eqn.primitive.name == "jit" else None
    source = closed.jaxpr.debug_info.func_src_info if closed else None
    return f" at {folder}" in (source or "")


# Elementwise operations that are linear in a leaf, whatever else they take, or that do
# not change it.
# fmt: off
LINEAR = frozenset({
    "add", "sub", "mul", "div", "neg", "add_any", "select_n", "copy", "copy_p", "real",
    "imag", "complex", "conj", "name", "optimization_barrier", "sharding_constraint",
    "mesh_cast", "reshard", "reduce_precision", "convert_element_type", "pvary",
    "pcast", "device_put", "layout_constraint", "psum", "psum_invariant", "pbroadcast",
    "stop_gradient", "transpose",
})
RANDOM = frozenset({
    "random_bits", "random_wrap", "random_unwrap", "random_seed", "random_split",
    "random_fold_in", "random_clone", "threefry2x32", "iota", "rng_bit_generator",
})
# fmt: on
# No gradient passes these, or it does to their floating-point results alone.
# fmt: off
NO_GRADIENT = frozenset({
    "stop_gradient", "argmax", "argmin", "eq", "ne", "lt", "le", "gt", "ge", "sign",
    "is_finite", "and", "or", "not", "top_k", "sort", "approx_top_k",
})
# fmt: on
