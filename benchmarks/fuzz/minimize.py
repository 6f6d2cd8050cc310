"""Makes a failing case smaller as long as it fails in the same way, and prints it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fuzz.cases import Case, Leaf, names_of

_DEFAULTS: dict[str, Any] = {
    "around": "nothing",
    "polar": None,
    "splits": {},
    "joins": None,
    "out_in": None,
    "explicit": False,
    "train_step": None,
    "numbers": "normal",
    "size": 1e-4,
    "steps": 1,
    "divide": (),
    "small": 0,
    "min_size": 1,
    "recipe": "muon",
}


def minimize(case: Case, fails: Callable[[Case], bool], tries: int = 60) -> Case:
    """The smallest case that was found to fail.

    Args:
      case: a case that fails.
      fails: whether a case does, in the same way.
      tries: most calls of `fails`.
    """
    found = True
    while found:
        found = False
        for simpler in _simpler(case):
            if tries == 0:
                return case
            tries -= 1
            if fails(simpler):
                case, found = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest things first."""

    def but(**changes: Any) -> Case:
        return dataclasses.replace(case, **changes)

    for gone in case.leaves if len(case.leaves) > 1 else ():
        rest = tuple(leaf for leaf in case.leaves if leaf is not gone)
        names = {leaf.path for leaf in rest}
        tables = {
            table: {k: v for k, v in getattr(case, table).items() if k in names}
            for table in ("splits", "labels", "axes")
        }
        yield but(leaves=rest, **tables)
    for name, value in _DEFAULTS.items():
        if getattr(case, name) != value:
            yield but(**{name: value})
    for table in ("settings", "labels", "axes"):
        for key in getattr(case, table):
            yield but(
                **{table: {k: v for k, v in getattr(case, table).items() if k != key}}
            )
    for name, size in case.mesh.items():
        used = {n for x in case.leaves for entry in x.spec for n in names_of(entry)}
        if len(case.mesh) > 1 and name not in used | set(case.divide):
            yield but(mesh={k: v for k, v in case.mesh.items() if k != name})
        if size > 2:
            yield but(mesh={**case.mesh, name: 2})
    for i, leaf in enumerate(case.leaves):
        for smaller in _smaller(leaf):
            yield but(leaves=(*case.leaves[:i], smaller, *case.leaves[i + 1 :]))


def _smaller(leaf: Leaf) -> Iterator[Leaf]:
    if any(leaf.spec):
        yield dataclasses.replace(leaf, spec=())
    if leaf.dtype != "float32":
        yield dataclasses.replace(leaf, dtype="float32")
    for axis, size in enumerate(leaf.shape):
        if size > 3 and size % 2 == 0:
            shape = (*leaf.shape[:axis], size // 2, *leaf.shape[axis + 1 :])
            yield dataclasses.replace(leaf, shape=shape)


def as_test(case: Case, name: str) -> str:
    """The case as a test to paste."""

    def written(x: Any) -> str:
        fields = [
            f"{field.name}={written_value(getattr(x, field.name))}"
            for field in dataclasses.fields(x)
            if not _is_default(field, getattr(x, field.name))
        ]
        return f"{type(x).__name__}({', '.join(fields)})"

    def written_value(value: Any) -> str:
        if isinstance(value, tuple) and value and isinstance(value[0], Leaf):
            return "(" + ", ".join(map(written, value)) + ",)"
        return repr(value)

    return f"def test_{name}():\n    assert not check({written(case)}).is_wrong\n"


def _is_default(field: Any, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)
