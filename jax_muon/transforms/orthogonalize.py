"""The one piece that needs whole matrices: every matrix to its polar factor."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jaxtyping import Array, Float

from jax_muon.base import checks, facts, trees
from jax_muon.base.array_types import mesh_of_types, surroundings
from jax_muon.base.specs import dividing
from jax_muon.matrices.joins import (
    Factors,
    Joined,
    joined_matrices,
    map_joined,
    map_stacks,
)
from jax_muon.matrices.matrices import Given, Matrices, reading_of
from jax_muon.mesh import exchange, owners
from jax_muon.polar.factors import PolarExpress

Polar = Callable[[Float[Array, "*b m n"]], Float[Array, "*b m n"]]


def orthogonalize(
    polar: Polar = PolarExpress(),
    *,
    matrices: Given = None,
    small: int = 65536,
    team: int | None = None,
) -> optax.GradientTransformation:
    """Replace every matrix by its polar factor: same directions, singular values one.

    Muon, https://kellerjordan.github.io/posts/muon/. Joined matrices count as one
    (TEON, arXiv 2601.23261). On a mesh of several devices, which types of arrays show,
    each matrix is computed by one of those that hold it, or by a team of them. An
    update has three phases:

    1. read: the axes of every matrix, and which are joined to one;
    2. plan, on a mesh: the part of each leaf that a device holds, the pools of matrices
       of one shape, and the owners of each pool;
    3. map: leaves such as (768, 12, 64) become matrices (1, 768, 768), those of one
       shape are mapped to polar factors as one batch, and become leaves again.

    Args:
      polar: a function of arrays (..., m, n): `PolarExpress()`, `NewtonSchulz()`,
        `ExactPolar()`, or your own. It must treat each matrix independently, and
        commute with transposition and with permutations of rows and of columns: on a
        mesh matrices are transposed, and shards assembled in any order.
      matrices: the reading passed in by `partition`, or what
        `jax_muon.find_matrices` returns, or a function of the parameters that the piece
        sees, which returns one; None treats every leaf as one matrix (in, out).
      small: matrices with fewer elements are computed by all devices that hold them,
        and gathered if they are sharded, unless those of one shape together take less
        time with owners, by a count of bytes and FLOPs.
      team: most devices that share the work on one matrix, next to each other on the
        mesh, where that takes less time by a count of bytes and FLOPs. None: the
        devices of a host, see `on_mesh`. It needs a method `shared_dtype` of `polar`,
        as `NewtonSchulz` has.

    Raises:
      ValueError: at init and update, with path and shape, for a parameter that is not
        a floating-point matrix; at update, with its path, for one whose type does not
        show how it is sharded, see `on_mesh`, and for a polar factor of another shape,
        or complex.

    Examples:
      >>> updates = {"up": jnp.array([[3.0, 0.0], [0.0, -4.0]])}
      >>> tx = jm.orthogonalize(jm.ExactPolar())
      >>> tx.update(updates, tx.init(updates))[0]["up"].tolist()
      [[1.0, 0.0], [0.0, -1.0]]
    """
    if not callable(polar) or isinstance(polar, type):
        expected = "a function of arrays (..., m, n) such as PolarExpress()"
        expected += checks.injected(polar, "polar")
        checks.refuse("polar", polar, expected)
    checks.check_count("small", small, least=0)
    if team is not None:
        checks.check_count("team", team)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        params = checks.as_arrays("params", params)
        parameters = reading_of(matrices, params)
        for path, _ in trees.leaves_with_paths(params):
            parameters.axes(path)  # raises unless it is a matrix
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        # 1. Read.
        parameters = reading_of(matrices, updates)
        flat = trees.leaves_with_paths(updates)
        names, leaves = [path for path, _ in flat], [x for _, x in flat]
        structure, mesh = jax.tree.structure(updates), mesh_of_types(flat)
        factors: Factors = functools.partial(map_stacks, polar)
        if mesh is None:
            joined = joined_matrices(parameters, names, [x.shape for x in leaves])
            leaves = _map_matrices(factors, parameters, names, joined, leaves)
            return jax.tree.unflatten(structure, leaves), state

        # 2. Plan.
        sizes, devices_per_host = dict(mesh.shape), surroundings().devices_per_host
        specs = [dividing(jax.typeof(x).sharding.spec, sizes) for x in leaves]
        specs, joined, pools = owners.local_matrices(
            parameters, names, leaves, specs, mesh
        )
        # Sorted, since all processes have to build one program.
        labels = sorted({parameter.label for parameter in parameters.values()})
        pools = owners.with_owners(
            pools,
            sizes,
            small=small,
            team=devices_per_host if team is None else team,
            devices_per_host=devices_per_host,
            shared_dtype=getattr(polar, "shared_dtype", None),
            # The groups of `partition` start at different owners.
            start=zlib.crc32(" ".join(labels).encode()),
        )
        facts.note().pools[tuple(names)] = pools
        facts.note().sizes.update(sizes)

        # 3. Map, on each device its part.
        if mesh.size > 1:
            factors = functools.partial(exchange.map_pools, polar, pools=pools)
        on_device = functools.partial(_map_matrices, factors, parameters, names, joined)
        leaves = exchange.on_shards(on_device, leaves, specs, mesh)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _map_matrices(
    factors: Factors,
    matrices: Matrices,
    names: Sequence[str],
    joined: Sequence[Joined],
    leaves: Sequence[Array],
) -> list[Array]:
    """Leaves, or a device's shards of them, with their joined matrices mapped."""
    by_size = sorted(joined, key=lambda x: x.size)
    sizes = {names[leaf]: x.size for x in by_size for leaf in x.leaves}
    facts.note().joined.update(sizes)
    pairs = [(matrices.axes(name), x) for name, x in zip(names, leaves, strict=True)]
    views = map_joined(factors, joined, [axes.view(x) for axes, x in pairs])
    return [
        axes.undo(view, x.shape).astype(x.dtype)
        for (axes, x), view in zip(pairs, views, strict=True)
    ]
