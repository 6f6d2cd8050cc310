"""The one piece that needs whole matrices: every matrix to its polar factor."""

import dataclasses
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
from jax_muon.matrices.joins import Joined, joined_matrices, map_joined, map_stacks
from jax_muon.matrices.matrices import Join, check_matrices
from jax_muon.mesh import exchange, owners
from jax_muon.mesh.plan import Pool
from jax_muon.polar.factors import PolarExpress

Polar = Callable[[Float[Array, "*b m n"]], Float[Array, "*b m n"]]


@dataclasses.dataclass
class Orthogonalized:
    """What `orthogonalize` did, for tools."""

    # By path: how many matrices are one, mostly 1.
    joined: dict[str, int] = dataclasses.field(default_factory=dict)
    # On a mesh: pools by all the paths that one `orthogonalize` got, and the devices
    # along each axis.
    pools: dict[tuple[str, ...], list[Pool]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


def orthogonalize(
    polar: Polar = PolarExpress(),
    *,
    joins: Sequence[Join] | None = None,
    small: int = 65536,
    team: int | None = None,
) -> optax.GradientTransformation:
    """Replace every matrix by its polar factor: same directions, singular values one.

    Muon, https://kellerjordan.github.io/posts/muon/, of arrays (..., in, out). On a
    mesh of several devices, which types of arrays show, each matrix is computed by one
    of those that hold it, or by a team of them.

    Args:
      polar: a function of arrays (..., m, n): `PolarExpress()`, `NewtonSchulz()`,
        `ExactPolar()`, or your own. It must treat each matrix independently, and
        commute with transposition and with permutations of rows and of columns: on a
        mesh matrices are transposed, and shards assembled in any order.
      joins: which matrices are orthogonalized as one (TEON, arXiv 2601.23261), as
        `matrices.joins` of what `jax_muon.find_matrices(..., joins=...)` returns.
      small: matrices with fewer elements are computed by all devices that hold them,
        and gathered if they are sharded, unless those of one shape together take less
        time with owners, by a count of bytes and FLOPs.
      team: most devices that share the work on one matrix, next to each other on the
        mesh, where that takes less time by a count of bytes and FLOPs. None: the
        devices of a host, see `on_mesh`. It needs a method `shared_dtype` of `polar`,
        as `NewtonSchulz` has.

    Raises:
      ValueError: at init, with path and shape, for a parameter that is no array of
        floating-point matrices; at update, with its path, for one whose type does not
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

    joins = tuple(joins or ())

    def init_fn(params: optax.Params) -> optax.EmptyState:
        check_matrices(checks.as_arrays("params", params))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        flat = trees.leaves_with_paths(updates)
        names, leaves = [path for path, _ in flat], [x for _, x in flat]
        structure, mesh = jax.tree.structure(updates), mesh_of_types(flat)
        if mesh is None:
            joined = joined_matrices(joins, names, [x.shape for x in leaves])
            _note_joined(names, joined)
            factors = functools.partial(map_stacks, polar)
            leaves = map_joined(factors, joined, leaves)
            return jax.tree.unflatten(structure, leaves), state

        # On a mesh: plan,
        sizes, devices_per_host = dict(mesh.shape), surroundings().devices_per_host
        specs = [dividing(jax.typeof(x).sharding.spec, sizes) for x in leaves]
        specs, joined, pools = owners.local_matrices(joins, names, leaves, specs, mesh)
        pools = owners.with_owners(
            pools,
            sizes,
            small=small,
            team=devices_per_host if team is None else team,
            devices_per_host=devices_per_host,
            shared_dtype=getattr(polar, "shared_dtype", None),
            # Groups of `optax.multi_transform` start at different owners.
            start=zlib.crc32(" ".join(names).encode()),
        )
        noted = facts.note(Orthogonalized)
        noted.pools[tuple(names)] = pools
        noted.sizes.update(sizes)
        _note_joined(names, joined)

        # and map, on each device its part.
        factors = functools.partial(map_stacks, polar)
        if mesh.size > 1:
            factors = functools.partial(exchange.map_pools, polar, pools=pools)
        on_device = functools.partial(map_joined, factors, joined)
        leaves = exchange.on_shards(on_device, leaves, specs, mesh)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _note_joined(names: Sequence[str], joined: Sequence[Joined]) -> None:
    by_size = sorted(joined, key=lambda x: x.size)
    sizes = {names[leaf]: x.size for x in by_size for leaf in x.leaves}
    facts.note(Orthogonalized).joined.update(sizes)
