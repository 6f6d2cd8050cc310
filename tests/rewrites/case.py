"""A program that is rewritten, its reading, and what a rewrite changes in it."""

import contextlib
import dataclasses
import functools
import importlib
import re
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_muon as jm
from tests.programs import sizes as usual
from tests.programs.sizes import BATCH

S = jax.ShapeDtypeStruct

# A parameter's reading: "adamw", "refused", or its axes (batch, in, out).
Axes = tuple[tuple[int, ...], ...]
Reading = str | Axes


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and how its reading compares with that of the original.

    Attributes:
      loss: a function of the parameters and `args`.
      params: a tree of shapes.
      args: the other arguments, as shapes.
      paths: where each leaf of the original is now; None if nothing moved.
      back: from the axes of a leaf to those of the original.
    """

    loss: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    paths: Sequence[str] | None = None
    back: Callable[[Axes], Axes] = lambda axes: axes


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """Another form of any program that computes the same.

    Attributes:
      change: of a case; None if it does not apply to that one.
      sizes: those of tests/programs/sizes.py that are others.
      setting: of JAX, in which the program is read.
    """

    change: Callable[[Case], Case | None] = lambda case: case
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    setting: Callable[[], Any] = contextlib.nullcontext


REWRITES: dict[str, Rewrite] = {}


def register(kind: str, changes: Mapping[str, Any], of: Any = lambda x: x) -> None:
    """Add rewrites `of(change)` called "kind: name"."""
    for name, change in changes.items():
        REWRITES[f"{kind}: {name}"] = Rewrite(of(change))


# --- programs -------------------------------------------------------------------------


@functools.cache
def programs(**sizes: int) -> dict[str, Case]:
    """The programs of tests/programs, with these sizes instead of theirs."""
    kept = {n: x for n, x in sys.modules.items() if n.startswith("tests.programs")}
    for name in kept:
        del sys.modules[name]
    others = types.ModuleType("tests.programs.sizes")
    vars(others).update({n: x for n, x in vars(usual).items() if n.isupper()} | sizes)
    sys.modules["tests.programs.sizes"] = others
    made = importlib.import_module("tests.programs").PROGRAMS
    sys.modules.update(kept)
    return {name: Case(x.loss, x.params, x.args) for name, x in made.items()}


def is_float(x: Any) -> bool:
    """Whether a leaf is an array of real floating point, or its shape."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def only(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss alone, without metrics."""
    return lambda *args: (lambda y: y[0] if isinstance(y, tuple) else y)(loss(*args))


def has_samples(case: Case) -> list[bool]:
    """The leaves of the arguments whose first axis has samples.

    Others are keys, masks, statistics and frozen weights.
    """
    leaves = jax.tree.leaves(case.args)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = zip(leaves, is_key, strict=True)
    first = [0 if k or not x.ndim else x.shape[0] for x, k in pairs]
    size = BATCH if BATCH in first else max({*first}, key=first.count, default=0)
    return [0 < n == size for n in first]


def of_samples(case: Case, args: Any, function: Callable[[Any], Any]) -> Any:
    """The arguments, with `function` of those that have samples."""
    leaves, tree = jax.tree.flatten(args)
    pairs = zip(leaves, has_samples(case), strict=True)
    return tree.unflatten([function(x) if has else x for x, has in pairs])


# --- readings -------------------------------------------------------------------------


def read(case: Case) -> dict[str, Reading]:
    """The reading of every parameter by path."""

    def of_one(x: Any) -> Reading:
        if x.doubt is not None:
            return "refused"
        if x.label == "adamw":
            return "adamw"
        return x.axes.batch, x.axes.reduction, x.axes.output

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = jm.find_matrices(case.params, case.loss, *case.args, strict=False)
    return {path: of_one(x) for path, x in found.items()}


@functools.cache
def as_written(name: str) -> dict[str, Reading]:
    """The reading of a program of tests/programs."""
    return read(programs()[name])


def fits(case: Case) -> bool:
    """Whether JAX can trace a program."""
    try:
        jax.eval_shape(case.loss, case.params, *case.args)
    except Exception:
        return False
    return True


@functools.cache
def sample(title: str) -> list[str]:
    """Four programs for a rewrite, and others for the next."""
    names = programs()
    return sorted(names, key=lambda name: zlib.crc32(f"{title} {name}".encode()))[:4]


def rewritten(title: str, name: str) -> Case | None:
    """A program in another form; None where the rewrite does not apply."""
    rewrite, original = REWRITES[title], programs()[name]
    case = programs(**rewrite.sizes)[name]
    same = str((case.params, case.args)) == str((original.params, original.args))
    return None if rewrite.sizes and same else rewrite.change(case)


def changes(title: str, name: str) -> list[tuple[str, str]] | None:
    """What a rewrite changes in the reading of a program: kinds and what they are.

    A kind is "label"; "axes"; "clear", a refusal where there was none; or "bare", any
    error that does not say what to write. None where the rewrite does not apply.
    """
    before, original = as_written(name), programs()[name]
    case = rewritten(title, name)
    if case is None:
        return None
    with REWRITES[title].setting():
        try:
            after = read(case)
        except Exception as error:
            if not fits(case):
                return None
            text = str(error)
            is_clear = isinstance(error, ValueError) and bool(
                re.search("expected|use ", text)
            )
            text = f"{type(error).__name__}: {text[:150]}"
            return [("clear" if is_clear else "bare", text)]
    shapes = [x.shape for x in jax.tree.leaves(original.params)]
    resized = programs(**REWRITES[title].sizes)[name]
    others = [x.shape for x in jax.tree.leaves(resized.params)]
    found = []
    for i, (path, was) in enumerate(before.items()):
        place = path if case.paths is None else case.paths[i]
        now = after.get(place, "missing")
        kind = _compare(was, now, case.back, (shapes[i], others[i]))
        if kind:
            found.append((kind, f"{path} {shapes[i]}: {was} -> {now}"))
    return found


def _compare(was: Reading, now: Reading, back: Any, shapes: Any) -> str | None:
    """The kind of change in one parameter, of the shapes before and after."""
    counts = [sum(n > 1 for n in shape) for shape in shapes]
    if was == "refused" or counts[0] != counts[1]:  # another kind of parameter
        return None
    if now == "refused":
        return "clear"
    if isinstance(was, str) or isinstance(now, str):
        return None if was == now else "label"
    wide = {a for a, (m, n) in enumerate(zip(*shapes, strict=True)) if m > 1 and n > 1}
    was, now = (
        tuple(tuple(a for a in side if a in wide) for side in axes)
        for axes in (was, back(now))
    )
    return None if was == now else "axes"
