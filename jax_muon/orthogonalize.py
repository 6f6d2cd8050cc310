"""The one piece that needs whole matrices: every matrix to its polar factor."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jax_muon import matrices as reading
from jax_muon import paths
from jax_muon.checks import (
    check_arrays,
    check_count,
    check_function,
    check_gradients,
)
from jax_muon.joins import Block, Factors, map_blocks
from jax_muon.matrices import Matrices
from jax_muon.mesh import owners, travel
from jax_muon.mesh.specs import Sizes, dividing, full_rank, local_types
from jax_muon.notes import note
from jax_muon.polar.factors import PolarExpress
from jax_muon.polar.stacks import map_stacks

Polar = Callable[[Float[Array, "*b m n"]], Float[Array, "*b m n"]]


def orthogonalize(
    polar: Polar = PolarExpress(),
    *,
    matrices: Matrices | None = None,
    small: int = 65536,
    max_stack: int = 256,
) -> optax.GradientTransformation:
    """Replace every matrix by its polar factor: same directions, singular values one.

    Matrices of one shape, and those of the transposed shape, go into one stack. Where
    the types of arrays show that they lie divided over a mesh, each matrix is computed
    on one of its devices, to which the others send their pieces; see `mesh/owners.py`.

    Args:
      polar: any function of (..., m, n) that treats matrices independently and commutes
        with transposition: `PolarExpress()`, `NewtonSchulz()`, `ExactPolar()`, each
        with settings of its own, or your own.
      matrices: the reading passed in by `partition`, or `jax_muon.read(params)`; None
        treats every leaf as one matrix (in, out).
        Joined matrices are orthogonalized as one (TEON).
      small: divided matrices with fewer elements are gathered and computed by all
        devices that hold them.
      max_stack: most matrices in one call of `polar`, which bounds temporary memory.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: at init and update, with path and shape, for a parameter that is not
        a floating-point matrix, or that lies on a mesh whose axes are Auto or manual,
        so that its type does not tell how it is divided: see `on_mesh`; at update, for
        a polar factor of another shape than its matrices. At once for a `polar` that is
        not a function, small below 0 or max_stack below 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> updates = {"up": jnp.array([[3.0, 0.0], [0.0, -4.0]])}
      >>> tx = jm.orthogonalize(jm.ExactPolar())
      >>> tx.update(updates, tx.init(updates))[0]["up"].tolist()
      [[1.0, 0.0], [0.0, -1.0]]

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; TEON, arXiv
      2601.23261.
    """
    check_function(
        "polar", polar, "a function of arrays (..., m, n) such as PolarExpress()"
    )
    reading.check(matrices)
    check_count("max_stack", max_stack)
    check_count("small", small, least=0)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        check_arrays("params", params)
        found = reading.of_tree(matrices, params)
        found.blocks([path for path, _ in paths.leaves_with_paths(params)])
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        check_gradients(updates, params)
        found = reading.of_tree(matrices, updates)
        flat = paths.leaves_with_paths(updates)
        names = [path for path, _ in flat]
        all_axes = [found.axes(path) for path in names]

        def factors_of(
            leaves: Sequence[Array], blocks: Sequence[Block], factors: Factors
        ) -> list[Array]:
            views = [axes.view(x) for axes, x in zip(all_axes, leaves, strict=True)]
            return [
                axes.undo(view, x.shape).astype(x.dtype)
                for axes, view, x in zip(
                    all_axes, map_blocks(factors, blocks, views), leaves, strict=True
                )
            ]

        leaves, treedef = jax.tree.flatten(updates)
        mesh = local_types(flat)
        if mesh is None:
            alike = functools.partial(_alike, polar)
            here = functools.partial(map_stacks, alike, max_stack=max_stack)
            leaves = factors_of(leaves, found.blocks(names), here)
            return jax.tree.unflatten(treedef, leaves), state

        sizes: Sizes = dict(mesh.shape)
        typed = [jax.typeof(x).sharding.spec for x in leaves]
        specs = [
            dividing(full_rank(spec, path, x.shape, sizes), sizes)
            for (path, x), spec in zip(flat, typed, strict=True)
        ]
        layout = owners.lay_out(found, names, specs, sizes)
        # Sorted, since all processes have to build one program.
        labels = {parameter.label for parameter in found.values()}
        pools = owners.make_pools(
            layout.pieces,
            layout.placements,
            sizes,
            small=small,
            start=zlib.crc32(" ".join(sorted(labels)).encode()),
        )
        note("pools", names=tuple(names), pools=pools, sizes=sizes)

        def local(leaves: list[Array]) -> list[Array]:
            return factors_of(
                leaves,
                layout.blocks,
                functools.partial(
                    travel.map_pools,
                    functools.partial(_alike, polar),
                    pools=pools,
                    sizes=sizes,
                    max_stack=max_stack,
                ),
            )

        leaves = travel.on_pieces(local, leaves, layout.specs, mesh)
        return jax.tree.unflatten(treedef, leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _alike(polar: Polar, x: Array) -> Array:
    """The factors, if they have the shape of their matrices."""
    y = polar(x)
    if jnp.shape(y) != x.shape:
        raise ValueError(
            f"polar={polar!r} made shape {jnp.shape(y)} out of {x.shape}; expected a "
            "function whose result has the shape of its argument"
        )
    return y
