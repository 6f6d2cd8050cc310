"""Where parameters lie on a mesh, by the names of their axes.

The names that say how a parameter is read say how it is divided too, so that labels,
axes and specs come from one source.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

# Pairs of an axis name and what divides it: an axis of the mesh, several, or None.
Rules = Sequence[tuple[str, Any]]


def specs_by_names(
    names: Mapping[str, tuple[str | None, ...]], rules: Rules
) -> Callable[[str], PartitionSpec]:
    """The specs of parameters with these axis names, for `on_mesh(specs=...)`.

    Args:
      names: axis names by path.
      rules: see `Reading.specs`.

    Returns:
      A function of the path. A parameter without names is replicated.

    Raises:
      ValueError: rules that are not pairs; with the path, a name that occurs twice.
    """
    pairs = [_checked(rule) for rule in rules]
    found = {path: _spec(path, own, pairs) for path, own in names.items()}
    return lambda path: found.get(path, PartitionSpec())


def _checked(rule: Any) -> tuple[str, tuple[str, ...]]:
    """A rule as the name and a tuple of mesh axes."""
    pair = isinstance(rule, (tuple, list)) and len(rule) == 2
    if not pair or not isinstance(rule[0], str):
        raise ValueError(f"rules: {rule!r}; expected a pair (axis name, mesh axis)")
    name, axes = rule
    axes = (axes,) if isinstance(axes, str) else axes or ()
    several = isinstance(axes, (tuple, list))
    if not several or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(f"rules: {rule!r}; expected a mesh axis, several, or None")
    return name, tuple(axes)


def _spec(
    path: str,
    names: tuple[str | None, ...],
    rules: Sequence[tuple[str, tuple[str, ...]]],
) -> PartitionSpec:
    named = [name for name in names if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(
            f"parameter {path!r} has the axis names {names}; expected each name once, "
            "since rules go by them"
        )
    entries: dict[str, tuple[str, ...]] = {}
    for name, axes in rules:
        used = {axis for entry in entries.values() for axis in entry}
        if name in named and name not in entries and used.isdisjoint(axes):
            entries[name] = axes
    return PartitionSpec(*(_entry(entries.get(name or "", ())) for name in names))


def _entry(axes: tuple[str, ...]) -> Any:
    return (axes[0] if len(axes) == 1 else axes) if axes else None
