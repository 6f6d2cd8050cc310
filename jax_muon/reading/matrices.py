"""One reading of a whole tree: which parameters are matrices, and along which axes.

`Reading` is what a user says about parameters; `Matrices` is what came of it for one
tree. A tree is read once, as a whole and before anything in it is masked, since what a
parameter is depends on what stands beside it. The pieces look parameters up by path.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from jax_muon.checks import check_arrays, check_flag, check_mapping
from jax_muon.reading import labels as given_labels
from jax_muon.reading import names as axis_names
from jax_muon.reading import numbers as given_numbers
from jax_muon.reading import paths
from jax_muon.reading.axes import MatrixAxes, leaf_axes, not_a_matrix
from jax_muon.reading.joins import (
    Block,
    Join,
    Joins,
    check_joins,
    find_joins,
    make_blocks,
)
from jax_muon.reading.labels import Labels, check_labels
from jax_muon.reading.names import Names, Table, check_names, check_table, names_of
from jax_muon.reading.numbers import DimensionNumbers
from jax_muon.reading.roles import ADAMW, MUON, Leaf, OutIn, Read, read_leaves
from jax_muon.reading.roles import reading as reading_of
from jax_muon.reading.rules import Rules, specs_by_names


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How one parameter is read.

    Attributes:
      path: where it stands in its tree.
      shape: its whole shape, whatever a device holds of it.
      dtype: of its elements.
      label: of the group that it belongs to.
      role: what it was taken for, such as "embedding" or "query".
      reason: why, in a few words.
      axes: which of its axes are batch, in and out; None if it is not a matrix.
      doubt: why it cannot be read as a matrix, or not without being told how.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    label: str
    role: str
    reason: str
    axes: MatrixAxes | None
    doubt: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """Number of matrices, their inputs and outputs; None if it is not a matrix."""
        if self.axes is None:
            return None
        fan_in, fan_out = self.axes.fan(self.shape)
        return math.prod(self.shape[axis] for axis in self.axes.batch), fan_in, fan_out


@dataclasses.dataclass(frozen=True)
class Matrices(Mapping[str, Parameter]):
    """The parameters of a tree by path, and which of their matrices are joined."""

    parameters: Mapping[str, Parameter]
    joins: tuple[Join, ...] = ()
    # Work of each device in this trace so far; all groups of one tree share it.
    load: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __getitem__(self, path: str) -> Parameter:
        """The parameter at a path."""
        if path not in self.parameters:
            raise ValueError(
                f"parameter {path!r} was not read; there are "
                + (", ".join(self.parameters) or "none")
                + "; expected the tree that `matrices` was read from"
            )
        return self.parameters[path]

    def __iter__(self) -> Iterator[str]:
        """All paths."""
        return iter(self.parameters)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self.parameters)

    def axes(self, path: str) -> MatrixAxes:
        """Axes of a parameter that has to be a matrix.

        Raises:
          ValueError: with path and shape, where it is not one or in doubt.
        """
        found = self[path]
        if found.doubt is not None:
            raise ValueError(found.doubt)
        assert found.axes is not None
        return found.axes

    def doubts(self, labels: Iterable[str]) -> tuple[Parameter, ...]:
        """Parameters with one of these labels that cannot be read as matrices."""
        labels = tuple(labels)
        return tuple(
            found
            for found in self.values()
            if found.label in labels and found.doubt is not None
        )

    def select(self, labels: Iterable[str]) -> "Matrices":
        """Parameters with one of these labels, each of which has to be a matrix."""
        labels = tuple(labels)
        chosen = {p: found for p, found in self.items() if found.label in labels}
        for path in chosen:
            self.axes(path)
        return dataclasses.replace(self, parameters=chosen)

    def with_joins(self, joins: Joins | None) -> "Matrices":
        """The same, with some matrices joined; see `find_joins`."""
        shapes = {path: found.shape for path, found in self.items()}
        found = find_joins(joins, {path: self.axes(path) for path in self}, shapes)
        matrices = dataclasses.replace(self, joins=found)
        matrices.blocks(list(self))
        return matrices

    def blocks(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Block]:
        """Which matrices of these parameters are orthogonalized as one.

        Args:
          names: their paths.
          shapes: of one device's piece of each; None for whole parameters.
        """
        return make_blocks(
            names,
            [self[name].shape for name in names] if shapes is None else shapes,
            [self.axes(name) for name in names],
            self.joins,
            dtypes=[self[name].dtype for name in names],
        )


@dataclasses.dataclass(frozen=True)
class Reading:
    """How parameters are to be read, where path and shape alone would mislead.

    Attributes:
      labels: a tree of labels (a prefix of the parameters' tree will do) or a function
        of the parameters that gives one; None for `label_params`.
      dimension_numbers: `optax.contrib.MuonDimensionNumbers` for all matrices; or path
        pattern to one, of which the first that matches counts; or a tree of them (a
        prefix will do), or a function of the parameters that gives one. Numbers that
        name a parameter make it a matrix; those of a module say how its matrices are
        read. None leaves a parameter as it is read otherwise; where it is to mean
        AdamW, as in `optax.contrib.muon`, use `Reading.from_optax`.
      splits: path pattern to `Split`, for parameters that hold several matrices side by
        side, such as a fused QKV kernel. Labels and dimension numbers speak of whole
        parameters, joins of parts.
      joins: path pattern to K: that many matrices of consecutive layers are
        orthogonalized as one; K alone joins queries, keys and values. See `find_joins`.
      names: logical axis names by path, which then decide; `axis_names(params)` gets
        them out of boxes and sharding metadata. Flax takes these off before an update,
        so that they are said here and not looked for in the tree; or a function of
        the tree that finds them, where gradients carry them too: `axis_names` for
        arrays of haliax.
      table: what axis names of your own mean, such as {"d_model": "stream"}; names
        made of common words, such as "kv_heads" or "moe_layers", are known. See
        `reading/names.py` for the kinds.
      out_in: True for kernels (out, in), as in PyTorch and equinox, False for (in,
        out), a function of the path for both; None looks at biases and neighbours.
      strict: whether a parameter that can be read in several ways is an error. False
        makes it a warning at init, and gives the parameter to "adamw".
    """

    labels: Labels = None
    dimension_numbers: DimensionNumbers = None
    splits: Mapping[str, Any] | None = None
    joins: Joins | None = None
    names: Names = None
    table: Table | None = None
    out_in: OutIn = None
    strict: bool = True

    def __post_init__(self) -> None:
        check_labels(self.labels)
        if self.splits is not None:
            check_mapping("splits", self.splits, "a mapping of path patterns to Split")
        check_joins(self.joins)
        check_names(self.names)
        check_table(self.table)
        if not callable(self.out_in) and self.out_in is not None:
            check_flag("out_in", self.out_in)
        check_flag("strict", self.strict)

    @classmethod
    def from_optax(cls, numbers: DimensionNumbers, **settings: Any) -> "Reading":
        """The reading that `optax.contrib.muon` makes of its dimension numbers.

        Args:
          numbers: what `optax.contrib.muon` takes as `muon_weight_dimension_numbers`: a
            tree (or a prefix of one) of `MuonDimensionNumbers` for matrices and None
            for AdamW; a function of the parameters that gives one; or None for all
            parameters of two axes.
          **settings: other attributes of the reading, such as `splits`.

        Returns:
          A `Reading` in which the tree decides alone.

        Examples:
          >>> tree = {"up": MuonDimensionNumbers(0, 1), "wte": None}
          >>> shapes = {"up": jnp.zeros((4, 8)), "wte": jnp.zeros((9, 4))}
          >>> found = Reading.from_optax(tree).read(shapes)
          >>> found["up"].label, found["wte"].label
          ('muon', 'adamw')
        """
        return cls(
            labels=functools.partial(given_numbers.optax_labels, numbers),
            dimension_numbers=functools.partial(given_numbers.optax_numbers, numbers),
            **settings,
        )

    def read(self, tree: Any, valid: Sequence[str] | None = None) -> Matrices:
        """Read every parameter of a tree, which is the whole model.

        Args:
          tree: parameters in any Flax form, or updates, or their shapes.
          valid: the labels that there may be; None for any.

        Returns:
          All parameters, without joins: `Matrices.with_joins` adds them to those that
          are matrices.

        Raises:
          ValueError: with the path, for two parameters of one path; labels, dimension
            numbers and names at paths that no parameter has; numbers for a parameter
            that the labels give to AdamW; axis names that are in no table.
        """
        check_arrays("params", tree)
        given = axis_names.lookup(self.names, tree)
        leaves = [
            _leaf(path, leaf, given.get(path))
            for path, leaf in paths.leaves_with_paths(tree)
        ]
        names = [leaf.path for leaf in leaves]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"two parameters have the path {twice!r}; expected paths that differ, "
                "since labels and patterns go by them"
            )
        numbers_of = given_numbers.lookup(self.dimension_numbers, tree, names)
        reads = read_leaves(
            leaves, out_in=self.out_in, table=self.table, strict_names=True
        )
        told = self.names is not None
        with given_labels.knowing(leaves, reads) if told else contextlib.nullcontext():
            label_of = given_labels.lookup(self.labels, tree, names, valid)
        if self.names is None:
            self._check_carried_names(tree, leaves, reads)
        for path, own in names_of(tree).items():
            if path in given and tuple(given[path]) != own:
                raise ValueError(
                    f"parameter {path!r} carries the axis names {own}, and the names "
                    f"of the reading are {tuple(given[path])}; expected the same"
                )
        found = {
            leaf.path: _parameter(
                leaf, read, label_of(leaf.path), *numbers_of(leaf.path)
            )
            for leaf, read in zip(leaves, reads, strict=True)
        }
        for path, parameter in found.items():
            if valid is not None and parameter.label not in valid:
                raise ValueError(
                    f"parameter {path!r} of shape {parameter.shape} has the label "
                    f"{parameter.label!r}; expected one of "
                    + ", ".join(map(repr, valid))
                )
        labels = {path: parameter.label for path, parameter in found.items()}
        given_numbers.check_used(self.dimension_numbers, labels)
        return Matrices(found)

    def specs(self, rules: Rules) -> Callable[[str], PartitionSpec]:
        """Where parameters lie on a mesh, by the names that say how they are read.

        Args:
          rules: pairs of an axis name and an axis of the mesh, several, or None for
            replicated, as Flax has them. They are tried in their order; one counts
            where its name has no mesh axis yet and its mesh axes divide no other axis
            of that parameter. A name without a rule is replicated.

        Returns:
          A function of the path, for `on_mesh(specs=...)`; a parameter without names is
          replicated.

        Raises:
          ValueError: no `names` by path; rules that are not pairs; with the path, a
            name that occurs twice.

        Examples:
          >>> reading = Reading(names={"wi/kernel": ("embed", "layers", "mlp")})
          >>> specs = reading.specs([("mlp", "tp"), ("embed", "fsdp")])
          >>> tuple(specs("wi/kernel"))
          ('fsdp', None, 'tp')
        """
        if not isinstance(self.names, Mapping):
            raise ValueError(
                "specs by names of a Reading without names by path; expected "
                "jax_muon.Reading(names=jax_muon.axis_names(params))"
            )
        return specs_by_names(self.names, rules)

    def _check_carried_names(
        self, tree: Any, leaves: Sequence[Leaf], reads: Sequence[Read]
    ) -> None:
        """Refuse names in the tree that say something else, as updates lack them."""
        carried = names_of(tree)
        if not carried or self.labels is not None or self.dimension_numbers is not None:
            return
        named = [dataclasses.replace(x, names=carried.get(x.path)) for x in leaves]
        others = read_leaves(named, out_in=self.out_in, table=self.table)
        for leaf, read, other in zip(leaves, reads, others, strict=True):
            if leaf.path not in carried or other.doubt is not None:
                continue
            if reading_of(read) != reading_of(other):
                raise ValueError(
                    f"parameter {leaf.path!r} of shape {leaf.shape} carries the axis "
                    f"names {carried[leaf.path]}, by which it is {reading_of(other)}, "
                    f"and without which it would be {reading_of(read)}; expected names "
                    "in the reading, such as "
                    "jax_muon.Reading(names=jax_muon.axis_names(params))"
                )


def _leaf(path: str, leaf: Any, names: tuple[str | None, ...] | None) -> Leaf:
    shape = tuple(getattr(leaf, "shape", ()))
    return Leaf(path, shape, jnp.result_type(leaf), names)


def _parameter(
    leaf: Leaf,
    read: Read,
    label: str | None,
    numbers: MuonDimensionNumbers | None,
    exactly: bool,
) -> Parameter:
    """One parameter, by what a user says of it, else as it was read.

    Dimension numbers for exactly this path make it a matrix, whatever its role.
    """
    role, axes, doubt, reason = read.role, read.axes, read.doubt, read.reason
    if label == ADAMW and exactly:
        raise ValueError(
            f"parameter {leaf.path!r} of shape {leaf.shape} is labelled {label!r}, and "
            f"dimension_numbers say how it is a matrix, {numbers}; expected no numbers "
            f"for it, or a label such as {MUON!r}"
        )
    if label is None:
        label = MUON if exactly else read.label
    elif axes is not None:
        doubt = None  # such as a single row, which the user says is a matrix
    if axes is None and doubt is None:
        doubt = not_a_matrix(leaf.path, leaf.shape, leaf.dtype)
    if numbers is not None:
        reason = "dimension numbers"
        try:
            axes, doubt = leaf_axes(leaf.path, leaf.shape, leaf.dtype, numbers), None
        except ValueError as error:
            axes, doubt = None, str(error)
    return Parameter(
        leaf.path, leaf.shape, leaf.dtype, label, role, reason, axes, doubt
    )
