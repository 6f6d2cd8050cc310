"""One matrix on several devices: each has part of the columns.

Devices exchange what they need for the three products of a step within a host:

  A <- X X^T      each device's columns give a part of the sum; everyone adds up some
                  rows of all parts, and gathers the rest;
  B <- A + q A A  everyone computes some columns, and gathers the rest;
  X <- X + p B X  everyone computes its own columns.

So the work is divided evenly, and each device sends three matrices (m, m) a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.base.dtypes import wide
from jax_muon.polar.products import Products


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


@dataclasses.dataclass(frozen=True)
class SharedProducts(Products):
    """The products of a step for matrices (*batch, m, n / size) of a team's columns.

    Parts of sums travel in the dtype of the result, and are added up in at least
    float32.
    """

    local: Products  # of one device
    team: Team

    def outer(self, x: Array, y: Array) -> Float[Array, "*batch m m"]:
        """X Y^T, whole on every device and not rounded below float32."""
        return self.team.gather(self._rows(self.local.outer(x, y)), x.ndim - 2)

    def largest(self, x: Array) -> Float[Array, "*batch 1 1"]:
        """The largest absolute value in each whole matrix."""
        return super().largest(self.team.gather(super().largest(x), x.ndim - 1))

    def gram(self, x: Array, k: float) -> Float[Array, "*batch m m"]:
        """The matrices k X X^T, whole on every device."""
        rows = self._rows(self.local.gram(x, k)).astype(x.dtype)
        return self.team.gather(rows, x.ndim - 2)

    def add_square(self, a: Array, k: float) -> Float[Array, "*batch m m"]:
        """A + k A A, for symmetric A, whole on every device."""
        width = a.shape[-1] // self.team.size
        start = self.team.rank() * width
        columns = jax.lax.dynamic_slice_in_dim(a, start, width, axis=-1)
        columns = self.local.add_product(columns, k, a)
        return self.team.gather(columns, a.ndim - 1)

    def add_product(self, x: Array, k: float, b: Array) -> Array:
        """X + k B X, for the columns of this device."""
        return self.local.add_product(x, k, b)

    def _rows(self, part: Array) -> Array:
        """This device's rows of the sum of all parts."""
        *batch, m, n = part.shape
        size = self.team.size
        parts = part.reshape(*batch, size, m // size, n)
        axis = len(batch)
        return jnp.sum(wide(self.team.swap(parts, axis, axis)), axis=axis)
