"""An estimate of a step's time: stated rates, laid on the schedule.

Products run one after another on the compute stream, and transfers one after another on
the communication stream, in the order of their starts and not before them; at a done
the compute stream waits for its transfer. This is a bound from below, to compare
layouts by. It leaves out

- everything that is no product or transfer, such as norms, and the memory traffic of
  all of it: attention scores that are written and read cost as much as some products;
- launches of kernels, and other traffic on the network;
- latencies, unless `seconds` counts them: `nccl_seconds` does;
- that collectives reach less than the bandwidth of a link, unless the rates say so:
  `SLOWER` shows what less of it does.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.schedule.hlo import Instruction, Module, Transfer
from jax_muon.base.specs import Sizes
from jax_muon.mesh.stacks import Round
from jax_muon.tools.work import on_mesh

Takes = Callable[[Instruction], int]


@dataclasses.dataclass(frozen=True)
class Rates:
    """FLOP/s of products; bytes/s of one GPU within its host, and between hosts.

    An H100 SXM in round figures: half of its peak in bfloat16, which is 989 TFLOP/s;
    NVLink, 900 GB/s both ways (https://www.nvidia.com/en-us/data-center/h100/); and one
    NIC of 400 Gb/s for each GPU, as in a DGX H100.
    """

    flops: float = 500e12
    within: float = 450e9
    between: float = 50e9
    gpus_per_host: int = 8


SLOWER = Rates(within=350e9, between=42e9)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of its products, and of its transfers on their own."""

    step: float
    products: float
    transfers: float

    @property
    def wait(self) -> float:
        """Seconds in which products wait for transfers."""
        return self.step - self.products


def transfer_seconds(transfer: Transfer, rates: Rates) -> float:
    """Seconds of the slower part: bytes between hosts, or all of them over NVLink."""
    between = transfer.bytes_between_hosts(rates.gpus_per_host)
    alone = between == transfer.sent_bytes  # no other GPU of the host takes part
    within = 0 if alone else transfer.sent_bytes / rates.within
    return max(between / rates.between, within)


def nccl_seconds(transfer: Transfer, rates: Rates) -> float:
    """Seconds of a transfer with the latencies by which NCCL chooses its algorithms.

    The quicker one of a ring with the protocol LL128 and with Simple, or, for sums, a
    tree; from `src/graph/tuning.cc` of NCCL 2.19, for NVLink and a network. An
    all-to-all is not in that table: 20 microseconds, and 1 for each GPU of another
    host, is our assumption.
    """
    devices = transfer.devices
    if devices == 1:
        return 0.0
    at_full_rate = transfer_seconds(transfer, rates)
    hosts = len({x // rates.gpus_per_host for x in transfer.members})
    on_a_host = devices / hosts
    if transfer.kind == "all-to-all":
        return at_full_rate + 20e-6 + (devices - on_a_host) * 1e-6
    is_sum = transfer.kind == "all-reduce"
    hops = (1 + is_sum) * (devices - 1)
    between = 0 if hosts == 1 else 2 * hosts if is_sum else hosts - 1
    ll128 = 0.7 if hosts > 1 and on_a_host < 2 else 0.92  # of the bandwidth
    ways = [  # base, hop within a host, hop between hosts, in microseconds
        at_full_rate / reached + 1e-6 * (base + (hops - between) * near + between * far)
        for base, near, far, reached in ((14, 1.9, 4, ll128), (8.4, 3.4, 14, 1))
    ]
    if is_sum and hosts > 1:
        depth = (on_a_host - 1) * 1.25 + math.log2(hosts) * 8.5
        ways.append(at_full_rate / 0.85 + 1e-6 * (14 + 2 * depth))
    return min(ways)


def kinds_of_devices(rounds: Sequence[Round], sizes: Sizes) -> list[Takes]:
    """For each kind of device the branches that it takes.

    Devices that have different matrices in a round run different branches of a
    conditional, which `map_shards` marks with the number of the round. The more a
    device has to compute, the longer is its branch. Branches of different matrices with
    the same work are two.
    """
    branches = []  # of each device, in each round
    for one in rounds:
        flops = np.array([*(stack.flops for stack in one.stacks), 0])
        ranks = np.argsort(np.argsort(-flops, kind="stable"), kind="stable")
        by_device = on_mesh(one.stacks[0], ranks[one.kinds], sizes)
        branches.append(by_device.ravel().tolist())

    def takes(kind: tuple[int, ...]) -> Takes:
        found = {f"/round_{number}/": rank for number, rank in enumerate(kind)}
        return lambda line: next((x for w, x in found.items() if w in line.text), 0)

    return [takes(kind) for kind in sorted({*zip(*branches, strict=True)})]


def estimate(
    module: Module,
    rates: Rates,
    kinds: Sequence[Takes] | None = None,
    seconds: Callable[[Transfer, Rates], float] = transfer_seconds,
) -> Estimate:
    """The time of a step by these rates.

    Args:
      module: the step.
      rates: of products and transfers.
      kinds: for each kind of device which branch of a conditional it takes, where 0 is
        the longest; None for one kind that takes all the longest. A transfer starts
        when the last of them reaches it. Products are counted on the busiest.
      seconds: of one transfer by these rates.
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
            wire = max(wire, *clocks) + seconds(transfer, rates)
            ends[transfer.name] = wire
        if transfer.is_sync or not is_start:
            waited += np.maximum(ends[transfer.name] - clocks, 0)
    return Estimate(
        step=float(np.max(waited + work[:, -1])),
        products=float(np.max(work[:, -1])),
        transfers=sum(seconds(t, rates) for t in transfers),
    )
