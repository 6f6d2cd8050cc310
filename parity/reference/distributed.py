"""MuonAdamW over several processes, ZeRO-2 as nanochat has it, on torch.distributed.

Parameters are replicated, gradients are local, optimizer state is owned:
- Muon: K matrices of one shape are stacked and padded with zeros to ceil(K / N) N; each
  of N ranks owns ceil(K / N) whole matrices and their state.
- AdamW, 1024 elements or more: each rank owns a slice of dim 0 (padded likewise).
- AdamW, smaller: all-reduced, updated on every rank with replicated state.

A step goes through three phases for all of these: (1) launch the reduces; (2) wait,
update what is owned, launch the gather; (3) wait, write back. Every unit of work is a
generator that yields between phases, so that each phase is launched for all units
before the next begins. gloo of torch 2.13 has reduce_scatter_single and its mean.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from parity.reference.nanochat import (
    adamw_state,
    adamw_update,
    complete_groups,
    muon_state,
    muon_update,
)
from parity.reference.polar import as_stack
from parity.reference.replay import Named, replay

SMALL = 1024  # elements; below, AdamW state is replicated


def pad_rows(x: Tensor) -> Tensor:
    """Append zeros on dim 0 until every rank can own the same number of rows."""
    missing = -x.shape[0] % dist.get_world_size()
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def owned_rows(x: Tensor) -> Tensor:
    """Copy the rows of the padded `x` that this rank owns."""
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def reduce_scatter(x: Tensor) -> tuple[Tensor, dist.Work]:
    """Launch: the mean over ranks of the rows that this rank owns."""
    owned = torch.empty_like(owned_rows(x))
    work = dist.reduce_scatter_single(owned, x, op=dist.ReduceOp.AVG, async_op=True)
    return owned, work


def all_gather(owned: Tensor) -> tuple[Tensor, dist.Work]:
    """Launch: the owned rows of all ranks, one after another on dim 0."""
    full = owned.new_empty(owned.shape[0] * dist.get_world_size(), *owned.shape[1:])
    return full, dist.all_gather_single(full, owned, async_op=True)


def by_shape(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters of one shape together, in the order of their first appearance."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        groups.setdefault(p.shape, []).append(p)
    return list(groups.values())


class DistMuonAdamW(torch.optim.Optimizer):
    """`MuonAdamW` with the same groups, for gradients that differ between ranks.

    The state of a stack is kept under its first parameter. `grad` is left as it was.
    """

    def __init__(self, groups: Iterable[dict]):
        """See the class."""
        super().__init__(complete_groups(groups), defaults={})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter, on every rank, from the mean of the gradients."""
        units = [unit for group in self.param_groups for unit in self._units(group)]
        for _phase in ("launch reduces", "update, launch gathers", "write back"):
            for unit in units:
                next(unit, None)

    def _units(self, group: dict) -> list[Iterator[None]]:
        params = group["params"]
        if group["kind"] == "muon":
            return [self._muon(same, group) for same in by_shape(params)]
        return [
            self._adamw_small(p, group)
            if p.numel() < SMALL
            else self._adamw_large(p, group)
            for p in params
        ]

    def _muon(self, params: list[Tensor], group: dict) -> Iterator[None]:
        stacked = torch.cat([as_stack(p.grad) for p in params])  # (K, m, n)
        grad, reduced = reduce_scatter(pad_rows(stacked))  # (ceil(K / N), m, n)
        yield

        reduced.wait()
        w = owned_rows(pad_rows(torch.cat([as_stack(p) for p in params])))
        state = self.state[params[0]]
        if not state:
            state.update(muon_state(w))
        muon_update(w, grad, state["momentum"], state["second_moment"], group)
        full, gathered = all_gather(w)  # (ceil(K / N) N, m, n)
        yield

        gathered.wait()
        for p, new in zip(params, full, strict=False):  # padding is dropped
            p.copy_(new.view_as(p))

    def _adamw_large(self, p: Tensor, group: dict) -> Iterator[None]:
        grad, reduced = reduce_scatter(pad_rows(p.grad))
        yield

        reduced.wait()
        w = owned_rows(pad_rows(p))
        self._adamw(p, w, grad, group)
        full, gathered = all_gather(w)
        yield

        gathered.wait()
        p.copy_(full[: p.shape[0]])

    def _adamw_small(self, p: Tensor, group: dict) -> Iterator[None]:
        grad = p.grad.clone()
        reduced = dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)
        yield

        reduced.wait()
        self._adamw(p, p, grad, group)

    def _adamw(self, p: Tensor, w: Tensor, grad: Tensor, group: dict) -> None:
        state = self.state[p]
        if not state:
            state.update(adamw_state(w), count=0)
        state["count"] += 1
        adamw_update(w, grad, state["mean"], state["square"], state["count"], group)


@dataclass
class Run:
    """What `run_distributed` runs: `replay`'s arguments, gradients for each rank."""

    params: Named
    groups: list[dict]
    grads: list[list[Named]]  # [rank][step][name]
    rates: list[list[dict]] | None = None  # [step][group]


@dataclass
class RankResult:
    """What one rank ends with."""

    params: Named
    state_elements: int  # of all state tensors together


def run_distributed(world_size: int, runs: list[Run]) -> list[list[RankResult]]:
    """Run each of `runs` on `world_size` new gloo processes of one thread each.

    Returns:
        For each run, for each rank, its result. Starting the processes takes seconds:
        pass all runs at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(runs, Path(folder, "runs"))
        torch.multiprocessing.spawn(_rank, (world_size, folder), nprocs=world_size)
        results = [
            torch.load(Path(folder, f"rank{rank}"), weights_only=False)
            for rank in range(world_size)
        ]
    return [list(of_run) for of_run in zip(*results, strict=True)]


def _rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=rank,
        world_size=world_size,
    )
    try:
        runs = torch.load(Path(folder, "runs"), weights_only=False)
        results = [_run_here(run, rank) for run in runs]
    finally:
        dist.destroy_process_group()
    torch.save(results, Path(folder, f"rank{rank}"))
    # A thread of gloo may still hold tensors of finished work. If it lets go of them
    # while the interpreter shuts down, the process aborts (pytorch/pytorch#190489), so
    # this one ends without shutting its interpreter down.
    os._exit(0)


def _run_here(run: Run, rank: int) -> RankResult:
    optimizers = []

    def make(groups: list[dict]) -> DistMuonAdamW:
        optimizers.append(DistMuonAdamW(groups))
        return optimizers[-1]

    after = replay(make, run.params, run.groups, run.grads[rank], run.rates)
    tensors = [
        value
        for state in optimizers[0].state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return RankResult(after[-1], sum(t.numel() for t in tensors))
