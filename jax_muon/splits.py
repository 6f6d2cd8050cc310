"""Splits: one parameter that holds several matrices, seen as several parameters.

A kernel with query, key and value side by side is three matrices: each has its own
polar factor, its own NorMuon means, its own scale. `with_splits` shows the inner
transform a tree in which this leaf is a node with its parts. Every piece, recipe
and layout then works on parts as on parameters, and knows nothing of splits.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_muon import checks, notes, paths
from jax_muon.axes import MatrixAxes
from jax_muon.elementwise import check_factors
from jax_muon.mesh import array_types, specs
from jax_muon.reading import tree as names
from jax_muon.reading.decide import Parameter


@dataclasses.dataclass(frozen=True)
class Split:
    """How one axis of a parameter is divided.

    Attributes:
      parts: names of equal parts, `("query", "key", "value")`; names with their widths,
        `{"query": 768, "key": 256, "value": 256}`; or a number of equal parts, such as
        heads, which become a batch: one part with an axis in front of the last two.
      axis: of the parameter; the default is the last, the outputs of a kernel.
      learning_rates: factor of the learning rate by name of a part; those not named
        have 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> params = {"attn": {"qkv": jnp.ones((4, 12))}}
      >>> splits = {"qkv": jm.Split(("query", "key", "value"))}
      >>> tx = jm.nanochat(matrices=jm.read(params, splits=splits))
      >>> lines = str(jm.describe(tx, params)).splitlines()
      >>> [line.split()[0] for line in lines[1:4]]
      ['attn/qkv/query', 'attn/qkv/key', 'attn/qkv/value']
    """

    parts: int | Sequence[str] | Mapping[str, int]
    axis: int = -1
    learning_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.parts
        expected = "a number of at least 1, names, each once, or names with widths"
        if isinstance(parts, int):
            checks.count("parts", parts)
        elif isinstance(parts, Mapping):
            checks.mapping("parts", parts, expected, checks.count)
        elif not isinstance(parts, (tuple, list)) or any(
            not isinstance(name, str) or parts.count(name) > 1 for name in parts
        ):
            checks.refuse("parts", parts, expected)
        if not parts:
            checks.refuse("parts", parts, expected)
        checks.kind("axis", self.axis, int, "a Python integer")
        check_factors("learning_rates", self.learning_rates)

    def cut(self, path: str, shape: tuple[int, ...]) -> "_Cut":
        """The split of one parameter.

        Raises:
          ValueError: with path and shape, for an axis that the parameter does not have,
            parts that do not make it up, factors of parts that do not exist.
        """
        where = f"splits: parameter {path!r} of shape {shape}"
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where} has no axis {self.axis}; expected {-len(shape)} to "
                f"{len(shape) - 1}"
            )
        named = () if isinstance(self.parts, int) else tuple(self.parts)
        count = self.parts if isinstance(self.parts, int) else len(named)
        size = shape[self.axis]
        if unknown := {*self.learning_rates} - {*named}:
            raise ValueError(
                f"{where}: learning_rates of {sorted(unknown)}; expected the parts "
                f"{list(named)}"
            )
        if isinstance(self.parts, Mapping):
            widths = dict(self.parts)
            if sum(widths.values()) != size:
                raise ValueError(
                    f"{where}: parts={widths} make up {sum(widths.values())} of axis "
                    f"{self.axis}; expected widths with the sum {size}"
                )
        elif size % count:
            raise ValueError(
                f"{where}: axis {self.axis} of size {size} does not divide into "
                f"{count} equal parts; expected divisors of {size}, or a width for "
                "each part"
            )
        else:
            widths = dict.fromkeys(named, size // count)
        return _Cut(self.axis % len(shape), widths, count, self.learning_rates)


# Path pattern to split. Patterns apply in order, also to parts of parts.
Splits = Mapping[str, Split]


def check(splits: Any) -> None:
    """Raise a ValueError unless splits are a mapping of path patterns to Split."""

    def check_one(where: str, split: Any) -> None:
        checks.kind(where, split, Split, "a jax_muon.Split")

    expected = "a mapping of path patterns to Split"
    checks.mapping("splits", splits, expected, check_one)


def with_splits(
    inner: optax.GradientTransformation, splits: Splits
) -> optax.GradientTransformationExtraArgs:
    """Run a transform on the parts of parameters.

    A parameter `attn/qkv/kernel` with the split `Split(("q", "k", "v"))` is seen by the
    inner transform as three: `attn/qkv/kernel/q`, `/k` and `/v`. A number of parts
    gives one, with a leading batch axis.

    Args:
      inner: any transform, such as a chain of pieces; recipes and `partition` take
        `matrices=jax_muon.read(params, splits=...)`.
      splits: path pattern to `Split`.

    Returns:
      A transform of the whole parameters, with the state of the parts.

    Raises:
      ValueError: at init and update, with path and shape: a pattern that matches no
        parameter, a split that does not fit.

    Examples:
      >>> tx = with_splits(optax.sgd(1.0), {"qkv": Split(("q", "k"), axis=0)})
      >>> state = tx.init({"qkv": jnp.zeros(4)})
      >>> tx.update({"qkv": jnp.arange(4.0)}, state)[0]["qkv"].tolist()
      [-0.0, -1.0, -2.0, -3.0]
    """
    inner = checks.as_transform("inner", inner)
    check(splits)

    def init_fn(params: optax.Params) -> Any:
        checks.arrays("params", params)
        parts = Parts.of(params, splits)
        notes.note("splits", stages=[cuts for _, cuts in parts.stages])
        return inner.init(parts.split(params))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        checks.gradients(updates, params)
        parts = Parts.of(updates, splits)
        if params is not None:
            params = parts.split(params)
        updates, state = inner.update(parts.split(updates), state, params, **extra_args)
        return parts.join(updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NamedParts:
    """The parts of a parameter, in its place in the tree.

    As a dictionary, but nnx.State would turn a dictionary into a State.
    """

    parts: dict[str, Any]

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys, and the names."""
        children = [(jax.tree_util.DictKey(k), v) for k, v in self.parts.items()]
        return children, tuple(self.parts)

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "NamedParts":
        """Rebuild the parts from names and children."""
        return cls(dict(zip(names, children, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The parts of one array, and what to multiply their updates by."""

    axis: int  # non-negative
    widths: Mapping[str, int]  # none: `count` parts as a leading batch axis
    count: int
    factors: Mapping[str, float]

    def split(self, x: Float[Array, "..."]) -> Any:
        x = self._undivided(x)
        if not self.widths:
            shape = (*x.shape[: self.axis], self.count, -1, *x.shape[self.axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), self.axis, _batch_axis(x.ndim))
        parts, start = {}, 0
        for name, width in self.widths.items():
            parts[name] = jax.lax.slice_in_dim(x, start, start + width, axis=self.axis)
            start += width
        return NamedParts(parts)

    def join(self, parts: Any, like: Any) -> Float[Array, "..."]:
        """The whole array, placed as `like`."""
        if not self.widths:
            x = jnp.moveaxis(parts, _batch_axis(parts.ndim - 1), self.axis)
            x = x.reshape(*x.shape[: self.axis], -1, *x.shape[self.axis + 2 :])
        else:
            factors = [float(self.factors.get(name, 1)) for name in self.widths]
            scaled = [
                parts.parts[name] if factor == 1 else parts.parts[name] * factor
                for name, factor in zip(self.widths, factors, strict=True)
            ]
            x = jnp.concatenate(scaled, axis=self.axis)
        if isinstance(like, jax.Array) and array_types.is_explicit(like):
            return jax.reshard(x, jax.typeof(like).sharding)
        return x

    def _undivided(self, x: Any) -> Any:
        """x without Explicit mesh axes on the axis whose parts they do not divide.

        They move to another axis if one is free, so that state stays divided.
        """
        if not isinstance(x, jax.Array) or not array_types.is_explicit(x):
            return x
        sharding = jax.typeof(x).sharding
        entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        moved, entries[self.axis] = entries[self.axis], None
        devices = specs.devices_over(moved, sharding.mesh.shape)
        if all(size % devices == 0 for size in self.widths.values() or [self.count]):
            return x
        free = (
            axis
            for axis, entry in enumerate(entries)
            if entry is None and axis != self.axis and x.shape[axis] % devices == 0
        )
        if (axis := next(free, None)) is not None:
            entries[axis] = moved
        return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*entries)))

    def spread(self, value: Any) -> Any:
        """The same value for every part."""
        return NamedParts(dict.fromkeys(self.widths, value)) if self.widths else value

    def read(self, whole: Parameter) -> list[Parameter]:
        """How the parts of a parameter are read, given how the whole is."""
        shape = list(whole.shape)
        parts = []
        for name, width in self.widths.items():
            shape[self.axis] = width
            role = names.projection(name) or whole.role
            path, sizes = f"{whole.path}/{name}", tuple(shape)
            parts.append(dataclasses.replace(whole, path=path, shape=sizes, role=role))
        if parts:
            return parts
        batch, axes = _batch_axis(len(shape)), whole.axes
        shape[self.axis] //= self.count
        shape.insert(batch, self.count)
        if axes is not None:
            before, fan_in, fan_out = (
                tuple(axis + (axis >= batch) for axis in side)
                for side in (axes.batch, axes.reduction, axes.output)
            )
            axes = MatrixAxes(tuple(sorted((*before, batch))), fan_in, fan_out)
        return [dataclasses.replace(whole, shape=tuple(shape), axes=axes)]


def _batch_axis(ndim: int) -> int:
    """Where equal parts of an array become a batch: in front of (in, out)."""
    return max(ndim - 2, 0)


def with_parts(
    arrays: Mapping[str, Any], stages: Sequence[Mapping[str, _Cut]]
) -> dict[str, Any]:
    """Arrays by path, of the named parts and of the whole parameters."""
    found = dict(arrays)
    for cuts in stages:
        for path in cuts.keys() & found.keys():
            parts = cuts[path].split(jnp.asarray(found[path]))
            for name, part in paths.leaves_with_paths(parts):
                found[f"{path}/{name}" if name else path] = part
    return found


@dataclasses.dataclass(frozen=True)
class Parts:
    """What splits do to one tree: cuts by path, in stages, and the tree before each.

    A parameter in a Flax box loses it while it is cut: NNX keeps a box for each
    variable, and would not find the parts in it again.
    """

    stages: tuple[tuple[Any, Mapping[str, _Cut]], ...]

    @classmethod
    def of(cls, tree: Any, splits: Splits) -> "Parts":
        """The cuts of a tree of arrays, or of their shapes."""
        check(splits)
        stages = []
        for pattern, split in splits.items():
            shapes = {p: tuple(x.shape) for p, x in paths.leaves_with_paths(tree)}
            paths.check_patterns_match("splits", [pattern], list(shapes))
            cuts = {
                path: split.cut(path, shape)
                for path, shape in shapes.items()
                if paths.matches(pattern, path)
            }
            stages.append((tree, cuts))
            tree = _map_cuts(lambda cut, x: jax.eval_shape(cut.split, x), cuts, tree)
        return cls(tuple(stages))

    def split(self, tree: Any) -> Any:
        """The tree of parts."""
        for _, cuts in self.stages:
            tree = _map_cuts(_Cut.split, cuts, tree)
        return tree

    def spread(self, tree: Any) -> Any:
        """A tree of anything, labels for instance, with the same for all parts."""
        for _, cuts in self.stages:
            tree = _map_cuts(_Cut.spread, cuts, tree)
        return tree

    def join(self, tree: Any) -> Any:
        """The tree of whole leaves, out of the updates of its parts."""

        def whole(cut: _Cut, leaf: Any, parts: Any) -> Any:
            return cut.join(parts, leaf)

        for before, cuts in reversed(self.stages):
            tree = _map_cuts(whole, cuts, before, tree, keep_boxes=True)
        return tree

    def read(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        """How the parts are read, given how the whole leaves are."""
        found = list(parameters.values())
        for _, cuts in self.stages:
            parts = (cuts[x.path].read(x) if x.path in cuts else [x] for x in found)
            found = [part for group in parts for part in group]
        return {parameter.path: parameter for parameter in found}


def _map_cuts(
    function: Callable[..., Any],
    cuts: Mapping[str, _Cut],
    tree: Any,
    *rest: Any,
    keep_boxes: bool = False,
) -> Any:
    """Map over the leaves that are cut; other leaves come from the last tree."""

    def apply(key_path: tuple[Any, ...], node: Any, *others: Any) -> Any:
        cut = cuts.get(paths.path_string(key_path))
        if cut is None:
            return others[-1] if others else node
        (leaf,) = jax.tree.leaves(node)
        result = function(cut, leaf, *others)
        return jax.tree.map(lambda _: result, node) if keep_boxes else result

    return jax.tree_util.tree_map_with_path(apply, tree, *rest, is_leaf=paths.is_box)
