"""How the parameters of one tree are read as matrices: a value to print, keep and test.

`jax_muon.read` makes a `Matrices` of a tree of parameters. Recipes, `partition` and the
pieces look parameters up in it by path. It holds no arrays, so one value serves every
step, every mesh and every trace.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_muon import axes as matrix_axes
from jax_muon import checks, doubts, trees
from jax_muon.axes import ADAMW, MUON, MatrixAxes, Parameter
from jax_muon.blocks import Block, Join, make_blocks
from jax_muon.tables import aligned, hints_below, shape_text, sizes_text

_READ = "jax_muon.read(params, loss_fn, batch)"


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
      >>> params = {"embed": jnp.ones((9, 4)), "up": jnp.ones((4, 8))}
      >>> matrices = jm.read(params, rules={"embed": "adamw", "*": "muon"})
      >>> matrices["up"].label, matrices["embed"].label
      ('muon', 'adamw')
    """

    parameters: Mapping[str, Parameter]
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joins: tuple[Join, ...] | None = None  # of the parts, if parameters are split

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
        reasons, hints = hints_below(
            [(x.label == MUON and x.doubt) or x.reason for x in self.values()]
        )
        rows += [
            (
                parameter.path,
                shape_text(parameter.shape),
                parameter.role,
                sizes_text(parameter.sizes) if parameter.label != ADAMW else "-",
                parameter.label,
                reason,
            )
            for parameter, reason in zip(self.values(), reasons, strict=True)
        ]
        return "\n".join([*aligned(rows), *hints])

    def axes(self, path: str) -> MatrixAxes:
        """Axes of a parameter that must be a matrix.

        Raises:
          ValueError: with path and shape, if it is not one, or is ambiguous.
        """
        parameter = self[path]
        if parameter.doubt is not None:
            raise ValueError(doubts.about(parameter))
        assert parameter.axes is not None
        return parameter.axes

    def labels(self, params: Any) -> Any:
        """The label of every parameter, for `optax.multi_transform`.

        A Flax box gets one label, so that it is masked as a whole.
        """
        return jax.tree_util.tree_map_with_path(
            lambda key_path, _: self[trees.path_string(key_path)].label,
            params,
            is_leaf=trees.is_box,
        )

    def group(self, labels: Iterable[str]) -> "Matrices":
        """The parameters with one of these labels, each of which must be a matrix.

        Raises:
          ValueError: with path and shape, for one that is not.
        """
        labels = tuple(labels)
        chosen = {
            path: parameter
            for path, parameter in self.items()
            if parameter.label in labels
        }
        for path in chosen:
            self.axes(path)
        return dataclasses.replace(self, parameters=chosen)

    def blocks(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Block]:
        """Which matrices of these parameters are orthogonalized as one.

        Args:
          names: their paths.
          shapes: of one device's shard of each; None for whole parameters.
        """
        for name in names:
            self.axes(name)  # raises unless it is a matrix
        members = [self[name] for name in names]
        shapes = [member.shape for member in members] if shapes is None else shapes
        return make_blocks(members, shapes, self.joins or ())


def of_tree(matrices: Matrices | None, tree: Any) -> Matrices:
    """The reading given to a piece; without one, each leaf as one matrix (in, out).

    Raises:
      ValueError: for a reading that splits parameters, which `partition` does; without
        one, with path and shape, for a leaf that is not one matrix.
    """
    if matrices is not None:
        checks.kind("matrices", matrices, Matrices, f"{_READ}, or None")
        if matrices.splits:
            raise ValueError(
                f"matrices= splits {', '.join(matrices.splits)}, which a piece would "
                "not apply; expected the piece within jax_muon.partition, which does"
            )
        return matrices
    matched = {}
    for path, leaf in trees.leaves_with_paths(tree):
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if len(shape) != 2 or matrix_axes.not_a_matrix(shape, dtype):
            raise ValueError(
                f"parameter {path!r} of shape {shape}: without `matrices` a piece "
                "treats every leaf as one matrix (in, out); expected "
                f"matrices={_READ}, or the piece within jax_muon.partition, which "
                "gives other parameters to another optimizer"
            )
        one_matrix = MatrixAxes((), (0,), (1,))
        matched[path] = Parameter(path, shape, dtype, MUON, "kernel", "", one_matrix)
    return Matrices(matched)
