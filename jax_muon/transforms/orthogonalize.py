"""The one piece that needs whole matrices: every matrix to its polar factor."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_muon.base import checks, facts, trees
from jax_muon.base.array_types import reshard, specs_of
from jax_muon.base.specs import dividing, spec_names
from jax_muon.matrices.joins import Joined, joined_matrices, map_joined, map_stacks
from jax_muon.matrices.matrices import Join, check_matrices
from jax_muon.mesh.stacks import SMALL, Round, Shards, Stack, map_shards, stacks_of
from jax_muon.polar.factors import PolarExpress

Polar = Callable[[Float[Array, "*b m n"]], Float[Array, "*b m n"]]


@dataclasses.dataclass
class Orthogonalized:
    """What `orthogonalize` did, for tools."""

    # By path: how many matrices are one, mostly 1.
    joined: dict[str, int] = dataclasses.field(default_factory=dict)
    # On a mesh: stacks by all the paths that one `orthogonalize` got, and the devices
    # along each axis.
    stacks: dict[tuple[str, ...], list[Stack]] = dataclasses.field(default_factory=dict)
    rounds: dict[tuple[str, ...], list[Round]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


def orthogonalize(
    polar: Polar = PolarExpress(),
    *,
    joins: Sequence[Join] | None = None,
    small: int = SMALL,
) -> optax.GradientTransformation:
    """Replace every matrix by its polar factor: same directions, singular values one.

    Muon, https://kellerjordan.github.io/posts/muon/, of arrays (..., in, out). On a
    mesh of several devices, as `on_mesh` says or types show, each matrix is computed by
    one of those that have shards of it, see `mesh/stacks.py`.

    Args:
      polar: a function of arrays (..., m, n): `PolarExpress()`, `NewtonSchulz()`,
        `ExactPolar()`, or your own. It must treat each matrix independently, and
        commute with transposition and with permutations of rows and of columns: on a
        mesh matrices are transposed, and shards assembled in any order.
      joins: which matrices are orthogonalized as one (TEON, arXiv 2601.23261), as
        `matrices.joins` of what `jax_muon.find_matrices(..., joins=...)` returns.
      small: stacks of matrices of one shape with fewer elements in all are gathered
        and computed by every device that has shards of them.

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
        structure, (mesh, specs) = jax.tree.structure(updates), specs_of(flat)
        if mesh is None:
            joined = joined_matrices(joins, names, [x.shape for x in leaves])
            _record_joined(names, joined)
            compute = functools.partial(map_stacks, polar)
            leaves = map_joined(compute, joined, leaves)
            return jax.tree.unflatten(structure, leaves), state

        # On a mesh: stacks of each device's shards,
        sizes = dict(mesh.shape)
        shard_specs, joined, shards = _shards(polar, joins, flat, specs, mesh)
        # Rests of groups of `optax.multi_transform` start at different devices.
        start = zlib.crc32(" ".join(names).encode())
        stacks, rounds = stacks_of(shards, sizes, small=small, start=start)
        record = facts.record(Orthogonalized)
        record.stacks[tuple(names)] = stacks
        record.rounds[tuple(names)] = rounds
        record.sizes.update(sizes)
        _record_joined(names, joined)

        # and polar factors of them, on each device its part.
        compute = functools.partial(map_stacks, polar)
        if mesh.size > 1:
            whole = lambda x: map_stacks(polar, [x])[0]  # noqa: E731
            compute = functools.partial(map_shards, whole, stacks, rounds)
        on_device = jax.shard_map(
            functools.partial(map_joined, compute, joined),
            mesh=mesh,
            in_specs=(shard_specs,),
            out_specs=shard_specs,
        )
        leaves = on_device(list(map(reshard, leaves, shard_specs)))
        leaves = list(map(reshard, leaves, specs))
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _record_joined(names: Sequence[str], joined: Sequence[Joined]) -> None:
    by_size = sorted(joined, key=lambda x: x.size)
    sizes = {names[leaf]: x.size for x in by_size for leaf in x.leaves}
    facts.record(Orthogonalized).joined.update(sizes)


def _shards(
    polar: Polar,
    joins: Sequence[Join],
    flat: Sequence[tuple[str, Array]],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
) -> tuple[list[PartitionSpec], list[Joined], list[Shards]]:
    """Specs of leaves (..., in, out), and one device's joined matrices and shards.

    A leaf (12, 768, 3072) whose rows 8 devices divide is the shards (12, 96, 3072) on
    each; joined by twos, (6, 192, 3072). Joined leaves are sharded like the first of
    them. Scanned layers stay sharded if each device has whole joins; otherwise their
    axis is not sharded.
    """
    names, shapes = [path for path, _ in flat], [x.shape for _, x in flat]
    specs = [dividing(spec, mesh.shape) for spec in specs]

    def shard_shape(leaf: int) -> tuple[int, ...]:
        return NamedSharding(mesh, specs[leaf]).shard_shape(shapes[leaf])

    for joined in joined_matrices(joins, names, shapes):
        first, *others = joined.leaves
        for leaf in others:
            specs[leaf] = specs[first]
        if joined.size > 1 and not others:
            layers = shard_shape(first)[0]
            if layers % joined.size and layers < shapes[first][0]:
                specs[first] = PartitionSpec(None, *specs[first][1:])
    local = list(map(shard_shape, range(len(flat))))
    on_device = joined_matrices(joins, names, local)
    shards = []
    for x in on_device:
        leaf = x.leaves[0]
        (*_, fan_in, fan_out), spec = local[leaf], specs[leaf]
        sides = spec[:-2], spec[-2:-1], spec[-1:]
        batch, rows, columns = (spec_names(PartitionSpec(*side)) for side in sides)
        dtype = flat[leaf][1].dtype
        shape = x.batch, x.size * fan_in, fan_out
        back = _back_dtype(dtype, polar)
        shards.append(Shards(shape, dtype, back, batch, rows, columns))
    return specs, on_device, shards


def _back_dtype(dtype: np.dtype, polar: Polar) -> np.dtype:
    """The dtype in which factors return: that of the products, if it is narrower.

    They were rounded to it. Matrices are not sent in it: rounded before their norms
    are taken, they have other factors in bfloat16, by 1.5 %.
    """
    products = jnp.dtype(getattr(polar, "dtype", None) or dtype)
    before, after = jnp.finfo(dtype), jnp.finfo(products)
    fits = after.bits < before.bits and after.maxexp >= before.maxexp
    return products if fits else dtype
