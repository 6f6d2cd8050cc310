"""Collectives of a program or of a plan, and the bytes that they send."""

import dataclasses
import functools
from collections.abc import Collection

import numpy as np

from jax_muon.base.specs import Sizes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, as each device that takes part in it sees it."""

    kind: str  # reduce-scatter, all-gather, all-reduce, all-to-all or permute
    members: tuple[int, ...]  # devices that take part; others may do the same
    input_bytes: float  # of one device

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return len(self.members)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends, in the ring form of each collective."""
        others = (self.devices - 1) / self.devices
        factor = {
            "reduce-scatter": others,
            "all-to-all": others,
            "all-gather": self.devices - 1,
            "all-reduce": 2 * others,
            "permute": 1,
        }
        return factor[self.kind] * self.input_bytes

    def bytes_between_hosts(self, devices_per_host: int) -> float:
        """Bytes that a device sends to other hosts.

        Devices with neighbouring numbers share a host. A ring over several hosts
        crosses to the next host once, and the devices of a host each carry one of as
        many rings. An all-to-all sends every other device its own piece.
        """
        first, *others = (device // devices_per_host for device in self.members)
        outside = sum(host != first for host in others)
        if not outside:
            return 0.0
        if self.kind == "all-to-all":
            return self.sent_bytes * outside / len(others)
        return self.sent_bytes / (self.devices - outside)


def members_over(axes: Collection[str], sizes: Sizes) -> tuple[int, ...]:
    """The first device of a mesh, and those it reaches along these axes."""
    return _members_over(frozenset(axes), tuple(sizes.items()))


@functools.lru_cache(maxsize=64)
def _members_over(
    axes: frozenset[str], sizes: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    shape = [size for _, size in sizes]
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    along = tuple(slice(None) if name in axes else 0 for name, _ in sizes)
    return tuple(np.ravel(numbers[along]).tolist())
