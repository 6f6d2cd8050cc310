"""An estimate of a step's time: stated rates, laid on the schedule.

Products run one after another on the compute stream, and transfers one after another on
the communication stream, in the order of their starts and not before them; at a done
the compute stream waits for its transfer. Everything else, such as norms, takes no time
here, nor do launches and latencies: a bound from below, to compare layouts by.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.schedule.hlo import Instruction, Module, Transfer
from jax_muon.mesh.owners import Pool, rounds
from jax_muon.mesh.specs import Sizes

Takes = Callable[[Instruction], int]


@dataclasses.dataclass(frozen=True)
class Rates:
    """FLOP/s of products; bytes/s of one GPU within its host, and between hosts."""

    flops: float = 500e12  # half of an H100's peak in bfloat16
    within: float = 450e9  # NVLink, one way
    between: float = 50e9  # one NIC of 400 Gb/s for each GPU
    gpus_per_host: int = 8


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of its products, and of its transfers on their own."""

    step: float
    products: float
    transfers: float


def bytes_between_hosts(transfer: Transfer, gpus_per_host: int) -> float:
    """Bytes that a GPU sends through its network card.

    A ring over several hosts crosses to the next host once, and the GPUs of a host each
    carry one of as many rings. An all-to-all sends every other GPU its own piece.
    """
    group = transfer.group
    neighbours = sum(x // gpus_per_host == group[0] // gpus_per_host for x in group)
    if neighbours == len(group):
        return 0
    if transfer.kind == "all-to-all":
        outside = (len(group) - neighbours) / (len(group) - 1)
        return transfer.sent_bytes * outside
    return transfer.sent_bytes / neighbours


def transfer_seconds(transfer: Transfer, rates: Rates) -> float:
    """Seconds of the slower part: bytes between hosts, or all of them over NVLink."""
    between = bytes_between_hosts(transfer, rates.gpus_per_host)
    alone = between == transfer.sent_bytes  # no other GPU of the host takes part
    within = 0 if alone else transfer.sent_bytes / rates.within
    return max(between / rates.between, within)


def kinds_of_devices(pools: Sequence[Pool], sizes: Sizes) -> list[Takes]:
    """For each kind of device the branches that it takes.

    Owners that have different matrices in a round of exchanges run different branches
    of a conditional, which `travel.map_pools` marks with the number of the round. The
    more a device has to compute, the longer is its branch.
    """
    uneven = {
        f"/round_{number}/": one
        for number, one in enumerate(rounds(pools))
        if len(one.kinds) > 1
    }
    branches = []  # of each device, in each round
    for one in uneven.values():
        alone = [
            dataclasses.replace(pool, counts=counts)
            for pool, counts in zip(
                one.pools, zip(*one.counts, strict=True), strict=True
            )
        ]
        load = sum((pool.load(sizes).ravel() for pool in alone), start=np.zeros(()))
        _, rank = np.unique(-load, return_inverse=True)
        branches.append(rank.tolist())

    def takes(kind: tuple[int, ...]) -> Takes:
        found = dict(zip(uneven, kind, strict=True))
        return lambda line: next((x for w, x in found.items() if w in line.text), 0)

    return [takes(kind) for kind in sorted({*zip(*branches, strict=True)})]


def estimate(
    module: Module, rates: Rates, kinds: Sequence[Takes] | None = None
) -> Estimate:
    """The time of a step by these rates.

    Args:
      module: the step.
      rates: of products and transfers.
      kinds: for each kind of device which branch of a conditional it takes, where 0 is
        the longest; None for one kind that takes all the longest. A transfer starts
        when the last of them reaches it. Products are counted on the busiest.
    """
    work = np.array(  # (kinds, places): seconds of products before each place
        [
            [flops / rates.flops for flops in module.flops_before(takes)]
            for takes in kinds or [lambda line: 0]
        ]
    )
    transfers = module.transfers()
    events = sorted(
        [(t.start, True, t) for t in transfers]
        + [(t.done, False, t) for t in transfers if t.done > t.start],
        key=lambda event: event[:2],
    )
    waited = np.zeros(len(work))  # by each kind
    wire, ends = 0.0, {}
    for place, is_start, transfer in events:
        clocks = waited + work[:, place]
        if is_start:
            wire = max(wire, *clocks) + transfer_seconds(transfer, rates)
            ends[transfer.name] = wire
        if transfer.is_sync or not is_start:
            waited += np.maximum(ends[transfer.name] - clocks, 0)
    return Estimate(
        step=float(np.max(waited + work[:, -1])),
        products=float(np.max(work[:, -1])),
        transfers=sum(transfer_seconds(t, rates) for t in transfers),
    )
