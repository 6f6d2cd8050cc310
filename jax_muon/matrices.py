"""How the parameters of one tree are read as matrices: a value to print, keep and test.

`jax_muon.read` makes a `Matrices` of a tree of parameters. Recipes, `partition` and the
pieces look parameters up in it by path. It holds no arrays, so one value serves every
step, every mesh and every trace.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_muon import axes as matrix_axes
from jax_muon import checks, paths
from jax_muon import joins as joining
from jax_muon import splits as splitting
from jax_muon.axes import MatrixAxes
from jax_muon.reading import overrides
from jax_muon.reading import read as reading
from jax_muon.reading.decide import Parameter
from jax_muon.reading.vocabulary import ADAMW, MUON
from jax_muon.text import aligned, shape_text, sizes_text


class UnreadParameterError(KeyError, ValueError):
    """There is no parameter at this path; a KeyError, so that `get` and `in` work."""

    def __str__(self) -> str:
        """The message as it is, which KeyError would quote."""
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Matrices(Mapping[str, Parameter]):
    """The parameters of a tree by path, with their splits and joins; see `read`.

    `print` shows which parameter goes where and why.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> matrices = jm.read({"embed": jnp.ones((9, 4)), "up": jnp.ones((4, 8))})
      >>> matrices["up"].label, matrices["embed"].label
      ('muon', 'adamw')
    """

    parameters: Mapping[str, Parameter]
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joins: joining.Joins | None = None
    # Set by `group`: the joins among the matrices that it chose.
    joined: tuple[joining.Join, ...] | None = None

    def __getitem__(self, path: str) -> Parameter:
        if path not in self.parameters:
            raise UnreadParameterError(
                f"parameter {path!r} was not read; there are "
                + (", ".join(self.parameters) or "none")
                + "; expected the tree that `matrices` was read from"
            )
        return self.parameters[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __str__(self) -> str:
        """One line per parameter: its role, how it is read, its label and why."""
        rows = [("parameter", "shape", "role", "as matrices", "label", "why")]
        rows += [
            (
                found.path,
                shape_text(found.shape),
                found.role,
                sizes_text(found.sizes) if found.label != ADAMW else "-",
                found.label,
                found.reason if found.label == ADAMW else found.doubt or found.reason,
            )
            for found in self.values()
        ]
        return "\n".join(aligned(rows))

    def axes(self, path: str) -> MatrixAxes:
        """Axes of a parameter that must be a matrix.

        Raises:
          ValueError: with path and shape, if it is not one, or is ambiguous.
        """
        found = self[path]
        if found.doubt is not None:
            raise ValueError(found.doubt)
        assert found.axes is not None
        return found.axes

    def labels(self, params: Any) -> Any:
        """The label of every parameter, for `optax.multi_transform`.

        A Flax box gets one label, so that it is masked as a whole.
        """
        return jax.tree_util.tree_map_with_path(
            lambda key_path, _: self[paths.path_string(key_path)].label,
            params,
            is_leaf=paths.is_box,
        )

    def group(self, labels: Iterable[str]) -> "Matrices":
        """The parameters with one of these labels, each a matrix, and their joins.

        Raises:
          ValueError: with path and shape, for a parameter that is not a matrix, and for
            joins that match nothing or matrices of different shapes.
        """
        labels = tuple(labels)
        chosen = {path: found for path, found in self.items() if found.label in labels}
        found = dataclasses.replace(self, parameters=chosen)
        return dataclasses.replace(found, joined=found._joined(list(chosen)))

    def blocks(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> list[joining.Block]:
        """Which matrices of these parameters are orthogonalized as one.

        Args:
          names: their paths.
          shapes: of one device's shard of each; None for whole parameters.
        """
        own = [self[name] for name in names]
        shapes = [one.shape for one in own] if shapes is None else shapes
        return joining.make_blocks(own, shapes, self._joined(names))

    def _joined(self, names: Sequence[str]) -> tuple[joining.Join, ...]:
        """The joins that `group` chose, or else those among these matrices."""
        for name in names:
            self.axes(name)
        if self.joined is not None:
            return self.joined
        return joining.find_joins(self.joins, {name: self[name] for name in names})


def read(
    params: Any,
    *,
    rules: overrides.Rules = None,
    out_in: bool | None = None,
    splits: splitting.Splits | None = None,
    joins: joining.Joins | None = None,
    strict: bool = True,
) -> Matrices:
    """Find out which parameters are matrices, and along which axes.

    Embeddings, output heads, routers, biases, norms and other vectors get the label
    "adamw", stacked by scanned layers or not; so do depthwise convolutions, matrices
    with a single row or column, and whatever is empty or not real floating point. Every
    other parameter gets "muon", such as the kernels of Dense, DenseGeneral, Conv and
    Einsum and the factors of LoRA. `print` shows the result.

    Args:
      params: the whole model, or the shapes of its parameters, in any Flax form: linen
        dict, FrozenDict, boxed, nnx.State; or another pytree of arrays.
      rules: what you know better. Path pattern to a label, or to
        `optax.contrib.MuonDimensionNumbers`, such as {"stem": "adamw"}; the first
        pattern that matches wins, and the whole path of a parameter means that one
        alone. Dimension numbers given for a parameter's path make it a matrix; for a
        module's path they only say how its matrices are read. Or a tree of labels or of
        dimension numbers (a prefix will do), as `optax.contrib.muon` takes one. None
        means AdamW.
      out_in: True if kernels are (out, in), as in PyTorch and equinox, False if they
        are (in, out); None looks at biases and neighbours.
      splits: path pattern to `Split`, for parameters that hold several matrices side by
        side, such as a fused QKV kernel. Rules are about whole parameters, joins about
        the parts.
      joins: path pattern to K: K matrices of consecutive layers are orthogonalized as
        one. `{i}` in a pattern is the number of a layer, as in
        {"blocks/{i}/attn/q": 2}; a pattern without it joins along the scanned axis. Of
        two joins of one matrix the first counts. An integer K joins queries, keys and
        values (separately) across K consecutive layers of one shape.
      strict: False warns about ambiguous parameters and gives them the label "adamw".

    Returns:
      A `Matrices`. It depends on paths, shapes and dtypes alone.

    Raises:
      ValueError: one error that lists every ambiguous parameter with its possible
        readings and the rule that chooses one; with the path, for rules at paths that
        no parameter has, and dimension numbers that do not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> params = {"wte": jnp.zeros((9, 4)), "up": {"kernel": jnp.zeros((4, 8))}}
      >>> print(jm.read(params))
      parameter   shape   role        as matrices   label   why
      up/kernel   4 x 8   kernel      1 x (4, 8)    muon    a matrix (in, out)
      wte         9 x 4   embedding   -             adamw   an embedding, by its name
      >>> jm.read(params, rules={"up": "frozen"})["up/kernel"].label
      'frozen'
    """
    checks.arrays("params", params)
    joining.check(joins)
    checks.flag("strict", strict)
    if out_in is not None:
        checks.flag("out_in", out_in)
    leaves = reading.read_leaves(reading.leaves_of(params), out_in)
    found = overrides.apply(rules, leaves)
    ambiguous = [x for x in found.values() if x.label == MUON and x.doubt is not None]
    if ambiguous and strict:
        listed = "\n  ".join(str(one.doubt) for one in ambiguous)
        raise ValueError(
            f"{len(ambiguous)} of {len(found)} parameters cannot be read as matrices:"
            f"\n  {listed}"
        )
    for one in ambiguous:
        warnings.warn(f"{one.doubt}; it gets the label {ADAMW!r}", stacklevel=2)
        found[one.path] = dataclasses.replace(one, label=ADAMW)
    if splits:
        splitting.read_parts(found, splits)  # raises if patterns or widths do not fit
    return Matrices(found, dict(splits or {}), joins)


def of_tree(matrices: Matrices | None, tree: Any) -> Matrices:
    """The reading given to a piece; without one, each leaf as one matrix (in, out).

    Raises:
      ValueError: for a reading that splits parameters, which `partition` does; without
        one, with path and shape, for a leaf that is not one matrix.
    """
    if matrices is not None:
        checks.kind("matrices", matrices, Matrices, "jax_muon.read(params), or None")
        if matrices.splits:
            raise ValueError(
                f"matrices= splits {', '.join(matrices.splits)}, which a piece would "
                "not apply; expected the piece within jax_muon.partition, which does"
            )
        return matrices
    found = {}
    for path, leaf in paths.leaves_with_paths(tree):
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if len(shape) != 2 or matrix_axes.not_a_matrix(path, shape, dtype):
            raise ValueError(
                f"parameter {path!r} of shape {shape}: without `matrices` a piece "
                "treats every leaf as one matrix (in, out); expected "
                "matrices=jax_muon.read(params), or the piece within "
                "jax_muon.partition, which gives other parameters to another optimizer"
            )
        one_matrix = MatrixAxes((), (0,), (1,))
        found[path] = Parameter(path, shape, dtype, MUON, "kernel", "", one_matrix)
    return Matrices(found)
