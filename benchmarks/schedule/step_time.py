"""An estimate of a step's time: stated rates, laid on the schedule.

Products run one after another on the compute stream, and transfers one after another on
the communication stream, in the order of their starts and not before them; at a done
the compute stream waits for its transfer. Everything else, such as norms, takes no time
here, nor do launches and latencies: a bound from below, to compare layouts by.
"""

import dataclasses

from benchmarks.schedule.hlo import Module, Transfer


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

    @property
    def waiting(self) -> float:
        """How long products wait for transfers."""
        return self.step - self.products


def bytes_between_hosts(transfer: Transfer, gpus_per_host: int) -> float:
    """What a GPU sends through its own network card.

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


def estimate(module: Module, rates: Rates) -> Estimate:
    """The time of a step by these rates."""
    transfers = module.transfers()
    before = [work.flops / rates.flops for work in module.work_before()]
    events = sorted(
        [(t.start, True, t) for t in transfers]
        + [(t.done, False, t) for t in transfers if t.done > t.start],
        key=lambda event: event[:2],
    )
    clock = wire = reached = 0.0
    ends: dict[str, float] = {}
    for place, is_start, transfer in events:
        clock += before[place] - reached
        reached = before[place]
        if is_start:
            wire = max(wire, clock) + transfer_seconds(transfer, rates)
            ends[transfer.name] = wire
        if transfer.is_sync or not is_start:
            clock = max(clock, ends[transfer.name])
    return Estimate(
        step=clock + before[-1] - reached,
        products=before[-1],
        transfers=sum(transfer_seconds(t, rates) for t in transfers),
    )
