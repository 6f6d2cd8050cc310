"""One matrix on several devices: each has part of the columns.

A team of 8 devices of a host with (2048, 8192) has (2048, 1024) on each. In a step

  R = X X^T              each device's columns give a part of the sum; everyone adds up
                         some rows of all parts, and gathers the rest;
  P = a I + b R + c R R  everyone computes some columns, and gathers the rest;
  X <- P X               everyone computes its own columns.

so that the work is divided evenly, and each device sends three matrices (m, m) a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.base.dtypes import wide
from jax_muon.polar.products import (
    Products,
    Quintic,
    diagonal_of,
    matmul,
    polynomial,
)


@dataclasses.dataclass(frozen=True)
class Team:
    """Neighbours on a mesh, inside shard_map."""

    axes: tuple[str, ...]  # mesh axes that are cut into such teams
    size: int  # devices of one team, consecutive along `axes`

    def swap(self, x: Array, split: int, concat: int) -> Array:
        """An all-to-all within each team: split along one axis, joined on another."""
        return jax.lax.all_to_all(x, self.axes, split, concat, **self._within())

    def gather(self, x: Array, axis: int) -> Array:
        """The arrays of all devices of a team, side by side along an axis."""
        return jax.lax.all_gather(x, self.axes, axis=axis, **self._within())

    def swap_between(self, x: Array) -> Array:
        """An all-to-all along axis 0 between teams, of devices of the same rank."""
        count = jax.lax.axis_size(self.axes)
        if count == self.size:
            return x
        # Of 16 devices in teams of 8: [0, 8], [1, 9], ... [7, 15].
        peers = [[*range(rank, count, self.size)] for rank in range(self.size)]
        return jax.lax.all_to_all(
            x, self.axes, 0, 0, axis_index_groups=peers, tiled=True
        )

    def rank(self) -> Array:
        """The number of this device within its team."""
        return jax.lax.axis_index(self.axes) % self.size

    def _within(self) -> dict[str, Any]:
        """What makes a collective one of each team."""
        starts = range(0, jax.lax.axis_size(self.axes), self.size)
        teams = [[*range(start, start + self.size)] for start in starts]
        return {"axis_index_groups": teams, "tiled": True}


class SharedProducts(Products):
    """The products of matrices whose columns are divided over a team.

    X is (*batch, m, n / size), such as (1, 2048, 1024) of (2048, 8192) on 8 devices.
    R and P are whole on every device, (1, 2048, 2048). Parts of sums travel in the
    dtype of the result, and are added up in at least float32.
    """

    def __init__(self, local: Products, team: Team):
        """`local` are the products of one device."""
        self.local, self.team = local, team

    def squares(self, x: Array) -> Float[Array, "*batch 1 2"]:
        """The sums over all columns, added up in the same order on each device."""
        parts = self.team.gather(self.local.squares(x), x.ndim - 2)
        return jnp.sum(parts, axis=-2, keepdims=True)

    def gram(self, x: Array) -> Float[Array, "*batch m m"]:
        """X X^T, of all columns."""
        *batch, m, _ = x.shape
        size, axis = self.team.size, len(batch)
        # Each of 8 devices has a part of (1, 2048, 2048), summed over its 1024 columns.
        # It sends rows (1, 256, 2048) of it to each other one, and adds 8 such parts.
        parts = self.local.gram(x).reshape(*batch, size, m // size, m)
        rows = jnp.sum(wide(self.team.swap(parts, axis, axis)), axis=axis)
        return self.team.gather(rows.astype(x.dtype), axis)

    def polynomial(self, r: Array, quintic: Quintic) -> Float[Array, "*batch m m"]:
        """a I + b (R + q R R), for symmetric R."""
        width = r.shape[-1] // self.team.size
        start = self.team.rank() * width
        columns, diagonal = (
            jax.lax.dynamic_slice_in_dim(x, start, width, axis=-1)
            for x in (r, diagonal_of(r))
        )
        columns = polynomial(columns, matmul(r, columns), diagonal, quintic)
        return self.team.gather(columns, r.ndim - 1)

    def product(self, p: Array, x: Array) -> Array:
        """P X, for the columns of this device."""
        return self.local.product(p, x)
