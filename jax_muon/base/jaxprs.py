"""Jaxprs: functions that operations call, inputs that they use, and source lines.

JAX's internals may change with a release; `tests/base/test_jaxprs.py` runs in each.
Names of primitives and their parameters are also in `reading/`.
"""

import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval
from jaxtyping import Array, PyTree

Operand: TypeAlias = Var | Literal
# `line_of` skips lines of these packages.
_LIBRARIES = ("jax", "flax", "haiku", "equinox", "keras", "haliax")


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an operation calls with exactly its own operands, or None.

    That is the body of a jit, a checkpoint, a custom_jvp or a scan. A cond is none: its
    branches do not get the operand that chooses one.
    """
    functions = [x for x in eqn.params.values() if _is_function(x)]
    fits = [x for x in map(_closed, functions) if len(x.in_avals) == len(eqn.invars)]
    return fits[0] if fits else None


def _is_function(x: object) -> TypeGuard[ClosedJaxpr | Jaxpr]:
    return isinstance(x, ClosedJaxpr | Jaxpr)


def _closed(function: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    return function if isinstance(function, ClosedJaxpr) else ClosedJaxpr(function, ())


def scan_starts(eqn: JaxprEqn) -> tuple[int, int]:
    """Where a scan's carry begins among its inputs, and where its layers do.

    `lax.scan(lambda x, w: (x @ w + bias, None), x, ws)` has the inputs (bias, x, ws):
    the carry begins at 1, the layers at 2.
    """
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        inputs = eqn.params["ft_in"].update(eqn.invars)
        consts, carry, _ = map(list, inputs.unpack())
        return len(consts), len(consts) + len(carry)
    constants = eqn.params["num_consts"]
    return constants, constants + eqn.params["num_carry"]


def make_jaxpr(
    function: Callable[..., PyTree], *args: PyTree
) -> tuple[Jaxpr, Sequence[Any]]:
    """The operations that a function's results need, and the arrays it closes over.

    Such arrays are the last inputs: of a loss of {"up", "down"} and a batch that uses a
    global table, the fourth.
    """
    closed = _with_any_axes(function, *args)
    jaxpr, inputs = closed.jaxpr, (*closed.jaxpr.invars, *closed.jaxpr.constvars)
    # JAX compares the number of names with that of inputs, which has grown.
    unnamed = jaxpr.debug_info.with_unknown_names()
    jaxpr = jaxpr.replace(debug_info=unnamed, constvars=(), invars=inputs)
    return needed(jaxpr), closed.consts


def _with_any_axes(function: Callable[..., PyTree], *args: PyTree) -> ClosedJaxpr:
    """As `jax.make_jaxpr`; names of mesh axes that nothing binds are axes of one.

    So a loss can be read that is written for the devices of a mesh, such as one with
    `nnx.BatchNorm(axis_name="data")`.
    """
    axes: list[tuple[str, int]] = []
    while True:  # JAX names one unbound axis at a time, and lists none
        try:
            return jax.make_jaxpr(function, axis_env=axes)(*args)
        except NameError as error:
            name = re.search(r"unbound axis name: (.+?)\. ", str(error))
            if name is None or (name[1], 1) in axes:
                raise
            axes.append((name[1], 1))


@functools.lru_cache(4096)
def needed(jaxpr: Jaxpr) -> Jaxpr:
    """The function without operations that its results do not need."""
    every = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, every, instantiate=True)[0]


class Mark(NamedTuple):
    """Of a leaf of a call of `scan_layers`: (0, 1) is leaf 1 of the first call."""

    call: int
    leaf: int


def marked(x: Array, mark: Mark) -> Array:
    """The array, with a mark that `uses_of_layers` finds."""
    return checkpoint_name(x, f"{_MARK}{mark.call} {mark.leaf}")


def _mark(eqn: JaxprEqn) -> Mark | None:
    """The mark that an operation puts on its operand, or None."""
    name = str(eqn.params.get("name"))
    if not name.startswith(_MARK):
        return None
    return Mark(*map(int, name.removeprefix(_MARK).split()))


_MARK = "jax_muon leaf "
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


@dataclasses.dataclass(frozen=True)
class LayerUse:
    """A use of stacked layers: by what has a mark, or by another operation."""

    mark: Mark | None
    operation: str
    line: str = ""

    def __str__(self) -> str:
        name = "scan_layers" if self.mark else self.operation
        return f"{name} at {self.line}" if self.line else name


def uses_of_layers(jaxpr: Jaxpr, inputs: Sequence[Var]) -> list[list[LayerUse]]:
    """How a function uses these of its inputs, each an array (layers, ...).

    Casts, copies and slices of the layers are followed, also into functions, as long as
    each layer stays whole: (16, 8, 24) as [2:] (14, 8, 24), and then as pairs
    (7, 2, 8, 24).
    """
    uses: list[list[LayerUse]] = [[] for _ in inputs]
    leaf_of: dict[Operand, int] = {v: leaf for leaf, v in enumerate(inputs)}
    for leaf in _follow_layers(jaxpr, leaf_of, [*map(shape_of, inputs)], uses, ()):
        if leaf is not None:
            uses[leaf].append(LayerUse(None, "the result"))
    return uses


def _follow_layers(
    jaxpr: Jaxpr,
    leaf_of: dict[Operand, int],
    shapes: Sequence[tuple[int, ...]],
    uses: Sequence[list[LayerUse]],
    calls: tuple[JaxprEqn, ...],
) -> list[int | None]:
    """Note uses in a function; the leaf that each of its results still is, or None.

    `leaf_of` has the variables that are layers: {ups: 0, downs: 1} in `lambda x, ups,
    downs: (x, ups[2:])` returns [None, 0], and notes no use of either.
    """

    def leaves(variables: Sequence[Operand]) -> list[int | None]:
        return [None if isinstance(v, Literal) else leaf_of.get(v) for v in variables]

    for eqn in jaxpr.eqns:
        taken = leaves(eqn.invars)
        used = {leaf for leaf in taken if leaf is not None}
        if not used:
            continue
        kind, mark = eqn.primitive.name, _mark(eqn)
        is_move = kind in _MOVES and not mark
        # The condition of a `while` may take as many operands as the loop.
        function = None if mark or is_move or kind == "while" else called(eqn)
        # From here on `used` shrinks to the leaves that this operation itself uses, and
        # `results` are the leaves that its results still are.
        results: list[int | None] = []
        if is_move and all(_keeps_layer(eqn, shapes[leaf][1:]) for leaf in used):
            results, used = taken, set()  # bfloat16(ups) is ups
        elif function is not None:  # whose operations use the layers, not the call
            inside = taken
            if kind == "scan":  # another turn may put something else in the carry
                start, end = scan_starts(eqn)
                inside = [*taken[:start], *[None] * (end - start), *taken[end:]]
            inputs = zip(function.jaxpr.invars, inside, strict=True)
            followed = {v: leaf for v, leaf in inputs if leaf is not None}
            arguments = function.jaxpr, followed, shapes, uses, (*calls, eqn)
            results = _follow_layers(*arguments)
            used -= {*followed.values()}
            if kind == "scan":  # its results are rows that are stacked again: used here
                used |= {leaf for leaf in results if leaf is not None}
                results = []
        for v, leaf in zip(eqn.outvars, results, strict=False):
            if leaf is not None:
                leaf_of[v] = leaf
        for leaf in used:
            uses[leaf].append(LayerUse(mark, kind, line_of((*calls, eqn))))
    return leaves(jaxpr.outvars)


def _keeps_layer(eqn: JaxprEqn, layer: tuple[int, ...]) -> bool:
    """True if a move leaves the last axes alone: the axes of a layer.

    (16, 8, 24) of layers (8, 24): yes for [2:], [::-1] and a reshape to (8, 2, 8, 24);
    no for [:, :4], a transposition of the last axes and a reshape to (16, 192).
    """
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    first = len(before) - len(layer)
    if eqn.primitive.name == "transpose":
        permutation = eqn.params["permutation"]
        return tuple(permutation[first:]) == tuple(range(first, len(before)))
    if eqn.primitive.name == "rev":
        return all(axis < first for axis in eqn.params["dimensions"])
    return after[len(after) - len(layer) :] == layer


SCAN_LAYERS = "jax_muon.scan_layers"  # the scope of its operations


def is_in(scope: str, calls: Sequence[JaxprEqn]) -> bool:
    """True if the last of `calls`, or one around it, is in this `jax.named_scope`."""
    return any(scope in str(x.source_info.name_stack) for x in calls)


def are_in_one_einsum(one: JaxprEqn, other: JaxprEqn) -> bool:
    """True for two products of one `einsum("hlm,mhe,hed->ld", ...)`.

    Of three arrays or more: the name that JAX gives to it has two commas. Sizes decide
    the order of such products.
    """
    name = str(one.source_info.name_stack)
    is_einsum = re.search(r",[a-zA-Z.]*,\S*->", name) is not None
    return is_einsum and str(other.source_info.name_stack) == name


LINEAR_SOLVE = "custom_linear_solve"  # JAX's name of the operation


def transpositions(calls: Sequence[JaxprEqn]) -> int:
    """How often JAX transposed the last of `calls`, once for each gradient.

    0 in `jvp(f)`, 1 in `transpose(jvp(f))`, 2 in the gradient of a gradient. A function
    under `checkpoint` is computed again, as it was, inside its transposed one:
    `transpose(jvp(f))/rematted_computation` is 0 again. Of a linear solve, whose parts
    JAX transposes in every case, the solve counts.
    """
    count = 0
    for call in calls:
        for name in _steps(call.source_info.name_stack):
            count = count + 1 if name == "transpose(" else max(0, count - 1)
        if call.primitive.name == LINEAR_SOLVE:
            break
    return count


@functools.lru_cache(1024)
def _steps(name_stack: object) -> list[str]:
    return re.findall(r"transpose\(|rematted_computation", str(name_stack))


def shape_of(v: Operand) -> tuple[int, ...]:
    """The shape of an operand; () for a token."""
    return tuple(getattr(v.aval, "shape", ()))


def line_of(calls: Sequence[JaxprEqn]) -> str:
    """`model.py:57`, the line of the model that the last of `calls` comes from, or "".

    That is the innermost one outside JAX and libraries of layers, if possible outside
    site-packages: for a loss in train.py that calls maxtext, which calls flax, the line
    of train.py.
    """
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    folders = tuple(os.path.dirname(m.__file__ or "") for m in modules if m)
    here = os.path.dirname(__file__)
    folders += (os.path.join(os.path.dirname(here), "mesh"),)  # with `scan_layers`
    # JAX traces its own functions once, so operations in them name the first caller.
    eqn = next((x for x in calls if _calls_jax(x, folders[0])), calls[-1])
    traceback: Any = eqn.source_info.traceback
    package = os.path.dirname(os.path.dirname(__file__))
    lines: dict[bool, str] = {}  # in site-packages or not: the innermost of each
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(package):
            break  # it calls the model
        if not frame.file_name.startswith((*folders, "<frozen")):
            line = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
            lines.setdefault("site-packages" in frame.file_name, line)
    return lines.get(False) or lines.get(True, "")


def places_of(calls: Sequence[JaxprEqn]) -> tuple[object, ...]:
    """Where in the code each of `calls` is: equal for turns of one Python loop.

    `for w in layers: x = x @ w` makes 12 products of one place.
    """
    tracebacks: list[Any] = [x.source_info.traceback for x in calls]
    stacks = [zip(*x.raw_frames(), strict=True) for x in tracebacks if x]
    return tuple(itertools.chain(*stacks))  # of functions and their instructions


def _calls_jax(eqn: JaxprEqn, folder: str) -> bool:
    """True for a jit of JAX's own functions, such as jnp.where or jax.nn.relu."""
    closed = called(eqn) if eqn.primitive.name == "jit" else None
    source = closed.jaxpr.debug_info.func_src_info if closed else None
    return f" at {folder}" in (source or "")
